"""Odd input is refused in a line that says what to do; odd moments do no harm. `.ci/fuzz.py` draws thousands more."""
import random
import tempfile
from pathlib import Path

import pytest
import timm
import torch

import odd_input as odd
import odd_moments as moments
from timm_sape.attention import PosEncAttention
from timm_sape.functional import sape2_attention

GRID, DIM = (2, 3), 4


@pytest.fixture(scope='module')
def folder():
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


def attention_args(**changes):
    """Arguments of `sape2_attention` for two images, two heads and a class token."""
    q = torch.randn(3, 2, 2, 7, DIM, generator=torch.Generator().manual_seed(0))
    args = dict(zip('qkv', q), table_x=q[0, 0, 0], table_y=q[0, 0, 1], grid_size=GRID, num_prefix_tokens=1)
    return {**args, **changes}


@pytest.mark.parametrize('changes, message', [
    ({'q': [[1.]]}, 'q must be a tensor of floating-point numbers, got list'),
    ({'k': torch.zeros(2, 2, 7, DIM).long()}, 'k must be a tensor of floating-point numbers, got torch.int64'),
    ({'v': torch.zeros(2, 2, 7, DIM) * 1j}, 'v must be a tensor of floating-point numbers, got torch.complex64'),
    ({name: torch.zeros(2, 2, 7, 0) for name in 'qkv'}, 'head dim of at least 1'),
    ({'scale': 'x'}, "scale must be a number, or None .* 'x'"),
    ({'scale': float('nan')}, 'scale must be a number'),
    ({'grid_size': (10 ** 9, 1)}, 'two Python ints from 1 to'),
    ({'grid_size': (2., 3.)}, r'grid_size must be \(H, W\)'),
    ({'num_prefix_tokens': True}, 'num_prefix_tokens must be an integer'),
    ({'bias_scale': torch.ones(2) * 1j}, 'bias_scale must be a number or one value per head'),
    ({'gate_scale': torch.ones(1) * 1j}, 'gate_scale must be a number or a tensor of one'),
    ({'is_causal': 'no'}, 'is_causal must be True or False'),
    ({'attn_mask': torch.zeros(5, 5)}, r'broadcastable to \[B, h, N, N\] = \[2, 2, 7, 7\], got \[5, 5\]'),
    ({'attn_mask': [[True]]}, 'attn_mask must be a tensor on cpu, bool .* got list'),
    ({'attn_mask': torch.zeros(7, 7, device='meta')}, 'must be on the same device, .* mask on meta'),
    ({'keep_indices': torch.tensor([[0, 1, 2, 3, 4, 6]] * 2)}, 'from 0 to 5, as there are 6 patches, got 0 to 6'),
    ({'keep_indices': torch.tensor([[0, 1, 2, 3, 4, 4]] * 2)}, 'the same patch twice'),
])
def test_functions_refuse(changes, message):
    assert sape2_attention(**attention_args()).isfinite().all()
    with pytest.raises(odd.Refused, match=message):
        odd.attempt(sape2_attention, **attention_args(**changes))


def create(**kwargs):
    given = dict(pos_enc='sape2_k', img_size=16, patch_size=8, embed_dim=16, num_heads=2, depth=1, num_classes=3)
    return timm.create_model('test_vit_pos_enc', **{**given, **kwargs}).eval()


