"""Servers that answer what no engine would: each is an error of its request, and nothing of it is recorded."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from virtual import on_event_loop

from sparring.engine.adapters.remote import RemoteEngine
from sparring.errors import EngineError, RequestRefused, WeightsError
from sparring.generation import Completion, Delta, GenerateRequest, Sampling
from sparring.weights.fetch import links
from sparring.weights.inline import publish

STATE = {"a": torch.ones(3)}
MODEL = {
    "model": "policy",
    "version": 1,
    "dtype": "float32",
    "numerics": "fast",
    "vocab_size": 50,
    "max_positions": 100,
    "context": 100,
    "token_bytes": 1,
    "instance": "first",
    "state_bytes": 1 << 20,
}
ONE = {"lengths": [2], "values": [2]}
TURN = {"tokens": [7, 8], "logprobs": [-1.0, -2.0], "versions": ONE, "kv_versions": ONE}
WHOLE = {**TURN, "finish_reason": "length"}


class Broken(ThreadingHTTPServer):
    """A server with one answer for each endpoint, and the same head for all but the first update.

    Attributes:
        answers: status and body by endpoint; an empty object where there is none.
        head: values of the headers.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: dict[str, tuple[int, bytes]] = {"model": (200, json.dumps(MODEL).encode())}
        self.head: dict[str, object] = {"instance": "first", "version": 2, "base": 2}

    def tell(self, *events: tuple[str, Any]) -> None:
        """Answer a request to generate with these events."""
        text = "".join(f"event: {name}\ndata: {json.dumps(value)}\n\n" for name, value in events)
        self.answers["generate"] = 200, text.encode()


class Handler(BaseHTTPRequestHandler):
    server: Broken
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        status, body = self.server.answers.get(name, (200, b"{}"))
        self.send_response(status)
        for header, value in {**self.server.head, **({"version": 1} if name == "drop" else {})}.items():
            self.send_header(f"x-sparring-{header}", str(value))
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.do_GET()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def broken() -> Iterator[Broken]:
    with Broken() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def on(server: Broken, scenario: Callable[[RemoteEngine], Coroutine[Any, Any, Any]]) -> Any:
    """Run a scenario with a client whose run has begun: its version 0 is the server's 2."""

    async def main() -> Any:
        engine = RemoteEngine(f"http://127.0.0.1:{server.server_address[1]}")
        await asyncio.to_thread(engine.begin, STATE)
        try:
            async with asyncio.timeout(60):
                return await scenario(engine)
        finally:
            await engine.close()

    return asyncio.run(main())


async def turn(engine: RemoteEngine) -> list[Delta | Completion]:
    sampling = Sampling(max_tokens=2)
    return [piece async for piece in engine.stream(GenerateRequest(id="a", tokens=(5, 6), sampling=sampling))]


def test_a_right_answer_passes(broken: Broken) -> None:
    broken.tell(("delta", TURN), ("completion", WHOLE))
    delta, whole = on(broken, turn)
    assert delta.versions == whole.versions and whole.versions.values == (0,) and whole.tokens == (7, 8)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"logprobs": [-1.0]}, "2 logprobs, got 1"),
        ({"tokens": [7, 50]}, "ids below 50"),
        ({"tokens": [7, -1]}, "ids below 50"),
        ({"versions": {"lengths": [3], "values": [2]}}, "2 versions, got 3"),
        ({"kv_versions": {"lengths": [3, -1], "values": [2, 2]}}, "2 kv_versions, got 0"),
        ({"versions": {"lengths": [2], "values": []}}, "2 versions, got 0"),
        ({"versions": {"lengths": [1, 1], "values": [2, 3]}}, "one server per run"),
        ({"kept": {"rows": ["AAAA"]}}, "2 kept, got 1"),
        ({"top_logprobs": [[]]}, "2 top_logprobs, got 1"),
        ({"tokens": [1, 2, 3], "logprobs": [-1.0] * 3}, "at most 2 tokens"),
        ({"tokens": "78"}, "same Sparring version"),
    ],
)
@pytest.mark.parametrize("name", ["delta", "completion"])
def test_parts_that_do_not_belong_together_are_an_error(broken: Broken, name: str, change: Any, said: str) -> None:
    whole = WHOLE if name == "completion" else TURN
    broken.tell((name, {**whole, **change}), ("completion", WHOLE))
    with pytest.raises(EngineError, match=said):
        on(broken, turn)


