"""Models saved by earlier versions (`data/old_models/make.py`) load with equal parameters and give equal logits."""
import json
import sys
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

import timm_sape  # noqa: F401

FOLDER = Path(__file__).parent / 'data/old_models'
sys.path.insert(0, str(FOLDER))
from make import OTHER_SIZE, images  # noqa: E402

MODELS = json.loads((FOLDER / 'models.json').read_text())
ENTRIES = load_file(FOLDER / 'entries.safetensors')
LOGITS = load_file(FOLDER / 'logits.safetensors')


def state_dict(name):
    return {key: ENTRIES[entry].clone() for key, entry in MODELS[name]['entries'].items()}


def created(name, **kwargs):
    """The model, created with the arguments in its config."""
    args = dict(MODELS[name]['config']['model_args'])
    args.pop('num_classes', None)
    return timm.create_model(MODELS[name]['config']['architecture'], **{**args, 'num_classes': 3, **kwargs}).eval()


def check(model, name, images_of, key=None):
    state = model.state_dict()
    assert state.keys() == state_dict(name).keys()
    if key is None:
        for entry, value in state_dict(name).items():
            assert torch.equal(state[entry], value), entry
    check_logits(model, key or name, images_of)


def check_logits(model, key, images_of):
    with torch.no_grad():
        logits = model(images(*images_of))
    # another CPU than the one on which they were written rounds differently, by up to 2e-6
    assert (logits - LOGITS[key]).abs().max() <= 3e-6 * LOGITS[key].abs().max()


@pytest.mark.parametrize('name', MODELS)
def test_checkpoint(name):
    """A bare state dict, loaded by torch."""
    model = created(name)
    model.load_state_dict(state_dict(name))
    check(model, name, model.patch_embed.img_size)


@pytest.mark.parametrize('name', MODELS)
def test_folder(name, tmp_path):
    """A folder that `timm_sape.hub.save` wrote, loaded by timm, at its own size and at another."""
    (tmp_path / 'config.json').write_text(json.dumps(MODELS[name]['config']))
    save_file(state_dict(name), tmp_path / 'model.safetensors')
    model = timm.create_model(f'local-dir:{tmp_path}', pretrained=True).eval()
    check(model, name, model.patch_embed.img_size)
    other = f'{name}/other size'
    if other in LOGITS:
        model = timm.create_model(f'local-dir:{tmp_path}', pretrained=True, img_size=OTHER_SIZE).eval()
        check(model, name, OTHER_SIZE, other)


def test_every_encoding_has_an_old_model():
    """Every encoding that existed when the files were written. A newer one has no old model."""
    names = ' '.join(MODELS)
    assert len(MODELS) == 76
    assert all(f'test_vit_{name}' in names for name in ('sape2_k', 'rope2d', 'cope', 'irpe_qkv', 'lape', 'peg', 'ope'))


def test_a_changed_model_is_noticed():
    """Negative control: a model whose encoding is switched off does not pass."""
    model = created('test_vit_rope2d')
    model.load_state_dict(state_dict('test_vit_rope2d'))
    model.encodings['rope2d'].table[..., :model.encodings['rope2d'].table.shape[-1] // 2] = 0  # no sine
    with pytest.raises(AssertionError):
        check_logits(model, 'test_vit_rope2d', model.patch_embed.img_size)
