"""Statistics of evaluations: rates, means and differences over tasks, each with its standard error and interval.

Tasks are drawn at random, and samples of one task are correlated, so standard errors are clustered by task (Miller
2024, arXiv 2411.00640): everything is computed from one number per task, and uncertainty is the variation between
tasks. Standard library only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

Interval = tuple[float, float]
CONFIDENCE = 0.95
"""Chance with which an interval contains the true value."""
NORMAL = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
MOST_EXACT = 200
"""Degrees of freedom up to which Student's t is summed term by term; beyond, its expansion is accurate to 1e-9."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Estimate over `tasks` tasks; None without tasks. A standard error needs two tasks; an interval that cannot be
    computed is None."""

    value: float | None
    standard_error: float | None
    interval: Interval | None
    tasks: int


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the unbiased estimate that at least one of `k` samples of a task succeeds, from `c` successes in `n`
    samples: 1 - C(n - c, k) / C(n, k), as a product of numbers below 1 (Chen et al. 2021, arXiv 2107.03374, equation
    1).

    Raises:
        ValueError: not 0 <= c <= n, or not 1 <= k <= n.
    """
    _check_counts(n, c, k)
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1)) if n - c >= k else 1.0


def pass_hat_k(n: int, c: int, k: int) -> float:
    """Return the unbiased estimate that all of `k` samples of a task succeed (pass^k), from `c` successes in `n`
    samples: C(c, k) / C(n, k) (Yao et al. 2024, tau-bench, arXiv 2406.12045).

    Raises:
        ValueError: not 0 <= c <= n, or not 1 <= k <= n.
    """
    _check_counts(n, c, k)
    return math.prod((c - i) / (n - i) for i in range(k)) if c >= k else 0.0


def wilson(successes: int, n: int) -> Interval:
    """Return the score interval of a rate of successes in `n` independent trials (Wilson 1927), which stays within [0,
    1] and is sound at 0 and n successes.

    Args:
        n: 0 gives (0, 1).

    Raises:
        ValueError: not 0 <= successes <= n.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"successes must be between 0 and {n}, got {successes}")
    return _score_interval(successes / n, n, NORMAL) if n else (0.0, 1.0)


def rate(values: Sequence[float], samples: float) -> Estimate:
    """Return the mean of one number from 0 to 1 per task (a share of successes, pass@k, pass^k).

    The standard error is clustered by task (Miller 2024): for equally many samples per task it is the spread of the
    tasks' means, here with T - 1 in place of T. The interval is Wilson's with the effective sample size p (1 - p) /
    SE^2 (Kott and Carr 1997; Dean and Pagano 2015, "Evaluating confidence interval methods for binomial proportions in
    clustered surveys"), at most `samples`, and with Student's quantile if that size is an estimate. If all tasks have
    the same 0 or 1, the correlation within tasks is unknown, and each task counts as one trial. With one sample per
    task this is `wilson`.

    Args:
        samples: number of independent trials if samples of one task were uncorrelated. With one sample per task, it is
            the number of tasks.
    """
    tasks = len(values)
    if not tasks:
        return Estimate(value=None, standard_error=None, interval=None, tasks=0)
    mean = math.fsum(values) / tasks
    error = _standard_error(values, mean)
    spread, within = error * error * (tasks - 1), mean * (1.0 - mean)
    size, quantile = float(tasks), NORMAL
    if within > 0.0 and tasks > 1:
        size = samples if spread <= 0.0 else min(samples, max(tasks, tasks * within / spread))
        quantile = _student(tasks - 1) if samples > tasks else quantile
    interval = _score_interval(mean, size, quantile)
    return Estimate(value=mean, standard_error=error if tasks > 1 else None, interval=interval, tasks=tasks)


def mean(values: Sequence[float]) -> Estimate:
    """Return the mean of one number per task, such as its mean reward, with Student's interval over tasks. If all
    values are equal, their spread is unknown, and there is no interval."""
    tasks = len(values)
    if not tasks:
        return Estimate(value=None, standard_error=None, interval=None, tasks=0)
    value = math.fsum(values) / tasks
    if tasks == 1:
        return Estimate(value=value, standard_error=None, interval=None, tasks=1)
    error = _standard_error(values, value)
    if min(values) == max(values):
        return Estimate(value=value, standard_error=0.0, interval=None, tasks=tasks)
    half = _student(tasks - 1) * error
    return Estimate(value=value, standard_error=error, interval=(value - half, value + half), tasks=tasks)


def paired_difference(before: Sequence[float], after: Sequence[float], samples: float | None = None) -> Estimate:
    """Return the change of a rate over the same tasks: the mean of the changes per task (Miller 2024, paired
    differences).

    The interval is Student's over the tasks and two more samples, with 1/2 in each of the four cells (both, neither,
    gained, lost) (Agresti and Min 2005, who add two pairs to pairs of one sample). So the interval has a width, and
    keeps its coverage, even if few or no tasks changed. A task is worth m samples by the design effect (Kish 1965,
    Survey Sampling): the variance of a change with one sample per task, over its actual variance. The two samples are
    then 2/m of a task, and their change has the variance of a mean of m, 1/(2m). If the samples of every task agree, m
    is 1, whatever their number.

    Args:
        before: one value from 0 to 1 per task.
        after: values of the same tasks in the same order.
        samples: number of independent trials on either side if samples of one task were uncorrelated, an upper bound of
            m times the number of tasks; None: one sample per task.
    """
    changes = _changes(before, after)
    tasks, change = len(changes), math.fsum(changes) / len(changes)
    error = _standard_error(changes, change) if tasks > 1 else None
    spread = tasks * (error or 0.0) ** 2
    within = math.fsum(x * (1.0 - x) for x in (*before, *after)) / tasks
    most = 1.0 if samples is None else max(1.0, samples / tasks)
    worth = min(most, 1.0 + within / spread if spread > 0.0 else most if within > 0.0 else 1.0)
    count = tasks + 2.0 / worth
    centre = math.fsum(changes) / count
    variance = (math.fsum(d * d for d in changes) + worth**-2) / count - centre * centre
    half = _student(max(1, tasks - 1)) * math.sqrt(variance / (count - 1.0))
    interval = (max(-1.0, centre - half), min(1.0, centre + half))
    return Estimate(value=change, standard_error=error, interval=interval, tasks=tasks)


def paired_ratio(before: Sequence[float], after: Sequence[float]) -> Estimate:
    """Return the share of a rate that remains over the same tasks: the second mean over the first.

    The interval is computed for the logarithm, by the delta method, from each task's contribution to both means. The
    tasks include the two that Agresti and Min (2005) add, so the interval has a width even if few or no tasks changed,
    and is finite even if the first rate is 0.

    Args:
        before: one value from 0 to 1 per task.
        after: values of the same tasks in the same order.

    Returns:
        the estimate; its `value` is None if the first rate is 0.
    """
    tasks = len(_changes(before, after))
    first, second = math.fsum(before), math.fsum(after)
    low, high = (first + 1.0) / (tasks + 2), (second + 1.0) / (tasks + 2)
    parts = math.fsum((a / high - b / low) ** 2 for b, a in zip(before, after, strict=True))
    added = ((1.0 / high - 1.0 / low) ** 2 + high**-2 + low**-2) / 2
    error = math.sqrt(parts + added) / (tasks + 2)
    half, centre = NORMAL * error, math.log(high / low)
    interval = (math.exp(centre - half), math.exp(centre + half))
    value = second / first if first else None
    return Estimate(
        value=value, standard_error=None if value is None else value * error, interval=interval, tasks=tasks
    )


def paired_mean_difference(before: Sequence[float], after: Sequence[float]) -> Estimate:
    """Return the mean change of any number per task, such as its mean reward, with Student's interval."""
    return mean(_changes(before, after))


