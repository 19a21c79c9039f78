"""What the scripted engine promises beyond the Engine contract."""

from __future__ import annotations

import pytest

from sparring.errors import EngineError
from sparring.generation import GenerateRequest, Sampling
from sparring.protocols import Engine
from sparring.testing.clock import run_virtual
from sparring.testing.scripted_engine import ScriptedEngine, replies
from sparring.types import WeightRef


def request(tokens: tuple[int, ...] = (1, 2), conversation: str | None = None, **sampling: object) -> GenerateRequest:
    """A request that stops at 9."""
    return GenerateRequest(id="q", tokens=tokens, sampling=Sampling(stop=(9,), **sampling), conversation=conversation)


def test_scripts_are_cut_and_ended():
    engine = ScriptedEngine(lambda r: (4, 5, 6) if r.tokens[0] == 1 else (4, 9, 6))
    assert isinstance(engine, Engine)
    whole, cut, stopped = (
        run_virtual(engine.generate(r))[0] for r in (request(), request(max_tokens=2), request((2,)))
    )
    assert (whole.tokens, whole.finish_reason) == ((4, 5, 6, 9), "stop")
    assert (cut.tokens, cut.finish_reason) == ((4, 5), "length")
    assert (stopped.tokens, stopped.finish_reason) == ((4, 9), "stop")
    assert whole.logprobs[:2] == cut.logprobs and len(whole.versions) == 4 and all(p < 0 for p in whole.logprobs)


def test_versions_latency_faults_and_cache():
    engine = ScriptedEngine(replies(["a", "b"], lambda text: [ord(text)]), latency_s=2.0, fail_on=[2])

    async def main() -> None:
        first = await engine.generate(request(conversation="c"))
        with pytest.raises(EngineError, match="request 2"):
            await engine.generate(request())
        longer = request((1, 2, *first.tokens, 3), conversation="c")
        second = await engine.generate(longer)
        assert (second.tokens[0], second.cached_tokens) == (ord("b"), 4)
        await engine.pull(WeightRef(model="policy", version=5, checksum="", transport="inline", location=None))
        third = await engine.generate(longer)
        assert third.versions.values == (5,) and third.cached_tokens == 0, "the cache of an old version is dropped"
        assert third.logprobs != second.logprobs
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(request())

    assert run_virtual(main())[1] == 8.0
