"""Tables of `sparring eval` in the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from sparring.cli.result import number, plain, table
from sparring.observe.results import Compared, Evaluated, Results
from sparring.observe.statistics import Estimate
from sparring.observe.terminal import say

ONE = ("pass@1", "pass^1")
"""Figures that equal success."""

NAMED = 5
"""Maximum number of rollouts or tasks that are listed; the result file has all."""


def print_results(results: Results) -> None:
    """Print each evaluation, then its changes against the first."""
    for evaluated in results.evaluations:
        say("\n".join(evaluation_lines(evaluated)), end="\n\n")
    for compared in results.comparisons:
        say("\n".join(comparison_lines(compared)), end="\n\n")


def evaluation_lines(evaluated: Evaluated) -> Iterator[str]:
    """Yield one evaluation: success by dataset, reward, pass@k, and broken rollouts."""
    evaluation = evaluated.evaluation
    yield f"{evaluated.name} on {evaluated.environment}"
    rows = [(tag, *_cells(estimate)) for tag, estimate in evaluation.by_tag.items()]
    if evaluation.success.tasks:
        total = ("all together", *_cells(evaluation.success))
        lines = table if rows else plain
        yield from lines([("dataset", "success", "std. error", "95 % interval", "tasks"), *rows, total])
    rows = [("reward", *_cells(evaluation.reward, percent=False))]
    rows += [(f"reward/{role}", *_cells(estimate, percent=False)) for role, estimate in evaluation.by_role.items()]
    rows += [(f"pass@{k}", *_cells(estimate)) for k, estimate in evaluation.pass_at.items() if k != "1"]
    rows += [(f"pass^{k}", *_cells(estimate)) for k, estimate in evaluation.pass_hat.items() if k != "1"]
    yield from plain([("figure", "mean", "std. error", "95 % interval", "tasks"), *rows])
    turns = "" if evaluation.mean_turns is None else f", {evaluation.mean_turns:.2f} turns each"
    how = f"temperature {evaluated.temperature:g}, seed {evaluated.seed}"
    yield f"{evaluation.rollouts} rollouts, {evaluation.samples} of each task{turns}, {how}"
    if evaluation.versions is not None and evaluation.versions[0] != evaluation.versions[1]:
        yield "weight versions {} to {}".format(*evaluation.versions)
    if evaluation.lost:
        some = [f"{lost.rollout} ({lost.failure})" for lost in evaluation.lost]
        count = f"{len(evaluation.lost)} of {evaluation.rollouts}"
        yield f"lost to infrastructure or judge, and in no figure: {count}: {_some(some)}"


def comparison_lines(compared: Compared) -> Iterator[str]:
    """Yield the changes between two evaluations, and the gate's verdict."""
    comparison = compared.comparison
    yield f"{compared.after} against {compared.before}, task by task"
    changes = {name: change for name, change in comparison.changes.items() if name not in ONE}
    rows = [
        (name, *_cells(change, percent=not name.startswith("reward"), signed=True)) for name, change in changes.items()
    ]
    yield from plain([("figure", "change", "std. error", "95 % interval", "tasks"), *rows])
    if left_out := comparison.left_out:
        yield f"left out, because only one of the two scored them: {len(left_out)} tasks: {_some(left_out)}"
    if compared.verdict is not None and compared.margin is not None:
        says = {"held": "held", "regressed": "REGRESSED", "undecided": "undecided: more tasks or samples would tell"}
        margin = number(compared.margin, compared.figure != "reward")
        yield f"gate: {compared.figure} may fall by {margin}: {says[compared.verdict]}"


def _cells(estimate: Estimate, *, percent: bool = True, signed: bool = False) -> tuple[str, ...]:
    low, high = estimate.interval or (None, None)
    interval = "" if low is None else f"{number(low, percent, signed)} to {number(high, percent, signed)}"
    value, error = (
        number(x, percent, signed and x is estimate.value) for x in (estimate.value, estimate.standard_error)
    )
    return value, error, interval, str(estimate.tasks)


def _some(names: list[str] | tuple[str, ...]) -> str:
    return "; ".join(names[:NAMED]) + ("; ..." if len(names) > NAMED else "")
