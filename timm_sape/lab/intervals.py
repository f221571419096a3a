"""Means over training runs, with their spread and confidence intervals; and differences of paired shares."""
import math
import statistics
from typing import Dict, Mapping, Optional, Sequence, Tuple

from scipy.stats import norm
from scipy.stats import t as student_t

__all__ = [
    'bracketed',
    'corrected_cells',
    'corrected_intervals',
    'difference',
    'mean_interval',
    'paired_interval',
    'spread',
    'unpaired_interval',
]


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Tuple[float, float, float]:
    """Compute the mean and its confidence interval by Student's t.

    Args:
        values: Independent and roughly normal. A single value has an infinite interval.
        confidence: Between 0 and 1.

    Returns:
        The mean and the two ends of the interval.
    """
    mean, dof = statistics.mean(values), len(values) - 1
    if not dof:
        return mean, -math.inf, math.inf
    half = _quantile(confidence, dof) * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def unpaired_interval(
        values: Sequence[float],
        others: Sequence[float],
        confidence: float = 0.95,
) -> Tuple[float, float]:
    """Compute the confidence interval of mean(values) - mean(others) by Student's t for two samples.

    Args:
        values: Independent and roughly normal.
        others: The same, with the same standard deviation. If one standard deviation is ten times the other, the
            interval of three values each misses in 10 % of cases instead of 5 %.
        confidence: Between 0 and 1.

    Returns:
        The two ends of the interval; infinite if both samples are single values.
    """
    dof = len(values) + len(others) - 2
    if not dof:
        return -math.inf, math.inf
    mean = statistics.mean(values) - statistics.mean(others)
    squares = sum((value - statistics.mean(v)) ** 2 for v in (values, others) for value in v)
    half = _quantile(confidence, dof) * math.sqrt(squares / dof * (1 / len(values) + 1 / len(others)))
    return mean - half, mean + half


def corrected_intervals(
        values: Mapping[int, float],
        others: Mapping[int, float],
        comparisons: int,
) -> Tuple[float, Tuple[float, float], Tuple[float, float]]:
    """Compare the runs of two models in a table of several comparisons.

    The intervals are so wide that 95 % of such tables are right in every row (Bonferroni's correction).

    Args:
        values: Of the runs of a model, by their seed.
        others: Of the model that it is compared with. Two seeds or more are in both; only these are compared.
        comparisons: How many the table has, 1 or more.

    Returns:
        The mean difference, the ends of its interval if runs of one seed are taken for pairs, and the ends if all runs
        are treated as independent.
    """
    pairs = [(values[seed], others[seed]) for seed in values if seed in others]
    confidence = 1 - 0.05 / comparisons
    mean, *ends = mean_interval([a - b for a, b in pairs], confidence)
    return mean, tuple(ends), unpaired_interval(*zip(*pairs), confidence)


def paired_interval(
        only_first: int,
        only_second: int,
        n: int,
        confidence: float = 0.95,
) -> Tuple[float, float]:
    """Compute the confidence interval of the difference of two shares of the same n items.

    This is Wald's interval with one item more on either side (Bonett and Price, 'Adjusted Wald Confidence Interval for
    a Difference of Binomial Proportions Based on Paired Data', 2012), so it has a width even if no item differs.

    Args:
        only_first: Items that count for the first share only, from 0 on.
        only_second: Items that count for the second share only.
        n: All items, at least 1.
        confidence: Between 0 and 1.

    Returns:
        The two ends of the interval of the first share minus the second, within -1 and 1.
    """
    first, second = (only_first + 1) / (n + 2), (only_second + 1) / (n + 2)
    half = float(norm.ppf((1 + confidence) / 2)) * math.sqrt((first + second - (first - second) ** 2) / (n + 2))
    return max(first - second - half, -1.), min(first - second + half, 1.)


def _quantile(confidence: float, dof: int) -> float:
    """The t with P(|T| < t) = confidence."""
    return float(student_t.ppf((1 + confidence) / 2, dof))


def spread(values: Sequence[Optional[float]], digits: int = 2) -> str:
    """Format values as mean ± standard deviation. None is ignored; no values give an empty string."""
    values = [value for value in values if value is not None]
    if not values:
        return ''
    mean = f'{statistics.mean(values):.{digits}f}'
    return f'{mean} ± {statistics.stdev(values):.{digits}f}' if len(values) > 1 else mean


def bracketed(low: float, high: float, digits: int = 2) -> str:
    """Format an interval as [low, high]. If all values were the same, nothing is known of how they vary: no spread."""
    return f'[{low:+.{digits}f}, {high:+.{digits}f}]' if high - low > 1e-9 else 'no spread'


def difference(pairs: Sequence[float], digits: int = 2) -> str:
    """Format paired differences as mean [95 % interval]. No pairs give an empty string."""
    if not pairs:
        return ''
    mean, *ends = mean_interval(pairs)
    return f'{mean:+.{digits}f}' + (f' {bracketed(*ends, digits)}' if len(pairs) > 1 else '')


def corrected_cells(
        values: Mapping[int, float],
        others: Mapping[int, float],
        comparisons: int,
        digits: int = 1,
) -> Dict[str, str]:
    """Cells of a table for `corrected_intervals`: the difference (to `digits`), both intervals, whether it is shown.

    It is shown if both intervals exclude 0 and have a spread. Without two seeds in common there is no interval, without
    one no difference.
    """
    columns = 'difference', 'corrected, pairs', 'corrected, not paired', 'shown'
    pairs = [value - others[seed] for seed, value in values.items() if seed in others]
    if len(pairs) < 2:
        return dict(zip(columns, (f'{pairs[0]:+.{digits}f}' if pairs else '', '', '', '')))
    gain, *intervals = corrected_intervals(values, others, comparisons)
    texts = [bracketed(*ends, 1) for ends in intervals]
    shown = 'no spread' not in texts and all(low > 0 or high < 0 for low, high in intervals)
    return dict(zip(columns, (f'{gain:+.{digits}f}', *texts, 'yes' if shown else 'no')))
