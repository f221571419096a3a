"""Which rule for other sizes suits a trained model best, tried on images."""
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from timm.models.vision_transformer import VisionTransformer
from torch.utils.data import Dataset

from .. import hub
from ..grafting import graft
from ..host import PosEncModel
from ..loading import (
    check_numbering,
    image_size_of,
    in_order,
    load_images,
    load_model,
    number_classes,
    patch_ratio,
    preprocessing,
)
from .evaluate import predict, wilson_interval
from .intervals import paired_interval
from .rules import distinct_rules, own_rule, rules_of, trained_grid
from .sweep import check_memory, check_sizes
from .tables import markdown, with_interval

__all__ = ['Adapted', 'adapt', 'adapted_table', 'chosen_row', 'num_tried', 'save_adapted', 'snapshot']

Size = Tuple[int, int]

BILINEAR = 'flexi', 'radio'  # names by which timm tells models whose tables it resizes bilinearly


class Adapted(NamedTuple):
    """What `adapt` found.

    Attributes:
        rows: One per size and rule, see `adapt`.
        home_size: The size to compare with, (height, width) in pixels.
        home: The same in words: '32x32, where it was trained', or '32x32, its own size'.
        at_home: The score there, in percent.
        classes_at_home: How many classes the model predicts there, for all images together.
        chosen: The arguments of `load_model` that choose the rule to use, by size.
        label_names: The names of the model's classes, in their order, or by number if some numbers have no name. None
            if the images do not tell.
    """
    rows: List[Dict[str, Any]]
    home_size: Size
    home: str
    at_home: float
    classes_at_home: int
    chosen: Dict[Size, Dict[str, Any]]
    label_names: Union[None, List[str], Dict[int, str]]


@contextmanager
def snapshot(spec: str) -> Iterator[Tuple[str, str]]:
    """A copy of a model as one of ours, which can be loaded again and again with other rules.

    Args:
        spec: As for `load_model`. A model of timm is converted by `graft(..., 'nope')`.

    Returns:
        The name of the copy, valid in this context, and why the model could not be converted; empty if it could, or was
        one of ours. Otherwise the copy is timm's, with the one rule that timm has for it.

    Raises:
        ValueError: If the model cannot be loaded or saved, or has no patches.
    """
    model, reason = load_model(spec), ''
    patch_ratio(model, spec)
    architecture = model.pretrained_cfg.get('architecture') or ''
    if isinstance(model, VisionTransformer) and any(name in architecture for name in BILINEAR):
        reason = f'it resizes the table of {architecture} bilinearly when it loads it, a graft would do so bicubically.'
    elif not isinstance(model, PosEncModel):
        try:
            model = graft(model, 'nope')
        except ValueError as e:
            reason = str(e)
    with TemporaryDirectory() as scratch:
        folder = Path(scratch, 'model')
        hub.save(model, folder)
        del model
        yield f'local-dir:{folder}', reason


