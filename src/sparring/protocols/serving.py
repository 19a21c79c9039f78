"""Protocols of what holds a run: engine, store and cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from sparring.generation import Completion, Delta, GenerateRequest, ScoreRequest, Scores
from sparring.log import LogEntry, LogKind
from sparring.protocols.training import Loss, Trainer, ValueModel
from sparring.types import CheckpointRef, Group, Rollout, Segment, WeightRef


@runtime_checkable
class Engine(Protocol):
    """Serves one model: token ids in, token ids out. Cancelling the awaiting task drops its request."""

    @property
    def version(self) -> int:
        """The weight version that is served."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Counts since the start and levels of now; empty where the engine reports none."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample a completion."""

    def stream(self, request: GenerateRequest) -> AsyncIterator[Delta | Completion]:
        """Sample in pieces: deltas while tokens are made, then the `Completion`. Leaving the iterator drops the
        request."""

    async def abort(self, request: str) -> None:
        """End a request with what was sampled so far (finish reason "abort"). A request for its tokens followed by
        those, with the same seed, continues it."""

    async def score(self, request: ScoreRequest) -> Scores:
        """Score given tokens instead of sampling new ones."""

    async def fork(self, request: str, seeds: Mapping[str, int]) -> tuple[GenerateRequest, ...]:
        """Return requests, one per name in `seeds`, that continue a running one from where it is. Its KV is kept for
        them until their conversations are released."""

    async def release(self, conversation: str) -> None:
        """Give up the KV that is kept for a conversation."""

    async def pull(self, ref: WeightRef) -> None:
        """Serve published weights (law 9). Raises `WeightsError` and serves the old ones where they fail."""

    async def close(self) -> None:
        """Fail what is under way and end."""


class Store(Protocol):
    """Durable record of a run. Every method is atomic: after a crash it happened or it did not."""

    def append_turns(self, turns: Sequence[tuple[str, Sequence[Segment]]], entries: Sequence[LogEntry] = ()) -> None:
        """Record turns, each with the id of its trajectory, while their rollouts go on, and entries of the log."""

    def turns(self, rollout: str) -> list[Segment]:
        """Return the recorded segments of a trajectory whose group has not been appended."""

    def trajectories(self, rollout: str) -> list[str]:
        """Return the ids of trajectories that have turns: a rollout's own, and those that begin with it and a slash."""

    def record(self, *entries: LogEntry) -> None:
        """Record entries of the log, in this order."""

    def entries(
        self, stage: str, *, after: int = 0, kinds: Collection[LogKind] | None = None, name: str | None = None
    ) -> Iterator[tuple[int, LogEntry]]:
        """Yield the entries of a stage, in the order they were recorded, each with its row: those behind row `after`,
        of these kinds and about this id."""

    def append(self, *groups: Group, stage: str) -> None:
        """Record scored groups."""

    def forget(self, rollout: str) -> int:
        """Drop the turns and entries of an unfinished rollout, which starts over; return how many there were."""

    def groups(self, *, stage: str | None = None, first: int = 0, end: int | None = None) -> Iterable[Group]:
        """Yield the recorded groups in admission order: of all stages, or of one those from `first` to before `end`."""

    def load(self, rollout: str) -> Rollout:
        """Return a recorded rollout. Raises `BadInput` where there is none."""

    def metric(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of a step."""

    def metrics(self, stage: str, *, after: int = -1) -> list[tuple[int, dict[str, float]]]:
        """Return the recorded metrics of a stage, by step, those above `after`."""

    def put(self, key: str, value: Any) -> None:
        """Record plain data under a key, in the place of what was there."""

    def get(self, key: str) -> Any | None:
        """Return what is recorded under a key, or None."""

    def checkpoint(self, ref: CheckpointRef, state: Mapping[str, Any]) -> None:
        """Record that a checkpoint is complete, and the state that a resume needs beside it."""

    def last_checkpoint(self, stage: str) -> tuple[CheckpointRef, Mapping[str, Any]] | None:
        """Return the newest checkpoint of a stage and its state, or None."""

    def checkpoints(self, stage: str) -> Sequence[CheckpointRef]:
        """Return all checkpoints of a stage, oldest first."""

    def retire(self, stage: str, steps: Collection[int]) -> None:
        """Stop counting checkpoints of a stage whose folders were deleted."""

    def truncate(self, stage: str, step: int, *, first_group: int | None = None) -> None:
        """Forget the metrics and checkpoints of a stage after `step`; its groups from `first_group` on, with the turns
        and the log of them and of later steps, if that is given."""

    def supersede(self, stage: str, number: int) -> None:
        """Stop counting a group that is rolled out again; it stays in the record."""

    def close(self) -> None:
        """Write what is waiting, and close the files."""


class Cluster(Protocol):
    """Placement of the parts of a run in processes. A stage asks for parts and never builds them.

    `path` is a Hugging Face checkpoint folder. A trainer and an engine of one name start from equal weights at version
    0 and never share storage (law 9).
    """

    def trainer(self, name: str, *, path: str, plan: TrainPlan) -> Trainer:
        """Open a trainer of model `name`."""

    def engine(self, name: str, *, path: str) -> Engine:
        """Open an engine of model `name`."""

    def value_model(self, name: str, *, path: str) -> ValueModel:
        """Open a model with a scalar head, in the numerics of model `name`; one, however often it is asked for."""

    async def close(self) -> None:
        """End every part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainPlan:
    """Plan of a stage for its trainer: its loss terms, how many steps the schedule spans, the keys of `[train]` that
    this stage replaces, and the head it trains (as `model.load` has it). `teachers`, the checkpoint folders of models
    by name, are computed beside it, without gradients; None is where what is trained begins, and a name that is no
    model of the recipe has the settings of that one. `averages` says with which decay some of these follow what is
    trained (see `train.average`). `role` names its batches and checkpoints where the model's name does not."""

    losses: Sequence[Loss]
    total_steps: int
    overrides: Mapping[str, Any]
    head: str = "tokens"
    teachers: Mapping[str, str | None] = field(default_factory=dict)
    averages: Mapping[str, float] = field(default_factory=dict)
    role: str = ""
