"""What came out of an experiment: a row for each run, a table of the models, and curves."""
import math
import statistics
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from ...analysis.figures import new_figure
from ..tables import markdown
from .plan import Plan
from .records import Record, loading_share, read_summary, status

__all__ = [
    'difference', 'mean_interval', 'notes_of', 'plot_curves', 'rows_of', 'spread', 'summary_table', 'unpaired_interval',
]


def rows_of(plan: Plan, output: Path) -> List[Dict[str, Any]]:
    """One row for each run of the plan, begun or not, model by model.

    Returns:
        `model`, its label; `seed`; `recipe`; `status`: finished, crashed, diverged, running, interrupted or waiting;
        `top1` and `top5` in percent and `train_loss` of the last epoch, None unless finished; `best_top1`, of the epoch
        that is best on the images that it is tested on, so too high; `epochs` done, of `epochs_planned`; `minutes` of
        training; `loading`, how much of a step it waited for images, and `gpu_utilisation`, in how much of the time any
        kernel ran, both in percent, None if not known; `starts`, 1 for a run that was never interrupted; `error`;
        `entrypoint`, timm's name of the model; `hardware`, `commit`, `torch`, `timm`, `timm_sape`, `python`, of all
        starts if they differ; `began`.
    """
    rows = []
    for run in sorted(plan.runs, key=lambda run: plan.labels.index(run.label)):
        folder = run.folder(output)
        record, epochs = Record(folder), read_summary(folder)
        state = status(run, output, record)
        last = list(epochs.values())[-1] if state == 'finished' else {}
        best = [float(row['eval_top1']) for row in epochs.values() if row.get('eval_top1')] if last else []
        rows.append({
            'model': run.label,
            'seed': run.seed,
            'recipe': plan.recipe,
            'status': state,
            **{key: _number(last.get(column)) for key, column in (
                ('top1', 'eval_top1'), ('top5', 'eval_top5'), ('train_loss', 'train_loss'))},
            'best_top1': round(max(best), 4) if best else None,
            'epochs': max(epochs, default=-1) + 1,
            'epochs_planned': run.epochs,
            'minutes': round(record.seconds / 60, 2),
            'loading': loading_share(folder),
            'gpu_utilisation': record.gpu_utilisation,
            'starts': len(record.starts),
            'error': record.error,
            'entrypoint': run.config['model'],
            **{key: record.seen(key) for key in ('hardware', 'commit', 'torch', 'timm', 'timm_sape', 'python')},
            'began': record.starts[0]['began'] if record.starts else '',
        })
    return rows


def _number(cell: Optional[str]) -> Optional[float]:
    return round(float(cell), 4) if cell else None


def summary_table(rows: Sequence[Dict[str, Any]], baseline: str) -> str:
    """Rows of `rows_of` as a Markdown table, a line for each model, the baseline first, and what went wrong below it.

    A model has a mean and a standard deviation over its finished runs, and over the seeds that both have finished the
    mean difference to the baseline with its 95 % interval. What a seed decides, the initial backbone and the order of
    the images, may hardly matter; then pairs have nothing in common, and the interval that takes the runs for unrelated
    has twice the degrees of freedom. With few seeds a difference counts as shown where both leave out 0.
    """
    labels = list(dict.fromkeys([baseline, *(row['model'] for row in rows)]))
    finished = {
        label: {row['seed']: row for row in _of(rows, label) if row['status'] == 'finished'} for label in labels}
    top1 = {
        label: {seed: row['top1'] for seed, row in own.items() if row['top1'] is not None}
        for label, own in finished.items()}
    on_gpu = any(row['gpu_utilisation'] is not None for row in rows)
    table = []
    for label in labels:
        runs, own, base = list(finished[label].values()), top1[label], top1[baseline]
        pairs = [(own[seed], base[seed]) for seed in own if label != baseline and seed in base]
        fewer = f' ({len(pairs)} of {len(own)} seeds)' if 0 < len(pairs) < len(own) else ''
        table.append({
            'model': label,
            'top-1 (%)': spread(list(own.values())),
            f'difference to {baseline}': difference([a - b for a, b in pairs]) + fewer,
            'not paired': '[{:+.2f}, {:+.2f}]'.format(*unpaired_interval(*zip(*pairs))) if len(pairs) > 1 else '',
            'top-5 (%)': spread([row['top5'] for row in runs]),
            'seeds': _seeds(_of(rows, label)),
            'minutes a run': f'{statistics.mean(row["minutes"] for row in runs):.1f}' if runs else '',
            **({
                'GPU busy (%)': spread([row['gpu_utilisation'] for row in runs]),
                'waiting for images (%)': spread([row['loading'] for row in runs])} if on_gpu else {}),
        })
    failed = [
        f'- {row["model"]}, seed {row["seed"]}: {row["status"]} after {row["epochs"]} of {row["epochs_planned"]} '
        f'epochs, {row["error"]}' for row in rows if row['status'] in ('crashed', 'diverged')]
    return '\n'.join([markdown(table), *(['', *failed] if failed else [])])


def _of(rows: Sequence[Dict[str, Any]], label: str) -> List[Dict[str, Any]]:
    return [row for row in rows if row['model'] == label]


def spread(values: Sequence[Optional[float]], digits: int = 2) -> str:
    """Mean ± standard deviation, '' of nothing. None is left out."""
    values = [value for value in values if value is not None]
    if not values:
        return ''
    mean = f'{statistics.mean(values):.{digits}f}'
    return f'{mean} ± {statistics.stdev(values):.{digits}f}' if len(values) > 1 else mean