def adapt(
        spec: str,
        data: Dataset,
        sizes: Sequence[Size],
        *,
        name: str = '',
        agreement: bool = False,
        rules: Optional[Sequence[str]] = None,
        batch_size: int = 64,
        num_images: Optional[int] = None,
        workers: int = 0,
        seed: int = 0,
        device: str = 'cpu',
        amp: bool = False,
        progress: bool = True,
) -> Adapted:
    """Try each rule that a model has at sizes that it was not trained on.

    As in `sweep`, all sizes show the same part of the images, and a model is created again for each rule and size. The
    score is top-1 accuracy. Where images have no labels, or with `agreement`, it is the share of images that get the
    class that the model itself predicts at the size that it was trained on, or at its own where its file does not say.

    The default is the rule that the model has as it is. Another one is chosen only if it is shown to be better: if the
    interval of its difference is above 0. Of several the one with the highest score is chosen.

    Args:
        spec: Name as for `load_model`, of a model that is the same each time; `snapshot` makes one of any model.
        data: Images from `open_dataset`, with labels or without. Their transform is replaced.
        sizes: (height, width) in pixels.
        name: The model that `spec` is a snapshot of, for messages and its class map. Default: `spec`.
        agreement: Ignore labels, for images whose classes are not those of the model.
        rules: Names of rules to try besides the default, as `rules_of` has them. Default: all. Of two that do the same
            at a size, 'slopes' and 'rescale' at the trained aspect ratio, one is tried; at the trained size all rules
            do the same, so only the default is.
        batch_size: Images in a batch.
        num_images: How many images to draw, the same for all rules. None uses all.
        workers: Processes that load images.
        seed: Seed of the draw.
        device: Where the models run.
        amp: Use bfloat16 autocast.
        progress: Show progress bars on stderr.

    Returns:
        The rows have these columns. `height` and `width`: in pixels. `rule`. `num_images`. `measure`: 'top1', or
        'agreement' with the model's own predictions at home. `score`: in percent, with its 95 % Wilson interval
        `score_low` to `score_high`. `difference`: to the default, in points, with the interval of the pairs
        `difference_low` to `difference_high`; these are so wide that all of a size hold in 95 % of cases (Bonferroni's
        correction). `wins` and `losses`: images that only this rule, or only the default, gets right. All of the last
        five are None for the default. `chosen`. `images_per_second`.

    Raises:
        ValueError: If the patch size does not divide a size, the model does not fit into memory there, it lacks one of
            the rules, images do not fit it, or it gets no more labels right than by chance.
    """
    name = name or spec
    sizes = list(dict.fromkeys(sizes))
    model = load_model(spec)
    check_sizes(name, sizes, patch_ratio(model, name))
    if not agreement:
        number_classes(data, [name])
        check_numbering(data, model, name)
    if torch.device(device).type == 'cpu':
        check_memory(name, sizes, model, min(batch_size, len(data), num_images or batch_size))
    default = own_rule(model)
    choices = {default: rules_of(model)[default]}
    for only in [None] if rules is None else [[rule] for rule in rules]:
        choices.update(rules_of(model, only, name))
    grid, patch = trained_grid(model), patch_ratio(model)
    own_size = image_size_of(model)
    # of its own grid the model knows the size, which need not be a multiple of the patch size
    home = own_size if grid is None or grid == model.grid_size else (grid[0] * patch[0], grid[1] * patch[1])
    where = f'{home[0]}x{home[1]}, {"its own size" if grid is None else "where it was trained"}'
    if home != own_size:
        model = load_model(spec, img_size=home)

    options = dict(batch_size=batch_size, num_images=num_images, workers=workers, seed=seed)

    def run(model, size, what):
        data.transform = preprocessing(model, size, crop_mode='squash')
        found = predict(model, load_images(data, **options), device, amp, what if progress else '', labelled=False)
        return found.logits.argmax(1), found

    predicted, found = run(model, home, f'{name} at {where}')
    labelled = not agreement and bool((found.labels >= 0).all())
    targets, classes_at_home = found.labels if labelled else predicted, len(predicted.unique())
    at_home = 100 * (predicted == targets).double().mean().item()
    if labelled:
        _check_labels(found.labels, predicted, found.logits.shape[1], name, where)
    label_names = in_order(data.reader.class_to_idx) if labelled and hasattr(data, 'reader') else None
    if isinstance(label_names, list) and len(label_names) != found.logits.shape[1]:
        label_names = None
    del model

    rows, chosen = [], {}
    tried = {size: distinct_rules(choices, default, size, home) for size in sizes}
    total = sum(map(len, tried.values()))
    for size in sizes:
        baseline, of_size = None, []
        confidence = 1 - 0.05 / max(len(tried[size]) - 1, 1)
        for rule in tried[size]:
            kwargs = choices[rule]
            what = f'{name} {rule} {size[0]}x{size[1]} ({len(rows) + len(of_size) + 1}/{total})'
            predicted, found = run(load_model(spec, img_size=size, **kwargs), size, what)
            correct = predicted == targets
            baseline = correct if baseline is None else baseline
            n, hits = len(correct), int(correct.sum())
            wins, losses = int((correct & ~baseline).sum()), int((baseline & ~correct).sum())
            low, high = wilson_interval(hits, n)
            pairs = [None] * 3 if rule == default else [
                (wins - losses) / n, *paired_interval(wins, losses, n, confidence)]
            of_size.append({
                'height': size[0],
                'width': size[1],
                'rule': rule,
                'num_images': n,
                'measure': 'top1' if labelled else 'agreement',
                'score': round(100 * hits / n, 3),
                'score_low': round(100 * low, 3),
                'score_high': round(100 * high, 3),
                **{
                    column: None if value is None else round(100 * value, 3)
                    for column, value in zip(('difference', 'difference_low', 'difference_high'), pairs)},
                'wins': None if rule == default else wins,
                'losses': None if rule == default else losses,
                'chosen': False,
                'images_per_second': round(found.images_per_second, 1),
            })
        better = [row for row in of_size[1:] if row['difference_low'] > 0]
        row = max(better, key=lambda row: row['score']) if better else of_size[0]
        row['chosen'] = True
        chosen[size] = choices[row['rule']]
        rows += of_size
    return Adapted(rows, home, where, round(at_home, 3), classes_at_home, chosen, label_names)


