"""What is remembered of proofs."""

from __future__ import annotations

from pathlib import Path

from sparring.envs.rubrics.config import Code
from sparring.envs.rubrics.proof_cache import AT_LEAST, Proven, digest
from sparring.types import BoxSpec


def test_only_many_proofs_are_written_to_the_file(tmp_path: Path) -> None:
    file = tmp_path / "of" / "user"
    first = Proven(file)
    for number in range(AT_LEAST - 1):
        first.add(str(number))
    assert "7" in first and not file.exists()
    first.add("last")
    assert all(row in Proven(file) for row in ("0", "last")) and "x" not in Proven(file)


def test_an_unwritable_cache_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    rows = Proven(tmp_path / "file" / "below")
    for number in range(AT_LEAST + 1):
        rows.add(str(number))
    assert "7" in rows


def test_a_proof_depends_on_row_part_and_box() -> None:
    names = {digest(part, row, box) for part in (Code(), Code(partial=True)) for row in ({"tests": "a"}, {"tests": "b"})
             for box in (BoxSpec(), BoxSpec(timeout_s=9.0))}  # fmt: skip
    assert len(names) == 8 and digest(Code(), {"tests": "a"}, BoxSpec()) in names
