"""Models to the Hugging Face Hub and back: timm's own files, with a card and with checks.

A repository of `push` is one that `timm.create_model('hf-hub:...')` and transformers' `AutoModelForImageClassification`
read, once this package has been imported. `load` reads it too, and checks what they cannot. For that config.json says
which version of this package wrote it, and what the weights are:

    "timm_sape": {"version": "0.1.0", "sha256": "..."}

Such a checksum finds damage and mix-ups, not malice: whoever may write to a repository may change both. A commit hash
as `revision=` pins both.
"""
import errno
import json
import os
import re
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Dict, Iterator, Optional, Sequence, Tuple, Union

import timm
import torch
import torch.nn as nn
from huggingface_hub import CommitInfo, HfApi, constants, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils.sha import git_hash, sha_fileobj
from timm.layers import to_2tuple
from timm.models import model_entrypoint, save_for_hf
from timm.models._hub import HF_SAFE_WEIGHTS_NAME, generate_readme
from timm.utils import unwrap_model

import timm_sape

from .encodings import get_encoding, parse_pos_enc

__all__ = ['load', 'push', 'save']

CONFIG_NAME = 'config.json'


def push(
        model: nn.Module,
        repo_id: str,
        *,
        token: Optional[str] = None,
        revision: Optional[str] = None,
        private: bool = False,
        commit_message: str = 'Add model',
        **description,
) -> CommitInfo:
    """Push a model to the Hub, with a card, after it has been saved and loaded back with identical logits.

    The card replaces the one that is there, and the Hub keeps the history. Files of other names stay, an old pickle
    included.

    Args:
        model: A model that `timm.create_model` has made, of any architecture.
        repo_id: `OWNER/NAME`, or `NAME` for a repository of your own; created if it is missing.
        token: Of an account that may write there. Default: that of `HF_TOKEN` or `hf auth login`.
        revision: Branch to push to, created if it is missing. Default: `main`.
        private: Whether a new repository is private.
        commit_message: Of the commit.
        description: As for `save`: `recipe`, `data`, `results`, `model_card`, `model_config`, `data_config`.

    Returns:
        huggingface_hub's description of the commit.

    Raises:
        ValueError: If the model cannot be saved or does not load back to identical logits, or the Hub refuses; nothing
            has been pushed.
        ConnectionError: If there is no connection to the Hub, or it breaks off.
    """
    api = HfApi(token=token, **_library())
    with TemporaryDirectory() as scratch:
        if '/' not in repo_id:
            with _plain_errors(repo_id, revision):
                repo_id = f'{api.whoami()["name"]}/{repo_id}'
        folder = Path(scratch, 'model')
        save(model, folder, repo_id=f'{repo_id}@{revision}' if revision else repo_id, **description)
        with _plain_errors(repo_id, revision):
            api.create_repo(repo_id, private=private, exist_ok=True)
            if revision is not None:
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            return api.upload_folder(
                repo_id=repo_id, folder_path=folder, revision=revision, commit_message=commit_message)


def save(
        model: nn.Module,
        folder: Union[str, Path],
        *,
        repo_id: Optional[str] = None,
        recipe: Any = None,
        data: Any = None,
        results: Any = None,
        model_card: Optional[Dict[str, Any]] = None,
        model_config: Optional[Dict[str, Any]] = None,
        data_config: Optional[Dict[str, Any]] = None,
) -> None:
    """Save a model as `push` would push it: safetensors, config.json and a card, that load back to identical logits.

    Args:
        model: A model that `timm.create_model` has made, of any architecture.
        folder: A folder that does not exist yet; it appears whole or not at all.
        repo_id: Repository (with `@revision`) that the card names. Default: it names the folder.
        recipe: How the model was trained, for the card: text, a list, or a dict of names and values.
        data: What it was trained on, likewise.
        results: What it reaches, likewise.
        model_card: What timm's model cards are made of (`description`, `details`, `license`, `tags`, `citation` ...),
            in place of ours. Default of the license: that of the weights it began with, as its config names it.
        model_config: Entries for config.json as in `timm.models.save_for_hf`, e.g. `label_names`.
        data_config: Preprocessing for config.json as there.

    Raises:
        ValueError: If the folder exists, or the model cannot be saved or does not load back to identical logits.
    """
    folder = Path(folder)
    if os.path.lexists(folder):
        raise ValueError(f'{folder} exists. Name a folder that does not.')
    model = unwrap_model(model)
    if not all(value.is_contiguous() for value in model.state_dict().values() if isinstance(value, torch.Tensor)):
        raise ValueError(
            'The model is in a memory format that files do not have (channels_last?). Save '
            'model.to(memory_format=torch.contiguous_format).')
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix='.saving-') as scratch:
        staged = Path(scratch, folder.name)
        try:
            save_for_hf(
                model, staged, model_config=model_config, data_config=data_config, safe_serialization=True)
        except OSError:
            raise
        except Exception as e:  # whatever a model that timm has not made may lack
            raise ValueError(
                f'The model cannot be saved as timm saves those that timm.create_model makes: {_described(e)}') from e
        config = json.loads((staged / CONFIG_NAME).read_text())
        # timm reads it from the root of the config; transformers would give it to create_model twice
        config['model_args'].pop('num_classes', None)
        config['timm_sape'] = {'version': timm_sape.__version__, 'sha256': _sha256(staged / HF_SAFE_WEIGHTS_NAME)}
        (staged / CONFIG_NAME).write_text(json.dumps(config, indent=2))
        _refuse_other_logits(model, staged, config['pretrained_cfg']['input_size'])

        source = f'hf-hub:{repo_id}' if repo_id else f'local-dir:{folder.name}'
        given = {'Recipe': recipe, 'Data': data, 'Results': results}
        card = _card(model, config, source, {k: v for k, v in given.items() if v is not None})
        readme = generate_readme({**card, **(model_card or {})}, source.split('/')[-1].removeprefix('local-dir:'))
        (staged / 'README.md').write_text(readme, encoding='utf-8')
        staged.rename(folder)


