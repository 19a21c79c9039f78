"""Slots of recurrent state: one for each sequence, the rest for idle conversations, never one for two."""

from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import example, given, settings
from test_scheduler import PAGE, SERVED, sequence, step

from sparring.engine.cache.kv import KvCache, chain_digests
from sparring.engine.cache.memory import RecurrentMemory
from sparring.engine.cache.states import StateSlots, prefix_of
from sparring.engine.scheduler import StepScheduler


def tokens(count, weights=0):
    """The first `count` of some."""
    return prefix_of(list(range(count)), weights)


def slots_of(count):
    """Slots, and the conversations whose state gave way or found no room."""
    lost = []
    return StateSlots(count, lost.append), lost


def test_a_conversation_resumes_only_from_the_end_of_its_state() -> None:
    slots, _ = slots_of(3)
    taken = slots.take()
    slots.park("a", taken, tokens(10))
    assert slots.resume("a", tokens(10)) == taken
    slots.park("a", taken, tokens(10))
    assert (
        slots.resume("a", tokens(9)) is None
        and slots.resume("a", tokens(10)) is None
        and slots.resume("b", tokens(0)) is None
    )
    assert sorted([slots.take(), slots.take(), slots.take()]) == [0, 1, 2]


def test_the_longest_idle_conversation_loses_its_state() -> None:
    slots, lost = slots_of(2)
    for name in "ab":
        slots.park(name, slots.take(), tokens(1))
    slots.park("a", slots.resume("a", tokens(1)), tokens(2))
    slots.take()
    assert slots.resume("b", tokens(1)) is None and slots.available and lost == ["b"]
    slots.take()
    assert slots.resume("a", tokens(2)) is None and not slots.available and slots.take() is None and lost == ["b", "a"]


def test_what_is_released_is_free() -> None:
    slots, _ = slots_of(1)
    slots.park("a", slots.take(), tokens(1))
    slots.release("a")
    slots.release("unknown")
    slots.drop(None)
    assert slots.take() == 0 and slots.take() is None
    slots.drop(0)
    assert slots.take() == 0


def test_a_failed_step_drops_all_parked_states() -> None:
    slots, _ = slots_of(2)
    live = slots.take()
    slots.cache_prefix(tokens(5), live)
    slots.invalidate()
    assert slots.take_copies() == [] and slots.resume(tokens(5), tokens(5)) is None and slots.take() == 1 - live


def alike(arrival, shared, prompt=18, new=3, conversation=None):
    """A request whose prompt begins with the first `shared` of tokens that are the same for all."""
    one = sequence(arrival, prompt, new, 0, conversation)
    one.tokens[: min(shared, prompt)] = range(-1, -1 - min(shared, prompt), -1)
    return one


def sharing(num_slots=12, max_batch_tokens=64, max_running=8):
    SERVED.version = 0
    cache = KvCache(64 + 16 * num_slots, PAGE, share_prefixes=True)
    memory = RecurrentMemory(cache, num_slots)
    return StepScheduler(memory, max_running=max_running, max_batch_tokens=max_batch_tokens)


def counts(plan):
    return {chunk.sequence.arrival: (chunk.begin, chunk.count) for chunk in plan}


def test_a_group_computes_its_prompt_once_and_waits_for_it() -> None:
    work = sharing()
    for arrival in range(4):
        work.add(alike(arrival, 18))
    first = work.plan()
    assert counts(first) == {0: (0, 17)} and not first[0].samples, "cut before the last token"
    second = work.plan()
    assert counts(second) == {arrival: (17, 1) for arrival in range(4)} and all(chunk.samples for chunk in second)
    leader = second[0].sequence.state
    copies = work.memory.states.take_copies()
    assert copies[0][0] == leader and {source for source, _ in copies[1:]} == {copies[0][1]}, (
        "from the leader, then to the others"
    )
    assert work.cache.counts.shared_tokens == 3 * 17 and work.cache.counts.kept_tokens == 0
    step(second, work)
    work.add(alike(9, 18))
    assert counts(work.plan())[9] == (17, 1), "who comes later finds it too"


