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
