"""Recorded replies, given again to the conversations of a rollout that is rebuilt, in the place of an engine's."""

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
        """Return what the engine answered. No prompt token counts as cached: no engine was asked."""
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
    """Places of the segments of one role's record: the turns that come again take them again.

    Args:
        segments: of a role, in the order of the record.

    Attributes:
        inputs: of each input its parent's place, its ids and its own place.
        all: of all segments.
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
        """Return the place of the reply to a prompt, by its digest, that was drawn with a seed; None where there is
        none."""
        return self._replies.get((prompt, seed))


class RecordedReplies:
    """The recorded replies of one rollout, each given once, to the request that it answered.

    A request is the recorded one if its prompt has the same ids and its sampling is the same; the seed tells requests
    with the same prompt apart. Each role's replies are given in the order in which they were recorded, so the record
    that is made from them is the same, with several requests at once too. A request that the record does not have is
    answered by the engine, once every recorded reply was given.

    Args:
        segments: the recorded segments by role, in the order of the record.

    Attributes:
        difference: what the rollout did otherwise than its record; None as long as it did the same.
        entries: of the log, about what the world answered since the last turn; they are written with the next one.
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
        """Replies that have not been given yet."""
        return sum(map(len, self._left.values()))

    def places(self, role: str) -> RecordedPlaces:
        """Return the places of a role's segments in the record."""
        return RecordedPlaces(self._segments.get(role, ()))

    async def take(self, role: str, prompt: bytes, sampling: Sampling) -> RecordedReply | None:
        """Return the reply that answered a request, when it is its turn; None where the engine must answer.

        Args:
            role: whose conversation asks.
            prompt: the digest of the prompt's ids.
            sampling: of the request. The tokens that it may have are those of the record, because they hang on what
                else was under way.

        Raises:
            NotRebuildable: the rollout does something else than its record, now or in another of its requests.
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
        """Note what the rollout did otherwise than its record, and end every request that waits.

        Raises:
            NotRebuildable: always.
        """
        self.difference = self.difference or difference
        self.progress()
        self.check()

    def check(self) -> None:
        """Raise NotRebuildable if the rollout did something else than its record."""
        if self.difference is not None:
            raise NotRebuildable(f"rebuild: {self.difference}")

    def take_entries(self) -> list[LogEntry]:
        """Return the entries of the log that are to be written, once."""
        entries, self.entries = self.entries, []
        return entries

    def progress(self) -> None:
        """Let waiting requests look again: something went on."""
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
        """Wait for progress of other requests, or note that there is none."""
        try:
            self._progress = self._progress or asyncio.Event()
            await asyncio.wait_for(self._progress.wait(), PATIENCE_S)
        except TimeoutError:
            waited = f"nothing else went on for {PATIENCE_S:.0f} s"
            self.differ(f"{role}: a request is not in the record, {waited}, {self._left_of(role)}")

    def _left_of(self, role: str) -> str:
        """Return how many of a role's replies were not given yet, in words."""
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
    """Return whether each segment follows the one before, without a gap. Such a conversation never had two requests at
    once."""
    return all(
        segment.place is None and segment.parent == (index - 1 if index else None)
        for index, segment in enumerate(segments)
    )


def _finish_reason(segment: Segment) -> FinishReason:
    """Return how a reply ended whose record does not say so: cut at its limit, unless with a stop token."""
    assert segment.sampling is not None
    cut = len(segment.tokens) >= segment.sampling.max_tokens and segment.tokens[-1] not in segment.sampling.stop
    return "length" if cut else "stop"
