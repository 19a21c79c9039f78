"""Protocols of the parts that a run holds: engine, store and cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from sparring.generation import Completion, Delta, GenerateRequest, ScoreRequest, Scores
from sparring.log import LogEntry, LogKind
from sparring.protocols.training import Loss, Trainer, ValueModel
from sparring.types import CheckpointRef, Group, Rollout, Segment, WeightRef


@runtime_checkable
class Engine(Protocol):
    """Inference engine of one model: token ids in, token ids out. Cancelling the awaiting task drops its request."""

    @property
    def version(self) -> int:
        """Weight version that is served."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """Counters since the start and current levels; empty if the engine reports none."""

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample a completion. Cancelling the awaiting task drops the request; `abort` ends it with the tokens sampled
        so far.

        Raises:
            RequestRefused: the request can never be served.
            EngineError: the engine failed, is unreachable or was closed.
        """

    def stream(self, request: GenerateRequest) -> AsyncIterator[Delta | Completion]:
        """Sample in pieces: deltas as tokens are sampled, then the `Completion`. Closing the iterator drops the
        request.

        Raises:
            EngineError: as for `generate`, at the first piece or after the tokens sampled until then.
        """

    async def abort(self, request: str) -> None:
        """End all requests of this id with the tokens sampled so far (finish reason "abort"); unknown ones are ignored.
        A new request for the prompt followed by these tokens, with the same seed, continues such a request."""

    async def score(self, request: ScoreRequest) -> Scores:
        """Compute scores of given tokens. Raises as `generate` does."""

    async def release(self, conversation: str) -> None:
        """Free the KV cache that is kept for a conversation."""

    async def pull(self, ref: WeightRef) -> None:
        """Load and serve published weights (law 9).

        Raises:
            WeightsError: they could not be fetched or verified; the old weights are still served.
        """

    async def sleep(self) -> None:
        """Give the memory of weights and cache back to the system. Requests, running and new ones, wait until `wake`;
        none is lost. No effect while asleep.

        Raises:
            EngineError: the engine cannot sleep, failed, is unreachable or was closed.
        """

    async def wake(self, ref: WeightRef) -> None:
        """Take published weights, as `pull` does, and serve requests again: the version that was served before, or a
        newer one. Requests compute their keys and values again. While awake it is `pull`; while asleep `pull` is
        refused.

        Raises:
            WeightsError: they could not be fetched or verified; the engine stays asleep.
            EngineError: the engine cannot sleep, failed, is unreachable or was closed.
        """

    async def close(self) -> None:
        """Fail pending requests and shut down. Safe to call twice."""


