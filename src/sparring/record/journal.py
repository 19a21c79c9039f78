"""Journal of a rollout as a session sees it: recorded replies to give again, and where new turns are written."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from sparring.generation import Completion, FinishReason, Runs, Sampling
from sparring.log import LogEntry
from sparring.types import Segment


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedReply:
    """Recorded reply of a model: the digest of the ids of its prompt, and its segment."""

    prompt: bytes
    segment: Segment

    @property
    def sampling(self) -> Sampling:
        """Settings that the reply was sampled with."""
        assert self.segment.sampling is not None
        return self.segment.sampling

    def completion(self) -> Completion:
        """Return what the engine answered. No token of the prompt counts as cached, since no engine was asked."""
        segment = self.segment
        return Completion(
            tokens=segment.tokens,
            logprobs=segment.logprobs or (),
            finish_reason=segment.finish_reason or self._finish_reason,
            versions=segment.versions or Runs(),
            kv_versions=segment.kv_versions or Runs(),
            kept=segment.kept,
        )

    @property
    def _finish_reason(self) -> FinishReason:
        """Reason why sampling ended, for a record without it: the maximum length, unless a stop token came last."""
        tokens, sampling = self.segment.tokens, self.sampling
        return "length" if len(tokens) >= sampling.max_tokens and tokens[-1] not in sampling.stop else "stop"


class RecordedTurns(Protocol):
    """Recorded turns of one role. A turn that comes again gets the place that it had."""

    @property
    def inputs(self) -> Sequence[tuple[int | None, tuple[int, ...], int]]:
        """For each input its parent's place, its ids and its own place."""

    @property
    def places(self) -> Set[int]:
        """Places of all segments."""

    def place_of(self, prompt: bytes, seed: int) -> int | None:
        """Return the place of the reply to a prompt, by its digest, that was drawn with a seed; None if it is new."""
        ...


class SessionJournal(Protocol):
    """Journal of the rollout that a session is part of: `rollout.journal.Playback`."""

    def turns(self, role: str) -> RecordedTurns:
        """Return the recorded turns of a role."""
        ...

    async def reply(self, role: str, prompt: bytes, sampling: Sampling) -> RecordedReply | None:
        """Return the recorded reply to a request once its turn comes; None if the engine must answer.

        Args:
            role: role that asks.
            prompt: digest of the prompt's ids.
            sampling: settings of the request.

        Raises:
            NotRebuildable: the rollout differs from its record.
        """
        ...

    def sampled(self, role: str, segments: Sequence[Segment]) -> None:
        """Append the segments of a new turn, numbered by their places, or later versions of segments."""
        ...

    def unwritten(self) -> list[LogEntry]:
        """Return entries of the log that are to be written with the next turn. Each is returned once."""
        ...
