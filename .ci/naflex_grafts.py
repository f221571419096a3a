"""Graft encodings onto all that timm builds as NaFlexVit: its own, those of its Eva class, and its plain ViTs.

    python .ci/naflex_grafts.py [PATTERN ...] > results/naflex_grafts.md

For each base and encoding: the logits at the start, two training steps, saving and loading. Prints a Markdown table
with a line for each architecture. Exits with 1 if something is wrong.
"""
import fnmatch
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / name) for name in ('', 'tests', 'tests/naflex')]
import timm  # noqa: E402
import torch  # noqa: E402
from batches import GRID, PATCH, SIZES, batch, pictures  # noqa: E402
from common import randomize  # noqa: E402
from timm.models import is_model_in_modules  # noqa: E402
from timm.models.vision_transformer import VisionTransformer  # noqa: E402
from tqdm import tqdm  # noqa: E402

import timm_sape  # noqa: E402
from timm_sape.lab.machine import about  # noqa: E402

ENCODINGS = ('sape2_k', 'cope', 'irpe_qkv')
TOLERANCE = 1e-5
MODULES = 'naflexvit', 'eva', 'vision_transformer'
REFUSED = (  # all others can be grafted
    'eva02_enormous_patch14_clip_224', 'vit_*_patch16_18x2_224', 'vit_*_xp_224', 'vit_pwee_*', 'vit_dpwee_*',
    'vit_dwee_*', 'vit_dlittle_*')
LARGEST_WIDTH = 384  # that of ViT-S; beyond it a model keeps 4 heads
SIZE = GRID[0] * PATCH, GRID[1] * PATCH
SQUARE = SIZE[0], SIZE[0]  # timm loads a table of a plain ViT into NaFlexVit only if it is square
ABOUT = """\
# Grafts onto all that timm builds as NaFlexVit

`python .ci/naflex_grafts.py > results/naflex_grafts.md`; {about}

These are timm's own NaFlexVits, its Eva class, and the plain ViTs of vision_transformer.py with `use_naflex=True`.

| module | architectures | can be grafted | all right with each of {encodings} |
| --- | --- | --- | --- |
{counts}

Weights are large random numbers; depth is cut to 2, patches to 8 x 8 pixels, and widths beyond ViT-S's 384 to 4 heads
(6 in ViT-g of DINOv2 and TIPSv2) of as many channels as before (column `width`).

- Differences of logits at the start are relative to the largest logit; the largest of the three grafts counts, and
  1e-5 is allowed (float32). `classic`: images, beside the model that timm makes by default; the weights of a plain ViT
  are loaded as a checkpoint, and its images are square. `images`: beside timm's NaFlexVit. `patches`: a padded batch
  of four aspect ratios in raster order, where timm is right. `permuted`: the same patches in a random order, beside
  timm in raster order.
- `moved`: new parameters that had moved after the second step of SGD on that batch. Where the class token is pooled
  (`token`), 13 of 18 is right: the bias of `sape2_k` and `cope` is zero in that token's row, so their gate and tables
  in the last layer (3 and 2 parameters) get no gradient. `irpe_qkv` has a bucket for such pairs.
- `loaded`: saved and loaded, the trained graft gives the same logits, bit for bit.
"""


