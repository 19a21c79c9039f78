"""`sparring serve` in a process of its own: text rules, sockets, how it stops, how it dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket

import pytest
from forked import finished

from sparring.cli.main import main
from sparring.engine.adapters.remote import RemoteEngine
from sparring.engine.config import EngineConfig
from sparring.engine.native import NativeEngine
from sparring.errors import EngineError, RequestRefused
from sparring.generation import Constraint, GenerateRequest, Sampling
from sparring.model.load import load
from sparring.render.load import load_renderer
from sparring.testing.tiny_models import tiny_model
from sparring.types import ToolSpec
from sparring.weights.inline import publish

PROMPT = tuple(range(5, 15))
ADD = {
    "name": "add",
    "parameters": {"properties": {"a": {"const": 7}}, "required": ["a"], "additionalProperties": False},
}
CALL = Constraint(kind="tool_call", source=json.dumps({"tools": [ADD], "parallel": False}))
ENDLESS = 90_000


@pytest.fixture(scope="module")
def roomy(tmp_path_factory):
    """A checkpoint whose longest request takes many seconds."""
    return tiny_model("qwen3", tmp_path_factory.mktemp("roomy") / "tiny", seed=4, max_position_embeddings=100_000)


def ask(number=0, tokens=PROMPT, **sampling):
    return GenerateRequest(
        id=f"r{number}", tokens=tokens, sampling=Sampling(**{"max_tokens": 40, "seed": number, **sampling})
    )


def on(url, scenario):
    async def main():
        engine = RemoteEngine(url)
        try:
            return await scenario(engine)
        finally:
            await engine.close()

    return asyncio.run(main())


def refusal_of(*arguments):
    """In a process of its own; what it says."""
    done = finished(("serve", *map(str, arguments)))
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    return done.stderr


@pytest.fixture
def refused_here(capsys):
    """The same in this process."""

    def said(*arguments):
        assert main(["serve", *map(str, arguments)]) == 2
        return capsys.readouterr().err

    before = signal.getsignal(signal.SIGTERM)
    yield said
    signal.signal(signal.SIGTERM, before)


def test_the_server_compiles_the_text_rules_of_a_request(checkpoint, served):
    renderer = load_renderer(str(checkpoint))
    json_schema = Constraint(kind="json_schema", source='{"type": "object", "properties": {"a": {"type": "integer"}}}')
    asks = [
        ask(1, constraint=json_schema, stop=renderer.stop_ids),
        ask(2, constraint=Constraint(kind="regex", source="[0-9]{1,9}"), stop=renderer.stop_ids),
        ask(3, stop_strings=("e", "1")),
        ask(7, constraint=CALL, stop=renderer.stop_ids, max_tokens=200),
    ]

    async def scenario(engine):
        return [await engine.generate(renderer.bind(one)) for one in asks]

    async def local():
        engine = NativeEngine(load(checkpoint), EngineConfig(), threads=1)
        try:
            return await scenario(engine)
        finally:
            await engine.close()

    async def remote(engine):
        broken = ask(4, constraint=Constraint(kind="regex", source="["), stop=renderer.stop_ids)
        with pytest.raises(RequestRefused, match="regex: expected one that compiles"):
            await engine.generate(broken)
        with pytest.raises(RequestRefused, match="none of them empty"):
            await engine.generate(ask(5, stop_strings=("",)))
        with pytest.raises(RequestRefused, match="the grammar of the calls, .*got none"):
            await engine.generate(asks[-1])
        return await scenario(engine)

    with served(checkpoint) as (_, url):
        found = on(url, remote)
    assert found == asyncio.run(local())
    assert all(answer.finish_reason == "stop" for answer in found[1:])
    (call,) = renderer.parse(found[-1].tokens, [ToolSpec(description="", **ADD)]).tool_calls
    assert call.name == "add" and call.arguments == {"a": 7}


def test_an_interrupted_server_answers_running_requests_with_an_error(roomy, served, tmp_path):
    path = tmp_path / "socket"

    async def scenario(engine):
        stream = engine.stream(ask(max_tokens=ENDLESS))
        pieces = [await anext(stream)]
        process.send_signal(signal.SIGINT)
        with pytest.raises(EngineError, match="closed before the request was finished"):
            while True:
                pieces.append(await anext(stream))
        return pieces

    with served(roomy, "--unix", path) as (process, url):
        assert url == f"unix:{path}" and path.stat().st_mode & 0o777 == 0o600
        assert "a running server there" in refusal_of(roomy, "--unix", path)
        assert on(url, scenario)
        _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (130, "\ninterrupted\n")
    assert not path.exists()


def test_a_terminated_server_leaves_nothing_behind(roomy, served, tmp_path):
    path = tmp_path / "socket"
    with served(roomy, "--unix", path) as (process, _):
        process.terminate()
        _, error = process.communicate(timeout=60)
    assert (process.returncode, error, path.exists()) == (143, "", False)


def test_a_server_that_dies_is_an_error_and_one_in_its_place_has_other_weights(roomy, served):
    async def scenario(engine):
        port = url.rpartition(":")[2]
        await engine.pull(publish("policy", 3, load(roomy).state()))
        stream = engine.stream(ask(max_tokens=ENDLESS))
        await anext(stream)
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(EngineError):
            async for _ in stream:
                pass
        process.wait()
        with pytest.raises(EngineError, match="ConnectError"):
            await engine.generate(ask())
        with served(roomy, "--port", port):
            with pytest.raises(EngineError, match="got a restarted one with other weights"):
                await engine.generate(ask())
            await engine.pull(publish("policy", 4, load(roomy).state()))
            return await engine.generate(ask()), engine.version

    with served(roomy) as (process, url):
        answer, version = on(url, scenario)
    assert version == 4 and set(answer.versions.values) == {4}


def test_wrong_arguments_end_with_status_2(checkpoint, refused_here, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "Address already in use" in refused_here(checkpoint, "--port", taken.getsockname()[1])
    assert "no such folder" in refused_here(tmp_path / "nothing")
    assert "got a folder without config.json" in refused_here(tmp_path)
    assert "a key of [engine]" in refused_here(checkpoint, "--set", "rl.steps=3")
    assert "max_running must be at least 1" in refused_here(checkpoint, "--set", "engine.batch.max_running=0")
    assert "environment variable NO_SUCH_KEY: expected an API key" in refused_here(
        checkpoint, "--api-key-env", "NO_SUCH_KEY"
    )
    assert "a free address" in refused_here(checkpoint, "--port", "70000")
    assert "--threads: expected 0" in refused_here(checkpoint, "--threads", "-1")
    assert "a free address" in refused_here(checkpoint, "--host", "host.invalid")
    assert "a free address" in refused_here(checkpoint, "--host", "h" * 70)
    elsewhere = ("--set", "engine.kind=remote", "--set", "engine.urls=['unix:x']")
    assert 'engine.kind: expected "native" or "vllm"' in refused_here(checkpoint, *elsewhere)
    vllm = (checkpoint, "--port", "0", "--set", "engine.kind=vllm")
    assert "--numerics: expected none with vLLM" in refused_here(*vllm, "--numerics", "exact")
    assert "engine.kv.tokens: expected its default" in refused_here(*vllm, "--set", "engine.kv.tokens=64")
    assert "engine.vllm.python: expected" in refused_here(*vllm, "--set", "engine.vllm.python=/no/such")
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    assert "a free path, or a socket" in refused_here(checkpoint, "--unix", notes)
    assert notes.read_text() == "mine"
