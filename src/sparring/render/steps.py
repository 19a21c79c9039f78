"""Division of a reply into the steps that a process reward model scores, as positions in its sampled tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial

from sparring.errors import refusal
from sparring.protocols import Renderer


class StepSplitter:
    """Divider of a turn's sampled tokens into steps, at the same separator as the training rows of a process reward
    model."""

    def __init__(self, renderer: Renderer, separator: str) -> None:
        self._renderer, self._separator = renderer, separator

    def __call__(self, tokens: Sequence[int]) -> list[int]:
        """Return, ascending, the number of `tokens` read at the end of each step. Blank steps do not count, several
        steps that end in one token count once, and the token that ended the turn belongs to no step."""
        body = tokens[:-1] if tokens and tokens[-1] in self._renderer.stop_ids else tokens
        pieces = self._renderer.decode(body).split(self._separator)
        texts = [
            self._separator.join(pieces[: count + 1]).rstrip() for count, piece in enumerate(pieces) if piece.strip()
        ]
        return sorted(set(step_ends(self._renderer, body, 0, texts)))


def step_ends(renderer: Renderer, tokens: Sequence[int], start: int, texts: Sequence[str]) -> list[int]:
    """Return the number of `tokens` read at the end of each text. A token that ends one step and begins the next
    belongs to the first.

    Args:
        texts: the reply up to the end of each step, so that each text begins with the previous text.

    Raises:
        BadInput: the tokens spell another text.
    """
    counts = []
    for text in texts:
        # text lengths are not monotonic: half a character decodes to more characters than a complete one
        count = bisect_left(range(len(tokens) - start + 1), True, key=partial(_spells, renderer, tokens[start:], text))
        if count > len(tokens) - start:
            got = repr(renderer.decode(tokens[start:])[:40])
            raise refusal("steps", repr(text[:40]), got, "write the steps without blanks around them")
        counts.append(start + count)
    return counts


def _spells(renderer: Renderer, tokens: Sequence[int], text: str, count: int) -> bool:
    return renderer.decode(tokens[:count]).startswith(text)
