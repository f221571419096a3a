"""Predictions of a model on labelled images, and what can be said of them."""
import math
import time
from statistics import NormalDist
from typing import Iterable, List, NamedTuple, Sequence, Tuple

import torch
import torch.nn.functional as F
from tqdm import tqdm

from ..analysis.inputs import check_classes

__all__ = [
    'Accuracy',
    'McNemar',
    'Predictions',
    'accuracy',
    'expected_calibration_error',
    'holm',
    'mcnemar',
    'mcnemar_p',
    'negative_log_likelihood',
    'predict',
    'top_k_correct',
    'wilson_interval',
]


class Predictions(NamedTuple):
    """What a model says of n images, and how fast.

    Attributes:
        logits: float32, `[n, classes]`, on the CPU.
        labels: int64, `[n]`.
        seconds: What the model took for the batches that count for the speed.
        images_per_second: Speed on these batches.
    """
    logits: torch.Tensor
    labels: torch.Tensor
    seconds: float
    images_per_second: float


class Accuracy(NamedTuple):
    """A share of images, from 0 to 1, with its confidence interval."""
    value: float
    low: float
    high: float


class McNemar(NamedTuple):
    """Images that only one of two models gets right, and the p-value of that."""
    only_first: int
    only_second: int
    p: float


def predict(
        model: torch.nn.Module,
        loader: Iterable[Tuple[torch.Tensor, torch.Tensor]],
        device: str = 'cpu',
        amp: bool = False,
        progress: str = '',
) -> Predictions:
    """Logits of all images, and the speed of the model.

    The model alone is timed, from images that are on the device to logits that are. Its first batch, in which memory
    is taken and kernels are chosen, does not count if there are more.

    Args:
        model: Maps images `[B, C, height, width]` to logits `[B, classes]`. It is moved to the device, in eval mode.
        loader: Batches of images and labels, as `load_images` makes them.
        device: Where the model runs.
        amp: bfloat16 autocast.
        progress: Words before a progress bar on stderr, which appears after two seconds; empty for none.

    Raises:
        ValueError: If there are no images, an image has no label or one that the model does not know, logits are not
            finite, or a batch needs more memory than there is.
    """
    if getattr(model, 'num_classes', None) == 0:
        raise ValueError('The model has no classes, only features. Create it with num_classes of the data.')
    device = torch.device(device)
    model = model.to(device).eval()
    logits, labels, counts, times = [], [], [], []
    bar = tqdm(loader, desc=progress, unit='batch', delay=2, leave=False, disable=not progress)
    for images, targets in bar:
        images = images.to(device)
        try:
            with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=amp):
                start = _now(device)
                out = model(images)
                times.append(_now(device) - start)
        except torch.OutOfMemoryError as e:
            raise ValueError(
                f'A batch of {list(images.shape)} does not fit into the memory of {device}. Use a smaller '
                'batch size.') from e
        counts.append(len(images))
        logits.append(out.float().cpu())
        labels.append(torch.as_tensor(targets).long())
        _check(logits[-1], labels[-1])
    if not logits:
        raise ValueError('There are no images. Name a folder with one sub-folder of images per class.')
    counted = slice(1 if len(times) > 1 else 0, None)
    seconds = sum(times[counted])
    return Predictions(torch.cat(logits), torch.cat(labels), seconds, sum(counts[counted]) / max(seconds, 1e-9))


def _now(device: torch.device) -> float:
    if device.type != 'cpu':
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def _check(logits: torch.Tensor, labels: torch.Tensor) -> None:
    """Refuse logits and labels that no statistic can be made of.

    Raises:
        ValueError: If they do not belong together, or say nothing.
    """
    if logits.ndim != 2 or labels.ndim != 1 or len(logits) != len(labels) or not logits.numel():
        raise ValueError(
            f'Logits must be [n, classes] and labels [n], n and classes at least 1, got {list(logits.shape)} and '
            f'{list(labels.shape)}.')
    if labels.min() < 0:
        raise ValueError(
            'The images have no labels, so nothing can be said about accuracy. Name a folder with one sub-folder of '
            'images per class, or a data set with labels.')
    check_classes(labels, logits.shape[1])
    if not logits.isfinite().all():
        raise ValueError(
            'The model returns logits that are not finite. Leave half precision out (amp), or check its weights.')


def top_k_correct(logits: torch.Tensor, labels: torch.Tensor, k: int = 1) -> torch.Tensor:
    """Whether each label is among the k largest logits.

    Args:
        logits: `[n, classes]`.
        labels: Integers from 0 to classes - 1, `[n]`.
        k: How many; with no more classes than that, all are right.

    Returns:
        bool, `[n]`.

    Raises:
        ValueError: If logits and labels do not belong together.
    """
    _check(logits, labels)
    best = logits.topk(min(k, logits.shape[1])).indices  # [n, k]
    return (best == labels[:, None]).any(1)


def accuracy(logits: torch.Tensor, labels: torch.Tensor, k: int = 1, confidence: float = 0.95) -> Accuracy:
    """Top-k accuracy with its Wilson score interval.

    Args:
        logits: `[n, classes]`.
        labels: Integers from 0 to classes - 1, `[n]`.
        k: As for `top_k_correct`.
        confidence: Of the interval, between 0 and 1.

    Raises:
        ValueError: As `top_k_correct` and `wilson_interval`.
    """
    correct = top_k_correct(logits, labels, k)
    successes, n = int(correct.sum()), len(correct)
    return Accuracy(successes / n, *wilson_interval(successes, n, confidence))


