"""Plans: budgets hold, better ranks first, and nobody waits for ever."""

from concurrent.futures import Future

import hypothesis.strategies as st
from hypothesis import given, settings

from sparring.engine.cache.kv import KvCache
from sparring.engine.cache.memory import PagedMemory
from sparring.engine.scheduler import StepScheduler
from sparring.engine.sequence import Sequence
from sparring.engine.weight_names import ServedWeights
from sparring.generation import GenerateRequest, Sampling

PAGE = 4
SERVED = ServedWeights(version=0)
"""The weights of all requests here."""


def scheduler(num_pages=64, max_running=8, max_batch_tokens=16):
    SERVED.version = 0
    cache = KvCache(num_pages, PAGE, share_prefixes=False)
    return StepScheduler(PagedMemory(cache), max_running=max_running, max_batch_tokens=max_batch_tokens)


def sequence(arrival, prompt=3, max_new=4, priority=0, conversation=None, admission=0):
    request = GenerateRequest(
        id=str(arrival),
        tokens=tuple(range(100 * arrival, 100 * arrival + prompt)),
        sampling=Sampling(max_tokens=max_new),
        priority=priority,
        admission=admission,
        conversation=conversation,
    )
    one = Sequence.of(request, Future(), arrival=arrival, max_new=max_new, keep=True)
    one.served = SERVED
    return one


def step(plan, work):
    """Pretend to compute a plan; returns those that finished."""
    finished = []
    for chunk in plan:
        if chunk.samples:
            chunk.sequence.extend([7], [-1.0], SERVED.version)
            if chunk.sequence.finish_reason:
                work.finish(chunk.sequence)
                finished.append(chunk.sequence)
    return finished


def test_prompts_are_cut_to_the_budget_and_generation_goes_on_beside_them():
    work = scheduler(max_batch_tokens=10)
    short, long = sequence(1, prompt=3, max_new=9), sequence(2, prompt=28)
    work.add(short)
    work.add(long)
    counts = []
    for _ in range(4):
        plan = work.plan()
        counts.append({chunk.sequence.arrival: chunk.count for chunk in plan})
        assert [chunk.samples for chunk in plan if chunk.sequence is long] == [len(counts) == 4]
        step(plan, work)
    assert counts == [{1: 3, 2: 7}, {1: 1, 2: 9}, {1: 1, 2: 9}, {1: 1, 2: 3}]


def test_higher_priority_enters_first():
    work = scheduler(max_running=1)
    low, high = sequence(1), sequence(2, priority=5)
    work.add(low)
    work.add(high)
    assert [chunk.sequence for chunk in work.plan()] == [high]


def test_without_pages_the_worst_rank_is_preempted_and_still_finishes():
    work = scheduler(num_pages=4, max_batch_tokens=32)
    both = [sequence(1, prompt=4, max_new=9), sequence(2, prompt=4, max_new=9)]
    for one in both:
        work.add(one)
    finished = []
    for _ in range(60):
        finished += step(work.plan(), work)
    assert [one.arrival for one in finished] == [1, 2]
    assert work.num_preempted > 0
    assert all(len(one.logprobs) == 9 for one in both)


def test_a_late_turn_of_the_oldest_rollout_keeps_its_pages():
    work = scheduler(num_pages=8)
    younger = [sequence(number, prompt=5, max_new=9, admission=number) for number in (1, 2)]
    oldest = sequence(9, prompt=5, max_new=9, admission=0)  # its second turn: it arrives after their first
    for one in (*younger, oldest):
        work.add(one)
    ended = []
    while work.busy:
        ended += step(work.plan(), work)
    assert work.num_preempted > 0 and ended == [oldest, *younger]


def test_an_older_rollout_takes_nothing_from_one_that_runs():
    work = scheduler(num_pages=8, max_running=1)
    younger, oldest = sequence(1, admission=5), sequence(2, admission=0)
    work.add(younger)
    step(work.plan(), work)
    work.add(oldest)
    assert [chunk.sequence for chunk in work.plan()] == [younger] and work.num_preempted == 0


def test_a_preempted_request_computes_its_own_answer_again():
    work = scheduler(num_pages=4, max_batch_tokens=32)
    first, second = sequence(1, prompt=4, max_new=9), sequence(2, prompt=4, max_new=9)
    work.add(first)
    work.add(second)
    while work.num_preempted == 0:
        step(work.plan(), work)
    assert (second.computed, second.pages, second.oldest, second.slot) == (0, [], None, -1)
    assert len(second.logprobs) > 1


def test_cached_tokens_are_counted_once_and_exclude_own_pages():
    work = StepScheduler(PagedMemory(KvCache(64, PAGE, share_prefixes=True)), max_running=8, max_batch_tokens=9)
    one = sequence(1, prompt=20)
    work.add(one)
    for _ in range(2):
        work.plan()
        work.recompute(SERVED, all_of_them=True)  # it has to give way before it has read all of its prompt
    work.plan()
    counts = work.cache.counts
    assert (counts.hits, counts.misses, counts.shared_tokens, one.cached_tokens) == (0, 1, 0, 0) and one.computed > 9


def test_removed_requests_return_all_pages_and_slots():
    work = scheduler(num_pages=8, max_running=1)
    running, waiting = sequence(1), sequence(2)
    for one in (running, waiting):
        work.add(one)
    work.plan()
    for one in (running, waiting, running):
        work.remove(one)
    assert not work.busy
    assert work.cache.pool.num_free == 8


def test_kv_of_mixed_versions_is_not_kept():
    for versions, kept in (((0, 0, 0, 0), True), ((0, 0, 1, 1), False)):
        work = scheduler(num_pages=8)
        one = sequence(1, conversation="c")
        work.add(one)
        for version in versions:
            SERVED.version = version
            step(work.plan(), work)
        assert one.finish_reason == "length"
        assert (work.cache.pool.num_free < 8) is kept
        answer = one.completion()
        assert answer.kv_versions.expand() == [0, 0, 0, 0] and answer.versions.expand() == list(versions)


