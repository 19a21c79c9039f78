"""What a client's request costs before anything is rendered, and what many long rollouts hold.

    python benchmarks/matching.py

Requests are bodies as an agent program sends them, in two dialects: read (`body_of`, `Dialect.read`), then matched
(`Tree.plan`, under a renderer that does nothing). One conversation goes on turn by turn, so that all but its last
messages are known, each as a new object; another has 10,000 messages that nobody said here. A turn's bytes are those of
its rows in the store's form and what Python allocates for it; the prompt as one tuple, which the engine wants, is in
neither.

Then rollouts of 20 turns of 340 ids behind one prompt of 12,000 go through a recorder, a dialect and a real renderer
side by side; counted is what the process's resident memory grows by.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

from common.appending import AppendingRenderer
from common.figures import claim, read_options, resident_bytes
from common.planned import planned

from sparring.gateway.dialects.chat_completions import ChatCompletions
from sparring.gateway.dialects.dialect import ClientCall, ClientRequest
from sparring.gateway.dialects.fields import body_of
from sparring.gateway.dialects.messages import Messages
from sparring.generation import Completion, Rendered, Runs, Sampling
from sparring.record.identity import chain_digests
from sparring.record.lines import START
from sparring.record.recorder import Recorder
from sparring.record.tree import Tree
from sparring.reply import ReplyRequest, whole_reply
from sparring.stages.runtime.garbage import fewer_collections
from sparring.store.codec import encode
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import toy_renderer, toy_task
from sparring.types import Limits, Message, ToolSpec

READS: dict[str, Callable[[ClientCall], ClientRequest]] = {"chat": ChatCompletions().read, "messages": Messages().read}
EARLY, LATE, AROUND = 8, 128, 8
FOREIGN = 10_000
SIZES = (512, 1024, 4096)
"""Bytes of a message."""
PROMPT, TURNS, TOLD, SAID = 12_000, 20, 170, 170
IDS = (7, 11, 0)


class Silent(AppendingRenderer):
    """A renderer that takes no time: whatever is told is three ids."""

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, generation: bool = True) -> Rendered:
        """Return the three ids."""
        return Rendered(tokens=IDS, sampled=(False,) * len(IDS))

    def bridge(
        self, prompt: Sequence[int], completion: Sequence[int], new: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> tuple[int, ...]:
        """Append the three ids."""
        return (*prompt, *completion, *IDS)


def main() -> None:
    """Measure, print, claim."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=1000, help="side by side, whose memory is measured")
    parser.add_argument("--repeats", type=int, default=5, help="of each measurement of time; the best counts")
    options = read_options(parser, rollouts=10, repeats=1)
    with fewer_collections():  # as in a run
        claims = measured(options.rollouts, options.repeats)
    print(json.dumps({"claims": claims}))


def measured(count: int, repeats: int) -> list[dict[str, object]]:
    """Measure and print all; return the claims."""
    claims = []
    for dialect, read in READS.items():
        for size in SIZES:
            reading, matching = foreign(read, size, repeats)
            print(f"{dialect}, {FOREIGN} foreign messages of {size} bytes: {reading:.2f} + {matching:.2f} us a kB")
            claims.append(claim(f"{dialect}, foreign, {size} bytes a message", reading + matching, "us/kB", 5))
            reading, matching, early_us, late_us = growing(read, size, repeats)
            print(f"{dialect}, turn {LATE}, {size} bytes a message: {reading:.2f} + {matching:.2f} us a kB,")
            print(f"  beside reading and digests {late_us:.0f} us, turn {EARLY} {early_us:.0f} us")
            claims.append(claim(f"{dialect}, known, {size} bytes a message", reading + matching, "us/kB", 5))
            name = f"{dialect}, turn {LATE} / {EARLY} beside reading and digests, {size} bytes"
            claims.append(claim(name, late_us / early_us, "", 1.2))
    for name, early, late in turn_bytes():
        print(f"turn {LATE} adds {late:.0f} bytes {name}, turn {EARLY} {early:.0f}")
        claims.append(claim(f"bytes {name}, turn {LATE} / turn {EARLY}", late / early, "", 1.2))
    held = asyncio.run(rollouts(count))
    print(f"{count} rollouts hold {held / 2**30:.2f} GiB, {held / count / 1000:.0f} kB each")
    return [*claims, claim(f"{count} rollouts of {TURNS} turns behind {PROMPT} ids", held / 2**30, "GiB", 1.5)]


def body(messages: Sequence[dict[str, Any]]) -> bytes:
    """A request as a client writes it."""
    return json.dumps({"model": "policy", "max_tokens": 1000, "messages": messages}).encode()


