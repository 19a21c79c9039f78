"""What the record of a session costs: bytes a token, and the time of a late turn against that of an early one.

    python benchmarks/record.py

One session on a scripted engine, under a renderer that only appends: a loop that sends the whole conversation each
turn, once with one line of turns and once with 64 branches of one prompt in turn. Memory is what Python has allocated
for the record (tracemalloc), without the engine's. Time is that of `Tree.plan` and `Tree.append`, the median of the
turns around; the prompt as one tuple, which the engine wants, is not in it.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import tracemalloc

from common.appending import AppendingRenderer
from common.figures import claim, read_options
from common.planned import planned

from sparring.generation import Completion, Runs, Sampling
from sparring.record.tree import Tree
from sparring.types import Message

TOLD, SAID = 131, 131
BRANCHES = 64
TURNS = {1: (8, 128, 256), BRANCHES: (8, 32)}
"""Of each branch, by the number of branches."""
EARLY, LATE = 32, 256
AROUND = 8


def main() -> None:
    """Measure, print, claim."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="of each measurement of time; the best counts")
    repeats = read_options(parser, repeats=1).repeats
    claims = []
    for branches, counts in TURNS.items():
        for turns in counts:
            bytes_a_token, tokens = memory(turns, branches)
            print(f"{branches} branches, {turns} turns, {tokens} tokens: {bytes_a_token:.0f} bytes a token")
            claims.append(claim(f"bytes a token, {turns} turns, {branches} branches", bytes_a_token, "B", 150))
        ratio, late_us = min(slowdown(branches) for _ in range(repeats))
        print(f"{branches} branches: turn {LATE} takes {late_us:.0f} us, {ratio:.2f} times turn {EARLY}")
        claims.append(claim(f"plan and append, turn {LATE} / turn {EARLY}, {branches} branches", ratio, "", 1.5))
    print(json.dumps({"claims": claims}))


def memory(turns: int, branches: int) -> tuple[float, int]:
    """Bytes a token of a record of so many turns in each branch, and its tokens."""
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    tree, _ = session(turns, branches)
    gc.collect()
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    tokens = sum(len(segment.tokens) for segment in tree.segments)
    return used / tokens, tokens


def slowdown(branches: int) -> tuple[float, float]:
    """The median time of turns around the late one over that of those around the early one; and the late one in
    microseconds."""
    _, times = session(LATE, branches)
    early, late = (statistics.median(times[(turn - AROUND) * branches : turn * branches]) for turn in (EARLY, LATE))
    return late / early, late * 1e6


def session(turns: int, branches: int) -> tuple[Tree, list[float]]:
    """A tree in which each branch has so many turns, and the seconds of each turn; the branches take turns."""
    tree, times = Tree(AppendingRenderer()), []
    first = Message(role="user", content=numbers(0, TOLD - 1))
    lines = [[first] for _ in range(branches)]
    for turn in range(turns):
        for number, messages in enumerate(lines):
            tokens = (*range(1000 * (number + turn) + 500, 1000 * (number + turn) + 499 + SAID), 0)
            logprobs = tuple(-1.0 / (at + turn + 1) for at in range(SAID))
            runs = Runs.of(0, SAID)
            completion = Completion(
                tokens=tokens, logprobs=logprobs, finish_reason="stop", versions=runs, kv_versions=runs
            )
            reply = tree.renderer.parse(tokens, ())
            started = time.perf_counter()
            asked = planned(tree, messages, ())
            tree.append(asked, completion, reply, Sampling(), "policy")
            times.append(time.perf_counter() - started)
            messages += [reply, Message(role="tool", content=numbers(turn + number, TOLD - 1))]
    return tree, times


def numbers(start: int, count: int) -> str:
    """A message of so many ids."""
    return " ".join(str(1000 + start * 7 + at) for at in range(count))


if __name__ == "__main__":
    main()
