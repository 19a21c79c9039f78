"""Requests of a lower priority have what the others leave, and say the same words for all that."""

import asyncio
import threading
from dataclasses import replace

from sparring.generation import GenerateRequest, Sampling

LOWER, TOKENS = ("low", "lowest"), 150
"""A call of the engine may sample several tokens of each: so many that the urgent one comes in between."""


def request(name, *, priority, max_tokens):
    sampling = Sampling(max_tokens=max_tokens, stop=(), seed=len(name))
    return GenerateRequest(id=name, tokens=tuple(range(5, 25)), sampling=sampling, priority=priority)


def test_a_request_does_not_wait_for_lower_ones_that_hold_every_slot(serve):
    low = [request(name, priority=-1, max_tokens=TOKENS) for name in LOWER]
    high = request("high", priority=0, max_tokens=5)

    # what watches runs on the engine's thread: it waits there until the next ones have come, and sees who ends first
    came, have_begun = {"lower": threading.Event(), "high": threading.Event()}, threading.Event()
    begun, ended = set(), []

    def watched(one):
        def watch(tokens, _):
            if one.id in LOWER:
                came["lower"].wait()
                begun.add(one.id)
                if begun.issuperset(LOWER):
                    have_begun.set()
                    came["high"].wait()
            if len(tokens) >= one.sampling.max_tokens:
                ended.append(one.id)

        return replace(one, ends=watch)

    async def scenario(engine):
        alone = [await engine.generate(one) for one in (high, *low)]
        lower = [asyncio.ensure_future(engine.generate(watched(one))) for one in low]
        await asyncio.sleep(0)  # both are asked for
        came["lower"].set()
        await asyncio.to_thread(have_begun.wait)  # both have a slot
        urgent = asyncio.ensure_future(engine.generate(watched(high)))
        await asyncio.sleep(0)
        came["high"].set()
        return alone, [await urgent, *await asyncio.gather(*lower)]

    alone, answers = serve(scenario, max_running=2)
    assert ended[0] == "high" and sorted(ended) == sorted((high.id, *LOWER))
    for one, other in zip(alone, answers, strict=True):
        assert (one.tokens, one.logprobs) == (other.tokens, other.logprobs)