def numbers(start: int, size: int) -> str:
    """A text of about so many bytes."""
    return " ".join(str(1000 + (start + at) % 9000) for at in range(max(1, size // 5)))


def appended(tree: Tree, request: ClientRequest, reply: Message) -> float:
    """Seconds in which a request is matched and its reply written down."""
    runs = Runs.of(0, len(IDS))
    completion = Completion(tokens=IDS, logprobs=(-1.0,) * 3, finish_reason="stop", versions=runs, kv_versions=runs)
    started = time.perf_counter()
    turn = planned(tree, request.messages, request.tools, request.evidence)
    tree.append(turn, completion, reply, Sampling(), "policy")
    return time.perf_counter() - started


def foreign(read: Callable[[ClientCall], ClientRequest], size: int, repeats: int) -> tuple[float, float]:
    """Microseconds a kB in which messages that nobody said here are read, and are matched against what was said."""
    talk = [{"role": "user" if at % 2 == 0 else "assistant", "content": numbers(at, size)} for at in range(FOREIGN + 1)]
    data = body(talk)
    times = []
    for _ in range(repeats):
        tree = Tree(Silent())
        appended(tree, read(ClientCall(body=body_of(body(talk[:1])))), Message(role="assistant", content="Mine."))
        gc.collect()
        started = time.perf_counter()
        request = read(ClientCall(body=body_of(data)))
        reading = time.perf_counter() - started
        times.append((reading, appended(tree, request, Message(role="assistant", content="Yes."))))
    reading, matching = min(times, key=sum)
    return reading * 1e9 / len(data), matching * 1e9 / len(data)


def growing(read: Callable[[ClientCall], ClientRequest], size: int, repeats: int) -> tuple[float, float, float, float]:
    """Microseconds a kB in which the request of a late turn is read, and is matched; and the microseconds of an early
    and of a late turn in which it is matched, without those that the digests of its messages take."""
    columns: list[list[float]] = []
    for _ in range(repeats):
        tree, talk = Tree(Silent()), [{"role": "user", "content": numbers(0, size)}]
        taken: list[tuple[float, float, float]] = []
        for turn in range(LATE):
            data = body(talk)
            started = time.perf_counter()
            request = read(ClientCall(body=body_of(data)))
            read_at = time.perf_counter()
            chain_digests(START, request.messages)
            digested_at = time.perf_counter()
            reply = numbers(2 * turn + 1, size)
            matching = appended(tree, request, Message(role="assistant", content=reply))
            rest = matching - (digested_at - read_at)
            taken.append(((read_at - started) * 1e9 / len(data), matching * 1e9 / len(data), rest * 1e6))
            talk += [{"role": "assistant", "content": reply}, {"role": "user", "content": numbers(2 * turn + 2, size)}]
        late, early = taken[LATE - AROUND :], taken[EARLY - AROUND : EARLY]
        figures = [statistics.median(turn[at] for turn in late) for at in (0, 1)]
        figures += [statistics.median(turn[2] for turn in part) for part in (early, late)]
        columns.append(figures)
    reading, matching, early_us, late_us = map(min, zip(*columns, strict=True))
    return reading, matching, early_us, late_us


def turn_bytes() -> list[tuple[str, float, float]]:
    """Bytes that an early and a late turn add: to the store, and to what Python holds."""
    tree, talk = Tree(AppendingRenderer()), [Message(role="user", content=numbers(0, 5 * TOLD))]
    stored, held = [], []
    tracemalloc.start()
    for turn in range(LATE):
        sent = [Message(role=message.role, content=message.content) for message in talk]  # new objects each turn
        said = tuple(1000 + turn + at for at in range(SAID))
        runs, logprobs = Runs.of(0, SAID), tuple(-1.0 / (at + turn + 1) for at in range(SAID))
        completion = Completion(tokens=said, logprobs=logprobs, finish_reason="stop", versions=runs, kv_versions=runs)
        reply = tree.renderer.parse(said, ())
        before = tracemalloc.get_traced_memory()[0]
        new = tree.append(planned(tree, sent, ()), completion, reply, Sampling(), "policy")
        held.append(tracemalloc.get_traced_memory()[0] - before)
        stored.append(len(encode(tuple(new))))
        del sent, new
        talk += [reply, Message(role="user", content=numbers(turn, 5 * TOLD))]
    tracemalloc.stop()
    pairs = (("in the store", stored), ("in memory", held))
    return [(name, statistics.mean(sizes[1:EARLY]), statistics.mean(sizes[LATE - AROUND :])) for name, sizes in pairs]


async def rollouts(count: int) -> int:
    """Bytes that the process grows by while so many rollouts play side by side, none of them over."""
    renderer, read = toy_renderer(2000), READS["chat"]
    word = " question"
    ids_a_word = len(renderer.tokenizer.encode(word * 100)) / 100
    prompt = word * round(PROMPT / ids_a_word)
    said = tuple(renderer.tokenizer.encode(word * SAID))[: SAID - 1]
    limits = Limits(max_turns=1000, max_tokens=10**9, max_tool_calls=1000)
    recorder = Recorder(
        Forgetful(lambda request: said), renderer, sampling=Sampling(max_tokens=SAID), max_context=1 << 16
    )
    sessions = [recorder.open(toy_task(), rollout_id=f"r{at}", seed=at, limits=limits) for at in range(count)]
    talks = [[{"role": "system", "content": prompt}, {"role": "user", "content": "Begin."}] for _ in range(count)]
    gc.collect()
    before = resident_bytes()
    for turn in range(TURNS):
        for number, session in enumerate(sessions):
            request = read(ClientCall(body=body_of(body(talks[number]))))
            reply = await whole_reply(
                session.reply(ReplyRequest(request.messages, request.tools, evidence=request.evidence))
            )
            told = {"role": "user", "content": f"{number} {turn}" + word * round((TOLD - 12) / ids_a_word)}
            talks[number] += [{"role": "assistant", "content": reply.message.content}, told]
    clients = sum(len(json.dumps(talk[1:])) for talk in talks)
    gc.collect()
    tokens = [sum(len(segment.tokens) for segment in session.segments) for session in sessions[:1]]
    print(f"a rollout has {tokens[0]} ids, a prompt of {len(sessions[0].segments[0].tokens)} among them")
    return resident_bytes() - before - clients


class Forgetful(ScriptedEngine):
    """A scripted engine that keeps no prompts."""

    async def generate(self, request: Any) -> Completion:
        """Answer."""
        completion = await super().generate(request)
        self.requests.clear()
        return completion


if __name__ == "__main__":
    main()
