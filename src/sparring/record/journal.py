"""Journal of a rollout, as its sessions see it: gives recorded replies and takes new turns."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from sparring.generation import Completion, FinishReason, Runs, Sampling
from sparring.log import LogEntry
from sparring.types import Segment


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedReply:
    """Recorded reply of a model: its segment, and the digest of its prompt's ids."""

    prompt: bytes
    segment: Segment

    @property
    def sampling(self) -> Sampling:
        """Sampling settings of the reply."""
        assert self.segment.sampling is not None
        return self.segment.sampling

    def completion(self) -> Completion:
        """Return the reply as the engine's completion. No prompt token counts as cached, because no engine computed
        it."""
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
        """Finish reason of a record that lacks it: "length" at the maximum number of tokens without a final stop token,
        else "stop"."""
        tokens, sampling = self.segment.tokens, self.sampling
        return "length" if len(tokens) >= sampling.max_tokens and tokens[-1] not in sampling.stop else "stop"


class RecordedTurns(Protocol):
    """Recorded turns of one role. In a rebuild, a turn gets its recorded place."""

    @property
    def inputs(self) -> Sequence[tuple[int | None, tuple[int, ...], int]]:
        """Place of the parent, ids and own place of each input."""

    @property
    def places(self) -> Set[int]:
        """Places of all segments."""

    def place_of(self, prompt: bytes, seed: int) -> int | None:
        """Return the place of the recorded reply to a prompt with a seed; None if it is new. The prompt is given by its
        digest."""
        ...


class SessionJournal(Protocol):
    """Journal of the rollout that a session belongs to, as `rollout.journal.Playback` implements it."""

    def turns(self, role: str) -> RecordedTurns:
        """Return the recorded turns of a role."""
        ...

    async def reply(self, role: str, prompt: bytes, sampling: Sampling) -> RecordedReply | None:
        """Return the recorded reply to a request, in the recorded order; None if the engine must answer.

        Args:
            role: role of the request.
            prompt: digest of the prompt's ids.
            sampling: sampling settings of the request.

        Raises:
            NotRebuildable: the rollout differs from its journal.
        """
        ...

    def sampled(self, role: str, segments: Sequence[Segment]) -> None:
        """Append the segments of a new turn, or later versions of segments. They are numbered by their places."""
        ...

    def unwritten(self) -> list[LogEntry]:
        """Return log entries to write with the next turn, each once."""
        ...
