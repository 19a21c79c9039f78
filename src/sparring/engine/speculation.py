"""Speculation: tokens guessed from what a request has said before, computed in one step and kept where sampling says
the same.

A guess is only ever compared. Every row of the step is sampled as it would be alone, with the random number of its own
position, and what is taken are the sampled tokens up to the first that is not the guessed one: the bits of ordinary
generation.
"""

from __future__ import annotations

from sparring.engine.config import EngineConfig
from sparring.engine.ngram import Lookup
from sparring.engine.scheduler import Chunk, Scheduler
from sparring.errors import refusal
from sparring.model.step import Sampled

ROWS = 16
"""Rows of a step that cost little more than one: below, reading the weights is the work (and a tile holds as many)."""


class Speculation:
    """Guesses for the requests of a step, while these are few.

    Args:
        config: `[engine]`.
        recurrent: whether the model has a recurrent state, which cannot be taken back to the last token that was right.

    Raises:
        BadInput: it has, and `config` asks for guesses.
    """

    def __init__(self, config: EngineConfig, *, recurrent: bool = False) -> None:
        if recurrent and config.speculation != "off":
            expected, got = '"off" for a model with recurrent state', repr(config.speculation)
            raise refusal("engine.speculation", expected, got, "leave it out")
        self._most = config.speculation_tokens if config.speculation == "ngram" else 0

    def applies(self, chunks: list[Chunk]) -> bool:
        """Whether the step is one that guesses: all generate, and there is room for a guess of each."""
        few = 0 < len(chunks) <= ROWS // 2
        return self._most > 0 and few and all(chunk.count == 1 and chunk.samples for chunk in chunks)

    def drafts(self, chunks: list[Chunk], scheduler: Scheduler) -> list[list[int]] | None:
        """What may follow each of `chunks`, with pages for it; nothing behind a request that is told what may come.
        None where there is nothing to guess."""
        room, found = min(self._most, ROWS // len(chunks) - 1), []
        for sequence, *_ in chunks:
            if sequence.lookup is None:
                sequence.lookup = Lookup()
            found.append([] if sequence.request.allowed else sequence.lookup.guess(sequence.tokens, room))
        steps = scheduler.steps_ahead(chunks, 1 + max(map(len, found)))
        return [tokens[: steps - 1] for tokens in found] if steps > 1 else None


def accepted(sampled: Sampled, drafts: list[list[int]]) -> Sampled:
    """Of a step in which every sequence had a row for its last token and one for each of its draft: what ordinary steps
    would have sampled."""
    begins, taken = [], []
    row = 0
    for draft in drafts:
        count = 0
        while count < len(draft) and sampled.tokens[row + count][0] == draft[count]:
            count += 1
        begins.append(row)
        taken.append(count + 1)
        row += len(draft) + 1

    def joined(values: list[list]) -> list[list]:
        return [
            [values[row][0] for row in range(begin, begin + count)] for begin, count in zip(begins, taken, strict=True)
        ]

    return Sampled(*(None if values is None else joined(values) for values in sampled))
