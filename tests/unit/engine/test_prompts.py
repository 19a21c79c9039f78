"""A client that sends what is new, and a server that restores the prompt: always the right one, or refused by name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
from common.serving import ServingThread, free_socket, quiet_server
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sparring.engine import wire
from sparring.engine.adapters.remote_client import RemoteClient
from sparring.engine.metrics import Latencies
from sparring.engine.prompts import KnownPrompts, SentPrompts
from sparring.engine.server import Serving, TokenServer
from sparring.generation import Completion, Delta, GenerateRequest, Sampling
from sparring.testing.scripted_engine import ScriptedEngine

STANDS = 90
IDS = st.lists(st.integers(0, 120), max_size=3).map(tuple)
TURNS = st.lists(
    st.tuples(st.sampled_from("ab"), st.sampled_from(["goes on", "begins anew", "is lost", "is released"]), IDS, IDS),
    max_size=12,
)


@given(turns=TURNS, most=st.integers(0, 20))
def test_a_prompt_is_restored_or_refused(turns, most) -> None:
    """Two conversations, whose prompts may begin anew, and whose answers the client may miss."""
    client, server = SentPrompts(), KnownPrompts(most)
    told: dict[str, tuple[int, ...]] = {}
    for conversation, event, new, reply in turns:
        if event == "is released":
            client.forget(conversation)
            server.forget(conversation)
        prompt = new if event == "begins anew" else (*told.get(conversation, ()), *new)
        form = wire.generate_form(ask(conversation, prompt), deltas=False)
        for last in (False, True):
            short, sent = client.shortened(form)
            there = wire.decode(wire.encode(short), wire.GenerateForm, "test")
            try:
                known = server.whole(conversation, there.prefix, there.tokens)
                break
            except wire.UnknownPrefix:
                assert not last and there.prefix is not None
                client.forget(conversation)
        assert known.tokens == prompt
        assert there.prefix is None or len(there.tokens) + there.prefix.tokens == len(prompt)
        server.remember(conversation, known, reply)
        if event != "is lost":
            client.remember(conversation, sent, reply)
            told[conversation] = (*prompt, *reply)
        assert server.num_tokens <= most


WRONG = {"other ids": (2, (7, 9)), "fewer": (1, (7,)), "more": (3, (7, 8, 9))}


@pytest.mark.parametrize(("number", "ids"), WRONG.values(), ids=WRONG)
def test_the_digest_and_the_number_decide(number, ids) -> None:
    server = KnownPrompts()
    server.remember("a", server.whole("a", None, (7, 8)))
    other = server.whole(None, None, ids).digest.hexdigest()
    right = server.whole(None, None, (7, 8)).digest.hexdigest()
    assert server.whole("a", wire.KnownPrefix(tokens=2, digest=right), (9,)).tokens == (7, 8, 9)
    for conversation, prefix in (
        ("a", wire.KnownPrefix(tokens=number, digest=other)),
        ("a", wire.KnownPrefix(tokens=3, digest=right)),
        ("b", wire.KnownPrefix(tokens=2, digest=right)),
        (None, wire.KnownPrefix(tokens=2, digest=right)),
    ):
        with pytest.raises(wire.UnknownPrefix):
            server.whole(conversation, prefix, (9,))


def ask(conversation, tokens, number=0) -> GenerateRequest:
    return GenerateRequest(
        id=f"r{number}", tokens=tokens, conversation=conversation, sampling=Sampling(max_tokens=3, seed=number)
    )


class Played(ScriptedEngine):
    """A scripted engine for `TokenServer`, which stands still behind the first token of a reply of `STANDS`."""

    problem = None

    def __init__(self) -> None:
        super().__init__(lambda request: [(request.sampling.seed + at) % 40 for at in range(len(request.tokens), 99)])
        self.latencies = Latencies()

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Delta | Completion]:
        """Yield the script's tokens."""
        async for piece in super().stream(request):
            yield piece
            if request.sampling.max_tokens == STANDS:
                await asyncio.Event().wait()

    async def drop(self, adapter: str) -> None:
        """Do nothing: there are none."""


class Server:
    """A token server in a thread, and the bodies that it read."""

    def __init__(self, instance: str = "one") -> None:
        self.engine, self.forms = Played(), list[wire.GenerateForm]()
        served = wire.ServedModel(
            model="policy",
            version=0,
            dtype="float32",
            numerics="script",
            vocab_size=100,
            max_positions=1 << 20,
            context=1 << 20,
            token_bytes=1,
            instance=instance,
        )
        self.server = TokenServer(Serving(self.engine, served, lambda request: request))
        listening, self.url = free_socket()
        self.thread = ServingThread(quiet_server(self._heard(self.server.application())), listening)

    def _heard(self, inner: ASGIApp) -> ASGIApp:
        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            async def heard() -> Message:
                message = await receive()
                if scope["path"] == "/v1/generate" and message.get("body"):
                    self.forms.append(msgspec.json.decode(message["body"], type=wire.GenerateForm))
                return message

            await inner(scope, heard, send)

        return application

    @property
    def sent(self) -> list[tuple[int, tuple[int, ...]]]:
        """The number of ids in the prefix, and the ids, of each request."""
        return [(form.prefix.tokens if form.prefix else 0, form.tokens) for form in self.forms]


@pytest.fixture
def server():
    server = Server()
    yield server
    server.thread.stop()


def on(server, scenario):
    async def main():
        client = RemoteClient(server.url)
        try:
            return await scenario(client)
        finally:
            await client.close()

    return asyncio.run(main())


def test_the_next_turn_sends_what_is_new(server) -> None:
    """As events, as one answer, in a branch, and behind nothing new; other prompts are sent whole."""

    async def scenario(client):
        tokens = tuple(range(20))
        first = await client.generate(ask("a", tokens))
        tokens = (*tokens, *first.tokens, 50, 51)
        async for piece in client.stream(ask("a", tokens, 1)):
            reply = piece.tokens
        await client.generate(ask("a", (*tokens, *reply), 2))
        await client.generate(ask("a", (9, *tokens), 3))
        await client.generate(ask(None, (*tokens, 5), 4))
        await client.release("a")
        await client.generate(ask("a", (9, *tokens), 5))
        return tokens, reply

    tokens, reply = on(server, scenario)
    assert server.sent == [
        (0, tokens[:20]),
        (23, (50, 51)),
        (28, ()),
        (0, (9, *tokens)),
        (0, (*tokens, 5)),
        (0, (9, *tokens)),
    ]
    assert [request.tokens for request in server.engine.requests] == [
        tokens[:20],
        tokens,
        (*tokens, *reply),
        (9, *tokens),
        (*tokens, 5),
        (9, *tokens),
    ]


def test_a_server_that_forgot_is_sent_the_whole_prompt_once(server) -> None:
    async def scenario(client):
        first = await client.generate(ask("a", (1, 2, 3)))
        server.server._prompts = KnownPrompts()
        second = await client.generate(ask("a", (1, 2, 3, *first.tokens, 4), 1))
        return first, second, await client.generate(ask("a", (1, 2, 3, *first.tokens, 4, *second.tokens), 2))

    first, second, _ = on(server, scenario)
    whole = (1, 2, 3, *first.tokens, 4)
    assert server.sent == [(0, (1, 2, 3)), (6, (4,)), (0, whole), (7 + len(second.tokens), ())]
    assert [request.tokens for request in server.engine.requests] == [(1, 2, 3), whole, (*whole, *second.tokens)]
