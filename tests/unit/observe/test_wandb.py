"""wandb itself takes what a run says, on this machine: no account, no network."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.extra


LIFE = """
import sys
from sparring.errors import BadInput
from sparring.observe.config import ObserveConfig
from sparring.observe.sinks.load import load_sinks
from sparring.observe.sinks.sink import SampleRow
recipe = {"rl": {"steps": 6}, "none": None}
try:
    (sink,) = load_sinks(ObserveConfig(sinks=("wandb",)), sys.argv[1], name="a: run?", recipe=recipe)
except BadInput as error:
    sys.exit(str(error))
sink.start("rl", 6)
for step in range(int(sys.argv[2]), int(sys.argv[3])):
    sink.log("rl", step, {"loss": 1 / step, "rollout/reward": 0.5})
sink.samples("rl", step, [SampleRow(rollout="rl/0/0", task="t", conversation="user: hi", reward=None, outcome="x")])
sink.event("rl", "something")
sink.close()
sink.close()
"""


def one_life(folder: Path, first: int, end: int, mode: str) -> str:
    """A run that is started, or goes on, and logs some steps; what it ends with on stderr."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment = {**kept, "WANDB_MODE": mode, "HOME": str(folder), "NETRC": str(folder / "netrc")}
    command = [sys.executable, "-c", LIFE, str(folder), str(first), str(end)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120).stderr


def logged(file: Path) -> list[dict[str, str]]:
    """The rows of one of wandb's own files: name -> JSON. It is a LevelDB log (blocks of 32 KiB; chunks of checksum,
    length, kind, piece of a record) of protocol buffers behind a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, rows, whole, place = file.read_bytes(), [], b"", 7
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            record = wandb_internal_pb2.Record.FromString(whole)
            items = record.history.item if record.HasField("history") else ()
            rows += [{item.key or "/".join(item.nested_key): item.value_json for item in items}] if items else []
            whole = b""
    return rows


def test_a_resumed_run_goes_on_in_the_same_wandb_run(tmp_path: Path) -> None:
    one_life(tmp_path, 1, 4, "offline")
    one_life(tmp_path, 4, 7, "offline")
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert [file.name for file in files] == [f"run-{(tmp_path / 'wandb.id').read_text()}.wandb"] * 2
    rows = [row for file in files for row in logged(file)]
    tables = [row for row in rows if "rl/samples/_type" in row]
    assert [row["rl/samples/_type"] for row in tables] == ['"table-file"'] * 2
    shown = [json.loads(file.read_text()) for file in tmp_path.glob("wandb/**/*.table.json")]
    assert [[3, "rl/0/0", "t", "user: hi", None, "x"]] in [table["data"] for table in shown]
    assert [row["rl/event"] for row in rows if "rl/event" in row] == ['"something"'] * 2
    rows = [row for row in rows if row not in tables and "rl/event" not in row]
    assert [(row["rl/step"], float(row["rl/loss"]), row["rl/rollout/reward"]) for row in rows] == [
        (str(step), 1 / step, "0.5") for step in range(1, 7)
    ]


def test_a_run_without_a_wandb_login_is_refused(tmp_path: Path) -> None:
    said = one_life(tmp_path, 1, 2, "online").splitlines()[-1]
    assert said.startswith("observe.sinks: expected wandb")
    assert said.endswith("; run `wandb login`, set WANDB_MODE=offline, or remove wandb")
