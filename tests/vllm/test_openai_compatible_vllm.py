"""The OpenAI-compatible engine against a real vLLM, in both of its ways to tell log-probabilities."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparring.engine.adapters.openai_compatible import OpenAiEngine
from sparring.engine.config import EngineConfig
from sparring.engine.native import NativeEngine
from sparring.errors import RequestRefused
from sparring.generation import Completion, Delta, GenerateRequest, Sampling, ScoreRequest
from sparring.model.load import load
from sparring.testing.tiny_models import tiny_model

pytestmark = pytest.mark.vllm

PYTHON = Path(os.environ.get("SPARRING_VLLM_PYTHON", ".venv-vllm/bin/python")).absolute()
PROMPT = (5, 6, 7, 8, 9, 10)
STARTED = "Application startup complete"
CLOSE = 1e-3
"""Nats between two implementations in float32."""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm-openai") / "tiny"
    return tiny_model("qwen3", folder, seed=4, max_position_embeddings=4096, head_dim=32)


@pytest.fixture(scope="module", params=["processed_logprobs", "raw_logprobs"])
def server(request: pytest.FixtureRequest, model_path: Path) -> Iterator[tuple[str, str]]:
    """Its address and its --logprobs-mode."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    arguments = [
        "--skip-tokenizer-init",
        "--dtype",
        "float32",
        "--enforce-eager",
        "--max-num-seqs",
        "16",
        "--block-size",
        "32",
    ]
    arguments += [
        "--kv-cache-memory-bytes",
        str(64 << 20),
        "--logprobs-mode",
        request.param,
        "--generation-config",
        "vllm",
    ]
    command = [
        PYTHON,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        model_path,
        "--port",
        str(port),
        *arguments,
    ]
    settings = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "PYTHONPATH": "",
    }
    runtime = PYTHON.parents[1] / "lib" / "libiomp5.so"
    environment = {**os.environ, **settings, "LD_PRELOAD": str(runtime) if runtime.exists() else ""}
    arguments = [str(part) for part in command]
    with subprocess.Popen(
        arguments, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            said = list(until_started(process))
            assert STARTED in said[-1], "".join(said)
            threading.Thread(target=process.stderr.read, daemon=True).start()  # or it would wait for a reader one day
            yield f"http://127.0.0.1:{port}/v1", request.param
        finally:
            process.terminate()


def until_started(process: subprocess.Popen[str]) -> Iterator[str]:
    """The lines of its log up to the one that says so, or to its end."""
    for line in process.stderr:
        yield line
        if STARTED in line:
            return


def ask(number: int = 0, **sampling: object) -> GenerateRequest:
    return GenerateRequest(
        id=f"r{number}", tokens=PROMPT, sampling=Sampling(**{"max_tokens": 40, "seed": number, **sampling})
    )


def scored(model_path: Path, *asks: ScoreRequest):
    async def main():
        engine = NativeEngine(load(model_path), EngineConfig(), threads=1)
        try:
            return [await engine.score(one) for one in asks]
        finally:
            await engine.close()

    return asyncio.run(main())


def test_it_samples_scores_stops_and_aborts(server: tuple[str, str], model_path: Path) -> None:
    url, mode = server
    processed = mode == "processed_logprobs"

    async def scenario():
        engine = OpenAiEngine(url)
        try:
            warm = [await engine.generate(ask(1, temperature=0.7))] if processed else []
            plain = await engine.generate(ask(2, top_logprobs=3))
            greedy = await engine.generate(ask(3, temperature=0.0))
            stop = plain.tokens[5]
            stopped = await engine.generate(ask(2, stop=(stop,)))
            crowd = await asyncio.gather(*(engine.generate(ask(number)) for number in range(8)))
            judged = await engine.score(
                ScoreRequest(id="s", tokens=(*PROMPT, *plain.tokens), first=len(PROMPT), top_k=3)
            )
            pieces = []
            async for piece in engine.stream(ask(4, max_tokens=3000)):
                pieces.append(piece)
                await engine.abort("r4")
            if not processed:
                with pytest.raises(RequestRefused, match="processed_logprobs"):
                    await engine.generate(ask(5, temperature=0.7))
            with pytest.raises(RequestRefused, match="status 400"):
                await engine.generate(ask(6, max_tokens=5000))
            return warm, plain, greedy, stopped, stop, crowd, judged, pieces
        finally:
            await engine.close()

    warm, plain, greedy, stopped, stop, crowd, judged, pieces = asyncio.run(scenario())
    sampled = [(answer, 0.7) for answer in warm] + [
        (answer, 1.0) for answer in (plain, *crowd, *(() if processed else (greedy,)))
    ]
    asks = [
        ScoreRequest(id="n", tokens=(*PROMPT, *a.tokens), first=len(PROMPT), temperature=t, top_k=3) for a, t in sampled
    ]
    ours = scored(model_path, *asks)
    for (answer, _), scores in zip(sampled, ours, strict=True):
        assert len(answer.tokens) == 40 and answer.finish_reason == "length"
        assert answer.logprobs == pytest.approx(scores.logprobs, abs=CLOSE)
    of_plain = ours[len(warm)]
    assert judged.logprobs == pytest.approx(of_plain.logprobs, abs=CLOSE) and judged.top_ids == of_plain.top_ids
    assert tuple(tuple(id for id, _ in row) for row in plain.top_logprobs) == of_plain.top_ids
    assert stopped.finish_reason == "stop" and stopped.tokens == plain.tokens[: plain.tokens.index(stop) + 1]
    assert len({answer.tokens for answer in crowd}) == 8
    *deltas, last = pieces
    assert isinstance(last, Completion) and last.finish_reason == "abort" and 0 < len(last.tokens) < 3000
    assert all(isinstance(piece, Delta) for piece in deltas) and sum((d.tokens for d in deltas), ()) == last.tokens
