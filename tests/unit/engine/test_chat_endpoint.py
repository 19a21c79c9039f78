"""A chat endpoint's replies as messages, and its failures by type."""

import asyncio

import pytest

from sparring.engine.adapters.chat_endpoint import ChatEndpoint
from sparring.errors import EngineError, LimitReached, RequestRefused
from sparring.generation import Sampling
from sparring.testing.chat_server import ChatServer, message
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


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (message("5", finish_reason="length"), LimitReached),
        ((400, {"error": "no such model"}), RequestRefused),
        ((503, {}), EngineError),
        ((429, {}), EngineError),
        ((200, {"nothing": 1}), EngineError),
    ],
)
def test_failures_have_their_type(answer, error):
    with pytest.raises(error) as caught:
        asked(answer)
    assert type(caught.value) is error
