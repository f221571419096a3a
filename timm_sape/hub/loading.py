"""Load a model from a folder or from the Hub, with checks of its files."""
import os
from pathlib import Path
from typing import Optional, Union

import timm
import torch.nn as nn
from huggingface_hub import hf_hub_download
from timm.models._hub import HF_SAFE_WEIGHTS_NAME

from .config import CONFIG_NAME, read_config
from .errors import AGAIN, described, plain_errors, why_unreachable
from .files import LIBRARY, find_file, refuse_damage
from .fit import refuse_misfit, wrong_entry


def load(
        repo_id: Union[str, Path],
        *,
        revision: Optional[str] = None,
        token: Optional[str] = None,
        cache_dir: Union[None, str, Path] = None,
        **kwargs,
) -> nn.Module:
    """Load a model from a folder or from the Hub, with checks.

    Like `timm.create_model('hf-hub:...', pretrained=True)`, but only safetensors are read, and only if they have the
    checksum that the Hub and config.json say. No code of the repository is executed. A damaged file is removed from the
    cache, so that the next call downloads it again. Errors are one line.

    If a value in config.json was changed to another valid one, such as another activation, the model is another one. No
    check can see that.

    Args:
        repo_id: A folder that `save` has written, as a path, a string, or with `local-dir:`; or a repository,
            `OWNER/NAME`, with or without `@REVISION`. If there is a folder of that name too, `hf-hub:OWNER/NAME`.
        revision: Branch, tag, or commit hash of a repository.
        token: Of an account that may read it. Default: the one in `HF_TOKEN` or of `hf auth login`.
        cache_dir: Folder for downloads. Default: that of huggingface_hub.
        kwargs: Passed to `timm.create_model`: `num_classes`, `img_size` ...

    Raises:
        ValueError: If there is no such repository, the token is refused, or a file is missing, damaged or wrong, was
            written by a newer version of this package, or names an encoding that is not registered.
        ConnectionError: If the Hub cannot be reached, or the connection breaks off.
        OSError: If the disk is full.
    """
    named = os.fspath(repo_id)
    folder = Path(os.path.expanduser(named.removeprefix('local-dir:')))
    is_folder = named.startswith('local-dir:') or not named.startswith('hf-hub:') and folder.is_dir()
    if is_folder or isinstance(repo_id, Path):
        where = str(folder)
        if revision is not None:
            raise ValueError(f'{where} is a folder and has no revision {revision!r}. Write hf-hub:{where} for the Hub.')
        config = read_config(where, find_file(folder, CONFIG_NAME))
        find_file(folder, HF_SAFE_WEIGHTS_NAME, config.get('timm_sape', {}).get('sha256'))
    else:
        where, _, at = named.removeprefix('hf-hub:').partition('@')
        if not named.startswith('hf-hub:') and Path(where).is_file():
            raise ValueError(
                f'{where!r} is a file. Create the model with checkpoint_path={where!r}, then timm_sape.hub.save it.')
        if '/' not in where:
            raise ValueError(f'{where!r} is neither an existing folder nor OWNER/NAME of a repository.')
        if at and revision not in (None, at):
            raise ValueError(f'{where}@{at} and revision={revision!r} are two revisions. Give one.')

        def download(name: str, revision: Optional[str], sha256: Optional[str] = None) -> Path:
            with plain_errors(where, revision, name, unreachable):
                file = hf_hub_download(
                    where, name, revision=revision, token=token, cache_dir=cache_dir,
                    local_files_only=unreachable is not None, **LIBRARY)
            refuse_damage(where, Path(file), sha256)
            return Path(file)

        unreachable = why_unreachable()
        file = download(CONFIG_NAME, at or revision)
        config = read_config(where, file)
        folder = file.parent  # named by the hash of the commit, so the weights come from the same one
        download(HF_SAFE_WEIGHTS_NAME, folder.name, config.get('timm_sape', {}).get('sha256'))
    refuse_misfit(where, folder, config)
    try:
        return timm.create_model(f'local-dir:{folder}', pretrained=True, **kwargs)
    except OSError:
        raise
    except Exception as e:  # timm does not check the values in a config
        culprit = wrong_entry(config, folder)
        fix = f'. {AGAIN}' if culprit or not kwargs else ''
        raise ValueError(f'{where}: {culprit}{described(e).rstrip(".")}{fix}') from e
