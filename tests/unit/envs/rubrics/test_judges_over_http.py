"""A judge behind an endpoint that speaks OpenAI's completions, and one behind `sparring serve`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_server import ChatServer, message
from common.served import RemoteToThread
from completions_server import CompletionsServer
from msgspec.structs import replace as changed

from sparring.engine.adapters.chat_endpoint import ChatEndpoint
from sparring.engine.adapters.openai_compatible import OpenAiEngine
from sparring.engine.config import EngineConfig
from sparring.engine.native import NativeEngine
from sparring.envs.rubrics.config import Judge
from sparring.envs.rubrics.judges import EngineReplies, Judges, Replies
from sparring.envs.rubrics.rubric import Rubric
from sparring.errors import JudgeError
from sparring.generation import Completion, Delta, GenerateRequest, Sampling
from sparring.model.config import InitConfig
from sparring.model.create import create
from sparring.model.load import load
from sparring.render.load import load_renderer
from sparring.render.train_tokenizer import train_tokenizer
from sparring.store.sqlite import SqliteStore
from sparring.testing.scripted_engine import ScriptedEngine, replies
from sparring.testing.toy import toy_renderer
from sparring.types import Message, Score, Task, ToolSpec

TASK = Task(id="t", env="e", messages=())


class Telling(ScriptedEngine):
    """Tells the likeliest tokens too, as servers do: the ones that it says."""

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Delta | Completion]:
        """The same, with them."""
        async for piece in super().stream(request):
            if isinstance(piece, Completion):
                pairs = zip(piece.tokens, piece.logprobs, strict=True)
                piece = replace(piece, top_logprobs=tuple((pair,) for pair in pairs))
            yield piece


async def judged(
    model: Replies, part: Judge, *completions: str, remembering: tuple[SqliteStore, str] | None = None
) -> list[Score]:
    async def opened(name: str) -> Replies:
        return model

    judges = Judges(opened)
    if remembering is not None:
        judges.remember(remembering[0], lambda name: f"{name} of {remembering[1]}")
    rubric = Rubric({"j": part}, judges=judges)
    await judges.check("m")
    try:
        return [await rubric.score(completion, TASK) for completion in completions]
    finally:
        await judges.close()


def test_an_openai_endpoint_judges() -> None:
    encode = toy_renderer().tokenizer.encode
    server = CompletionsServer(Telling(replies(["0", "0", "0", "I say 7", "I say 2"], encode)))  # three answer probes
    try:
        engine = OpenAiEngine(server.url)
        part = Judge(model="m", prompt="{completion}", range=(0, 10), find="I say (.+)")
        scores = asyncio.run(judged(EngineReplies(engine, toy_renderer(), "m"), part, "a", "b", "a"))
    finally:
        server.stop()
    assert [score.reward for score in scores] == [0.7, 0.2, 0.7]


def test_a_served_native_engine_judges_held_to_a_verdict(tmp_path: Path) -> None:
    """A random model, so that only the constraint makes its reply a verdict."""
    train_tokenizer(["Is this a good answer, yes or no? It is good."], 400, tmp_path)
    shape = InitConfig(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16)
    create(shape, 400, tmp_path, seed=1)
    engine = RemoteToThread(NativeEngine(load(tmp_path), EngineConfig(), threads=1), tmp_path)
    part = Judge(
        model="m", prompt="{completion}", choices={"yes": 1.0, "no": 0.5}, constrain=True, temperature=1.0, samples=4
    )
    [score] = asyncio.run(judged(EngineReplies(engine, load_renderer(tmp_path), "m"), part, "a"))
    assert score.reward in (0.5, 0.625, 0.75, 0.875, 1.0)


def test_a_chat_endpoint_judges() -> None:
    """Text alone: no tokenizer is needed. A reply that was cut short is no verdict, and a busy server is asked
    again."""
    said = iter([(200, "?", "length"), (429, "", ""), (200, "9", "length"), (200, '{"score": 4}', "stop")])

    def reply(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        status, text, reason = next(said)
        return status, {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": reason}]}

    server = ChatServer(reply)
    part = Judge(model="m", prompt="{completion}?", range=(0, 5), field="score", temperature=0.5, retry_delay_s=0.0)
    try:
        [score] = asyncio.run(judged(ChatEndpoint(server.url, model="big"), part, "a"))
    finally:
        server.stop()
    assert score.reward == 0.8
    assert [body["messages"] for body in server.bodies[1:]] == [[{"role": "user", "content": "a?"}]] * 3


def test_another_process_reuses_recorded_replies(tmp_path: Path) -> None:
    """Only what decides a reply makes another question; one without a verdict is kept too, a failure is not."""
    replies = iter([(503, {}), message("4"), *[message("nine")] * 3])
    server = ChatServer(lambda body: message() if body["max_tokens"] == 1 else next(replies))
    part = Judge(model="m", prompt="{completion}?", range=(0, 5), retry_delay_s=0.0)

    def scored(part: Judge, *completions: str, who: str = "a") -> list[float | None]:
        store = SqliteStore(tmp_path / "store.sqlite")
        try:
            model = ChatEndpoint(server.url, model="big")
            return [score.reward for score in asyncio.run(judged(model, part, *completions, remembering=(store, who)))]
        finally:
            store.close()

    def asked() -> int:
        return sum(body["max_tokens"] != 1 for body in server.bodies)

    try:
        assert (scored(part, "x", "x"), asked()) == ([0.8, 0.8], 2)
        assert (scored(part, "x"), asked()) == ([0.8], 2)
        others = [
            (part, "b"),
            (changed(part, prompt="{completion}!"), "a"),
            (changed(part, temperature=0.5, retries=0), "a"),
        ]
        for number, (other, who) in enumerate(others, 3):
            for _ in range(2):
                with pytest.raises(JudgeError, match="got the reply 'nine'"):
                    scored(other, "x", who=who)
                assert asked() == number
    finally:
        server.stop()


class Halved:
    """Replies with half a surrogate pair, as JSON may."""

    async def reply(self, messages: Sequence[Message], tools: Sequence[ToolSpec], sampling: Sampling) -> Message:
        return Message(role="assistant", content="4 \ud83d")

    async def close(self) -> None:
        """Nothing is open."""


def test_a_reply_with_half_a_surrogate_pair_can_be_recorded(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store.sqlite")
    part = Judge(model="m", prompt="{completion}?", range=(0, 5), find=r"^(\d) \?$")
    assert [score.reward for score in asyncio.run(judged(Halved(), part, "\ud83d?", remembering=(store, "a")))] == [0.8]
    store.close()
