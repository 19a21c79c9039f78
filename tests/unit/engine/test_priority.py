"""Requests of a lower priority have what the others leave, and say the same words for all that."""

import asyncio

from sparring.generation import GenerateRequest, Sampling


def request(name, *, priority, max_tokens):
    sampling = Sampling(max_tokens=max_tokens, min_tokens=max_tokens, stop=(3,), seed=len(name))
    return GenerateRequest(id=name, tokens=tuple(range(5, 25)), sampling=sampling, priority=priority)


def test_a_request_does_not_wait_for_lower_ones_that_hold_every_slot(serve):
    low = [request(f"low{'x' * n}", priority=-1, max_tokens=150) for n in range(2)]
    high = request("high", priority=0, max_tokens=5)

    async def scenario(engine):
        alone = [await engine.generate(one) for one in (high, *low)]
        ended = []

        async def read(name, pieces):
            async for piece in pieces:
                last = piece
            ended.append(name)
            return last

        streams = [engine.stream(one) for one in low]
        for pieces in streams:
            await anext(pieces)  # it has a slot
        readers = [asyncio.ensure_future(read(one.id, pieces)) for one, pieces in zip(low, streams, strict=True)]
        first = await engine.generate(high)
        ended.append("high")
        return alone, [first, *await asyncio.gather(*readers)], ended

    alone, answers, ended = serve(scenario, max_running=2)
    assert ended[0] == "high"
    for one, other in zip(alone, answers, strict=True):
        assert (one.tokens, one.logprobs) == (other.tokens, other.logprobs)
