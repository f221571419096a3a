"""Run a model on labelled images and compute accuracy, calibration and tests from its predictions."""
from contextlib import contextmanager
from typing import Iterable, Iterator, List, Mapping, NamedTuple, Sequence, Tuple, Union

import torch
import torch.nn.functional as F
from scipy.stats import binomtest
from tqdm import tqdm

from ..loading import check_classes
from .machine import now

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
    'same_random_weights',
    'top_k_correct',
    'wilson_interval',
]


class Predictions(NamedTuple):
    """Predictions for n images.

    Attributes:
        logits: float32, `[n, classes]`, on the CPU.
        labels: int64, `[n]`.
        images_per_second: Speed of the model in full batches, without the first.
    """
    logits: torch.Tensor
    labels: torch.Tensor
    images_per_second: float


class Accuracy(NamedTuple):
    """A share of images from 0 to 1, with its confidence interval."""
    value: float
    low: float
    high: float


class McNemar(NamedTuple):
    """How many images only one of two models gets right, and the p-value of the test."""
    only_first: int
    only_second: int
    p: float


def predict(
        model: torch.nn.Module,
        loader: Iterable[Tuple[Union[torch.Tensor, Mapping[str, torch.Tensor]], torch.Tensor]],
        device: str = 'cpu',
        amp: bool = False,
        progress: str = '',
        labelled: bool = True,
) -> Predictions:
    """Compute the logits of all images and measure the speed of the model.

    Only the model is timed, not loading or copying, and only in batches as large as the first. The first itself is not
    counted unless it is the only one of its size, because memory is allocated and kernels are chosen during it.

    Args:
        model: Maps images `[B, C, height, width]`, or dicts of patches, to logits `[B, classes]`. It is moved to the
            device and set to eval.
        loader: Batches of images and labels, as from `load_images`.
        device: Where the model runs.
        amp: Use bfloat16 autocast.
        progress: Label of the progress bar on stderr, which appears after two seconds. Empty for no bar.
        labelled: Whether the images must have labels.

    Raises:
        ValueError: If there are no images, a label is missing or out of range, logits are not finite, or a batch does
            not fit into memory.
    """
    if getattr(model, 'num_classes', None) == 0:
        raise ValueError(
            'The model has no classes, only features. Use one with a classifier: one of timm whose name ends in '
            'ft_in1k, or a checkpoint of a training on labelled images.')
    device = torch.device(device)
    model = model.to(device).eval()
    logits, labels, counts, times = [], [], [], []
    bar = tqdm(loader, desc=progress, unit='batch', delay=2, leave=False, disable=not progress)
    for images, targets in bar:
        if isinstance(images, Mapping):
            images = {name: x.to(device) for name, x in images.items() if isinstance(x, torch.Tensor)}
            shape = images['patches'].shape
        else:
            images = images.to(device)
            shape = images.shape
        try:
            with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=amp):
                start = now(device)
                out = model(images)
                times.append(now(device) - start)
        except torch.OutOfMemoryError as e:
            raise ValueError(
                f'A batch of {list(shape)} does not fit into the memory of {device}. Use a smaller batch size.') from e
        counts.append(len(targets))
        logits.append(out.float().cpu())
        labels.append(torch.as_tensor(targets).long())
        _check(logits[-1], labels[-1] if labelled else torch.zeros_like(labels[-1]))
    if not logits:
        raise ValueError('There are no images. Name a folder with one sub-folder of images per class.')
    full = [time for time, count in zip(times, counts) if count == counts[0]]
    full = full[1:] or full
    return Predictions(torch.cat(logits), torch.cat(labels), counts[0] * len(full) / max(sum(full), 1e-9))


