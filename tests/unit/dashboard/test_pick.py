"""The picker sees every group once and keeps few."""

from rollouts import LOST, make_rollout

from sparring.dashboard.pick import Picker
from sparring.types import Group, Score, Task


def _group(number: int, *rewards: float, failed: bool = False) -> Group:
    task = Task(id=f"t{number}", env="e", messages=())
    return Group(
        id=f"g{number}",
        index=number,
        task=task,
        rollouts=tuple(make_rollout(task, f"{number}/{i}", index=i) for i in range(len(rewards))),
        scores=tuple(Score(reward=r) for r in rewards),
        failed=(make_rollout(task, f"{number}/lost", index=len(rewards), outcome=LOST),) if failed else (),
    )


def _picked(groups: list[Group], each: int) -> dict[int, tuple[str, ...]]:
    picker = Picker(per_kind=each)
    for group in groups:
        picker.take(group)
    return {group.index: names for group, names in picker.picked()}


def test_first_last_best_worst_failed_and_some_between() -> None:
    groups = [_group(n, 0.5, 0.5) for n in range(1000)]
    groups[300] = _group(300, 0.5, 2.0)
    groups[400] = _group(400, -1.0, 0.5)
    groups[500] = _group(500, 0.5, 0.5, failed=True)
    picked = _picked(groups, 2)
    assert set(picked) >= {0, 1, 998, 999, 300, 400, 500}
    assert "first" in picked[0] and "last" in picked[999] and picked[500] == ("failed",)
    assert "best" in picked[300] and "worst" in picked[400]
    between = [number for number, names in picked.items() if "between" in names]
    assert len(between) >= 2 and min(between) > 100 and max(between) < 999
    assert len(picked) < 14


def test_a_short_run_is_shown_whole_and_once() -> None:
    assert list(_picked([_group(n, float(n)) for n in range(3)], 3)) == [0, 1, 2] and _picked([], 3) == {}


def test_of_equal_groups_the_later_ones_stand_for_the_best() -> None:
    picked = _picked([_group(n, 1.0) for n in range(50)], 1)
    assert "best" in picked[49]
