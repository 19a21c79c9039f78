"""A run on an engine that another process serves is refused before it starts where that cannot work."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparring.cli.main import main
from sparring.engine.config import EngineConfig
from sparring.engine.native import NativeEngine
from sparring.model.load import load
from sparring.testing.served import ServerThread

REFUSED = [
    (
        ["engine.kind=remote"],
        'url must be set for kind "remote" and "openai" and no other, got \'\' with kind "remote"',
    ),
    (
        ["engine.url=http://127.0.0.1:1"],
        'url must be set for kind "remote" and "openai" and no other, got \'http://127.0.0.1:1\' with kind "native"',
    ),
    (
        ["engine.kind=openai", "engine.url=http://127.0.0.1:1/v1"],
        'engine.kind: expected an engine that takes weights while the run trains, got "openai"',
    ),
    (
        ["engine.kind=remote", "engine.url=http://127.0.0.1:1"],
        "engine at http://127.0.0.1:1: expected a running `sparring serve`, got ConnectError",
    ),
    (["engine.kind=remote", "engine.url=http://[::1"], "expected a running `sparring serve`, got InvalidURL"),
    (
        ["engine.kind=remote", "engine.url=http://127.0.0.1:1", "engine.idle_kv_bytes=9"],
        "got 9; leave it out; give it to `sparring serve`, as --set engine.idle_kv_bytes=9",
    ),
    (
        ["engine.kind=remote", "engine.url=http://127.0.0.1:1", "engine.kv_across_turns=offload"],
        "engine.kv_across_turns: expected its default unless engine.kind = \"native\", got 'offload'",
    ),
    (
        ["engine.kind=openai", "engine.url=http://127.0.0.1:1/v1", "engine.kv_tokens=4096"],
        "got 4096; leave it out; the server decides it",
    ),
    (
        ["engine.kind=openai", "engine.url=http://127.0.0.1:1/v1", 'rollout.constraint={kind="regex",source="a+"}'],
        'rollout.constraint: expected none with engine.kind = "openai", which takes no token masks from its client, got a regex',
    ),
    (
        ["engine.kind=remote", "engine.url=http://127.0.0.1:1", "engine.api_key_env=NO_SUCH_KEY"],
        "environment variable NO_SUCH_KEY: expected an API key, got nothing",
    ),
]


@pytest.mark.parametrize(("settings", "said"), REFUSED, ids=range(len(REFUSED)))
def test_it_is_refused(settings: list[str], said: str, given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(given), *(word for setting in settings for word in ("--set", setting))]) == 2
    assert said in capsys.readouterr().err


def test_a_server_that_computes_otherwise_is_refused_and_one_that_fits_is_named(
    given: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = ServerThread(NativeEngine(load(checkpoint), EngineConfig(), threads=1), checkpoint)
    try:
        remote = ["check", str(given), "--set", "engine.kind=remote", "--set", f"engine.url={server.url}"]
        assert main([*remote, "--set", "models.policy.dtype=bfloat16"]) == 2
        assert (
            "a model in bfloat16, as in models.policy.dtype, got float32; serve it with --dtype"
            in capsys.readouterr().err
        )
        assert main(remote) == 0
        assert f"engine: {server.url} serves float32 on exact-" in capsys.readouterr().out
    finally:
        server.stop()
