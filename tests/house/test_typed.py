"""The list of modules without checked types may only shrink."""

from pathlib import Path

import pytest
from typed import unlawful


def settings(*modules: str, strict: bool = True) -> dict:
    return {"tool": {"mypy": {"strict": strict, "overrides": [{"module": [*modules], "ignore_errors": True}]}}}


@pytest.mark.parametrize(
    ("given", "most", "finding"),
    [
        (settings("a.b", "a.c"), 1, "ignores 2 modules, more than 1"),
        (settings("a.b"), 2, "lower MOST_UNTYPED from 2 to 1"),
        (settings("a.c", "a.b"), 2, "sorted"),
        (settings("a.*"), 1, "a.* is no module"),
        (settings("a.gone"), 1, "a.gone is no module"),
        (settings("a.b", strict=False), 1, "mypy is strict"),
    ],
)
def test_a_list_that_grows_or_names_what_is_not_there_is_found(tmp_path: Path, given, most, finding) -> None:
    (tmp_path / "a").mkdir()
    for name in "bc":
        (tmp_path / f"a/{name}.py").write_text("")
    (found,) = unlawful(given, tmp_path, most)
    assert finding in found


def test_a_list_that_is_as_long_as_it_may_be_passes(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_text("")
    assert not list(unlawful(settings("b"), tmp_path, 1))
