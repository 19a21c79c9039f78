"""Plan of each step: continuous batching with chunked prefill over a limited number of pages. Torch-free.

Requests are served by rank (priority, then the admission of their rollouts, then arrival). A step has one token of
every request that generates and, within the token budget, chunks of prompts. There is no deadlock: a request is
accepted only if it fits into the cache alone, all pages of a prompt are allocated at its admission, and when generation
runs out of pages, the request of the lowest rank is preempted: its pages are freed, and it is prefilled again later.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from sparring.engine.cache.memory import PagedMemory
from sparring.engine.schedule import Replays
from sparring.engine.sequence import Sequence
from sparring.engine.weight_names import ServedWeights


class Chunk(NamedTuple):
    """Slice of a sequence computed in one step: `count` tokens from `begin`. `samples` is True if the slice ends with
    the sequence's last token, so that the next token is sampled."""

    sequence: Sequence
    begin: int
    count: int  # type: ignore[assignment]
    samples: bool


class StepScheduler:
    """Waiting and running requests, and their memory. While `draining`, only requests that run or have sampled tokens
    are served."""

    def __init__(self, memory: PagedMemory, *, max_running: int, max_batch_tokens: int) -> None:
        self.memory, self.cache, self._sharing = memory, memory.cache, memory.sharing
        self._replays = Replays()
        self._max_batch_tokens = max_batch_tokens
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._slots = list(range(max_running))[::-1]
        self.num_preempted = 0
        self.draining = False

    @property
    def busy(self) -> bool:
        """True if there are requests, and not all of them wait for newer weights."""
        return bool(self._waiting or self._running) and not self._replays.all_wait

    @property
    def load(self) -> tuple[int, int]:
        """Numbers of running and of waiting requests. Thread-safe."""
        return len(self._running), len(self._waiting)

    @property
    def has_begun(self) -> bool:
        """True while a request runs or has sampled a token."""
        return bool(self._running) or any(sequence.logprobs for sequence in self._waiting)

    @property
    def sequences(self) -> Iterator[Sequence]:
        """Iterator over all running and waiting requests."""
        return chain(self._running, self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Add a new request to the waiting ones."""
        insort(self._waiting, sequence, key=_rank)
        self._replays.add(sequence)
        self._sharing.add(sequence)

    def plan(self) -> list[Chunk]:
        """Choose the chunks of the next step. Their tokens count as computed from now on."""
        self.cache.trim()
        self._sharing.begin_step(self._waiting)
        self._make_way()
        for sequence in self._replays.outdated(self._running):
            self._suspend(sequence)
        preempted = self.num_preempted
        chunks, budget = self._continue()
        if self.num_preempted == preempted:
            chunks += self._begin(budget)
        self._replays.planned(self.sequences)
        chunks.sort(key=_adapter)  # adjacent rows of one adapter are one product
        return chunks

    def steps_ahead(self, chunks: list[Chunk], most: int) -> int:
        """Return the number of steps, at most `most`, that `chunks` can run without another plan. It is above 1 only if
        every sequence generates and has pages for the tokens that it will sample. Further pages are allocated only if
        no running request has to be preempted for them."""
        if most == 1 or any(count > 1 or not samples for _, _, count, samples in chunks):
            return 1
        steps = min([most, *(sequence.max_new - len(sequence.logprobs) for sequence, *_ in chunks)])
        steps = self._replays.steps((sequence for sequence, *_ in chunks), steps)
        for sequence, *_ in chunks:
            missing = self.cache.pages_for(sequence.computed + steps - 1) - len(sequence.pages)
            if missing > 0 and self.cache.num_available >= missing + len(self._running):
                self._grow(sequence, sequence.computed + steps - 1)
            steps = min(steps, len(sequence.pages) * self.cache.page_size - sequence.computed + 1)
        return steps

    def advance(self, sequence: Sequence, count: int) -> None:
        """Record that `count` more tokens than planned have keys and values, all computed by the served weights."""
        pages_before = sequence.computed // self.cache.page_size
        sequence.computed += count
        if sequence.computed // self.cache.page_size > pages_before:
            self._publish(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Remove a finished request. If the served weights computed all its keys and values, park its memory for its
        conversation."""
        self._leave(sequence)
        self._replays.remove(sequence)
        conversation = sequence.conversation
        if sequence.keep and conversation is not None and sequence.oldest == sequence.served.version:
            self.memory.park(sequence, conversation)
        self.memory.give_back(sequence)

    def recompute(self, served: ServedWeights, *, all_of_them: bool) -> None:
        """Make requests of these weights recompute their keys and values after an update. `all_of_them` selects all
        requests. Otherwise only requests in prefill, whose prompt one version should compute, and requests to score,
        whose result must be of one version."""
        self._replays.all_wait = False
        for sequence in self._running[:]:
            if sequence.served is served and (all_of_them or sequence.reads):
                self._suspend(sequence)

    def empty(self) -> None:
        """Suspend all requests and drop all computed data, including pages that could be found by their contents."""
        self._replays.all_wait = False
        for sequence in self._running[:]:
            self._suspend(sequence)
        self.memory.empty()

    def find(self, request: str) -> list[Sequence]:
        """Return all running and waiting requests with this id."""
        return [sequence for sequence in self.sequences if sequence.request.id == request]

    def abort(self, request: str) -> list[Sequence]:
        """Remove all requests with this id and return them. Running requests are finished, so that their conversations
        keep the pages computed so far."""
        sequences = self.find(request)
        for sequence in sequences:
            if sequence in self._running:
                self.finish(sequence)
            else:
                self.remove(sequence)
        return sequences

    def remove(self, sequence: Sequence) -> None:
        """Remove a waiting or running request; any other is ignored."""
        self._replays.remove(sequence)
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        elif sequence in self._running:
            self._leave(sequence)
            self.memory.give_back(sequence)

    def discard(self, chunks: list[Chunk]) -> list[Sequence]:
        """Remove the requests of a failed step and return them: the contents of their pages and of pending copies are
        unknown."""
        self.memory.invalidate()
        for chunk in chunks:
            for page in chunk.sequence.pages:
                self.cache.pool.forget(page)
            self.remove(chunk.sequence)
        return [chunk.sequence for chunk in chunks]

    def release(self, conversation: str) -> None:
        """Drop a parked conversation, and do not park the conversation again when its running request ends."""
        self.memory.release(conversation)
        self.cache.lost.forget(conversation)
        for sequence in self.sequences:
            if sequence.conversation == conversation:
                sequence.keep = False

    def clear(self) -> list[Sequence]:
        """Remove all requests and return them."""
        sequences = list(self.sequences)
        for sequence in sequences:
            self.remove(sequence)
        return sequences

    def _make_way(self) -> None:
        """Preempt requests of lower priority if a request of higher priority waits for a slot or pages."""
        slots = pages = 0
        for sequence in () if self.draining else tuple(self._waiting):
            if not self._running or not _above(sequence, self._running[-1]):
                return
            if self._sharing.must_wait(sequence):
                continue
            slots, pages = slots + 1, pages + self.cache.pages_for(len(sequence.tokens))
            while self._running and _above(sequence, self._running[-1]):
                if slots <= len(self._slots) and pages + len(self._running) <= self.cache.num_available:
                    break
                self._preempt(self._running[-1])

    def _continue(self) -> tuple[list[Chunk], int]:
        """Plan the running requests: a token of each that generates, chunks of prompts within the budget. Return the
        chunks and the remaining budget in tokens."""
        running = [(sequence, sequence.pending) for sequence in self._replays.ready(self._running)]
        budget = self._max_batch_tokens - sum(pending == 1 for _, pending in running)
        chunks: list[Chunk] = []
        page_size = self.cache.page_size
        # better ranks first: a preempted request has a worse rank and is not in the plan yet
        for sequence, pending in running:
            if sequence.slot < 0:
                continue
            gone = self.cache.num_unread(sequence.computed)
            if gone > sequence.gone:
                self.cache.drop_unread(sequence.pages, sequence.gone, gone)
                sequence.gone = gone
            count = 1 if pending == 1 else min(budget, sequence.readable)
            # a token within a page in use needs no other page
            if (pending == 1 and sequence.computed % page_size) or (
                count and self._grow(sequence, sequence.computed + count)
            ):
                budget -= count if pending > 1 else 0
                chunks.append(self._chunk(sequence, count))
        return chunks, budget

    def _begin(self, budget: int) -> list[Chunk]:
        """Admit waiting requests while there are slots, memory and budget, and plan chunks of their prompts."""
        chunks: list[Chunk] = []
        entering = [sequence for sequence in self._waiting if sequence.logprobs] if self.draining else self._waiting[:]
        for sequence in self._replays.ready(entering):
            if not self._slots or budget <= 0:
                break
            if self._sharing.must_wait(sequence):
                continue
            if not self._admit(sequence):
                break
            self._waiting.remove(sequence)
            self._sharing.admit(sequence)
            count = min(budget, sequence.readable)
            budget -= count
            chunks.append(self._chunk(sequence, count))
        return chunks

    def _chunk(self, sequence: Sequence, count: int) -> Chunk:
        begin, end = sequence.computed, sequence.computed + count
        sequence.computed, now = end, sequence.served.version
        if sequence.oldest is None or now < sequence.oldest:
            sequence.oldest = now
        if count > 1 or end % self.cache.page_size == 0:
            self._publish(sequence)
        return Chunk(sequence, begin, count, end == len(sequence.tokens) and sequence.scored_from is None)

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Allocate pages for `num_tokens` tokens; return False if the sequence itself had to be preempted."""
        missing = self.cache.pages_for(num_tokens) - len(sequence.pages)
        while missing > 0:
            pages = self.cache.take(missing)
            if pages is not None:
                sequence.pages += pages
                sequence.stale = True
                return True
            worst = self._running[-1]
            self._preempt(worst)
            if worst is sequence:
                return False
        return True

    def _admit(self, sequence: Sequence) -> bool:
        # leave a page for every running request, or this one would soon be preempted for them
        allocation = self.memory.allocate(sequence, len(self._running))
        if allocation is None:
            return False
        sequence.pages, sequence.computed = allocation.pages, allocation.num_cached
        sequence.table_length, sequence.stale, sequence.gone = 0, True, 0
        sequence.read_at = len(sequence.logprobs)
        sequence.oldest = sequence.served.version if allocation.num_cached else None
        # a preempted request finds its own pages again: not counted as cached
        if not sequence.admitted:
            sequence.admitted, sequence.cached_tokens = True, allocation.num_cached
            self.cache.counts.note(allocation)
        self.cache.lost.count += max(0, sequence.lost - allocation.num_cached)
        self.cache.lost.resume(sequence.conversation, len(sequence.tokens), allocation.num_cached)
        sequence.lost = 0
        sequence.slot = self._slots.pop()
        insort(self._running, sequence, key=_rank)
        return True

    def _publish(self, sequence: Sequence) -> None:
        """Register the computed pages for other requests, if the served weights computed them completely."""
        if sequence.oldest == sequence.served.version:
            weights = sequence.served.key
            self.cache.publish(sequence.pages, sequence.tokens, sequence.computed, weights, sequence.digests)

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preempted += 1
        sequence.lost = sequence.computed
        self._suspend(sequence)

    def _suspend(self, sequence: Sequence) -> None:
        self._leave(sequence)
        self.memory.give_back(sequence)
        sequence.scores.clear()
        insort(self._waiting, sequence, key=_rank)

    def _leave(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._slots.append(sequence.slot)
        sequence.slot = -1


def _adapter(chunk: Chunk) -> int:
    return chunk.sequence.served.number


def _above(sequence: Sequence, other: Sequence) -> bool:
    return sequence.rank[0] < other.rank[0]


def _rank(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.rank
