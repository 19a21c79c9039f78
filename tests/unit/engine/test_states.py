"""Slots of recurrent state: one for each sequence, the rest for idle conversations, never one for two."""

import hypothesis.strategies as st
from hypothesis import given, settings
from test_scheduler import PAGE, sequence, step

from sparring.engine.kv import KvCache
from sparring.engine.scheduler import Scheduler
from sparring.engine.states import StateSlots


def slots_of(count):
    """Slots, and the conversations whose state gave way or found no room."""
    lost = []
    return StateSlots(count, lost.append), lost


def test_a_conversation_goes_on_only_from_exactly_where_its_state_is() -> None:
    slots, _ = slots_of(3)
    taken = slots.take()
    slots.keep("a", taken, 10)
    assert slots.resume("a", 10) == taken
    slots.keep("a", taken, 10)
    assert slots.resume("a", 9) is None and slots.resume("a", 10) is None and slots.resume(None, 0) is None
    assert sorted([slots.take(), slots.take(), slots.take()]) == [0, 1, 2]


def test_the_conversation_that_was_idle_longest_gives_way() -> None:
    slots, lost = slots_of(2)
    for name in "ab":
        slots.keep(name, slots.take(), 1)
    slots.keep("a", slots.resume("a", 1), 2)
    slots.take()
    assert slots.resume("b", 1) is None and slots.available and lost == ["b"]
    slots.take()
    assert slots.resume("a", 2) is None and not slots.available and slots.take() is None and lost == ["b", "a"]


def test_what_is_released_is_free() -> None:
    slots, _ = slots_of(1)
    slots.keep("a", slots.take(), 1)
    slots.release("a")
    slots.release("unknown")
    slots.drop(None)
    assert slots.take() == 0 and slots.take() is None
    slots.drop(0)
    assert slots.take() == 0


def test_branches_get_copies_while_there_is_room() -> None:
    slots, lost = slots_of(3)
    live = slots.take()
    for name in "abc":
        slots.branch(name, live, 5)
    copies = slots.take_copies()
    assert [source for source, _ in copies] == [live] * 3 and slots.take_copies() == []
    # the third took the slot of the first
    assert lost == ["a"]
    assert slots.resume("a", 5) is None
    assert {slots.resume("b", 5), slots.resume("c", 5)} == {0, 1, 2} - {live} == {copy for _, copy in copies}


def test_a_branch_without_room_is_lost():
    slots, lost = slots_of(1)
    slots.branch("a", slots.take(), 5)
    assert lost == ["a"] and slots.take_copies() == []


def test_behind_a_step_that_failed_nothing_idle_is_trusted() -> None:
    slots, _ = slots_of(2)
    live = slots.take()
    slots.branch("a", live, 5)
    slots.distrust()
    assert slots.take_copies() == [] and slots.resume("a", 5) is None and slots.take() == 1 - live


shapes = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=10)


@settings(max_examples=100, deadline=None)
@given(shapes, st.integers(8, 14), st.integers(1, 4), st.integers(1, 6), st.integers(0, 9))
def test_every_request_goes_on_from_a_state_of_its_own(asked, num_pages, max_running, num_slots, host_pages):
    """Whoever is preempted, forked, aborted or done: a step finds the state behind exactly the tokens before it, nobody waits for
    ever, no pages are kept without the state behind them, and in the end all slots are free again."""
    cache = KvCache(num_pages, PAGE, share_prefixes=False, host_pages=host_pages)
    slots, behind = StateSlots(num_slots, cache.evict), {}
    work = Scheduler(cache, max_running=max_running, max_batch_tokens=16, states=slots)
    waiting = [sequence(i, prompt, new, 0, str(name) if name else None) for i, (prompt, new, name) in enumerate(asked)]
    everyone = list(waiting)
    for turn in range(1000):
        if waiting and turn % 2 == 0:
            work.add(waiting.pop())
        plan = work.plan(0)
        held = [one.state for one in everyone if one.state is not None]
        assert len(held) == len(set(held)) == work.num_running
        for source, target in slots.take_copies():
            behind[target] = behind[source]
        for one, begin, count, _ in plan:
            text = tuple(one.tokens[: begin + count])
            assert begin == 0 or behind[one.state] == text[:begin]
            behind[one.state] = text
        if turn % 4 == 1 and plan:
            work.fork(plan[0].sequence, ["1", "branch"], 0)
            branch = sequence(len(everyone), len(plan[0].sequence.tokens) + 1, 3, 0, "branch")
            branch.tokens[:-1] = plan[0].sequence.tokens
            if turn < 40 and len(branch.tokens) + 2 <= num_pages * PAGE:
                everyone.append(branch)
                waiting.append(branch)
        if turn % 7 == 6 and plan:
            work.abort(plan[-1].sequence.request.id, 0)
        step([chunk for chunk in plan if chunk.sequence.state is not None], work)
        assert {*cache._here._idle, *cache._host._idle} <= slots._idle.keys()
        if not waiting and not work.busy:
            break
    assert not waiting and not work.busy
    for name in ("1", "2", "3", "branch"):
        work.release(name)
    assert sorted(slots.take() for _ in range(num_slots)) == list(range(num_slots))
    assert (cache.pool.num_free, cache.host.num_free) == (num_pages, host_pages)