def test_common_prefixes_of_groups_and_within_groups_are_computed_once() -> None:
    work = sharing()
    groups = [[alike(arrival, 9, 30) for arrival in pair] for pair in ((0, 1), (2, 3))]
    for first, second in groups:
        second.tokens[:26] = first.tokens[:26]
        work.add(first)
        work.add(second)
    assert [counts(work.plan()) for _ in range(2)] == [{0: (0, 8)}, {0: (8, 16), 2: (8, 16)}]
    assert counts(work.plan()) == {arrival: (24, 6) for arrival in range(4)}


def test_a_request_that_waits_for_a_removed_one_becomes_the_leader() -> None:
    work = sharing()
    for arrival in range(3):
        work.add(alike(arrival, 18))
    work.plan()
    work.abort("0")
    assert counts(work.plan()) == {1: (0, 17)}
    assert counts(work.plan()) == {1: (17, 1), 2: (17, 1)}


def test_a_state_of_other_weights_is_not_resumed() -> None:
    work = sharing()
    for arrival in range(2):
        work.add(alike(arrival, 18))
    work.plan()
    SERVED.version = 1
    assert counts(work.plan()) == {0: (17, 1), 1: (0, 17)}, "the state of the first is behind tokens of the old ones"
    work.add(alike(2, 18))
    assert counts(work.plan())[2] == (17, 1)
    work.memory.forget(1)
    work.add(alike(3, 18))
    assert counts(work.plan())[3] == (0, 17)


def test_a_page_is_lent_with_the_state_of_its_own_weights() -> None:
    """Both have a state and a page behind the same tokens."""
    work = sharing()
    for version in (0, 1):
        work.add(alike(2 * version, 18))
        work.add(alike(2 * version + 1, 18))
        work.cache.take_copies()
        SERVED.version = version
        step(work.plan(), work)
        plan = work.plan()
        [leader, follower] = [
            chunk.sequence for chunk in plan if chunk.begin == 17 and chunk.sequence.arrival >= 2 * version
        ]
        assert work.cache.take_copies() == [("within", leader.pages[4], follower.pages[4])]


def test_a_longer_prompt_goes_on_from_where_a_whole_one_was_cut() -> None:
    work = sharing()
    for arrival in range(2):
        work.add(alike(arrival, 18))
    step(work.plan(), work)
    step(work.plan(), work)
    longer = alike(2, 18, 27)
    work.add(longer)
    assert counts(work.plan())[2] == (17, 10)
    work.add(alike(3, 17, 27))
    assert counts(work.plan())[3] == (17, 10), "with another token behind it too"
    work.add(alike(4, 16, 27))
    assert counts(work.plan())[4] == (0, 16), "not with another one before it"


def test_a_lent_page_stays_where_conversations_may_keep_none() -> None:
    """The rest of a group finds it though its leader has left; it goes when room is needed."""
    cache = KvCache(14, PAGE, share_prefixes=True, idle_pages=0)
    SERVED.version = 0
    work = StepScheduler(RecurrentMemory(cache, 4), max_running=1, max_batch_tokens=64)
    for arrival in range(3):
        work.add(alike(arrival, 18))
    computed = []
    while work.busy:
        plan = work.plan()
        computed += [(chunk.sequence.arrival, chunk.begin, chunk.count) for chunk in plan]
        step(plan, work)
    assert [chunk for chunk in computed if chunk[2] > 1] == [(0, 0, 17)]
    assert [chunk for chunk in computed if chunk[1] == 17] == [(0, 17, 1), (1, 17, 1), (2, 17, 1)]
    assert cache.pool.num_idle == 1 and cache.take(14) is not None and cache.pool.num_idle == 0


def test_who_comes_while_its_prompt_is_read_waits_for_the_rest() -> None:
    work = sharing(max_batch_tokens=8)
    work.add(alike(0, 30, 30))
    assert counts(work.plan()) == {0: (0, 8)}
    work.add(alike(1, 30, 30))
    assert [counts(work.plan()) for _ in range(3)] == [{0: (8, 8)}, {0: (16, 8)}, {0: (24, 5)}]
    assert counts(work.plan()) == {0: (29, 1), 1: (29, 1)}


