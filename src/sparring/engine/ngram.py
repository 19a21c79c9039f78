"""Guesses of the next tokens by what followed the same tokens earlier. Torch-free."""

from __future__ import annotations

LONGEST = 3
"""Tokens of the context that are compared; longer contexts guessed nothing more on recorded rollouts."""


class Lookup:
    """Index of where the last few tokens of one growing text occurred before; the tokens that followed them there are
    the guess."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, ...], int] = {}
        self._indexed = 1

    def guess(self, tokens: list[int], most: int) -> list[int]:
        """Return up to `most` tokens that may follow, none where the last token is new. `tokens` may only grow between
        calls."""
        for end in range(self._indexed, len(tokens)):
            for begin in range(max(0, end - LONGEST), end):
                self._next[tuple(tokens[begin:end])] = end
        self._indexed = len(tokens)
        for begin in range(max(0, len(tokens) - LONGEST), len(tokens)):
            begin_next = self._next.get(tuple(tokens[begin:]))
            if begin_next is not None:
                return tokens[begin_next : begin_next + most]
        return []
