"""What the engine did during one step."""

import asyncio

from sparring.generation import GenerateRequest, Sampling
from sparring.stages.runtime.timing import EngineCounters
from sparring.testing.scripted_engine import ScriptedEngine


class Levels(ScriptedEngine):
    """Tells its levels too."""

    @property
    def metrics(self):
        held = float(len(self.requests))
        return {**super().metrics, "kv_bytes_now": 100 * held, "max_running": held}


def test_counts_are_the_steps_and_levels_are_as_they_are():
    async def main():
        inner, laps = Levels(lambda request: [5] * request.sampling.max_tokens), []
        first = GenerateRequest(id="0", tokens=(1,), sampling=Sampling(max_tokens=7))
        await inner.generate(first)
        counters = EngineCounters(inner)
        for tokens in (3, 4):
            await inner.generate(GenerateRequest(id="1", tokens=(1,), sampling=Sampling(max_tokens=tokens)))
            laps.append(counters.lap())
        return [*laps, counters.lap()]

    expected = [(3.0, 200.0, 2.0), (4.0, 300.0, 3.0), (0.0, 300.0, 3.0)]
    names = ("engine/generated_tokens", "engine/kv_bytes_now", "engine/max_running")
    assert asyncio.run(main()) == [dict(zip(names, values, strict=True)) for values in expected]


def test_the_tokens_of_each_of_several_engines_are_a_rate():
    told = {"0/tokens": 3.0, "0/requests_now": 2.0}

    class Several(ScriptedEngine):
        @property
        def metrics(self):
            return told

    counters = EngineCounters(Several(lambda request: [5]))
    told |= {"0/tokens": 10.0, "0/requests_now": 1.0}
    lap = counters.lap()
    assert set(lap) == {"engine/0/tokens_per_s", "engine/0/requests_now"} and lap["engine/0/requests_now"] == 1.0
    assert lap["engine/0/tokens_per_s"] > 0 and counters.lap()["engine/0/tokens_per_s"] == 0.0
