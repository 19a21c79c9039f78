"""Turns of a tree, planned one by one where no event loop runs."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

from sparring.record.lines import Turn
from sparring.record.tree import Tree


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def planned(tree: Tree, *request: Any) -> Turn:
    """Return the turn of a request to a tree."""
    return _loop().run_until_complete(tree.plan(*request))
