"""Settings of Python's garbage collector while a run trains."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNG_OBJECTS = 20_000
"""New objects that start a collection of the youngest generation; Python's default is 700."""


@contextmanager
def fewer_collections() -> Iterator[None]:
    """Exclude existing objects (models, libraries, modules) from garbage collection and collect less often.

    Walking the existing objects took a thirtieth of the quickstart's time. Collections can be rarer because the tens of
    thousands of objects of a step are in no cycle and are freed after the step.

    If the calling program has already excluded objects, no further objects are excluded, because Python can only
    include all excluded objects again together.
    """
    is_ours = not gc.get_freeze_count()
    gc.collect()
    if is_ours:
        gc.freeze()
    before = gc.get_threshold()
    gc.set_threshold(max(_YOUNG_OBJECTS, before[0]), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if is_ours:
            gc.unfreeze()
