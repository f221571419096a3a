"""Compare the encodings of timm's NaFlexVit with ours where coordinates, not raster order, must say where a patch is.

    python .ci/naflex_parity.py > results/naflex_parity.md

Exits with 1 if one of ours fails.
"""
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / name) for name in ('', 'tests', 'tests/naflex')]
import timm  # noqa: E402
import torch  # noqa: E402
from batches import GRID, PATCH, SIZES, Twins, batch, pictures  # noqa: E402
from common import HEADS, randomize  # noqa: E402
from test_against_plain import TOLERANCE as TOLERANCES  # noqa: E402
from test_against_plain import cases, gradient_errors, mixes  # noqa: E402

import timm_sape  # noqa: E402
from timm_sape.lab.machine import about  # noqa: E402

TOLERANCE = 1e-10  # in float64
SHAPE = dict(
    depth=2, embed_dim=32, num_heads=HEADS, num_classes=3, img_size=(GRID[0] * PATCH, GRID[1] * PATCH),
    patch_size=PATCH, pos_embed_grid_size=GRID, dtype=torch.float64)
ROTARY = dict(pos_embed='none')
# what it is, fields of timm's NaFlexVitCfg, our name
ROWS = (
    ('learned table', dict(pos_embed='learned'), 'ape'),
    ('learned table, `grid_sample`', dict(pos_embed_use_grid_sample=True), ''),
    ('factorized tables', dict(pos_embed='factorized'), 'ape2d'),
    ('factorized, `grid_sample`', dict(pos_embed='factorized', pos_embed_use_grid_sample=True), ''),
    ('axial RoPE', dict(ROTARY, rope_type='axial'), 'rope2d'),
    ('mixed RoPE', dict(ROTARY, rope_type='mixed'), 'rope2d_mixed'),
    ("DINOv3's RoPE", dict(ROTARY, rope_type='dinov3'), 'rope_dinov3'),
    ('interleaved M-RoPE', dict(ROTARY, rope_type='mrope', rope_mrope_section=(0, 2, 2)), 'mrope'),
    ('relative bias', None, 'rpb'),
    ('CoPE', None, 'cope'),
    ('SaPE2(K)', None, 'sape2_k'),
)
ABOUT = """\
# Encodings of timm's NaFlexVit, and ours

`python .ci/naflex_parity.py > results/naflex_parity.md`; {about}

Small models of large random weights, in float64. Numbers are differences of logits, relative to the largest. Ours must
be below 1e-10; 1e-15 is rounding.

- `permuted`: patches of four aspect ratios, padding included, in a random order together with their coordinates. The
  logits should be those in raster order.
- `subset`: 18 of 30 patches with their coordinates, in a random order; `in order`: the same in raster order. Ours is
  compared with our plain ViT that keeps the same patches; theirs with their own model on all patches in raster order,
  where those left out are marked as padding. Where it raises, a rotation for 30 places met 18 tokens.
- `dropped`: in training, with `patch_drop_rate=0.4`, compared in the same way.

timm's encodings take the order of the tokens for their places. Only tables with `pos_embed_use_grid_sample=True`, which
is off by default, read the coordinates.
"""


ABOUT_ALL = """
## Ours beside the plain model

Largest differences of logits between a batch of patches and our plain ViT with the same weights, relative to the
largest logit: in float64, in brackets in float32, where 1e-5 is allowed.

- (a) patches and coordinates of one grid; (b) permuted together with their coordinates; (c) with 30 % padding;
  (d) with 40 % of the patches left out, beside the plain model that keeps the same; (e) a batch of four aspect ratios,
  beside the images one by one.
- `gradients`: of all parameters, the largest difference of (a) to (e) in float64, relative to the largest entry of that
  gradient; 1e-10 is allowed.
"""
COMPOSITIONS = ('ape+sape2_k', 'ape+rope2d+rpb', 'auto_rope2d+auto_sape2_k', 'rope2d_mixed+ape+cope')


def kept_patches(seed=3):
    """Places of 18 patches for each of three images. The last is among them, by which timm finds the size of a grid."""
    generator = torch.Generator().manual_seed(seed)
    last = GRID[0] * GRID[1] - 1
    return torch.stack([
        torch.cat([torch.randperm(last, generator=generator)[:17], torch.tensor([last])]) for _ in range(3)])


