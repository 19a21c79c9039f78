"""Speculative decoding without a draft model: tokens guessed from the request's own text are computed in one step and
accepted where sampling gives the same.

A guess is only ever compared. Every row of the step is sampled as in ordinary generation, with the random number of its
own position; accepted are the sampled tokens up to the first that differs from its guess. The result has the bits of
ordinary generation.
"""

from __future__ import annotations

from sparring.engine.config import EngineConfig
from sparring.engine.ngram import Lookup
from sparring.engine.scheduler import Chunk, StepScheduler
from sparring.errors import refusal
from sparring.model.steps.rows import SampledTokens

ROWS = 16
"""Rows of a step that cost little more than one: below this number, reading the weights dominates (and a tile holds as
many)."""


class Speculation:
    """Guesses for the requests of a step, while these are few.

    Args:
        config: `[engine]`.
        recurrent: whether the model has a recurrent state, which cannot be set back to the last accepted token.

    Raises:
        BadInput: it has, and `config` turns speculation on.
    """

    def __init__(self, config: EngineConfig, *, recurrent: bool = False) -> None:
        if recurrent and config.speculation != "off":
            expected, got = '"off" for a model with recurrent state', repr(config.speculation)
            raise refusal("engine.speculation", expected, got, "leave it out")
        self._most = config.speculation_tokens if config.speculation == "ngram" else 0

    def applies(self, chunks: list[Chunk]) -> bool:
        """Return True if a step can speculate: all its requests generate, and they leave rows for guesses."""
        few = 0 < len(chunks) <= ROWS // 2
        return self._most > 0 and few and all(chunk.count == 1 and chunk.samples for chunk in chunks)

    def drafts(self, chunks: list[Chunk], scheduler: StepScheduler) -> list[list[int]] | None:
        """Guess the tokens that may follow each of `chunks` and allocate pages for them. A constrained request gets no
        guess.

        Returns:
            The guesses of each chunk; None where there are none at all.
        """
        most, guesses = min(self._most, ROWS // len(chunks) - 1), []
        for sequence, *_ in chunks:
            if sequence.lookup is None:
                sequence.lookup = Lookup()
            guesses.append([] if sequence.request.allowed else sequence.lookup.guess(sequence.tokens, most))
        steps = scheduler.steps_ahead(chunks, 1 + max(map(len, guesses)))
        return [tokens[: steps - 1] for tokens in guesses] if steps > 1 else None


def accepted(sampled: SampledTokens, drafts: list[list[int]]) -> SampledTokens:
    """Reduce a step with guesses to the tokens that ordinary steps would have sampled.

    Args:
        sampled: of a step in which every sequence had one row for its last token and one for each guessed token.
        drafts: the guesses of each sequence.
    """
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

    return SampledTokens(*(None if values is None else joined(values) for values in sampled))
