"""Protocols of training: annotators, credit, losses and the trainer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from sparring.annotations import Annotation
from sparring.generation import ScoreRequest, Scores
from sparring.types import Batch, CheckpointRef, Group, Sample, StepResult, WeightRef

if TYPE_CHECKING:
    import torch


class ValueModel(Protocol):
    """Served model with a scalar head."""

    async def values(self, texts: Sequence[Sequence[int]]) -> Sequence[float]:
        """Return the value at the end of each text, given as token ids."""

    async def close(self) -> None:
        """End its thread."""


class Annotator(Protocol):
    """Adds per-token values (reference, teacher, value) to flattened samples."""

    async def annotate(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """Return the same samples, in order, with more annotations."""


class Credit(Protocol):
    """Turns scores into advantages, over all groups of one update."""

    def credit(self, groups: Sequence[Group], samples: Sequence[Sequence[Sample]]) -> Sequence[Sequence[Sample]]:
        """Set advantages and weights, and return the rows by group.

        Args:
            samples: rows of each group, one per branch.

        Returns:
            Credited rows of each group; empty for a group that leaves the update, such as one of equal rewards.
        """

    def denominator(self, rows: Iterable[Sample]) -> float | None:
        """Return the denominator of the policy term over these rows of an update; None is the sum of their weights."""

    def state(self) -> Mapping[str, Any]:
        """Return the state from earlier updates."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the `state` of an interrupted run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Divergence:
    """Divergence of the model's distribution q from a teacher's p.

    Attributes:
        kind: `reverse` is KL(q || p), `forward` KL(p || q), `jensen_shannon` beta KL(p || m) + (1 - beta) KL(q || m)
            with m = beta p + (1 - beta) q.
        over: `top_k` is over the teacher's likeliest tokens (`Sample.tops`), with all others merged into one;
            `vocabulary` over all tokens, with the teacher (`Sample.teacher`) computed in the trainer.
    """

    kind: Literal["reverse", "forward", "jensen_shannon"] = "reverse"
    over: Literal["top_k", "vocabulary"] = "vocabulary"
    beta: float = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """Inputs that a loss needs. No micro-batch splits a token, a turn or a pair.

    Attributes:
        quantities: names of per-token quantities.
        unit: unit whose tokens must be in one micro-batch. A `sequence` is a trajectory, whose rows may be in several
            micro-batches: a loss with this unit has a `survey` for trajectories with several rows.
        survey: True if the loss has a method `survey(quantities, micro_batch)`, which gets all tokens of the step at
            once and returns annotations, name -> [M]. It costs a first pass without gradients.
        idle_tokens: True if policy tokens with an advantage of 0 have to be computed.
    """

    quantities: frozenset[str] = frozenset({"logprob"})
    unit: str = "token"
    survey: bool = False
    idle_tokens: bool = False
    divergence: Divergence | None = None


@dataclass(kw_only=True, slots=True)
class LossResult:
    """Result of a loss on one micro-batch.

    Attributes:
        loss: scalar with gradient, already divided by the global denominators.
        metrics: (sum, count) by name; both are added up over micro-batches.
    """

    loss: torch.Tensor
    metrics: dict[str, tuple[float, float]]


class Loss(Protocol):
    """Loss of one term."""

    term: str
    needs: Needs

    def __call__(self, quantities: Mapping[str, torch.Tensor], micro_batch: Any) -> LossResult:
        """Compute the term. `quantities` maps each needed name to the values [M] of the micro-batch's weighted
        tokens."""


class SurveyingLoss(Loss, Protocol):
    """Loss with a first pass over all tokens of an optimiser step (`Needs.survey`)."""

    def survey(self, quantities: Mapping[str, torch.Tensor], micro_batch: Any) -> Mapping[Annotation, torch.Tensor]:
        """Return annotations [M], without gradients. Takes the arguments of the loss, for the whole step."""


class Trainer(Protocol):
    """Trainer of one model. It knows loss terms, not algorithms."""

    @property
    def version(self) -> int:
        """Number of updates that its weights have received."""

    async def forward(self, rows: Sequence[Sample], needs: Set[str]) -> Sequence[Mapping[str, tuple[float, ...]]]:
        """Compute quantities, without gradients, of the tokens that have a weight in some loss term: for each row one
        value per token."""

    async def score(self, teacher: str, request: ScoreRequest) -> Scores:
        """Score given tokens under one of the trainer's teachers, as an engine would."""

    async def forward_backward(self, batch: Batch) -> Mapping[str, float]:
        """Compute the losses of a batch, add up their gradients and return metrics."""

    async def step(self, *, ends_update: bool = True) -> StepResult:
        """Apply the gradients; called once per batch. `ends_update` increments the version."""

    async def push(self) -> WeightRef:
        """Publish a copy of the weights."""

    async def save(self, path: str, *, stage: str, metrics: Mapping[str, float]) -> CheckpointRef:
        """Write a checkpoint that suffices for a bitwise resume."""

    async def restore(self, ref: CheckpointRef) -> None:
        """Restore a checkpoint."""