@lru_cache(maxsize=1)  # the models of an architecture follow each other
def width_of(name):
    """Arguments of a model of the same kind that is not wide."""
    model = timm.create_model(name, device='meta')
    blocks = model.blocks[0], model.blocks[len(model.blocks) // 2]
    if not hasattr(blocks[0], 'attn'):  # cannot be grafted
        return {}
    heads = blocks[0].attn.num_heads
    width = {}
    if model.embed_dim > LARGEST_WIDTH:
        kept = 6 if name.endswith(('dinov2', 'tipsv2')) else 4  # the SwiGLU of ViT-g would have an odd width
        width.update(embed_dim=kept * blocks[0].attn.head_dim, num_heads=kept)
    if 'sapiens2' in name:  # the large ones have fewer keys, in the middle blocks
        width['num_kv_heads'] = [width.get('num_heads', heads) * b.attn.num_kv_heads // heads for b in blocks]
    return width


def shape_of(name, size=SIZE):
    """Arguments of a small model of the same kind."""
    return dict(
        depth=2, num_classes=3, img_size=size, patch_size=PATCH, **width_of(name),
        pretrained_cfg_overlay=dict(input_size=(3, *size), num_classes=3))  # saving tries an image of this size


def make_bases(name, flag):
    """timm's models, with large random weights: its NaFlexVit, and what it makes without `use_naflex=True`."""
    bases = {'images': timm.create_model(name, **shape_of(name), **flag)}
    if flag:
        size = SIZE if is_model_in_modules(name, ('eva',)) else SQUARE
        bases['classic'] = timm.create_model(name, **shape_of(name, size))
    return {what: randomize(base.eval()) for what, base in bases.items()}


def make_graft(name, base, pos_enc):
    """The graft of a base, as NaFlexVit: of a plain ViT by way of its weights."""
    if not isinstance(base, VisionTransformer):
        return timm_sape.graft(base, pos_enc)
    shape = shape_of(name, SQUARE)
    shape['pretrained_cfg_overlay']['state_dict'] = base.state_dict()
    if 'radio' in name:
        shape['pos_embed_grid_size'] = base.patch_embed.grid_size  # by default RADIO's NaFlexVit keeps 128 x 128
    return timm.create_model(
        'vit_graft', base=name, pos_enc=pos_enc, use_naflex=True, pretrained=True, **shape).eval()


def difference(actual, expected):
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def trained(grafted, given):
    """Two training steps. Returns the number of new parameters, and the names of those that stood still."""
    new = {name: p for name, p in grafted.named_parameters() if 'encodings.' in name}
    before = {name: p.detach().clone() for name, p in new.items()}
    optimizer = torch.optim.SGD(grafted.parameters(), lr=0.01)  # larger steps may saturate softmax
    for _ in range(2):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(grafted(given), torch.arange(len(SIZES)) % 3).backward()
        optimizer.step()
    return len(new), {name for name, p in new.items() if torch.equal(p, before[name]) or not p.isfinite().all()}


def expected_to_stand_still(grafted):
    """All of the last layer if its class token alone is read, where only pairs of patches have a bias: not in iRPE."""
    return {
        name for name, _ in grafted.named_parameters()
        if grafted.global_pool == 'token' and name.startswith('blocks.1.') and 'encodings.' in name
        and 'irpe' not in name}


@torch.no_grad()
def differences(bases, grafts):
    images = torch.cat(pictures([GRID] * 2, torch.float32))
    mixed = pictures(SIZES, torch.float32)
    patches = batch(mixed, padding=3)
    found = {}
    for what, base in bases.items():
        given = images[..., :SQUARE[0], :SQUARE[1]] if isinstance(base, VisionTransformer) else images
        found[what] = difference(grafts[what](given), base(given))
    expected = bases['images'](patches)
    for what, given in (('patches', patches), ('permuted', batch(mixed, padding=3, permute=True))):
        found[what] = difference(grafts['images'](given), expected)
    return found


def check(name, bases, pos_enc):
    """What one encoding does on the bases: differences, numbers of parameters, whether loading is exact."""
    grafts = {what: make_graft(name, base, pos_enc) for what, base in bases.items()}
    found = differences(bases, grafts)
    grafted = grafts['images']
    given = batch(pictures(SIZES, torch.float32), padding=3)
    found['position'] = grafted.base_position
    found['new'], still = trained(grafted, given)
    found['moved'] = found['new'] - len(still)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        timm_sape.hub.save(grafted, Path(folder) / 'model')
        found['loaded'] = torch.equal(timm_sape.hub.load(Path(folder) / 'model').eval()(given), grafted(given))
    limits = [found[what] <= TOLERANCE for what in (*bases, 'patches', 'permuted')]  # a NaN is not
    found['right'] = all(limits) and still == expected_to_stand_still(grafted) and found['loaded']
    return found


def row(name):
    """A line of the table, and whether it is right."""
    refused = any(fnmatch.fnmatch(name, pattern) for pattern in REFUSED)
    flag = {} if is_model_in_modules(name, ('naflexvit',)) else {'use_naflex': True}
    try:
        timm_sape.graft(name, 'nope', **shape_of(name), **flag)
    except ValueError as e:
        return (name, *[''] * 8, f'refused: {e}'), refused
    bases = make_bases(name, flag)
    found = [check(name, bases, pos_enc) for pos_enc in ENCODINGS]
    columns = [
        f'{max(each[what] for each in found):.1e}' if what in found[0] else ''
        for what in ('classic', 'images', 'patches', 'permuted')]
    moved = f'{sum(each["moved"] for each in found)} of {sum(each["new"] for each in found)}'
    loaded = 'exact' if all(each['loaded'] for each in found) else 'no'
    right = not refused and all(each['right'] for each in found)
    base = bases['images']
    position = f'{found[0]["position"]}; {base.global_pool}'
    return (name, base.embed_dim, position, *columns, moved, loaded, '' if right else 'WRONG'), right


def count(module, names, rows):
    """How many architectures of a module there are, can be grafted, and are right."""
    last = [line[-1] for name, line in zip(names, rows) if is_model_in_modules(name, (module,))]
    grafted = [what for what in last if 'refused' not in what]
    return f'| `{module}` | {len(last)} | {len(grafted)} | {grafted.count("")} |'


def main():
    patterns = sys.argv[1:] or ['*']
    names = [
        name for module in MODULES for name in timm.list_models(module=module)
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
    where = about(torch.device('cpu'))  # before anyone edits the checkout
    rows, right = zip(*map(row, tqdm(names)))
    print(ABOUT.format(
        about=where, encodings=', '.join(f'`{name}`' for name in ENCODINGS),
        counts='\n'.join(count(module, names, rows) for module in MODULES)))
    header = 'base', 'width', 'position; pooling', 'classic', 'images', 'patches', 'permuted', 'moved', 'loaded', ''
    for line in (header, ['---'] * len(header), *rows):
        print('|', ' | '.join(map(str, line)), '|')
    return int(not all(right))


if __name__ == '__main__':
    sys.exit(main())