def difference(pairs: Sequence[float], digits: int = 2) -> str:
    """Mean of paired differences with its 95 % interval, '' of nothing."""
    if not pairs:
        return ''
    numbers = [f'{number:+.{digits}f}' for number in mean_interval(pairs)]
    return numbers[0] if len(pairs) < 2 else '{} [{}, {}]'.format(*numbers)


def _seeds(rows: Sequence[Dict[str, Any]]) -> str:
    """How many are finished, and of how many if not all are."""
    states = [row['status'] for row in rows]
    text = str(states.count('finished'))
    others = [state for state in dict.fromkeys(states) if state != 'finished']
    return text + (f' of {len(states)} ({", ".join(f"{states.count(s)} {s}" for s in others)})' if others else '')


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Tuple[float, float, float]:
    """The mean, and its confidence interval by Student's t.

    Args:
        values: Independent and about normal. Of one alone the interval is everything.
        confidence: Between 0 and 1.
    """
    mean, dof = statistics.mean(values), len(values) - 1
    if not dof:
        return mean, -math.inf, math.inf
    half = _student(confidence, dof) * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def unpaired_interval(
        values: Sequence[float],
        others: Sequence[float],
        confidence: float = 0.95,
) -> Tuple[float, float]:
    """The confidence interval of the difference of two means, by Student's t of two samples.

    Args:
        values: Independent and about normal.
        others: Likewise, and with the same standard deviation. Where one is ten times the other, the interval of three
            values each misses in 10 % instead of 5.
        confidence: Between 0 and 1.

    Returns:
        Of mean(values) - mean(others). Of one and one alone it is everything.
    """
    dof = len(values) + len(others) - 2
    if not dof:
        return -math.inf, math.inf
    mean = statistics.mean(values) - statistics.mean(others)
    squares = sum((value - statistics.mean(v)) ** 2 for v in (values, others) for value in v)
    half = _student(confidence, dof) * math.sqrt(squares / dof * (1 / len(values) + 1 / len(others)))
    return mean - half, mean + half


def _student(confidence: float, dof: int) -> float:
    """The t that |T| stays below with this probability, by bisection of the angle atan(t / sqrt(dof))."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        low, high = (angle, high) if _within(angle, dof) < confidence else (low, angle)
    return math.sqrt(dof) * math.tan(low)


def _within(angle: float, dof: int) -> float:
    """P(|T| <= sqrt(dof) * tan(angle)), a finite sum for whole dof (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    odd = dof % 2
    total, term = 0.0, math.cos(angle) if odd else 1.0
    for k in range(1, dof // 2 + 1):
        total += term
        term *= math.cos(angle) ** 2 * (2 * k - 1 + odd) / (2 * k + odd)
    share = math.sin(angle) * total
    return (angle + share) * 2 / math.pi if odd else share


def notes_of(rows: Sequence[Dict[str, Any]], baseline: str) -> str:
    """What was measured where, in one line."""
    def seen(key: str) -> str:
        return '; '.join(dict.fromkeys(row[key] for row in rows if row[key])) or 'unknown'

    others = len({row['model'] for row in rows}) - 1
    epochs = ' or '.join(str(planned) for planned in sorted({row['epochs_planned'] for row in rows}))
    return (
        f'recipe {rows[0]["recipe"]}, {epochs} epochs; after the last epoch, mean ± standard '
        f'deviation over seeds; differences in points at the same seed, with 95 % t intervals of the pairs, and of the '
        f'runs taken for unrelated, each for itself (not corrected for {others} comparisons with {baseline}); '
        f'{seen("hardware")}; torch {seen("torch")}, timm {seen("timm")}, timm-sape {seen("timm_sape")}, commit '
        f'{seen("commit")}')


def plot_curves(plan: Plan, output: Path, path: Path) -> None:
    """Top-1 accuracy and training loss over epochs, a line for the mean of each model, with its seeds from lowest to
    highest as a band. Runs that have crashed or diverged are left out, and epochs that a seed has not come to.

    Args:
        plan: Of the experiment.
        output: Where its runs are.
        path: Its suffix tells the format, `.png`, `.svg` or `.pdf`.

    Raises:
        ImportError: If matplotlib is not there.
    """
    columns = min(4, max(1, 140 // (max(map(len, plan.labels)) + 11)))  # some 140 letters are as wide
    figure = new_figure(10, 4.5 + 0.22 * math.ceil(len(plan.labels) / columns))
    panels = {'eval_top1': 'top-1 accuracy (%)', 'train_loss': 'training loss'}
    for axes, (key, what) in zip(figure.subplots(1, 2), panels.items()):
        for i, label in enumerate(plan.labels):
            folders = [run.folder(output) for run in plan.runs if run.label == label]
            runs = [
                {epoch + 1: float(row[key]) for epoch, row in read_summary(folder).items() if row.get(key)}
                for folder in folders if Record(folder).status not in ('crashed', 'diverged')]
            runs = [run for run in runs if run]
            epochs = [epoch for epoch in runs[0] if all(epoch in run for run in runs)] if runs else []
            values = [[run[epoch] for run in runs] for epoch in epochs]
            color, style = f'C{i % 10}', ('-', '--', ':')[i // 10 % 3]
            axes.fill_between(epochs, [min(v) for v in values], [max(v) for v in values], color=color, alpha=0.1, lw=0)
            axes.plot(
                epochs, [statistics.mean(v) for v in values], color=color, linestyle=style,
                label=f'{label} ({len(runs)})'.replace('$', r'\$') if key == 'eval_top1' else None)  # no formula
        axes.set(xlabel='epoch', ylabel=what)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
    figure.legend(loc='outside lower left', fontsize='small', ncols=columns, title='model (seeds)')
    figure.savefig(path, dpi=150)
