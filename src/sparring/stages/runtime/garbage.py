"""Settings of Python's garbage collector while a run trains."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNG_OBJECTS = 20_000
"""New objects that start a collection of the youngest generation (700 as Python comes)."""


@contextmanager
def fewer_collections() -> Iterator[None]:
    """Keep the garbage collector off the objects that exist already: models, libraries, modules. Walking them took a
    thirtieth of the quickstart.

    Collections are rarer, too: a step's rollouts are tens of thousands of objects in no cycle, which go when the step
    is over.
    """
    gc.collect()
    gc.freeze()
    before = gc.get_threshold()
    gc.set_threshold(max(_YOUNG_OBJECTS, before[0]), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
