"""Plan of each step: continuous batching with chunked prefill over a limited number of pages. Torch-free.

Requests are served by rank (priority, then the admission of their rollouts, then arrival). A step holds one token of
every request that generates and, within the token budget, chunks of prompts. It cannot deadlock: a request is accepted
only if it fits into the cache alone, all pages of a prompt are allocated at its admission, and when generation runs out
of pages, the request of the lowest rank returns its pages and is prefilled again later.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from sparring.engine.kv import KvCache, Weights
from sparring.engine.kv_counts import Allocation
from sparring.engine.sequence import Sequence
from sparring.engine.served_adapter import ServedAdapter
from sparring.engine.shared_prefill import PrefillSharing
from sparring.engine.states import Prefix, StateSlots, prefix_of


class Chunk(NamedTuple):
    """Slice of a sequence computed in one step: `count` tokens from `begin`; `samples` if it ends with the sequence's
    last token."""

    sequence: Sequence
    begin: int
    count: int  # type: ignore[assignment]  # instead of tuple's method, which nobody calls here
    samples: bool


class StepScheduler:
    """Waiting and running requests and their pages; for a recurrent model also the slots of `states`.

    Attributes:
        draining: whether only requests that have begun are served: those that run or have sampled tokens.
    """

    def __init__(
        self, cache: KvCache, *, max_running: int, max_batch_tokens: int, states: StateSlots | None = None
    ) -> None:
        self.cache, self.states = cache, states
        self._sharing = PrefillSharing(states, cache) if states is not None and cache.share_prefixes else None
        self._max_batch_tokens = max_batch_tokens
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._slots = list(range(max_running))[::-1]
        self.num_preempted = 0
        self.draining = False
        self._scheduled: set[Sequence] = set()
        self._all_wait = False

    @property
    def busy(self) -> bool:
        """True while there is a request that the served weights can continue."""
        return bool(self._waiting or self._running) and not self._all_wait

    @property
    def load(self) -> tuple[int, int]:
        """Numbers of running and of waiting requests. Thread-safe."""
        return len(self._running), len(self._waiting)

    @property
    def has_begun(self) -> bool:
        """True while a request runs or has sampled a token."""
        return bool(self._running) or any(sequence.logprobs for sequence in self._waiting)

    @property
    def num_running(self) -> int:
        """Number of requests that hold pages."""
        return len(self._running)

    @property
    def sequences(self) -> Iterator[Sequence]:
        """Iterator over all running and waiting requests."""
        return chain(self._running, self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Add a new request to the waiting ones."""
        insort(self._waiting, sequence, key=_rank)
        self._all_wait = False
        if sequence.schedule is not None:
            self._scheduled.add(sequence)
        if self._sharing is not None:
            self._sharing.add(sequence)

    def plan(self, version: int) -> list[Chunk]:
        """Choose the chunks of the next step under weights `version`; their tokens count as computed from now on."""
        self.cache.trim()
        if self._sharing is not None:
            self._sharing.begin_step(self._waiting, version)
        self._make_way()
        preempted, page_size = self.num_preempted, self.cache.page_size
        if self._scheduled:
            self._read_again()
        running = [(sequence, sequence.pending) for sequence in self._running]
        if self._scheduled:
            running = [(sequence, pending) for sequence, pending in running if not sequence.waits(version)]
        budget = self._max_batch_tokens - sum(pending == 1 for _, pending in running)
        chunks: list[Chunk] = []
        # better ranks first: a preempted request has a worse rank and is not in the plan yet
        for sequence, pending in running:
            if sequence.slot < 0:
                continue
            gone = self.cache.num_unread(sequence.computed)
            if gone > sequence.gone:
                self.cache.drop_unread(sequence.pages, sequence.gone, gone)
                sequence.gone = gone
            count = (
                1
                if pending == 1
                else min(pending, budget, sequence.share_at - sequence.computed if sequence.share_at else pending)
            )
            # a token within a page in use needs no other page
            if (pending == 1 and sequence.computed % page_size) or (
                count and self._grow(sequence, sequence.computed + count)
            ):
                budget -= count if pending > 1 else 0
                chunks.append(self._chunk(sequence, count, version))
        entering = [sequence for sequence in self._waiting if sequence.logprobs] if self.draining else self._waiting[:]
        if self._scheduled:
            entering = [sequence for sequence in entering if not sequence.waits(version)]
        for sequence in entering:
            if not (self._slots and budget > 0 and self.num_preempted == preempted):
                break
            if self._sharing is not None and self._sharing.must_wait(sequence):
                continue
            if not self._admit(sequence, version):
                break
            self._waiting.remove(sequence)
            if self._sharing is not None:
                self._sharing.admit(sequence)
            count = min(
                sequence.pending,
                budget,
                sequence.share_at - sequence.computed if sequence.share_at else sequence.pending,
            )
            budget -= count
            chunks.append(self._chunk(sequence, count, version))
        self._all_wait = bool(self._scheduled) and all(sequence.waits(version) for sequence in self.sequences)
        chunks.sort(key=_adapter)  # adjacent rows of one adapter are one product
        return chunks

    def steps_ahead(self, chunks: list[Chunk], most: int) -> int:
        """Return the number of steps, at most `most`, that `chunks` can run without another plan: every sequence
        generates and has pages for the tokens that it will sample. Further pages are allocated only if no running
        request has to be preempted for them."""
        if most == 1 or any(count > 1 or not samples for _, _, count, samples in chunks):
            return 1
        steps = min([most, *(sequence.max_new - len(sequence.logprobs) for sequence, *_ in chunks)])
        for sequence, *_ in chunks if self._scheduled else ():
            if sequence.schedule is not None:
                steps = min(steps, sequence.schedule.steps(len(sequence.logprobs)) or steps)
        for sequence, *_ in chunks:
            missing = self.cache.pages_for(sequence.computed + steps - 1) - len(sequence.pages)
            if missing > 0 and self.cache.num_available >= missing + len(self._running):
                self._grow(sequence, sequence.computed + steps - 1)
            steps = min(steps, len(sequence.pages) * self.cache.page_size - sequence.computed + 1)
        return steps

    def advance(self, sequence: Sequence, count: int, version: int) -> None:
        """Record that `count` more tokens than planned have keys and values, all computed by weights `version`."""
        pages_before = sequence.computed // self.cache.page_size
        sequence.computed += count
        if sequence.computed // self.cache.page_size > pages_before:
            self._publish(sequence, version)

    def finish(self, sequence: Sequence, version: int) -> None:
        """Remove a finished request, and park its pages for its conversation if `version` computed them completely."""
        self._leave(sequence)
        self._over(sequence)
        conversation = sequence.conversation
        if sequence.keep and conversation is not None and sequence.oldest == sequence.version_under(version):
            self.cache.park(conversation, *self._held(sequence), sequence.weights_under(version))
            if self.states is not None and sequence.state is not None:
                self.states.park(conversation, sequence.state, _begun(sequence, sequence.computed, version))
                sequence.state = None
        self._give_back(sequence)

    def recompute(self, adapter: ServedAdapter | None, *, all_of_them: bool) -> None:
        """Make the requests of an adapter (None: those without one) recompute their keys and values after an update.

        Args:
            adapter: adapter that was updated; None for the base model.
            all_of_them: whether all requests recompute. Otherwise only requests in prefill do, so that one version
                reads everything before the first token sampled since, and requests to score, whose result must be of
                one version.
        """
        self._all_wait = False
        for sequence in self._running[:]:
            if sequence.adapter is adapter and (all_of_them or sequence.reads):
                self._suspend(sequence)

    def find(self, request: str) -> list[Sequence]:
        """Return all running and waiting requests with this id."""
        return [sequence for sequence in self.sequences if sequence.request.id == request]

    def abort(self, request: str, version: int) -> list[Sequence]:
        """Remove all requests with this id and return them. Running ones are finished, so that their conversations keep
        the pages computed so far."""
        sequences = self.find(request)
        for sequence in sequences:
            if sequence in self._running:
                self.finish(sequence, version)
            else:
                self.remove(sequence)
        return sequences

    def fork(self, sequence: Sequence, conversations: Iterable[str], version: int) -> None:
        """Park the pages of a request computed so far for other conversations, if `version` computed them
        completely."""
        if sequence.oldest == sequence.version_under(version):
            for conversation in conversations:
                self.cache.park(conversation, *self._held(sequence), sequence.weights_under(version))
                if self.states is not None and sequence.state is not None:
                    self.states.park_copy(conversation, sequence.state, _begun(sequence, sequence.computed, version))

    def remove(self, sequence: Sequence) -> None:
        """Remove a waiting or running request; unknown ones are ignored."""
        self._over(sequence)
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        elif sequence in self._running:
            self._leave(sequence)
            self._give_back(sequence)

    def discard(self, chunks: list[Chunk]) -> list[Sequence]:
        """Remove the requests of a failed step and return them: the contents of their pages and of pending copies are
        unknown."""
        self.cache.invalidate()
        if self.states is not None:
            self.states.invalidate()
        for chunk in chunks:
            for page in chunk.sequence.pages:
                self.cache.pool.forget(page)
            self.remove(chunk.sequence)
        return [chunk.sequence for chunk in chunks]

    def release(self, conversation: str) -> None:
        """Drop a parked conversation, and do not park it again when its running request ends."""
        self.cache.release(conversation)
        self.cache.lost.forget(conversation)
        if self.states is not None:
            self.states.release(conversation)
        for sequence in self.sequences:
            if sequence.conversation == conversation:
                sequence.keep = False

    def forget(self, weights: Weights) -> None:
        """Release the parked conversations that were computed by weights which are no longer served. If these are the
        base model's, no adapter is loaded, so free pages hold nothing useful."""
        conversations = self.cache.release_weights(weights)
        if isinstance(weights, int):
            self.cache.pool.renew()
        if self.states is not None:
            for conversation in conversations:
                self.states.release(conversation)
            self.states.release_weights(weights)

    def clear(self) -> list[Sequence]:
        """Remove all requests and return them."""
        sequences = list(self.sequences)
        for sequence in sequences:
            self.remove(sequence)
        return sequences

    def _make_way(self) -> None:
        """Preempt requests of lower priority if one of a higher priority waits for a slot or pages."""
        slots = pages = 0
        for sequence in () if self.draining else tuple(self._waiting):
            if not self._running or not _above(sequence, self._running[-1]):
                return
            if self._sharing is not None and self._sharing.must_wait(sequence):
                continue
            slots, pages = slots + 1, pages + self.cache.pages_for(len(sequence.tokens))
            while self._running and _above(sequence, self._running[-1]):
                if slots <= len(self._slots) and pages + len(self._running) <= self.cache.num_available:
                    break
                self._preempt(self._running[-1])

    def _read_again(self) -> None:
        """Replay: drop and recompute keys and values of requests at the recorded points."""
        for sequence in self._running[:]:
            schedule, oldest = sequence.schedule, sequence.oldest
            if schedule is not None and oldest is not None and schedule.reads_again(len(sequence.logprobs), oldest):
                self._suspend(sequence)

    def _chunk(self, sequence: Sequence, count: int, version: int) -> Chunk:
        begin, end = sequence.computed, sequence.computed + count
        sequence.computed, now = end, sequence.version_under(version)
        if sequence.oldest is None or now < sequence.oldest:
            sequence.oldest = now
        if count > 1 or end % self.cache.page_size == 0:
            self._publish(sequence, version)
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

    def _admit(self, sequence: Sequence, version: int) -> bool:
        allocation = (
            self._pages_for(sequence, version)
            if self.states is None
            else self._pages_and_state_for(sequence, version, self.states)
        )
        if allocation is None:
            return False
        sequence.pages, sequence.computed = allocation.pages, allocation.num_cached
        sequence.table_length, sequence.stale, sequence.gone = 0, True, 0
        sequence.read_at = len(sequence.logprobs)
        sequence.oldest = sequence.version_under(version) if allocation.num_cached else None
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

    def _pages_for(
        self, sequence: Sequence, version: int, most: int | None = None, tail: bytes | None = None
    ) -> Allocation | None:
        """Allocate pages, reusing at most the first `most` tokens; the last one may be a copy of the page shared under
        `tail`."""
        cache, wanted, count = self.cache, sequence.reusable, self.cache.pages_for(len(sequence.tokens))
        wanted = wanted if most is None else wanted[: most + 1]
        weights = sequence.weights_under(version)
        # leave a page for every running request, or this one would soon be preempted for them
        return cache.allocate(sequence.conversation, wanted, count, weights, sequence.digests, len(self._running), tail)

    def _pages_and_state_for(self, sequence: Sequence, version: int, states: StateSlots) -> Allocation | None:
        """Allocate pages and a state slot. Cached pages are reusable only if the recurrent state after exactly their
        tokens is cached too."""
        if not states.available:
            return None
        own = [sequence.conversation] if sequence.conversation and states.num_tokens(sequence.conversation) else []
        for owner in (
            *own,
            *(self._sharing.cached_prefixes(sequence, version) if self._sharing is not None else ()),
            None,
        ):
            tail = owner.key if isinstance(owner, Prefix) else None
            allocation = self._pages_for(sequence, version, states.num_tokens(owner), tail)
            if allocation is not None:
                all_of_it = isinstance(owner, Prefix) and allocation.num_cached == owner.num_tokens
                cached = owner if all_of_it else _begun(sequence, allocation.num_cached, version)
                sequence.state = states.take() if owner is None else states.resume(owner, cached)
            if allocation is None or sequence.state is not None:
                break
            self.cache.drop(allocation.pages)
            sequence.digests.clear()
            if isinstance(owner, Prefix):
                states.release(owner)  # its pages are gone
            elif owner is not None:
                self.cache.release(owner)  # its state is
        if allocation is not None and sequence.conversation is not None:  # a copy in host memory has no state any more
            self.cache.release(sequence.conversation)
        return allocation

    def _publish(self, sequence: Sequence, version: int) -> None:
        """Register the computed pages for other requests, if the served weights computed them completely."""
        if sequence.oldest == sequence.version_under(version):
            weights = sequence.weights_under(version)
            self.cache.publish(sequence.pages, sequence.tokens, sequence.computed, weights, sequence.digests)

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preempted += 1
        sequence.lost = sequence.computed
        self._suspend(sequence)

    def _suspend(self, sequence: Sequence) -> None:
        self._leave(sequence)
        self._give_back(sequence)
        sequence.scores.clear()
        insort(self._waiting, sequence, key=_rank)

    def _over(self, sequence: Sequence) -> None:
        """Clear the wait state after a request ends."""
        self._scheduled.discard(sequence)
        self._all_wait = False

    def _leave(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._slots.append(sequence.slot)
        sequence.slot = -1

    def _held(self, sequence: Sequence) -> tuple[list[int], list[int]]:
        """Return the computed tokens and their pages."""
        return sequence.tokens[: sequence.computed], sequence.pages[: self.cache.pages_for(sequence.computed)]

    def _give_back(self, sequence: Sequence) -> None:
        self.cache.drop(sequence.pages)
        if self.states is not None:
            self.states.drop(sequence.state)
        sequence.pages, sequence.digests, sequence.computed, sequence.oldest = [], [], 0, None
        sequence.state, sequence.share_at = None, 0


def _adapter(chunk: Chunk) -> int:
    adapter = chunk.sequence.adapter
    return -1 if adapter is None else adapter.number


def _begun(sequence: Sequence, count: int, version: int) -> Prefix:
    """Return the first `count` tokens of a sequence as a prefix."""
    return prefix_of(sequence.tokens[:count], sequence.weights_under(version))


def _above(sequence: Sequence, other: Sequence) -> bool:
    return sequence.rank[0] < other.rank[0]


def _rank(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.rank
