"""The operator for distances in PyTorch: its blocks, its second look at small distances, and what it stores."""
import pytest
import torch

from harness import assert_near
from operators import make_inputs, make_near_codes, run
from timm_sape.functional import sape2_attention
from timm_sape.ops import reference, torch_distances
from timm_sape.ops.chunks import chunk_size, chunks
from timm_sape.ops.distances import distance_attention

ALL = slice(None), slice(None)


@pytest.mark.parametrize('offset', [0.0, 3.0])
@pytest.mark.parametrize('num_near, many', [(2, False), (30, True)])
def test_small_distances(num_near, many, offset, monkeypatch):
    """Few small distances are computed from differences one by one, many with their whole block; both to the digit."""
    codes = make_near_codes(num_near, 1e-3, offset=offset)
    whole_blocks = []
    original = torch_distances._precise_squares
    monkeypatch.setattr(
        torch_distances, '_precise_squares', lambda *args: whole_blocks.append(args) or original(*args))
    prepared = torch_distances._prepare(codes[:1, None], codes[1:, None], 41).of(ALL)
    squares = torch.full((2, 41, 41), float('nan'))
    near = torch_distances._squares(prepared, slice(0, 41), 1, squares)
    assert near is not None and (near == 'many') is many and bool(whole_blocks) is many
    found = squares.sqrt().double()
    exact = torch.zeros(2, 41, 41, dtype=torch.float64)
    exact[:, 1:, 1:] = torch.cdist(codes.double(), codes.double(), compute_mode='donot_use_mm_for_euclid_dist')
    assert ((found - exact).abs() <= 1e-6 * exact.clamp(max=0.01) + 1e-6 * exact).all()
    product = (prepared.left @ prepared.right.mT).relu().sqrt()
    assert ((product - exact).abs() > 1e-2 * exact).any()


@pytest.mark.parametrize('rows', [slice(0, 41), slice(7, 19)])
@pytest.mark.parametrize('offset', [0.0, 100.0])
def test_squares_by_products(offset, rows):
    """What CUDA computes, to the digit of each distance, however small it is."""
    w = make_near_codes(30, 1e-3, offset=offset)
    squares = reference.squares_by_products(w[:, rows], w)
    exact = torch.cdist(w[:, rows].double(), w.double(), compute_mode='donot_use_mm_for_euclid_dist').square()
    assert exact[exact > 0].min() < 1e-4 and squares.dtype == torch.float64
    noise = (64 * torch.finfo(torch.float32).eps * w.double().norm(dim=-1).max()) ** 2
    assert ((squares - exact).abs() <= 1e-4 * exact.clamp(min=noise)).all()


@pytest.mark.parametrize('offset', [0.0, 100.0])
def test_gradient_of_distances_by_products(offset):
    """Where a distance is small the terms of the gradient nearly cancel. One by one in float64, from differences."""
    codes = make_near_codes(30, 1e-2, offset=offset).requires_grad_()
    weights = torch.randn(2, 40, 40, generator=torch.Generator().manual_seed(1))
    found, = torch.autograd.grad((weights * reference._distance_by_products(codes)).sum(), codes)
    w = codes.detach().double()
    difference = w.unsqueeze(-2) - w.unsqueeze(-3)
    distance = difference.norm(dim=-1, keepdim=True)
    direction = torch.where(distance > 0, difference / distance, 0.0)
    exact = ((weights + weights.mT).double().unsqueeze(-1) * direction).sum(dim=-2)
    assert_near(found, exact, 1e-6)