def test_who_comes_later_goes_on_from_what_the_second_learned() -> None:
    work = sharing()
    for arrival, expected in enumerate([[(0, 30)], [(0, 8), (8, 22)], [(8, 22)], [(8, 22)]]):
        one = alike(arrival, 9, 30, new=1)
        work.add(one)
        found = []
        while work.busy:
            plan = work.plan()
            found.append(counts(plan)[arrival])
            step(plan, work)
        assert found == expected


def test_who_has_a_state_of_its_own_waits_for_nobody() -> None:
    work = sharing()
    work.add(alike(0, 18, conversation="talk"))
    for _ in range(3):
        step(work.plan(), work)
    assert not work.busy and work.memory.states.num_tokens("talk") == 20
    again = alike(1, 18, 24, conversation="talk")
    again.tokens[18:21] = [7, 7, 7]
    for one in (alike(2, 18), alike(3, 18), again):
        work.add(one)
    assert counts(work.plan()) == {2: (0, 17), 1: (20, 4)}


def test_nobody_gives_way_to_one_that_waits_for_a_prompt_all_the_same() -> None:
    """Of lower priority are the one that computes the prompt and another; once it is computed, the other leaves."""
    work = sharing(max_running=2, max_batch_tokens=8)
    leader, other, urgent = alike(0, 18, new=9), sequence(1, 3, 9, 0), alike(2, 18)
    for one, priority in ((leader, 0), (other, -1), (urgent, 1)):
        one.request = replace(one.request, priority=priority)
    for one in (other, leader, urgent):
        work.add(one)
        step(work.plan(), work)
    assert (leader.computed, urgent.computed, other.slot >= 0, work.num_preempted) == (14, 0, True, 0)
    assert counts(work.plan()) == {0: (14, 3), 1: (5, 1)}
    assert counts(work.plan()) == {0: (17, 1), 2: (17, 1)} and work.num_preempted == 1


NAMES = ("1", "2", "3", "branch")
shapes = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=10)


def test_a_conversation_is_not_its_own_predecessor() -> None:
    """One that must begin anew is not cut where its last turn ended: a copy there would be of use to nobody, and cost
    another's."""
    work, talks = sharing(num_slots=16), {f"c{i}": list(range(100 * i, 100 * i + 30)) for i in range(12)}
    arrival, computed = 0, []
    for turn in range(5):
        SERVED.version = int(turn >= 2)
        computed.append(0)
        if turn == 2:
            work.memory.forget(0)
        for name, text in talks.items():
            one, arrival = sequence(arrival, len(text), 2, conversation=name), arrival + 1
            one.tokens[:] = text
            work.add(one)
            while work.busy:
                plan = work.plan()
                computed[-1] += sum(chunk.count for chunk in plan)
                step(plan, work)
            text[:] = [*one.tokens, *range(7)]
    # after the update all is computed once more, and then again only what is new
    assert computed == [12 * (30 + 1), 12 * (1 + 7 + 1), 12 * (48 + 1), 12 * (1 + 7 + 1), 12 * (1 + 7 + 1)]


def test_where_the_pages_of_the_longest_beginning_are_gone_a_shorter_one_is_found() -> None:
    work = sharing()
    for arrival, shared in enumerate((9, 9, 30, 30, 30)):
        work.add(alike(arrival, shared, 30, new=1))
        while work.busy:
            step(work.plan(), work)
    assert work.memory.states.prefix_lengths == {8, 29}
    lost = alike(5, 30, 30)
    work.cache.pool.forget(work.cache.pool.find(chained(lost.tokens, 5)))
    work.add(lost)
    assert counts(work.plan())[5][0] == 8 and 29 not in work.memory.states.prefix_lengths


def chained(text, pages):
    """The digest of its first pages, as the cache has it for weights 0."""
    digests = []
    chain_digests(digests, text, pages * PAGE, PAGE, 0)
    return digests[-1]


def test_a_crowd_that_shares_nothing_is_not_cut() -> None:
    work = sharing(num_slots=400, max_running=300, max_batch_tokens=9 * 7)
    for arrival in range(300):
        work.add(sequence(arrival, 9, 1))
    chunks = []
    while work.busy:
        plan = work.plan()
        chunks += [(chunk.begin, chunk.count) for chunk in plan]
        assert not work.memory.states.take_copies()
        step(plan, work)
    assert chunks == [(0, 9)] * 300


