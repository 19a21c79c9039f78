"""Rows to train, their batches, and references to weights and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from sparring.annotations import DECLARED, Annotation
from sparring.generation import KeptSets, TopRows
from sparring.types.record import ForkReason, Source


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One branch made ready for training. All per-token fields are aligned with `tokens`.

    Worked example: prompt `P0 P1`, first sampled turn `A0 A1`, a tool's answer `T0`, second sampled turn `B0`:

        tokens       P0    P1    A0    A1    T0    B0
        policy       0     0     1     1     0     1       weight in the policy term (`weights["policy"]`)
        logprobs     0.    0.   -0.3  -1.2   0.   -0.7     recorded by the engine; 0. for other tokens
        advantages   0.    0.    0.5   0.5   0.    0.5
        versions     -1    -1    7     7     -1    7       -1 for other tokens
        kv_versions  -1    -1    7     7     -1    7

    The model's log-probability of tokens[t] is computed at position t - 1, so tokens[0] never has a weight.

    Attributes:
        id: `<trajectory id>#<branch>`, or a name of its own.
        group: name of the group of rows.
        weights: weight of each token by loss term (policy, imitate, ...); an absent term does not train the row.
        kv_versions: oldest weight versions of the KV cache that the tokens attended to.
        kept: kept sets; empty for tokens without truncated sampling. None if all are empty.
        bias: (id, value) pairs added to the logits before each token was drawn, minus infinity for banned ids. None if
            all are empty.
        annotations: values at each token, by name.
        label: side in the preference term: 1 chosen or wanted, -1 rejected or unwanted, 0 for a row that enters only a
            batch statistic and is never trained. The chosen and rejected rows of one `group` are a pair.
        teacher: name of the model that the distill term, or a KL penalty, compares with.
        tops: the teacher's likeliest tokens at each token, if not its whole distribution is compared.
        fork: reason why the row's conversation left an earlier one, or None. With "template", replies before the first
            trained one are encoded from their text.
    """

    id: str
    group: str
    source: Source
    tokens: tuple[int, ...]
    weights: Mapping[str, tuple[float, ...]]
    logprobs: tuple[float, ...] | None = None
    advantages: tuple[float, ...] | None = None
    versions: tuple[int, ...] | None = None
    kv_versions: tuple[int, ...] | None = None
    temperature: float = 1.0
    kept: KeptSets | None = None
    bias: tuple[tuple[tuple[int, float], ...], ...] | None = None
    annotations: Mapping[Annotation, tuple[float, ...]] = field(default_factory=dict)
    label: float | None = None
    teacher: str | None = None
    tops: TopRows | None = None
    fork: ForkReason | None = None

    def __post_init__(self) -> None:
        if not self.annotations.keys() <= DECLARED:
            names = ", ".join(sorted(self.annotations.keys() - DECLARED))
            raise ValueError(f"sample {self.id}: expected annotations of sparring/annotations.py, got {names}")
        for name, values in (*self.weights.items(), *self.annotations.items()):
            if len(values) != len(self.tokens):
                raise ValueError(f"sample {self.id}: {name} has {len(values)} values for {len(self.tokens)} tokens")
        for what, rows in (("kept sets", self.kept), ("rows of a teacher", self.tops), ("biases", self.bias)):
            if rows is not None and len(rows) != len(self.tokens):
                raise ValueError(f"sample {self.id}: {len(rows)} {what} for {len(self.tokens)} tokens")
        if any(values and values[0] for values in self.weights.values()):
            raise ValueError(f"sample {self.id}: the first token has no prediction and cannot carry weight")

    def annotated(self, name: Annotation, values: tuple[float, ...]) -> Sample:
        """Return the row with an annotation added or replaced, one value per token [T]."""
        return replace(self, annotations={**self.annotations, name: values})

    @property
    def trajectory(self) -> str:
        """Id of the trajectory that the row was flattened from, with `id` being `<trajectory id>#<branch>`; the row's
        own id if it has no trajectory."""
        return self.id.rpartition("#")[0] or self.id

    @property
    def branch(self) -> int:
        """Index of the branch in its trajectory."""
        return int(self.id.rpartition("#")[2])


PAIR_SHARE = 0.5
"""Weight of each side of a pair, so that a pair weighs 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenAccount:
    """Account of every sampled token of an update (law 7): sampled = trained + filtered + zero_advantage + failed +
    auxiliary + lost + dropped."""

    sampled: int = 0
    trained: int = 0
    filtered: int = 0  # in groups that a filter dropped
    zero_advantage: int = 0  # with an advantage of exactly 0
    failed: int = 0  # in rollouts that left the group
    auxiliary: int = 0  # in auxiliary replies, such as titles
    lost: int = 0  # in replies that their client did not receive
    dropped: int = 0  # in updates with a non-finite gradient

    def __add__(self, other: TokenAccount) -> TokenAccount:
        return TokenAccount(
            **{each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)}
        )

    @property
    def balanced(self) -> bool:
        """True if every sampled token is counted exactly once."""
        used = self.trained + self.filtered + self.zero_advantage + self.failed
        return self.sampled == used + self.auxiliary + self.lost + self.dropped

    def untrained(self) -> TokenAccount:
        """Return the account of this update if its optimiser steps changed no weight: trained tokens count as
        dropped."""
        return replace(self, trained=0, dropped=self.dropped + self.trained)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Rows of one optimiser step and the name of the model that they train.

    Attributes:
        step: number of the update.
        publish: True if the engine gets the weights after this step.
        ends_update: True for the last optimiser step of an update.
        account: account of the update's sampled tokens, on its last batch.
        groups: ids of the update's groups, on its last batch.
    """

    step: int
    model: str
    rows: tuple[Sample, ...]
    denominators: Mapping[str, float]
    publish: bool = True
    ends_update: bool = True
    account: TokenAccount = TokenAccount()
    groups: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """Result of an optimiser step: the version, and metrics (gradient norm, learning rate, ...)."""

    version: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightRef:
    """Reference to published weights.

    Attributes:
        checksum: checksum that the fetched tensors must have.
        transport: name of the transport, such as `inline`.
        location: the transport's own data: an object in this process, or the position of a file.
        probe: tokens and log-probabilities that the receiver must reproduce before it serves the weights (law 9).
        adapter: name of the adapter that the weights belong to; None for the whole model.
        digests: digests of single tensors by name, if the publisher computed them.
    """

    model: str
    version: int
    checksum: str
    transport: str
    location: Any
    probe: tuple[tuple[int, ...], tuple[float, ...]] | None = None
    adapter: str | None = None
    digests: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRef:
    """Reference to a complete checkpoint folder, and the step after which it was written."""

    model: str
    stage: str
    step: int
    path: str
    metrics: Mapping[str, float] = field(default_factory=dict)