def test_release_while_running_keeps_nothing():
    work = scheduler(num_pages=8)
    one = sequence(1, conversation="c", max_new=1)
    work.add(one)
    plan = work.plan()
    work.release("c")
    step(plan, work)
    assert work.cache.pool.num_free == 8


requests = st.lists(
    st.tuples(st.integers(1, 20), st.integers(1, 12), st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=12
)


@settings(max_examples=80, deadline=None)
@given(requests, st.integers(8, 20), st.integers(1, 4), st.integers(4, 24))
def test_everything_finishes_within_every_limit(shapes, num_pages, max_running, max_batch_tokens):
    work = scheduler(num_pages, max_running, max_batch_tokens)
    waiting = [
        sequence(i, prompt=prompt, max_new=new, priority=priority, conversation=str(name))
        for i, (prompt, new, priority, name) in enumerate(shapes)
    ]
    everyone, finished = list(waiting), []
    for turn in range(2000):
        if waiting and turn % 2 == 0:
            work.add(waiting.pop())
        plan = work.plan()
        assert len(plan) <= max_running
        assert sum(chunk.count for chunk in plan) <= max_batch_tokens
        held = [page for one in everyone for page in one.pages]
        assert len(held) == len(set(held))
        assert all(len(chunk.sequence.pages) * PAGE >= chunk.begin + chunk.count for chunk in plan)
        finished += step(plan, work)
        if not waiting and not work.busy:
            break
    assert len(finished) == len(everyone)
    for name in range(3):
        work.cache.release(str(name))
    assert work.cache.pool.num_free == num_pages


def generating(work, *sequences):
    """Admit and read the prompts; the plan of the first step in which all only generate."""
    for item in sequences:
        work.add(item)
    step(work.plan(), work)
    return work.plan()


def test_steps_ahead_end_with_the_first_that_must_end():
    work = scheduler()
    plan = generating(work, sequence(1, max_new=30), sequence(2, max_new=8))
    assert work.steps_ahead(plan, 16) == 7
    assert work.steps_ahead(plan, 5) == 5
    assert work.steps_ahead(plan, 1) == 1


def test_no_steps_ahead_while_a_prompt_is_read():
    work = scheduler(max_batch_tokens=4)
    work.add(sequence(1, max_new=30))
    step(work.plan(), work)
    work.add(sequence(2, prompt=20))
    assert work.steps_ahead(work.plan(), 16) == 1


def test_steps_ahead_take_no_page_that_others_will_soon_need():
    # prompts of 3 and the token after it fill one page of 4 each; the next token needs a second one
    work = scheduler(num_pages=5)
    plan = generating(work, sequence(1, max_new=30), sequence(2, max_new=30))
    assert [chunk.sequence.computed for chunk in plan] == [4, 4]
    assert work.steps_ahead(plan, 16) == 1
    assert [len(chunk.sequence.pages) for chunk in plan] == [1, 1]
    roomy = scheduler(num_pages=64)
    plan = generating(roomy, sequence(1, max_new=30), sequence(2, max_new=30))
    assert roomy.steps_ahead(plan, 16) == 16
    assert [len(chunk.sequence.pages) for chunk in plan] == [5, 5]


def test_tokens_sampled_ahead_are_found_by_others_once_their_pages_are_full():
    cache = KvCache(64, PAGE, share_prefixes=True)
    work = StepScheduler(PagedMemory(cache), max_running=8, max_batch_tokens=64)
    first = sequence(1, max_new=30)
    plan = generating(work, first)
    steps = work.steps_ahead(plan, 16)
    first.extend(list(range(50, 50 + steps)), [-1.0] * steps, 0)
    work.advance(first, steps - 1)
    assert first.computed == 3 + steps == len(first.tokens) - 1
    allocation = cache.allocate(None, first.tokens, cache.pages_for(len(first.tokens)), 0, [], 0)
    assert (
        allocation.num_cached == first.computed // PAGE * PAGE
        and allocation.pages[: allocation.num_cached // PAGE] == first.pages[: allocation.num_cached // PAGE]
    )


def test_a_lower_priority_gives_its_slot_up_and_goes_on_later():
    work = scheduler(max_running=2)
    low = [sequence(1, max_new=9, priority=-1), sequence(2, max_new=9, priority=-1)]
    for one in low:
        work.add(one)
    for _ in range(3):
        step(work.plan(), work)
    high = sequence(3, max_new=2)
    work.add(high)
    plan = work.plan()
    assert {chunk.sequence.arrival for chunk in plan} == {1, 3}
    finished = [one.arrival for one in step(plan, work)]
    for _ in range(40):
        finished += [one.arrival for one in step(work.plan(), work)]
    assert finished[0] == 3 and sorted(finished) == [1, 2, 3]
    assert all(len(one.logprobs) == 9 for one in low)


def test_a_lower_priority_gives_its_pages_up():
    work = scheduler(num_pages=6)
    low = sequence(1, prompt=15, max_new=9, priority=-1)
    work.add(low)
    step(work.plan(), work)
    high = sequence(2, prompt=15, max_new=2)
    work.add(high)
    assert [chunk.sequence for chunk in work.plan()] == [high]


def test_within_a_priority_the_earlier_request_keeps_its_slot():
    work = scheduler(max_running=1)
    first, second = sequence(1, max_new=9), sequence(2)
    work.add(first)
    step(work.plan(), work)
    work.add(second)
    assert [chunk.sequence for chunk in work.plan()] == [first] and work.num_preempted == 0
