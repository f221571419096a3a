"""Compare models on one data set."""
from typing import Any, Dict, List, Optional, Sequence

from torch.utils.data import Dataset

from ..loading import (
    check_numbering,
    image_size_of,
    load_images,
    load_model,
    number_classes,
    patch_ratio,
    preprocessing,
)
from .evaluate import (
    accuracy,
    expected_calibration_error,
    holm,
    mcnemar,
    negative_log_likelihood,
    predict,
    same_random_weights,
    top_k_correct,
)
from .tables import markdown, with_interval

__all__ = ['compare', 'comparison_table']


def compare(
        models: Sequence[str],
        data: Dataset,
        *,
        batch_size: int = 64,
        num_images: Optional[int] = None,
        workers: int = 0,
        seed: int = 0,
        device: str = 'cpu',
        amp: bool = False,
        progress: bool = True,
) -> List[Dict[str, Any]]:
    """Evaluate models on the same images, each at its own size and with its own preprocessing, as validate.py does.

    Only the central square of an image is shown if the size is square, also to a NaFlexVit, to which validate.py with
    `--naflex-loader` shows the whole image at its own aspect ratio. `sweep` with `native` does so.

    Of a file with averaged weights (`--model-ema`) it takes these, as validate.py does with `--use-ema`.

    Args:
        models: Names as for `load_model`. The first is the baseline that the others are tested against.
        data: Labelled images from `open_dataset`. Their transform is replaced.
        batch_size: Images in a batch.
        num_images: How many images to draw, the same for all models. None uses all.
        workers: Processes that load images.
        seed: Seed of the draw, and of random weights.
        device: Where the models run.
        amp: Use bfloat16 autocast.
        progress: Show progress bars on stderr.

    Returns:
        One row per model, with these columns. `model`. `height` and `width`: in pixels. `num_images`. `top1` and
        `top5`: in percent, with 95 % Wilson intervals `..._low` to `..._high`; the latter are None for five classes or
        fewer. `nll`: negative log-likelihood, in nats.
        `ece`: expected calibration error, in percent. `wins` and `losses`: images that only this model, or only the
        baseline, gets right. `mcnemar_p`: p-value of McNemar's exact test on these. `holm_p`: the same, corrected for
        the number of tests, if there are more than two models. `parameters`. `images_per_second`: of the model alone.
        Comparisons with the baseline are None in its own row.

    Raises:
        ValueError: If a model cannot be loaded, or the images do not fit the models. Models are loaded once before
            anything is evaluated.
    """
    models = list(dict.fromkeys(models))
    if not models:
        raise ValueError('There is nothing to compare. Name at least one model.')
    number_classes(data, models)
    for spec in models:  # fail before the work, not halfway
        model = load_model(spec)
        patch_ratio(model, spec)
        check_numbering(data, model, spec)
    rows, baseline = [], None
    for number, spec in enumerate(models, 1):
        with same_random_weights(seed):
            model = load_model(spec)
        data.transform = preprocessing(model)
        loader = load_images(data, batch_size, num_images, workers, seed)
        found = predict(model, loader, device, amp, f'{spec} ({number}/{len(models)})' if progress else '')
        logits, labels = found.logits, found.labels
        correct = top_k_correct(logits, labels)
        test = None if baseline is None else mcnemar(correct, baseline)
        baseline = correct if baseline is None else baseline
        height, width = image_size_of(model)
        row = {'model': spec, 'height': height, 'width': width, 'num_images': len(labels)}
        for k in (1, 5):
            share = accuracy(logits, labels, k) if k == 1 or k < logits.shape[1] else (None,) * 3
            row.update({
                column: None if value is None else round(100 * value, 3)
                for column, value in zip((f'top{k}', f'top{k}_low', f'top{k}_high'), share)})
        row.update({
            'nll': round(negative_log_likelihood(logits, labels), 4),
            'ece': round(100 * expected_calibration_error(logits, labels), 3),
            'wins': test and test.only_first,
            'losses': test and test.only_second,
            'mcnemar_p': test and test.p,
            **({'holm_p': None} if len(models) > 2 else {}),
            'parameters': sum(p.numel() for p in model.parameters()),
            'images_per_second': round(found.images_per_second, 1),
        })
        rows.append(row)
    if len(rows) > 2:
        for row, p in zip(rows[1:], holm([row['mcnemar_p'] for row in rows[1:]])):
            row['holm_p'] = p
    return rows


def comparison_table(rows: Sequence[Dict[str, Any]]) -> str:
    """Format rows of `compare` as a Markdown table."""
    def p_value(p: Optional[float]) -> str:
        return '' if p is None else f'{p:.3f}' if p >= 0.001 else f'{p:.1e}'

    table = []
    for row in rows:
        cells = {'model': row['model'], 'size (px)': f'{row["height"]}x{row["width"]}'}
        for k in (1, 5):
            cells[f'top-{k} (%)'] = None if row[f'top{k}'] is None else with_interval(row, f'top{k}')
        cells['NLL'] = f'{row["nll"]:.3f}'
        cells['ECE (%)'] = f'{row["ece"]:.1f}'
        if len(rows) > 1:
            cells['wins/losses'] = '' if row['wins'] is None else f'{row["wins"]}/{row["losses"]}'
            cells['p'] = p_value(row['mcnemar_p'])
        if 'holm_p' in row:
            cells['p (Holm)'] = p_value(row['holm_p'])
        cells['parameters'] = f'{row["parameters"]:,}'
        cells['images/s'] = f'{row["images_per_second"]:.1f}'
        table.append(cells)
    return markdown(table)