def load(
        repo_id: str,
        *,
        revision: Optional[str] = None,
        token: Optional[str] = None,
        cache_dir: Union[None, str, Path] = None,
        **kwargs,
) -> nn.Module:
    """`timm.create_model('hf-hub:...', pretrained=True)`, with checks and errors that say what is wrong.

    Only safetensors are read, and only if they are what the Hub and config.json say. Nothing of the repository is
    executed. A file that was damaged in the cache is taken out of it, so that the next call downloads it anew.

    Args:
        repo_id: `OWNER/NAME`, with or without `hf-hub:`, with or without `@` and a revision.
        revision: Branch, tag, or commit hash.
        token: Of an account that may read it. Default: that of `HF_TOKEN` or `hf auth login`.
        cache_dir: Folder for downloads. Default: that of huggingface_hub.
        kwargs: What `timm.create_model` accepts: `num_classes`, `img_size` ...

    Raises:
        ValueError: If the repository, the token or a file is not what it must be, or it was written by a newer version
            of this package, or names an encoding that is not known.
        ConnectionError: If there is no connection to the Hub, or it breaks off.
        OSError: If the disk is full.
    """
    repo_id = repo_id.removeprefix('hf-hub:')
    folder = repo_id.removeprefix('local-dir:')
    if folder != repo_id or repo_id.count('/') != 1 and Path(folder).is_dir():
        raise ValueError(
            f'{repo_id} is a folder, not a repository of the Hub: '
            f"timm.create_model('local-dir:{folder}', pretrained=True) loads it.")

    repo_id, _, named = repo_id.partition('@')
    if named and revision not in (None, named):
        raise ValueError(f'{repo_id}@{named} and revision={revision!r} are two revisions. Give one.')
    revision = named or revision

    def download(name: str, revision: Optional[str], sha256: Optional[str] = None) -> Path:
        with _plain_errors(repo_id, revision, name):
            file = hf_hub_download(
                repo_id, name, revision=revision, token=token, cache_dir=cache_dir, **_library())
        _refuse_damage(repo_id, Path(file), sha256)
        return Path(file)

    config_file = download(CONFIG_NAME, revision)
    try:
        config = json.loads(config_file.read_text(encoding='utf-8'))
        architecture, args = config['architecture'], config.get('model_args', {})
        is_known, pos_enc = timm.is_model(architecture), args.get('pos_enc')
        written_by = config.get('timm_sape', {})
        is_newer = _release(written_by.get('version', '')) > _release(timm_sape.__version__)
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise ValueError(f'{repo_id}: {CONFIG_NAME} is not that of a timm model ({_described(e)}).') from e
    if is_newer:
        raise ValueError(
            f'{repo_id} was written by timm-sape {written_by["version"]}, newer than {timm_sape.__version__}, which is '
            'installed: pip install -U timm-sape.')
    if not is_known:
        raise ValueError(
            f'{repo_id} is a {architecture!r}, which neither timm {timm.__version__} nor timm-sape '
            f'{timm_sape.__version__} knows. If another package registers it, import that first.')
    try:
        if pos_enc is not None:
            parse_pos_enc(pos_enc, args.get('pos_enc_kwargs'))
    except Exception as e:  # whatever may stand there
        raise ValueError(
            f'{repo_id}: timm-sape {timm_sape.__version__} cannot make its position encoding. If another package '
            f'registers it, import that first. ({_described(e)})') from e
    # of the same commit, by whose hash the folder is named
    weights = download(HF_SAFE_WEIGHTS_NAME, config_file.parent.name, written_by.get('sha256'))
    try:
        return timm.create_model(f'local-dir:{weights.parent}', pretrained=True, **kwargs)
    except OSError:
        raise
    except Exception as e:  # whatever a config may make timm do
        raise ValueError(f'{repo_id}: {_described(e)}') from e


