"""Forced calls in every dialect: a model that knows nothing has to call, and what it samples is in the record as it was
drawn."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sessions import RENDERER, opened, said, says

from sparring.gateway.server import open_door
from sparring.generation import GenerateRequest
from sparring.render.demonstrate import reply_tokens
from sparring.render.load import load_renderer
from sparring.render.train_tokenizer import train_tokenizer

SCHEMAS: dict[str, Any] = {
    "add": {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": [1, 2]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    "stop": {"type": "object", "properties": {}, "additionalProperties": False},
    "wait": {
        "type": "object",
        "properties": {"s": {"type": "boolean"}},
        "required": ["s"],
        "additionalProperties": False,
    },
}
FUNCTIONS = [{"name": name, "description": name, "parameters": schema} for name, schema in SCHEMAS.items()]
CHAT_TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
RESPONSE_TOOLS = [{"type": "function", **function} for function in FUNCTIONS]
MESSAGE_TOOLS = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]


def chat(choice: Any, **fields: Any) -> tuple[str, dict[str, Any]]:
    body = {"model": "policy", "messages": [{"role": "user", "content": "Hi"}], "tools": CHAT_TOOLS, **fields}
    return "/v1/chat/completions", {**body, "tool_choice": choice}


def responses(choice: Any, **fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"model": "policy", "input": "Hi", "tools": RESPONSE_TOOLS, "tool_choice": choice, **fields}


def messages(choice: Any, **fields: Any) -> tuple[str, dict[str, Any]]:
    body = {"model": "policy", "max_tokens": 900, "messages": [{"role": "user", "content": "Hi"}], **fields}
    return "/v1/messages", {**body, "tools": MESSAGE_TOOLS, "tool_choice": choice}


def gemini(mode: str, *names: str) -> tuple[str, dict[str, Any]]:
    calling = {"mode": mode, **({"allowedFunctionNames": list(names)} if names else {})}
    body = {"contents": [{"role": "user", "parts": [{"text": "Hi"}]}], "tools": [{"functionDeclarations": FUNCTIONS}]}
    return "/v1beta/models/policy:generateContent", {**body, "toolConfig": {"functionCallingConfig": calling}}


def calls_in(path: str, answer: dict[str, Any]) -> list[tuple[str, Any]]:
    """The calls of an answer; it has nothing else."""
    if path.endswith("completions"):
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
        functions = [call["function"] for call in choice["message"]["tool_calls"]]
        return [(function["name"], json.loads(function["arguments"])) for function in functions]
    if path.endswith("responses"):
        return [
            (item["name"], json.loads(item["arguments"])) for item in answer["output"] if item["type"] != "reasoning"
        ]
    if path.endswith("messages"):
        assert answer["stop_reason"] == "tool_use"
        return [(block["name"], block["input"]) for block in answer["content"]]
    parts = answer["candidates"][0]["content"]["parts"]
    return [(part["functionCall"]["name"], part["functionCall"]["args"]) for part in parts]


FORCED = {
    "chat required": (chat("required"), None, True),
    "chat named": (chat({"type": "function", "function": {"name": "wait"}}), {"wait"}, True),
    "chat one call": (chat("required", parallel_tool_calls=False), None, False),
    "chat allowed": (
        chat({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [CHAT_TOOLS[0], CHAT_TOOLS[1]]}}),
        {"add", "stop"},
        True,
    ),
    "chat with a format": (chat("required", response_format={"type": "json_object"}), None, True),
    "responses required": (responses("required", parallel_tool_calls=False), None, False),
    "responses named": (responses({"type": "function", "name": "add"}), {"add"}, True),
    "responses allowed": (
        responses({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "stop"}]}),
        {"stop"},
        True,
    ),
    "messages any": (messages({"type": "any", "disable_parallel_tool_use": True}), None, False),
    "messages tool": (messages({"type": "tool", "name": "wait"}), {"wait"}, True),
    "gemini any": (gemini("ANY"), None, True),
    "gemini named": (gemini("ANY", "stop", "add"), {"stop", "add"}, True),
}


TEXT_OR_CALLS = {
    "chat": (
        chat({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [CHAT_TOOLS[0], CHAT_TOOLS[1]]}}),
        {"add", "stop"},
    ),
    "responses": (
        responses({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "stop"}]}),
        {"stop"},
    ),
    "gemini": (gemini("VALIDATED", "stop", "add"), {"stop", "add"}),
    "gemini all": (gemini("VALIDATED"), set(SCHEMAS)),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from sparring.engine.config import EngineConfig
    from sparring.engine.native import NativeEngine
    from sparring.model.load import load
    from sparring.testing.tiny_models import tiny_model

    path = tiny_model(
        "qwen3", tmp_path_factory.mktemp("model") / "tiny", seed=2, vocab_size=416, max_position_embeddings=4096
    )
    (path / "tokenizer.json").write_text(RENDERER.tokenizer.as_json())
    yield lambda: (NativeEngine(load(path, dtype="float32"), EngineConfig(), threads=1), path)


@pytest.mark.parametrize("served", [False, True])
def test_a_forced_call_is_made_in_every_dialect(model: Any, served: bool) -> None:
    """By an engine of the process, and by one that is served to it, which has no renderer."""
    from common.served import ServerThread

    from sparring.engine.adapters.remote_client import RemoteClient

    own, path = model()
    server = ServerThread(own, path) if served else None

    async def main() -> Any:
        engine = own if server is None else RemoteClient(server.url)
        session = opened(engine, max_turns=99, max_tokens=99999, max_tool_calls=999)
        async with open_door(session) as door, httpx.AsyncClient(base_url=door.url, timeout=60) as client:
            client.headers["authorization"] = f"Bearer {door.key}"
            posts = [client.post(path, json=body) for (path, body), *_ in FORCED.values()]
            answers = await asyncio.gather(*posts)
        await engine.close()
        return session, answers

    try:
        session, answers = asyncio.run(main())
    finally:
        if server is not None:
            server.stop()
    for (name, ((path, _), names, parallel)), answer in zip(FORCED.items(), answers, strict=True):
        assert answer.status_code == 200, (name, answer.text)
        assert "x-sparring-noted" not in answer.headers, name
        calls = calls_in(path, answer.json())
        assert calls and (parallel or len(calls) == 1), (name, calls)
        for called, arguments in calls:
            assert called in (names or SCHEMAS) and arguments.keys() == SCHEMAS[called]["properties"].keys(), name
    sampled = [segment for segment in session.segments if segment.sampling is not None]
    assert len(sampled) == len(FORCED)
    for segment in sampled:
        assert segment.sampling.constraint.kind == "tool_call" and segment.kept is not None
        assert len(segment.kept.rows) == len(segment.tokens)


@pytest.mark.parametrize("name", TEXT_OR_CALLS)
def test_tools_that_are_not_allowed_stay_in_the_prompt_and_are_not_called(name: str) -> None:
    """A policy that would call `wait` meets a rule by which it cannot: only text and allowed calls may follow."""
    (path, body), allowed = TEXT_OR_CALLS[name]
    engine = says(said("", ("stop", {})), said("Hi."), said("", ("wait", {"s": True})))
    session = opened(engine)

    async def main() -> list[httpx.Response]:
        async with open_door(session) as door, httpx.AsyncClient(base_url=door.url) as client:
            client.headers["authorization"] = f"Bearer {door.key}"
            return [await client.post(path, json=body) for _ in range(2)]

    answers = asyncio.run(main())
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    prompt = session.segments[0]
    assert all(f'"{tool}"' in RENDERER.decode(prompt.tokens) for tool in SCHEMAS)
    sampled = [segment for segment in session.segments if segment.sampling is not None]
    constraint = sampled[0].sampling.constraint
    listed = json.loads(constraint.source)
    assert listed["text"] and {tool["name"] for tool in listed["tools"]} == allowed
    rule = RENDERER.bind(GenerateRequest(id="r", tokens=(1,), sampling=sampled[0].sampling)).allowed
    for segment in sampled:
        rule(segment.tokens[:-1])
    waits = reply_tokens(RENDERER, said("", ("wait", {"s": True})), ())
    if "wait" not in allowed:
        with pytest.raises(ValueError, match="expected tokens that it allows"):
            rule(waits[:-1])


def test_allowing_all_tools_is_no_constraint() -> None:
    engine = says(said("Hi."))
    session = opened(engine)
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": CHAT_TOOLS}}

    async def main() -> httpx.Response:
        async with open_door(session) as door, httpx.AsyncClient(base_url=door.url) as client:
            client.headers["authorization"] = f"Bearer {door.key}"
            path, body = chat(allowed)
            return await client.post(path, json=body)

    assert asyncio.run(main()).status_code == 200
    assert session.segments[-1].sampling.constraint is None


TEMPLATE = (
    "{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{{{{ m.content }}}}<|im_end|>\n{{% endfor %}}{tools}"
    "{{% if add_generation_prompt %}}<|im_start|>assistant\n{{% endif %}}"
)
STREAMED = [chat("required"), responses("required"), messages({"type": "any"})]


@pytest.mark.parametrize(("path", "body"), STREAMED, ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("streams", [False, True])
def test_a_chat_format_without_forced_calls_is_refused_by_name(
    path: str, body: Any, streams: bool, tmp_path: Path
) -> None:
    train_tokenizer(["Hi"], 300, tmp_path)
    for tools, expected in (
        ("{{ tools | tojson }}", "tool call: expected a format"),
        ("", "tools: expected a chat temp"),
    ):
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE.format(tools=tools))
        renderer = load_renderer(tmp_path, "template")
        engine = says(said("A"), renderer=renderer)
        session = opened(engine, renderer=renderer)
        answer = asyncio.run(asked(session, path, {**body, "stream": streams}))
        assert answer.status_code == 400 and expected in answer.text and str(tmp_path) not in answer.text
        assert not engine.requests and not session.segments
    assert "messages" in path or answer.json()["error"]["param"] == "tools"


async def asked(session: Any, path: str, body: Any) -> httpx.Response:
    async with open_door(session) as door, httpx.AsyncClient(base_url=door.url) as client:
        client.headers["authorization"] = f"Bearer {door.key}"
        return await client.post(path, json=body)


REFUSED = [
    (chat("required", tools=[]), "tool_choice: expected a tool"),
    (
        chat({"type": "function", "function": {"name": "fly"}}),
        "tool_choice: expected the name of a tool of the request",
    ),
    (chat({"type": "custom", "custom": {"name": "fly"}}), "tool_choice: expected the name of a tool of the request"),
    (chat({"type": "custom", "custom": "add"}), "tool_choice.custom: expected a tool"),
    (chat({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}), "a tool that may be called"),
    (chat({"type": "allowed_tools", "allowed_tools": {"mode": "some", "tools": []}}), "tool_choice: expected"),
    (responses({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}), "expected the name of a tool"),
    (responses({"type": "function", "name": "fly"}), "tool_choice: expected a tool of the request"),
    (responses({"type": "function", "name": "add", "namespace": 3}), "tool_choice.namespace: expected a name"),
    (responses({"type": "web_search"}), "tool_choice: expected"),
    (messages({"type": "tool"}), "tool_choice.name: expected the name"),
    (messages({"type": "most"}), "tool_choice: expected auto"),
    (gemini("ANY", "fly"), "allowedFunctionNames: expected the name of a tool of the request"),
    (gemini("AUTO", "add"), "allowedFunctionNames: expected none where the mode is AUTO"),
]


@pytest.mark.parametrize(("request_", "text"), REFUSED)
def test_an_invalid_choice_is_refused(request_: tuple[str, Any], text: str) -> None:
    engine = says(said("A"))
    session = opened(engine)
    answer = asyncio.run(asked(session, *request_))
    assert answer.status_code == 400 and text in str(answer.json()), answer.text
    assert not engine.requests
