"""Draw a resolution sweep."""
import math
from pathlib import Path
from typing import Any, Dict, Sequence

from ..analysis.figures import new_figure

__all__ = ['plot_sweep']

STYLES = {'rescale': '--', 'ntk': '-.', 'yarn': ':', 'slopes': (0, (1, 3))}  # of the others: '-'


def plot_sweep(rows: Sequence[Dict[str, Any]], path: Path) -> None:
    """Draw top-1 accuracy over image size, a line per model and rule, with its 95 % interval as a band.

    Each model has a colour, each rule a style of line, and those with `+log` are thin. Lines of images at their own
    aspect ratio are named `native`. If all sizes are square, the axis shows their side in pixels. Otherwise sizes stand
    side by side, ordered by their number of patches.

    Args:
        rows: From `sweep`.
        path: Its suffix sets the format, `.png`, `.svg` or `.pdf`.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    sizes = sorted({(row['height'] * row['width'], row['height'], row['width']) for row in rows})
    square = all(height == width for _, height, width in sizes)
    at = {(height, width): height if square else i for i, (_, height, width) in enumerate(sizes)}
    labels = [f'{height}' if square else f'{height}x{width}' for height, width in at]
    models = list(dict.fromkeys(row['model'] for row in rows))
    lines = list(dict.fromkeys((row['model'], row['rule'], row.get('images')) for row in rows))

    names = [f'{_short(model)}, {rule}' + ', native' * (images == 'native') for model, rule, images in lines]
    columns = 2 if max(map(len, names)) <= 50 else 1
    figure = new_figure(8, 4.5 + 0.22 * math.ceil(len(lines) / columns))
    axes = figure.subplots()
    for i, (line, name) in enumerate(zip(lines, names)):
        model, rule, images = line
        own = [row for row in rows if (row['model'], row['rule'], row.get('images')) == line]
        own.sort(key=lambda row: at[row['height'], row['width']])
        x = [at[row['height'], row['width']] for row in own]
        color = f'C{models.index(model) % 10}'
        low, high = [row['top1_low'] for row in own], [row['top1_high'] for row in own]
        axes.fill_between(x, low, high, color=color, alpha=min(0.15, 0.5 / len(lines)), linewidth=0)
        axes.plot(
            x, [row['top1'] for row in own], color=color, linestyle=STYLES.get(rule.removesuffix('+log'), '-'),
            linewidth=0.8 if rule.endswith('+log') else 1.8, marker='osD^vP*Xph'[i % 10], markersize=5, label=name)
    axes.set_xticks(list(at.values()), labels, rotation=45 if len(at) > 8 else 0)
    axes.set(
        xlabel='image size (px)' if square else 'image size, height x width (px)',
        ylabel='top-1 accuracy (%), 95 % interval')
    axes.grid(alpha=0.3)
    # below the axes, where the legend hides no line and names may be long
    figure.legend(loc='outside lower left', fontsize='small', ncols=columns, handlelength=4)
    figure.savefig(path, dpi=150)


def _short(model: str) -> str:
    """Keep the end of a long path, where models differ."""
    return model if len(model) <= 90 else f'...{model[-90:]}'
