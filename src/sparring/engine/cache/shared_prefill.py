"""Shared prefill for recurrent models: one request computes a common prefix, the others start from a copy of its state.
Torch-free.

Keys and values of earlier tokens can be found in pages at any time. A recurrent state exists for the newest token only,
so it must be copied at the moment when it summarises exactly the common prefix. Therefore the prompt of the request
that computes the state is split at the end of the prefix, and the requests that share the prefix are not admitted
before this point is reached. Split points are page boundaries and the token before the prompt's last token; in the
latter case the page in which the prefix ends is shared too.

Common prefixes are known among requests that wait at the same time. If prompts arrive one after the other, the second
one detects the common prefix and the third one starts from its copy.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence as Several

import xxhash

from sparring.engine.cache.kv import KvCache, chain_digests
from sparring.engine.cache.states import Prefix, StateSlots
from sparring.engine.sequence import Sequence

MAX_SEEN = 1 << 16
"""Maximum number of digests of earlier prompts that are remembered."""

MAX_COMPARED = 256
"""Maximum number of waiting requests, in the order of admission, that a running request is compared with."""

SEVERAL = ""
"""Stands for the conversation of a digest that several conversations had."""


class NoSharing:
    """Sharing turned off: no request waits for another request's prefix. Implements `PrefillSharing`."""

    def add(self, sequence: Sequence) -> None: ...

    def begin_step(self, waiting: Several[Sequence]) -> None: ...

    def admit(self, sequence: Sequence) -> None: ...

    def must_wait(self, sequence: Sequence) -> bool:
        return False

    def cached_prefixes(self, sequence: Sequence) -> list[Prefix]:
        return []


class PrefillSharing:
    """Split points of running prompts: `Sequence.share_at` is the length up to which a running request computes for
    waiting ones.

    A prompt may be split at its boundaries: the ends of its full pages, and the token before its last. Each boundary
    has a digest of all tokens up to there, so prompts with equal digests at one boundary agree before it."""

    def __init__(self, states: StateSlots, cache: KvCache) -> None:
        self._states, self._cache, self._page_size = states, cache, cache.page_size
        self._prefilling: list[tuple[Sequence, int]] = []
        self._leaders: dict[bytes, Sequence] = {}
        self._leader_ends: set[int] = set()
        self._waiting: Several[Sequence] = ()
        self._arrived: list[Sequence] = []
        self._seen: OrderedDict[bytes, str] = OrderedDict()

    def add(self, sequence: Sequence) -> None:
        """Record a request that has just begun to wait."""
        self._arrived.append(sequence)

    def begin_step(self, waiting: Several[Sequence]) -> None:
        """Copy the states of requests that have reached their split point, and choose new split points. `waiting` has
        all waiting requests in the order of admission."""
        self._waiting, self._leaders, self._leader_ends = waiting, {}, set()
        prefilling, self._prefilling = self._prefilling, []
        for sequence, seen in prefilling:
            if sequence.slot < 0:
                continue  # it no longer runs
            if (
                sequence.share_at
                and sequence.computed == sequence.share_at
                and sequence.oldest == sequence.served.version
            ):
                self._cache_state(sequence)
            self._choose_split(sequence, seen, self._arrived if not sequence.share_at else waiting)
        self._arrived = []

    def admit(self, sequence: Sequence) -> None:
        """Record that a request begins to run, remember its prompt, and choose its split point."""
        digests, owner = self._digests(sequence), sequence.conversation or sequence.request.id
        seen = next(
            (index for index, digest in enumerate(digests) if self._seen.get(digest, owner) == owner), len(digests)
        )
        self._choose_split(sequence, seen, self._waiting)
        for digest in digests:
            self._seen[digest] = owner if self._seen.get(digest, owner) == owner else SEVERAL
            self._seen.move_to_end(digest)
        while len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)

    def must_wait(self, sequence: Sequence) -> bool:
        """Return True if a running request computes a prefix of this request's prompt, so that this request should wait
        for the prefix's state."""
        if not self._leaders or self._states.num_tokens(sequence.conversation):
            return False
        digests = self._digests(sequence)
        for end in self._leader_ends:
            if end <= len(digests) and (leader := self._leaders.get(digests[end - 1])) is not None and leader.slot >= 0:
                return True
        return False

    def cached_prefixes(self, sequence: Sequence) -> list[Prefix]:
        """Return the prefixes of a request's prompt whose state is cached, longest first."""
        last = self._before_last(sequence)
        lengths = sorted((length for length in self._states.prefix_lengths if length <= last), reverse=True)
        prefixes = (self._prefix(sequence, length) for length in lengths)
        return [prefix for prefix in prefixes if self._states.num_tokens(prefix)]

    def _cache_state(self, sequence: Sequence) -> None:
        """Cache a copy of the state of a running sequence, and share the sequence's last page if not full."""
        assert sequence.state is not None, "it runs"
        prefix = self._prefix(sequence, sequence.computed)
        self._states.cache_prefix(prefix, sequence.state)
        if self._states.num_tokens(prefix) and sequence.computed % self._page_size:
            self._cache.share_tail(prefix.key, sequence.pages[sequence.computed // self._page_size])

    def _choose_split(self, sequence: Sequence, seen: int, waiting: Several[Sequence]) -> None:
        """Set the split point of a running prompt, beyond its computed tokens: the nearest boundary after which it
        differs from a request in `waiting`, or from the earlier prompts that share its first `seen` boundaries."""
        digests, begin = self._digests(sequence), sequence.computed // self._page_size
        if sequence.computed >= self._before_last(sequence):
            sequence.share_at = 0
            return
        self._prefilling.append((sequence, seen))
        if sequence.share_at <= sequence.computed:
            ends = [seen] if seen > begin else []
            for other in waiting[:MAX_COMPARED]:
                others = self._digests(other)
                if (
                    begin < len(others)
                    and others[begin] == digests[begin]
                    and not self._states.num_tokens(other.conversation)
                ):
                    ends.append(_num_common(digests, others))
            sequence.share_at = min(min(ends, default=0) * self._page_size, self._before_last(sequence))
        if sequence.share_at:
            end = -(-sequence.share_at // self._page_size)
            self._leaders[digests[end - 1]] = sequence
            self._leader_ends.add(end)

    def _digests(self, sequence: Sequence) -> list[bytes]:
        """Return a digest of the prompt up to each boundary. The digests are computed once per sequence."""
        if sequence.prompt_digests is None:
            sequence.prompt_digests, upto = [], self._before_last(sequence)
            chain_digests(sequence.prompt_digests, sequence.tokens, upto, self._page_size, sequence.served.number)
            if upto % self._page_size:
                sequence.prompt_digests.append(self._digest(sequence, upto))
        return sequence.prompt_digests

    def _before_last(self, sequence: Sequence) -> int:
        """Return the number of prompt tokens that other requests may reuse: all but the last."""
        return min(sequence.num_prompt, len(sequence.reusable)) - 1

    def _digest(self, sequence: Sequence, length: int) -> bytes:
        pages, rest = divmod(length, self._page_size)
        digests = self._digests(sequence)
        before = digests[pages - 1] if pages else str(sequence.served.number).encode()
        tail = array("q", sequence.tokens[length - rest : length]).tobytes()
        return xxhash.xxh3_128_digest(before + tail) if rest else before

    def _prefix(self, sequence: Sequence, length: int) -> Prefix:
        return Prefix(length, sequence.served.key, self._digest(sequence, length))


def _num_common(a: list[bytes], b: list[bytes]) -> int:
    return bisect_left(range(min(len(a), len(b))), True, key=lambda index: a[index] != b[index])