def _changes(before: Sequence[float], after: Sequence[float]) -> list[float]:
    if len(before) != len(after) or not before:
        raise ValueError(f"expected two equally long sequences, got {len(before)} and {len(after)}")
    return [float(a) - float(b) for b, a in zip(before, after, strict=True)]


def _standard_error(values: Sequence[float], mean: float) -> float:
    """Return the standard error of the mean of independent values; 0 for a single value, which has none."""
    n = len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n * (n - 1))) if n > 1 else 0.0


def _score_interval(rate: float, n: float, z: float) -> Interval:
    scale = 1 + z * z / n
    centre = (rate + z * z / (2 * n)) / scale
    half = z / scale * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    # exact at the ends, where rounding could leave the unit interval
    return (0.0 if rate == 0.0 else max(0.0, centre - half), 1.0 if rate == 1.0 else min(1.0, centre + half))


@functools.cache
def _student(freedom: int) -> float:
    """Return the two-sided quantile of Student's t: by bisection, for many degrees of freedom by its expansion in
    1/freedom (Abramowitz and Stegun 26.7.5)."""
    z = NORMAL
    if freedom > MOST_EXACT:
        first = (z**3 + z) / 4
        second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
        third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
        return z + first / freedom + second / freedom**2 + third / freedom**3
    low, high = 0.0, math.pi / 2  # of the angle atan(t / sqrt(freedom)), in which the probability is smooth
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_within(middle, freedom) < CONFIDENCE else (low, middle)
    return math.tan((low + high) / 2) * math.sqrt(freedom)


def _student_within(angle: float, freedom: int) -> float:
    """Return the chance that |t| < sqrt(freedom) tan(angle) (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    sine, square = math.sin(angle), math.cos(angle) ** 2
    term = math.cos(angle) if freedom % 2 else 1.0
    total = term if freedom > 1 else 0.0
    for i in range(3 if freedom % 2 else 2, freedom - 1, 2):
        term *= square * (i - 1) / i
        total += term
    return (angle + sine * total) * 2 / math.pi if freedom % 2 else sine * total


def _check_counts(n: int, c: int, k: int) -> None:
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(f"expected 0 <= c <= n and 1 <= k <= n, got n = {n}, c = {c}, k = {k}")
