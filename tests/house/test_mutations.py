"""`tests/mutations`: every mutation of the list fits the tree, and one that does not is named."""

import runpy
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUN = runpy.run_path(str(ROOT / "tests/mutations/run.py"))
LISTED = RUN["mutations"](RUN["LIST"])


def test_every_mutation_fits_the_tree() -> None:
    assert RUN["misfits"](ROOT, LISTED) == []
    assert max(Counter(mutation.name for mutation in LISTED).values()) == 1
    assert all(mutation.before != mutation.after for mutation in LISTED)


def test_every_law_has_mutations() -> None:
    laws = Counter(mutation.name.partition(":")[0] for mutation in LISTED)
    assert all(laws[f"law {number}"] >= 2 for number in range(1, 11)) and len(LISTED) >= 40


@pytest.mark.parametrize(("text", "tests"), [("b", ["one.py"]), ("a\na", ["one.py"]), ("a", ["none.py"])])
def test_one_that_does_not_fit_is_named(tmp_path: Path, text: str, tests: list[str]) -> None:
    (tmp_path / "one.py").write_text(text)
    mutation = RUN["Mutation"](name="law 1: it", file="one.py", before="a", after="b", tests=tests)
    [line] = RUN["misfits"](tmp_path, [mutation])
    assert line.startswith("law 1: it: expected ")


def test_a_file_is_changed_and_restored(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("a = 1\n")
    mutation = RUN["Mutation"](name="it", file="one.py", before="1", after="2", tests=[])
    with RUN["mutated"](tmp_path, mutation):
        assert (tmp_path / "one.py").read_text() == "a = 2\n"
    assert (tmp_path / "one.py").read_text() == "a = 1\n"


@pytest.mark.parametrize(("code", "found"), [(1, "noticed"), (0, "not noticed"), (2, "pytest ended with 2")])
def test_only_a_test_that_fails_notices(code: int, found: str) -> None:
    assert RUN["verdict"](code, "").startswith(found)