def _check_labels(labels: torch.Tensor, predicted: torch.Tensor, num_classes: int, name: str, where: str) -> None:
    """
    Raises:
        ValueError: If the labels are not those of the model, as far as its predictions tell.
    """
    fix = 'Compare with its own predictions instead: --agreement (in Python agreement=True).'
    if labels.max() >= num_classes:
        raise ValueError(
            f'There are labels up to {labels.max()}, but {name} has {num_classes} classes, from 0 on. {fix}')
    hits, n = int((predicted == labels).sum()), len(labels)
    classes = len(labels.unique())
    better = wilson_interval(hits, n)[0] > 1 / max(classes, 2)
    if classes > 1:  # a model may always predict the most frequent class; of one class this says nothing
        mean, deviation = _chance_hits(labels, predicted)
        better = better and hits - 0.5 > mean + 1.96 * deviation
    if not better:
        raise ValueError(
            f'{name} gets {100 * hits / n:.1f} % of the labels right at {where}, which is not shown to be better than '
            f'guessing. Perhaps the labels are of other classes. {fix}')


def _chance_hits(labels: torch.Tensor, predicted: torch.Tensor) -> Tuple[float, float]:
    """How many predictions are right if they are handed out to the images at random.

    Args:
        labels: int64, `[n]`, with n at least 2.
        predicted: int64, `[n]`.

    Returns:
        Mean and standard deviation over all permutations.
    """
    n = len(labels)
    labelled, guessed = (each.bincount(minlength=int(labels.max()) + 1).double() for each in (labels, predicted))
    guessed = guessed[:len(labelled)]
    pairs = labelled * guessed
    variance = (pairs.sum() ** 2 + n * (pairs * (n - labelled - guessed)).sum()) / (n ** 2 * (n - 1))
    return pairs.sum().item() / n, variance.clamp(min=0).sqrt().item()


def save_adapted(spec: str, found: Adapted, size: Size, folder: Path) -> None:
    """Save a model at a size, with the rule that was chosen, by `hub.save`.

    Args:
        spec: As for `adapt`.
        found: What `adapt` found for it.
        size: (height, width) in pixels, one of those.
        folder: A folder that does not exist yet.

    Raises:
        ValueError: If it cannot be saved.
    """
    row = chosen_row(found, size)
    measure = 'top-1' if row['measure'] == 'top1' else f'agreement with its predictions at {found.home}'
    measure = f'{measure}, {row["num_images"]} images'
    if row['difference'] is not None:
        rule = f'the rule {row["rule"]}'
        measure += ', on which the rule was chosen'
    elif num_tried(found, size) > 1:
        rule = f'its own rule {row["rule"]}, as no other was shown to be better'
    else:
        rule = "timm's only rule" if row['rule'] == 'timm' else f'the only rule that was tried, {row["rule"]}'
    hub.save(
        load_model(spec, img_size=size, **found.chosen[size]), folder,
        recipe=f'No training: for {size[0]} x {size[1]} pixels, by {rule} (timm-sape adapt).',
        results={measure: '{score:.1f} % [{score_low:.1f}, {score_high:.1f}]'.format(**row)},
        model_config={'label_names': found.label_names} if found.label_names else None)


def chosen_row(found: Adapted, size: Size) -> Dict[str, Any]:
    """The row of the rule that was chosen for a size."""
    return next(row for row in found.rows if row['chosen'] and (row['height'], row['width']) == size)


def num_tried(found: Adapted, size: Size) -> int:
    """How many rules were tried at a size."""
    return sum((row['height'], row['width']) == size for row in found.rows)


def adapted_table(rows: Sequence[Dict[str, Any]]) -> str:
    """Format rows of `adapt` as a Markdown table."""
    measure = 'top-1 (%)' if rows[0]['measure'] == 'top1' else 'agreement (%)'
    return markdown([{
        'height x width (px)': f'{row["height"]}x{row["width"]}',
        'rule': f'**{row["rule"]}**' if row['chosen'] else row['rule'],
        measure: with_interval(row, 'score'),
        'difference': None if row['difference'] is None else (
            '{difference:+.1f} [{difference_low:+.1f}, {difference_high:+.1f}]'.format(**row)),
        'wins/losses': None if row['wins'] is None else f'{row["wins"]}/{row["losses"]}',
        'images/s': f'{row["images_per_second"]:.1f}',
    } for row in rows])
