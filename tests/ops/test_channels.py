"""Attention with further channels of q and k, and when it is the operation of `ops.channels`."""
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from harness import assert_near
from timm_sape import ops
from timm_sape.lab.bench import saved_bytes
from timm_sape.ops import attention
from timm_sape.ops.channels import can_attend_with_channels

SHAPES = {  # B, h, N, d (or that of q and k, and of v), and the widths of the channels
    'one encoding': (2, 3, 17, 8, [5]),
    'a multiple of eight': (2, 3, 17, 8, [8]),
    'two encodings': (1, 2, 9, 6, [3, 4]),
    'no channels': (2, 3, 17, 8, [0]),
    'one head, one channel': (2, 1, 5, 1, [2]),
    'one token': (1, 2, 1, 4, [3]),
    'q and k wider': (2, 3, 17, (12, 8), []),
    'q and k wider, and channels': (1, 2, 9, (7, 4), [3]),
}


def draw(batch, num_heads, num_tokens, head_dim, widths, dtype=torch.float64, order=(0, 2, 1, 3)):
    """q, k and v, channels likewise; all need gradients. `order` is that of the dims in memory; as `qkv` gives it."""
    generator = torch.Generator().manual_seed(0)

    def tensor(width):
        sizes = batch, num_heads, num_tokens, width
        x = torch.randn(*(sizes[dim] for dim in order), generator=generator, dtype=torch.float64)
        return x.to(dtype).permute(*map(order.index, range(4))).requires_grad_()

    of_q, of_v = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)
    q, k, v = (tensor(width) for width in (of_q, of_q, of_v))
    return q, k, v, [(tensor(width), tensor(width)) for width in widths]


def attend_and_gradients(q, k, v, channels, **kwargs):
    out = ops.attend(q, k, v, None, scale=0.3, channels=channels, **kwargs)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tensors = [q, k, v, *(t for pair in channels for t in pair)]
    return [out, *torch.autograd.grad(out, tensors, weights.to(out.dtype))]


def used(*args):
    raise AssertionError('computed with channels')


@pytest.mark.parametrize('order', [(0, 2, 1, 3), (0, 1, 2, 3), (0, 2, 3, 1)], ids=str)
@pytest.mark.parametrize('shape', SHAPES.values(), ids=SHAPES)
def test_equations(shape, order):
    """Output and gradients of the explicit softmax over the sum of all products, in float64.

    The last order has the heads innermost, as own attention layers may. It is torch's channels_last, which padding and
    concatenation keep.
    """
    q, k, v, channels = draw(*shape, order=order)
    tensors = [q, k, v, *(t for pair in channels for t in pair)]
    products = sum(torch.einsum('bhid,bhjd->bhij', a, b) for a, b in [(q, k), *channels])
    expected = torch.einsum('bhij,bhjd->bhid', (0.3 * products).softmax(-1), v)
    found, *grads = attend_and_gradients(q, k, v, channels)
    assert_near(found, expected, 1e-12)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for a, b in zip(grads, torch.autograd.grad(expected, tensors, weights)):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64, torch.bfloat16, torch.half])
@pytest.mark.parametrize('shape', SHAPES.values(), ids=SHAPES)
def test_the_same_as_pytorch(shape, dtype, monkeypatch):
    """To the last bit: it is the same kernel on the same numbers."""
    inputs = draw(*shape, dtype)
    found = attend_and_gradients(*inputs)
    monkeypatch.setattr(attention, 'can_attend_with_channels', lambda *args: False)
    for a, b in zip(found, attend_and_gradients(*inputs)):
        assert torch.equal(a, b)


def test_scaling_rounds_no_channel():
    """Channels may hold parts of numbers that cancel. In bfloat16, 0.3 times 96 would be 28.75, and 0.3 not 0.3."""
    b = torch.arange(1., 6.).bfloat16().view(1, 1, 5, 1)
    q = torch.tensor([96., 1.]).bfloat16().expand(1, 1, 5, 2)
    probabilities = ops.probabilities(q, torch.cat([b, -96 * b], dim=-1), None, scale=0.3)
    assert (probabilities == torch.tensor(0.2).bfloat16()).all()


def test_products_may_be_larger_than_logits():
    """300 times 300 does not fit into float16, 0.3 times as much does."""
    q = torch.full((1, 1, 4, 1), 300.).half()
    assert (ops.probabilities(q, q, None, scale=0.3) == 0.25).all()


def test_what_is_kept(monkeypatch):
    """q, k, v, channels, the output and a number for each of its rows. PyTorch alone keeps all of them padded."""
    batch, num_heads, num_tokens, head_dim, width = 2, 3, 32, 8, 9
    q, k, v, channels = draw(batch, num_heads, num_tokens, head_dim, [width], torch.float32)

    def bytes_a_row():
        kept = saved_bytes(lambda: ops.attend(q, k, v, None, scale=0.3, channels=channels), [])
        return kept / (batch * num_heads * num_tokens)

    assert bytes_a_row() == 4 * (4 * head_dim + 2 * width + 1)
    monkeypatch.setattr(attention, 'can_attend_with_channels', lambda *args: False)
    assert bytes_a_row() == 4 * (4 * 24 + 1)  # 24 is the next multiple of eight


