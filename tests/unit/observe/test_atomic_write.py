"""Files that are there whole or not at all."""

from __future__ import annotations

from pathlib import Path

from sparring.observe.atomic_write import write_whole


def test_a_draft_is_never_written_through_a_link(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "report.html"
    victim.write_text("kept")
    (tmp_path / "report.html.part").symlink_to(victim)
    write_whole(path, b"page")
    assert (path.read_bytes(), victim.read_text()) == (b"page", "kept")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["report.html", "victim"]


def test_a_link_at_the_place_itself_is_replaced(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "report.html"
    victim.write_text("kept")
    path.symlink_to(victim)
    write_whole(path, b"page", mode=0o600)
    assert (path.read_bytes(), victim.read_text(), path.stat().st_mode & 0o777) == (b"page", "kept", 0o600)
