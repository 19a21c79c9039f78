"""A run on an engine that another process serves is refused before it starts where that cannot work."""

from __future__ import annotations

from pathlib import Path

import pytest
from common.served import ServerThread

from sparring.cli.main import main
from sparring.engine.config import EngineConfig
from sparring.engine.native import NativeEngine
from sparring.model.load import load

REFUSED = [
    (
        ["engine.kind=remote"],
        "engine: expected urls must be set",
    ),
    (
        ["engine.urls=['http://127.0.0.1:1']"],
        "engine: expected urls must be set",
    ),
    (
        ["engine.kind=openai", "engine.urls=['http://127.0.0.1:1/v1']"],
        "engine.kind: expected an engine that takes weights",
    ),
    (
        ["engine.kind=remote", "engine.urls=['http://127.0.0.1:1']"],
        "engine at http://127.0.0.1:1: expected a running `sparring serve`",
    ),
    (
        ["engine.kind=remote", "engine.urls=['http://[::1']"],
        "expected a running `sparring serve`, got ValueError: Invalid IPv6 URL",
    ),
    (
        ["engine.kind=remote", "engine.urls=['http://127.0.0.1:1']", "engine.kv.idle_bytes=9"],
        "engine.kv.idle_bytes: expected its default",
    ),
    (
        ["engine.kind=remote", "engine.urls=['http://127.0.0.1:1']", "engine.kv.across_turns=offload"],
        "engine.kv.across_turns: expected its default",
    ),
    (
        ["engine.kind=openai", "engine.urls=['http://127.0.0.1:1/v1']", "engine.kv.tokens=4096"],
        "engine.kv.tokens: expected its default",
    ),
    (
        [
            "engine.kind=openai",
            "engine.urls=['http://127.0.0.1:1/v1']",
            'rollout.sampling.constraint={kind="regex",source="a+"}',
        ],
        'rollout.sampling.constraint: expected none with engine.kind = "openai"',
    ),
    (
        ["engine.kind=vllm", "engine.urls=['http://127.0.0.1:1']", "engine.vllm.python=python"],
        "engine.vllm: expected its default",
    ),
    (["engine.kind=vllm", "cluster.kind=ray"], "engine.kind must be native with cluster.kind"),
    (["engine.kind=vllm", "cluster.kind=local", "engine.urls=['unix:x']"], "got vllm with urls"),
    (
        ["engine.kind=remote", "engine.urls=['http://127.0.0.1:1']", "engine.api_key_env=NO_SUCH_KEY"],
        "environment variable NO_SUCH_KEY: expected an API key",
    ),
]


@pytest.mark.parametrize(("settings", "said"), REFUSED, ids=range(len(REFUSED)))
def test_settings_that_do_not_fit_the_engine_are_refused(
    settings: list[str], said: str, given: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(given), *(word for setting in settings for word in ("--set", setting))]) == 2
    assert said in capsys.readouterr().err


def test_a_server_that_computes_otherwise_is_refused_and_one_that_fits_is_named(
    given: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = ServerThread(NativeEngine(load(checkpoint), EngineConfig(), threads=1), checkpoint)
    try:
        remote = ["check", str(given), "--set", "engine.kind=remote", "--set", f"engine.urls=['{server.url}']"]
        assert main([*remote, "--set", "models.policy.dtype=bfloat16"]) == 2
        assert f"engine at {server.url}: expected a model in bfloat16" in capsys.readouterr().err
        assert main([*remote, "--set", "engine.kind=vllm"]) == 2
        assert f"engine at {server.url}: expected a vllm engine" in capsys.readouterr().err
        assert main(remote) == 0
        assert f"engine at {server.url} serves float32 on exact-" in capsys.readouterr().out
    finally:
        server.stop()
