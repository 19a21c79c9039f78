"""Protocols of training: annotations, credit, losses and the trainer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from sparring.generation import ScoreRequest, Scores
from sparring.types import Batch, CheckpointRef, Group, Sample, StepResult, WeightRef

if TYPE_CHECKING:
    import torch


class ValueModel(Protocol):
    """A served model with a scalar head."""

    async def values(self, texts: Sequence[Sequence[int]]) -> Sequence[float]:
        """Return the value behind the last token of each text, given as token ids."""

    async def close(self) -> None:
        """End its thread."""


class Annotator(Protocol):
    """Adds per-token values (reference, teacher, value) to flattened samples."""

    async def annotate(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """Return the same samples, in order, with more annotations."""


class Credit(Protocol):
    """Turns scores into advantages, over all groups of one update."""

    def credit(self, groups: Sequence[Group], samples: Sequence[Sequence[Sample]]) -> Sequence[Sequence[Sample]]:
        """Set advantages and weights. `samples[i]` are the branches of `groups[i]`; return them per group, an empty
        sequence where the group leaves the update (zero variance)."""

    def denominator(self, rows: Iterable[Sample]) -> float | None:
        """Return the denominator of the policy term over some of these rows; None for the sum of their weights."""

    def state(self) -> Mapping[str, Any]:
        """Return what it remembers of earlier updates."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned before the run was stopped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Divergence:
    """Divergence of the model's distribution q from a teacher's p. `reverse` is KL(q || p), `forward` KL(p
    || q); `jensen_shannon` is beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q. `top_k`: over the
    teacher's likeliest tokens (`Sample.tops`), all others being one; `vocabulary`: over all tokens, the teacher
    (`Sample.teacher`) computed beside the model."""

    kind: Literal["reverse", "forward", "jensen_shannon"] = "reverse"
    over: Literal["top_k", "vocabulary"] = "vocabulary"
    beta: float = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """Needs of a loss. No micro-batch splits a token, a turn or a pair. `survey` costs a gradient-free first pass, in
    which the loss is asked for `survey(quantities, micro_batch)`, of all the step's tokens at once: name -> [M] of what
    it then finds as annotations. A loss of unit `sequence`, which is a trajectory, has a survey too, which is asked for
    where a trajectory has several rows, because these may be in several micro-batches. `idle_tokens`: the policy's
    tokens of zero advantage matter too; else they are not computed. `divergence` is what the quantity of that name
    is."""

    quantities: frozenset[str] = frozenset({"logprob"})
    unit: str = "token"
    survey: bool = False
    idle_tokens: bool = False
    divergence: Divergence | None = None


@dataclass(kw_only=True, slots=True)
class LossResult:
    """`loss` is a scalar to call backward on, already divided by the global denominators; `metrics` map a name to
    (sum, count) so that micro-batches add up."""

    loss: torch.Tensor
    metrics: dict[str, tuple[float, float]]


class Loss(Protocol):
    """One loss term."""

    term: str
    needs: Needs

    def __call__(self, quantities: Mapping[str, torch.Tensor], micro_batch: Any) -> LossResult:
        """Compute the term. `quantities` maps each needed name to a tensor [N] of the micro-batch's weighted tokens."""


class Trainer(Protocol):
    """Trains one model. It knows loss terms, not algorithms."""

    @property
    def version(self) -> int:
        """Updates that its weights have had."""

    async def forward(self, rows: Sequence[Sample], needs: Set[str]) -> Sequence[Mapping[str, tuple[float, ...]]]:
        """Compute quantities of the tokens that some term weighs, without gradients: per row, one value per token."""

    async def score(self, teacher: str, request: ScoreRequest) -> Scores:
        """Score given tokens under one of the teachers that the trainer holds, as an engine of it would."""

    async def forward_backward(self, batch: Batch) -> Mapping[str, float]:
        """Add the gradients of a batch and return its metrics."""

    async def step(self, *, ends_update: bool = True) -> StepResult:
        """Apply the gradients, once per batch. The version counts up where the step ends its update."""

    async def push(self) -> WeightRef:
        """Publish a copy of the weights."""

    async def save(self, path: str, *, stage: str, metrics: Mapping[str, float]) -> CheckpointRef:
        """Write a checkpoint from which training goes on to the same bits."""

    async def restore(self, ref: CheckpointRef) -> None:
        """Go back to a checkpoint."""
