"""Figures of the results of the analyses. Every figure of the package begins with `new_figure`."""
import textwrap
from typing import Optional, Sequence, Tuple

import torch
from timm.data.loader import adapt_to_chs

__all__ = ['WHITE_TO_GREEN', 'displayed', 'draw_attention_distance', 'draw_histogram', 'draw_maps', 'new_figure']

WHITE_TO_GREEN = 'white to green'  # as in Figure 4 of the SaPE2 paper
MARKS = ('#d62728', '#1f77b4', '#9467bd', '#ff7f0e', '#8c564b', '#e377c2')


def new_figure(width: float, height: float):
    """An empty matplotlib figure that opens no window.

    Args:
        width: Width in inches.
        height: Height in inches.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise ImportError('figures need matplotlib: pip install matplotlib') from e
    return Figure(figsize=(width, height), layout='constrained')


def displayed(image: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
    """Undo the normalization of an image, to display it.

    Args:
        image: `[C, height, width]`, normalized.
        mean: Mean that was subtracted, one number per channel. An image of one channel may have several, as in the
            configs of models: timm uses their average.
        std: Standard deviation that the image was divided by, likewise.

    Returns:
        `[height, width, 3]`, from 0 to 1.
    """
    mean, std = (adapt_to_chs(tuple(values), len(image)) for values in (mean, std))
    mean, std = (torch.as_tensor(values, dtype=torch.float32).view(-1, 1, 1) for values in (mean, std))
    image = (image.detach().cpu().float() * std + mean).clamp(0, 1)
    return image.expand(3, -1, -1).permute(1, 2, 0) if image.shape[0] == 1 else image.permute(1, 2, 0)[..., :3]


def _colours(name: str):
    from matplotlib import colormaps
    from matplotlib.colors import LinearSegmentedColormap
    if name == WHITE_TO_GREEN:
        return LinearSegmentedColormap.from_list(name, ['#ffffff', '#41ab5d', '#00441b'])
    if name not in colormaps:
        raise ValueError(f'There is no colour map {name!r}; matplotlib has viridis, Greens, RdBu and many others.')
    return colormaps[name]


def draw_maps(
        image: torch.Tensor,
        titles: Sequence[str],
        matrices: Sequence[torch.Tensor],
        grid_size: Tuple[int, int],
        patches: Sequence[Tuple[int, int]],
        what: str,
        cmap: Optional[str] = None,
        aspect: float = 1.0,
):
    """Draw a figure like Figure 4 of the SaPE2 paper (2025).

    Each row of panels has the image, a matrix between all patches, and the matrix's rows for some patches as maps.

    Args:
        image: `[height, width, 3]`, from 0 to 1.
        titles: Titles of the rows of panels.
        matrices: A matrix for each row of panels, `[H*W, H*W]`.
        grid_size: (H, W).
        patches: (x, y) of the patches whose rows are drawn, in patches from the top left.
        what: Label of the colour bar.
        cmap: `WHITE_TO_GREEN` or the name of a colour map of matplotlib. By default a matrix with numbers on both sides
            of 0 goes from blue over white to red, with white at 0, and others are `WHITE_TO_GREEN`. Numbers that are
            not finite are grey.
        aspect: Height of a patch divided by its width.

    Returns:
        The matplotlib figure.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If matplotlib has no such colour map, or a matrix has no finite number.
    """
    height, width = grid_size
    columns = 2 + len(patches)
    panel = 2.6
    panel_height = panel * min(1.2, max(0.7, aspect * height / width))
    figure = new_figure(panel * columns + 1, panel_height * len(matrices) + 0.4)
    axes = figure.subplots(len(matrices), columns, squeeze=False)
    for row, title, matrix in zip(axes, titles, matrices):
        matrix = matrix.detach().cpu().float()
        shown = matrix.masked_fill(~matrix.isfinite(), float('nan')).numpy()
        finite = matrix[matrix.isfinite()]
        if not len(finite):
            raise ValueError(f'{title}: no number is finite, so there is nothing to draw. Has the model diverged?')
        least, most = finite.min().item(), finite.max().item()
        if cmap is None and least < 0 < most:
            colours, most = _colours('RdBu_r'), max(-least, most)
            least = -most
        else:
            colours = _colours(cmap or WHITE_TO_GREEN)
        scale = dict(cmap=colours.with_extremes(bad='#bbbbbb'), vmin=least, vmax=most, interpolation='nearest')
        extent = (-0.5, width - 0.5, height - 0.5, -0.5)
        row[0].imshow(image.numpy(), extent=extent, interpolation='nearest', aspect=aspect)
        row[0].set_title('image', fontsize=9)
        drawn = row[1].imshow(shown, aspect='auto', **scale)
        row[1].set(xlabel='to patch', ylabel='from patch')
        row[1].set_title(title, fontsize=9)
        for (x, y), axis, colour in zip(patches, row[2:], MARKS * len(patches)):
            axis.imshow(shown[y * width + x].reshape(height, width), aspect=aspect, **scale)
            axis.set_title(f'from patch x={x}, y={y}', fontsize=9, color=colour)
            for marked in (axis, row[0]):
                marked.add_patch(_frame(x, y, colour))
        for axis in (row[0], *row[2:]):
            axis.set(xlabel='x, patches', ylabel='y, patches')
            axis.xaxis.get_major_locator().set_params(integer=True)
            axis.yaxis.get_major_locator().set_params(integer=True)
        label = textwrap.fill(what, int(12 * panel_height))  # letters that fit beside a panel
        figure.colorbar(drawn, ax=row.tolist(), label=label, shrink=0.9)
    return figure


def _frame(x: int, y: int, colour: str):
    from matplotlib.patches import Rectangle
    return Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor=colour, linewidth=2)


def draw_attention_distance(distances: Sequence[torch.Tensor], layers: Sequence[int]):
    """Draw the mean attention distance of each head over the layers.

    Args:
        distances: Mean distances in patches, `[h]` for each layer.
        layers: Indices of these layers.

    Returns:
        The matplotlib figure.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    figure = new_figure(5, 3.5)
    axes = figure.subplots()
    for head, values in enumerate(zip(*(found.tolist() for found in distances))):
        axes.plot(layers, values, 'o', markersize=4, label=f'head {head}')
    axes.plot(layers, [found.mean().item() for found in distances], color='black', linewidth=1, label='mean over heads')
    axes.set(xlabel='layer', ylabel='mean attention distance, patches', xticks=list(layers))
    axes.legend(fontsize=7, ncols=2)
    return figure


def draw_histogram(values: torch.Tensor, mean: float, label: str, title: Optional[str] = None):
    """Draw a histogram of values from 0 to 1.

    Args:
        values: `[n]`. NaN is left out.
        mean: Position of a vertical line.
        label: Label of the axis of values.
        title: Title of the figure.

    Returns:
        The matplotlib figure.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    figure = new_figure(5, 3.5)
    axes = figure.subplots()
    axes.hist(values[values.isfinite()].tolist(), bins=40, range=(0, 1), color='#41ab5d')
    axes.axvline(mean, color='black', linewidth=1, label=f'mean {mean:.3f}')
    axes.set(xlabel=label, ylabel='images', title=title, xlim=(0, 1))
    axes.legend()
    return figure