@contextmanager
def same_random_weights(seed: int) -> Iterator[None]:
    """Models that are made here get random weights by the seed alone, whatever was drawn before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _check(logits: torch.Tensor, labels: torch.Tensor) -> None:
    """Raise ValueError for logits and labels from which nothing can be computed."""
    if logits.ndim != 2 or labels.ndim != 1 or len(logits) != len(labels) or not logits.numel():
        raise ValueError(
            f'Logits must be [n, classes] and labels [n], n and classes at least 1, got {list(logits.shape)} and '
            f'{list(labels.shape)}.')
    if labels.min() < 0:
        raise ValueError(
            'The images have no labels, so accuracy cannot be computed. Name a folder with one sub-folder of images '
            'per class, or a data set with labels.')
    check_classes(labels, logits.shape[1])
    if not logits.isfinite().all():
        raise ValueError(
            'The model returns logits that are not finite. Leave half precision out (amp), or check its weights.')


def top_k_correct(logits: torch.Tensor, labels: torch.Tensor, k: int = 1) -> torch.Tensor:
    """Check whether each label is among the k largest logits.

    Args:
        logits: `[n, classes]`.
        labels: Integers from 0 to classes - 1, `[n]`.
        k: If there are no more than k classes, every image counts as correct. Of equal logits the first come first, as
            in `argmax`.

    Returns:
        bool, `[n]`.

    Raises:
        ValueError: If logits and labels do not match.
    """
    _check(logits, labels)
    labels = labels.long()[:, None]  # [n, 1]
    own, classes = logits.gather(1, labels), torch.arange(logits.shape[1], device=labels.device)
    return ((logits > own) | (logits == own) & (classes < labels)).sum(1) < k  # how many come before it


def accuracy(logits: torch.Tensor, labels: torch.Tensor, k: int = 1) -> Accuracy:
    """Compute top-k accuracy with its Wilson interval at 95 % confidence.

    Args:
        logits: `[n, classes]`.
        labels: Integers from 0 to classes - 1, `[n]`.
        k: See `top_k_correct`.

    Raises:
        ValueError: If logits and labels do not match.
    """
    correct = top_k_correct(logits, labels, k)
    successes, n = int(correct.sum()), len(correct)
    return Accuracy(successes / n, *wilson_interval(successes, n))


def wilson_interval(successes: int, n: int) -> Tuple[float, float]:
    """Compute the Wilson score interval of a share, at 95 % confidence.

    Unlike the textbook's plus and minus, it stays within 0 and 1, and has a width even if all or none succeed.

    Args:
        successes: From 0 to n.
        n: At least 1.

    Raises:
        ValueError: If an argument is out of range.
    """
    if not 0 <= successes <= n or n < 1:
        raise ValueError(f'successes must be from 0 to n, and n at least 1, got {successes} of {n}.')
    low, high = binomtest(successes, n).proportion_ci(method='wilson')
    return float(low), float(high)


def mcnemar(first: torch.Tensor, second: torch.Tensor) -> McNemar:
    """Test whether two models are right equally often on the same images, by McNemar's exact test.

    Args:
        first: Whether the first model is right, bool, `[n]`.
        second: Whether the second model is right, for the same images in the same order.

    Raises:
        ValueError: If the shapes differ.
    """
    if first.shape != second.shape:
        raise ValueError(
            f'Both models must have seen the same images, got {list(first.shape)} and {list(second.shape)}.')
    only_first, only_second = int((first & ~second).sum()), int((second & ~first).sum())
    return McNemar(only_first, only_second, mcnemar_p(only_first, only_second))


def mcnemar_p(only_first: int, only_second: int) -> float:
    """Compute the two-sided p-value of McNemar's exact test.

    Images that both models get right, or both wrong, do not count. If the models are equally good, each of the other
    images is won by either model with probability 1/2, so this is a binomial test.

    Args:
        only_first: Images that only the first model gets right.
        only_second: Images that only the second model gets right.

    Raises:
        ValueError: If a count is negative.
    """
    if min(only_first, only_second) < 0:
        raise ValueError(f'Counts must be 0 or more, got {only_first} and {only_second}.')
    n = only_first + only_second
    return float(binomtest(min(only_first, only_second), n).pvalue) if n else 1.0


def holm(p_values: Sequence[float]) -> List[float]:
    """Adjust the p-values of several tests, so that the chance of any false positive stays below the level.

    This is the step-down method of Holm, 'A simple sequentially rejective multiple test procedure' (1979). SciPy has
    only corrections of the false discovery rate.

    Args:
        p_values: From 0 to 1, in any order.

    Returns:
        The adjusted p-values in the same order.
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def expected_calibration_error(logits: torch.Tensor, labels: torch.Tensor, bins: int = 15) -> float:
    """Compute the expected calibration error (Guo et al., 'On Calibration of Modern Neural Networks', ICML 2017).

    Images are sorted into bins of equal width by the probability of the predicted class: bin m holds
    (m - 1)/bins < probability <= m/bins. The result is the gap between mean probability and accuracy, averaged over
    bins with the number of images as weights.

    Args:
        logits: `[n, classes]`.
        labels: Integers from 0 to classes - 1, `[n]`.
        bins: At least 1; 15 in the paper.

    Returns:
        From 0 to 1; 0 for a calibrated model.

    Raises:
        ValueError: If logits and labels do not match, or bins is less than 1.
    """
    if bins < 1:
        raise ValueError(f'bins must be at least 1, got {bins}.')
    correct = top_k_correct(logits, labels).double()  # [n]
    confidence = logits.double().softmax(1).amax(1)  # [n]
    which = (confidence * bins).ceil().long().clamp(1, bins) - 1  # [n]
    gap = torch.zeros(bins, dtype=torch.float64, device=logits.device).index_add_(0, which, confidence - correct)
    return (gap.abs().sum() / len(labels)).item()


def negative_log_likelihood(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Compute the mean of -log(probability of the label), in nats.

    Args:
        logits: `[n, classes]`.
        labels: Integers from 0 to classes - 1, `[n]`.

    Raises:
        ValueError: If logits and labels do not match.
    """
    _check(logits, labels)
    return F.cross_entropy(logits.double(), labels).item()
