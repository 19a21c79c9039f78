"""Requests of a recurrent model that begin alike: one computes what they share, the others go on from a copy.
Torch-free.

Keys and values of an earlier token are found in pages at any time. A recurrent state is only the last one, so it must
be copied when it is behind exactly what is shared: a prompt is cut there, while those that wait for it stay out. It is
cut at the end of a page, and before its last token where that prompt is somebody else's too: then the page is lent in
which it ends. Where a prompt is shared is known of those that wait; of those that came before, the second learns it,
and the third goes on from there.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence as Several

import xxhash

from sparring.engine.kv import KvCache, Weights, chain_digests
from sparring.engine.sequence import Sequence
from sparring.engine.states import Beginning, StateSlots

SEEN = 1 << 16
"""Of so many pages of earlier prompts it is remembered what they held."""

NEXT = 256
"""So many of those that wait are looked at, the next to enter."""

SEVERAL = ""
"""Stands for who had a page when that was more than one."""


class Leads:
    """Who leads: a running request whose `lead` says how far its prompt is shared with some that wait.

    A prompt may be cut at its ends: of its full pages, and before its last token. Each has a digest. Those chain: where
    two prompts have the same one for an end, they have the same for all before it.

    Args:
        states: the slots.
        cache: has the pages.
    """

    def __init__(self, states: StateSlots, cache: KvCache) -> None:
        self._states, self._cache, self._page_size = states, cache, cache.page_size
        self._reading: list[tuple[Sequence, int]] = []
        self._ends: dict[bytes, Sequence] = {}
        self._counts: set[int] = set()
        self._waiting: Several[Sequence] = ()
        self._arrived: list[Sequence] = []
        self._seen: OrderedDict[bytes, str] = OrderedDict()

    def arrived(self, sequence: Sequence) -> None:
        """A request waits."""
        self._arrived.append(sequence)

    def look(self, waiting: Several[Sequence], version: int) -> None:
        """Before a step: who waits. What was computed as far as it is shared is copied."""
        self._waiting, self._ends, self._counts = waiting, {}, set()
        reading, self._reading = self._reading, []
        for sequence, seen in reading:
            if sequence.slot < 0:
                continue  # it has left
            if (
                sequence.lead
                and sequence.computed == sequence.lead
                and sequence.oldest == sequence.version_under(version)
            ):
                self._remember(sequence, version)
            self._read_on(sequence, seen, self._arrived if not sequence.lead else waiting)
        self._arrived = []

    def entered(self, sequence: Sequence) -> None:
        """A request waits no longer, and may lead others."""
        digests, owner = self._digests(sequence), sequence.conversation or sequence.request.id
        seen = next(
            (place for place, digest in enumerate(digests) if self._seen.get(digest, owner) == owner), len(digests)
        )
        self._read_on(sequence, seen, self._waiting)
        for digest in digests:
            self._seen[digest] = owner if self._seen.get(digest, owner) == owner else SEVERAL
            self._seen.move_to_end(digest)
        while len(self._seen) > SEEN:
            self._seen.popitem(last=False)

    def awaits(self, sequence: Sequence) -> bool:
        """Whether somebody is computing what it begins with."""
        if not self._ends or self._states.behind(sequence.conversation):
            return False
        mine = self._digests(sequence)
        for end in self._counts:
            if end <= len(mine) and (leader := self._ends.get(mine[end - 1])) is not None and leader.slot >= 0:
                return True
        return False

    def found(self, sequence: Sequence, version: int) -> list[Beginning]:
        """The beginnings of a request whose state is remembered, the longest first."""
        last = self._before_last(sequence)
        lengths = sorted((length for length in self._states.lengths if length <= last), reverse=True)
        every = (self._beginning(sequence, length, version) for length in lengths)
        return [beginning for beginning in every if self._states.behind(beginning)]

    def _remember(self, sequence: Sequence, version: int) -> None:
        """Have the state copied that is behind what is computed, and its last page lent where that is not full."""
        assert sequence.state is not None, "it runs"
        beginning = self._beginning(sequence, sequence.computed, version)
        self._states.remember(beginning, sequence.state)
        if self._states.behind(beginning) and sequence.computed % self._page_size:
            self._cache.lend(beginning.key, sequence.pages[sequence.computed // self._page_size])

    def _read_on(self, sequence: Sequence, seen: int, waiting: Several[Sequence]) -> None:
        """Cut a prompt, behind what is computed, where the first parts of `waiting` that begin alike, or of the earlier
        ones that had its first `seen` ends."""
        digests, begin = self._digests(sequence), sequence.computed // self._page_size
        if sequence.computed >= self._before_last(sequence):
            sequence.lead = 0
            return
        self._reading.append((sequence, seen))
        if sequence.lead <= sequence.computed:
            ends = [seen] if seen > begin else []
            for other in waiting[:NEXT]:
                theirs = self._digests(other)
                if (
                    begin < len(theirs)
                    and theirs[begin] == digests[begin]
                    and not self._states.behind(other.conversation)
                ):
                    ends.append(_common(digests, theirs))
            sequence.lead = min(min(ends, default=0) * self._page_size, self._before_last(sequence))
        if sequence.lead:
            end = -(-sequence.lead // self._page_size)
            self._ends[digests[end - 1]] = sequence
            self._counts.add(end)

    def _digests(self, sequence: Sequence) -> list[bytes]:
        """Of the ends of its prompt."""
        if sequence.beginning is None:
            sequence.beginning, upto = [], self._before_last(sequence)
            chain_digests(sequence.beginning, sequence.tokens, upto, self._page_size, _whose(sequence))
            if upto % self._page_size:
                sequence.beginning.append(self._digest(sequence, upto))
        return sequence.beginning

    def _before_last(self, sequence: Sequence) -> int:
        """How many tokens of its prompt others may go on from: one is computed all the same."""
        return min(sequence.num_prompt, len(sequence.reusable)) - 1

    def _digest(self, sequence: Sequence, length: int) -> bytes:
        """Of its first `length` tokens, at most those of the prompt, the last of them apart."""
        pages, rest = divmod(length, self._page_size)
        digests = self._digests(sequence)
        before = digests[pages - 1] if pages else str(_whose(sequence)).encode()
        tail = array("q", sequence.tokens[length - rest : length]).tobytes()
        return xxhash.xxh3_128_digest(before + tail) if rest else before

    def _beginning(self, sequence: Sequence, length: int, version: int) -> Beginning:
        return Beginning(length, sequence.weights_under(version), self._digest(sequence, length))


def _whose(sequence: Sequence) -> Weights:
    """Under which adapter it is computed: prompts are alike where that is the same too."""
    return "" if sequence.adapter is None else sequence.adapter.number


def _common(a: list[bytes], b: list[bytes]) -> int:
    """How many digests are the same, of two chains."""
    return bisect_left(range(min(len(a), len(b))), True, key=lambda place: a[place] != b[place])
