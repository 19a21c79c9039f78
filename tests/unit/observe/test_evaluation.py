"""What two evaluations say about each other, and what a gate says to it."""

import random

import pytest
from refusals import refused_at

from sparring.observe.evaluation import Evaluation, TaskResult, compare, mean_reward, passes, success_rate, verdict
from sparring.observe.statistics import Estimate, pass_at_k, pass_hat_k


def evaluation_of(tasks: dict[str, tuple[bool, ...]], ks: tuple[int, ...] = (), digest: str = "") -> Evaluation:
    results = {
        name: TaskResult(digest=name + digest, solved=s, rewards=tuple(map(float, s))) for name, s in tasks.items()
    }
    listed = list(results.values())
    return Evaluation(
        success=success_rate(listed),
        reward=mean_reward(listed),
        pass_at={str(k): passes(listed, k, pass_at_k) for k in ks},
        pass_hat={str(k): passes(listed, k, pass_hat_k) for k in ks},
        tasks=results,
    )


def test_a_comparison_by_hand() -> None:
    before = evaluation_of({"a": (True, False), "b": (False, False), "c": (True, True), "d": (False, True)}, (2,))
    after = evaluation_of({"a": (True, True), "b": (False, True), "c": (True, True), "d": (False, False)}, (2,))
    found = compare(before, after)
    assert found.tasks == 4 and found.left_out == ()
    assert found.changes["success"].value == pytest.approx((0.5 + 0.5 + 0 - 0.5) / 4)
    assert found.changes["pass@2"].value == pytest.approx((0 + 1 + 0 - 1) / 4)
    assert found.changes["pass^2"].value == pytest.approx((1 + 0 + 0 + 0) / 4)
    assert found.changes["reward"].value == found.changes["success"].value


def test_a_task_scored_by_one_evaluation_is_left_out_and_named() -> None:
    before = evaluation_of({"a": (True,), "b": (), "c": (False,)})
    after = evaluation_of({"a": (False,), "b": (True,), "d": (True,)})
    found = compare(before, after)
    assert found.tasks == 1 and found.left_out == ("b", "c", "d")
    assert found.changes["success"].value == -1.0 and found.changes["reward"].interval is None


def test_compared_evaluations_may_differ_in_samples() -> None:
    found = compare(
        evaluation_of({"a": (True, False, True), "b": (True,)}, (2,)),
        evaluation_of({"a": (True,), "b": (False, True)}, (2,)),
    )
    assert found.changes["success"].value == pytest.approx((1 / 3 - 1 / 2) / 2)
    assert "pass@2" not in found.changes  # no task has two samples in both


@pytest.mark.parametrize(
    ("before", "after", "noun"),
    [
        (
            evaluation_of({"a": (True,)}),
            evaluation_of({"a": (True,)}, digest="!"),
            "two different tasks called a",
        ),
        (
            evaluation_of({"a": (True,)}),
            evaluation_of({"b": (True,)}),
            "tasks that both evaluations scored, got none among 1 and 1",
        ),
        (
            evaluation_of({"a": ()}),
            evaluation_of({"a": (True,)}),
            "tasks that both evaluations scored, got none among 0 and 1",
        ),
    ],
)
def test_evaluations_that_cannot_be_compared_are_refused(before: Evaluation, after: Evaluation, noun: str) -> None:
    with refused_at("comparison", noun):
        compare(before, after)


@pytest.mark.parametrize(
    ("interval", "margin", "says"),
    [
        ((-0.05, 0.10), 0.05, "held"),
        ((-0.05, 0.10), 0.02, "undecided"),
        ((-0.30, -0.10), 0.05, "regressed"),
        ((-0.30, -0.10), 0.10, "undecided"),
        ((0.01, 0.10), 0.0, "held"),
        (None, 0.5, "undecided"),
    ],
)
def test_the_gate_compares_the_whole_interval(interval: tuple[float, float] | None, margin: float, says: str) -> None:
    assert verdict(Estimate(value=0.0, standard_error=None, interval=interval, tasks=9), margin) == says


def test_a_gate_rarely_fails_an_unchanged_checkpoint() -> None:
    """100 pairs of evaluations of one policy, 60 tasks with 2 samples; and of one that lost two fifths of its
    chances."""
    draw = random.Random(5)

    def evaluation(chances: list[float], kept: float) -> Evaluation:
        return evaluation_of(
            {str(n): (draw.random() < kept * p, draw.random() < kept * p) for n, p in enumerate(chances)}
        )

    closed = {1.0: 0, 0.6: 0}
    for _ in range(100):
        chances = [draw.betavariate(2.0, 1.0) for _ in range(60)]
        before = evaluation(chances, 1.0)
        for kept in closed:
            change = compare(before, evaluation(chances, kept)).changes["success"]
            closed[kept] += verdict(change, 0.0) == "regressed"
    assert closed[1.0] <= 6 and closed[0.6] >= 90
