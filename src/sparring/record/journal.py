"""Journal of a rollout, as its sessions see it: a source of recorded replies, and a log for new turns."""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from sparring.generation import Completion, Runs, Sampling
from sparring.log import LogEntry
from sparring.record.identity import DIGEST_BYTES
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
        this reply."""
        segment = self.segment
        assert segment.finish_reason is not None
        return Completion(
            tokens=segment.tokens,
            logprobs=segment.logprobs or (),
            finish_reason=segment.finish_reason,
            versions=segment.versions or Runs(),
            kv_versions=segment.kv_versions or Runs(),
            kept=segment.kept,
        )


class RecordedTurns:
    """Recorded turns of one role. When a rollout is rebuilt, each turn gets its recorded place (segment number).

    Args:
        segments: segments of the role, in the form of a trajectory.

    Attributes:
        inputs: place of the parent, ids, and own place of each input segment.
        replies: recorded replies that were not given yet, in order.
        is_line: whether each segment follows the previous segment, so that no two requests ran at once.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        places = [segment.index if segment.place is None else segment.place for segment in segments]
        self.places = frozenset(places)
        self.inputs = [
            (None if segment.parent is None else places[segment.parent], tuple(segment.tokens), place)
            for segment, place in zip(segments, places, strict=True)
            if segment.sampling is None
        ]
        self.replies = deque(_replies(segments))
        self.is_line = all(s.place is None and s.parent == (i - 1 if i else None) for i, s in enumerate(segments))
        self._by_prompt = {(r.prompt, r.sampling.seed): places[r.segment.index] for r in self.replies}

    def place_of(self, prompt: bytes, seed: int) -> int | None:
        """Return the place of the recorded reply to a prompt with a seed; None if no such reply is recorded. `prompt`:
        digest of the prompt's ids."""
        return self._by_prompt.get((prompt, seed))


def _replies(segments: Sequence[Segment]) -> Iterator[RecordedReply]:
    """Yield the sampled segments with the digests of their prompts."""
    hashes: list[hashlib.blake2b] = []
    for segment in segments:
        parent = None if segment.parent is None else hashes[segment.parent]
        if segment.sampling is not None and parent is not None:
            yield RecordedReply(prompt=parent.digest(), segment=segment)
        ids = hashlib.blake2b(digest_size=DIGEST_BYTES) if parent is None else parent.copy()
        ids.update(array("q", segment.tokens).tobytes())
        hashes.append(ids)


class SessionJournal(Protocol):
    """Journal of the rollout that a session belongs to, as `rollout.journal.Playback` implements it."""

    @property
    def closed(self) -> bool:
        """Whether the attempt has ended, so that nothing more belongs to its record."""
        ...

    def turns(self, role: str) -> RecordedTurns:
        """Return the recorded turns of a role."""
        ...

    async def reply(self, role: str, prompt: bytes, sampling: Sampling) -> RecordedReply | None:
        """Return the recorded reply to a request, in the recorded order; None if the engine must answer.

        Args:
            prompt: digest of the prompt's ids.

        Raises:
            NotRebuildable: the rollout differs from its journal.
        """
        ...

    def sampled(self, role: str, segments: Sequence[Segment]) -> None:
        """Append the segments of a new turn, or later versions of segments. Segments are numbered by their places."""
        ...

    def unwritten(self) -> list[LogEntry]:
        """Return log entries to write with the next turn, each once."""
        ...