@pytest.mark.parametrize('changes, message', [
    ({'img_size': 10 ** 9}, 'more than any model can use'),
    ({'img_size': 8 * 2049, 'pos_enc': 'nope'}, '2,049 x 2,049 patches .* more than any model can use'),
    ({'img_size': (16, 16, 16)}, 'img_size must be an integer'),
    ({'img_size': True}, 'img_size must be an integer'),
    ({'depth': 10 ** 6}, 'depth must be an integer .* at most 1,000'),
    ({'embed_dim': 2 ** 40}, 'embed_dim must be an integer .* at most 1,000,000'),
    ({'embed_dim': 15}, 'is not divisible by num_heads=2. Choose another num_heads'),
    ({'dynamic_img_size': 'yes'}, "dynamic_img_size must be True or False, got 'yes'"),
    ({'class_token': 'false'}, "class_token must be True or False, got 'false'"),
    ({'qk_norm': 0}, 'qk_norm must be True or False, got 0'),
    ({'patch_drop_rate': 'x'}, 'patch_drop_rate must be at least 0'),
    ({'img_size': torch.tensor(64)}, 'img_size must be an integer of at least 1, or two'),
    ({'ref_grid_size': (10 ** 9, 2)}, 'two Python ints from 1 to'),
    ({'pos_enc_kwargs': {'sape2_k': {'table_size': 10 ** 12}}}, 'unexpected|no keyword|larger than any model needs'),
    ({'pos_enc': 'lape', 'pos_enc_kwargs': 0}, 'pos_enc_kwargs must map parts'),
    ({'pos_enc': 'ape+ape'}, 'more than once. Name it once'),
    ({'pos_enc': 'ape+nope'}, 'cannot be combined. Leave it out'),
    ({'pos_enc_kwargs': {'ape': {}}}, 'Leave them out, or put'),
])
def test_models_refuse(changes, message):
    with pytest.raises(odd.Refused, match=message):
        odd.attempt(create, **changes)


def test_masks_of_a_model():
    model, x = create(), torch.randn(2, 3, 16, 16)
    assert model(x, attn_mask=torch.zeros(5, 5)).isfinite().all()
    for mask in (torch.zeros(4, 4), 'x', torch.zeros(5, 5, device='meta'), torch.zeros(5)):
        with pytest.raises(odd.Refused, match='attn_mask must be'):
            odd.attempt(model, x, attn_mask=mask)


def test_integers_as_a_mask_of_a_layer():
    """A layer that is called without its model refuses them, too: zeros and ones would be added to the logits."""
    layer, x = PosEncAttention(16, num_heads=2), torch.randn(1, 5, 16)
    torch.testing.assert_close(layer(x, attn_mask=torch.ones(5, 5, dtype=torch.bool)), layer(x))
    with pytest.raises(ValueError, match=r'got torch.int64. Use attn_mask.bool\(\) for a mask of zeros and ones'):
        layer(x, attn_mask=torch.ones(5, 5, dtype=torch.int64))


@pytest.mark.parametrize('change, message', [
    (lambda state: 'text', 'is a str. Entries must be tensors'),
    (lambda state: torch.zeros(3, 3), 'cannot be adapted|does not fit'),
    (lambda state: torch.zeros(16, 3), 'cannot be adapted|does not fit'),
])
def test_files_with_odd_entries(change, message, tmp_path):
    model = create()
    state = model.state_dict()
    for name in ('patch_embed.proj.weight', 'blocks.0.attn.encodings.sape2_k.table_x', 'norm.weight'):
        assert name in state
        file = tmp_path / 'weights.pth'
        torch.save({**state, name: change(state)}, file)
        with pytest.raises(odd.Refused, match=message):
            odd.attempt(create, pretrained=True, pretrained_cfg_overlay=dict(file=str(file), num_classes=3))


def test_damaged_files(tmp_path):
    """A flipped bit or a cut: refused, or the whole model. Nothing else."""
    rng, model, refused = random.Random(0), create(), 0
    for i in range(30):
        file = tmp_path / f'{i}.pth'
        torch.save(model.state_dict(), file)
        odd.damage(rng, file)
        try:
            odd.attempt(create, pretrained=True, pretrained_cfg_overlay=dict(file=str(file), num_classes=3))
        except odd.Refused:
            refused += 1
    assert refused > 10


@pytest.mark.parametrize('seed', range(3))
def test_threads_that_share_a_model(seed, folder):
    moments.threads(random.Random(seed), folder)


@pytest.mark.parametrize('seed', range(3))
def test_killed_while_saving(seed, folder):
    moments.kills(random.Random(seed), folder)
