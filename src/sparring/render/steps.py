"""Where in sampled tokens the steps of a text end."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial

from sparring.errors import refusal
from sparring.protocols import Renderer


class Steps:
    """Divides what was sampled in one turn as the rows of a process reward model are divided.

    Args:
        renderer: of the policy.
        separator: what stands between two steps.
    """

    def __init__(self, renderer: Renderer, separator: str) -> None:
        self._renderer, self._separator = renderer, separator

    def __call__(self, tokens: Sequence[int]) -> list[int]:
        """By how many of `tokens` each step has been read, ascending. Blank ones are none, and of several that end in
        one token that is one; what ended the turn belongs to no step."""
        said = tokens[:-1] if tokens and tokens[-1] in self._renderer.stop_ids else tokens
        pieces = self._renderer.decode(said).split(self._separator)
        texts = [
            self._separator.join(pieces[: count + 1]).rstrip() for count, piece in enumerate(pieces) if piece.strip()
        ]
        return sorted(set(step_ends(self._renderer, said, 0, texts)))


def step_ends(renderer: Renderer, tokens: Sequence[int], start: int, texts: Sequence[str]) -> list[int]:
    """By how many of `tokens` each of `texts`, every one beginning with the one before it, has been read. The reply
    begins at `start`; where a token ends one step and begins the next, the step has been read behind it.

    Raises:
        BadInput: the tokens say something else.
    """
    found = []
    for text in texts:
        # lengths would not do: half a character is more signs than the whole one
        count = bisect_left(range(len(tokens) - start + 1), True, key=partial(_says, renderer, tokens[start:], text))
        if count > len(tokens) - start:
            got = repr(renderer.decode(tokens[start:])[:40])
            raise refusal("steps", repr(text[:40]), got, "write them without blanks around")
        found.append(start + count)
    return found


def _says(renderer: Renderer, tokens: Sequence[int], text: str, count: int) -> bool:
    """Whether `text` has been read behind `count` tokens."""
    return renderer.decode(tokens[:count]).startswith(text)
