"""`tests/processor_time.py`: a test counts for its folder, and a folder over its budget, or without one, is told."""

import tomllib
from collections.abc import Mapping

import pytest
from processor_time import BUDGETS, PACE_S, folder_of, over_budget, slowness


@pytest.mark.parametrize(
    ("nodeid", "folder"),
    [
        ("tests/loop/test_redo.py::test_one[a/b]", "loop"),
        ("tests/unit/engine/test_kv.py::test_one", "unit/engine"),
        ("tests/unit/model/gguf/test_names.py::test_one", "unit/model"),
        ("tests/unit/test_backoff.py::test_one", "unit"),
    ],
)
def test_a_test_counts_for_its_folder(nodeid: str, folder: str) -> None:
    assert folder_of(nodeid) == folder


@pytest.mark.parametrize(
    ("seconds", "folders"),
    [
        ({"loop": 9.5, "unit": 3.0}, []),
        ({"loop": 10.5, "unit": 3.0}, ["tests/loop"]),
        ({"loop": 1.0, "new": 0.1}, ["tests/new"]),
    ],
)
def test_a_folder_over_its_budget_is_named(seconds: Mapping[str, float], folders: list[str]) -> None:
    said = over_budget(seconds, {"loop": 10, "unit": 5})
    assert [line.partition(":")[0] for line in said] == folders


@pytest.mark.parametrize(("paces", "slower"), [((), 1.0), ((0.5, 1.0), 1.0), ((1.0, 1.5, 2.0), 1.5)])
def test_budgets_are_longer_where_fixed_work_takes_longer_and_never_shorter(
    paces: tuple[float, ...], slower: float
) -> None:
    assert slowness([pace * PACE_S for pace in paces]) == pytest.approx(slower)


def test_the_budgets_do_not_grow() -> None:
    budgets = tomllib.loads(BUDGETS.read_text(encoding="utf-8"))
    assert 0 < sum(budgets.values()) <= 930
