"""Anthropic's Messages: what a client gets is what was sampled, and what it sends back continues there."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx
import pytest
from sessions import ADD, RENDERER, ids_agree, opened, said, says, through

from sparring.gateway.dialects.handles import reply_named
from sparring.gateway.server import Door, open_door
from sparring.testing.toy import toy_renderer
from sparring.types import Message

THINKING = toy_renderer(thinking=True)
TOOL = {
    "name": "add",
    "description": "Add two numbers.",
    "input_schema": ADD["function"]["parameters"],
}


def request(*messages: Any, **values: Any) -> dict[str, Any]:
    return {"model": "policy", "max_tokens": 200, "messages": list(messages), "tools": [TOOL], **values}


def test_requests_of_claude_code_are_one_branch_of_sampled_ids() -> None:
    """Text as string or blocks, moved cache marks, a billing block that changes, answers in the order in which they
    came, numbers as JavaScript writes them, a system message in the middle."""
    engine = says(
        said("I add.", ("add", {"a": 2, "b": 10000.0}), ("add", {"a": 3, "b": 4})), said("Done."), said("Bye.")
    )
    session = opened(engine)

    async def talk(client: httpx.AsyncClient, door: Door) -> list[Any]:
        marked = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
        billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cc_is_subagent=true;"}
        asks: Any = {
            "role": "user",
            "content": [{"type": "text", "text": "Sums?", "cache_control": {"type": "ephemeral"}}],
        }
        first = (await client.post("/v1/messages", json=request(asks, system=[billing, marked]))).json()
        assert first["stop_reason"] == "tool_use" and [b["type"] for b in first["content"]] == [
            "text",
            "tool_use",
            "tool_use",
        ]
        calls = [block for block in first["content"] if block["type"] == "tool_use"]
        for call in calls:
            call["input"] = {name: int(value) for name, value in reversed(call["input"].items())}
        answers: Any = {
            "role": "user",
            "content": [
                *[
                    {
                        "type": "tool_result",
                        "tool_use_id": call["id"],
                        "content": [{"type": "text", "text": call["id"]}],
                    }
                    for call in reversed(calls)
                ],
                {"type": "text", "text": "<system-reminder>Go on.</system-reminder>"},
            ],
        }
        history = [{"role": "user", "content": "Sums?"}, {"role": "assistant", "content": first["content"]}, answers]
        plain = {"type": "text", "text": "Be brief."}
        second = (await client.post("/v1/messages", json=request(*history, system=[plain]))).json()
        history += [
            {"role": "assistant", "content": second["content"][0]["text"]},
            {"role": "system", "content": "The user is away."},
            {"role": "user", "content": "Thanks."},
        ]
        third = (await client.post("/v1/messages", json=request(*history, system="Be brief."))).json()
        return [first, second, third]

    _first, second, third = through(session, talk)
    assert (second["stop_reason"], third["content"]) == ("end_turn", [{"type": "text", "text": "Bye."}])
    assert [segment.parent for segment in session.segments] == [None, 0, 1, 2, 3, 4] and ids_agree(session, engine)
    prompt = RENDERER.decode(engine.requests[1].tokens)
    assert prompt.index("call_0_0") < prompt.index("call_0_1") and "billing" not in prompt
    usage = second["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(engine.requests[1].tokens)


def events_of(text: str) -> list[tuple[str, Any]]:
    pairs = [event.split("\n") for event in text.strip().split("\n\n")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in pairs]


def test_a_stream_and_a_whole_answer_are_equal() -> None:
    reply = Message(role="assistant", content="Let me see.", tool_calls=said("", ("add", {"a": 1, "b": 2})).tool_calls)

    async def talk(client: httpx.AsyncClient, door: Door) -> Any:
        asks = {"role": "user", "content": "1 + 2?"}
        whole = (await client.post("/v1/messages", json=request(asks))).json()
        return whole, (await client.post("/v1/messages", json=request(asks, stream=True))).text

    whole, text = through(opened(says(reply, reply)), talk)
    events = events_of(text)
    assert all(name == data["type"] for name, data in events)
    names = [name for name, _ in events]
    assert names[0] == "message_start" and names[-2:] == ["message_delta", "message_stop"]
    starts = [data["content_block"] for name, data in events if name == "content_block_start"]
    deltas = [data["delta"] for name, data in events if name == "content_block_delta"]
    assert [block["type"] for block in starts] == [block["type"] for block in whole["content"]] == ["text", "tool_use"]
    texts = [delta["text"] for delta in deltas[:-1]]
    assert "".join(texts) == whole["content"][0]["text"] == "Let me see." and len(texts) > 1
    assert json.loads(deltas[-1]["partial_json"]) == whole["content"][1]["input"] == {"a": 1, "b": 2}
    assert events[-2][1]["delta"]["stop_reason"] == whole["stop_reason"] == "tool_use"


def test_counted_tokens_are_the_tokens_of_the_prompt() -> None:
    engine = says(said("A"))
    session = opened(engine)

    async def talk(client: httpx.AsyncClient, door: Door) -> Any:
        body = request({"role": "user", "content": "Hi"})
        counted = (await client.post("/v1/messages/count_tokens", json=body)).json()
        await client.post("/v1/messages", json=body)
        return counted["input_tokens"]

    assert through(session, talk) == len(engine.requests[0].tokens)


LATER = {**TOOL, "name": "multiply", "defer_loading": True}
LOADED: list[Any] = [
    {"role": "user", "content": "2 * 3?"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "call_0_0", "name": "add", "input": {"find": "*"}}]},
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "call_0_0",
                "content": [{"type": "tool_reference", "tool_name": "multiply"}],
            }
        ],
    },
]


def test_a_deferred_tool_enters_the_prompt_when_an_answer_loads_it() -> None:
    """claude-code's tool search: the loaded tools stand in the middle of the list of the next request."""
    engine = says(said("", ("add", {"find": "*"})), said("", ("multiply", {"a": 2, "b": 3})), said("6"))
    session = opened(engine)

    async def talk(client: httpx.AsyncClient, door: Door) -> None:
        history: list[Any] = LOADED[:1]
        for tools in ([TOOL], [LATER, TOOL], [LATER, TOOL]):
            answer = (await client.post("/v1/messages", json=request(*history, tools=tools))).json()
            calls = [block for block in answer["content"] if block["type"] == "tool_use"]
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": call["id"],
                    "content": [{"type": "tool_reference", "tool_name": "multiply"}] if call["name"] == "add" else "6",
                }
                for call in calls
            ]
            history = [
                *history,
                {"role": "assistant", "content": answer["content"]},
                {"role": "user", "content": results},
            ]

    through(session, talk)
    assert [segment.parent for segment in session.segments] == [None, 0, 1, 2, 3, 4], "loading is no fork"
    assert ids_agree(session, engine)
    first, second, _ = (RENDERER.decode(request.tokens) for request in engine.requests)
    assert "multiply" not in first and second.count('{"name": "multiply"') == 1
    assert second.index('{"name": "multiply"') > second.index("2 * 3?")