@pytest.mark.parametrize(
    "events",
    [
        [("delta", TURN), ("delta", TURN), ("completion", WHOLE)],
        [("delta", TURN), ("completion", {**WHOLE, "tokens": [7, 9]})],
        [("delta", TURN)],
        [("delta", TURN), ("error", {"error": {"type": "SystemExit", "message": "boo"}})],
        [("news", TURN)],
    ],
    ids=["a delta twice", "another turn", "no end", "an error", "an unknown event"],
)
def test_pieces_that_are_not_of_one_turn_are_an_error(broken: Broken, events: list[tuple[str, Any]]) -> None:
    broken.tell(*events)
    with pytest.raises(EngineError):
        on(broken, turn)


@pytest.mark.parametrize(
    ("head", "said"),
    [
        ({"base": 3}, "one server per run"),
        ({"version": 3}, "one server per run"),
        ({"instance": "second"}, "a restarted one"),
        ({"version": "garbage"}, "garbage"),
    ],
)
def test_a_head_of_another_run_is_an_error(broken: Broken, head: dict[str, object], said: str) -> None:
    async def scenario(engine: RemoteEngine) -> None:
        broken.head |= head
        with pytest.raises(EngineError, match=said):
            await turn(engine)

    broken.tell(("completion", WHOLE))
    on(broken, scenario)


@pytest.mark.parametrize(("status", "instance"), [(401, "first"), (422, "second"), (400, "second")])
def test_a_refusal_of_another_server_is_not_one_of_the_request(broken: Broken, status: int, instance: str) -> None:
    """Such a request may be served elsewhere, and its rollout is retried."""

    async def scenario(engine: RemoteEngine) -> None:
        broken.head["instance"] = instance
        with pytest.raises(EngineError) as caught:
            await turn(engine)
        assert not isinstance(caught.value, RequestRefused)

    broken.answers["generate"] = status, json.dumps({"error": {"type": "BadInput", "message": "no"}}).encode()
    on(broken, scenario)


@pytest.mark.parametrize("head", [{}, {"version": 4}, {"version": 3, "base": 3}])
def test_an_acknowledged_update_that_is_not_served_is_an_error(broken: Broken, head: dict[str, object]) -> None:
    async def scenario(engine: RemoteEngine) -> None:
        broken.head |= head
        with pytest.raises(WeightsError, match="as acknowledged"):
            await engine.pull(publish("policy", 1, STATE))

    on(broken, scenario)


@pytest.mark.parametrize("version", [1, 3, "garbage"])
def test_a_run_does_not_begin_on_a_server_that_serves_other_weights(broken: Broken, version: object) -> None:
    broken.head["version"] = version
    with pytest.raises(EngineError if version == "garbage" else WeightsError):
        on(broken, turn)


@on_event_loop
async def test_a_shared_folder_that_is_of_no_use_any_more_fails_the_update_and_not_the_run(
    broken: Broken, tmp_path: Path
) -> None:
    """It is bad input at the start alone: later a fleet goes on with its other engines."""
    ways = links(str(tmp_path))
    url = f"http://127.0.0.1:{broken.server_address[1]}"
    engine = RemoteEngine(url, links=ways, join=lambda restarted: restarted.begin(STATE))
    await asyncio.to_thread(engine.begin, STATE)
    refused = json.dumps({"error": {"type": "WeightsError", "message": "no such file"}}).encode()
    broken.answers["weights"] = broken.answers["sees"] = 409, refused
    for _ in range(2):  # the second chooses a link anew
        with pytest.raises(WeightsError, match="no such file"):
            await engine.pull(publish("policy", 1, STATE))
    with pytest.raises((WeightsError, EngineError), match="no such file"):  # a fleet takes either
        await engine.restore()
    await engine.close()
    ways.close()
