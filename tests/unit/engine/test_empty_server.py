"""A server that was started without a model: it takes one from a run, and nothing else from anybody."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from common.served import ServerThread
from common.tiny_adapters import tiny_adapter

from sparring.engine import wire
from sparring.engine.adapters.remote import RemoteEngine
from sparring.engine.adapters.weight_sender import WeightSender
from sparring.engine.config import EngineConfig
from sparring.engine.native import NativeEngine
from sparring.errors import EngineError, WeightsError
from sparring.generation import GenerateRequest, Sampling
from sparring.model.hub import base_folder
from sparring.model.load import load
from sparring.testing.tiny_models import tiny_model
from sparring.weights import files
from sparring.weights.http import Http
from sparring.weights.inline import reference
from sparring.weights.links import WeightLinks

ASK = GenerateRequest(id="", tokens=(5, 6, 7), sampling=Sampling(max_tokens=8, seed=3))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Checkpoint folders of two models of other shapes, one with another decoder than the lean one."""
    folder = tmp_path_factory.mktemp("models")
    return [Path(tiny_model(kind, folder / kind, seed=4)) for kind in ("qwen3", "gpt_neox")]


@pytest.fixture(scope="module")
def empty() -> Iterator[ServerThread]:
    """One server for all tests; each leaves a model to the next."""
    thread = ServerThread(None, Path())
    yield thread
    thread.stop()


def client(empty: ServerThread) -> RemoteEngine:
    return RemoteEngine(empty.url, links=WeightLinks([Http()]))


def answers(engine: RemoteEngine | NativeEngine, ask: GenerateRequest = ASK) -> tuple[object, object]:
    async def asked() -> tuple[object, object]:
        try:
            answer = await engine.generate(ask)
        finally:
            await engine.close()
        return answer.tokens, answer.logprobs

    return asyncio.run(asked())


def test_it_serves_no_request_before_it_has_a_model(empty: ServerThread) -> None:
    assert client(empty).served.files == ""
    with pytest.raises(EngineError, match="got none yet"):
        answers(client(empty))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_has_the_bits_of_an_engine_with_the_folder_whatever_it_served_before(
    empty: ServerThread, models: list[Path], dtype: str
) -> None:
    for folder in models:
        engine, model = client(empty), load(folder, dtype=dtype)
        assert "config.json" in engine.send_files(folder, dtype, "exact")
        assert not engine.send_files(folder, dtype, "exact")
        engine.check(dtype, model.path_name, EngineConfig())
        engine.begin(model.state())
        own = NativeEngine(load(folder, dtype=dtype), EngineConfig(), threads=1)
        assert answers(engine) == answers(own)


def test_a_runs_adapter_travels_behind_its_base(empty: ServerThread, models: list[Path], tmp_path: Path) -> None:
    adapted = tiny_adapter(models[0], tmp_path / "adapter")
    engine, model = client(empty), load(adapted)
    engine.send_files(base_folder(adapted), "float32", "exact")
    own = model.adapters.everywhere
    assert own is not None
    engine.begin(model.state(), own.state())
    with_adapter = answers(engine)
    assert with_adapter == answers(NativeEngine(load(adapted), EngineConfig(), threads=1))
    assert with_adapter != answers(NativeEngine(load(models[0]), EngineConfig(), threads=1))


def posted(empty: ServerThread, state: dict[str, torch.Tensor], **changed: str) -> None:
    """Send files as a peer that checks nothing."""
    sender, link = WeightSender(empty.url, {}, 60.0), Http()
    ref = link.send(replace(reference(files.MODEL, 0, state), **changed), sender)
    sender.post("files", wire.encode(wire.files_form(ref, "float32", "exact")))


def tensor(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def test_a_hostile_or_broken_peer_writes_nothing_and_leaves_a_server_that_works(
    empty: ServerThread, models: list[Path], tmp_path: Path
) -> None:
    good = files.tensors(files.read(models[0]))
    there = {path.name for path in Path(tempfile.gettempdir()).glob("sparring-serve-*")}
    for name in (f"..{tmp_path}/found", f"{tmp_path}/found", "model.py"):
        with pytest.raises(WeightsError, match="only"):
            posted(empty, {**good, name: tensor(b"x")})
    with pytest.raises(WeightsError, match="checksum"):
        posted(empty, good, checksum="0" * 32)
    for config in (b"{", b"[]", b'{"model_type": "none such"}', b'{"auto_map": {"AutoConfig": "a/b--c.D"}}'):
        with pytest.raises(WeightsError, match="files: "):
            posted(empty, {**good, "config.json": tensor(config)})
        assert client(empty).served.files == ""
    with pytest.raises(WeightsError, match="upload of at most"):
        posted(empty, {**good, "x": torch.empty(1, dtype=torch.uint8).expand(sum(files.MOST_BYTES.values()) + 1)})
    assert not list(tmp_path.iterdir())
    assert {path.name for path in Path(tempfile.gettempdir()).glob("sparring-serve-*")} == there
    engine = client(empty)
    engine.send_files(models[0], "float32", "exact")
    engine.begin(load(models[0]).state())
    assert answers(engine)


def test_a_server_with_a_model_of_its_own_keeps_it(models: list[Path]) -> None:
    thread = ServerThread(NativeEngine(load(models[0]), EngineConfig(), threads=1), models[0])
    try:
        assert not client(thread).send_files(models[1], "float32", "exact")
        with pytest.raises(WeightsError, match="without a model"):
            posted(thread, files.tensors(files.read(models[1])))
    finally:
        thread.stop()
