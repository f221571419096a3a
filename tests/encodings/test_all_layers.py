"""What holds for every encoding inside an attention layer, and for compositions of them."""
import math

import pytest
import torch
import torch.nn as nn

import reference_rope2d
import reference_rope2d_mixed
from harness import compare, create, make_grid, make_tokens, where
from loops import attention
from reference_cope import cope_between, cope_bias
from reference_irpe import irpe_bias, irpe_values
from reference_sape2 import sape2_bias
from reference_sape2sq import sape2sq_bias
import timm_sape
from timm_sape.attention import PosEncAttention
from timm_sape.position import LayerEncodings, Position

HEADS, HEAD_DIM = 2, 8  # with 4 channels, all frequencies of a rotation are 1
DIM = HEADS * HEAD_DIM
COMPOSITIONS = [
    {'cope': {'npos': 7}, 'rope2d_mixed': {}, 'sape2_q': {'bias_scale': 'learned'}},
    {'rope2d': {}, 'sape2_k': {'bias_scale': 'learned'}},
    {'irpe_qkv': {}},
    {'irpe_k': {}, 'sape2sq_q': {}},
    {'cope': {'direction': 'between'}, 'irpe_q': {}, 'sape2sq_k': {}},
    {'irpe_qkv': {}, 'rope2d_mixed': {}, 'sape2sq_k': {}},
]


def make_layer(encodings, **kwargs):
    layer = PosEncAttention(DIM, num_heads=HEADS, qkv_bias=True, **kwargs)
    layer.encodings = LayerEncodings(encodings, needs_position=True)
    return layer


def bias_of(encoding, q, k, grid):
    """What an encoding adds to the logits by its equations, 0 for a rotation."""
    name, tables = encoding.name, dict(encoding.named_parameters())
    if name.startswith('irpe'):
        tables.pop('table_v', None)
        return irpe_bias(q, k, grid.size, **tables, **where(grid))
    if name == 'cope':
        bias = cope_between if encoding.direction == 'between' else cope_bias
        return bias(q, k, encoding.table, grid.size, **where(grid))
    if name.startswith('sape2'):
        bias = sape2sq_bias if name.startswith('sape2sq') else sape2_bias
        bias = bias(
            q, k, encoding.table_x, encoding.table_y, grid.size, mode=encoding.mode, gate_scale=HEAD_DIM ** -0.5,
            **where(grid))
        gain = [encoding.bias_scale] * HEADS if encoding.gain is None else encoding.gain
        return torch.stack([gain[h] * bias[:, h] for h in range(HEADS)], dim=1)
    return torch.zeros(len(q), HEADS, q.shape[2], q.shape[2], dtype=q.dtype)


def rotated(encodings, x, grid):
    if 'rope2d' in encodings:
        return reference_rope2d.rotate(x, grid.size, **where(grid))
    if 'rope2d_mixed' in encodings:
        return reference_rope2d_mixed.rotate(x, grid.size, freqs=encodings['rope2d_mixed'].freqs, **where(grid))
    return x


@pytest.mark.one_of(2)
@pytest.mark.parametrize('num_prefix_tokens', [pytest.param(1, marks=pytest.mark.full), 5])
@pytest.mark.parametrize('fused', [True, False])
@pytest.mark.parametrize('qk_norm', [True, False])
@pytest.mark.parametrize('composition', COMPOSITIONS, ids='+'.join)
def test_attention_layer(composition, qk_norm, fused, num_prefix_tokens):
    """A bias sees q and k after their norms, before their rotation, unscaled. Biases add. Values see probabilities."""
    torch.manual_seed(0)
    grid = make_grid((3, 4), num_prefix_tokens, num_keep=7)
    encodings = {
        name: create(name, (3, 4), num_prefix_tokens, heads=HEADS, head_dim=HEAD_DIM, **keywords)
        for name, keywords in composition.items()}
    layer = make_layer(encodings, qk_norm=qk_norm, norm_layer=nn.LayerNorm).double()
    layer.fused_attn = fused
    with torch.no_grad():  # norms that do nothing would not show where they are
        for p in layer.parameters():
            p.copy_(0.5 * torch.randn_like(p))
    x = make_tokens(grid, dim=DIM)

    q, k, v = layer.qkv(x).unflatten(-1, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
    q, k = layer.q_norm(q), layer.k_norm(k)
    bias = sum(bias_of(encoding, q, k, grid) for encoding in encodings.values())
    q, k = (rotated(encodings, y, grid) for y in (q, k))
    out = attention(q, k, v, bias=bias)
    if 'irpe_qkv' in encodings:
        attn = (q @ k.mT / math.sqrt(HEAD_DIM) + bias).softmax(dim=-1)
        out = out + irpe_values(attn, encodings['irpe_qkv'].table_v, grid.size, **where(grid))
    expected = layer.proj(out.transpose(1, 2).flatten(2))
    compare(layer(x, position=Position(grid)), expected, {'x': x, **dict(layer.named_parameters())})


class Widened(nn.Module):
    def forward(self, x):
        return x.float()


@pytest.mark.parametrize('name, hook', [('sape2_k', 'attend'), ('sape2sq_k', 'channels'), ('cope', 'content_bias')])
def test_widening_norms(name, hook):
    """On a GPU autocast runs norms in float32. Encodings and attention get q and k as narrow as v all the same."""
    grid = make_grid((3, 4), num_prefix_tokens=1)
    encoding = create(name, (3, 4), 1, heads=HEADS, head_dim=HEAD_DIM, dtype=torch.float32)
    layer = make_layer({name: encoding})
    x = torch.randn(2, 13, DIM)
    dtypes, function = set(), getattr(encoding, hook)

    def watched(q, k, *args, **kwargs):
        dtypes.update((q.dtype, k.dtype))
        return function(q, k, *args, **kwargs)

    setattr(encoding, hook, watched)
    with torch.autocast('cpu', torch.bfloat16):
        expected = layer(x, position=Position(grid))
        layer.q_norm = layer.k_norm = Widened()
        actual = layer(x, position=Position(grid))
    assert dtypes == {torch.bfloat16}
    assert torch.equal(actual, expected)


def test_a_layer_has_one_rotation():
    """Models refuse two by name. In a layer of one's own, one would be left out or the layout would be wrong."""
    encodings = {name: create(name, (2, 2)) for name in ('rope2d', 'cope', 'mrope')}
    with pytest.raises(ValueError, match="A layer can have one rotation, got 'rope2d' and 'mrope'. Leave one out."):
        LayerEncodings(encodings)
    del encodings['rope2d']
    assert LayerEncodings(encodings).rotate_half  # the layout of 'mrope'


@pytest.mark.parametrize('name', [
    name for name in timm_sape.list_encodings()
    if {'tokens', 'tokens in each layer'} & set(timm_sape.get_encoding(name).acts_on())
])
def test_a_layer_does_not_ignore_what_is_added_to_tokens(name):
    with pytest.raises(ValueError, match=f"'{name}' adds to the tokens of the whole model, and attention would ignore"):
        LayerEncodings({name: create(name, (2, 2))})
