"""Guesses of the next tokens by what followed the same tokens earlier. Torch-free."""

from __future__ import annotations

LONGEST = 3
"""Tokens of an earlier place that are compared; longer ones found nothing more on recorded rollouts."""


class Lookup:
    """Where in one growing row of tokens the last few stood before; what followed them there is the guess."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, ...], int] = {}
        self._known = 1

    def guess(self, tokens: list[int], most: int) -> list[int]:
        """Up to `most` tokens that may follow; none where the last one is new. `tokens` only grows between calls."""
        for end in range(self._known, len(tokens)):
            for begin in range(max(0, end - LONGEST), end):
                self._next[tuple(tokens[begin:end])] = end
        self._known = len(tokens)
        for begin in range(max(0, len(tokens) - LONGEST), len(tokens)):
            found = self._next.get(tuple(tokens[begin:]))
            if found is not None:
                return tokens[found : found + most]
        return []