def _library() -> Dict[str, str]:
    return {'library_name': 'timm-sape', 'library_version': timm_sape.__version__}


def _release(version: str) -> Tuple[int, ...]:
    """Major and minor version; empty if there is none."""
    match = re.match(r'(\d+)\.(\d+)', version)
    return tuple(map(int, match.groups())) if match else ()


def _sha256(file: Path) -> str:
    with file.open('rb') as f:
        return sha_fileobj(f).hex()


def _described(error: BaseException, most: int = 300) -> str:
    """An error in one line that is not too long. Of a KeyError or the like, the message alone says nothing."""
    text = ' '.join(str(error).split())
    text = text if type(error) is ValueError else f'{type(error).__name__}: {text}'
    return text if len(text) <= most else f'{text[:most]} ...'


@torch.no_grad()
def _refuse_other_logits(model: nn.Module, folder: Path, input_size: Sequence[int]) -> None:
    """Load a saved model back, on the device and with the dtype of the original, and compare.

    Args:
        model: The original.
        folder: What it has been saved to.
        input_size: (channels, height, width) of images.

    Raises:
        ValueError: If it cannot be loaded, or an entry of its state or a logit is not the same, bit for bit.
    """
    p = next(model.parameters())
    x = torch.randn(2, *input_size, generator=torch.Generator().manual_seed(0)).to(p)
    modes = [(module, module.training) for module in model.modules()]
    try:
        logits = model.eval()(x)
    finally:
        for module, mode in modes:
            module.training = mode
    if not logits.isfinite().all():
        raise ValueError('Not saved, since its logits for random images are not finite.')

    try:
        with torch.random.fork_rng(devices=[]):  # to save a model in the middle of a training must not change it
            loaded = timm.create_model(f'local-dir:{folder}', pretrained=True)
    except Exception as e:
        raise ValueError(f'Not saved, since it could not be loaded back: {_described(e)}') from e
    loaded.to(device=p.device, dtype=p.dtype).eval()
    state = model.state_dict()
    changed = [name for name, value in loaded.state_dict().items() if not torch.equal(value, state[name])]
    if changed:
        raise ValueError(
            f'Not saved, since {len(changed)} entries such as {changed[0]} have other values when it is loaded back in '
            'float32: convert it first, model.float().')
    again = loaded(x)
    if not torch.equal(again, logits):
        raise ValueError(
            f'Not saved, since its logits differ by up to {(again - logits).abs().max():.2g} when it is loaded back. '
            'Something was changed after timm.create_model that is no parameter: give it to create_model instead.')


def _card(model: nn.Module, config: Dict[str, Any], source: str, given: Dict[str, Any]) -> Dict[str, Any]:
    """What timm makes a card of.

    Args:
        model: The model.
        config: Its config.json.
        source: What `timm.create_model` loads it by.
        given: What the user says about it.
    """
    args, cfg = config['model_args'], config['pretrained_cfg']
    details = {
        'Architecture': f'`{config["architecture"]}`',
        'Parameters': f'{sum(p.numel() for p in model.parameters()):,}',
        'Image size': '{} x {}, {} channels'.format(
            *to_2tuple(args.get('img_size') or cfg['input_size'][1:]), cfg['input_size'][0]),
        'Classes': config['num_classes'],
    }
    if 'pos_enc' in args:
        parts = parse_pos_enc(args['pos_enc'], args.get('pos_enc_kwargs'))
        papers = {name: get_encoding(name).paper for name in parts}
        details['Position encoding'] = [
            f'`{name}`' + (f' {keywords}' if keywords else '') + (f', {papers[name]}' if papers[name] else '')
            for name, keywords in parts.items()]
    details.update(given)
    details['Arguments'] = f'`{json.dumps(args)}`'
    details['Written by'] = f'timm-sape {timm_sape.__version__}, timm {timm.__version__}, torch {torch.__version__}'
    encoding = f' with the position encoding `{args["pos_enc"]}`' if 'pos_enc' in args else ''
    is_stock = model_entrypoint(config['architecture']).__module__.startswith('timm.models.')
    needs = '' if is_stock else ' It needs the package timm-sape, whose import registers it with timm.'
    return {
        'tags': ['image-classification', 'timm', 'transformers', *(() if is_stock else ('timm-sape',))],
        'license': cfg.get('license', 'unknown'),
        'description': f'A model for images{encoding}.{needs}',
        'details': details,
        'usage': USAGE.format(source=source, imports='' if is_stock else IMPORT),
    }


