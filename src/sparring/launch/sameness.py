"""Sameness of a run's tasks. Runs that were begun when words alone told them apart go on so, and keep their splits."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from sparring.dashboard.evaluations import FOLDERS
from sparring.envs.splits import Same, identity, identity_by_words
from sparring.launch.checkpoint import CONFIG, STORE
from sparring.store.cut import is_blank
from sparring.store.sqlite import SqliteStore

BY_MESSAGES = "tasks/same_by_messages"
"""The store's key of a run whose tasks are told by their messages; early runs have none."""


def sameness_of(folder: Path) -> Same:
    """Return what makes tasks the same in the run or the evaluation of a folder; of an evaluation beside a run, as in
    that run: what it held out is what is evaluated.

    Raises:
        StoreError: its record is damaged.
    """
    run = folder.parent.parent
    owner = run if folder.parent.name == FOLDERS and (run / CONFIG).is_file() else folder
    store = owner / STORE
    if not (owner / CONFIG).is_file() or is_blank(store):
        return identity
    with closing(SqliteStore(store, read_only=True)) as record:
        return identity_by_words if record.get(BY_MESSAGES) is None else identity
