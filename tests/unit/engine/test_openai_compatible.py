"""A client of servers that speak OpenAI's completions: what it refuses at start, what it refuses later, what it
brings."""

import asyncio
import math
from dataclasses import replace

import pytest
from asked import EVERYTHING, PROMPT, ask, with_client
from completions_server import CompletionsServer

from sparring.engine.adapters.openai_compatible import OpenAiEngine
from sparring.engine.config import BatchConfig, EngineConfig
from sparring.engine.native import NativeEngine
from sparring.errors import BadInput, EngineError, RequestRefused
from sparring.generation import Constraint, ScoreRequest
from sparring.model.load import load


@pytest.fixture
def start_server(model_path):
    servers = []

    def start(**settings):
        servers.append(
            CompletionsServer(
                NativeEngine(load(model_path), EngineConfig(batch=BatchConfig(max_running=8)), threads=1), **settings
            )
        )
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def on(server, scenario, **settings):
    return with_client(OpenAiEngine(server.url, **settings), scenario)


def test_an_answer_is_the_engines_behind_it(start_server, serve):
    asks = [
        ask(1, **EVERYTHING, max_tokens=30),
        replace(ask(2), prompt_logprobs=True),
        ask(3, temperature=0.0, min_tokens=3, stop=(2, 9)),
    ]

    async def scenario(engine):
        return [await engine.generate(one) for one in asks]

    for here, there in zip(serve(scenario), on(start_server(), scenario), strict=True):
        assert replace(here, kept=None, cached_tokens=0) == there


def test_scores_are_the_engines_but_for_entropies(start_server, serve):
    asked = ScoreRequest(id="s", tokens=(*PROMPT, 9, 33), first=2, top_k=3)

    async def scenario(engine):
        return await engine.score(asked)

    here, there = serve(scenario), on(start_server(), scenario)
    assert (here.logprobs, here.top_ids, here.top_logprobs) == (there.logprobs, there.top_ids, there.top_logprobs)
    assert len(there.entropies) == 4 and all(map(math.isnan, there.entropies))


@pytest.mark.parametrize(
    ("settings", "model", "said"),
    [
        ({"tells_ids": False}, "", "an answer with token ids"),
        ({"models": ("a", "b")}, "", "expected one model"),
        ({"models": ()}, "", "expected one model"),
        ({}, "large", "expected large"),
    ],
)
def test_a_server_that_cannot_serve_is_refused_at_start(start_server, settings, model, said):
    server = start_server(**settings)
    with pytest.raises(BadInput, match=said):
        OpenAiEngine(server.url, model=model)


def test_no_server_is_refused_at_start(start_server):
    with pytest.raises(BadInput, match="an OpenAI-compatible server"):
        OpenAiEngine("http://127.0.0.1:1/v1")
    with pytest.raises(BadInput, match="a list of models"):
        OpenAiEngine(start_server().url + "/v1")


REFUSED = [
    (ask(tokens=()), "a prompt"),
    (ask(max_tokens=0), "max_tokens of at least 1"),
    (ask(tokens=(80,)), "status 400: .*token ids below 80"),
    (ask(temperature=-1.0), "status 400: .*a temperature of 0 or more"),
    (ask(constraint=Constraint(kind="regex", source="a")), "no constraint, got a regex"),
    (replace(ask(), ends=lambda tokens, new: None), "stop strings as text"),
    (replace(ask(temperature=0.5), prompt_logprobs=True), "temperature 1 from an OpenAI-compatible server"),
]


@pytest.mark.parametrize(("asked", "said"), REFUSED, ids=range(len(REFUSED)))
def test_a_bad_request_is_refused_and_the_others_go_on(start_server, asked, said):
    async def scenario(engine):
        with pytest.raises(RequestRefused, match=said):
            await engine.generate(asked)
        return await engine.generate(ask())

    assert len(on(start_server(), scenario).tokens) == 8


@pytest.mark.parametrize(
    "changed", [{"temperature": 0.5}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"logit_bias": ((3, 1.0),)}]
)
def test_probabilities_before_temperature_and_truncation_are_refused(start_server, changed):
    async def scenario(engine):
        with pytest.raises(RequestRefused, match="--logprobs-mode processed_logprobs"):
            await engine.generate(ask(**changed))
        return await engine.generate(ask()), await engine.generate(ask(temperature=0.0, top_k=1))

    assert all(len(answer.tokens) == 8 for answer in on(start_server(processed=False), scenario))


def test_a_server_that_dies_is_an_error(start_server):
    server = start_server()

    async def scenario(engine):
        await asyncio.to_thread(server.stop)
        with pytest.raises(EngineError, match="ConnectError"):
            await engine.generate(ask())
        with pytest.raises(EngineError, match="ConnectError"):
            await engine.score(ScoreRequest(id="s", tokens=PROMPT))

    on(server, scenario)