def test_a_stop_sequence_ends_the_reply_and_is_not_in_it() -> None:
    async def talk(client: httpx.AsyncClient, door: Door) -> Any:
        body = request({"role": "user", "content": "Count."}, stop_sequences=["three", "two"])
        whole = (await client.post("/v1/messages", json=body)).json()
        events = events_of((await client.post("/v1/messages", json={**body, "stream": True})).text)
        history = [*body["messages"], {"role": "assistant", "content": whole["content"]}]
        await client.post("/v1/messages", json=request(*history, {"role": "user", "content": "Go on."}))
        return whole, events

    engine = says(said("One, two, three."), said("One, two, three."), said("Four."))
    session = opened(engine)
    whole, events = through(session, talk)
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "two")
    assert whole["content"] == [{"type": "text", "text": "One, "}]
    assert events[-2][1]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "two"}
    texts = [data["delta"]["text"] for name, data in events if name == "content_block_delta"]
    assert "".join(texts) == "One, "
    assert len({segment.parent for segment in session.segments}) == len(session.segments) - 1 and ids_agree(
        session, engine
    ), "what was left out is no edit"


def test_thoughts_are_signed_with_the_handle_of_their_reply() -> None:
    reply = Message(role="assistant", content="3", reasoning="Hm.")
    session = opened(says(reply, reply, renderer=THINKING), renderer=THINKING)

    async def talk(client: httpx.AsyncClient, door: Door) -> Any:
        body = request({"role": "user", "content": "1 + 2?"})
        whole = (await client.post("/v1/messages", json=body)).json()
        return whole, events_of((await client.post("/v1/messages", json={**body, "stream": True})).text)

    whole, events = through(session, talk)
    (signature,) = (data["delta"]["signature"] for _, data in events if "signature" in data.get("delta", {}))
    signatures = [whole["content"][0]["signature"], signature]
    assert [reply_named(text) for text in signatures] == [whole["id"][4:], events[0][1]["message"]["id"][4:]]
    assert len(set(signatures)) == 2
    sampled = session.segments[1].tokens
    for usage in (whole["usage"], events[-2][1]["usage"]):
        thoughts = usage["output_tokens_details"]["thinking_tokens"]
        assert RENDERER.decode(sampled[:thoughts]).endswith("Hm.\n</think>") and usage["output_tokens"] == len(sampled)


