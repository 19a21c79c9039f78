"""Which tasks are the same in a run: as when it was begun."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from sparring.envs.splits import identity, identity_by_words
from sparring.launch.sameness import BY_MESSAGES, sameness_of
from sparring.store.sqlite import SqliteStore


def begun(folder: Path, *, before: bool) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text("")
    with closing(SqliteStore(folder / "store.sqlite")) as store:
        store.put("stage/init", {})
        if not before:
            store.put(BY_MESSAGES, True)
    return folder


def test_a_run_goes_on_as_it_was_begun_and_is_evaluated_so(tmp_path: Path) -> None:
    early, late = begun(tmp_path / "early", before=True), begun(tmp_path / "late", before=False)
    assert (sameness_of(early), sameness_of(late)) == (identity_by_words, identity)
    assert sameness_of(early / "evaluations" / "x-1") is identity_by_words
    assert sameness_of(late / "evaluations" / "x-1") is identity
    assert sameness_of(tmp_path / "none") is identity
    alone = begun(tmp_path / "no-run" / "evaluations" / "x-1", before=True)
    assert sameness_of(alone) is identity_by_words


def test_a_folder_in_which_nothing_was_recorded_begins(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    assert sameness_of(tmp_path) is identity
