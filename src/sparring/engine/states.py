"""Who owns which slot of recurrent state: models with such layers need one for every sequence, beside its pages.
Torch-free.

A state is what a sequence has computed, all of it and nothing less: it cannot be cut back to an earlier token. So a
conversation goes on from the state that its last turn left only where it begins with all the tokens of that turn.
Requests that begin alike go on from a copy that is made where one of them has computed what they share.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import xxhash

from sparring.engine.kv import Weights


class Beginning(NamedTuple):
    """The first tokens of a sequence: how many, of which weights what is computed of them is, and a digest of them."""

    num_tokens: int
    weights: Weights
    digest: bytes

    @property
    def key(self) -> bytes:
        """Under which a page is lent that ends so."""
        return str(self.weights).encode() + self.digest


def beginning_of(tokens: list[int], weights: Weights) -> Beginning:
    """All of these tokens."""
    return Beginning(len(tokens), weights, xxhash.xxh3_128_digest(array("q", tokens).tobytes()))


class Idle(NamedTuple):
    """A state that is kept: its slot and what it is behind, of a conversation the tokens whose pages are kept."""

    slot: int
    behind: Beginning


class StateSlots:
    """Slots are free, held by one sequence, by one idle conversation or for a beginning; of the latter two the least
    recently used gives way.

    Args:
        num_slots: how many there are.
        lost: is told which conversation, or the key of which beginning, has no state any more; its pages are of no use
            then.
    """

    def __init__(self, num_slots: int, lost: Callable[[str | bytes], object]) -> None:
        self._free, self._lost = list(range(num_slots)), lost
        self._idle: OrderedDict[str | Beginning, Idle] = OrderedDict()
        self._copies: list[tuple[int, int]] = []

    @property
    def available(self) -> bool:
        """Whether `take` would find one."""
        return bool(self._free or self._idle)

    def take(self) -> int | None:
        """A slot, with anything in it, at the cost of an idle one where none is free; None where all are in use."""
        if not self._free and self._idle:
            whose, idle = self._idle.popitem(last=False)
            self.drop(idle.slot)
            self._lost(whose if isinstance(whose, str) else whose.key)
        return self._free.pop() if self._free else None

    def drop(self, slot: int | None) -> None:
        """Give a slot back, if it is one."""
        if slot is not None:
            self._free.append(slot)

    def keep(self, conversation: str, slot: int, behind: Beginning) -> None:
        """Keep the state in `slot`, now the conversation's, for its next turn, in place of what was kept before."""
        self.release(conversation)
        self._idle[conversation] = Idle(slot, behind)

    def branch(self, conversation: str, slot: int, behind: Beginning) -> None:
        """Keep a copy of the state in `slot` for a conversation, while the sequence that holds it goes on; not where
        all are in use."""
        self.release(conversation)
        copy = self.take()
        if copy is None:
            self._lost(conversation)
        else:
            self._copies.append((slot, copy))
            self.keep(conversation, copy, behind)

    def remember(self, beginning: Beginning, slot: int) -> None:
        """Keep a copy of the state in `slot` for whoever begins so, while the sequence that holds it goes on; not where
        all are in use."""
        copy = None if beginning in self._idle else self.take()
        if copy is not None:
            self._copies.append((slot, copy))
            self._idle[beginning] = Idle(copy, beginning)

    @property
    def lengths(self) -> set[int]:
        """Of the beginnings whose state is remembered."""
        return {whose.num_tokens for whose in self._idle if isinstance(whose, Beginning)}

    def behind(self, whose: str | Beginning | None) -> int:
        """Behind how many tokens the state of a conversation or of a beginning is; 0 where there is none."""
        idle = self._idle.get(whose) if whose is not None else None
        return 0 if idle is None else idle.behind.num_tokens

    def go_on(self, whose: str | Beginning, found: Beginning) -> int | None:
        """A slot with the state of a conversation, which is idle no longer, or with a copy of a beginning's.

        None where it is not behind exactly what is `found` in pages: where a conversation diverges, and under other
        weights. What is kept of the conversation is forgotten then.
        """
        idle = self._idle.get(whose)
        fits = idle is not None and idle.behind == found
        if idle is None or isinstance(whose, Beginning):
            return self._copy(whose, idle.slot) if idle is not None and fits else None
        del self._idle[whose]
        if not fits:
            self.drop(idle.slot)
        return idle.slot if fits else None

    def release(self, whose: str | Beginning) -> None:
        """Forget an idle conversation or a beginning; none is fine."""
        idle = self._idle.pop(whose, None)
        if idle is not None:
            self.drop(idle.slot)
        if isinstance(whose, Beginning):
            self._lost(whose.key)

    def release_weights(self, weights: Weights) -> None:
        """Forget all beginnings whose state is of weights that serve nobody any more."""
        for whose in [whose for whose in self._idle if isinstance(whose, Beginning) and whose.weights == weights]:
            self.release(whose)

    def distrust(self) -> None:
        """Forget all that is idle: whether it was copied where it should be is unknown."""
        self._copies.clear()
        while self._idle:
            self.drop(self._idle.popitem()[1].slot)

    def take_copies(self) -> list[tuple[int, int]]:
        """Slots to copy, (from, to) in this order, before the next step is computed; they are asked for once."""
        copies, self._copies = self._copies, []
        return copies

    def _copy(self, beginning: str | Beginning, slot: int) -> int | None:
        """A slot with a copy of what is in `slot`; where no other can be had it is that one, and the beginning is
        forgotten."""
        self._idle.move_to_end(beginning)
        copy = self.take()
        if copy is not None and copy != slot:
            self._copies.append((slot, copy))
        return copy
