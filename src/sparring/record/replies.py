"""Recorded replies, which answer the requests of a rollout that is played again, instead of an engine."""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sparring.errors import NotRebuildable
from sparring.generation import Completion, FinishReason, Runs, Sampling
from sparring.log import LogEntry
from sparring.record.identity import DIGEST_BYTES
from sparring.types import Segment

PATIENCE_S = 60.0
"""Seconds that a request which the record does not have waits for others of its rollout that it has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedReply:
    """Recorded reply of a model: the digest of the prompt that it answers, and its segment."""

    prompt: bytes
    segment: Segment

    @property
    def sampling(self) -> Sampling:
        """The settings that it was sampled with."""
        assert self.segment.sampling is not None
        return self.segment.sampling

    def completion(self) -> Completion:
        """Return the recorded completion of the engine. Its number of cached tokens is 0, since no engine was asked."""
        segment = self.segment
        return Completion(
            tokens=segment.tokens,
            logprobs=segment.logprobs or (),
            finish_reason=segment.finish_reason or _finish_reason(segment),
            versions=segment.versions or Runs(),
            kv_versions=segment.kv_versions or Runs(),
            kept=segment.kept,
        )


class RecordedPlaces:
    """Places of the segments of one role's record, which the same turns get again.

    Args:
        segments: segments of the role, in the order of the record.

    Attributes:
        inputs: input segments, each as the place of its parent, its ids and its own place.
        all: places of all segments.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        places = [segment.index if segment.place is None else segment.place for segment in segments]
        self.all = frozenset(places)
        self.inputs = [
            (None if segment.parent is None else places[segment.parent], tuple(segment.tokens), place)
            for segment, place in zip(segments, places, strict=True)
            if segment.sampling is None
        ]
        self._replies = {
            (reply.prompt, reply.sampling.seed): places[reply.segment.index] for reply in _replies(segments)
        }

    def of(self, prompt: bytes, seed: int) -> int | None:
        """Return the place of the reply to a prompt (by digest) that was drawn with a seed, or None."""
        return self._replies.get((prompt, seed))


class RecordedReplies:
    """Recorded replies of one rollout; each answers the request that it answered before.

    A request matches if its prompt has the same ids and its sampling settings are equal; the seed distinguishes
    requests with the same prompt. Each role's replies are given in recorded order, so that the new record is equal even
    with concurrent requests. A request that the record does not have is answered by the engine, after all recorded
    replies.

    Args:
        segments: recorded segments by role, in the order of the record.

    Attributes:
        difference: first difference between the rollout and its record; None as long as they agree.
        entries: log entries about answers of the world since the last turn, which are written with the next turn.
    """

    def __init__(self, segments: Mapping[str, Sequence[Segment]] = {}) -> None:
        self._left = {role: deque(_replies(recorded)) for role, recorded in segments.items()}
        self._segments = segments
        self._in_line = len(segments) < 2 and all(map(_is_line, segments.values()))
        self._progress: asyncio.Event | None = None  # of the requests that wait
        self.difference: str | None = None
        self.entries: list[LogEntry] = []

    @property
    def num_left(self) -> int:
        """Number of replies that have not been given."""
        return sum(map(len, self._left.values()))

    def places(self, role: str) -> RecordedPlaces:
        """Return the places of a role's segments in the record."""
        return RecordedPlaces(self._segments.get(role, ()))

    async def take(self, role: str, prompt: bytes, sampling: Sampling) -> RecordedReply | None:
        """Wait for the recorded reply of a request, and return it; None if the engine must answer.

        Args:
            role: role that makes the request.
            prompt: digest of the prompt's ids.
            sampling: sampling settings of the request. The maximum of tokens is not compared, because it depends on
                concurrent requests.

        Raises:
            NotRebuildable: this request, or another of the rollout, differs from the record.
        """
        if self.num_left and not self._in_line:
            await asyncio.sleep(0)  # requests that were made at once are made at once again, before any is answered
        while self.num_left:
            self.check()
            replies = self._left.get(role)
            if replies and (replies[0].prompt, replies[0].sampling.seed) == (prompt, sampling.seed):
                return self._given(role, replies, sampling)
            if self._in_line:
                self.differ(f"{role}: a request is not the recorded one, {self._left_of(role)}")
            await self._wait(role)
        self.check()
        return None

    def differ(self, difference: str) -> None:
        """Record a difference and end all waiting requests.

        Raises:
            NotRebuildable: always.
        """
        self.difference = self.difference or difference
        self.progress()
        self.check()

    def check(self) -> None:
        """Raise NotRebuildable if the rollout differs from its record."""
        if self.difference is not None:
            raise NotRebuildable(f"rebuild: {self.difference}")

    def take_entries(self) -> list[LogEntry]:
        """Return the log entries to write, and forget them."""
        entries, self.entries = self.entries, []
        return entries

    def progress(self) -> None:
        """Wake waiting requests after a reply was given."""
        if self._progress is not None:
            self._progress.set()
            self._progress = None

    def _given(self, role: str, replies: deque[RecordedReply], sampling: Sampling) -> RecordedReply:
        reply = replies[0]
        recorded = reply.sampling
        if replace(sampling, max_tokens=recorded.max_tokens, min_tokens=recorded.min_tokens) != recorded:
            self.differ(
                f"{role}: a request has other settings of sampling than the recorded one, {self._left_of(role)}"
            )
        replies.popleft()
        self.progress()
        return reply

    async def _wait(self, role: str) -> None:
        """Wait until another request gets a reply; record a difference after `PATIENCE_S`."""
        try:
            self._progress = self._progress or asyncio.Event()
            await asyncio.wait_for(self._progress.wait(), PATIENCE_S)
        except TimeoutError:
            waited = f"nothing else went on for {PATIENCE_S:.0f} s"
            self.differ(f"{role}: a request is not in the record, {waited}, {self._left_of(role)}")

    def _left_of(self, role: str) -> str:
        """Return the number of a role's remaining replies, as text."""
        return f"with {len(self._left.get(role, ()))} recorded replies left"


def _replies(segments: Sequence[Segment]) -> list[RecordedReply]:
    """Return the sampled segments with the digests of their prompts."""
    hashes: list[hashlib.blake2b] = []
    replies = []
    for segment in segments:
        parent = None if segment.parent is None else hashes[segment.parent]
        if segment.sampling is not None and parent is not None:
            replies.append(RecordedReply(prompt=parent.digest(), segment=segment))
        ids = hashlib.blake2b(digest_size=DIGEST_BYTES) if parent is None else parent.copy()
        ids.update(array("q", segment.tokens).tobytes())
        hashes.append(ids)
    return replies


def _is_line(segments: Sequence[Segment]) -> bool:
    """Return whether each segment follows the previous one without gaps. Such a conversation never had concurrent
    requests."""
    return all(
        segment.place is None and segment.parent == (index - 1 if index else None)
        for index, segment in enumerate(segments)
    )


def _finish_reason(segment: Segment) -> FinishReason:
    """Return the finish reason of a reply whose record lacks it: `length` at its maximum of tokens, unless it ends with
    a stop token."""
    assert segment.sampling is not None
    cut = len(segment.tokens) >= segment.sampling.max_tokens and segment.tokens[-1] not in segment.sampling.stop
    return "length" if cut else "stop"