@pytest.mark.parametrize('num_near, distance', [(2, 0.0), (30, 1e-6), (30, 1e-9)])
def test_gradient_of_small_distances_in_float64(num_near, distance):
    """There is no wider dtype for their sums, so each is computed from a difference. A distance of 0 has none."""
    generator, codes = torch.Generator().manual_seed(1), make_near_codes(num_near, distance).double()
    codes[1, :num_near] = codes[1, :1] + distance * torch.randn(num_near, 6, generator=generator).double()
    q, k, v, *_ = make_inputs((5, 8), 0, heads=2)
    inputs = [q, k, v, codes[None], codes[None].flip(-1), torch.tensor([0.7, -0.4], dtype=torch.float64)]

    def gradients(attention):
        leaves = [t.detach().clone().requires_grad_() for t in inputs]
        weights = torch.randn(v.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        return torch.autograd.grad((attention(leaves) * weights).sum(), leaves)

    found = gradients(lambda leaves: torch_distances.torch_distance_attention(*leaves, 0.3))
    expected = gradients(lambda leaves: distance_attention(0.3, *leaves))
    for a, b in zip(found, expected):
        assert_near(a, b, 1e-12)


def test_nan_stays_off_prefix_tokens():
    """Also where a whole block of distances is computed precisely, as on a GPU without Triton."""
    codes = make_near_codes(2, 1e-3)
    codes[0, 4] = float('nan')
    prepared = torch_distances._prepare(codes[:1, None], codes[1:, None], 41).of(ALL)
    squares = torch.empty(2, 41, 41)
    torch_distances._precise_squares(prepared, slice(0, 41), 1, squares)
    assert not squares[:, 0].any() and not squares[:, :, 0].any()
    assert squares[0, 5, 1:5].isnan().all() and not squares[1].isnan().any()


def test_blocks_cover_everything(monkeypatch):
    """Results do not depend on the size of the blocks: parts of a head, whole heads, several of them."""
    inputs = make_inputs((5, 6), heads=3, batch=2)
    kwargs = dict(grid_size=(5, 6), num_prefix_tokens=1)
    expected, expected_grads = run(sape2_attention, inputs, backend='reference', **kwargs)
    for size in (1, 400, 961, 2000, 10 ** 6):
        monkeypatch.setattr('timm_sape.ops.chunks.CHUNK', size)
        out, grads = run(sape2_attention, inputs, backend='torch', **kwargs)
        assert_near(out, expected, 1e-10)
        for a, b in zip(grads, expected_grads):
            assert_near(a, b, 1e-10)


@pytest.mark.parametrize('backend', ['torch', 'cpp'])
def test_nothing_n_by_n_is_stored(backend):
    """What the backward pass needs grows with N (W + H), and no N x N tensor is among it."""
    saved = []
    inputs = [t.float() for t in make_inputs((16, 16))]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        run(sape2_attention, inputs, grid_size=(16, 16), num_prefix_tokens=1, backend=backend)
    assert saved and max(t.numel() for t in saved) < 257 * 257
    entries = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() // 4 for t in saved}
    assert sum(entries.values()) < 2 * 257 * (5 * 8 + 2 * 16 + 8) + 1000


@pytest.mark.parametrize('batch, num_heads, num_tokens', [(1, 1, 1), (3, 4, 300), (64, 6, 197), (2, 3, 5000)])
@pytest.mark.parametrize('device', ['cpu', 'cuda'])
def test_chunks_have_each_head_once(device, batch, num_heads, num_tokens):
    """On a GPU few large ones, whatever the threads of the CPU: each costs some hundred launches."""
    counts = torch.zeros(batch, num_heads, dtype=torch.int64)
    size = num_tokens ** 2
    found = list(chunks(batch, num_heads, size, torch.device(device)))
    for chunk in found:
        assert 0 < counts[chunk].numel() <= max(1, chunk_size(torch.device(device)) // size)
        counts[chunk] += 1
    assert (counts == 1).all()
    if device == 'cuda':
        assert len(found) <= 1 + batch * num_heads * num_tokens ** 2 // 2 ** 23


@pytest.mark.parametrize('num_tokens', [1, 17, 700, 50_000])
def test_rows_cover_each_token_once(num_tokens):
    """In blocks that do not grow with N x N."""
    device = torch.device('cpu')
    rows = list(torch_distances._rows(num_tokens, device))
    assert [i for block in rows for i in range(num_tokens)[block]] == list(range(num_tokens))
    assert max(block.stop - block.start for block in rows) <= max(16, chunk_size(device) // num_tokens)


def test_gradients_of_small_distances_with_threads():
    """The same bits run by run. Threads add float32 numbers to one place in any order; so they add float64."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(1, 1, 400, 8, generator=generator)
    codes[:, :, :60] = codes[:, :, :1] + 1e-4 * torch.randn(1, 1, 60, 8, generator=generator)
    q, k, v, weights = torch.randn(4, 1, 1, 400, 16, generator=generator)

    def gradients():
        leaves = [t.clone().requires_grad_() for t in (q, k, v, codes, codes.flip(2), torch.ones(1))]
        return torch.autograd.grad(torch_distances.torch_distance_attention(*leaves, 0.25), leaves, weights)

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        first, *others = (gradients() for _ in range(12))
    finally:
        torch.set_num_threads(before)
    for found in others:
        assert all(map(torch.equal, found, first))
