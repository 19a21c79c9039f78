"""Tokens that are computed again for want of room: all that is computed twice, and nothing else."""

import random
from concurrent.futures import Future

from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.engine.cache.counts import MOST, LostTokens
from sparring.engine.cache.kv import KvCache, kv_metrics
from sparring.engine.cache.memory import PagedMemory
from sparring.engine.scheduler import StepScheduler
from sparring.engine.sequence import Sequence
from sparring.engine.weight_names import ServedWeights
from sparring.generation import GenerateRequest, Sampling

PAGE = 4


def turn(number, conversation, tokens, max_new):
    request = GenerateRequest(
        id=str(number), tokens=tuple(tokens), sampling=Sampling(max_tokens=max_new), conversation=conversation
    )
    one = Sequence.of(request, Future(), arrival=number, max_new=max_new, keep=True)
    one.served = ServedWeights(version=0)
    return one


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), pages=st.integers(10, 60), host_pages=st.sampled_from([0, 8]))
def test_lost_tokens_are_those_computed_twice(seed, pages, host_pages):
    draw = random.Random(seed)
    cache = KvCache(pages, PAGE, share_prefixes=False, host_pages=host_pages)
    work = StepScheduler(PagedMemory(cache), max_running=4, max_batch_tokens=16)
    talks = {name: [*range(100)][: draw.randint(1, 9)] for name in "abcde"}
    turns, number = dict.fromkeys(talks, 3), 0
    computed, twice = set(), 0
    under_way = {}
    while under_way or any(turns.values()):
        for name in talks:
            if name not in under_way and turns[name] and draw.random() < 0.5:
                turns[name], number = turns[name] - 1, number + 1
                under_way[name] = turn(number, name, talks[name], draw.randint(1, 6))
                work.add(under_way[name])
        for chunk in work.plan():
            name = chunk.sequence.conversation
            for position in range(chunk.begin, chunk.begin + chunk.count):
                twice += (name, position) in computed
                computed.add((name, position))
            if chunk.samples:
                chunk.sequence.extend([7], [-1.0], 0)
                if chunk.sequence.finish_reason:
                    work.finish(chunk.sequence)
                    talks[name] = [*chunk.sequence.tokens, 1, 2]
                    del under_way[name]
        cache.take_copies()
    assert cache.lost.count == twice == kv_metrics(cache, 1)["kv_lost_tokens"]
    if pages == 60:
        assert twice == 0


def test_conversations_that_never_return_lose_nothing():
    lost = LostTokens()
    lost.evict("a", 10)
    lost.forget("a")
    lost.resume("a", 20, 0)
    lost.evict("a", 10)
    lost.forget()
    lost.resume("a", 20, 0)
    lost.resume(None, 20, 0)
    assert lost.count == 0
    for number in range(MOST + 1):
        lost.evict(str(number), 10)
    lost.resume("0", 20, 0)
    assert lost.count == 0, "not remembered for ever"
    lost.resume("1", 20, 4)
    lost.resume("1", 20, 4)
    assert lost.count == 6