def difference(run, expected):
    """A cell: the relative difference of what `run()` returns, or what it raises."""
    try:
        return f'{((run() - expected).abs().max() / expected.abs().max()).item():.0e}'
    except (RuntimeError, ValueError, IndexError) as e:
        return f'raises {type(e).__name__}'


def cells(model, drop, kept_of, reference):
    """The four cells of a model.

    Args:
        model: A NaFlexVit.
        drop: The same with patch dropout, in training mode.
        kept_of: Given the batch, what `drop` keeps, by the same seed.
        reference: Given kept patches, the logits that they must have.
    """
    mixed = pictures(SIZES)
    yield difference(lambda: model(batch(mixed, padding=3, permute=True)), model(batch(mixed, padding=3)))
    images = pictures([GRID] * 3)
    kept = kept_patches()
    for places in (kept, kept.sort(1)[0]):
        given = batch(images, keep=places)
        yield difference(lambda given=given: model(given), reference(images, kept))
    torch.manual_seed(0)
    kept = kept_of(batch(images))
    torch.manual_seed(0)
    yield difference(lambda: drop(batch(images)), reference(images, kept))


def of_timm(kwargs):
    def make(**more):
        return randomize(timm.create_model('naflexvit_base_patch16_gap', **SHAPE, **kwargs, **more))

    def reference(images, kept):
        given = batch(images)
        given['patch_valid'] = torch.zeros_like(given['patch_valid']).scatter(1, kept, True)
        return model(given)

    model, drop = make().eval(), make(patch_drop_rate=0.4).train()
    return cells(model, drop, lambda given: drop._forward_embeds(
        given['patches'], given['patch_coord'], given['patch_valid'], None)['keep_indices'], reference)


def row_of(pos_enc):
    """Differences of logits by case and dtype, and the largest of a gradient, as cells; and whether all are allowed."""
    errors, gradients = {}, []
    for dtype in TOLERANCES:
        twins = Twins(pos_enc, dtype, no_embed_class=mixes(pos_enc))
        plain = twins()
        naflex = twins.naflex(plain)
        for what, actual, expected in cases(plain, naflex, dtype):
            errors[what, dtype] = ((actual - expected).abs().max() / expected.abs().max()).item()
            if dtype is torch.float64:
                gradients += gradient_errors((naflex, actual), (plain, expected)).values()
    names = 'patches', 'permuted', 'padded', 'left out', 'mixed sizes'
    cells = [f'{errors[name, torch.float64]:.0e} ({errors[name, torch.float32]:.0e})' for name in names]
    gradient = torch.tensor(gradients).max().item()  # Python's max() can lose a NaN
    is_right = all(error <= TOLERANCES[dtype] for (_, dtype), error in errors.items()) and gradient < 1e-10
    return [f'`{pos_enc}`', *cells, f'{gradient:.0e}'], is_right


def of_ours(pos_enc):
    twins = Twins(pos_enc)
    plain = twins()
    drop = twins.naflex(plain, patch_drop_rate=0.4).train()

    def reference(images, kept):
        return plain(torch.cat(images), keep_indices=kept)

    return cells(twins.naflex(plain), drop, lambda given: drop._embed(*given.values(), None, None, None)[3], reference)


def main():
    is_right = compare_with_timm()
    print(ABOUT_ALL)
    print('| encoding | (a) | (b) | (c) | (d) | (e) | gradients |')
    print('|' + ' --- |' * 7)
    alone = [name for name in timm_sape.list_encodings() if timm_sape.get_encoding(name).alone]
    for pos_enc in (*alone, 'pemix+sincos2d+rpb', *COMPOSITIONS):
        cells, row_is_right = row_of(pos_enc)
        is_right &= row_is_right
        print('|', ' | '.join(cells), '|', flush=True)
    return int(not is_right)


@torch.no_grad()
def compare_with_timm():
    print(ABOUT.format(about=about(torch.device('cpu'))))
    print('| encoding | timm: permuted | subset | in order | dropped | ours | ours: permuted | subset | in order | '
          'dropped |')
    print('|' + ' --- |' * 10)
    is_right = True
    for what, kwargs, name in ROWS:
        theirs = ['none'] + [''] * 3 if kwargs is None else list(of_timm(kwargs))
        ours = list(of_ours(name)) if name else [''] * 4
        is_right &= not name or all(not cell.startswith('raises') and float(cell) <= TOLERANCE for cell in ours)
        print('|', ' | '.join((what, *theirs, f'`{name}`' if name else '', *ours)), '|')
    return is_right


if __name__ == '__main__':
    sys.exit(main())