class Store(Protocol):
    """Durable record of a run. Every method is atomic: after a crash it has happened completely or not at all."""

    def append_turns(self, turns: Sequence[tuple[str, Sequence[Segment]]], entries: Sequence[LogEntry] = ()) -> None:
        """Record turns of running rollouts, each with the id of its trajectory, and entries of the log."""

    def turns(self, rollout: str) -> list[Segment]:
        """Return the recorded segments of a trajectory whose group has not been appended yet."""

    def trajectories(self, rollout: str) -> list[str]:
        """Return the ids of a rollout's trajectories with recorded turns: its own id, and ids that begin with it and a
        slash."""

    def record(self, *entries: LogEntry) -> None:
        """Record entries of the log, in order."""

    def entries(
        self, stage: str, *, after: int = 0, kinds: Collection[LogKind] | None = None, name: str | None = None
    ) -> Iterator[tuple[int, LogEntry]]:
        """Yield the log entries of a stage with their row numbers, in the order of recording.

        Args:
            after: row number after which to begin.
            name: id that the entries are about; None is any.
        """

    def append(self, *groups: Group, stage: str) -> None:
        """Record scored groups."""

    def forget(self, rollout: str) -> int:
        """Delete the turns and entries of an unfinished rollout that starts over, and return their number."""

    def groups(self, *, stage: str, first: int = 0, end: int | None = None) -> Iterable[Group]:
        """Yield the recorded groups of a stage in admission order, from index `first` up to, but not including,
        `end`."""

    def load(self, rollout: str) -> Rollout:
        """Return a recorded rollout.

        Raises:
            BadInput: the rollout is not recorded.
        """

    def metric(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of a step."""

    def metrics(self, stage: str, *, after: int = -1) -> list[tuple[int, dict[str, float]]]:
        """Return the recorded metrics of a stage by step, for steps above `after`."""

    def events(self) -> Sequence[Mapping[str, Any]]:
        """Return every event in order: `time` in seconds since the epoch, `stage`, `event`, its text, and its facts."""

    def put(self, key: str, value: Any) -> None:
        """Record plain data under a key, replacing earlier data."""

    def get(self, key: str) -> Any | None:
        """Return the data under a key, or None."""

    def checkpoint(self, ref: CheckpointRef, state: Mapping[str, Any]) -> None:
        """Record that a checkpoint is complete, with further state that a resume needs."""

    def last_checkpoint(self, stage: str) -> tuple[CheckpointRef, Mapping[str, Any]] | None:
        """Return the newest checkpoint of a stage with its state, or None."""

    def checkpoints(self, stage: str) -> Sequence[CheckpointRef]:
        """Return all checkpoints of a stage, oldest first."""

    def retire(self, stage: str, steps: Collection[int]) -> None:
        """Forget checkpoints of a stage whose folders were deleted."""

    def truncate(self, stage: str, step: int, *, first_group: int | None = None) -> None:
        """Discard a stage's metrics and checkpoints after `step`. With `first_group`, also discard its groups from this
        index on, with their turns and log entries, and the log of later steps."""

    def supersede(self, stage: str, number: int) -> None:
        """Exclude a group that is sampled again; it stays in the record."""

    def close(self) -> None:
        """Write pending data and close the files."""


class Cluster(Protocol):
    """Placement of the parts of a run in processes. Stages get their parts from it and never construct them.

    `path` is a Hugging Face checkpoint folder. A trainer and an engine of one name start from equal weights at version
    0 and never share storage (law 9).
    """

    def trainer(self, name: str, *, path: str, plan: TrainPlan) -> Trainer:
        """Start a trainer of model `name`."""

    def engine(self, name: str, *, path: str) -> Engine:
        """Start an engine of model `name`."""

    def value_model(self, name: str, *, path: str) -> ValueModel:
        """Load a model with a scalar head, in the numerics of model `name`; repeated calls return the same model."""

    def check(self) -> list[str]:
        """Return sentences for the user about the processes of the run, before any is started.

        Raises:
            BadInput: the processes cannot be placed.
        """

    def stage(self, name: str) -> AbstractAsyncContextManager[None]:
        """Return the context of a stage, whose name its parts' events get. At the end its parts are closed, but engine
        processes stay for the next stage.

        Raises:
            EngineError: an engine process dies again and again; raised inside the context, which is cancelled.
        """

    async def close(self) -> None:
        """Shut down all parts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainPlan:
    """A stage's settings for its trainer.

    Attributes:
        total_steps: number of optimiser steps in the learning rate's schedule.
        overrides: keys of `[train]` that the stage replaces.
        head: head to train, as in `model.load`.
        teachers: checkpoint folders of models that are computed without gradients, by name. None is the trained model's
            initial folder; a name that is no model of the recipe has the trained model's settings.
        averages: decay of each teacher that is a moving average of the trained model (see `train.average`), by name.
        name: name on batches and checkpoints, if it differs from the model's.
    """

    losses: Sequence[Loss]
    total_steps: int
    overrides: Mapping[str, Any]
    head: str = "tokens"
    teachers: Mapping[str, str | None] = field(default_factory=dict)
    averages: Mapping[str, float] = field(default_factory=dict)
    name: str = ""
