"""How long the engine takes to start, part by part, and how much of that is memory that the machine has yet to give.

    python benchmarks/start.py [--models A,B] [--dtypes float32,bfloat16] [--repeats 3] [--pause 10] [--threads 2]

The models of benchmarks/engine.py. Each start is a process of its own. What counts is everything but importing torch
and the model's module, of which the target allows two seconds. A virtual machine gives unused memory back to its host
and may get it again slowly, so there are two figures: `paused`, after that many seconds in which nothing ran; and
`given`, where another process has written and left as much memory just before the model is loaded (its time does not
count). The last line is one JSON object; medians over the repeats, which take turns.
"""

from __future__ import annotations

import argparse
import importlib
import json
import mmap
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common.figures import read_options
from engine import MODELS, START_MARGIN_S, create
from peers.sides import environment

MODULE = "transformers.models.qwen3.modeling_qwen3"
LEFT = 2.0
"""Memory that is written and left, in sizes of the model's files: the weights once more, and what else a start
writes."""


def write(size: int) -> None:
    """Write `size` bytes, print how long it took in seconds, and leave them."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    page, began = b"\1" * (2 << 20), time.perf_counter()
    while memory.tell() + len(page) <= size:
        memory.write(page)
    print(time.perf_counter() - began)


def start(folder: str, dtype: str, kv_bytes: int, threads: int, given: int) -> None:
    """Start here, and print the seconds of each part. `given`: bytes that are written and left before the model is
    loaded, or 0."""
    marks = [time.perf_counter()]
    import torch

    importlib.import_module(MODULE)
    marks.append(time.perf_counter())
    from sparring.engine.config import EngineConfig, KvConfig
    from sparring.engine.native import NativeEngine
    from sparring.model.load import load

    torch.set_num_threads(threads)
    written = 0.0
    marks.append(time.perf_counter())
    if given:
        found = subprocess.run(
            [sys.executable, __file__, "--write", str(given)], check=True, capture_output=True, text=True
        )
        waited = time.perf_counter() - marks[-1]
        written, marks = float(found.stdout), [mark + waited for mark in marks]
    model = load(folder, dtype=dtype)
    marks.append(time.perf_counter())
    NativeEngine(model, EngineConfig(kv=KvConfig(bytes=kv_bytes)), threads=threads)
    marks.append(time.perf_counter())
    parts = ("imports", "our_imports", "load", "engine")
    seconds = {part: marks[i + 1] - marks[i] for i, part in enumerate(parts)}
    print(json.dumps({**seconds, "write": written}))


def measure(name: str, dtype: str, folder: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure a model paused and given; print the parts."""
    given = int(LEFT * sum(file.stat().st_size for file in Path(folder).glob("*.safetensors")))
    runs: dict[str, list[dict[str, float]]] = {"paused": [], "given": []}
    one = {"folder": folder, "dtype": dtype, "kv_bytes": MODELS[name][1]["kv_bytes"], "threads": arguments.threads}
    for _ in range(arguments.repeats):
        for state in runs:
            if state != "given":  # the system gives memory back by the clock, and tells nobody
                time.sleep(arguments.pause)
            asked = {**one, "given": given if state == "given" else 0}
            command = [sys.executable, __file__, "--one", json.dumps(asked)]
            process = subprocess.run(
                command, env=environment(arguments.threads), check=True, capture_output=True, text=True
            )
            runs[state].append(json.loads(process.stdout.splitlines()[-1]))
    claims = []
    for state, all_parts in runs.items():
        parts = {part: round(statistics.median(run[part] for run in all_parts), 2) for part in all_parts[0]}
        value = statistics.median(run["our_imports"] + run["load"] + run["engine"] for run in all_parts)
        rate = f", memory written at {given / parts['write'] / 2**30:.2f} GiB/s before" if parts["write"] else ""
        said = {name: part for name, part in parts.items() if part}
        print(
            f"model {name}, {dtype}, {state}: {value:.2f} s beside {parts['imports']} s of imports, {said}{rate}",
            flush=True,
        )
        target = {"unit": "s", "target": START_MARGIN_S, "direction": "<="}
        claims.append(
            {"name": f"start of the engine, model {name}, {dtype}, {state}", "value": round(value, 2), **target}
        )
    return claims


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="A,B")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--pause", type=float, default=10.0, help="seconds in which nothing runs, before a start")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--write", type=int, help=argparse.SUPPRESS)
    arguments = read_options(parser, models="A", dtypes="float32", repeats=1, pause=0.0)
    if arguments.write:
        return write(arguments.write)
    if arguments.one:
        return start(**json.loads(arguments.one))
    claims = []
    for name in arguments.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            create(name, folder, arguments.threads)
            for dtype in arguments.dtypes.split(","):
                claims += measure(name, dtype, folder, arguments)
    print(json.dumps({"benchmark": "start", "claims": claims}))


if __name__ == "__main__":
    main()
