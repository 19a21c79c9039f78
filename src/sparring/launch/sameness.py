"""Equality of a run's tasks. Older runs compare tasks by their messages alone. They keep this comparison, so that their
splits do not change."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from sparring.dashboard.evaluations import FOLDERS
from sparring.envs.splits import Same, identity, identity_by_words
from sparring.launch.checkpoint import CONFIG, STORE
from sparring.store.connection import is_blank
from sparring.store.sqlite import SqliteStore

BY_MESSAGES = "tasks/same_by_messages"
"""Key of the store for whether tasks are compared by their messages. Early runs lack the key."""


def sameness_of(folder: Path) -> Same:
    """Return the equality of tasks for the folder of a run or an evaluation. An evaluation of a run uses the run's
    equality, so that it evaluates the run's held-out tasks.

    Raises:
        StoreError: the store is damaged.
    """
    run = folder.parent.parent
    owner = run if folder.parent.name == FOLDERS and (run / CONFIG).is_file() else folder
    store = owner / STORE
    if not (owner / CONFIG).is_file() or is_blank(store):
        return identity
    with closing(SqliteStore(store, read_only=True)) as record:
        return identity_by_words if record.get(BY_MESSAGES) is None else identity
