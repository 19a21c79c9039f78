"""Slots of recurrent state: one for each sequence, the rest for idle conversations, never one for two."""

from sparring.engine.states import StateSlots


def test_a_conversation_goes_on_only_from_exactly_where_its_state_is() -> None:
    slots = StateSlots(3)
    taken = slots.take()
    slots.park("a", taken, 10)
    assert slots.resume("a", 10) == taken
    slots.park("a", taken, 10)
    assert slots.resume("a", 9) is None and slots.resume("a", 10) is None
    assert sorted([slots.take(), slots.take(), slots.take()]) == [0, 1, 2]


def test_the_conversation_that_was_idle_longest_gives_way() -> None:
    slots = StateSlots(2)
    for name in "ab":
        slots.park(name, slots.take(), 1)
    slots.park("a", slots.resume("a", 1), 2)
    slots.take()
    assert slots.resume("b", 1) is None and slots.available
    slots.take()
    assert slots.resume("a", 2) is None and not slots.available and slots.take() is None


def test_what_is_released_is_free() -> None:
    slots = StateSlots(1)
    slots.park("a", slots.take(), 1)
    slots.release("a")
    slots.release("unknown")
    slots.drop(None)
    assert slots.take() == 0 and slots.take() is None
    slots.drop(0)
    assert slots.take() == 0


def test_branches_get_copies_while_there_is_room() -> None:
    slots = StateSlots(3)
    live = slots.take()
    for name in "abc":
        slots.branch(name, live, 5)
    copies = slots.take_copies()
    assert [source for source, _ in copies] == [live] * 3 and slots.take_copies() == []
    # the third took the slot of the first
    assert slots.resume("a", 5) is None
    assert {slots.resume("b", 5), slots.resume("c", 5)} == {0, 1, 2} - {live} == {copy for _, copy in copies}
