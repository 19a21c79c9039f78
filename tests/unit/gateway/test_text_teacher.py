"""A chat server that teaches, behind the door: what it refuses is told to clients in their vendors' words."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import openai
import pytest
from chat_server import ChatServer, message
from sessions import RENDERER
from test_errors import CHAT, GEMINI, MESSAGES, PLACES, RESPONSES

from sparring.engine.adapters.chat_endpoint import ChatEndpoint
from sparring.gateway.server import open_door
from sparring.generation import Sampling
from sparring.record.token_counts import Imitator
from sparring.record.transcript import TextRecorder, TextRequest, TextSession
from sparring.render.demonstrate import reply_tokens
from sparring.testing.toy import toy_task
from sparring.types import Limits, Message

WORDS = "whales " * 300
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "policy", "messages": [{"role": "user", "content": WORDS}]},
    RESPONSES: {"model": "policy", "input": WORDS},
    MESSAGES: {"model": "policy", "max_tokens": 64, "messages": [{"role": "user", "content": WORDS}]},
    GEMINI: {"contents": [{"role": "user", "parts": [{"text": WORDS}]}]},
}
COUNTS = {
    "/v1/messages/count_tokens": (MESSAGES, "input_tokens"),
    "/v1beta/models/policy:countTokens": (GEMINI, "totalTokens"),
}
LENGTH = len(RENDERER.render([Message(role="user", content=WORDS)], ()).tokens)
SAYS = {
    CHAT: f"maximum context length is 512 tokens. However, your messages resulted in {LENGTH} tokens",
    RESPONSES: "Your input exceeds the context window of this model",
    MESSAGES: f"prompt is too long: {LENGTH} tokens > 512 maximum",
    GEMINI: f"The input token count ({LENGTH}) exceeds the maximum number of tokens allowed (512)",
}
FULL = {"error": {"message": f"The input ({LENGTH} tokens) is longer than the model's context length (512 tokens)."}}


def taught(
    server: ChatServer, ask: Callable[[TextSession, Any, httpx.AsyncClient], Any], *, max_context: int = 100_000
) -> Any:
    """What `ask` returns of a session that this server answers, its door and a client of that."""

    async def main() -> Any:
        endpoint = ChatEndpoint(server.url, model="big")

        async def reply(request: TextRequest) -> Message:
            return await endpoint.reply(request.messages, request.tools, Sampling(max_tokens=64))

        reply_ids = partial(reply_tokens, RENDERER)
        of = Imitator(renderer=RENDERER, reply_ids=reply_ids, max_context=max_context, max_reply=64)
        task = toy_task(limits=Limits(max_turns=20, max_tokens=1000, max_tool_calls=20))
        session = TextRecorder(reply, "teacher", of).open(task, rollout_id="r", seed=7, role="policy")
        try:
            async with open_door(session) as door, httpx.AsyncClient(base_url=door.url) as client:
                return await ask(session, door, client)
        finally:
            await endpoint.close()
            server.stop()

    return asyncio.run(main())


async def posted(door: Any, client: httpx.AsyncClient, path: str, place: str) -> httpx.Response:
    headers = {name: value.replace("KEY", door.key) for name, value in PLACES[place].items()}
    return await client.post(path, json=BODIES[place], headers=headers)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("by", ["imitator", "teacher"])
def test_a_prompt_that_is_too_long_gets_the_vendors_error(by: str, stream: bool) -> None:
    """For the policy that is to imitate it, or for the teacher itself: the clients are told the same."""
    server = ChatServer(lambda body: (400, FULL))

    async def ask(session: TextSession, door: Any, client: httpx.AsyncClient) -> dict[str, httpx.Response]:
        answers = {}
        for path, body in BODIES.items():
            headers = {name: value.replace("KEY", door.key) for name, value in PLACES[path].items()}
            to = path.replace("generateContent", "streamGenerateContent?alt=sse") if stream else path
            sent = {**body, "stream": True} if stream and path != GEMINI else body
            answers[path] = await client.post(to, json=sent, headers=headers)
        assert session.limit is not None and session.limit.reason == "context_length"
        return answers

    for path, answer in taught(server, ask, max_context=512 if by == "imitator" else 100_000).items():
        assert answer.status_code == 400, path
        assert SAYS[path] in answer.text
        assert "retry-after" not in answer.headers and answer.headers["x-should-retry"] == "false"
    assert len(server.bodies) == (0 if by == "imitator" else 4)


def test_tokens_are_counted_as_the_policy_has_them() -> None:
    server = ChatServer(lambda body: message("Blue."))

    async def ask(session: TextSession, door: Any, client: httpx.AsyncClient) -> list[Any]:
        counted = [(await posted(door, client, path, COUNTS[path][0])).json()[COUNTS[path][1]] for path in COUNTS]
        return [*counted, (await posted(door, client, CHAT, CHAT)).json()["usage"]]

    *counted, usage = taught(server, ask)
    assert counted == [LENGTH, LENGTH]
    said = len(reply_tokens(RENDERER, Message(role="assistant", content="Blue.")))
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (LENGTH, said)


def test_a_teacher_has_no_log_probabilities() -> None:
    server = ChatServer(lambda body: message("Blue."))

    async def ask(session: TextSession, door: Any, client: httpx.AsyncClient) -> Any:
        headers = {"authorization": f"Bearer {door.key}"}
        return (await client.post(CHAT, json={**BODIES[CHAT], "logprobs": True}, headers=headers)).json()

    assert taught(server, ask)["choices"][0]["logprobs"] == {"content": [], "refusal": None}


@pytest.mark.parametrize(
    ("status", "requests", "error"),
    [(402, 1, openai.BadRequestError), (404, 1, openai.BadRequestError), (429, 2, None), (503, 2, None)],
)
def test_final_refusals_of_a_teacher_are_not_retried_and_others_are(
    status: int, requests: int, error: type[Exception] | None
) -> None:
    """By a client of the vendor's, which sends again what it may."""

    def answers(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return (status, {"error": "so says the teacher"}) if len(server.bodies) == 1 else message("Blue.")

    server = ChatServer(answers)

    async def ask(session: TextSession, door: Any, client: httpx.AsyncClient) -> str:
        async with openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key=door.key) as vendor:
            made = await vendor.chat.completions.create(**BODIES[CHAT])
            return str(made.choices[0].message.content)

    if error is None:
        assert taught(server, ask) == "Blue."
    else:
        with pytest.raises(error, match=f"{status}: .*so says the teacher"):
            taught(server, ask)
    assert len(server.bodies) == requests
