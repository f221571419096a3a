"""Each encoding does on patches with coordinates what it does on plain images, one by one."""
import math

import pytest
import torch
from batches import GRID, PATCH, SIZES, Twins, batch, pictures
from common import POS_ENCS, ToyLayer, ToyShared, rarely, registered

import timm_sape
from timm_sape import grid_groups, position
from timm_sape.conversion import convert_to_naflex

GATED = [
    f'auto_{name}' for name in timm_sape.list_encodings()
    if timm_sape.get_encoding(name).gate_init is not None and timm_sape.get_encoding(name).alone and name != 'nope']
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


@pytest.fixture(autouse=True)
def third_party():
    with registered(ToyShared, ToyLayer):
        yield


def mixes(pos_enc):
    """Whether positions are weighed apart from tokens, by an encoding or a gate.

    NaFlexVit has no rows for prefix tokens. They are added to these tokens once and for all, so nothing can weigh them.
    """
    return pos_enc == 'auto_ape' or any(timm_sape.get_encoding(name).overrides('mix') for name in pos_enc.split('+'))


def kept_patches(number=18, images=3, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(GRID[0] * GRID[1], generator=generator)[:number] for _ in range(images)])


def objects_of(model, images):
    """What `ope` needs to be told where patches are missing."""
    for encoding in model.encodings.values():
        if 'object_index' in encoding.asks_for:
            return encoding.find_objects(images, timm_sape.Grid(*GRID), (PATCH, PATCH))
    return None


def cases(plain, naflex, dtype):
    """Name, logits on patches, and those of the plain host."""
    images = pictures([GRID] * 3, dtype)
    together = torch.cat(images)
    expected = plain(together)
    yield 'images', naflex(together), expected
    yield 'patches', naflex(batch(images)), expected
    yield 'permuted', naflex(batch(images, permute=True)), expected
    yield 'padded', naflex(batch(images, padding=9)), expected

    kept = kept_patches()
    objects = objects_of(plain, together)
    given = {} if objects is None else {'object_index': torch.nn.functional.pad(objects.gather(1, kept), (0, 4))}
    yield 'left out', naflex({**batch(images, keep=kept, padding=4), **given}), plain(
        together, keep_indices=kept, object_index=objects)

    mixed = pictures(SIZES, dtype)
    yield 'mixed sizes', naflex(batch(mixed, permute=True)), torch.cat([plain(image) for image in mixed])


@pytest.mark.one_of(3, all_kinds=False)
@pytest.mark.parametrize('pos_enc', rarely(POS_ENCS) + GATED)
def test_logits_and_gradients(pos_enc):
    for dtype, tolerance in TOLERANCE.items():
        twins = Twins(pos_enc, dtype, no_embed_class=mixes(pos_enc))
        plain = twins()
        naflex = twins.naflex(plain)
        for what, actual, expected in cases(plain, naflex, dtype):
            error = (actual - expected).abs().max() / expected.abs().max()
            assert error <= tolerance, f'{what}, {dtype}: {error:.1e}'
            if dtype is torch.float64:
                compare_gradients(what, (naflex, actual), (plain, expected))


@pytest.mark.parametrize('pos_enc', ['ape', 'sape2_k', 'cope', 'rpb', 'ope'])
def test_keep_indices(pos_enc):
    """The grid is that of all patches, though none of its last row is kept."""
    twins = Twins(pos_enc)
    plain, images = twins(), pictures([GRID] * 3)
    naflex, together = twins.naflex(plain), torch.cat(images)
    kept = torch.rand(3, 24, generator=torch.Generator().manual_seed(0)).argsort(1)[:, :14]
    given = {'keep_indices': kept, 'object_index': objects_of(plain, together)}
    torch.testing.assert_close(naflex(batch(images), **given), plain(together, **given))


