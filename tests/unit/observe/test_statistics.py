"""Estimates against enumeration, intervals against published numbers, their definitions and coverage."""

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparring.observe.statistics import (
    mean,
    paired_difference,
    paired_mean_difference,
    paired_ratio,
    pass_at_k,
    pass_hat_k,
    rate,
    wilson,
)


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [  # Newcombe 1998, Statistics in Medicine 17, table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_gives_the_published_intervals(successes: int, n: int, low: float, high: float) -> None:
    assert wilson(successes, n) == pytest.approx((low, high), abs=5e-5)


@given(n=st.integers(1, 500), data=st.data())
def test_wilson_is_a_sound_interval(n: int, data: st.DataObject) -> None:
    successes = data.draw(st.integers(0, n))
    low, high = wilson(successes, n)
    assert 0.0 <= low <= successes / n <= high <= 1.0
    assert wilson(n - successes, n) == pytest.approx((1 - high, 1 - low))
    for end in (low, high):  # the ends are where the score test just rejects
        if 0 < end < 1:
            assert abs(successes / n - end) == pytest.approx(1.959964 * math.sqrt(end * (1 - end) / n), rel=1e-4)


def test_wilson_covers_as_often_as_it_says() -> None:
    n = 60
    for true in (0.1, 0.5, 0.8):
        covered = sum(
            math.comb(n, k) * true**k * (1 - true) ** (n - k)
            for k in range(n + 1)
            if wilson(k, n)[0] <= true <= wilson(k, n)[1]
        )
        assert 0.92 < covered < 0.98


def test_wilsons_interval_of_no_trials_is_the_unit_interval() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    with pytest.raises(ValueError, match="between 0 and 3"):
        wilson(4, 3)


def test_a_paired_difference_by_hand() -> None:
    # 40 both, 30 gained, 6 lost, 24 neither: difference 24 / 100; with half a success added to each cell, 102 tasks
    before = [True] * 40 + [False] * 30 + [True] * 6 + [False] * 24
    after = [True] * 40 + [True] * 30 + [False] * 6 + [False] * 24
    found = paired_difference(before, after)
    half = 1.984217 * math.sqrt(((30.5 + 6.5) / 102 - (24 / 102) ** 2) / 101)  # Student's 97.5 % point of 99 degrees
    assert found.value == 0.24 and found.interval == pytest.approx((24 / 102 - half, 24 / 102 + half), abs=1e-6)


def test_a_paired_difference_covers_as_often_as_it_says() -> None:
    n, gain, loss = 50, 0.2, 0.1
    covered = 0.0
    for gained in range(n + 1):
        for lost in range(n + 1 - gained):
            same = n - gained - lost
            chance = (
                math.comb(n, gained)
                * math.comb(n - gained, lost)
                * gain**gained
                * loss**lost
                * (1 - gain - loss) ** same
            )
            if chance < 1e-9:
                continue
            before = [False] * gained + [True] * lost + [True] * same
            after = [True] * gained + [False] * lost + [True] * same
            low, high = paired_difference(before, after).interval
            covered += chance * (low <= gain - loss <= high)
    assert 0.93 < covered < 0.98


def test_a_paired_ratio_by_hand() -> None:
    # 80 both, 5 gained, 10 lost, 5 neither: 85 of 90; half a success in each cell makes 86 and 91 of 102
    before = [True] * 80 + [False] * 5 + [True] * 10 + [False] * 5
    after = [True] * 80 + [True] * 5 + [False] * 10 + [False] * 5
    found = paired_ratio(before, after)
    high, low = 86 / 102, 91 / 102
    error = math.sqrt(80.5 * (1 / high - 1 / low) ** 2 + 5.5 / high**2 + 10.5 / low**2) / 102
    assert found.value == pytest.approx(85 / 90)
    expected = (86 / 91 * math.exp(-1.959964 * error), 86 / 91 * math.exp(1.959964 * error))
    assert found.interval == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("both", "gained", "lost"), [(0.9, 0.02, 0.06), (0.3, 0.2, 0.1), (0.96, 0.01, 0.01)])
