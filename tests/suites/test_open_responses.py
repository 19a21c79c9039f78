"""`/v1/responses` against the schemas of the Open Responses specification, as the package openresponses-types has
them: every request that is answered is one of its requests, every answer and every event one of its own."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from doors import door_on_a_thread

from sparring.types import Message, ToolCall

pytestmark = pytest.mark.suites
ADD = {
    "type": "function",
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    "strict": False,
}
CALL = ToolCall(id="call_0", name="add", arguments={"a": 1, "b": 2})
TEXT = Message(role="assistant", content="Two words.")
LONG = Message(role="assistant", content="Two words, and then a great many more than sixteen tokens can say. " * 4)
THOUGHT = Message(role="assistant", content="Two words.", reasoning="I think of two.")
CALLS = Message(role="assistant", content="I add.", tool_calls=(CALL,))
USER = {"type": "message", "role": "user", "content": "Say two words."}
OUTPUT = [
    {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1, "b": 2}'},
    {"type": "function_call_output", "call_id": "c1", "output": "3"},
]
CASES: dict[str, tuple[Message, dict[str, Any]]] = {
    "basic": (TEXT, {"input": "Say two words."}),
    "message": (TEXT, {"input": [USER]}),
    "parts": (TEXT, {"input": [{**USER, "content": [{"type": "input_text", "text": "Say two words."}]}]}),
    "instructions": (TEXT, {"input": [USER], "instructions": "Be short."}),
    "system": (TEXT, {"input": [{"type": "message", "role": "system", "content": "Be short."}, USER]}),
    "developer": (TEXT, {"input": [{"type": "message", "role": "developer", "content": "Be short."}, USER]}),
    "conversation": (TEXT, {"input": [USER, {"type": "message", "role": "assistant", "content": "No."}, USER]}),
    "phase": (
        TEXT,
        {"input": [USER, {"type": "message", "role": "assistant", "content": "No.", "phase": "final_answer"}, USER]},
    ),
    "thought": (THOUGHT, {"input": [USER], "reasoning": {"effort": "low"}}),
    "tool": (CALLS, {"input": [USER], "tools": [ADD]}),
    "tools at once": (
        Message(role="assistant", tool_calls=(CALL, ToolCall(id="call_1", name="add", arguments={"a": 3, "b": 4}))),
        {"input": [USER], "tools": [ADD], "parallel_tool_calls": True},
    ),
    "tool answered": (TEXT, {"input": [USER, *OUTPUT], "tools": [ADD]}),
    "no tool": (TEXT, {"input": [USER], "tools": [ADD], "tool_choice": "none"}),
    "logprobs": (TEXT, {"input": [USER], "include": ["message.output_text.logprobs"], "top_logprobs": 0}),
    "logprobs beside a call": (
        CALLS,
        {"input": [USER], "tools": [ADD], "include": ["message.output_text.logprobs"]},
    ),
    "cut": (LONG, {"input": [USER], "max_output_tokens": 16}),
    "settings": (TEXT, {"input": [USER], "temperature": 0.5, "top_p": 0.9, "metadata": {"of": "me"}, "store": False}),
}

OTHERWISE = {f"response.reasoning_text.{kind}": f"response.reasoning.{kind}" for kind in ("delta", "done")}
"""Events that OpenAI's own clients know by another name than the specification's; ours is OpenAI's."""


def posted(case: str, **more: Any) -> httpx.Response:
    reply, body = CASES[case]
    with (
        door_on_a_thread(reply, thinking=case == "thought") as (door, _),
        httpx.Client(base_url=door.url, timeout=60) as client,
    ):
        key = {"authorization": f"Bearer {door.key}"}
        return client.post("/v1/responses", json={"model": "policy", **body, **more}, headers=key)


@pytest.mark.parametrize("case", CASES)
def test_requests_are_the_specifications(case: str) -> None:
    from openresponses_types.types import CreateResponseBody

    CreateResponseBody.model_validate({"model": "policy", **CASES[case][1]})


@pytest.mark.parametrize("case", CASES)
def test_an_answer_is_a_response_resource(case: str) -> None:
    from openresponses_types.types import ResponseResource

    answer = posted(case)
    assert answer.status_code == 200, answer.text
    response = ResponseResource.model_validate_json(answer.content)
    assert response.status == ("incomplete" if case == "cut" else "completed") and response.output


@pytest.mark.parametrize("case", CASES)
def test_every_event_of_a_stream_is_the_specifications(case: str) -> None:
    from openresponses_types import types
    from pydantic import TypeAdapter

    every = [kind for name, kind in vars(types).items() if name.endswith("StreamingEvent")]
    by_type = {kind.model_fields["type"].annotation: kind for kind in every}
    by_name = {next(iter(kind)).value: of for kind, of in by_type.items()}
    answer = posted(case, stream=True)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        name = OTHERWISE.get(event["type"], event["type"])
        TypeAdapter(by_name[name]).validate_python({**event, "type": name})
    last = "response.incomplete" if case == "cut" else "response.completed"
    assert events[0]["type"] == "response.created" and events[-1]["type"] == last
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    added = [event["output_index"] for event in events if event["type"] == "response.output_item.added"]
    assert added == list(range(len(done)))


def test_a_request_without_a_model_or_with_another_is_refused_as_an_error() -> None:
    from openresponses_types.types import ErrorPayload

    for wrong in ({"model": None}, {"model": "another"}, {"input": 3}, {"input": [{"type": "no such item"}]}):
        answer = posted("basic", **wrong)
        assert answer.status_code in (400, 404), answer.text
        ErrorPayload.model_validate(answer.json()["error"])
