"""What can never be served gets a typed error of its own, while it comes in between others that are under way; those go
on unharmed."""

import asyncio
from dataclasses import replace

import pytest

from sparring.errors import BadInput, EngineError
from sparring.generation import Constraint, GenerateRequest, Sampling, ScoreRequest
from sparring.testing.tiny_models import VOCABULARY
from sparring.testing.toy import toy_renderer

GOOD = GenerateRequest(id="good", tokens=(1, 2, 3, 4, 5), sampling=Sampling(max_tokens=60, seed=3))
CACHE = 192


def with_sampling(**sampling):
    return replace(GOOD, sampling=replace(GOOD.sampling, **sampling))


BAD = {
    "an empty prompt": (replace(GOOD, tokens=()), "at least one token"),
    "a prompt longer than the context": (replace(GOOD, tokens=(1,) * 256), "fewer than 256 tokens"),
    "a token out of the vocabulary": (replace(GOOD, tokens=(1, VOCABULARY)), f"token ids below {VOCABULARY}"),
    "a negative token": (replace(GOOD, tokens=(-1, 2)), f"token ids below {VOCABULARY}"),
    "a negative temperature": (with_sampling(temperature=-0.5), "a temperature of 0 or more"),
    "a temperature that is no number": (
        with_sampling(temperature=float("nan")),
        "a temperature of 0 or more",
    ),
    "a temperature of endless heat": (with_sampling(temperature=float("inf")), "a temperature of 0 or more"),
    "a temperature beyond float32": (with_sampling(temperature=1e300), "a temperature of 0 or more"),
    "a temperature below float32": (with_sampling(temperature=1e-40), "a temperature of 0 or more"),
    "a temperature beyond float32 for its prompt": (
        replace(with_sampling(temperature=1e300), prompt_logprobs=True),
        "a temperature of 0 or more",
    ),
    "more than the cache holds": (
        replace(with_sampling(max_tokens=100), tokens=(7,) * 100),
        f"within the cache of {CACHE} tokens",
    ),
    "a stop string that nobody reads": (with_sampling(stop_strings=("a",)), "bind the request"),
    "a constraint that nobody reads": (
        with_sampling(constraint=Constraint(kind="regex", source="a")),
        "bind the request",
    ),
}


async def run_beside(engine, bad):
    """The answers of three requests, one of which is known to be under way when `bad` is called, and what came of
    that."""
    begun = asyncio.Event()

    async def watched(request):
        async for piece in engine.stream(request):  # noqa: B007
            begun.set()
        return piece

    good = [replace(GOOD, id=f"good {seed}", sampling=replace(GOOD.sampling, seed=seed)) for seed in range(3)]
    jobs = [asyncio.ensure_future(job) for job in (watched(good[0]), *map(engine.generate, good[1:]))]
    await begun.wait()
    result = None if bad is None else (await asyncio.gather(bad(), return_exceptions=True))[0]
    return await asyncio.gather(*jobs), result, engine.metrics.get("failed_steps", 0.0)


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("way", ["generate", "stream"])
def test_a_request_that_can_never_be_served_fails_alone(serve, name, way):
    request, says = BAD[name]
    request = replace(request, id="bad")

    async def scenario(engine):
        async def asked():
            if way == "generate":
                return await engine.generate(request)
            return [piece async for piece in engine.stream(request)]

        return await run_beside(engine, asked)

    answers, error, failed_steps = serve(scenario, kv_tokens=CACHE)
    alone, _, _ = serve(lambda engine: run_beside(engine, None), kv_tokens=CACHE)
    assert isinstance(error, EngineError) and str(error).startswith("request bad: expected ") and says in str(error)
    assert (answers, failed_steps) == (alone, 0.0)


BAD_SCORES = {
    "longer than the cache": {"tokens": (1,) * 400},
    "out of the vocabulary": {"tokens": (1, VOCABULARY)},
    "no tokens": {"tokens": ()},
    "no number": {"tokens": (1, 2, 3), "temperature": float("nan")},
    "too hot": {"tokens": (1, 2, 3), "temperature": 1e300},
    "too cold": {"tokens": (1, 2, 3), "temperature": 1e-40},
}


@pytest.mark.parametrize("name", BAD_SCORES)
def test_scores_that_can_never_be_computed_fail_alone(serve, name):
    async def scenario(engine):
        return await run_beside(engine, lambda: engine.score(ScoreRequest(id="bad", **BAD_SCORES[name])))

    answers, error, _ = serve(scenario, kv_tokens=CACHE)
    assert isinstance(error, EngineError) and str(error).startswith("score bad: expected ")
    assert answers == serve(lambda engine: run_beside(engine, None), kv_tokens=CACHE)[0]


@pytest.mark.parametrize(
    ("kind", "source"),
    [("json_schema", '{"type": "nothing"}'), ("json_schema", "{"), ("regex", "("), ("lark", "start: x")],
)
def test_a_schema_that_does_not_compile_fails_alone(serve, kind, source):
    request = with_sampling(constraint=Constraint(kind=kind, source=source))

    async def scenario(engine):
        async def asked():
            return await engine.generate(toy_renderer().bind(request))

        return await run_beside(engine, asked)

    answers, error, _ = serve(scenario, kv_tokens=CACHE)
    assert isinstance(error, BadInput) and f"{kind.replace('_', ' ')}: expected one that compiles" in str(error)
    assert answers == serve(lambda engine: run_beside(engine, None), kv_tokens=CACHE)[0]
