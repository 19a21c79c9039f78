"""Strings that end a turn. The renderer finds them, because an engine knows ids only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sparring.errors import refusal

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_SLACK = 4
"""Tokens that one character can take: the text of some ids may begin in the middle of one."""


class TextDecoder(Protocol):
    """Part of a tokenizer that decodes ids."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids."""
        ...


class StopStrings:
    """Finder of the first place where the text of sampled ids holds one of some strings: a `GenerateRequest.ends`.

    A function of the ids alone, without memory: a request that is sent again, or whose work is done twice, ends at the
    same token. It decodes the last ids only, as many as the longest string has bytes, because a token that is text is
    at least one.

    Args:
        tokenizer: of the model that generates.
        strings: none of them empty.

    Raises:
        BadInput: there is no string, or an empty one.
    """

    def __init__(self, tokenizer: TextDecoder, strings: Sequence[str]) -> None:
        if not strings or not all(strings):
            raise refusal(
                "stop strings", "at least one, none of them empty", repr(list(strings)), "leave the empty ones out"
            )
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        self._window = max(len(string.encode("utf-8", "replace")) for string in strings) + _SLACK

    def __call__(self, tokens: Sequence[int], new: int) -> int | None:
        """Count the first of a turn's ids that together hold one of the strings, at least one of the last `new` ids
        among them; None where there is no such string."""
        for count in range(len(tokens) - new + 1, len(tokens) + 1):
            first = max(0, count - 1 - self._window)
            before = self._tokenizer.decode(tokens[first : count - 1]).rstrip(_BROKEN)
            text = self._tokenizer.decode(tokens[first:count])
            if any(text.find(string, max(0, len(before) - len(string) + 1)) >= 0 for string in self._strings):
                return count
        return None
