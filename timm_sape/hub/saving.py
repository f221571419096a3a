"""Save a model to a folder or to the Hub, after checking that it loads back with identical logits."""
import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Dict, Optional, Sequence, Union

import timm
import torch
import torch.nn as nn
from huggingface_hub import CommitInfo, HfApi
from timm.models import get_model_input_config, save_for_hf
from timm.models._hub import HF_SAFE_WEIGHTS_NAME, generate_readme

from ..version import __version__
from ..wrappers import unwrapped
from .card import make_card
from .config import CONFIG_NAME, check_label_names, read_config
from .errors import described, plain_errors, short
from .files import LIBRARY, sha256_of

# What timm reads of a model card, and of a description of preprocessing. It drops other entries, such as misspelt ones.
CARD = (
    'tags', 'library_name', 'license', 'license_name', 'license_link', 'description', 'details', 'usage', 'comparison',
    'citation')
PREPROCESSING = (
    'input_size', 'img_size', 'in_chans', 'chans', 'test_input_size', 'interpolation', 'crop_pct', 'test_crop_pct',
    'crop_mode', 'mean', 'std', 'model_kwargs')


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
    """Push a model to the Hub with a card, after checking that it loads back with identical logits.

    The new card replaces an old one; the Hub keeps the history. Files with other names stay, an old pickle for example.

    Args:
        model: A model made by `timm.create_model`, of any architecture.
        repo_id: `OWNER/NAME`, or `NAME` for a repository of your own; created if missing.
        token: Of an account that may write there. Default: the one in `HF_TOKEN` or of `hf auth login`.
        revision: Branch to push to, created if missing. Default: `main`.
        private: Whether a new repository is private. An existing one must be.
        commit_message: Message of the commit.
        description: As for `save`: `recipe`, `data`, `results`, `model_card`, `model_config`, `data_config`.

    Returns:
        huggingface_hub's description of the commit.

    Raises:
        ValueError: If the model cannot be saved, does not load back to identical logits, or the Hub refuses it. Nothing
            is pushed then.
        ConnectionError: If the Hub cannot be reached, or the connection breaks off.
    """
    if not isinstance(repo_id, str):
        raise ValueError(f'repo_id must be OWNER/NAME, got {short(repo_id)}.')
    api = HfApi(token=token, **LIBRARY)
    with TemporaryDirectory() as scratch:
        if '/' not in repo_id:
            with plain_errors(repo_id, revision):
                repo_id = f'{api.whoami()["name"]}/{repo_id}'
        folder = Path(scratch, 'model')
        save(model, folder, repo_id=f'{repo_id}@{revision}' if revision else repo_id, **description)
        with plain_errors(repo_id, revision):
            api.create_repo(repo_id, private=private, exist_ok=True)
            if private and not api.model_info(repo_id).private:
                raise ValueError(
                    f'{repo_id} exists and is public, so private=True would not hide what is pushed. Make it private '
                    'on the Hub first, or choose another name.')
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
    """Save a model as `push` does: safetensors, config.json and a card, which load back to identical logits.

    Args:
        model: A model made by `timm.create_model`, of any architecture, also inside DDP, `torch.compile` or an average
            of weights.
        folder: A folder that does not exist yet. It appears complete or not at all.
        repo_id: Repository (with `@revision`) that the card names. Default: the card names the folder.
        recipe: How the model was trained, for the card: text, a list, or a dict of names and values.
        data: What it was trained on, likewise.
        results: Its results, likewise.
        model_card: Entries of timm's model cards that replace ours (`description`, `details`, `license`, `tags`,
            `citation` ...). Default license: the one in its config, that of the weights it started from; else unknown.
        model_config: Entries for config.json as in `timm.models.save_for_hf`, e.g. `label_names`, or `model_args` in
            place of arguments that were classes or functions.
        data_config: Preprocessing for config.json, as there.

    Raises:
        ValueError: If the folder exists, an entry of `model_card`, `model_config` or `data_config` is wrong, or the
            model cannot be saved or does not load back to identical logits.
        OSError: If the folder cannot be made or written.
    """
    if not isinstance(repo_id, (str, type(None))):
        raise ValueError(f'repo_id must be OWNER/NAME, got {short(repo_id)}.')
    for name, given, known in (
            ('model_card', model_card, CARD), ('model_config', model_config, None),
            ('data_config', data_config, PREPROCESSING)):
        if given is not None and not isinstance(given, dict):
            raise ValueError(f'{name} must be a dict of entries and values, got {short(given)}.')
        unknown = [key for key in given or () if known and key not in known]
        if unknown:
            raise ValueError(f'{name} has no entry {unknown[0]!r}. Use only {", ".join(known)}.')
    folder = Path(os.path.expanduser(folder))
    if os.path.lexists(folder):
        raise ValueError(f'{folder} exists. Name a folder that does not.')
    model = unwrapped(model)
    if not hasattr(model, 'pretrained_cfg'):
        raise ValueError(
            f'model must be a model made by timm.create_model, got a {type(model).__name__}. Of a wrapper of your own, '
            'save the model inside; what else it computes cannot be saved.')
    if not all(value.is_contiguous() for value in model.state_dict().values() if isinstance(value, torch.Tensor)):
        raise ValueError(
            'The model is in a memory format that files do not have (channels_last?). Save '
            'model.to(memory_format=torch.contiguous_format).')
    now = get_model_input_config(model)
    has_size = getattr(model, '_model_args', {}).get('img_size') is not None
    if has_size and not now['fixed_input_size'] and not {'img_size', 'input_size'} & (data_config or {}).keys():
        # timm would record the architecture's usual size for a model that takes any
        data_config = {**(data_config or {}), 'input_size': now['input_size']}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix='.saving-') as scratch:
        staged = Path(scratch, folder.name)
        try:
            save_for_hf(
                model, staged, model_config=model_config, data_config=data_config, safe_serialization=True)
        except OSError:
            raise
        except Exception as e:  # models that were changed after timm made them fail in many ways
            fixes = {
                'not serializable': "E.g. act_layer by its name: model_config={'model_args': {'act_layer': 'relu'}}.",
                'share memory': 'Give each layer a parameter of its own: nn.Parameter(shared.detach().clone()).'}
            fix = next((f' {fix}' for words, fix in fixes.items() if words in str(e)), '')
            raise ValueError(
                f'The model cannot be saved as timm saves those that timm.create_model makes: {described(e)}{fix}'
            ) from e
        config = json.loads((staged / CONFIG_NAME).read_text())
        # timm reads it at the root of the config; with this one, transformers would pass it to create_model twice
        config['model_args'].pop('num_classes', None)
        config['timm_sape'] = {'version': __version__, 'sha256': sha256_of(staged / HF_SAFE_WEIGHTS_NAME)}
        (staged / CONFIG_NAME).write_text(json.dumps(config, indent=2))
        read_config(str(folder), staged / CONFIG_NAME)
        check_label_names(config)
        _refuse_other_logits(model, staged, config['pretrained_cfg']['input_size'])

        source = f'hf-hub:{repo_id}' if repo_id else f'local-dir:{folder.name}'
        given = {'Recipe': recipe, 'Data': data, 'Results': results}
        card = make_card(model, config, source, {k: v for k, v in given.items() if v is not None})
        readme = generate_readme({**card, **(model_card or {})}, source.split('/')[-1].removeprefix('local-dir:'))
        (staged / 'README.md').write_text(readme, encoding='utf-8')
        staged.rename(folder)