@pytest.mark.parametrize('pos_enc', ['nope', 'rope2d', 'sape2_k', 'rpb'])
def test_attn_mask(pos_enc):
    """A number for each image, head and pair of tokens. A token that attends to nothing gets zeros from attention."""
    twins = Twins(pos_enc)
    plain, images = twins(), pictures([GRID] * 3)
    naflex, together = twins.naflex(plain), torch.cat(images)
    num_tokens = plain.num_prefix_tokens + GRID[0] * GRID[1]
    mask = torch.randn(3, 4, num_tokens, num_tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask[:, :, 7] = -math.inf
    for given in (mask, mask > -1):
        torch.testing.assert_close(naflex(batch(images), attn_mask=given), plain(together, attn_mask=given))


def compare_gradients(what, *found):
    for name, error in gradient_errors(*found).items():
        assert error < 1e-10, f'{what}: the gradient of {name} is off by {error:.1e}'


def gradients_of(model, logits):
    """Of all parameters that get one, by their name."""
    weights = torch.linspace(-1, 1, logits.numel(), dtype=torch.float64).view_as(logits)
    model.zero_grad()
    (logits * weights).sum().backward(retain_graph=True)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def gradient_errors(ours, plain):
    """By name of the parameter, for pairs of a model and its logits. Infinite if only one has a gradient."""
    actual, expected = gradients_of(*ours), gradients_of(*plain)
    if 'pos_embed' in expected:  # rows for prefix tokens have no counterpart: NaFlexVit has them in the tokens
        expected['pos_embed'] = expected['pos_embed'][:, -math.prod(GRID):]
    expected = convert_to_naflex(expected, ours[0], GRID)
    errors = {name: float('inf') for name in actual.keys() ^ expected.keys() if {**actual, **expected}[name].any()}
    for name in actual.keys() & expected.keys():
        error = (actual[name] - expected[name]).abs().max() / expected[name].abs().max().clamp(min=1e-6)
        errors[name] = error.item()
    return errors


def raster_order_of_the_sequence(coord, valid, sizes, num_prefix_tokens):
    """What timm's encodings do: a token's place is its place in the sequence, whatever its coordinates say."""
    index = torch.arange(coord.shape[1])
    width = sizes[:, 1:]
    in_order = torch.stack([index // width, index % width], dim=-1)
    return grid_groups.group_by_grid(in_order, valid, sizes, num_prefix_tokens)


def one_size(coord, valid, sizes, num_prefix_tokens):
    """The largest grid of the batch for all images."""
    return grid_groups.group_by_grid(coord, valid, sizes.amax(0).expand_as(sizes), num_prefix_tokens)


def padding_counts(coord, valid, sizes, num_prefix_tokens):
    """Padding is taken for patches of a larger grid."""
    coord = coord.clone()
    for sample in range(len(coord)):
        missing = (~valid[sample]).nonzero()[:, 0]
        coord[sample, missing, 0] = sizes[sample, 0]
        coord[sample, missing, 1] = torch.arange(len(missing))
    width = torch.maximum(sizes[:, 1], (~valid).sum(1))
    return grid_groups.group_by_grid(
        coord, torch.ones_like(valid), torch.stack([sizes[:, 0] + 1, width], dim=1), num_prefix_tokens)


@pytest.mark.parametrize(('pos_enc', 'mistake', 'fails'), [
    *((name, raster_order_of_the_sequence, 'permuted') for name in ('ape', 'rope2d', 'sape2_k', 'cope', 'rpb')),
    *((name, one_size, 'mixed sizes') for name in ('ape', 'sape2_k', 'cope', 'rpb')),  # rope2d counts from the corner
    *((name, padding_counts, 'padded') for name in ('ape', 'rope2d', 'sape2_k', 'cope', 'rpb')),
])
def test_a_mistake_is_noticed(monkeypatch, pos_enc, mistake, fails):
    twins = Twins(pos_enc)
    plain = twins()
    naflex = twins.naflex(plain)
    monkeypatch.setattr('timm_sape.naflexvit_pos_enc.group_by_grid', mistake)
    errors = {}
    for what, actual, expected in cases(plain, naflex, torch.float64):
        errors[what] = ((actual - expected).abs().max() / expected.abs().max()).item()
        if what == fails:
            break
    assert errors[fails] > 1e-6, errors


def test_padding_in_the_masked_path_is_noticed(monkeypatch):
    """Models that only rotate run on the whole batch with a mask; without the mask padding would be attended to."""
    twins = Twins('rope2d')
    plain = twins()
    naflex = twins.naflex(plain)
    monkeypatch.setattr(
        position.GridGroups, 'is_token', lambda self: torch.ones(self.batch_size, self.num_tokens, dtype=torch.bool))
    images = pictures([GRID] * 2)
    error = (naflex(batch(images, padding=9)) - plain(torch.cat(images))).abs().max()
    assert error > 1e-4


@pytest.mark.parametrize('pos_enc', ['nope', 'ape', 'rope2d', 'rope2d_mixed', 'sape2_k', 'cope', 'shaw', 'peg'])
def test_padding_takes_part_in_nothing(pos_enc):
    """Whatever stands in padding, NaN included, changes neither logits nor gradients, and gets no gradient."""
    twins = Twins(pos_enc)
    naflex = twins.naflex(twins())
    clean = batch(pictures(SIZES), padding=3)
    dirty = [dict(clean, patches=clean['patches'].clone()) for _ in range(2)]
    for given, value in zip(dirty, (1e6, torch.nan)):
        given['patches'][~clean['patch_valid']] = value
    found = []
    for given in (clean, *dirty):
        naflex.zero_grad()
        patches = given['patches'].requires_grad_()
        logits = naflex(given)
        logits.square().sum().backward()
        assert not patches.grad[~given['patch_valid']].any()
        assert patches.grad.isfinite().all()
        found.append((logits, [p.grad.clone() for p in naflex.parameters() if p.grad is not None]))
    for logits, gradients in found[1:]:
        assert torch.equal(found[0][0], logits)
        assert all(torch.equal(a, b) for a, b in zip(found[0][1], gradients))
