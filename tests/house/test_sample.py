"""`tests/house/sample.py` reads every docstring once and counts signs and Args lines without a noun."""

import runpy
from pathlib import Path

import pytest

SAMPLE = runpy.run_path(str(Path(__file__).with_name("sample.py")))
TEXT = '''"""A module."""
LIMIT = 1
"""Most rows."""

class A:
    """A table.

    Attributes:
        rows: of the table.
        width: [N] int64, columns of each row.
        engine: samples.
        shape: [M, D] float32.
    """

    def sum(self, x: int) -> int:
        """Return what is left of these.

        Raises:
            ValueError: of no number.
        """
        "no docstring"
'''


def rows(tmp_path: Path, text: str) -> list:
    (tmp_path / "src/a").mkdir(parents=True)
    (tmp_path / "src/a/b.py").write_text(text)
    return list(SAMPLE["docstrings"](tmp_path / "src/a"))


def test_every_docstring_is_read_with_its_place_and_its_subject(tmp_path: Path) -> None:
    assert [(row.place, row.subject) for row in rows(tmp_path, TEXT)] == [
        ("src/a/b.py:1", "module a.b"),
        ("src/a/b.py:3", "LIMIT = 1"),
        ("src/a/b.py:6", "class A"),
        ("src/a/b.py:16", "def sum(self, x: int) -> int"),
    ]


def test_signs_and_lines_without_a_noun_are_counted(tmp_path: Path) -> None:
    *_, table, method = rows(tmp_path, TEXT)
    assert list(table.without_noun()) == ["rows: of the table.", "engine: samples."]
    assert {name for name, _ in method.signs()} == {"of these", "return what", "what is what"}
    assert SAMPLE["counts"]([table, method], "two").splitlines()[0] == (
        "two: 2 docstrings, 1 with a sign (50.0%); 4 lines of Args and Attributes, 2 without a noun (50.0%)"
    )


@pytest.mark.parametrize(
    "sentence",
    ["Compute KL(p || q) of [M] rows.", "Return the index, or None without one.", "Whether to stop; True by default."],
)
def test_a_plain_sentence_has_no_sign(tmp_path: Path, sentence: str) -> None:
    (row,) = rows(tmp_path, f'"""{sentence}"""')
    assert not list(row.signs())