def test_a_paired_ratio_covers_as_often_as_it_says(both: float, gained: float, lost: float) -> None:
    draw, n, runs = random.Random(5), 200, 1500
    true, covered = (both + gained) / (both + lost), 0
    cells = [(True, True), (False, True), (True, False), (False, False)]
    for _ in range(runs):
        pairs = draw.choices(cells, [both, gained, lost, 1 - both - gained - lost], k=n)
        low, high = paired_ratio([b for b, _ in pairs], [a for _, a in pairs]).interval
        covered += low <= true <= high
    assert 0.935 < covered / runs < 0.99


def test_a_ratio_to_nothing_has_no_value() -> None:
    found = paired_ratio([False, False], [True, False])
    assert found.value is None and found.interval[0] > 0


def test_a_paired_difference_needs_pairs() -> None:
    with pytest.raises(ValueError, match="got 1 and 2"):
        paired_difference([True], [True, False])
    with pytest.raises(ValueError, match="got 0 and 0"):
        paired_difference([], [])


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_pass_at_k_and_pass_hat_k_are_shares_of_all_draws(n: int) -> None:
    for c in range(n + 1):
        outcomes = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            draws = list(itertools.combinations(outcomes, k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws), rel=1e-12)
            assert pass_hat_k(n, c, k) == pytest.approx(sum(map(all, draws)) / len(draws), rel=1e-12)


@pytest.mark.parametrize(("p", "k"), [(0.3, 1), (0.3, 3), (0.05, 5), (0.9, 5)])
def test_pass_at_k_and_pass_hat_k_have_no_bias(p: float, k: int) -> None:
    n = 8
    chances = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    at = sum(chance * pass_at_k(n, c, k) for c, chance in enumerate(chances))
    hat = sum(chance * pass_hat_k(n, c, k) for c, chance in enumerate(chances))
    assert (at, hat) == pytest.approx((1 - (1 - p) ** k, p**k), rel=1e-12)


def test_large_counts_are_stable() -> None:
    # exact: integers of any size
    n, c, k = 10_000, 37, 1_000
    exact = 1 - math.comb(n - c, k) / math.comb(n, k)
    assert pass_at_k(n, c, k) == pytest.approx(exact, rel=1e-12)
    assert pass_hat_k(n, n - 3, k) == pytest.approx(math.comb(n - 3, k) / math.comb(n, k), rel=1e-11)


@pytest.mark.parametrize("numbers", [(3, 4, 1), (3, -1, 1), (3, 1, 0), (3, 1, 4)])
def test_impossible_counts_are_refused(numbers: tuple[int, int, int]) -> None:
    for one in (pass_at_k, pass_hat_k):
        with pytest.raises(ValueError, match="expected 0 <= c <= n and 1 <= k <= n"):
            one(*numbers)


@given(values=st.lists(st.booleans(), min_size=1, max_size=60))
def test_a_rate_of_one_sample_per_task_is_wilsons(values: list[bool]) -> None:
    found = rate(values, len(values))
    assert found.value == pytest.approx(sum(values) / len(values))
    assert found.interval == pytest.approx(wilson(sum(values), len(values)), abs=1e-12)


def test_the_standard_error_is_clustered_by_hand() -> None:
    # Miller 2024 over the twelve samples: 1/n^2 times the sum over tasks of the squared sum of deviations
    solved = [[1, 1, 1, 0], [0, 0, 0, 0], [1, 0, 1, 0]]
    overall = sum(map(sum, solved)) / 12
    equation = math.sqrt(sum(sum(s - overall for s in task) ** 2 for task in solved)) / 12
    found = rate([sum(task) / 4 for task in solved], 12)
    assert found.value == pytest.approx(overall) == pytest.approx(5 / 12)
    assert found.standard_error == pytest.approx(equation * math.sqrt(3 / 2))  # T - 1 for T
    naive = math.sqrt(overall * (1 - overall) / 12)
    assert found.standard_error > naive


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_at_the_ends_samples_of_a_task_count_once(value: float) -> None:
    found = rate([value] * 20, 80)
    assert found.standard_error == 0.0 and found.interval == pytest.approx(wilson(int(20 * value), 20))


def test_equal_tasks_count_every_sample() -> None:
    assert rate([0.5] * 50, 200).interval == pytest.approx(wilson(100, 200), abs=0.002)  # but for Student's quantile


def test_a_single_task_has_no_standard_error() -> None:
    assert rate([0.5], 16).standard_error is None and rate([0.5], 16).interval == pytest.approx(wilson(0, 0), abs=0.15)
    assert mean([0.5]).interval is None
    assert rate([], 0) == mean([]) and mean([]).value is None and mean([]).tasks == 0


