"""A call that does not parse, or has no arguments, comes back in each form of each dialect: that is the same reply, and
no branch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from sessions import ADD, RENDERER, ids_agree, opened
from suite import short_of

from sparring.gateway.server import open_door
from sparring.testing.scripted_engine import ScriptedEngine

FUNCTION = ADD["function"]
BROKEN = '<tool_call>\n{"name": "add", "arguments": {"a": 1,}\n</tool_call>'
NAMELESS = '<tool_call>\n{"arguments": {"a": 1}}\n</tool_call>'
WHOLE = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
REPLIES = [
    BROKEN,
    f"I add.\n{BROKEN}",
    f"{BROKEN}\n{BROKEN}",
    f"I add.\n{NAMELESS}\n{WHOLE}",
    f"{WHOLE}\n{BROKEN}",
    f"I add.\n{NAMELESS}\n{BROKEN}",
    "I add.\n" + BROKEN.removesuffix("</tool_call>"),
    *(WHOLE.replace("2}", f"{number}}}") for number in ("NaN", "[-Infinity]", "1e999", "-1E400")),
    WHOLE.replace("arguments", "parameters"),
]


def messages_turn(history: list[Any]) -> tuple[str, dict[str, Any]]:
    tools = [{"name": "add", "input_schema": FUNCTION["parameters"]}]
    body = {"model": "policy", "max_tokens": 200, "messages": history or [{"role": "user", "content": "Hi"}]}
    return "/v1/messages", {**body, "tools": tools}


def messages_next(answer: dict[str, Any]) -> list[Any]:
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "3"}
        for block in answer["content"]
        if block["type"] == "tool_use"
    ]
    return [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": answer["content"]},
        {"role": "user", "content": results or "That does not parse."},
    ]


def gemini_turn(history: list[Any]) -> tuple[str, dict[str, Any]]:
    body = {"contents": history or [{"role": "user", "parts": [{"text": "Hi"}]}]}
    return "/v1beta/models/policy:generateContent", {**body, "tools": [{"functionDeclarations": [FUNCTION]}]}


def gemini_next(answer: dict[str, Any]) -> list[Any]:
    reply = answer["candidates"][0]["content"]
    results = [
        {"functionResponse": {"id": call["id"], "name": call["name"], "response": {"output": "3"}}}
        for call in (part["functionCall"] for part in reply["parts"] if "functionCall" in part)
    ]
    return [
        {"role": "user", "parts": [{"text": "Hi"}]},
        reply,
        {"role": "user", "parts": results or [{"text": "That does not parse."}]},
    ]


def chat_turn(history: list[Any]) -> tuple[str, dict[str, Any]]:
    body = {"model": "policy", "messages": history or [{"role": "user", "content": "Hi"}], "tools": [ADD]}
    return "/v1/chat/completions", body


def chat_next(answer: dict[str, Any]) -> list[Any]:
    reply = answer["choices"][0]["message"]
    answers = [{"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in reply["tool_calls"]]
    return [{"role": "user", "content": "Hi"}, reply, *answers]


def responses_turn(history: list[Any]) -> tuple[str, dict[str, Any]]:
    body = {"model": "policy", "input": history or [{"role": "user", "content": "Hi"}]}
    return "/v1/responses", {**body, "tools": [{"type": "function", **FUNCTION}]}


def responses_next(answer: dict[str, Any]) -> list[Any]:
    outputs = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "3"}
        for item in answer["output"]
        if item["type"] == "function_call"
    ]
    return [{"role": "user", "content": "Hi"}, *answer["output"], *outputs]


DIALECTS = {
    "messages": (messages_turn, messages_next),
    "gemini": (gemini_turn, gemini_next),
    "chat": (chat_turn, chat_next),
    "responses": (responses_turn, responses_next),
}


def recorded(dialect: str, replies: list[str], *asks: Callable[[dict[str, Any]], list[Any]]) -> tuple[Any, Any, Any]:
    """Return the session and its engine behind requests whose histories are made of the answer before, and the first
    answer."""
    turn, _ = DIALECTS[dialect]
    script = iter([tuple(RENDERER.tokenizer.encode(f"{reply}<|im_end|>")) for reply in replies])
    engine = ScriptedEngine(lambda request: next(script))
    session = opened(engine)
    answers: list[dict[str, Any]] = [{}]

    async def main() -> None:
        async with open_door(session) as door, httpx.AsyncClient(base_url=door.url) as client:
            client.headers["authorization"] = f"Bearer {door.key}"
            for ask in asks:
                path, body = turn(ask(answers[-1]))
                answer = await client.post(path, json=body)
                assert answer.status_code == 200, answer.text
                answers.append(answer.json())

    asyncio.run(main())
    return session, engine, answers[1]


def begins(answer: dict[str, Any]) -> list[Any]:
    """A conversation without a history."""
    return []


@pytest.mark.parametrize("reply", REPLIES)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_malformed_call_is_recognised_when_it_comes_back(dialect: str, reply: str) -> None:
    session, engine, _ = recorded(dialect, [reply, "Bye."], begins, DIALECTS[dialect][1])
    assert any(call.arguments is None for call in session.segments[1].message.tool_calls)
    assert [segment.parent for segment in session.segments] == [None, 0, 1, 2] and ids_agree(session, engine)


def shown_in(answer: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return names and arguments of the calls of an answer."""
    if "content" in answer:
        return [(block["name"], block["input"]) for block in answer["content"] if block["type"] == "tool_use"]
    if "candidates" in answer:
        parts = answer["candidates"][0]["content"]["parts"]
        return [(p["functionCall"]["name"], p["functionCall"]["args"]) for p in parts if "functionCall" in p]
    if "choices" in answer:
        calls = [call["function"] for call in answer["choices"][0]["message"].get("tool_calls", ())]
    else:
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
    return [(call["name"], call["arguments"]) for call in calls]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_malformed_call_is_shown_with_its_name_and_sampled_text(dialect: str) -> None:
    _, _, answer = recorded(dialect, [f"I add.\n{BROKEN}"], begins)
    written = '{"name": "add", "arguments": {"a": 1,}'
    text = dialect in ("chat", "responses")
    assert shown_in(answer) == [("add", written if text else {"INVALID_JSON": written})]
    if dialect == "messages":
        assert answer["stop_reason"] == "tool_use", "its client answers it"


@pytest.mark.parametrize("dialect", ["messages", "gemini", "chat"])
def test_a_call_that_a_stop_string_cuts_is_text_without_the_string_whole_and_streamed(dialect: str) -> None:
    """The toy tokenizer has tokens of several characters; `: 2}}\n</` begins in a call and ends in its tag."""
    field = {"messages": "stop_sequences", "chat": "stop"}.get(dialect)
    for stop, left in (('"arg', '{"name": "add",'), (": 2}}\n</", '{"name": "add", "arguments": {"a": 1, "b"')):
        script = [tuple(RENDERER.tokenizer.encode(f"{WHOLE}\n{WHOLE.replace('2', '3')}<|im_end|>"))]
        session = opened(ScriptedEngine(lambda request: script[0]))
        path, body = DIALECTS[dialect][0]([])
        body |= {field: [stop]} if field else {"generationConfig": {"stopSequences": [stop]}}

        async def main() -> tuple[Any, str]:
            async with open_door(session) as door, httpx.AsyncClient(base_url=door.url) as client:
                client.headers["authorization"] = f"Bearer {door.key}"
                if field is None:
                    streamed = await client.post(path.replace("generate", "streamGenerate") + "?alt=sse", json=body)
                else:
                    streamed = await client.post(path, json={**body, "stream": True})
                return (await client.post(path, json=body)).json(), streamed.text

        answer, streamed = asyncio.run(main())
        assert shown_in(answer) == [] and text_in(answer) == left
        events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
        assert "".join(map(text_in, events)) == left and "tool_use" not in streamed and "functionCall" not in streamed
        assert [call.arguments for call in session.segments[-1].message.tool_calls] == [None]
        if dialect == "messages":
            assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", stop)


def text_in(answer: dict[str, Any]) -> str:
    """Return the text of an answer, or of an event of a streamed one."""
    if "content" in answer:
        return "".join(block["text"] for block in answer["content"])
    if "candidates" in answer:
        return "".join(part["text"] for part in answer["candidates"][0]["content"].get("parts", ()))
    if "choices" in answer:
        choice = (answer["choices"] or [{}])[0]
        return choice.get("message", choice.get("delta", {})).get("content") or ""
    return answer.get("delta", {}).get("text", "")


CALLS_NOTHING = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
LEFT_OUT = object()
BLANK: dict[str, tuple[str, list[Any]]] = {
    "chat": ("arguments", ["{}", "", " ", None, LEFT_OUT]),
    "responses": ("arguments", ["{}", "", " ", None, LEFT_OUT]),
    "messages": ("input", [{}]),
    "gemini": ("args", [{}, None, LEFT_OUT]),
}
"""The field of a call's arguments, and all forms in which it may say that there are none."""


def called_with(history: Any, field: str, form: Any) -> Any:
    """A history whose calls have their arguments in this form, under ids of the client's own."""
    if isinstance(history, list):
        return [called_with(item, field, form) for item in history]
    if not isinstance(history, dict):
        return f"their_{history}" if str(history).startswith("call_") else history
    made = {key: called_with(item, field, form) for key, item in history.items()}
    made |= {field: form} if field in made else {}
    return {key: item for key, item in made.items() if item is not LEFT_OUT}


@pytest.mark.parametrize("dialect", short_of(DIALECTS, ["responses", "gemini"]))
def test_a_call_without_arguments_is_equal_in_all_forms(dialect: str) -> None:
    field, forms = BLANK[dialect]
    following = DIALECTS[dialect][1]
    for form in forms:

        def back(answer, form=form):
            return called_with(following(answer), field, form)

        session, engine, answer = recorded(dialect, [CALLS_NOTHING, "Bye."], begins, back)
        assert [segment.parent for segment in session.segments] == [None, 0, 1, 2] and ids_agree(session, engine), form
        told = [called_with(following(answer), field, one) for one in (form, *forms)]
        session, engine, _ = recorded(dialect, ["Bye."] * len(told), *(lambda _, t=t: t for t in told))
        assert [segment.parent for segment in session.segments] == [None, *[0] * len(told)], "and where none is ours"