def wilson_interval(successes: int, n: int, confidence: float = 0.95) -> Tuple[float, float]:
    """The score interval of a share (Wilson, 'Probable inference, the law of succession, and statistical inference',
    JASA 1927).

    All shares p that are within z standard errors of what was seen, |successes/n - p| <= z * sqrt(p * (1 - p) / n).
    Unlike the textbook's plus and minus, it stays within 0 and 1, and has a width where all or none are right.

    Args:
        successes: From 0 to n.
        n: At least 1.
        confidence: Between 0 and 1.

    Raises:
        ValueError: If a value is none of these.
    """
    if not 0 <= successes <= n or n < 1:
        raise ValueError(f'successes must be from 0 to n, and n at least 1, got {successes} of {n}.')
    if not 0 < confidence < 1:
        raise ValueError(f'confidence must be between 0 and 1, such as 0.95, got {confidence}.')
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share, spread = successes / n, z * z / n
    center = (share + spread / 2) / (1 + spread)
    half = math.sqrt(share * (1 - share) * spread + spread * spread / 4) / (1 + spread)
    # none and all are exact bounds, which rounding would miss
    low, high = 0.0 if successes == 0 else center - half, 1.0 if successes == n else center + half
    return low, high


def mcnemar(first: torch.Tensor, second: torch.Tensor) -> McNemar:
    """McNemar's exact test of whether two models that saw the same images are equally often right.

    Args:
        first: Whether one model is right, bool, `[n]`.
        second: Whether the other is, on the same images in the same order.

    Raises:
        ValueError: If the shapes differ.
    """
    if first.shape != second.shape:
        raise ValueError(
            f'Both models must have seen the same images, got {list(first.shape)} and {list(second.shape)}.')
    only_first, only_second = int((first & ~second).sum()), int((second & ~first).sum())
    return McNemar(only_first, only_second, mcnemar_p(only_first, only_second))


def mcnemar_p(only_first: int, only_second: int) -> float:
    """Two-sided p-value of McNemar's exact test (McNemar, 'Note on the sampling error of the difference between
    correlated proportions or percentages', Psychometrika 1947).

    Images that both models get right, or both wrong, say nothing. If the models were equal, each of the others would
    be won by either with probability 1/2: p is twice the probability of so few wins, or fewer, for the loser, and at
    most 1.

    Args:
        only_first: Images that only the first model gets right, 0 or more.
        only_second: Images that only the second one gets right, 0 or more.

    Returns:
        From 0 to 1, right to eight digits for up to a million images; 0 below the smallest number that there is.

    Raises:
        ValueError: If a count is negative.
    """
    if min(only_first, only_second) < 0:
        raise ValueError(f'Counts must be 0 or more, got {only_first} and {only_second}.')
    n, least = only_first + only_second, min(only_first, only_second)
    # The sum over k <= least of C(n, k), in units of its last term: powers of 2 overflow, and the terms fall off fast.
    total, term = 0.0, 1.0
    for k in range(least, -1, -1):
        total += term
        term *= k / (n - k + 1)
        if term < 1e-17 * total:
            break
    log_last = math.lgamma(n + 1) - math.lgamma(least + 1) - math.lgamma(n - least + 1) - n * math.log(2)
    return math.exp(min(0.0, math.log(2) + log_last + math.log(total)))


def holm(p_values: Sequence[float]) -> List[float]:
    """p-values of several tests, adjusted so that the chance of any false alarm among them stays below the level
    (Holm, 'A simple sequentially rejective multiple test procedure', Scandinavian Journal of Statistics 1979).

    Args:
        p_values: From 0 to 1, in any order.

    Returns:
        Adjusted ones in the same order, none smaller than before.
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def expected_calibration_error(logits: torch.Tensor, labels: torch.Tensor, bins: int = 15) -> float:
    """How far confidence is from accuracy (Guo et al., 'On Calibration of Modern Neural Networks', ICML 2017).

    Images are sorted into bins of equal width by the probability of the class that the model chooses, bin m with
    (m - 1)/bins < probability <= m/bins. The distances between the mean probability and the accuracy of each bin are
    averaged, weighted by the number of its images.

    Args:
        logits: `[n, classes]`.
        labels: Integers from 0 to classes - 1, `[n]`.
        bins: At least 1; 15 in the paper.

    Returns:
        From 0 to 1, 0 for a calibrated model.

    Raises:
        ValueError: If logits and labels do not belong together, or there are no bins.
    """
    if bins < 1:
        raise ValueError(f'bins must be at least 1, got {bins}.')
    correct = top_k_correct(logits, labels).double()  # [n]
    confidence = logits.double().softmax(1).amax(1)  # [n]
    which = (confidence * bins).ceil().long().clamp(1, bins) - 1  # [n]
    gap = torch.zeros(bins, dtype=torch.float64, device=logits.device).index_add_(0, which, confidence - correct)
    return (gap.abs().sum() / len(labels)).item()


def negative_log_likelihood(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Mean of -log(probability of the label), in nats.

    Args:
        logits: `[n, classes]`.
        labels: Integers from 0 to classes - 1, `[n]`.

    Raises:
        ValueError: If logits and labels do not belong together.
    """
    _check(logits, labels)
    return F.cross_entropy(logits.double(), labels).item()
