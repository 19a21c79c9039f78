"""Chat completions through the vendor's own client: what it gets is what was sampled, and what it sends back continues
there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageCustomToolCall, ChatCompletionMessageFunctionToolCall
from sessions import ADD, RENDERER, ids_agree, opened, said, says, with_openai

from sparring.errors import EngineError
from sparring.gateway.server import Door, open_door
from sparring.generation import Completion, Delta, GenerateRequest
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import toy_renderer

PATCH: Any = {
    "type": "custom",
    "custom": {
        "name": "apply_patch",
        "description": "Patch files.",
        "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /.+/"}},
    },
}


def test_freeform_tools_are_functions_for_the_model_and_freeform_for_the_client() -> None:
    calls = (("apply_patch", {"input": "*** Begin"}), ("add", {"a": 1}), ("apply_patch", {"patch": 1}))
    engine = says(said("", *calls), said("Done."), said("", *calls))
    session = opened(engine)

    async def talk(client: openai.AsyncOpenAI, door: Door) -> Any:
        messages: list[Any] = [{"role": "user", "content": "Patch."}]
        values: Any = {"model": "policy", "tools": [PATCH, ADD]}
        first = (await client.chat.completions.create(messages=messages, **values)).choices[0].message
        messages.append(first.model_dump(exclude_none=True))
        for call in reversed(first.tool_calls or []):
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "done"})
        await client.chat.completions.create(messages=messages, **values)
        stream = await client.chat.completions.create(messages=messages[:1], stream=True, **values)
        deltas = [chunk.choices[0].delta async for chunk in stream]
        return first.tool_calls, [call.model_dump() for delta in deltas for call in delta.tool_calls or []]

    (patch, add, unreadable), streamed = with_openai(session, talk)
    assert (patch.type, patch.custom.name, patch.custom.input) == ("custom", "apply_patch", "*** Begin")
    assert (add.type, json.loads(add.function.arguments)) == ("function", {"a": 1})
    assert (unreadable.type, json.loads(unreadable.custom.input)) == ("custom", {"patch": 1})
    whole = [ChatCompletionMessageCustomToolCall, ChatCompletionMessageFunctionToolCall]
    assert [type(call) for call in (patch, add, unreadable)] == [*whole, whole[0]]
    assert [call["type"] for call in streamed] == ["custom", "function", "custom"]
    texts = [patch.custom.model_dump(), None, unreadable.custom.model_dump()]
    assert [call.get("custom") for call in streamed] == texts
    assert [segment.parent for segment in session.segments] == [None, 0, 1, 2, 0] and ids_agree(session, engine)
    prompt = RENDERER.decode(engine.requests[0].tokens)
    assert "start: /.+/" in prompt and "apply_patch" in prompt


def test_a_plain_tool_loop_is_one_branch_of_sampled_ids() -> None:
    engine = says(said("I add.", ("add", {"a": 2, "b": 10000.0}), ("add", {"b": 4, "a": 3})), said("Both are 7."))
    session = opened(engine)

    async def talk(client: openai.AsyncOpenAI, door: Door) -> str:
        messages: list[Any] = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "2 + 10000 and 3 + 4?"},
        ]
        first = await client.chat.completions.create(model="policy", messages=messages, tools=[ADD])
        choice = first.choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.content == "I add."
        assert first.usage is not None and first.usage.prompt_tokens == len(engine.requests[0].tokens)
        calls = choice.message.tool_calls or []
        messages.append(choice.message.model_dump(exclude_none=True))
        # a client in JavaScript writes the numbers anew, and the answer that came first is sent first
        for call in messages[-1]["tool_calls"]:
            call["function"]["arguments"] = call["function"]["arguments"].replace("10000.0", "10000")
        for call in reversed(calls):
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"answer to {call.id}"})
        second = await client.chat.completions.create(model="policy", messages=messages, tools=[ADD])
        assert second.choices[0].finish_reason == "stop"
        return second.choices[0].message.content or ""

    assert with_openai(session, talk) == "Both are 7."
    assert [segment.parent for segment in session.segments] == [None, 0, 1, 2]
    assert ids_agree(session, engine)
    prompt = RENDERER.decode(engine.requests[1].tokens)
    assert prompt.index("call_0_0") < prompt.index("call_0_1"), "answers stand in the order of the calls"


def test_a_stream_and_a_whole_answer_are_equal() -> None:
    reply = said("Let me see.", ("add", {"a": 1, "b": 2}))

    async def talk(client: openai.AsyncOpenAI, door: Door) -> Any:
        request: Any = {"model": "policy", "messages": [{"role": "user", "content": "1 + 2?"}], "tools": [ADD]}
        whole = await client.chat.completions.create(**request)
        async with client.chat.completions.stream(**request) as stream:
            streamed = await stream.get_final_completion()
        usage = [
            chunk.usage
            async for chunk in await client.chat.completions.create(
                **request, stream=True, stream_options={"include_usage": True}
            )
        ]
        return whole, streamed, usage

    session = opened(says(reply, reply, reply))
    whole, streamed, usage = with_openai(session, talk)
    assert streamed.choices[0].message.content == whole.choices[0].message.content == "Let me see."
    calls = [answer.choices[0].message.tool_calls[0].function for answer in (whole, streamed)]
    assert calls[0].arguments == calls[1].arguments == '{"a": 1, "b": 2}'
    assert streamed.choices[0].finish_reason == "tool_calls"
    assert usage[-1].completion_tokens == len(session.segments[-1].tokens) and usage[:-1] == [None] * len(usage[:-1])


def test_several_samples_have_their_log_probabilities() -> None:
    session = opened(says(said("A"), said("B"), said("C")))

    async def talk(client: openai.AsyncOpenAI, door: Door) -> Any:
        return await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "Name a letter."}], n=3, logprobs=True
        )

    answer = with_openai(session, talk)
    assert sorted(choice.message.content for choice in answer.choices) == ["A", "B", "C"]
    sampled = {s.message.content: s for s in session.segments if s.model is not None and s.message is not None}
    for choice in answer.choices:
        segment = sampled[choice.message.content]
        assert [token.logprob for token in choice.logprobs.content] == list(segment.logprobs or ())
        assert "".join(token.token for token in choice.logprobs.content) == RENDERER.decode(segment.tokens)
    assert len({s.sampling.seed for s in sampled.values() if s.sampling is not None}) == 3


@pytest.mark.parametrize("thinks", [False, True])
def test_the_tokens_of_a_thought_are_counted(thinks: bool) -> None:
    reply = replace(said("Three."), reasoning="One and two." if thinks else None)
    renderer = toy_renderer(thinking=thinks)
    session = opened(says(reply, reply, renderer=renderer), renderer=renderer)

    async def talk(client: openai.AsyncOpenAI, door: Door) -> Any:
        values: Any = {"model": "policy", "messages": [{"role": "user", "content": "1 + 2?"}]}
        whole = await client.chat.completions.create(**values)
        stream = await client.chat.completions.create(**values, stream=True, stream_options={"include_usage": True})
        return whole, [chunk.usage async for chunk in stream][-1]

    whole, usage = with_openai(session, talk)
    (tokens,) = {s.tokens for s in session.segments if s.model is not None}
    count = whole.usage.completion_tokens_details.reasoning_tokens
    thought, rest = RENDERER.decode(tokens[:count]), RENDERER.decode(tokens[count:])
    assert ("One and two." in thought, thought.endswith("</think>")) == (thinks, thinks)
    assert rest.strip().startswith("Three.")
    assert usage.completion_tokens_details.reasoning_tokens == count
    assert whole.usage.completion_tokens == usage.completion_tokens == len(tokens)


def test_a_clients_max_tokens_truncates_the_reply_and_not_the_rollout() -> None:
    session = opened(says(said("A long answer indeed"), said("Done.")))

    async def talk(client: openai.AsyncOpenAI, door: Door) -> Any:
        asked: Any = [{"role": "user", "content": "Hi"}]
        cut = await client.chat.completions.create(model="policy", messages=asked, max_tokens=2)
        whole = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "Again"}])
        return cut, whole

    cut, whole = with_openai(session, talk)
    assert cut.choices[0].finish_reason == "length" and cut.usage.completion_tokens == 2
    assert whole.choices[0].finish_reason == "stop" and session.limit is None


def test_a_stop_string_ends_the_reply_and_is_not_in_it() -> None:
    engine = says(said("One, two, three."), said("One, two, three."))

    async def talk(client: openai.AsyncOpenAI, door: Door) -> Any:
        asked: Any = {"model": "policy", "messages": [{"role": "user", "content": "Count."}]}
        return [await client.chat.completions.create(**asked, stop=stop) for stop in ("two", ["two", "three"])]

    for answer in with_openai(opened(engine), talk):
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("One, ", "stop")


def test_limits_are_reported_and_kept() -> None:
    session = opened(says(said("A"), said("B")), max_turns=1)

    async def talk(client: openai.AsyncOpenAI, door: Door) -> Any:
        asked: Any = [{"role": "user", "content": "Hi"}]
        await client.chat.completions.create(model="policy", messages=asked)
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="policy", messages=asked)
        return refused.value

    error = with_openai(session, talk)
    assert "1 turns are used up" in str(error) and error.response.headers["x-should-retry"] == "false"
    assert session.limit is not None and session.limit.reason == "max_turns"


def test_requests_after_too_many_calls_are_refused() -> None:
    session = opened(says(said("", ("add", {"a": 1, "b": 2})), said("never")), max_tool_calls=0)

    async def talk(client: openai.AsyncOpenAI, door: Door) -> Any:
        messages: list[Any] = [{"role": "user", "content": "1 + 2?"}]
        first = await client.chat.completions.create(model="policy", messages=messages, tools=[ADD])
        (call,) = first.choices[0].message.tool_calls
        messages += [
            first.choices[0].message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "3"},
        ]
        with pytest.raises(openai.BadRequestError, match="more than 0 tool calls"):
            await client.chat.completions.create(model="policy", messages=messages, tools=[ADD])

    with_openai(session, talk)
    assert session.limit is not None and session.limit.reason == "max_tool_calls" and len(session.segments) == 2


def test_a_prompt_that_is_too_long_gets_the_vendors_error_code() -> None:
    session = opened(says(said("A")))

    async def talk(client: openai.AsyncOpenAI, door: Door) -> Any:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "again and again " * 2000}]
            )
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "Hi"}])
        return refused.value

    error = with_openai(session, talk)
    assert error.code == "context_length_exceeded"
    assert "maximum context length is" in str(error) and "reduce the length of the messages" in str(error)
    assert session.limit is None, "a request after it was answered"


class Failing:
    """An engine whose first requests fail."""

    def __init__(self, engine: ScriptedEngine, failures: int) -> None:
        self._engine, self._left = engine, failures

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: GenerateRequest) -> Completion:
        """Fail, as often as there are failures left."""
        self._fail()
        return await self._engine.generate(request)

    def stream(self, request: GenerateRequest) -> AsyncIterator[Delta | Completion]:
        """Fail, as often as there are failures left."""
        self._fail()
        return self._engine.stream(request)

    def _fail(self) -> None:
        if self._left:
            self._left -= 1
            raise EngineError("the engine is gone")


def test_clients_retry_after_a_failure_of_the_engine() -> None:
    engine = says(said("A"))
    session = opened(Failing(engine, 2))

    async def talk(client: openai.AsyncOpenAI, door: Door) -> Any:
        with pytest.raises(openai.InternalServerError, match="the engine is gone"):
            await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "Hi"}])
        patient = client.with_options(max_retries=2)
        return await patient.chat.completions.create(model="policy", messages=[{"role": "user", "content": "Hi"}])

    assert with_openai(session, talk).choices[0].message.content == "A"
    assert len(session.segments) == 2


def test_fields_without_effect_are_named() -> None:
    session = opened(says(said("A")))

    async def talk(client: openai.AsyncOpenAI, door: Door) -> Any:
        return await client.chat.completions.with_raw_response.create(
            model="policy", messages=[{"role": "user", "content": "Hi"}], temperature=0.2, user="somebody"
        )

    assert with_openai(session, talk).headers["x-sparring-noted"] == "temperature, user"


def test_a_closed_door_refuses_requests_and_the_last_one_stops_the_server() -> None:
    async def main() -> list[Any]:
        async with open_door(opened(says(said("A")))) as stays:
            async with open_door(opened(says(said("B")))) as shut:
                assert stays.url == shut.url and stays.key != shut.key
            async with httpx.AsyncClient(base_url=stays.url) as client:
                body = {"model": "policy", "messages": [{"role": "user", "content": "Hi"}]}
                statuses = [
                    (
                        await client.post(
                            "/v1/chat/completions", json=body, headers={"authorization": f"Bearer {door.key}"}
                        )
                    ).status_code
                    for door in (shut, stays)
                ]
        async with httpx.AsyncClient(base_url=stays.url) as client:
            with pytest.raises(httpx.ConnectError):
                await client.get("/health")
        return statuses

    assert asyncio.run(main()) == [401, 200]