def test_structured_output_is_a_constraint() -> None:
    engine = says(said('{"sum": 3}'))
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}

    async def talk(client: httpx.AsyncClient, door: Door) -> Any:
        config = {"effort": "low", "format": {"type": "json_schema", "schema": schema}}
        return await client.post(
            "/v1/messages",
            json=request({"role": "user", "content": "1 + 2?"}, output_config=config, temperature=1),
            headers={"anthropic-beta": "some-beta-2026-01-01"},
        )

    answer = through(opened(engine), talk)
    constraint = engine.requests[0].sampling.constraint
    assert constraint is not None and json.loads(constraint.source) == schema
    assert answer.headers["x-sparring-noted"] == "temperature, anthropic-beta"


def test_a_prompt_that_is_too_long_gets_the_vendors_message() -> None:
    """claude-code reads both numbers, to know how much it has to leave out."""

    async def talk(client: httpx.AsyncClient, door: Door) -> Any:
        return (await client.post("/v1/messages", json=request({"role": "user", "content": "again " * 4000}))).json()

    text = through(opened(says()), talk)["error"]["message"]
    assert re.fullmatch(r"prompt is too long: \d+ tokens > \d+ maximum", text), text


def test_models_are_named_for_both_vendors() -> None:
    async def talk(client: httpx.AsyncClient, door: Door) -> Any:
        return (await client.get("/v1/models")).json()

    (model,) = through(opened(says()), talk)["data"]
    assert (model["id"], model["object"], model["type"]) == ("policy", "model", "model")


@pytest.mark.extra
def test_the_vendors_client_reads_every_answer() -> None:
    import anthropic

    reply = said("Let me see.", ("add", {"a": 1, "b": 2}))
    session = opened(says(reply, reply, said("Three.")))

    async def main() -> Any:
        async with open_door(session) as door:
            async with anthropic.AsyncAnthropic(base_url=door.url, api_key=door.key, max_retries=0) as client:
                values: Any = {"model": "policy", "max_tokens": 100, "tools": [TOOL]}
                history: list[Any] = [{"role": "user", "content": "1 + 2?"}]
                whole = await client.messages.create(messages=history, **values)
                async with client.messages.stream(messages=history, **values) as stream:
                    streamed = await stream.get_final_message()
                call = streamed.content[-1]
                history += [
                    {"role": "assistant", "content": [block.model_dump() for block in streamed.content]},
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "3"}]},
                ]
                last = await client.messages.create(messages=history, **values)
                count = await client.messages.count_tokens(messages=history, model="policy", tools=[TOOL])
                with pytest.raises(anthropic.BadRequestError, match="expected a message to reply to"):
                    await client.messages.create(messages=[], **values)
                return whole, streamed, last, count, [model.id async for model in client.models.list()]

    whole, streamed, last, count, models = asyncio.run(main())
    assert [block.type for block in whole.content] == [block.type for block in streamed.content] == ["text", "tool_use"]
    assert streamed.content[1].input == {"a": 1, "b": 2} and streamed.stop_reason == "tool_use"
    assert last.content[0].text == "Three." and count.input_tokens > 0 and models == ["policy"]
    assert [segment.parent for segment in session.segments] == [None, 0, 0, 2, 3]
