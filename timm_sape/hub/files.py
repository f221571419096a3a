"""The files of a saved model: are they there, and as they were written?"""
import os
import re
from pathlib import Path
from typing import Optional

from huggingface_hub.utils.sha import git_hash, sha_fileobj

from ..version import __version__
from .config import CONFIG_NAME
from .errors import no_pickles

LIBRARY = {'library_name': 'timm-sape', 'library_version': __version__}  # named in requests to the Hub


def sha256_of(file: Path) -> str:
    with file.open('rb') as f:
        return sha_fileobj(f).hex()


def find_file(folder: Path, name: str, sha256: Optional[str] = None) -> Path:
    """A file of a saved model.

    Raises:
        ValueError: If it is missing, or its content has another hash.
    """
    file = folder / name
    if not file.is_file():
        raise ValueError(
            f'{folder} has no {name}.{no_pickles(name)}' if folder.is_dir() else f'There is no folder {folder}.')
    if sha256 not in (None, sha256_of(file)):
        raise ValueError(
            f'{folder}: {name} is not what {CONFIG_NAME} says it is, by its checksum: it was cut off, damaged or '
            'replaced. Copy the folder again.')
    return file


def refuse_damage(repo_id: str, file: Path, sha256: Optional[str]) -> None:
    """Remove a damaged file from the cache.

    Args:
        repo_id: For the message.
        file: In the cache, a link to a file whose name is its hash on the Hub: SHA-256, or git's for small files.
            Where there are no links, the file itself, whose hash is not known.
        sha256: The hash in config.json, if it has one.

    Raises:
        ValueError: If its content has another hash.
    """
    link = os.readlink(file) if file.is_symlink() else file.name
    by_the_hub = os.path.basename(link)
    try:
        found = sha256_of(file)
        if re.fullmatch('[0-9a-f]{40}', by_the_hub):
            damaged = by_the_hub != git_hash(file.read_bytes())
        else:
            damaged = re.fullmatch('[0-9a-f]{64}', by_the_hub) and by_the_hub != found
    except FileNotFoundError:  # another process shares the cache and has just removed the file, as is done below
        found, damaged = '', True
    if damaged or sha256 not in (None, found):
        for path in (file.parent / link, file) if found else ():
            path.unlink(missing_ok=True)
        raise ValueError(
            f'{repo_id}: {file.name} is not what {"the Hub" if damaged else CONFIG_NAME} says it is, by its checksum: '
            'it was cut off, damaged or replaced. It was removed from the cache. Try again; if that does not help, ask '
            'the owner to push the model again.')
