"""The token-level server over a real socket: what it answers, what it refuses, and that one bad request is one."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path

import httpx
import pytest
import torch
from asked import EVERYTHING, PROMPT, ask, with_client
from common.served import ServerThread
from common.tiny_adapters import tiny_adapter
from refusals import refused_at

from sparring.engine import wire
from sparring.engine.adapters.remote import RemoteEngine
from sparring.engine.config import BatchConfig, EngineConfig, KvConfig
from sparring.engine.native import NativeEngine
from sparring.engine.server import BESIDE, OF_BIAS, OF_ID
from sparring.errors import BadInput, EngineError, RequestRefused, WeightsError
from sparring.generation import Completion
from sparring.kernels import ops
from sparring.model.load import load
from sparring.model.peft import read
from sparring.testing.tiny_models import tiny_model
from sparring.weights.inline import publish
from sparring.weights.shared_memory import FOLDER, PREFIX, published

LONG = 4000
GUARD_S = 10.0
"""Only a client that is left waiting, which is the failure, waits so long."""


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    """A checkpoint folder with room for requests that take a while."""
    return tiny_model(
        "qwen3", tmp_path_factory.mktemp("served") / "tiny", tied=True, seed=4, max_position_embeddings=LONG + 8
    )


@pytest.fixture
def server(model_path):
    engine = NativeEngine(load(model_path), EngineConfig(batch=BatchConfig(max_running=8)), threads=1)
    thread = ServerThread(engine, model_path)
    yield thread
    thread.stop()


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def refusing(model_path):
    """A client of one server for all tests of what is refused, after which it serves on."""
    thread = ServerThread(NativeEngine(load(model_path), EngineConfig(), threads=1), model_path)
    with httpx.Client(base_url=thread.url, timeout=60) as client:
        yield client
    thread.stop()


@pytest.fixture
def empty():
    """A server that was started without a model."""
    thread = ServerThread(None, Path())
    yield thread
    thread.stop()


def post(http, name, **body):
    return http.post(f"/v1/{name}", json=body)


def on(server, scenario, **settings):
    return with_client(RemoteEngine(server.url, **settings), scenario)


def test_every_bit_of_an_answer_crosses(server, serve):
    asked = replace(ask(**EVERYTHING), prompt_logprobs=True, priority=3)

    async def scenario(engine):
        return await engine.generate(asked)

    here, there = serve(scenario), on(server, scenario)
    assert here == there
    assert here.kept is not None and here.top_logprobs is not None and here.prompt_logprobs is not None


def test_a_request_without_a_name_is_given_one(http):
    answer = post(http, "generate", tokens=PROMPT, sampling={"max_tokens": 3})
    assert answer.status_code == 200 and len(answer.json()["tokens"]) == 3
    assert post(http, "score", tokens=PROMPT).status_code == 200


def test_events_end_with_the_completion(http):
    text = post(http, "generate", tokens=PROMPT, sampling={"max_tokens": 30}, stream=True).text
    events = [event.split("\n") for event in text.strip().split("\n\n")]
    assert [name for name, _ in events[:-1]] == ["event: delta"] * (len(events) - 1) and events[-1][
        0
    ] == "event: completion"
    deltas = [json.loads(data.removeprefix("data: "))["tokens"] for _, data in events[:-1]]
    assert [*chain.from_iterable(deltas)] == json.loads(events[-1][1].removeprefix("data: "))["tokens"]


BAD_BODIES = [
    (b"{", 400, "BadInput", "Input data was truncated"),
    (b"", 400, "BadInput", "Input data was truncated"),
    (b"[]", 422, "RequestRefused", "Expected `object`, got `array`"),
    (b"{}", 422, "RequestRefused", "missing required field `tokens`"),
    (b'{"tokens": "5 6"}', 422, "RequestRefused", "Expected `array`, got `str` - at `$.tokens`"),
    (b'{"tokens": [1.5]}', 422, "RequestRefused", "Expected `int`, got `float`"),
    (b'{"tokens": [5], "sampling": {"temprature": 1}}', 422, "RequestRefused", "unknown field `temprature`"),
    (b'{"tokens": [5], "ends": 3}', 422, "RequestRefused", "unknown field `ends`"),
    (b'{"tokens": []}', 422, "RequestRefused", "at least one token"),
    (b'{"tokens": [80]}', 422, "RequestRefused", "token ids below 80"),
    (b'{"tokens": [-1]}', 422, "RequestRefused", "token ids below 80"),
    (b'{"tokens": [99999999999999999999]}', 422, "RequestRefused", "token ids below 80"),
    (json.dumps({"tokens": [5] * (LONG + 8)}).encode(), 422, "RequestRefused", f"fewer than {LONG + 8} tokens"),
    (b'{"tokens": [5], "sampling": {"temperature": -1}}', 422, "RequestRefused", "a temperature of 0 or more"),
    (b'{"tokens": [5], "sampling": {"max_tokens": 0}}', 422, "RequestRefused", "max_tokens of at least 1"),
    (b'{"tokens": [5], "sampling": {"stop": [99999999999]}}', 422, "RequestRefused", "stop tokens of 32 bits"),
    (b'{"tokens": [5], "sampling": {"stop_strings": ["a"]}}', 422, "RequestRefused", "a tokenizer.json"),
    (b'{"tokens": [5], "grammar": "start: \\"a\\""}', 422, "RequestRefused", "expected a constraint of kind tool_call"),
    (b'{"tokens": [5], "prefix": {"tokens": 3, "digest": "0"}}', 422, "RequestRefused", "a conversation with `prefix`"),
    (b'{"tokens": [5], "adapter": "nobody"}', 422, "RequestRefused", "adapter nobody: expected a loaded adapter"),
]


@pytest.mark.parametrize(("body", "status", "kind", "said"), BAD_BODIES, ids=range(len(BAD_BODIES)))
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_request_is_refused_and_the_others_go_on(refusing, body, status, kind, said, stream):
    if stream and body[:1] == b"{" and body[-1:] == b"}" and len(body) > 2:
        body = body[:-1] + b', "stream": true}'
    answer = refusing.post("/v1/generate", content=body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
    assert said in answer.json()["error"]["message"]
    assert post(refusing, "generate", tokens=PROMPT).status_code == 200


WEIGHTS = {"model": "policy", "version": 1, "checksum": "0", "location": {}}
BODIES = {
    "generate": {"tokens": PROMPT},
    "abort": {"id": "r"},
    "score": {"tokens": PROMPT},
    "release": {"conversation": "c"},
    "sleep": {},
    "drop": {"adapter": "a"},
    "files": {**WEIGHTS, "dtype": "float32", "numerics": "exact"},
    **dict.fromkeys(("weights", "wake", "sees"), WEIGHTS),
}
"""A right body of each endpoint, without what may be left out."""
PASSED_OVER = [
    ("generate", {"deltas": True}, "stream true with `deltas`"),
    ("generate", {"deltas": False}, "stream true with `deltas`"),
    ("generate", {"sampling": {"beams": 2}}, "unknown field `beams`"),
    ("abort", {"id": 1}, "Expected `str`, got `int`"),
    ("generate", {"recorded": {"versions": {"lengths": [1]}, "kv_versions": {}}}, "the versions of at least one token"),
    ("score", {"adapter": "nobody"}, "adapter nobody"),
    ("score", {"sampling": {}}, "unknown field `sampling`"),
    ("sees", {"base": 3}, "unknown field `base`"),
    ("files", {"adapter": "a"}, "weights with `adapter`"),
    ("files", {"probe": [[1], [0.5]]}, "weights with `probe`"),
]


@pytest.mark.parametrize("name", wire.POSTS)
def test_every_endpoint_refuses_names_that_it_does_not_know(http, name):
    for body in ({**BODIES[name], "temprature": 1}, {**BODIES[name], "model_": None}):
        answer = post(http, name, **body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (422, "RequestRefused")
        assert f"POST /v1/{name}: expected" in answer.json()["error"]["message"]
        assert f"unknown field `{[*body][-1]}`" in answer.json()["error"]["message"]
    answer = http.post(f"/v1/{name}?stream=true", json=BODIES[name])
    assert answer.status_code == 422 and "stream=true" in answer.json()["error"]["message"]


def test_every_field_that_would_be_passed_over_is_refused(http):
    for name, fields, said in PASSED_OVER:
        answer = post(http, name, **{**BODIES[name], **fields})
        assert (answer.status_code, answer.json()["error"]["type"]) == (422, "RequestRefused"), (name, fields)
        assert said in answer.json()["error"]["message"]
    assert post(http, "drop", adapter="nobody").status_code == 422


def test_a_server_without_a_model_refuses_them_too(empty):
    with httpx.Client(base_url=empty.url, timeout=60) as http:
        for name in wire.POSTS:
            answer = post(http, name, **BODIES[name], temprature=1)
            assert answer.status_code == 422 and "unknown field `temprature`" in answer.json()["error"]["message"]


def test_other_endpoints_refuse_too(http):
    assert http.get("/v1/generate").status_code == 405
    assert http.get("/v1/nothing").json()["error"]["type"] == "BadInput"
    assert post(http, "score", tokens=[5]).status_code == 422
    assert post(http, "abort", id="never heard of").json() == post(http, "release", conversation="neither").json() == {}


def test_a_refusal_has_its_class_at_the_client_too(server):
    async def scenario(engine):
        with pytest.raises(RequestRefused, match="at least one token"):
            await engine.generate(ask(tokens=()))
        with pytest.raises(RequestRefused, match="token ids below 80"):
            await anext(engine.stream(ask(tokens=(80,))))
        with pytest.raises(RequestRefused, match="set them in its sampling"):
            await engine.generate(replace(ask(), ends=lambda tokens, new: None))
        with pytest.raises(RequestRefused, match=r"got `null` - at `\$.sampling.temperature`"):
            await engine.generate(ask(temperature=float("nan")))
        return await engine.generate(ask())

    assert len(on(server, scenario).tokens) == 8


def gauge(http, name):
    return next(
        float(line.split()[1]) for line in http.get("/metrics").text.splitlines() if line.startswith(f"{name} ")
    )


async def until_idle(http):
    """As soon as nothing runs; what was made until then."""
    while await asyncio.to_thread(gauge, http, "sparring_running"):
        pass
    return gauge(http, "sparring_generated_tokens_total")


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_leaves_drops_its_request(server, http, streams):
    async def scenario(engine):
        first = engine.stream(ask(0, max_tokens=LONG))
        crowd = [ask(number, max_tokens=LONG) for number in range(1, 7)]
        waiting = [
            asyncio.ensure_future(anext(engine.stream(one)) if streams else engine.generate(one)) for one in crowd
        ]
        await anext(first)
        await first.aclose()
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        return await until_idle(http), await engine.generate(ask())

    made, after = on(server, scenario)
    assert made < 7 * LONG and len(after.tokens) == 8


def test_leaving_http_without_an_answer_drops_the_request_too(server, http):
    with httpx.Client(base_url=server.url, timeout=httpx.Timeout(60, read=0.05)) as client:
        for _ in range(3):
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/generate", json={"tokens": PROMPT, "sampling": {"max_tokens": LONG}})
    assert asyncio.run(until_idle(http)) < 3 * LONG


def test_a_key_is_asked_for_under_v1_alone(model_path):
    engine = NativeEngine(load(model_path), EngineConfig(batch=BatchConfig(max_running=8)), threads=1)
    thread = ServerThread(engine, model_path, api_key="secret")
    try:
        with pytest.raises(BadInput, match="the server's API key"):
            RemoteEngine(thread.url, api_key="secrets")
        with pytest.raises(BadInput, match="the server's API key"):
            RemoteEngine(thread.url)
        assert [httpx.get(f"{thread.url}/{path}").status_code for path in ("v1/model", "health", "metrics")] == [
            401,
            200,
            200,
        ]
        assert on(thread, lambda engine: engine.generate(ask()), api_key="secret").tokens
    finally:
        thread.stop()


def test_an_engine_that_has_ended_is_not_healthy(model_path):
    engine = NativeEngine(load(model_path), EngineConfig(batch=BatchConfig(max_running=8)), threads=1)
    thread = ServerThread(engine, model_path)
    try:
        with httpx.Client(base_url=thread.url) as client:
            assert client.get("/health").status_code == 200
            asyncio.run(engine.close())
            answer = client.get("/health")
            assert (answer.status_code, answer.json()["error"]["type"]) == (503, "EngineError")
            assert post(client, "generate", tokens=PROMPT).status_code == 503
    finally:
        thread.stop()


def test_metrics_count_what_happened(http):
    post(http, "generate", tokens=PROMPT, sampling={"max_tokens": 5})
    post(http, "generate", tokens=PROMPT, sampling={"max_tokens": 4}, stream=True)
    post(http, "generate", tokens=[])
    text = http.get("/metrics").text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert lines['sparring_requests_total{endpoint="generate",outcome="length"}'] == "2"
    assert lines['sparring_requests_total{endpoint="generate",outcome="RequestRefused"}'] == "1"
    assert float(lines["sparring_generated_tokens_total"]) == 9
    assert lines["sparring_time_to_first_token_seconds_count"] == lines["sparring_request_seconds_count"] == "2"
    assert lines['sparring_request_seconds_bucket{le="+Inf"}'] == "2"
    assert 0 < float(lines["sparring_time_per_token_seconds_sum"]) < float(lines["sparring_request_seconds_sum"])
    assert (lines["sparring_weights_version"], lines["sparring_running"], lines["sparring_waiting"]) == (
        "0",
        "0.0",
        "0.0",
    )
    kinds = [line.split()[2:] for line in text.splitlines() if line.startswith("# TYPE ")]
    assert len(kinds) == len({name for name, _ in kinds}) and ["sparring_running", "gauge"] in kinds


def trained_weights(path):
    model = load(path)
    with torch.no_grad():
        for name, parameter in model.state().items():
            if "mlp" in name:
                parameter.mul_(1.3)
    return model.state()


def test_an_update_crosses_and_leaves_nothing_behind(server, model_path, serve):
    state = trained_weights(model_path)

    async def local(engine):
        await engine.pull(publish("policy", 3, state))
        return await engine.generate(ask())

    async def scenario(engine):
        before = await engine.generate(ask())
        await engine.pull(publish("policy", 3, state))
        return before, engine.version, await engine.generate(ask())

    before, version, after = on(server, scenario)
    assert (version, after) == (3, serve(local)) and before.logprobs != after.logprobs
    assert not list(FOLDER.glob(f"{PREFIX}{os.getpid()}-*"))


def test_a_bad_update_is_a_conflict_and_the_old_version_serves_on(server, http, model_path):
    state = trained_weights(model_path)
    wrong_probe = ((1, 2, 3), (-1.0, -2.0))

    async def scenario(engine):
        before = await engine.generate(ask())
        for ref in (publish("policy", 1, state, wrong_probe), publish("critic", 1, state), publish("policy", 1, {})):
            with pytest.raises(WeightsError):
                await engine.pull(ref)
        return before, await engine.generate(ask()), engine.version

    before, after, version = on(server, scenario)
    assert (before, version) == (after, 0)
    assert (
        post(http, "weights", model="policy", version=1, checksum="", location={}, transport="inline").status_code
        == 409
    )
    with published(publish("policy", 1, state)) as ref:
        gone = {"model": "policy", "version": 1, "checksum": ref.checksum, "location": ref.location}
    answer = post(http, "weights", **gone)
    assert (
        answer.status_code == 409 and "its publisher has removed it or has ended" in answer.json()["error"]["message"]
    )


KILLED = """
import fcntl, pathlib, socket, sys, time
path = pathlib.Path(sys.argv[1])
file = path.open("x")
fcntl.flock(file, fcntl.LOCK_EX)
connection = socket.create_connection(("127.0.0.1", int(sys.argv[2])))
connection.sendall(b"POST /v1/weights HTTP/1.1\\r\\nhost: 127.0.0.1\\r\\ncontent-length: 9\\r\\n\\r\\n")
print("sent", flush=True)
time.sleep(600)
"""


def test_what_a_killed_client_lent_is_removed(server, http):
    path = FOLDER / f"{PREFIX}{os.getpid()}-{'0' * 16}"
    words = [sys.executable, "-c", KILLED, str(path), server.url.rpartition(":")[2]]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout.readline() == "sent\n" and path.exists()
        client.kill()
    while path.exists():
        assert http.get("/health").status_code == 200
    assert 'endpoint="weights",outcome="left"' in http.get("/metrics").text


def test_a_run_that_begins_counts_its_versions_from_zero(server, model_path):
    async def whole(engine):
        original = await engine.generate(ask())
        await engine.pull(publish("policy", 7, trained_weights(model_path)))
        again = RemoteEngine(server.url)
        again.begin(load(model_path).state())
        begun, first = again.version, await again.generate(ask())
        await again.pull(publish("policy", 1, trained_weights(model_path)))
        second = await again.generate(ask())
        with pytest.raises(EngineError, match="use one server per run"):
            await engine.generate(ask())
        version = again.version
        await again.close()
        return begun, original, first, second, version

    begun, original, first, second, version = on(server, whole)
    assert (begun, version) == (0, 1) and first == original
    assert set(second.versions.values) == set(second.kv_versions.values) == {1} and second.logprobs != first.logprobs


def test_a_server_that_does_not_fit_the_run_is_refused(server, model_path):
    path = ops.path_name()

    async def scenario(engine):
        with refused_at(f"engine at {server.url}", "a model in bfloat16"):
            engine.check("bfloat16", path, EngineConfig())
        with refused_at(f"engine at {server.url}", "numerics fast"):
            engine.check("float32", "fast", EngineConfig())
        with refused_at(f"engine at {server.url}", "kernel path exact-of-another"):
            engine.check("float32", "exact-of-another", EngineConfig())
        engine.check("float32", path, EngineConfig())

    async def small(engine):
        with pytest.raises(BadInput, match=f"a context of {LONG + 8} tokens"):
            engine.check("float32", path, EngineConfig())
        engine.check("float32", path, EngineConfig(kv=KvConfig(tokens=64)))

    on(server, scenario)
    narrow = ServerThread(NativeEngine(load(model_path), EngineConfig(kv=KvConfig(tokens=64)), threads=1), model_path)
    try:
        on(narrow, small)
    finally:
        narrow.stop()


def test_no_server_and_another_server_are_refused(server):
    with pytest.raises(BadInput, match="engine at http://127.0.0.1:1: expected a running `sparring serve`"):
        RemoteEngine("http://127.0.0.1:1")
    with pytest.raises(BadInput, match="another server, status 404"):
        RemoteEngine(f"{server.url}/elsewhere")


@pytest.mark.parametrize("turn", range(4))
def test_connections_are_answered_or_closed_while_a_server_stops(server, turn):
    """A connection is refused, answered or closed: also one that is accepted in the moment in which the server
    closes."""
    host, port = httpx.URL(server.url).host, httpx.URL(server.url).port
    opened, many = [], threading.Event()

    def knock():
        with suppress(OSError):  # until there is no server any longer
            while len(opened) < 3000:
                opened.append(socket.create_connection((host, port)))
                opened[-1].sendall(b"GET /health HTTP/1.1\r\nhost: here\r\n\r\n")
                if len(opened) == 50:
                    many.set()
        many.set()

    knocking = threading.Thread(target=knock)
    knocking.start()
    many.wait()
    server.stop()
    knocking.join()
    assert len(opened) >= 50
    for one in opened:
        one.settimeout(GUARD_S)
        with one, suppress(ConnectionError):
            while one.recv(4096):
                pass


def test_a_stopping_server_fails_running_requests(server):
    async def scenario(engine):
        stream = engine.stream(ask(max_tokens=LONG))
        await anext(stream)
        crowd = [asyncio.ensure_future(engine.generate(ask(number, max_tokens=LONG))) for number in range(1, 12)]
        await asyncio.sleep(0)
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        found = await asyncio.gather(*crowd, return_exceptions=True)
        await asyncio.to_thread(stopping.join)
        with pytest.raises(EngineError):
            await engine.generate(ask())
        return found

    found = on(server, scenario)
    assert all(isinstance(one, EngineError) or len(one.tokens) == LONG for one in found)
    assert any(isinstance(one, EngineError) for one in found)


def test_adapters_are_loaded_and_named_through_the_server(server, model_path, serve, tmp_path):
    """Beside the model's own weights; one that is not there fails its request alone."""
    ref = publish("policy", 1, read(tiny_adapter(model_path, tmp_path)), adapter="a")
    asked = [replace(ask(n), adapter=name) for n, name in enumerate(("a", None, "b", "a"))]

    async def scenario(engine):
        await engine.pull(ref)
        return await asyncio.gather(*map(engine.generate, asked), return_exceptions=True)

    here, there = serve(scenario), on(server, scenario)
    assert isinstance(there[2], EngineError) and "adapter b" in str(there[2])
    assert [answer for answer in there if isinstance(answer, Completion)] == [here[0], here[1], here[3]]
    assert here[0].versions.values == (1,) and here[1].versions.values == (0,)


