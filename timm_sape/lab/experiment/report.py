"""Results of an experiment: one row per run, a table of the models, and curves."""
import math
import statistics
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from ...analysis.figures import new_figure
from ..intervals import bracketed, difference, spread, unpaired_interval
from ..tables import markdown
from .plan import Plan
from .results import read_results

__all__ = ['notes_of', 'plot_curves', 'rows_of', 'summary_table', 'trained_with']


def rows_of(plan: Plan, output: Path) -> List[Dict[str, Any]]:
    """Make one row per run of the plan, started or not, model by model.

    Args:
        plan: The plan.
        output: Folder with the folders of the runs, or with their archive, `runs.jsonl`.

    Returns:
        Rows with these columns. `model`: the label. `seed`. `recipe`. `status`: finished, crashed, diverged, running,
        interrupted or waiting. `top1`, `top5` (percent) and `train_loss`: of the last epoch, None unless finished.
        `best_top1`: of the best epoch; too high, because it is chosen on the test images. `epochs`: completed, of
        `epochs_planned`. `minutes`: of training. `loading`: share of a step spent waiting for images, in percent.
        `gpu_utilisation`: share of the time with a kernel running, in percent. Both are None if unknown. `starts`: 1 if
        never interrupted. `error`. `entrypoint`: timm's name of the model. `hardware`, `commit`, `torch`, `timm`,
        `timm_sape`, `python`: of all starts, if they differ. `began`.
    """
    rows = []
    results = zip(plan.runs, read_results(plan.runs, output))
    for run, result in sorted(results, key=lambda each: plan.labels.index(each[0].label)):
        record = result.record
        last = list(result.epochs.values())[-1] if result.status == 'finished' else {}
        best = [row['eval_top1'] for row in result.epochs.values() if row.get('eval_top1') is not None] if last else []
        rows.append({
            'model': run.label,
            'seed': run.seed,
            'recipe': plan.recipe,
            'status': result.status,
            'top1': _rounded(last.get('eval_top1')),
            'top5': _rounded(last.get('eval_top5')),
            'train_loss': _rounded(last.get('train_loss')),
            'best_top1': _rounded(max(best, default=None)),
            'epochs': max(result.epochs, default=-1) + 1,
            'epochs_planned': run.epochs,
            'minutes': round(record.seconds / 60, 2),
            'loading': result.loading,
            'gpu_utilisation': record.gpu_utilisation,
            'starts': len(record.starts),
            'error': record.error,
            'entrypoint': run.config['model'],
            **{key: record.seen(key) for key in ('hardware', 'commit', 'torch', 'timm', 'timm_sape', 'python')},
            'began': record.starts[0]['began'] if record.starts else '',
        })
    return rows


def _rounded(value: Optional[float]) -> Optional[float]:
    return None if value is None else round(float(value), 4)


def summary_table(rows: Sequence[Dict[str, Any]], baseline: str) -> str:
    """Format rows of `rows_of` as a Markdown table with one line per model, the baseline first, and list the failures.

    Each model has the mean and standard deviation over its finished runs, and the mean difference from the baseline
    over the seeds that both have finished, with its 95 % interval. There are two intervals. The first treats runs of
    one seed as pairs. But the seed decides only the initial backbone and the order of the images, which may matter
    little. Then the runs of a pair have nothing in common, and the second interval, for independent runs, has twice the
    degrees of freedom. With few seeds, count a difference as shown only if both intervals exclude 0.
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
            f'difference from {baseline}': difference([a - b for a, b in pairs]) + fewer,
            'not paired': bracketed(*unpaired_interval(*zip(*pairs))) if len(pairs) > 1 else '',
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


def _seeds(rows: Sequence[Dict[str, Any]]) -> str:
    """How many runs are finished, and the status of the others."""
    states = [row['status'] for row in rows]
    text = str(states.count('finished'))
    others = [state for state in dict.fromkeys(states) if state != 'finished']
    return text + (f' of {len(states)} ({", ".join(f"{states.count(s)} {s}" for s in others)})' if others else '')


def notes_of(rows: Sequence[Dict[str, Any]], baseline: str) -> str:
    """Say in one line what was measured and where."""
    others = len({row['model'] for row in rows}) - 1
    epochs = ' or '.join(str(planned) for planned in sorted({row['epochs_planned'] for row in rows}))
    return (
        f'recipe {rows[0]["recipe"]}, {epochs} epochs; after the last epoch, mean ± standard '
        f'deviation over seeds; differences in points at the same seed, with 95 % t intervals of the pairs, and of '
        f'runs treated as independent, each on its own (not corrected for {others} '
        f'{"comparison" if others == 1 else "comparisons"} with {baseline}); {trained_with(rows)}')


def trained_with(rows: Sequence[Dict[str, Any]]) -> str:
    """The hardware, versions and commits of rows of `rows_of`."""
    def seen(key: str) -> str:
        return '; '.join(dict.fromkeys(row[key] for row in rows if row[key])) or 'unknown'

    return (
        f'{seen("hardware")}; torch {seen("torch")}, timm {seen("timm")}, timm-sape {seen("timm_sape")}, commit '
        f'{seen("commit")}')


def plot_curves(plan: Plan, output: Path, path: Path) -> None:
    """Draw top-1 accuracy and training loss over epochs: the mean of each model, and a band over its seeds.

    Runs that crashed or diverged are left out, and so are epochs that some seed has not reached.

    Args:
        plan: The plan.
        output: As for `rows_of`.
        path: Its suffix sets the format, `.png`, `.svg` or `.pdf`.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    columns = min(4, max(1, 140 // (max(map(len, plan.labels)) + 11)))  # about 140 letters fit into a line
    figure = new_figure(10, 4.5 + 0.22 * math.ceil(len(plan.labels) / columns))
    results = list(zip(plan.runs, read_results(plan.runs, output)))
    panels = {'eval_top1': 'top-1 accuracy (%)', 'train_loss': 'training loss'}
    for axes, (key, what) in zip(figure.subplots(1, 2), panels.items()):
        for i, label in enumerate(plan.labels):
            runs = [
                {epoch + 1: row[key] for epoch, row in result.epochs.items() if row.get(key) is not None}
                for run, result in results if run.label == label and result.status not in ('crashed', 'diverged')]
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