def test_what_is_kept_of_wide_q_and_k():
    q, k, v, _ = draw(2, 3, 32, (16, 8), [], torch.float32)
    assert saved_bytes(lambda: ops.attend(q, k, v, None, scale=0.3), []) == 4 * 2 * 3 * 32 * (2 * 16 + 2 * 8 + 1)


@pytest.mark.parametrize('use_reentrant', [False, True])
def test_checkpointing(use_reentrant):
    q, k, v, channels = draw(*SHAPES['two encodings'])
    (a, b), (c, d) = channels

    def run(q, k, v, a, b, c, d):
        return ops.attend(q, k, v, None, scale=0.3, channels=[(a, b), (c, d)])

    inputs = q, k, v, a, b, c, d
    run(*inputs).square().sum().backward()
    expected = [t.grad for t in inputs]
    for t in inputs:
        t.grad = None
    checkpoint(run, *inputs, use_reentrant=use_reentrant).square().sum().backward()
    for t, grad in zip(inputs, expected):
        assert torch.equal(t.grad, grad)


def test_a_hook_may_change_the_output():
    """In place, as ablations of heads do it."""
    q, k, v, channels = draw(*SHAPES['one encoding'])
    out = ops.attend(q, k, v, None, scale=0.3, channels=channels)
    expected = out.detach().clone()
    out[:, 0] = 0
    assert not out[:, 0].any() and torch.equal(out[:, 1:], expected[:, 1:])


@pytest.mark.parametrize('shape', SHAPES.values(), ids=SHAPES)
def test_gradients_in_batches(shape):
    q, k, v, channels = draw(*shape)
    out = ops.attend(q, k, v, None, scale=0.3, channels=channels)
    weights = torch.randn(3, *out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (found,) = torch.autograd.grad(out, v, weights, retain_graph=True, is_grads_batched=True)
    for a, w in zip(found, weights):
        assert_near(a, torch.autograd.grad(out, v, w, retain_graph=True)[0], 1e-12)


def test_channels_that_were_made_in_inference_mode():
    """As when an encoding keeps some from a validation."""
    q, k, v, channels = draw(*SHAPES['one encoding'], torch.float32)
    with torch.inference_mode():
        kept = [(a.clone(), b.clone()) for a, b in channels]
        assert can_attend_with_channels(q, k, v, kept)
        expected = ops.attend(q, k, v, None, scale=0.3, channels=kept)
    out = ops.attend(q, k, v, None, scale=0.3, channels=kept)
    out.sum().backward()
    assert torch.equal(out, expected) and v.grad is not None


def test_when_pytorch_computes_it(monkeypatch):
    """What the operation cannot do, and what PyTorch would compute by another kernel or in another dtype."""
    q, k, v, channels = draw(*SHAPES['one encoding'], torch.float32)
    assert can_attend_with_channels(q, k, v, channels)
    with torch.autocast('cpu', torch.bfloat16):
        assert not can_attend_with_channels(q, k, v, channels)
        assert can_attend_with_channels(*draw(*SHAPES['one encoding'], torch.bfloat16))
        assert can_attend_with_channels(*draw(*SHAPES['one encoding'], torch.float64))
    with sdpa_kernel(SDPBackend.MATH):
        assert not can_attend_with_channels(q, k, v, channels)
    assert not can_attend_with_channels(q, k, v, [(a.double(), b.double()) for a, b in channels])
    assert not can_attend_with_channels(*(t[:, :, :0] for t in (q, k, v)), channels)
    assert not can_attend_with_channels(*(t.to('meta') for t in (q, k, v)), channels)
    expected = attend_and_gradients(q, k, v, channels)
    monkeypatch.setattr(attention, 'attend_with_channels', used)
    with pytest.raises(AssertionError, match='computed with channels'):
        attend_and_gradients(q, k, v, channels)
    for a, b in zip(attend_and_gradients(q, k, v, channels, fused=False), expected):
        assert_near(a, b, 1e-5)
    attend_and_gradients(q, k, v, channels, dropout_p=0.5)
    every = torch.ones(17, 17, dtype=torch.bool)
    out = ops.attend(q, k, v, every, scale=0.3, channels=channels)
    assert_near(out, expected[0], 1e-5)
    (a, b), = channels
    torch.func.vmap(lambda q, a: ops.attend(q, k, v, None, scale=0.3, channels=[(a, b)]))(q[None], a[None])
    torch.compile(lambda q: ops.attend(q, k, v, None, scale=0.3, channels=channels), backend='eager', fullgraph=True)(q)
    q, k, v, a, b = (t.detach() for t in (q, k, v, a, b))
    torch.jit.trace(lambda q: ops.attend(q, k, v, None, scale=0.3, channels=[(a, b)]), q, check_trace=False)
