"""Rows that are trained, the batches that they form, and the weights that come of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sparring.annotations import DECLARED
from sparring.generation import KeptSets, TopRows
from sparring.types.record import ForkReason, Source


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One branch made ready for training. All per-token fields are aligned with `tokens`.

    Worked example: prompt `P0 P1`, first sampled turn `A0 A1`, a tool's answer `T0`, second sampled turn `B0`:

        tokens       P0    P1    A0    A1    T0    B0
        policy       0     0     1     1     0     1       weight in the policy term (`weights["policy"]`)
        logprobs     0.    0.   -0.3  -1.2   0.   -0.7     recorded when sampled; 0. where nothing was sampled
        advantages   0.    0.    0.5   0.5   0.    0.5
        versions     -1    -1    7     7     -1    7       -1 where nothing was sampled
        kv_versions  -1    -1    7     7     -1    7

    The model's log-probability of tokens[t] is computed at position t - 1, so tokens[0] never carries weight.
    `weights` maps a loss term (policy, imitate, ...) to its per-token weights; a term that is absent touches nothing.
    `kept` has an empty row where nothing was sampled or nothing truncated; it is None where that is so everywhere.
    `bias` is likewise, per token, what was added to logits before it was drawn: (id, value), minus infinity for what
    was impossible.

    `label` is what the preference term is told of the row: 1 chosen or wanted, -1 rejected or unwanted; 0: judged for a
    batch statistic alone, never trained. The chosen and the rejected rows of one `group` are a pair. `teacher` names
    the model that the distill term, or a penalty for leaving a reference, compares with; `tops` is what that one finds
    likeliest in the place of each token, where no more of its distribution is asked for. `fork` says why the row's
    conversation left another that was recorded before; None where it did not. In a row with `template` the chat
    template had no bridge over what was said: replies before the first trained one are encoded from their text.
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
    annotations: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
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
        if self.kept is not None and len(self.kept) != len(self.tokens):
            raise ValueError(f"sample {self.id}: {len(self.kept)} kept sets for {len(self.tokens)} tokens")
        if self.tops is not None and len(self.tops) != len(self.tokens):
            raise ValueError(f"sample {self.id}: {len(self.tops)} rows of a teacher for {len(self.tokens)} tokens")
        if self.bias is not None and len(self.bias) != len(self.tokens):
            raise ValueError(f"sample {self.id}: {len(self.bias)} biases for {len(self.tokens)} tokens")
        if any(values and values[0] for values in self.weights.values()):
            raise ValueError(f"sample {self.id}: the first token has no prediction and cannot carry weight")

    def annotated(self, name: str, values: tuple[float, ...]) -> Sample:
        """Return the row with one more annotation, or another in its place.

        Args:
            name: a member of `annotations.Annotation`.
            values: one per token [T].

        Raises:
            ValueError: the name is not declared, or the row has another number of tokens.
        """
        return replace(self, annotations={**self.annotations, name: values})

    @property
    def trajectory(self) -> str:
        """The id of the trajectory that it was flattened from: its own is `<trajectory id>#<branch>`. Its own id where
        it is of none."""
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
    filtered: int = 0  # its group had no variance
    zero_advantage: int = 0  # its own advantage was exactly zero
    failed: int = 0  # its rollout left the group
    auxiliary: int = 0  # its reply was a title or a route, no turn of the agent
    lost: int = 0  # its client never got the reply
    dropped: int = 0  # its update's gradient was not finite, and trained nothing

    def __add__(self, other: TokenAccount) -> TokenAccount:
        return TokenAccount(
            sampled=self.sampled + other.sampled,
            trained=self.trained + other.trained,
            filtered=self.filtered + other.filtered,
            zero_advantage=self.zero_advantage + other.zero_advantage,
            failed=self.failed + other.failed,
            auxiliary=self.auxiliary + other.auxiliary,
            lost=self.lost + other.lost,
            dropped=self.dropped + other.dropped,
        )

    @property
    def balanced(self) -> bool:
        """True if every sampled token is counted exactly once."""
        used = self.trained + self.filtered + self.zero_advantage + self.failed
        return self.sampled == used + self.auxiliary + self.lost + self.dropped

    def untrained(self) -> TokenAccount:
        """Return the account of the same update where its optimiser steps changed no weight."""
        return replace(self, trained=0, dropped=self.dropped + self.trained)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """The rows of one optimiser step and the model they train. `denominators` are global, one per loss term. An update
    may take several; the last one `ends_update`, and if it says `publish`, the engine is given the weights."""

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
    """A new version with its metrics (gradient norm, learning rate, ...)."""

    version: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightRef:
    """A published version: what it is called, what it must hash to, and where it lies (`location` belongs to the
    transport: an object in this process for `inline`, a path for `disk`). `probe` are (tokens, log-probabilities) that
    the receiver must reproduce before it serves (law 9). Where they are an adapter's and not a whole model's, `adapter`
    is its name. `digests` are those of single tensors, by name, where the publisher has them."""

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
    """Checkpoint for a resume: the folder of one complete checkpoint and the step after which it was written."""

    model: str
    stage: str
    step: int
    path: str
    metrics: Mapping[str, float] = field(default_factory=dict)
