"""What a model says of the policy's tokens, as an annotation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence, Set

from sparring.types import Sample

Forward = Callable[[Sequence[Sample], Set[str]], Awaitable[Sequence[Mapping[str, tuple[float, ...]]]]]
"""`Trainer.forward`."""


class Forwarded:
    """Implements `Annotator`: a quantity of every weighted token under the weights that a trainer holds when it is
    asked.

    Args:
        forward: of the trainer.
        name: of the annotation, such as "proximal" for the policy's own log-probabilities before an update of several
            optimiser
        steps.
        quantity: what is asked of it.
    """

    def __init__(self, forward: Forward, name: str, quantity: str = "logprob") -> None:
        self._forward, self._name, self._quantity = forward, name, quantity

    async def annotate(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """The samples with the annotation, 0.0 where no term weighs a token."""
        found = await self._forward(samples, {self._quantity})
        return [
            sample.annotated(self._name, values[self._quantity]) for sample, values in zip(samples, found, strict=True)
        ]
