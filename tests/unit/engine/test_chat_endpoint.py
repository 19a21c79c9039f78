"""A chat endpoint's replies as messages, and its failures by type."""

import asyncio

import pytest
from chat_server import ChatServer, message

from sparring.engine.adapters.chat_endpoint import ChatEndpoint
from sparring.errors import EngineError, LimitReached, PromptTooLong, RequestRefused
from sparring.generation import Sampling
from sparring.types import Message, ToolSpec

QUESTION = (Message(role="user", content="2 + 3?"),)
LOOK = ToolSpec(name="look", description="Looks.", parameters={"type": "object", "properties": {}})


def asked(answer, tools=()):
    """The reply to one question, and the request's body."""
    server = ChatServer(lambda body: answer)

    async def run():
        endpoint = ChatEndpoint(server.url, model="big", api_key="secret")
        try:
            return await endpoint.reply(QUESTION, tools, Sampling(temperature=0.5, max_tokens=7, seed=(1 << 40) + 3))
        finally:
            await endpoint.close()

    try:
        return asyncio.run(run()), server.bodies
    finally:
        server.stop()


def test_reasoning_and_calls_are_part_of_the_reply():
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    reply, [body] = asked(message("", reasoning_content="hm", tool_calls=[call]), (LOOK,))
    assert (reply.reasoning, reply.content) == ("hm", "")
    assert [(c.id, c.name, c.arguments) for c in reply.tool_calls] == [("c1", "look", {"at": 1})]
    assert (body["model"], body["temperature"], body["max_tokens"], body["seed"]) == ("big", 0.5, 7, 3)
    assert body["tools"][0]["function"]["name"] == "look" and body["messages"] == [
        {"role": "user", "content": "2 + 3?"}
    ]
    broken = {**call, "function": {"name": "look", "arguments": "{at: 1"}}
    [malformed] = asked(message(tool_calls=[broken]))[0].tool_calls
    assert (malformed.arguments, malformed.raw) == (None, "{at: 1")
    for blank in ("", " \n", None):
        [bare] = asked(message(tool_calls=[{**call, "function": {"name": "look", "arguments": blank}}]))[0].tool_calls
        assert (bare.name, bare.arguments) == ("look", {}), "as clients write a call without arguments"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (message("5", finish_reason="length"), LimitReached),
        ((400, {"error": "no such model"}), RequestRefused),
        ((503, {}), EngineError),
        ((429, {}), EngineError),
        ((409, {}), EngineError),
        ((401, {"error": {"message": "Incorrect API key provided."}}), RequestRefused),
        ((400, {"error": {"message": "max_tokens is too large: 7. At most 4 are supported."}}), RequestRefused),
        ((200, {"nothing": 1}), EngineError),
    ],
)
def test_failures_have_their_type(answer, error):
    with pytest.raises(error) as caught:
        asked(answer)
    assert type(caught.value) is error


TOO_LONG = [
    ({"message": "The context is full.", "code": "context_length_exceeded"}, None),
    (
        {"message": "This model's maximum context length is 4096 tokens. However, you requested 5,000 tokens."},
        (5000, 4096),
    ),
    ({"message": "The input (61709 tokens) is longer than the model's context length (40960 tokens)."}, (61709, 40960)),
    ({"message": "The prompt (length 9000) is longer than the maximum model length of 8192."}, (9000, 8192)),
    ({"message": "prompt is too long: 210000 tokens > 200000 maximum"}, (210000, 200000)),
    ({"message": "The input token count exceeds the maximum number of tokens allowed (1048576)."}, None),
    ({"message": "This model's maximum prompt length is 131072 but the request has 537812 tokens"}, (537812, 131072)),
    (
        {"message": "It is full.", "type": "exceed_context_size_error", "n_prompt_tokens": 1407, "n_ctx": 256},
        (1407, 256),
    ),
]


@pytest.mark.parametrize(("error", "lengths"), TOO_LONG)
def test_a_prompt_that_is_too_long_is_recognised_with_its_length(error, lengths):
    with pytest.raises(PromptTooLong, match="^chat endpoint .*: 400: ") as caught:
        asked((400, {"error": error}))
    assert caught.value.too_long == lengths
    with pytest.raises(PromptTooLong):
        asked((413, {}))