@torch.no_grad()
def _refuse_other_logits(model: nn.Module, folder: Path, input_size: Sequence[int]) -> None:
    """Load a saved model back, with the device and dtype of the original, and compare the two.

    Args:
        model: The original.
        folder: Where it has been saved.
        input_size: (channels, height, width) of images.

    Raises:
        ValueError: If it cannot be loaded, or if an entry of its state or a logit differs in any bit.
    """
    p = next(model.parameters())
    x = torch.randn(2, *input_size, generator=torch.Generator().manual_seed(0), device='cpu').to(p)
    modes = [(module, module.training) for module in model.modules()]
    try:
        logits = model.eval()(x)
    finally:
        for module, mode in modes:
            module.training = mode
    if not logits.isfinite().all():
        raise ValueError('Not saved, since its logits for random images are not finite. Has it diverged?')

    try:
        with torch.random.fork_rng(devices=[]):  # saving in the middle of a training must not change the training
            loaded = timm.create_model(f'local-dir:{folder}', pretrained=True)
    except Exception as e:
        raise ValueError(f'Not saved, since it could not be loaded back: {described(e)}') from e
    loaded.to(device=p.device, dtype=p.dtype).eval()
    state = model.state_dict()
    changed = [name for name, value in loaded.state_dict().items() if not torch.equal(value, state[name])]
    if changed:
        dtype = torch.get_default_dtype()
        raise ValueError(
            f'Not saved, since {len(changed)} entries such as {changed[0]} have other values when it is loaded back in '
            f'{dtype}, the default: convert it first, model.to({dtype}).')
    for own, other in zip(model.modules(), loaded.modules()):
        if hasattr(own, 'fused_attn'):  # how attention is computed is not saved: exportable=True, set_fused_attn
            other.fused_attn = own.fused_attn
    again = loaded(x)
    if not torch.equal(again, logits):
        raise ValueError(
            f'Not saved, since its logits differ by up to {(again - logits).abs().max():.2g} when it is loaded back. '
            'Something was changed after timm.create_model that is no parameter: give it to create_model instead. '
            'Or an encoding draws numbers that it does not save: make them a parameter or a persistent buffer.')