def test_odd_heads_and_bodies_over_the_bound_are_refused_in_its_form(model_path):
    """A host that is none, under a key, and a body that is longer than any request of this context."""
    engine = NativeEngine(load(model_path), EngineConfig(batch=BatchConfig(max_running=8)), threads=1)
    server = ServerThread(engine, model_path, api_key="k")
    try:
        most = BESIDE + OF_ID * engine.context + OF_BIAS * engine.model.vocab_size
        with httpx.Client(base_url=server.url, timeout=60, headers={"authorization": "Bearer k"}) as client:
            for host in ("[", "[::1", "x:y", "\u00b2", ""):
                answer = client.post("/v1/abort", json={"id": 1}, headers={"host": host.encode("latin-1")})
                assert answer.status_code == 422 and "POST /v1/abort" in answer.json()["error"]["message"]
                assert client.get("/nowhere", headers={"host": host.encode("latin-1")}).status_code == 404
            for key in (b"", b"Bearer \xff", b"[" * 60_000):
                answer = client.post("/v1/abort", json={"id": "x"}, headers={"authorization": key})
                assert answer.status_code == 401 and "authorization" in answer.json()["error"]["message"]
            too_long = client.post("/v1/generate", content=b" " * (most + 1))
            assert f"at most {most} bytes" in too_long.json()["error"]["message"] and 400 <= too_long.status_code < 500
            assert f"at most {most}" not in client.post("/v1/generate", content=b" " * most).json()["error"]["message"]
            assert client.get("/v1/model").status_code == 200
    finally:
        server.stop()