def tasks_solved(draw: random.Random, a: float, b: float, tasks: int, samples: int) -> list[int]:
    """How often each task was solved: its own chance is drawn from a beta distribution."""
    chances = [draw.betavariate(a, b) for _ in range(tasks)]
    return [sum(draw.random() < p for _ in range(samples)) for p in chances]


@pytest.mark.parametrize(("a", "b"), [(0.5, 0.5), (2.0, 2.0), (8.0, 1.0)])
def test_clustered_intervals_cover_as_often_as_they_say(a: float, b: float) -> None:
    """1000 evaluations of 30 tasks with 4 samples; an interval that takes samples for independent covers less."""
    draw, covered, naive = random.Random(11), 0, 0
    truth = a / (a + b)
    for _ in range(1000):
        solved = tasks_solved(draw, a, b, 30, 4)
        low, high = rate([c / 4 for c in solved], 120).interval
        covered += low <= truth <= high
        low, high = wilson(sum(solved), 120)
        naive += low <= truth <= high
    assert 930 <= covered <= 975
    assert naive < covered - 15


def test_intervals_of_pass_at_k_cover_as_often_as_they_say() -> None:
    draw, covered = random.Random(12), [0, 0]
    # of Beta(1, 1): 1 - E (1 - p)^3 = 3/4 and E p^3 = 1/4
    for _ in range(1000):
        solved = tasks_solved(draw, 1.0, 1.0, 40, 6)
        for place, (one, truth) in enumerate([(pass_at_k, 0.75), (pass_hat_k, 0.25)]):
            low, high = rate([one(6, c, 3) for c in solved], 80).interval
            covered[place] += low <= truth <= high
    assert all(930 <= count <= 980 for count in covered)


def test_a_paired_difference_covers_with_several_samples() -> None:
    """Two policies whose chances on a task hang together: the pairs cover, and are narrower than unpaired."""
    draw, covered = random.Random(13), 0
    for _ in range(1000):
        before, after = [], []
        for _ in range(60):
            p = draw.betavariate(1.0, 1.0)
            before.append(sum(draw.random() < p for _ in range(4)) / 4)
            after.append(sum(draw.random() < 0.9 * p + 0.1 for _ in range(4)) / 4)
        low, high = paired_difference(before, after, 240).interval
        covered += low <= 0.05 <= high  # E(0.9 p + 0.1 - p) at E p = 1/2
    assert 935 <= covered <= 985
    widths = [end - begin for begin, end in (rate(before, 240).interval, rate(after, 240).interval)]
    assert high - low < 0.8 * math.hypot(*widths)


@pytest.mark.parametrize("samples", [None, 30, 240])
def test_an_unchanged_rate_still_has_an_interval(samples: int | None) -> None:
    """However many samples each task had: nothing shows whether they would have agreed anyway."""
    found = paired_difference([1.0] * 30, [1.0] * 30, samples)
    assert found.value == 0.0 and found.interval[0] < -0.03 and found.interval[1] > 0.03
    assert paired_difference([0.5] * 30, [0.5] * 30, samples).interval[1] > 0.008  # not a point either


def test_a_paired_difference_of_several_samples_by_hand() -> None:
    # changes 1/2, 0, 0, 1/4: mean 3/16, variance 11/192; with one sample of each task another 1/4 + 3/16 within
    before, after = [0.5, 1.0, 0.0, 0.5], [1.0, 1.0, 0.0, 0.75]
    within = (2 * 0.25 + 0.1875) / 4
    worth = 1 + within * 192 / 11
    assert worth == 4.0 and 1 < worth < 8
    count = 4 + 2 / worth
    variance = (0.3125 + 1 / worth**2) / count - (0.75 / count) ** 2
    half = 3.182446 * math.sqrt(variance / (count - 1))  # Student's 97.5 % point of 3 degrees
    found = paired_difference(before, after, 32)
    assert found.interval == pytest.approx((0.75 / count - half, 0.75 / count + half), abs=1e-6)
    assert paired_difference(before, after, 8).interval != found.interval  # 2 samples are worth no more than 2


