"""Stop strings: strings that end a turn. The renderer finds stop strings, because an engine sees token ids only."""

from __future__ import annotations

from collections.abc import Sequence

from sparring.errors import refusal
from sparring.render.tokenizer import FileTokenizer

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_SLACK = 4
"""Maximum number of tokens that one character takes; a decoded window may begin in the middle of a character."""


class StopStrings:
    """Finder of the first stop string in the text of sampled ids; the value of `GenerateRequest.ends`.

    Its result is a function of the ids alone: a request that is sent again ends at the same token. Only the last ids
    are decoded, as many as the longest string has bytes, since every text token holds at least one byte.

    Raises:
        BadInput: `strings` is empty or contains an empty string.
    """

    def __init__(self, tokenizer: FileTokenizer, strings: Sequence[str]) -> None:
        if not strings or not all(strings):
            raise refusal(
                "stop strings", "at least one, none of them empty", repr(list(strings)), "leave the empty ones out"
            )
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        self._window = max(len(string.encode("utf-8", "replace")) for string in strings) + _SLACK

    def __call__(self, tokens: Sequence[int], new: int) -> int | None:
        """Return the number of ids up to the one that completes a stop string; None if no stop string ends within the
        last `new` ids."""
        for count in range(len(tokens) - new + 1, len(tokens) + 1):
            first = max(0, count - 1 - self._window)
            before = self._tokenizer.decode(tokens[first : count - 1]).rstrip(_BROKEN)
            text = self._tokenizer.decode(tokens[first:count])
            if any(text.find(string, max(0, len(before) - len(string) + 1)) >= 0 for string in self._strings):
                return count
        return None
