"""Responses through the vendor's own client: what it gets is what was sampled, and what it sends back continues
there."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import httpx
import openai
import pytest
from sessions import ADD, RENDERER, ids_agree, opened, said, says, with_openai

from sparring.gateway.server import Door
from sparring.testing.toy import toy_renderer
from sparring.types import Message

THINKING = toy_renderer(thinking=True)
FUNCTION = {"type": "function", **ADD["function"], "strict": False}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Change files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [{"type": "function", "name": "spawn", "parameters": {"type": "object", "properties": {}}}],
}


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def test_a_tool_loop_is_one_branch_of_sampled_ids() -> None:
    engine = says(
        said("I add.", ("add", {"a": 2, "b": 10000.0}), ("add", {"b": 4, "a": 3})), said("Both are 7."), said("Bye.")
    )
    session = opened(engine)

    async def talk(client: openai.AsyncOpenAI, door: Door) -> list[str]:
        history: list[Any] = [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Use tools."}]},
            user("Sums?"),
        ]
        values: Any = {"model": "policy", "instructions": "Be brief.", "tools": [FUNCTION], "store": False}
        first = await client.responses.create(input=history, **values)
        assert (first.status, [item.type for item in first.output]) == (
            "completed",
            ["message", "function_call", "function_call"],
        )
        assert first.usage is not None and first.usage.input_tokens == len(engine.requests[0].tokens)
        history += [item.model_dump(exclude_none=True) for item in first.output]
        history[-1]["arguments"] = history[-1]["arguments"].replace(": ", ":")
        calls = [item for item in first.output if item.type == "function_call"]
        for call in reversed(calls):
            output: Any = [{"type": "input_text", "text": f"answer to {call.call_id}"}]
            history.append({"type": "function_call_output", "call_id": call.call_id, "output": output})
        second = await client.responses.create(input=history, **values)
        history += [{"role": "assistant", "content": second.output_text}, user("Thanks.")]
        return [second.output_text, (await client.responses.create(input=history, **values)).output_text]

    assert with_openai(session, talk) == ["Both are 7.", "Bye."]
    assert [segment.parent for segment in session.segments] == [None, 0, 1, 2, 3, 4] and ids_agree(session, engine)
    prompt = RENDERER.decode(engine.requests[1].tokens)
    assert prompt.index("Be brief.") < prompt.index("Use tools.") < prompt.index("Sums?")
    assert prompt.index("call_0_0") < prompt.index("call_0_1"), "answers stand in the order of the calls"


def test_calls_interleaved_with_outputs_are_one_reply() -> None:
    engine = says(said("", ("add", {"a": 2, "b": 1}), ("add", {"a": 3, "b": 1})), said("Done."))
    session = opened(engine)

    async def talk(client: openai.AsyncOpenAI, door: Door) -> None:
        first = await client.responses.create(model="policy", input="Sums?", tools=[FUNCTION])
        history: list[Any] = [user("Sums?")]
        for call in first.output:
            history += [
                call.model_dump(exclude_none=True),
                {"type": "function_call_output", "call_id": call.call_id, "output": "3"},
            ]
        await client.responses.create(model="policy", input=history, tools=[FUNCTION])

    with_openai(session, talk)
    assert [segment.parent for segment in session.segments] == [None, 0, 1, 2] and ids_agree(session, engine)


def test_freeform_and_namespaced_tools_are_functions_for_the_model_and_keep_their_form_for_the_client() -> None:
    calls = (("apply_patch", {"input": "*** Begin"}), ("agents__spawn", {}), ("apply_patch", {"patch": 1}))
    engine = says(said("", *calls), said("Done."))
    session = opened(engine)

    async def talk(client: openai.AsyncOpenAI, door: Door) -> Any:
        history: list[Any] = [user("Patch.")]
        values: Any = {"model": "policy", "tools": [PATCH, AGENTS]}
        first = await client.responses.create(input=history, **values)
        for item in first.output:
            history.append(item.model_dump(exclude_none=True))
        for item in first.output:
            kind = "custom_tool_call_output" if item.type == "custom_tool_call" else "function_call_output"
            history.append({"type": kind, "call_id": item.call_id, "output": "done"})
        await client.responses.create(input=history, **values)
        return first.output

    patch, spawn, unreadable = with_openai(session, talk)
    assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "apply_patch", "*** Begin")
    assert (spawn.type, spawn.namespace, spawn.name, spawn.arguments) == ("function_call", "agents", "spawn", "{}")
    assert (unreadable.type, json.loads(unreadable.input)) == ("custom_tool_call", {"patch": 1})
    assert [segment.parent for segment in session.segments] == [None, 0, 1, 2] and ids_agree(session, engine)
    prompt = RENDERER.decode(engine.requests[0].tokens)
    assert "start: /.+/" in prompt and "agents__spawn" in prompt and "Other agents." in prompt


def test_a_stream_and_a_whole_answer_are_equal() -> None:
    reply = Message(
        role="assistant",
        content="Let me see.",
        reasoning="Hm.",
        tool_calls=said("", ("add", {"a": 1, "b": 2}), ("apply_patch", {"input": "*"})).tool_calls,
    )
    session = opened(says(reply, reply, renderer=THINKING), renderer=THINKING)

    async def talk(client: openai.AsyncOpenAI, door: Door) -> Any:
        request: Any = {
            "model": "policy",
            "input": "1 + 2?",
            "tools": [FUNCTION, PATCH],
            "include": ["reasoning.encrypted_content"],
        }
        whole = await client.responses.create(**request)
        async with client.responses.stream(**request) as stream:
            events = [event async for event in stream]
            return whole, events, await stream.get_final_response()

    whole, events, streamed = with_openai(session, talk)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    types = [event.type for event in events]
    assert types[:2] == ["response.created", "response.in_progress"] and types[-1] == "response.completed"
    for name in ("output_item.added", "content_part.added", "output_text.delta", "function_call_arguments.done"):
        assert f"response.{name}" in types
    assert "response.custom_tool_call_input.delta" in types and "response.reasoning_text.delta" in types
    own = {"id", "call_id", "encrypted_content", "parsed_arguments"}
    for one, other in zip(whole.output, streamed.output, strict=True):
        left, right = (item.model_dump(exclude=own, exclude_none=True) for item in (one, other))
        assert left == right
    assert whole.output[0].encrypted_content != streamed.output[0].encrypted_content, "each names its own reply"
    assert streamed.output_text == "Let me see." and streamed.output[0].content[0].text == "Hm."
    assert streamed.usage.output_tokens == len(session.segments[-1].tokens)


def test_a_clients_max_tokens_makes_the_response_incomplete() -> None:
    session = opened(says(said("A long answer indeed"), said("A long answer indeed")))

    async def talk(client: openai.AsyncOpenAI, door: Door) -> Any:
        cut = await client.responses.create(model="policy", input="Hi", max_output_tokens=2)
        async with client.responses.stream(model="policy", input="Hi", max_output_tokens=2) as stream:
            return cut, [event.type async for event in stream]

    cut, types = with_openai(session, talk)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert types[-1] == "response.incomplete" and session.limit is None


def test_the_text_format_is_a_constraint() -> None:
    engine = says(said('{"sum": 3}'))
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}

    async def talk(client: openai.AsyncOpenAI, door: Door) -> Any:
        text: Any = {"format": {"type": "json_schema", "name": "sum", "schema": schema}, "verbosity": "low"}
        include: Any = ["message.output_text.logprobs"]
        return await client.responses.create(model="policy", input="1 + 2?", text=text, include=include)

    session = opened(engine)
    answer = with_openai(session, talk)
    constraint = engine.requests[0].sampling.constraint
    assert constraint is not None and json.loads(constraint.source) == schema
    logprobs = answer.output[0].content[0].logprobs
    assert [token.logprob for token in logprobs] == list(session.segments[-1].logprobs or ())
    assert b"".join(bytes(token.bytes) for token in logprobs).decode().startswith('{"sum": 3}')


def test_a_websocket_is_refused_with_status_426() -> None:
    async def talk(client: openai.AsyncOpenAI, door: Door) -> httpx.Response:
        upgrade = {
            "authorization": f"Bearer {door.key}",
            "connection": "Upgrade",
            "upgrade": "websocket",
            "sec-websocket-version": "13",
            "sec-websocket-key": "c2l4dGVlbiBieXRlcyEhIQ==",
        }
        async with httpx.AsyncClient(base_url=door.url) as plain:
            return await plain.get("/v1/responses", headers=upgrade)

    answer = with_openai(opened(says()), talk)
    assert answer.status_code == 426 and "POST" in answer.json()["error"]["message"]


def test_a_response_is_continued_by_its_id() -> None:
    """Only the new items are sent: a fork from the same response too, and instructions that are sent again."""
    engine = says(said("", ("add", {"a": 1, "b": 2})), said("Three."), said("You are welcome."), said("Again."))
    session = opened(engine)

    async def talk(client: openai.AsyncOpenAI, door: Door) -> Any:
        values: Any = {"model": "policy", "instructions": "Be brief.", "tools": [FUNCTION], "store": True}
        first = await client.responses.create(input="1 + 2?", **values)
        (call,) = first.output
        output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "3"}]
        second = await client.responses.create(input=output, previous_response_id=first.id, **values)
        third = await client.responses.create(input="Thanks.", previous_response_id=second.id, **values)
        await client.responses.create(input="What?", previous_response_id=second.id, **values)
        return third

    assert with_openai(session, talk).output_text == "You are welcome."
    assert [segment.parent for segment in session.segments] == [None, 0, 1, 2, 3, 4, 3, 6]
    assert ids_agree(session, engine)


def test_a_conversation_without_sampling_is_continued_by_a_later_request() -> None:
    engine = says(said("A"))
    session = opened(engine)

    async def talk(client: openai.AsyncOpenAI, door: Door) -> Any:
        body: Any = {"model": "policy", "input": "Hi"}
        told = await client.responses.create(**body, extra_body={"generate": False})
        events = [e async for e in await client.responses.create(**body, stream=True, extra_body={"generate": False})]
        assert not engine.requests and session.segments == ()
        answer = await client.responses.create(model="policy", previous_response_id=told.id, input=[])
        return told, events, answer

    told, events, answer = with_openai(session, talk)
    assert (told.status, told.output, answer.output_text) == ("completed", [], "A")
    assert [event.type for event in events] == ["response.created", "response.in_progress", "response.completed"]
    assert "Hi" in RENDERER.decode(engine.requests[0].tokens)


def test_a_reference_is_replaced_by_its_item() -> None:
    reply = said("I add.", ("add", {"a": 2, "b": 10000.0}), ("add", {"b": 4, "a": 3}))
    reply = dataclasses.replace(reply, reasoning="So.")
    engine = says(reply, said("Both."), renderer=THINKING)
    session = opened(engine, renderer=THINKING)

    async def talk(client: openai.AsyncOpenAI, door: Door) -> Any:
        settings: Any = {"model": "policy", "tools": [FUNCTION]}
        first = await client.responses.create(input=[user("Sums?")], **settings)
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
        thoughts = first.usage.output_tokens_details.reasoning_tokens
        assert RENDERER.decode(session.segments[1].tokens[:thoughts]).endswith("So.\n</think>")
        references = [{"type": "item_reference", "id": item.id} for item in first.output]
        outputs = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "7"}
            for item in first.output
            if item.type == "function_call"
        ]
        history: Any = [user("Sums?"), *references, *outputs]
        second = await client.responses.create(input=history, **settings)
        assert second.output_text == "Both."
        wrong = [first.output[0].id.replace("rs_", "msg_"), first.output[1].id.split(".")[0] + ".9", "fc_x.1"]
        for id in wrong:
            bad: Any = [user("Sums?"), {"type": "item_reference", "id": id}, user("So?")]
            with pytest.raises(openai.BadRequestError, match="expected the id of an item of a reply under this key"):
                await client.responses.create(input=bad, **settings)

    with_openai(session, talk)
    parents = [segment.parent for segment in session.segments]
    assert parents == [None, *range(len(parents) - 1)] and ids_agree(session, engine)


def test_a_missing_thought_begins_no_branch() -> None:
    """openai-agents sends a reply back without the items of its reasoning, and under ids of its own."""
    reply = dataclasses.replace(said("I add.", ("add", {"a": 2, "b": 1e4})), reasoning="So.")
    engine = says(reply, said("Done."), renderer=THINKING)
    session = opened(engine, renderer=THINKING)

    async def talk(client: openai.AsyncOpenAI, door: Door) -> Any:
        settings: Any = {"model": "policy", "tools": [FUNCTION]}
        first = await client.responses.create(input=[user("Sums?")], **settings)
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
        text = {"role": "assistant", "content": first.output[1].content[0].text}
        call = {"type": "function_call", "call_id": "x1", "name": "add", "arguments": '{"b":10000,"a":2}'}
        output = {"type": "function_call_output", "call_id": "x1", "output": "10002"}
        await client.responses.create(input=[user("Sums?"), text, call, output], **settings)

    with_openai(session, talk)
    assert [segment.parent for segment in session.segments] == [None, 0, 1, 2] and ids_agree(session, engine)
