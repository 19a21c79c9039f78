"""A store on a disk that is read-only or full, or under a limit of the process: read, or named; never called damaged.

A namespace of its own has the disks: bubblewrap shows the folder read-only, and a tmpfs of 2 MB.
"""

import json
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from rollouts import make_group

from sparring.store.sqlite import SqliteStore

INSIDE = """
import errno, json, os, resource, shutil, sqlite3, sys
from pathlib import Path
from sparring.errors import SparringError
from sparring.observe.sinks.jsonl import JsonlSink
from sparring.observe.atomic_write import write_whole
from sparring.store.connection import is_blank
from sparring.store.sqlite import SqliteStore

closed, full = Path(sys.argv[1]), Path(sys.argv[2])
said = {}

def do(name, action):
    try:
        said[name] = action()
    except (SparringError, OSError) as error:
        said[name] = f"{type(error).__name__}: {error}"

def read(folder, exclusive=None):
    store = SqliteStore(folder / "store.sqlite", read_only=True, exclusive=exclusive)
    try:
        return [group.index for group in store.groups(stage="rl")]
    finally:
        store.close()

do("read ended", lambda: read(closed / "ended"))
do("read ended alone", lambda: read(closed / "alone", True))
do("read killed", lambda: read(closed / "killed"))
do("read torn off", lambda: read(closed / "torn off"))
do("blank", lambda: is_blank(closed / "ended/store.sqlite"))
do("write", lambda: SqliteStore(closed / "ended/store.sqlite"))
do("sink", lambda: JsonlSink(closed / "ended/metrics.jsonl"))
shutil.copytree(closed / "ended", full / "ended")
store = SqliteStore(full / "run/store.sqlite")
sink = JsonlSink(full / "metrics.jsonl")
with (full / "ballast").open("wb", buffering=0) as ballast:
    for size in (1 << 16, 1):
        try:
            while ballast.write(bytes(size)): pass
        except OSError: pass
do("read full", lambda: read(full / "ended"))
do("write full", lambda: store.put("a", bytes(100_000)))
do("sink full", lambda: sink.event("rl", "x" * 9000))
do("page full", lambda: write_whole(full / "report.html", bytes(9000)))
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True: held.append(os.open("/", os.O_PATH))
except OSError: pass
do("read crowded", lambda: read(closed / "ended"))
for one in held: os.close(one)
print(json.dumps(said))
"""


def test_a_closed_disk_is_read_and_named(tmp_path: Path) -> None:
    here, disk = tmp_path / "here", tmp_path / "disk"
    for name in ("ended", "alone"):
        with closing(SqliteStore(here / name / "store.sqlite", exclusive=name == "alone")) as store:
            store.append(make_group(0), stage="rl")
            if name == "ended":
                shutil.copytree(here / "ended", here / "killed")
                shutil.copytree(here / "ended", here / "torn off", ignore=shutil.ignore_patterns("*-shm"))
    disk.mkdir()
    room = ["bwrap", "--dev-bind", "/", "/", "--ro-bind", str(here), str(here), "--size", str(2 << 20)]
    command = [*room, "--tmpfs", str(disk), "--die-with-parent", sys.executable, "-c", INSIDE, str(here), str(disk)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    for name in ("read ended", "read ended alone", "read killed", "read full"):
        assert said.pop(name) == [0]
    assert said.pop("blank") is False
    assert not any("damaged" in text for text in said.values())
    for name in ("write", "sink", "read torn off"):
        assert "got a read-only disk" in said[name] and "make it writable, or copy the folder" in said[name]
    for name in ("write full", "sink full"):
        assert said[name].startswith("StoreError: /") and "got 0.0 MB free" in said[name]
    assert said["page full"] == f"OSError: [Errno 28] No space left on device: '{disk}/report.html'"
    assert "got none free of the 64 files that a process may open (" in said["read crowded"]
    assert "raise the limit (ulimit -n)" in said["read crowded"]