class Written:
    """What pages hold, as if computed: tokens, here and in host memory."""

    def __init__(self):
        self._here, self._host = {}, {}

    def copied(self, copies):
        for way, source, target in copies:
            (self._host if way == "out" else self._here)[target] = (self._host if way == "back" else self._here)[source]

    def written(self, one, begin, count):
        """A chunk: what is before it stands in the sequence's pages, and then it does."""
        text = one.tokens[: begin + count]
        for index, page in enumerate(one.pages[: -(-len(text) // PAGE)]):
            known = tuple(text[index * PAGE : min((index + 1) * PAGE, begin)])
            assert self._here.get(page, ())[: len(known)] == known
            if (index + 1) * PAGE > begin:
                self._here[page] = tuple(text[index * PAGE : (index + 1) * PAGE])


def test_a_page_that_is_lent_is_given_up_where_a_request_needs_the_whole_cache() -> None:
    """The prompt fills all five pages, one of which would be the lent one."""
    cache = KvCache(5, PAGE, share_prefixes=True)
    SERVED.version = 0
    work, began = StepScheduler(RecurrentMemory(cache, 6), max_running=4, max_batch_tokens=64), []
    for arrival in range(3):
        work.add(alike(arrival, 19, 19, new=1))
    while work.busy:
        plan = work.plan()
        assert plan, "somebody waits for ever"
        began += [chunk.sequence.arrival for chunk in plan]
        step(plan, work)
    assert sorted(set(began)) == [0, 1, 2]


@settings(max_examples=300, deadline=None)
@example([(1, 1, 0), (17, 5, 0), (11, 7, 0)], 11, 3, 4, 5, True)
@example([(18, 5, 0)] * 8, 14, 3, 6, 0, True)
@given(shapes, st.integers(5, 14), st.integers(1, 4), st.integers(1, 6), st.integers(0, 9), st.booleans())
def test_every_request_goes_on_from_a_state_of_its_own(asked, num_pages, max_running, num_slots, host_pages, share):
    """Whoever is preempted, aborted or done, and whoever begins alike: a step finds state and pages behind
    exactly the tokens before it, nobody waits for ever, no pages are kept without the state behind them, and in the end
    all slots are free again."""
    cache = KvCache(num_pages, PAGE, share_prefixes=share, host_pages=host_pages)
    memory, behind, pages = RecurrentMemory(cache, num_slots), {}, Written()
    SERVED.version = 0
    work, slots = StepScheduler(memory, max_running=max_running, max_batch_tokens=16), memory.states
    room = num_pages * PAGE
    waiting = [
        alike(i, (0, 6, 13, 20)[i % 4] if share else 0, min(prompt, room - new), new, str(name) if name else None)
        for i, (prompt, new, name) in enumerate(asked)
    ]
    everyone = list(waiting)
    for turn in range(1000):
        if waiting and turn % 2 == 0:
            work.add(waiting.pop())
        plan = work.plan()
        held = [one.state for one in everyone if one.state is not None]
        assert len(held) == len(set(held)) == work.load[0]
        pages.copied(cache.take_copies())
        for source, target in slots.take_copies():
            behind[target] = behind[source]
        for one, begin, count, _ in plan:
            text = tuple(one.tokens[: begin + count])
            assert begin == 0 or behind[one.state] == text[:begin]
            behind[one.state] = text
            pages.written(one, begin, count)
        if turn % 7 == 6 and plan:
            work.abort(plan[-1].sequence.request.id)
        step([chunk for chunk in plan if chunk.sequence.state is not None], work)
        if not slots.prefix_lengths and not any(map(slots.num_tokens, NAMES)):
            assert cache.num_idle == 0 and cache.host.num_free == host_pages
        if not waiting and not work.busy:
            break
    assert not waiting and not work.busy
    for name in ("1", "2", "3"):
        work.release(name)
    slots.release_weights(0)
    assert sorted(slots.take() for _ in range(num_slots)) == list(range(num_slots))
    assert (cache.pool.num_free, cache.host.num_free) == (num_pages, host_pages)
