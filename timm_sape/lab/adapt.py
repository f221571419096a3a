"""Which rule for other sizes suits a trained model best, tried on images."""
import warnings
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from torch.utils.data import Dataset

from .. import hub
from ..analysis.inputs import check_classes, image_size_of, load_images, load_model, patch_ratio, preprocessing
from ..grafting import graft
from ..host import PosEncModel
from .evaluate import predict, wilson_interval
from .intervals import paired_interval
from .rules import own_rule, rules_of
from .sweep import check_sizes
from .tables import markdown

__all__ = ['Adapted', 'adapt', 'adapted_table', 'save_adapted', 'snapshot']

Size = Tuple[int, int]


class Adapted(NamedTuple):
    """What `adapt` found.

    Attributes:
        rows: One per size and rule, see `adapt`.
        measure: 'top1', or 'agreement' with the model's own predictions.
        at_home: The score at the model's own size, in percent.
        best: The arguments of `load_model` that choose the best rule, by size.
    """
    rows: List[Dict[str, Any]]
    measure: str
    at_home: float
    best: Dict[Size, Dict[str, Any]]


@contextmanager
def snapshot(spec: str) -> Iterator[Tuple[str, str]]:
    """A copy of a model as one of ours, which can be loaded again and again with other rules.

    Args:
        spec: As for `load_model`. A model of timm is converted by `graft(..., 'nope')`.

    Returns:
        The name of the copy, valid in this context, and why the model could not be converted; empty if it could, or was
        one of ours. Otherwise the copy is timm's, with the one rule that timm has for it.

    Raises:
        ValueError: If the model cannot be loaded or saved.
    """
    model, reason = load_model(spec), ''
    if not isinstance(model, PosEncModel):
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
    class that the model itself predicts at its own size. The default is the rule that the model has as it is.

    Args:
        spec: Name as for `load_model`, of a model that is the same each time; `snapshot` makes one of any model.
        data: Images from `open_dataset`, with labels or without. Their transform is replaced.
        sizes: (height, width) in pixels.
        name: What messages call the model. Default: `spec`.
        agreement: Ignore labels, for images whose classes are not those of the model.
        rules: Names of rules to try besides the default, as `rules_of` has them. Default: all.
        batch_size: Images in a batch.
        num_images: How many images to draw, the same for all rules. None uses all.
        workers: Processes that load images.
        seed: Seed of the draw.
        device: Where the models run.
        amp: Use bfloat16 autocast.
        progress: Show progress bars on stderr.

    Returns:
        The rows have these columns. `height` and `width`: in pixels. `rule`. `num_images`. `measure`. `score`: in
        percent, with its 95 % Wilson interval `score_low` to `score_high`. `difference`: to the default, in points,
        with the 95 % interval of the pairs `difference_low` to `difference_high`. `wins` and `losses`: images that only
        this rule, or only the default, gets right. All of the last five are None for the default. `best`: whether it
        has the highest score; of equal ones the first, and the default before all others. `images_per_second`.

    Raises:
        ValueError: If the patch size does not divide a size, the model lacks one of the rules, or images do not fit it.
    """
    name = name or spec
    sizes = list(dict.fromkeys(sizes))
    model = load_model(spec)
    check_sizes(name, sizes, patch_ratio(model, name))
    default = own_rule(model) or 'as it is'
    choices = {default: {}, **rules_of(model, rules, name)}
    lacking = [rule for rule in rules or () if rule not in choices]
    if lacking:
        raise ValueError(f'{name} has no rule {lacking[0]!r}. It has {", ".join(rules_of(model))}.')
    choices[default] = rules_of(model).get(default, {})

    options = dict(batch_size=batch_size, num_images=num_images, workers=workers, seed=seed)

    def run(model, size, what):
        data.transform = preprocessing(model, size, crop_mode='squash')
        found = predict(model, load_images(data, **options), device, amp, what if progress else '', labelled=False)
        return found.logits.argmax(1), found

    chosen, found = run(model, image_size_of(model), f'{name} at its own size')
    labelled = not agreement and bool((found.labels >= 0).all())
    if labelled:
        check_classes(found.labels, found.logits.shape[1])
    targets = found.labels if labelled else chosen
    at_home = 100 * (chosen == targets).double().mean().item()
    classes = found.logits.shape[1]
    if labelled and 100 * wilson_interval(int((chosen == targets).sum()), len(targets))[0] <= 100 / classes:
        warnings.warn(
            f'{name} gets {at_home:.1f} % of the labels right at its own size, no more than by chance. If they are not '
            f'its {classes} classes, use agreement (--agreement).')
    del model

    rows, best = [], {}
    for size in sizes:
        baseline, of_size = None, []
        for rule, kwargs in choices.items():
            what = f'{name} {rule} {size[0]}x{size[1]} ({len(rows) + len(of_size) + 1}/{len(sizes) * len(choices)})'
            chosen, found = run(load_model(spec, img_size=size, **kwargs), size, what)
            correct = chosen == targets
            baseline = correct if baseline is None else baseline
            n, hits = len(correct), int(correct.sum())
            wins, losses = int((correct & ~baseline).sum()), int((baseline & ~correct).sum())
            low, high = wilson_interval(hits, n)
            pairs = [None] * 3 if rule == default else [(wins - losses) / n, *paired_interval(wins, losses, n)]
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
                'best': False,
                'images_per_second': round(found.images_per_second, 1),
            })
        first = max(of_size, key=lambda row: row['score'])
        first['best'] = True
        best[size] = choices[first['rule']]
        rows += of_size
    return Adapted(rows, rows[0]['measure'], round(at_home, 3), best)


def save_adapted(spec: str, size: Size, kwargs: Dict[str, Any], folder: Path, row: Dict[str, Any]) -> None:
    """Save a model at a size, with a rule, by `hub.save`.

    Args:
        spec: As for `adapt`.
        size: (height, width) in pixels.
        kwargs: What chooses the rule.
        folder: A folder that does not exist yet.
        row: Of the rule, for the card.

    Raises:
        ValueError: If it cannot be saved.
    """
    measure = 'top-1' if row['measure'] == 'top1' else 'agreement with its predictions at its own size'
    measure = f'{measure}, {row["num_images"]} images, on which the rule was chosen'
    hub.save(
        load_model(spec, img_size=size, **kwargs), folder,
        recipe=f'No training: for {size[0]} x {size[1]} pixels, by the rule {row["rule"]} (timm-sape adapt).',
        results={measure: '{score:.1f} % [{score_low:.1f}, {score_high:.1f}]'.format(**row)})


def adapted_table(rows: Sequence[Dict[str, Any]]) -> str:
    """Format rows of `adapt` as a Markdown table."""
    measure = 'top-1 (%)' if rows[0]['measure'] == 'top1' else 'agreement (%)'
    return markdown([{
        'height x width (px)': f'{row["height"]}x{row["width"]}',
        'rule': f'**{row["rule"]}**' if row['best'] else row['rule'],
        measure: '{score:.1f} [{score_low:.1f}, {score_high:.1f}]'.format(**row),
        'difference': None if row['difference'] is None else (
            '{difference:+.1f} [{difference_low:+.1f}, {difference_high:+.1f}]'.format(**row)),
        'wins/losses': None if row['wins'] is None else f'{row["wins"]}/{row["losses"]}',
        'images/s': f'{row["images_per_second"]:.1f}',
    } for row in rows])
