"""Every encoding draws itself: what it adds between one patch and all others, side by side."""
import math
from typing import List, NamedTuple, Optional, Sequence

import timm
import torch

from ..encodings import get_encoding, list_encodings
from .figures import displayed, new_figure
from .maps import position_maps, similarity
from .probe import randomize_encodings

__all__ = ['GROUPS', 'Panel', 'draw_gallery', 'gallery_panels']

GROUPS = {
    'tokens': 'added to tokens: cosine of the vectors of two patches',
    'rotation': 'rotation of q and k: change of the logits where all patches look alike',
    'geometry': 'added to logits, from geometry (first head)',
    'content': 'added to logits, from the content of the scene (first head)',
}
GRID, PATCH_SIZE = (14, 14), 4
SEEN_FROM = 5, 4  # (y, x) of the patch that all panels are seen from
COLUMNS = 12  # at most so many panels in a line


class Panel(NamedTuple):
    """One encoding, seen from one patch."""
    name: str
    group: str
    """A key of `GROUPS`."""
    values: torch.Tensor
    """To each patch of the grid, `[H, W]`. Cosines, or logits."""


@torch.no_grad()
def gallery_panels(names: Optional[Sequence[str]] = None) -> List[Panel]:
    """Compute what encodings add between one patch and all others, in untrained models of one layer.

    The image is a drawn scene, a disc in front of sky and ground, and the keys are the queries, so that patches that
    look alike suit each other. For rotations all patches look alike. Tables that start at zero get random numbers.

    Args:
        names: Encodings. Default: all of them.

    Returns:
        A panel for each encoding, by group.
    """
    panels = map(_panel, names or list_encodings())
    return sorted(panels, key=lambda panel: list(GROUPS).index(panel.group))


def _panel(name: str) -> Panel:
    cls = get_encoding(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = timm.create_model(
            'vit_small_pos_enc', pos_enc=name if cls.alone else f'{name}+sincos2d',
            img_size=[size * PATCH_SIZE for size in GRID], patch_size=PATCH_SIZE, depth=1, num_classes=0,
            class_token=False, global_pool='avg').eval()
    if cls.gate_init == 1:
        randomize_encodings(model, std=1)
    places = cls.acts_on()
    qkv = model.blocks[0].attn.qkv
    dim = qkv.in_features
    if 'q and k' in places:
        group = 'rotation'
        qkv.weight.zero_()
        qkv.bias.fill_(1)
    else:
        group = 'content' if any('content' in place for place in places) else 'geometry'
        qkv.weight[:dim] *= 3
        qkv.weight[dim:2 * dim] = qkv.weight[:dim]
    maps = position_maps(model, _scene())
    index = SEEN_FROM[0] * GRID[1] + SEEN_FROM[1]
    if places and places[0].startswith('tokens'):
        group = 'tokens'
        vectors = maps.vectors if maps.vectors is not None else maps.layers[0].vectors
        if vectors is None:  # added after a block
            encoding, = model.position_encodings().values()
            vectors = encoding(torch.ones(1, maps.grid.num_patches, dim), grid=maps.grid, hook='embed')
        values = similarity(vectors if vectors.ndim == 2 else vectors[0])[index]
    else:
        values = maps.layers[0].position[0, 0, index]
    return Panel(name, group, values.view(GRID))


def _scene() -> torch.Tensor:
    """A disc in front of sky and ground, `[1, 3, height, width]`."""
    height, width = (size * PATCH_SIZE for size in GRID)
    y = torch.linspace(0, 1, height)[:, None].expand(-1, width)
    x = torch.linspace(0, 1, width).expand(height, -1)
    sky, ground, disc = (torch.tensor(c).view(3, 1, 1) for c in ([-1., 0., 1.5], [0., 1., -1.], [1.5, -0.5, -1.]))
    scene = torch.where(y > 0.7, ground, sky)
    return torch.where((y - 0.4) ** 2 + (x - 0.35) ** 2 < 0.05, disc, scene)[None]


def _unit(is_cosine: bool, largest: float) -> str:
    if is_cosine:
        return 'cosine'
    return f'1 = {largest:.{2 if largest < 10 else 0}f} logits' if largest else 'adds nothing'


def _lines(panels: Sequence[Panel]) -> List[Sequence[Panel]]:
    """Panels in as few lines as they fit in, all but the last of the same length."""
    length = math.ceil(len(panels) / math.ceil(len(panels) / COLUMNS))
    return [panels[i:i + length] for i in range(0, len(panels), length)]


def draw_gallery(panels: Sequence[Panel]):
    """Draw panels in one figure with one scale.

    White is 0. Cosines are drawn as they are, logits in units of the largest of their panel, which stands below it.
    Grey patches are masked: attention to them is impossible.

    Args:
        panels: What `gallery_panels` returned.

    Returns:
        The matplotlib figure.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    groups = [(title, [panel for panel in panels if panel.group == group]) for group, title in GROUPS.items()]
    groups = [(title, _lines(own)) for title, own in groups if own]
    columns = max(len(line) for _, lines in groups for line in lines)
    rows = sum(len(lines) for _, lines in groups)
    figure = new_figure(1.25 * columns + 0.9, 1.62 * rows + 0.3 * len(groups) + 0.2)
    from matplotlib import colormaps  # after `new_figure`, which says what to do without matplotlib
    from matplotlib.patches import Rectangle

    body, side = figure.subfigures(1, 2, width_ratios=[1.25 * columns, 0.9])
    parts = body.subfigures(len(groups), 1, height_ratios=[len(lines) + 0.18 for _, lines in groups], squeeze=False)
    colours = colormaps['RdBu_r'].with_extremes(bad='#999999')
    for part, (title, lines) in zip(parts[:, 0], groups):
        if len(panels) > 1:
            part.suptitle(title, fontsize=10, x=0.01, ha='left')
        axes = part.subplots(len(lines), columns, squeeze=False)
        for axis in axes.flat:
            axis.set_axis_off()
        for row, line in zip(axes, lines):
            for axis, panel in zip(row, line):
                axis.set_axis_on()
                values = panel.values.masked_fill(panel.values.isinf(), torch.nan)
                largest = values.nan_to_num().abs().max().item()
                is_cosine = panel.group == 'tokens'
                shown = values if is_cosine or not largest else values / largest
                drawn = axis.imshow(shown.numpy(), cmap=colours, vmin=-1, vmax=1, interpolation='nearest')
                y, x = SEEN_FROM
                axis.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor='black', linewidth=1.5))
                axis.set(xticks=[], yticks=[])
                axis.set_title(panel.name, fontsize=9)
                axis.set_xlabel(_unit(is_cosine, largest), fontsize=7)
    bar = side.colorbar(drawn, cax=side.add_axes([0.15, 0.4, 0.15, 0.5] if len(panels) > 1 else [0.1, 0.15, 0.15, 0.7]))
    bar.set_ticks([-1, 0, 1])
    bar.ax.tick_params(labelsize=8)
    if len(panels) > 1:
        axis = side.add_axes([0.05, 0.08, 0.8, 0.2])
        axis.imshow(displayed(_scene()[0], [0.5] * 3, [0.3] * 3).numpy())
        axis.set(xticks=[], yticks=[])
        axis.set_title('the scene', fontsize=9)
    return figure
