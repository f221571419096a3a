"""`timm_sape.functional`: its signature, values, gradients and errors."""
import inspect

import pytest
import torch

import reference_sape2
from harness import assert_near
from timm_sape.functional import sape2_attention, sape2_bias

B, HEADS, DIM, P = 3, 2, 4, 2
SIZE = (2, 3)
N = P + 6


def draw(num_tokens=N, npos=(4, 3), batch=B, dtype=torch.float64):
    """q, k, v, table_x, table_y for a 2 x 3 grid behind 2 prefix tokens."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, HEADS, num_tokens, DIM)] * 3 + [(npos[0], DIM), (npos[1], DIM)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def check(kwargs, inputs=None, size=SIZE):
    """Attention and every gradient against the equations, float64. Returns the attention."""
    kwargs = {'num_prefix_tokens': P, **kwargs}
    inputs = draw() if inputs is None else inputs
    leaves = inputs + [x for x in kwargs.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    actual = sape2_attention(*inputs, size, **kwargs)
    kwargs.pop('backend', None)
    expected = reference_sape2.sape2_attention(*inputs, size, **kwargs)
    assert_near(actual, expected, 1e-10)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for a, b in zip(torch.autograd.grad(actual, leaves, weights), torch.autograd.grad(expected, leaves, weights)):
        assert_near(a, b, 1e-10, 'gradient')
    return actual


@pytest.mark.parametrize('function, positional, keywords', [
    (sape2_bias, ['q', 'k', 'table_x', 'table_y', 'grid_size'], {
        'mode': 'k',
        'gate_scale': None,
        'num_prefix_tokens': 0,
        'ref_grid_size': None,
        'keep_indices': None,
    }),
    (sape2_attention, ['q', 'k', 'v', 'table_x', 'table_y', 'grid_size'], {
        'mode': 'k',
        'gate_scale': None,
        'bias_scale': 1.0,
        'scale': None,
        'num_prefix_tokens': 0,
        'ref_grid_size': None,
        'keep_indices': None,
        'attn_mask': None,
        'is_causal': False,
        'dropout_p': 0.0,
        'backend': None,
    }),
])
def test_signature(function, positional, keywords):
    parameters = inspect.signature(function).parameters.values()
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == positional
    assert {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY} == keywords
    assert len(parameters) == len(positional) + len(keywords)
    assert all(p.default is p.empty for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)


@pytest.mark.parametrize('kwargs', [
    {},
    {'mode': 'q'},
    {'mode': 'qk'},
    {'gate_scale': 1.0},
    {'gate_scale': 0.0},
    {'ref_grid_size': (2, 3)},
    {'ref_grid_size': (5, 2)},
    {'ref_grid_size': (1, 1), 'mode': 'q', 'gate_scale': -0.7},
])
def test_bias(kwargs):
    q, k, _, table_x, table_y = inputs = draw()
    actual = sape2_bias(q, k, table_x, table_y, SIZE, num_prefix_tokens=P, **kwargs)
    expected = reference_sape2.sape2_bias(q, k, table_x, table_y, SIZE, **{'num_prefix_tokens': P, **kwargs})
    assert actual.shape == (B, HEADS, N, N)
    assert_near(actual, expected, 1e-10)
    leaves = [x for i, x in enumerate(inputs) if i != 2]
    for a, b in zip(torch.autograd.grad(actual.sin().sum(), leaves), torch.autograd.grad(expected.sin().sum(), leaves)):
        assert_near(a, b, 1e-10, 'gradient')


def test_defaults():
    """No prefix tokens, gates and product scaled by 1/sqrt(d), the bias not, mode 'k'."""
    inputs = draw(num_tokens=6)
    explicit = {'mode': 'k', 'gate_scale': DIM ** -0.5, 'num_prefix_tokens': 0}
    q, k, _, *tables = inputs
    assert_near(sape2_bias(q, k, *tables, SIZE), reference_sape2.sape2_bias(q, k, *tables, SIZE, **explicit), 1e-10)
    expected = reference_sape2.sape2_attention(*inputs, SIZE, bias_scale=1.0, scale=DIM ** -0.5, **explicit)
    assert_near(sape2_attention(*inputs, SIZE), expected, 1e-10)


@pytest.mark.parametrize('kwargs', [
    {'mode': 'k'},
    {'mode': 'q', 'gate_scale': 1.0, 'bias_scale': 0.5},
    {'mode': 'qk', 'scale': 1.3},
    {'scale': 0.0},
    {'bias_scale': 0.0},
    {'bias_scale': -2},
    {'backend': 'reference'},
    {'ref_grid_size': (4, 7)},
])
def test_attention(kwargs):
    check(kwargs)


def test_keywords_matter():
    """Each changes the outcome."""
    q, k, v, table_x, table_y = (x.detach() for x in draw())
    plain = sape2_attention(q, k, v, table_x, table_y, SIZE, num_prefix_tokens=P)
    keep_indices = torch.tensor([[5, 4, 3, 2, 1, 0]] * B)
    for kwargs in (
            {'mode': 'q'}, {'mode': 'qk'}, {'gate_scale': 1.0}, {'bias_scale': 2.0}, {'scale': 1.0},
            {'ref_grid_size': (3, 3)}, {'keep_indices': keep_indices}, {'is_causal': True}, {'dropout_p': 0.5},
            {'attn_mask': torch.ones(N, N, dtype=torch.bool).triu(-1)},
    ):
        other = sape2_attention(q, k, v, table_x, table_y, SIZE, **{'num_prefix_tokens': P, **kwargs})
        assert (other - plain).abs().max() > 1e-3, kwargs


def test_bias_scale_per_head():
    """With a gradient; negative values flip the sign of a head."""
    gain = torch.tensor([1.5, -0.5], dtype=torch.float64, requires_grad=True)
    check({'bias_scale': gain})
    check({'bias_scale': torch.tensor(0.7, dtype=torch.float64, requires_grad=True)})


def test_gate_scale_as_a_tensor():
    q, k, _, *tables = (x.detach() for x in draw())
    gate_scale = torch.tensor([0.8], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda g: sape2_bias(q, k, *tables, SIZE, num_prefix_tokens=P, gate_scale=g), gate_scale)
    expected = sape2_bias(q, k, *tables, SIZE, num_prefix_tokens=P, gate_scale=0.8)
    assert_near(sape2_bias(q, k, *tables, SIZE, num_prefix_tokens=P, gate_scale=gate_scale), expected, 1e-12)


@pytest.mark.parametrize('is_causal', [False, True])
@pytest.mark.parametrize('mask', ['none', 'bool', 'bool per image', 'bool for all', 'additive', 'additive per head'])
def test_masks(mask, is_causal):
    """A mask adds to the bias or takes out what it forbids, alone and with `is_causal`."""
    generator = torch.Generator().manual_seed(2)
    shape = {
        'bool per image': (B, 1, N, N),
        'bool for all': (1, N, N),
        'additive per head': (1, HEADS, N, N),
    }.get(mask, (N, N))
    attn_mask = torch.randn(shape, generator=generator, dtype=torch.float64)
    if mask.startswith('bool'):
        attn_mask = (attn_mask > 0) | torch.eye(N, dtype=torch.bool)  # at least itself
    elif mask == 'none':
        attn_mask = None
    else:
        attn_mask.requires_grad_()
    check({'attn_mask': attn_mask, 'is_causal': is_causal})


def test_masked_keys_have_no_say():
    q, k, v, table_x, table_y = (x.detach() for x in draw())
    attn_mask = torch.ones(N, N, dtype=torch.bool)
    attn_mask[:, 5] = False
    changed = v.clone()
    changed[:, :, 5] = 1e3
    for mask in (attn_mask, torch.zeros(N, N, dtype=torch.float64).masked_fill(~attn_mask, float('-inf'))):
        outs = [
            sape2_attention(q, k, values, table_x, table_y, SIZE, num_prefix_tokens=P, attn_mask=mask)
            for values in (v, changed)]
        assert torch.equal(*outs)


def test_a_token_that_attends_to_nothing():
    """It gets zeros, as in a model."""
    inputs = draw()
    attn_mask = torch.ones(N, N, dtype=torch.bool)
    attn_mask[5] = False
    for mask in (attn_mask, torch.zeros(N, N, dtype=torch.float64).masked_fill(~attn_mask, float('-inf'))):
        out = sape2_attention(*inputs, SIZE, num_prefix_tokens=P, attn_mask=mask)
        assert (out[:, :, 5] == 0).all() and out[:, :, :5].abs().min() > 0
        assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), inputs))


@pytest.mark.parametrize('ref_grid_size', [None, (3, 2)])
@pytest.mark.parametrize('mode', ['k', 'q', 'qk'])
def test_kept_patches(mode, ref_grid_size):
    """A dropped patch has gate 0; the order of the others is that of the sequence."""
    keep_indices = torch.tensor([[4, 0, 5, 2], [1, 3, 2, 0], [5, 4, 3, 1]])
    check({'mode': mode, 'keep_indices': keep_indices, 'ref_grid_size': ref_grid_size}, draw(num_tokens=P + 4))


@pytest.mark.parametrize('size', [(1, 5), (5, 1), (1, 1), (3, 2)])
@pytest.mark.parametrize('num_prefix_tokens', [0, 1])
def test_grids(size, num_prefix_tokens):
    inputs = draw(num_prefix_tokens + size[0] * size[1], npos=(size[1] + 1, size[0] + 1), batch=1)
    q, k, v, table_x, table_y = inputs
    kwargs = {'num_prefix_tokens': num_prefix_tokens}
    assert_near(
        sape2_attention(*inputs, size, **kwargs), reference_sape2.sape2_attention(*inputs, size, **kwargs), 1e-10)
    assert_near(
        sape2_bias(q, k, table_x, table_y, size, **kwargs),
        reference_sape2.sape2_bias(q, k, table_x, table_y, size, **kwargs), 1e-10)


def test_grid_size_may_be_a_list():
    """As it comes out of JSON."""
    q, k, _, *tables = draw()
    expected = sape2_bias(q, k, *tables, SIZE, num_prefix_tokens=P, ref_grid_size=(4, 5))
    assert torch.equal(sape2_bias(q, k, *tables, [2, 3], num_prefix_tokens=P, ref_grid_size=[4, 5]), expected)


@pytest.mark.parametrize('mode', ['k', 'q', 'qk'])
def test_gradcheck(mode):
    """Finite differences, for all tensors at once. Positions are sums of sigmoids, far from whole numbers here."""
    q, k, v, table_x, table_y = draw(num_tokens=7, batch=1)
    gain = torch.tensor([1.5, -0.5], dtype=torch.float64, requires_grad=True)
    attn_mask = torch.randn(7, 7, dtype=torch.float64, requires_grad=True)

    def bias(q, k, table_x, table_y):
        out = sape2_bias(q, k, table_x, table_y, SIZE, mode=mode, num_prefix_tokens=1, ref_grid_size=(3, 3))
        return out[:, :, ~torch.eye(7, dtype=torch.bool)]

    def attention(q, k, v, table_x, table_y, gain, attn_mask):
        return sape2_attention(
            q, k, v, table_x, table_y, SIZE, mode=mode, bias_scale=gain, num_prefix_tokens=1, attn_mask=attn_mask)

    assert torch.autograd.gradcheck(bias, (q, k, table_x, table_y), fast_mode=True)
    assert torch.autograd.gradcheck(attention, (q, k, v, table_x, table_y, gain, attn_mask), fast_mode=True)


def test_slope_at_whole_positions():
    """Gates of exactly 1/2 make the position 1 of two patches: the slope is that to the right, not zero."""
    q = torch.zeros(1, 1, 2, 1, dtype=torch.float64)
    table_x = torch.tensor([[0.], [1.], [5.]], dtype=torch.float64)
    table_y = torch.zeros(2, 1, dtype=torch.float64)
    k = torch.tensor([[[[1.], [2.]]]], dtype=torch.float64)

    def difference(q):  # |k_0 e[p_0] - k_1 e[p_1]| over the codes of both patches
        return sape2_bias(q, k, table_x, table_y, (1, 2), gate_scale=1.0)[0, 0, 0, 1]

    at = q.clone().requires_grad_()
    slope, = torch.autograd.grad(difference(at), at)
    step = torch.zeros_like(q)
    step[0, 0, 0] = 1e-6  # q_0 up, and with it p_0[0] from 1
    right = (difference(q + step) - difference(q)) / 1e-6
    left = (difference(q) - difference(q - step)) / 1e-6
    assert abs(right - left) > 0.1
    assert slope[0, 0, 0, 0] == pytest.approx(right.item(), abs=1e-4)


def test_dropout():
    """Of probabilities: in expectation nothing changes, and what survives is scaled up."""
    torch.manual_seed(0)
    q, k, _, *tables = (x.detach().float() for x in draw(batch=1))
    v = torch.eye(N, DIM).expand_as(q)  # so that the output is the first columns of the probabilities
    inputs = [x.expand(400, HEADS, N, DIM) for x in (q, k, v)] + tables
    plain = sape2_attention(*inputs, SIZE, num_prefix_tokens=P)
    drawn = sape2_attention(*inputs, SIZE, num_prefix_tokens=P, dropout_p=0.25)
    zeros = drawn == 0
    assert zeros.float().mean().item() == pytest.approx(0.25, abs=0.03)
    assert_near(drawn, (plain / 0.75).masked_fill(zeros, 0.0), 1e-5)
    assert not (plain == 0).any()


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """The output is that of float32 attention on the given values, rounded once."""
    inputs = [x.detach() for x in draw(dtype=dtype)]
    kwargs = {'num_prefix_tokens': P, 'bias_scale': 3.0}
    actual = sape2_attention(*inputs, SIZE, **kwargs)
    assert actual.dtype == dtype
    expected = sape2_attention(*(x.double() for x in inputs), SIZE, **kwargs)
    assert_near(actual, expected, torch.finfo(dtype).eps)
    assert sape2_bias(*inputs[:2], *inputs[3:], SIZE, num_prefix_tokens=P).dtype == torch.float32


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_autocast(dtype):
    """300 more on every logit changes nothing, unless autocast rounds the bias to bfloat16, which there resolves 2."""
    q, k, _, table_x, table_y = (x.detach() for x in draw(dtype=dtype))
    v = torch.eye(N, DIM, dtype=dtype).expand(B, HEADS, N, DIM)
    inputs = q, k, v, table_x.float(), table_y.float()
    kwargs = {'num_prefix_tokens': P, 'scale': 0.0, 'attn_mask': torch.full((N, N), 300.0)}
    expected = sape2_attention(*(x.double() for x in inputs), SIZE, num_prefix_tokens=P, scale=0.0)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        actual = sape2_attention(*inputs, SIZE, **kwargs)
    assert_near(actual, expected, 2 ** -8)


def test_large_logits():
    inputs = [x.detach().float().mul(s).requires_grad_() for x, s in zip(draw(), (1e2, 1e2, 1, 1, 1))]
    out = sape2_attention(*inputs, SIZE, num_prefix_tokens=P)
    assert out.isfinite().all()
    for grad in torch.autograd.grad(out.square().sum(), inputs):
        assert grad.isfinite().all()


def test_inputs_are_left_alone():
    inputs = [x.detach() for x in draw()]
    copies = [x.clone() for x in inputs]
    sape2_attention(*inputs, SIZE, num_prefix_tokens=P, is_causal=True)
    assert all(torch.equal(a, b) for a, b in zip(inputs, copies))


def test_strided_inputs():
    """Views as a model makes them out of one qkv tensor."""
    qkv = torch.randn(B, N, 3, HEADS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    _, _, _, table_x, table_y = draw()
    actual = sape2_attention(q, k, v, table_x, table_y, SIZE, num_prefix_tokens=P)
    expected = reference_sape2.sape2_attention(q, k, v, table_x, table_y, SIZE, num_prefix_tokens=P)
    assert_near(actual, expected, 1e-10)


def changed(**changes):
    """Arguments that would do, but for `changes`."""
    q, k, v, table_x, table_y = (x.detach() for x in draw())
    kwargs = {
        'q': q, 'k': k, 'v': v, 'table_x': table_x, 'table_y': table_y, 'grid_size': SIZE, 'num_prefix_tokens': P}
    return {**kwargs, **changes}


WRONG = {  # in bias and attention alike
    'grid of another size': (
        dict(grid_size=(3, 3)),
        r'q has 8 tokens, but 2 prefix tokens and a 3 x 3 grid make 11. Check grid_size=\(H, W\) and num_prefix'),
    'prefix forgotten': (
        dict(num_prefix_tokens=0), 'q has 8 tokens, but 0 prefix tokens and a 2 x 3 grid make 6.*num_prefix_tokens'),
    'empty grid': (
        dict(grid_size=(0, 3)), r'^grid_size must be \(H, W\), two Python ints from 1 to 16,383, got \(0, 3\)'),
    'negative grid': (dict(grid_size=(-2, -3)), r'^grid_size must be \(H, W\), two Python ints from 1.*\(-2, -3\)'),
    'grid of three': (dict(grid_size=(1, 2, 3)), r'^grid_size must be \(H, W\).*got \(1, 2, 3\)'),
    'grid as a number': (dict(grid_size=6), r'^grid_size must be \(H, W\).*got 6'),
    'empty trained grid': (dict(ref_grid_size=(2, 0)), r'^ref_grid_size must be \(H, W\).*got \(2, 0\)'),
    'trained grid as a number': (dict(ref_grid_size=14), r'^ref_grid_size must be \(H, W\).*got 14'),
    'no grid': (dict(grid_size=None), r'^grid_size must be \(H, W\).*got None'),
    'negative prefix': (dict(num_prefix_tokens=-1), 'num_prefix_tokens must be an integer of 0 or more, got -1'),
    'prefix as float': (dict(num_prefix_tokens=2.), 'num_prefix_tokens must be an integer of 0 or more, got 2.0'),
    'gate scale as text': (dict(gate_scale='one'), "gate_scale must be a number, .*got 'one'"),
    'grid of floats': (dict(grid_size=(2., 3.)), r'^grid_size must be \(H, W\).*got \(2.0, 3.0\)'),
    'unknown mode': (dict(mode='v'), "Unknown mode 'v'. Choose one of 'q', 'k', 'qk'"),
    'mode in capitals': (dict(mode='K'), "Unknown mode 'K'. Choose one of 'q', 'k', 'qk'"),
    'q without heads': (
        dict(q=torch.zeros(B, N, DIM)), r'q and k must have one shape \[B, h, N, d\], got \[3, 8, 4\]'),
    'k of another length': (
        dict(k=torch.zeros(B, HEADS, N + 1, DIM)), r'q and k must have one shape.*\[3, 2, 8, 4\] and \[3, 2, 9, 4\]'),
    'k of another width': (dict(k=torch.zeros(B, HEADS, N, DIM + 1)), 'q and k must have one shape'),
    'table of another width': (
        dict(table_x=torch.zeros(4, DIM + 1)), r'table_x must be \[npos, 4\] with npos >= 2, got \[4, 5\]'),
    'table per head': (
        dict(table_y=torch.zeros(HEADS, 3, DIM)), r'table_y must be \[npos, 4\] with npos >= 2, got \[2, 3, 4\]'),
    'table of one row': (
        dict(table_y=torch.zeros(1, DIM)), r'table_y must be \[npos, 4\] with npos >= 2, got \[1, 4\]'),
    'kept patches of one image': (
        dict(keep_indices=torch.arange(6)), r'keep_indices must be int64 \[B, K\] = \[3, K\], got torch.int64 \[6\]'),
    'kept patches of another batch': (
        dict(keep_indices=torch.zeros(2, 6, dtype=torch.int64)),
        r'keep_indices must be int64 \[B, K\] = \[3, K\].*\[2, 6\]'),
    'kept patches in int32': (
        dict(keep_indices=torch.zeros(B, 6, dtype=torch.int32)),
        r'keep_indices must be int64 \[B, K\] = \[3, K\].*torch.int32'),
    'kept patches as a mask': (
        dict(keep_indices=torch.ones(B, 6, dtype=torch.bool)),
        r'keep_indices must be int64 \[B, K\] = \[3, K\].*torch.bool'),
    'fewer kept patches than tokens': (
        dict(keep_indices=torch.arange(4).expand(B, -1)),
        'q has 8 tokens, but 2 prefix tokens and 4 kept patches make 6'),
}
WRONG_ATTENTION = {
    'unknown backend': (dict(backend='cuda'), "Unknown backend 'cuda'.*Use one of .*'reference'"),
    'v of another length': (
        dict(v=torch.zeros(B, HEADS, N - 1, DIM)), r'q, k and v must have one shape.*q \[3, 2, 8, 4\] and v \[3, 2, 7'),
    'v of another batch': (dict(v=torch.zeros(1, HEADS, N, DIM)), 'q, k and v must have one shape'),
    'bias scale per image': (
        dict(bias_scale=torch.ones(B)), r'bias_scale must be a number or one value per head \[2\], got \[3\]'),
    'bias scale as text': (
        dict(bias_scale='one'), r"bias_scale must be a number, or a tensor of one value per head \[2\], got 'one'"),
    'mask of three dimensions': (
        dict(attn_mask=torch.ones(HEADS, N, N)), r'attn_mask \[2, 8, 8\] does not say whether .*attn_mask\[:, None\]'),
    'mask of one dimension': (
        dict(attn_mask=torch.ones(N)), r'attn_mask must be broadcastable to .* = \[3, 2, 8, 8\], got \[8\]'),
    'mask of five dimensions': (
        dict(attn_mask=torch.ones(1, 1, 1, N, N)), r'attn_mask must be broadcastable .* got \[1, 1, 1, 8, 8\]'),
    'negative dropout': (dict(dropout_p=-0.1), 'dropout_p must be between 0 and 1, got -0.1'),
    'dropout above 1': (dict(dropout_p=1.5), 'dropout_p must be between 0 and 1, got 1.5'),
    'scale as text': (dict(scale='one'), r"scale must be a number, or None for 1/sqrt\(d\), got 'one'"),
    'bias scale per head and token': (
        dict(bias_scale=torch.ones(HEADS, N)), r'bias_scale must be .* one value per head \[2\], got \[2, 8\]'),
}


def test_right_input_is_taken():
    """What the tests below change is right before."""
    kwargs = changed()
    assert sape2_attention(**kwargs).shape == (B, HEADS, N, DIM)
    kwargs.pop('v')
    assert sape2_bias(**kwargs).shape == (B, HEADS, N, N)


@pytest.mark.parametrize('what', [*WRONG, *WRONG_ATTENTION])
def test_wrong_input(what):
    changes, text = {**WRONG, **WRONG_ATTENTION}[what]
    kwargs = changed(**changes)
    with pytest.raises(ValueError, match=text):
        if what in WRONG_ATTENTION:
            sape2_attention(**kwargs)
        else:
            sape2_bias(**{name: value for name, value in kwargs.items() if name != 'v'})


@pytest.mark.parametrize('what', ['grid of another size', 'unknown mode', 'table of one row', 'negative prefix'])
def test_wrong_input_of_attention(what):
    """It says the same as the bias."""
    changes, text = WRONG[what]
    with pytest.raises(ValueError, match=text):
        sape2_attention(**changed(**changes))


@pytest.mark.parametrize('dtype, wide, number', [
    (torch.float64, torch.float64, 0.1), (torch.bfloat16, torch.float32, 5.015)])
def test_numbers_have_all_digits(dtype, wide, number):
    """A number is taken as a tensor of q's dtype is, float32 at least, whatever torch's default dtype."""
    kwargs = {name: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x
              for name, x in changed().items()}
    expected = sape2_attention(**{**kwargs, 'bias_scale': torch.tensor(number, dtype=wide)})
    assert torch.equal(sape2_attention(**{**kwargs, 'bias_scale': number}), expected)


def test_mask_of_integers():
    """Ones and zeros would be added to the logits and mask nothing."""
    q, k, v = (torch.randn(1, 2, 4, 8) for _ in range(3))
    tables = torch.randn(3, 8), torch.randn(3, 8)
    with pytest.raises(ValueError, match=r'must be bool .* Use attn_mask.bool\(\)'):
        sape2_attention(q, k, v, *tables, (2, 2), attn_mask=torch.ones(4, 4, dtype=torch.long))


def test_gate_scale_is_one_number():
    """One value per head would broadcast over positions."""
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8)
    tables = torch.randn(3, 8), torch.randn(3, 8)
    with pytest.raises(ValueError, match=r'gate_scale must be a number or a tensor of one, got \[2\]'):
        sape2_bias(q, k, *tables, (2, 2), gate_scale=torch.ones(2))
    assert torch.equal(
        sape2_bias(q, k, *tables, (2, 2), gate_scale=torch.tensor([0.5])),
        sape2_bias(q, k, *tables, (2, 2), gate_scale=0.5))
