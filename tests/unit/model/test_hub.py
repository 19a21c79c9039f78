"""A checkpoint by hub name: from the library's cache, laid out by hand as the library does it, and refused in time."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from suite import short_of

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {"config.json": "{}", "tokenizer.json": "{}", "model.safetensors": "weights"}
CODE = "import sys; from sparring.model.hub import local_folder; print(local_folder(sys.argv[1]))"


def cache(home: Path, files: dict[str, str]) -> Path:
    """`owner/name` in the cache of HF_HOME; its snapshot folder."""
    model = home / "hub" / "models--owner--name"
    snapshot = model / "snapshots" / COMMIT
    for folder in (model / "refs", model / "blobs", snapshot):
        folder.mkdir(parents=True)
    (model / "refs" / "main").write_text(COMMIT)
    for name, text in files.items():
        digest = hashlib.sha256(text.encode()).hexdigest()
        (model / "blobs" / digest).write_text(text)
        (snapshot / name).symlink_to(Path("../../blobs") / digest)
    return snapshot


def found(name: str, home: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """What `local_folder` says in a process of its own: the library reads its settings when it is imported."""
    environment = {**os.environ, "HF_HOME": str(home), **settings}
    return subprocess.run(
        [sys.executable, "-c", CODE, name], env=environment, capture_output=True, text=True, timeout=60
    )


def test_a_name_in_the_cache_is_its_snapshot(tmp_path: Path) -> None:
    snapshot = cache(tmp_path, FILES)
    done = found("owner/name", tmp_path, HF_HUB_OFFLINE="1")
    assert done.stdout.strip() == str(snapshot), done.stderr


def test_a_cached_model_needs_no_answer_from_the_hub(tmp_path: Path) -> None:
    snapshot = cache(tmp_path, FILES)
    with socket.create_server(("127.0.0.1", 0)) as hub:  # takes connections and never answers
        done = found("owner/name", tmp_path, HF_ENDPOINT=f"http://127.0.0.1:{hub.getsockname()[1]}")
        hub.settimeout(0)
        with pytest.raises(BlockingIOError):
            hub.accept()  # nobody asked
    assert done.stdout.strip() == str(snapshot), done.stderr


@pytest.mark.parametrize("missing", ["tokenizer.json", "model.safetensors"])
def test_a_download_that_was_broken_off_is_not_taken_for_the_model(tmp_path: Path, missing: str) -> None:
    cache(tmp_path, {name: text for name, text in FILES.items() if name != missing})
    assert "expected a folder here or a model on the hub" in found("owner/name", tmp_path, HF_HUB_OFFLINE="1").stderr


def test_a_sharded_model_needs_all_its_files(tmp_path: Path) -> None:
    shards = {"a": "one.safetensors", "b": "two.safetensors"}
    index = '{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}'
    files = {"config.json": "{}", "tokenizer.json": "{}", "model.safetensors.index.json": index, "one.safetensors": "1"}
    cache(tmp_path / "part", files)
    assert found("owner/name", tmp_path / "part", HF_HUB_OFFLINE="1").stdout == ""
    snapshot = cache(tmp_path / "whole", {**files, shards["b"]: "2"})
    assert found("owner/name", tmp_path / "whole", HF_HUB_OFFLINE="1").stdout.strip() == str(snapshot)


@pytest.mark.parametrize("name", short_of(["owner/unknown", "unknown", "no name at all"], ["owner/unknown"]))
def test_an_unknown_name_is_refused_without_a_network(tmp_path: Path, name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    for settings in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": f"http://127.0.0.1:{port}"}):
        done = found(name, tmp_path, **settings)
        assert f"BadInput: model {name}: expected a folder" in done.stderr


@pytest.mark.slow
def test_a_hub_that_never_answers_is_given_up_on(tmp_path: Path) -> None:
    """`found` allows a minute, the library alone would wait for ever."""
    with socket.create_server(("127.0.0.1", 0)) as hub:
        done = found("owner/unknown", tmp_path, HF_ENDPOINT=f"http://127.0.0.1:{hub.getsockname()[1]}")
    assert "BadInput: model owner/unknown: expected a folder here or a model on the hub" in done.stderr
