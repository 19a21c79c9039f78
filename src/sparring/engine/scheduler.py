"""Who is computed in the next step: continuous batching with chunked prompts over a limited number of pages.
Torch-free.

Requests are served by rank (priority, then arrival). A step holds one token of every request that generates and, as far
as the token budget goes, chunks of prompts. It cannot deadlock: a request is accepted only if it fits into the cache
alone, pages for a prompt are taken whole at admission, and where generation runs out of pages the request of the worst
rank gives its own back and starts again from its tokens.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from sparring.engine.kv import Allocation, KvCache, Weights
from sparring.engine.sequence import Sequence
from sparring.engine.served_adapter import ServedAdapter
from sparring.engine.shared_prefill import PrefillSharing
from sparring.engine.states import Prefix, StateSlots, prefix_of


class Chunk(NamedTuple):
    """`count` tokens of a sequence from `begin`; `samples` when the last of them is the sequence's last."""

    sequence: Sequence
    begin: int
    count: int
    samples: bool


class Scheduler:
    """The waiting and the running requests, and the pages they hold; of a recurrent model also the `states`. While it
    is `draining`, only those that have begun are served: that run, or have sampled."""

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

    @property
    def busy(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self._waiting or self._running)

    @property
    def load(self) -> tuple[int, int]:
        """Requests that run and requests that wait. From any thread."""
        return len(self._running), len(self._waiting)

    @property
    def has_begun(self) -> bool:
        """Whether any request runs or has sampled."""
        return bool(self._running) or any(sequence.logprobs for sequence in self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold pages."""
        return len(self._running)

    @property
    def sequences(self) -> Iterator[Sequence]:
        """Every request that runs or waits."""
        return chain(self._running, self._waiting)

    def add(self, sequence: Sequence) -> None:
        """A new request."""
        insort(self._waiting, sequence, key=_rank)
        if self._sharing is not None:
            self._sharing.add(sequence)

    def plan(self, version: int) -> list[Chunk]:
        """The chunks of one step under weights `version`; they count as computed from here on."""
        self.cache.trim()
        if self._sharing is not None:
            self._sharing.begin_step(self._waiting, version)
        self._make_way()
        preempted, page_size = self.num_preempted, self.cache.page_size
        running = [(sequence, sequence.pending) for sequence in self._running]
        budget = self._max_batch_tokens - sum(pending == 1 for _, pending in running)
        chunks: list[Chunk] = []
        # better ranks first: whoever must give way has a worse rank and is not in the plan yet
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
            # a token within a page that is begun needs no other
            if (pending == 1 and sequence.computed % page_size) or (
                count and self._grow(sequence, sequence.computed + count)
            ):
                budget -= count if pending > 1 else 0
                chunks.append(self._chunk(sequence, count, version))
        entering = [sequence for sequence in self._waiting if sequence.logprobs] if self.draining else self._waiting[:]
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
        chunks.sort(key=_adapter)  # rows of one adapter side by side are one product
        return chunks

    def steps_ahead(self, chunks: list[Chunk], most: int) -> int:
        """How many steps, at most `most`, `chunks` can take without another plan: sequences that only generate, with
        pages for what they will sample. Pages for it are taken only while nobody that runs has to give way."""
        if most == 1 or any(count > 1 or not samples for _, _, count, samples in chunks):
            return 1
        steps = min([most, *(sequence.max_new - len(sequence.logprobs) for sequence, *_ in chunks)])
        for sequence, *_ in chunks:
            missing = self.cache.pages_for(sequence.computed + steps - 1) - len(sequence.pages)
            if missing > 0 and self.cache.num_available >= missing + len(self._running):
                self._grow(sequence, sequence.computed + steps - 1)
            steps = min(steps, len(sequence.pages) * self.cache.page_size - sequence.computed + 1)
        return steps

    def advance(self, sequence: Sequence, count: int, version: int) -> None:
        """`count` tokens more than `plan` knew of have keys and values, all of weights `version`."""
        pages_before = sequence.computed // self.cache.page_size
        sequence.computed += count
        if sequence.computed // self.cache.page_size > pages_before:
            self._publish(sequence, version)

    def finish(self, sequence: Sequence, version: int) -> None:
        """Take a finished request out; its conversation keeps the pages when all of them are of `version`."""
        self._leave(sequence)
        conversation = sequence.conversation
        if sequence.keep and conversation is not None and sequence.oldest == sequence.version_under(version):
            self.cache.park(conversation, *self._held(sequence), sequence.weights_under(version))
            if self.states is not None and sequence.state is not None:
                self.states.park(conversation, sequence.state, _begun(sequence, sequence.computed, version))
                sequence.state = None
        self._give_back(sequence)

    def recompute(self, adapter: ServedAdapter | None, *, all_of_them: bool) -> None:
        """Let an adapter's requests (None: those without one) compute their keys and values again: all, or only those
        to score, whose answer is of one version."""
        for sequence in self._running[:]:
            if sequence.adapter is adapter and (all_of_them or sequence.scored_from is not None):
                self._suspend(sequence)

    def find(self, request: str) -> list[Sequence]:
        """Every request of this id that runs or waits."""
        return [sequence for sequence in self.sequences if sequence.request.id == request]

    def abort(self, request: str, version: int) -> list[Sequence]:
        """Take out every request of this id; who runs is retired, so that its conversation keeps what is computed."""
        found = self.find(request)
        for sequence in found:
            if sequence in self._running:
                self.finish(sequence, version)
            else:
                self.remove(sequence)
        return found

    def fork(self, sequence: Sequence, conversations: Iterable[str], version: int) -> None:
        """Let conversations go on from what a request has computed so far, where all of that is of `version`."""
        if sequence.oldest == sequence.version_under(version):
            for conversation in conversations:
                self.cache.park(conversation, *self._held(sequence), sequence.weights_under(version))
                if self.states is not None and sequence.state is not None:
                    self.states.park_copy(conversation, sequence.state, _begun(sequence, sequence.computed, version))

    def remove(self, sequence: Sequence) -> None:
        """Take a request out wherever it is; unknown ones are ignored."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        elif sequence in self._running:
            self._leave(sequence)
            self._give_back(sequence)

    def discard(self, chunks: list[Chunk]) -> list[Sequence]:
        """Take out the requests of a step that failed: what their pages hold is unknown, and whether its copies were
        made."""
        self.cache.invalidate()
        if self.states is not None:
            self.states.invalidate()
        for chunk in chunks:
            for page in chunk.sequence.pages:
                self.cache.pool.forget(page)
            self.remove(chunk.sequence)
        return [chunk.sequence for chunk in chunks]

    def release(self, conversation: str) -> None:
        """Forget a conversation now and when its running request ends."""
        self.cache.release(conversation)
        if self.states is not None:
            self.states.release(conversation)
        for sequence in self.sequences:
            if sequence.conversation == conversation:
                sequence.keep = False

    def forget(self, weights: Weights) -> None:
        """Release the idle conversations whose keys and values are of weights that serve nobody any more."""
        conversations = self.cache.release_weights(weights)
        if self.states is not None:
            for conversation in conversations:
                self.states.release(conversation)
            self.states.release_weights(weights)

    def clear(self) -> list[Sequence]:
        """Take every request out."""
        sequences = list(self.sequences)
        for sequence in sequences:
            self.remove(sequence)
        return sequences

    def _make_way(self) -> None:
        """Whoever runs at a lower priority leaves where one of a higher one waits and lacks a slot or pages alone."""
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

    def _chunk(self, sequence: Sequence, count: int, version: int) -> Chunk:
        begin, end = sequence.computed, sequence.computed + count
        sequence.computed, now = end, sequence.version_under(version)
        if sequence.oldest is None or now < sequence.oldest:
            sequence.oldest = now
        if count > 1 or end % self.cache.page_size == 0:
            self._publish(sequence, version)
        return Chunk(sequence, begin, count, end == len(sequence.tokens) and sequence.scored_from is None)

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Pages for `num_tokens`; False when the sequence itself had to give way."""
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
        sequence.oldest = sequence.version_under(version) if allocation.num_cached else None
        # a request that gave way finds again what it has computed itself: that counts as nothing
        if not sequence.admitted:
            sequence.admitted, sequence.cached_tokens = True, allocation.num_cached
            self.cache.counts.note(allocation)
        sequence.slot = self._slots.pop()
        insort(self._running, sequence, key=_rank)
        return True

    def _pages_for(
        self, sequence: Sequence, version: int, most: int | None = None, tail: bytes | None = None
    ) -> Allocation | None:
        """Pages, of which at most those of the first `most` tokens are found; the last perhaps lent under `tail`."""
        cache, wanted, count = self.cache, sequence.reusable, self.cache.pages_for(len(sequence.tokens))
        wanted = wanted if most is None else wanted[: most + 1]
        weights = sequence.weights_under(version)
        # a page for every running request is left, or it would soon have to give way to them
        return cache.allocate(sequence.conversation, wanted, count, weights, sequence.digests, len(self._running), tail)

    def _pages_and_state_for(self, sequence: Sequence, version: int, states: StateSlots) -> Allocation | None:
        """What its conversation keeps, or others have computed, is of use only with the state behind all of it."""
        if not states.available:
            return None
        own = [sequence.conversation] if sequence.conversation and states.num_tokens(sequence.conversation) else []
        for whose in (
            *own,
            *(self._sharing.cached_prefixes(sequence, version) if self._sharing is not None else ()),
            None,
        ):
            tail = whose.key if isinstance(whose, Prefix) else None
            allocation = self._pages_for(sequence, version, states.num_tokens(whose), tail)
            if allocation is not None:
                all_of_it = isinstance(whose, Prefix) and allocation.num_cached == whose.num_tokens
                found = whose if all_of_it else _begun(sequence, allocation.num_cached, version)
                sequence.state = states.take() if whose is None else states.resume(whose, found)
            if allocation is None or sequence.state is not None:
                break
            self.cache.drop(allocation.pages)
            sequence.digests.clear()
            if isinstance(whose, Prefix):
                states.release(whose)  # its pages are gone
            elif whose is not None:
                self.cache.release(whose)  # its state is
        if allocation is not None and sequence.conversation is not None:  # a copy in host memory has no state any more
            self.cache.release(sequence.conversation)
        return allocation

    def _publish(self, sequence: Sequence, version: int) -> None:
        """Let others find what is computed, where all of it is of the weights as they are now."""
        if sequence.oldest == sequence.version_under(version):
            weights = sequence.weights_under(version)
            self.cache.publish(sequence.pages, sequence.tokens, sequence.computed, weights, sequence.digests)

    def _preempt(self, sequence: Sequence) -> None:
        self.num_preempted += 1
        self._suspend(sequence)

    def _suspend(self, sequence: Sequence) -> None:
        self._leave(sequence)
        self._give_back(sequence)
        sequence.scores.clear()
        insort(self._waiting, sequence, key=_rank)

    def _leave(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._slots.append(sequence.slot)
        sequence.slot = -1

    def _held(self, sequence: Sequence) -> tuple[list[int], list[int]]:
        """Tokens that have keys and values, and the pages of those."""
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
    """Its first `count` tokens."""
    return prefix_of(sequence.tokens[:count], sequence.weights_under(version))


def _above(sequence: Sequence, other: Sequence) -> bool:
    """Whether it has the higher priority, whenever it came."""
    return sequence.rank[0] < other.rank[0]


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank
