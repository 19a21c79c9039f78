"""Gemini: what a client gets is what was sampled, and what it sends back continues there."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from sessions import RENDERER, ids_agree, opened, said, says, through

from sparring.gateway.dialects.gemini_contents import json_schema
from sparring.gateway.dialects.handles import handle_of
from sparring.gateway.server import Door, open_door
from sparring.testing.toy import toy_renderer
from sparring.types import Message

THINKING = toy_renderer(thinking=True)
UPPER = {"type": "OBJECT", "properties": {"a": {"type": "NUMBER"}, "b": {"type": "NUMBER"}}}
TOOL = {"functionDeclarations": [{"name": "add", "description": "Add two numbers.", "parameters": UPPER}]}
PATH = "/v1beta/models/policy:"


def user(*texts: str) -> dict[str, Any]:
    return {"role": "user", "parts": [{"text": text} for text in texts]}


def request(*contents: Any, **values: Any) -> dict[str, Any]:
    return {"contents": list(contents), "tools": [TOOL], **values}


@pytest.mark.parametrize("ids", ["ours", "its own", "none"])
def test_requests_of_gemini_cli_are_one_branch_of_sampled_ids(ids: str) -> None:
    """Thoughts dropped, call ids of its own or none, the signature sent back, the answer that came first sent first."""
    reply = Message(
        role="assistant",
        content="I add.",
        reasoning="Hm.",
        tool_calls=said("", ("add", {"a": 2, "b": 10000.0}), ("sub", {"a": 3})).tool_calls,
    )
    engine = says(reply, Message(role="assistant", content="Done.", reasoning="So."), renderer=THINKING)
    session = opened(engine, renderer=THINKING)

    async def talk(client: httpx.AsyncClient, door: Door) -> Any:
        system = {"systemInstruction": {"role": "user", "parts": [{"text": "Be brief."}]}}
        first = (await client.post(PATH + "generateContent", json=request(user("Sums?"), **system))).json()
        (candidate,) = first["candidates"]
        assert candidate["finishReason"] == "STOP" and candidate["content"]["parts"][0] == {
            "text": "Hm.",
            "thought": True,
        }
        parts = [part for part in candidate["content"]["parts"] if not part.get("thought")]
        answers = []
        for number, part in enumerate(parts[1:]):
            call = part["functionCall"]
            call["args"] = {name: int(value) for name, value in call["args"].items()}
            answer = {"name": call["name"], "response": {"output": f"answer {number}"}}
            if ids == "none":
                del call["id"]
            else:
                call["id"] = answer["id"] = call["id"] if ids == "ours" else f"{call['name']}-{number}"
            answers.append({"functionResponse": answer})
        history = [user("Sums?"), {"role": "model", "parts": parts}, {"role": "user", "parts": answers[::-1]}]
        second = (await client.post(PATH + "generateContent", json=request(*history, **system))).json()
        return first, second

    first, second = through(session, talk)
    last = second["candidates"][0]["content"]["parts"][-1]
    assert last == {"text": "Done.", "thoughtSignature": handle_of(second["responseId"])}
    assert [segment.parent for segment in session.segments] == [None, 0, 1, 2] and ids_agree(session, engine)
    usage = first["usageMetadata"]
    assert usage["promptTokenCount"] == len(engine.requests[0].tokens)
    sampled, thoughts = session.segments[1].tokens, usage["thoughtsTokenCount"]
    assert RENDERER.decode(sampled[:thoughts]).endswith("Hm.\n</think>")
    assert usage["candidatesTokenCount"] == len(sampled) - thoughts
    assert usage["totalTokenCount"] == usage["promptTokenCount"] + len(sampled)
    prompt = RENDERER.decode(engine.requests[1].tokens)
    assert prompt.index("answer 0") < prompt.index("answer 1") and '"type": "number"' in prompt


def test_a_stream_and_a_whole_answer_are_equal() -> None:
    reply = said("Let me see.", ("add", {"a": 1, "b": 2}))
    session = opened(says(reply, reply))

    async def talk(client: httpx.AsyncClient, door: Door) -> Any:
        whole = (await client.post(PATH + "generateContent", json=request(user("1 + 2?")))).json()
        streamed = await client.post(PATH + "streamGenerateContent?alt=sse", json=request(user("1 + 2?")))
        return whole, streamed

    whole, streamed = through(session, talk)
    chunks = [json.loads(event.removeprefix("data: ")) for event in streamed.text.strip().split("\r\n\r\n")]
    parts = [part for chunk in chunks for part in chunk["candidates"][0]["content"]["parts"]]
    text, call = whole["candidates"][0]["content"]["parts"]
    assert "".join(part.get("text", "") for part in parts) == text["text"] == "Let me see."
    (called,) = (part["functionCall"] for part in parts if "functionCall" in part)
    assert called["args"] == call["functionCall"]["args"] == {"a": 1, "b": 2}
    reasons = [chunk["candidates"][0].get("finishReason") for chunk in chunks]
    assert reasons[-1] == "STOP" and not any(reasons[:-1])
    assert chunks[-1]["usageMetadata"]["candidatesTokenCount"] == len(session.segments[-1].tokens)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("meant", [0, 1])
def test_a_handle_on_text_selects_one_of_two_equal_replies(meant: int, streamed: bool) -> None:
    engine = says(said("Yes."), said("Yes."), said("Good."))
    session = opened(engine)

    async def talk(client: httpx.AsyncClient, door: Door) -> list[Any]:
        histories = []
        for _ in range(2):
            if streamed:
                answer = await client.post(PATH + "streamGenerateContent?alt=sse", json=request(user("Well?")))
                chunks = [json.loads(event.removeprefix("data: ")) for event in answer.text.strip().split("\r\n\r\n")]
            else:
                chunks = [(await client.post(PATH + "generateContent", json=request(user("Well?")))).json()]
            parts = [part for chunk in chunks for part in chunk["candidates"][0]["content"]["parts"]]
            assert [part for part in parts if "thoughtSignature" in part] == parts[-1:]
            histories.append([user("Well?"), {"role": "model", "parts": parts}, user("Go on.")])
        await client.post(PATH + "generateContent", json=request(*histories[meant]))
        return histories

    first, second = through(session, talk)
    texts = ["".join(part["text"] for part in history[1]["parts"]) for history in (first, second)]
    assert texts == ["Yes.", "Yes."] and first != second
    assert [segment.source for segment in session.segments] == ["prompt", "policy", "policy", "prompt", "policy"]
    assert session.segments[3].parent == 1 + meant and ids_agree(session, engine)


def test_a_stream_is_a_json_array_unless_the_client_asks_for_events() -> None:
    """Each element of the array is the chunk that an event would have had."""
    reply = said("Let me see.", ("add", {"a": 1, "b": 2}))

    async def talk(client: httpx.AsyncClient, door: Door) -> Any:
        body = request(user("1 + 2?"))
        events = await client.post(PATH + "streamGenerateContent?alt=sse", json=body)
        return events, [await client.post(PATH + f"streamGenerateContent{end}", json=body) for end in ("", "?alt=json")]

    events, arrays = through(opened(says(reply, reply, reply)), talk)
    chunks = [json.loads(event.removeprefix("data: ")) for event in events.text.strip().split("\r\n\r\n")]
    assert len(chunks) > 1 and events.headers["content-type"].startswith("text/event-stream")
    for array in arrays:
        elements = array.json()
        assert array.headers["content-type"].startswith("application/json")
        assert array.text.startswith('[{"candidates"') and array.text.endswith("}]")
        said_twice = [[each["candidates"] for each in answer] for answer in (elements, chunks)]
        assert without_names(said_twice[0]) == without_names(said_twice[1])


def without_names(value: Any) -> Any:
    """Return an answer without what names its reply."""
    if isinstance(value, list):
        return [without_names(each) for each in value]
    if isinstance(value, dict):
        return {key: without_names(each) for key, each in value.items() if key not in ("thoughtSignature", "id")}
    return value


def test_generation_settings_are_obeyed() -> None:
    schema = {"type": "OBJECT", "properties": {"sum": {"type": "INTEGER", "nullable": True}}, "required": ["sum"]}
    engine = says(said("A long answer indeed"), said('{"sum": 3}'), said("A"), said("B"))
    session = opened(engine)

    async def talk(client: httpx.AsyncClient, door: Door) -> list[Any]:
        settings: list[Any] = [
            {"maxOutputTokens": 2, "temperature": 0, "thinkingConfig": {"thinkingBudget": 0}},
            {"responseMimeType": "application/json", "responseSchema": schema},
            {"candidateCount": 2, "responseLogprobs": True},
        ]
        bodies = [request(user("Hi"), generationConfig=config) for config in settings]
        return [await client.post(PATH + "generateContent", json=body) for body in bodies]

    cut, formed, several = through(session, talk)
    assert cut.json()["candidates"][0]["finishReason"] == "MAX_TOKENS" and session.limit is None
    assert cut.headers["x-sparring-noted"] == "generationConfig.temperature, generationConfig.thinkingConfig"
    constraint = engine.requests[1].sampling.constraint
    assert constraint is not None and json.loads(constraint.source)["properties"] == {
        "sum": {"type": ["integer", "null"]}
    }
    candidates = several.json()["candidates"]
    assert sorted(candidate["content"]["parts"][0]["text"] for candidate in candidates) == ["A", "B"]
    assert all(candidate["logprobsResult"]["chosenCandidates"] for candidate in candidates)
    assert [part["text"] for part in formed.json()["candidates"][0]["content"]["parts"]] == ['{"sum": 3}']


def test_tokens_are_counted_and_models_are_listed() -> None:
    engine = says(said("A"))

    async def talk(client: httpx.AsyncClient, door: Door) -> Any:
        body = request(user("Hi"))
        counted = [
            (await client.post(PATH + "countTokens", json=each)).json()["totalTokens"]
            for each in (body, {"generateContentRequest": {"model": "models/policy", **body}})
        ]
        await client.post(PATH + "generateContent", json=body)
        models = [(await client.get(path)).json() for path in ("/v1beta/models", "/v1beta/models/policy")]
        return counted, models, await client.get("/v1beta/models/gemini-9")

    counted, (listed, shown), unknown = through(opened(engine), talk)
    assert counted == [len(engine.requests[0].tokens)] * 2
    assert listed == {"models": [shown]} and shown["name"] == "models/policy"
    assert unknown.status_code == 404 and unknown.json()["error"]["status"] == "NOT_FOUND"


@pytest.mark.extra
def test_the_vendors_client_reads_every_answer() -> None:
    from google import genai
    from google.genai import errors, types

    reply = said("Let me see.", ("add", {"a": 1, "b": 2}))
    session = opened(says(reply, reply, said("Three.")))
    number = types.Schema(type=types.Type.NUMBER)
    parameters = types.Schema(type=types.Type.OBJECT, properties={"a": number, "b": number})
    declared = types.FunctionDeclaration(name="add", description="Add two numbers.", parameters=parameters)
    config = types.GenerateContentConfig(
        system_instruction="Be brief.",
        tools=[types.Tool(function_declarations=[declared])],
        automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True),
        max_output_tokens=200,
        temperature=1.0,
        thinking_config=types.ThinkingConfig(include_thoughts=True),
    )

    async def main() -> Any:
        async with open_door(session) as door:
            client = genai.Client(api_key=door.key, http_options=types.HttpOptions(base_url=door.url))
            models = client.aio.models
            history: list[Any] = [types.Content(role="user", parts=[types.Part(text="1 + 2?")])]
            chunks = [
                chunk
                async for chunk in await models.generate_content_stream(model="policy", contents=history, config=config)
            ]
            whole = await models.generate_content(model="policy", contents=history, config=config)
            history.append(whole.candidates[0].content)
            (call,) = whole.function_calls
            answer = types.Part.from_function_response(name=call.name, response={"result": "3"})
            history.append(types.Content(role="user", parts=[answer]))
            last = await models.generate_content(model="policy", contents=history, config=config)
            count = await models.count_tokens(model="policy", contents="Hi")
            with pytest.raises(errors.ClientError, match="expected a message to reply to"):
                await models.generate_content(model="policy", contents=history[:2], config=config)
            return whole, chunks, last, count, [model.name async for model in await models.list()]

    whole, chunks, last, count, models = asyncio.run(main())
    assert whole.text == "Let me see." and whole.function_calls[0].args == {"a": 1, "b": 2}
    assert "".join(chunk.text or "" for chunk in chunks) == "Let me see."
    assert last.text == "Three." and count.total_tokens > 0 and models == ["models/policy"]
    assert [segment.parent for segment in session.segments] == [None, 0, 0, 2, 3]


def test_schemas_in_googles_spelling_are_json_schemas_at_every_depth() -> None:
    text = {"type": "STRING", "nullable": True, "enum": ["x"]}
    read = {"type": ["string", "null"], "enum": ["x", None]}
    for schema, expected in (
        ({"type": "OBJECT", "additionalProperties": text}, {"type": "object", "additionalProperties": read}),
        ({"anyOf": [{"type": ["STRING", "NULL"]}]}, {"anyOf": [{"type": ["string", "null"]}]}),
        ({"anyOf": [text], "nullable": True}, {"anyOf": [read, {"type": "null"}]}),
        ({"$ref": "#/a", "nullable": True}, {"anyOf": [{"$ref": "#/a"}, {"type": "null"}]}),
        ({"ref": "#/defs/P", "defs": {"P": text}}, {"$ref": "#/defs/P", "defs": {"P": read}}),
        (
            {"properties": {"type": text, "nullable": {"type": "BOOLEAN"}}},
            {"properties": {"type": read, "nullable": {"type": "boolean"}}},
        ),
        (
            {"type": "ARRAY", "minItems": "3", "prefixItems": [text]},
            {"type": "array", "minItems": 3, "prefixItems": [read]},
        ),
        ({"nullable": True}, {}),
    ):
        assert json_schema(schema, "schema") == expected
