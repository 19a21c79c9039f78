"""Cache of tool lists, which clients send with every request."""

from __future__ import annotations

from collections.abc import Sequence

from sparring.record.identity import digest, tools_key, written_key
from sparring.record.rendering import has_many
from sparring.types import ToolSpec

REMEMBERED = 256
"""Maximum number of lists in the cache; the oldest are dropped."""


class ToolLists:
    """Cache of tool lists with their digests. Lists that differ only in form have the same digest."""

    def __init__(self) -> None:
        self._by_form: dict[bytes, tuple[bytes, tuple[ToolSpec, ...], bool]] = {}

    def of(self, tools: Sequence[ToolSpec]) -> tuple[bytes, tuple[ToolSpec, ...], bool]:
        """Return the digest of a list, the cached list, and whether it takes long to render."""
        form = written_key(tools)
        remembered = None if form is None else self._by_form.get(form)
        if remembered is not None:
            return remembered
        long = has_many(part for tool in tools for part in (tool.description, tool.parameters))
        made = digest(tools_key(tools)), tuple(tools), long
        if form is not None:
            self._by_form[form] = made
            if len(self._by_form) > REMEMBERED:
                del self._by_form[next(iter(self._by_form))]
        return made
