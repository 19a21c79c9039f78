"""Requests of a lower priority have what the others leave, and say the same words for all that."""

import asyncio
import threading
from dataclasses import replace

from sparring.generation import GenerateRequest, Sampling

GUARD_S = 5.0
"""Only where the urgent one waits for the others, which is the failure, does anybody wait so long."""


def request(name, *, priority, max_tokens):
    sampling = Sampling(max_tokens=max_tokens, min_tokens=max_tokens, stop=(3,), seed=len(name))
    return GenerateRequest(id=name, tokens=tuple(range(5, 25)), sampling=sampling, priority=priority)


def test_a_request_does_not_wait_for_lower_ones_that_hold_every_slot(serve):
    low = [request(f"low{'x' * n}", priority=-1, max_tokens=150) for n in range(2)]
    high = request("high", priority=0, max_tokens=5)

    # the engine's thread waits where it must not go on before the others have come, or the urgent one's end was seen
    lower_came, higher_came, higher_ended = threading.Event(), threading.Event(), threading.Event()

    def watch(tokens, _):
        if len(tokens) > 8:
            higher_came.wait()
        if len(tokens) > 60:
            higher_ended.wait(GUARD_S)

    first_of_all = replace(request("first", priority=0, max_tokens=2), ends=lambda tokens, new: lower_came.wait() and None)
    watched = [replace(one, ends=watch) for one in low]

    async def scenario(engine):
        alone = [await engine.generate(one) for one in (high, *low)]
        ended = []

        async def read(name, pieces):
            async for piece in pieces:
                last = piece
            ended.append(name)
            return last

        streams = [engine.stream(one) for one in watched]
        begun = [asyncio.ensure_future(one) for one in (engine.generate(first_of_all), *map(anext, streams))]
        await asyncio.sleep(0)  # all three are asked for
        lower_came.set()
        await asyncio.gather(*begun)  # both have a slot
        readers = [asyncio.ensure_future(read(one.id, pieces)) for one, pieces in zip(low, streams, strict=True)]
        urgent = asyncio.ensure_future(engine.generate(high))
        await asyncio.sleep(0)
        higher_came.set()
        first = await urgent
        ended.append("high")
        higher_ended.set()
        return alone, [first, *await asyncio.gather(*readers)], ended

    alone, answers, ended = serve(scenario, max_running=2)
    assert ended[0] == "high"
    for one, other in zip(alone, answers, strict=True):
        assert (one.tokens, one.logprobs) == (other.tokens, other.logprobs)