SHAPES = {  # how a task's two chances are drawn, and the mean change
    "equal chances, evenly spread": (lambda draw, n: (p := draw.beta(1, 1, n), p), 0.0),
    "equal chances, most near the ends": (lambda draw, n: (p := draw.beta(0.5, 0.5, n), p), 0.0),
    "equal chances, near the middle": (lambda draw, n: (p := draw.beta(2, 2, n), p), 0.0),
    "equal chances, near 1": (lambda draw, n: (p := draw.beta(8, 1, n), p), 0.0),
    "even odds": (lambda draw, n: (np.full(n, 0.5), np.full(n, 0.5)), 0.0),
    "one in ten": (lambda draw, n: (np.full(n, 0.1), np.full(n, 0.1)), 0.0),
    "a little better": (lambda draw, n: (p := draw.beta(1, 1, n), 0.9 * p + 0.1), 0.05),
    "much better": (lambda draw, n: (p := draw.beta(1, 1, n), 0.6 * p + 0.4), 0.2),
    "from one in ten to three": (lambda draw, n: (np.full(n, 0.1), np.full(n, 0.3)), 0.2),
    "of different hardness to both": (lambda draw, n: (draw.beta(1, 1, n), draw.beta(2, 1, n)), 1 / 6),
    "solved or not, one in five turns": (
        lambda draw, n: (p := draw.integers(0, 2, n), np.abs(p - (draw.random(n) < 0.2))),
        0.0,
    ),
}
DESIGNS = [(tasks, samples) for tasks in (10, 20, 50) for samples in (1, 8)]


def paired_coverage(shape: str, tasks: int, samples: int, evaluations: int) -> tuple[float, float]:
    """The share of intervals that have the mean change inside, and how wide they are as a multiple of Student's, where
    it has one."""
    chances, truth = SHAPES[shape]
    draw = np.random.default_rng([tasks, samples, *shape.encode()])
    covered, width, students = 0, 0.0, 0.0
    for _ in range(evaluations):
        before, after = ((draw.binomial(samples, p) / samples).tolist() for p in chances(draw, tasks))
        low, high = paired_difference(before, after, tasks * samples).interval
        covered += low <= truth <= high
        if (student := paired_mean_difference(before, after).interval) is not None:
            width, students = width + high - low, students + student[1] - student[0]
    return covered / evaluations, width / students


@pytest.mark.parametrize(("tasks", "samples"), DESIGNS)
def test_a_paired_difference_covers_and_is_no_wider_than_it_must_be(tasks: int, samples: int) -> None:
    covered, width = paired_coverage("equal chances, evenly spread", tasks, samples, 1000)
    assert covered >= 0.94 and width <= 1.1


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("tasks", "samples"), [DESIGNS[0], DESIGNS[-1]])
def test_a_paired_difference_covers_whatever_the_chances(shape: str, tasks: int, samples: int) -> None:
    covered, width = paired_coverage(shape, tasks, samples, 10_000)
    assert covered >= 0.94 and width <= 1.1


def test_equal_values_have_no_interval() -> None:
    assert mean([0.3] * 9).interval is None and mean([0.3] * 9).standard_error == 0.0
    assert paired_mean_difference([5.0, 7.0], [5.0, 7.0]).interval is None


def test_a_mean_and_its_paired_difference_by_hand() -> None:
    # deviations -1.5, -0.5, 0.5, 1.5: variance 5/3, error sqrt(5/12); Student's 97.5 % point of 3 degrees is 3.182446
    found = mean([1.0, 2.0, 3.0, 4.0])
    half = 3.182446 * math.sqrt(5 / 12)
    assert found.value == 2.5 and found.interval == pytest.approx((2.5 - half, 2.5 + half), abs=1e-6)
    change = paired_mean_difference([5.0, 5.0, 5.0, 5.0], [6.0, 7.0, 8.0, 9.0])
    assert change == found


@pytest.mark.parametrize(
    ("tasks", "quantile"),  # Student's 97.5 % points as tables print them
    [(2, 12.7062), (3, 4.30265), (6, 2.57058), (11, 2.22814), (31, 2.04227), (101, 1.98397), (1001, 1.96234)],
)
def test_students_quantile(tasks: int, quantile: float) -> None:
    found = mean([float(i % 2) for i in range(tasks)])
    assert (found.interval[1] - found.value) / found.standard_error == pytest.approx(quantile, rel=5e-6)
