"""Folders for a while: gone in the end, and those of killed processes at the next beginning."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparring.scratch import scratch


def test_a_folder_is_removed_in_the_end_whatever_happens(tmp_path: Path) -> None:
    with pytest.raises(KeyError), scratch(tmp_path) as folder:
        (folder / "file").write_text("x")
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    elsewhere, left = tmp_path / "elsewhere", tmp_path / ".scratch-abcdefgh"
    others = [tmp_path / name for name in (".scratch-", ".scratch-abcdefghi", ".model-abcdefgh", "scratch-abcdefgh")]
    for folder in (elsewhere, left, *others):
        folder.mkdir()
        (folder / "file").write_text("x")
    link = tmp_path / ".scratch-linkaway"
    link.symlink_to(elsewhere)
    with scratch(tmp_path) as held:
        with scratch(tmp_path):
            assert held.is_dir(), "its process lives"
        assert not left.exists()
    assert all((folder / "file").exists() for folder in (elsewhere, *others)) and link.is_symlink()