IMPORT = 'import timm_sape  # registers the model: without it, timm says "Unknown model"\n'
USAGE = """```python
import timm
{imports}
model = timm.create_model({source!r}, pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
```"""


def _refuse_damage(repo_id: str, file: Path, sha256: Optional[str]) -> None:
    """Take a file that is not what it should be out of the cache.

    Args:
        repo_id: For the message.
        file: In the cache: a link to a file that is named by what the Hub calls it, the SHA-256 of its content, or
            git's hash for small files; where there are no links, the file itself, and the name is lost.
        sha256: What config.json says, if it does.

    Raises:
        ValueError: If its content has another hash.
    """
    link = os.readlink(file) if file.is_symlink() else file.name
    found, by_the_hub = _sha256(file), os.path.basename(link)
    if re.fullmatch('[0-9a-f]{40}', by_the_hub):
        damaged = by_the_hub != git_hash(file.read_bytes())
    else:
        damaged = re.fullmatch('[0-9a-f]{64}', by_the_hub) and by_the_hub != found
    if damaged or sha256 not in (None, found):
        (file.parent / link).unlink()
        file.unlink(missing_ok=True)
        raise ValueError(
            f'{repo_id}: {file.name} is not what {"the Hub" if damaged else CONFIG_NAME} says it is, by its checksum: '
            'it was cut off, damaged or replaced. It has been taken out of the cache. Try again, and if that does not '
            'help, ask the owner to push the model again.')


@contextmanager
def _plain_errors(repo_id: str, revision: Optional[str], name: str = 'the model') -> Iterator[None]:
    """Say in one line what huggingface_hub and what it stands on say in many ways.

    Args:
        repo_id: The repository.
        revision: Its revision.
        name: The file that is on its way.
    """
    try:
        yield
    except Exception as e:  # of the HTTP client there is no common class over huggingface_hub's versions
        status = getattr(getattr(e, 'response', None), 'status_code', None)
        if isinstance(e, LocalEntryNotFoundError):  # also one of the others
            error = ConnectionError(
                f'{constants.ENDPOINT} cannot be reached ({_described(e.__cause__ or e)}), and {name} of {repo_id} is '
                'not in the cache.')
        elif isinstance(e, GatedRepoError):
            error = ValueError(f'{repo_id} is gated: ask for access on its page, and give a token of that account.')
        elif isinstance(e, RepositoryNotFoundError):
            error = ValueError(
                f'There is no repository {repo_id!r} at {constants.ENDPOINT}, or it is private and no token of an '
                'account that may see it was given (token=, HF_TOKEN, `hf auth login`).')
        elif isinstance(e, RevisionNotFoundError):
            error = ValueError(f'{repo_id} has no revision {revision!r}.')
        elif isinstance(e, EntryNotFoundError):
            hint = ' Pickles, which can execute code, are not read.' if name == HF_SAFE_WEIGHTS_NAME else ''
            error = ValueError(f'{repo_id} has no {name}.{hint}')
        elif status == 401:
            error = ValueError(
                f'{constants.ENDPOINT} does not accept the token (token=, HF_TOKEN, `hf auth login`): is it whole, and '
                'still valid?')
        elif status == 403:
            error = ValueError(f'The account of the token has no permission for this in {repo_id}.')
        elif getattr(e, 'errno', None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            error = OSError(
                e.errno, f'The disk is full, or a limit for files is reached: {name} of {repo_id} has no place. Make '
                'room, or choose another disk by HF_HOME or cache_dir=')
        elif isinstance(e, (ValueError, TypeError)) or getattr(e, 'errno', None) is not None:
            raise
        else:
            reason = f'{type(e).__name__}: {str(e).strip()}'.splitlines()[0]  # advice follows, for other callers
            error = ConnectionError(
                f'The connection to {constants.ENDPOINT} failed ({reason}). What did not arrive whole is not used; try '
                'again.')
        raise error from e
