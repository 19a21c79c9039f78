"""Who owns which slot of recurrent state: models with such layers need one for every sequence, beside its pages. Torch-free.

A state is what a sequence has computed, all of it and nothing less: it cannot be cut back to an earlier token. So a conversation
goes on from the state that its last turn left only where it begins with all the tokens of that turn, and nobody else finds it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple


class Snapshot(NamedTuple):
    """The state of an idle conversation behind the first `num_tokens` tokens, those whose pages are kept."""

    slot: int
    num_tokens: int


class StateSlots:
    """Slots are free, held by one sequence, or by one idle conversation; of those the least recently used gives way.

    Args:
        num_slots: how many there are.
        lost: is told which conversation has no state any more; its pages are of no use then.
    """

    def __init__(self, num_slots: int, lost: Callable[[str], object]) -> None:
        self._free, self._lost = list(range(num_slots)), lost
        self._idle: OrderedDict[str, Snapshot] = OrderedDict()
        self._copies: list[tuple[int, int]] = []

    @property
    def available(self) -> bool:
        """Whether `take` would find one."""
        return bool(self._free or self._idle)

    def take(self) -> int | None:
        """A slot, with anything in it, at the cost of an idle conversation where none is free; None where all are in use."""
        if not self._free and self._idle:
            conversation, idle = self._idle.popitem(last=False)
            self.drop(idle.slot)
            self._lost(conversation)
        return self._free.pop() if self._free else None

    def drop(self, slot: int | None) -> None:
        """Give a slot back, if it is one."""
        if slot is not None:
            self._free.append(slot)

    def keep(self, conversation: str, slot: int, num_tokens: int) -> None:
        """Keep the state in `slot`, now the conversation's, for its next turn, in place of what was kept before."""
        self.release(conversation)
        self._idle[conversation] = Snapshot(slot, num_tokens)

    def branch(self, conversation: str, slot: int, num_tokens: int) -> None:
        """Keep a copy of the state in `slot` for a conversation, while the sequence that holds it goes on; not where all are in
        use."""
        self.release(conversation)
        copy = self.take()
        if copy is None:
            self._lost(conversation)
        else:
            self._copies.append((slot, copy))
            self.keep(conversation, copy, num_tokens)

    def resume(self, conversation: str | None, num_tokens: int) -> int | None:
        """Take over the slot of a conversation of which `num_tokens` are found in pages, where its state is behind exactly those:
        less are found where it diverges, and none under other weights."""
        idle = self._idle.pop(conversation, None) if conversation is not None else None
        if idle is not None and idle.num_tokens != num_tokens:
            self.drop(idle.slot)
            return None
        return None if idle is None else idle.slot

    def release(self, conversation: str) -> None:
        """Forget an idle conversation; none is fine."""
        idle = self._idle.pop(conversation, None)
        if idle is not None:
            self.drop(idle.slot)

    def distrust(self) -> None:
        """Forget all that is idle: whether it was copied where it should be is unknown."""
        self._copies.clear()
        for conversation in list(self._idle):
            self.release(conversation)

    def take_copies(self) -> list[tuple[int, int]]:
        """Slots to copy, (from, to) in this order, before the next step is computed; they are asked for once."""
        copies, self._copies = self._copies, []
        return copies
