"""Requests of a recurrent model that begin alike: one computes what they share, the others go on from a copy. Torch-free.

Keys and values of an earlier token are found in pages at any time. A recurrent state is only the last one, so it must be copied
when it is behind exactly what is shared: a prompt is cut there, at a page's end, while those that wait for it stay out. Where a
prompt is shared is known of those that wait; of those that came before, the second learns it, and the third goes on from there.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence as Several

from sparring.engine.kv import Weights, chain_digests
from sparring.engine.sequence import Sequence
from sparring.engine.states import Beginning, StateSlots

SEEN = 1 << 16
"""Of so many pages of earlier prompts it is remembered what they held."""

NEXT = 256
"""So many of those that wait are looked at, the next to enter."""


class Leads:
    """Who leads: a running request whose `lead` says how far its prompt is shared with some that wait.

    Args:
        states: the slots.
        page_size: prompts are cut at multiples of it.
    """

    def __init__(self, states: StateSlots, page_size: int) -> None:
        self._states, self._page_size = states, page_size
        self._reading: list[tuple[Sequence, int]] = []
        self._waiting: Several[Sequence] = ()
        self._waiting_for: Counter[bytes] | None = None
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def look(self, waiting: Several[Sequence], version: int) -> None:
        """Before a step: who waits. What was computed as far as it is shared is copied."""
        self._waiting, self._waiting_for = waiting, None
        reading, self._reading = self._reading, []
        for sequence, seen in reading:
            if sequence.slot < 0:
                continue  # it has left
            if sequence.lead and sequence.computed == sequence.lead and sequence.oldest == sequence.version_under(version):
                assert sequence.state is not None, "it runs"
                self._states.remember(self._beginning(sequence, sequence.lead // self._page_size, version), sequence.state)
            self._read_on(sequence, seen)

    def entered(self, sequence: Sequence) -> None:
        """A request waits no longer, and may lead others."""
        if self._waiting_for is not None:
            self._waiting_for.subtract(self._digests(sequence))
        digests = self._digests(sequence)
        self._read_on(sequence, next((place for place, digest in enumerate(digests) if digest not in self._seen), len(digests)))
        self._see(digests)

    def awaits(self, sequence: Sequence) -> bool:
        """Whether somebody is computing what it begins with."""
        leads = [leader for leader, _ in self._reading if leader.lead and leader.slot >= 0]
        if not leads or self._states.behind(sequence.conversation):
            return False
        mine = self._digests(sequence)
        ends = ((leader.lead // self._page_size, self._digests(leader)) for leader in leads)
        return any(end <= len(mine) and mine[end - 1] == theirs[end - 1] for end, theirs in ends)

    def found(self, sequence: Sequence, version: int) -> Beginning | None:
        """The longest beginning of a request whose state is remembered."""
        ends = range(len(self._digests(sequence)), 0, -1)
        every = (self._beginning(sequence, end, version) for end in ends)
        return next((beginning for beginning in every if self._states.behind(beginning)), None)

    def _read_on(self, sequence: Sequence, seen: int) -> None:
        """Cut a prompt, behind what is computed, where the first parts of those that wait and begin alike, or of the earlier ones
        that had its first `seen` pages."""
        digests, begin = self._digests(sequence), sequence.computed // self._page_size
        if begin >= len(digests):
            sequence.lead = 0
            return
        self._reading.append((sequence, seen))
        if sequence.lead <= sequence.computed:
            counts = [self._followers()[digests[place]] + (place < seen) for place in range(begin, len(digests))]
            same = next((place for place, count in enumerate(counts) if count != counts[0]), len(counts))
            sequence.lead = (begin + same) * self._page_size if counts[0] else 0

    def _see(self, digests: list[bytes]) -> None:
        for digest in digests:
            self._seen[digest] = None
            self._seen.move_to_end(digest)
        while len(self._seen) > SEEN:
            self._seen.popitem(last=False)

    def _followers(self) -> Counter[bytes]:
        """How many of those that wait begin so."""
        if self._waiting_for is None:
            self._waiting_for = Counter(digest for one in self._waiting[:NEXT] for digest in self._digests(one))
        return self._waiting_for

    def _digests(self, sequence: Sequence) -> list[bytes]:
        """Of the full pages of its prompt, without the token that is computed all the same."""
        if sequence.beginning is None:
            sequence.beginning, upto = [], min(sequence.num_prompt, len(sequence.reusable)) - 1
            whose: Weights = "" if sequence.adapter is None else sequence.adapter.number
            chain_digests(sequence.beginning, sequence.tokens, upto, self._page_size, whose)
        return sequence.beginning

    def _beginning(self, sequence: Sequence, pages: int, version: int) -> Beginning:
        digest = self._digests(sequence)[pages - 1]
        return Beginning(pages * self._page_size, sequence.weights_under(version), digest)
