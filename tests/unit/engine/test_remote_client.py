"""Clients of one server that are not its run: they need no torch, and count versions as the run does."""

import asyncio
import subprocess
import sys
from dataclasses import replace

import pytest
from common.served import ServerThread
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from virtual import on_event_loop

from sparring.engine.adapters.remote import RemoteEngine
from sparring.engine.adapters.remote_client import RemoteClient
from sparring.engine.config import EngineConfig
from sparring.engine.native import NativeEngine
from sparring.errors import EngineError
from sparring.generation import GenerateRequest, Sampling
from sparring.model.load import load
from sparring.types import WeightRef
from sparring.weights.inline import publish
from sparring.weights.shared_memory import published

WITHOUT = """
import asyncio, sys
from sparring.engine.adapters.remote_client import RemoteClient
from sparring.errors import BadInput
try:
    RemoteClient("http://127.0.0.1:1")
except BadInput as error:
    print(error)
print([name for name in ("torch", "transformers", "numpy") if name in sys.modules])
"""


def test_a_client_needs_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("engine at http://127.0.0.1:1: expected a running `sparring serve`"), done.stderr
    assert done.stdout.endswith("\n[]\n")


@pytest.fixture(scope="module")
def thread(model_path):
    """A server of its own: each example begins a run on it."""
    thread = ServerThread(NativeEngine(load(model_path), EngineConfig(), threads=1), model_path)
    yield thread
    thread.stop()


ACTIONS = st.lists(st.sampled_from(["push", "run", "other", "newcomer"]), min_size=1, max_size=8)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=ACTIONS, first=st.integers(1, 3))
@on_event_loop
async def test_another_process_counts_versions_as_the_run_does(thread, model_path, actions, first) -> None:
    """The run begins on a server that others used before, and updates while both clients sample."""
    request = GenerateRequest(id="", tokens=(5, 6, 7), sampling=Sampling(max_tokens=2, seed=1))
    state = load(model_path).state()
    run, others = RemoteEngine(thread.url), [RemoteClient(thread.url)]
    run.begin(state)
    version = 0
    for number, action in enumerate(actions):
        if action == "push":
            version += first
            with published(publish("policy", version, state)) as ref:
                await run.pull(ref)
        elif action == "newcomer":
            others.append(RemoteClient(thread.url))
            assert others[-1].version == version
        else:
            client = run if action == "run" else others[number % len(others)]
            async for piece in client.stream(replace(request, id=f"{id(client)}-{number}")):
                assert set(piece.versions.values) == {version} >= set(piece.kv_versions.values)
            assert client.version == version
    for client in (run, *others):
        await client.close()


def test_a_run_publishes_again_after_its_server_restarted(model_path, tmp_path) -> None:
    state = load(model_path).state()
    request = GenerateRequest(id="", tokens=(5, 6, 7), sampling=Sampling(max_tokens=2, seed=1))

    async def scenario() -> list[int]:
        first, second = (NativeEngine(load(model_path), EngineConfig(), threads=1) for _ in range(2))
        first = ServerThread(first, model_path, unix=tmp_path / "socket")
        with published(publish("policy", 4, state)) as ref:
            await _pulled(first.url, ref)
        run = RemoteEngine(first.url)
        run.begin(state)
        first.stop()
        second = ServerThread(second, model_path, unix=tmp_path / "socket")
        with published(publish("policy", 2, state)) as ref:
            await run.pull(ref)
        other = RemoteClient(second.url)
        answers = [await client.generate(replace(request, id=str(n))) for n, client in enumerate((run, other))]
        await run.close()
        await other.close()
        second.stop()
        return [version for answer in answers for version in answer.versions.values]

    assert set(asyncio.run(scenario())) == {2}


def test_a_server_that_computes_otherwise_after_its_restart_gets_no_weights(model_path, tmp_path) -> None:
    first, second = (
        NativeEngine(load(model_path, numerics=numerics), EngineConfig(), threads=1) for numerics in ("exact", "fast")
    )
    first = ServerThread(first, model_path, unix=tmp_path / "socket")
    model = load(model_path)

    def join(engine: RemoteEngine) -> None:
        engine.check("float32", model.path_name, EngineConfig())
        engine.begin(model.state(), None)

    run = RemoteEngine(first.url, join=join)
    first.stop()
    with pytest.raises(EngineError, match="a running `sparring serve`"):
        asyncio.run(run.restore())
    second = ServerThread(second, model_path, unix=tmp_path / "socket")
    with pytest.raises(EngineError, match="--numerics"):
        asyncio.run(run.restore())
    second.stop()


async def _pulled(url: str, ref: WeightRef) -> None:
    engine = RemoteEngine(url)
    await engine.pull(ref)
    await engine.close()
