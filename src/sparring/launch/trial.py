"""Trials of agent programs: a program plays one rollout on a scripted policy, and each of its requests is printed."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import shlex
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sparring.engine.scripted import ScriptedEngine
from sparring.errors import LimitReached, refusal
from sparring.gateway.server import NOTED, Door, Gateway
from sparring.generation import GenerateRequest, Sampling
from sparring.launch.scripted_replies import ANSWER, WANTED, Wanted, said_to
from sparring.observe.wait_reports import waiting
from sparring.record.lines import place_named
from sparring.record.recorder import RecordedSession, Recorder
from sparring.render.demonstrate import reply_tokens
from sparring.render.load import load_renderer
from sparring.render.train_tokenizer import train_tokenizer
from sparring.reply import Reply, ReplyRequest, ReplyStream, SampledReply, SessionLayer
from sparring.scratch import scratch
from sparring.store.deltas import branch_ids
from sparring.types import Limits, Segment, Task
from sparring.types import Message as Said

SHOWN = 200
"""Maximum number of characters of a text that are printed."""

KEYS = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY", "GOOGLE_API_KEY")
"""Environment variables from which the vendors' clients read an API key."""

ADDRESSES = {
    "OPENAI_BASE_URL": "/v1",
    "OPENAI_API_BASE": "/v1",
    "ANTHROPIC_BASE_URL": "",
    "GOOGLE_GEMINI_BASE_URL": "",
    "GEMINI_BASE_URL": "",
}
"""Environment variables from which the vendors' clients read an address, each with the path after the server's
address."""

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramTrial:
    """Settings of a trial of a program.

    Attributes:
        replies: replies of the policy, in order; `said_to` gives the replies after them.
        max_turns: maximum number of replies in the rollout.
        max_context: maximum number of tokens of a prompt and its reply together.
        timeout_s: seconds after which the program is killed.
    """

    command: Sequence[str]
    replies: Sequence[Said] = ()
    max_turns: int = 40
    max_context: int = 400_000
    timeout_s: float = 600.0


@dataclass(kw_only=True, slots=True)
class _Exchange:
    """HTTP request of the program as the server saw it, with the ids of the replies that were sampled for it."""

    method: str
    path: str
    body: bytearray = field(default_factory=bytearray)
    status: int = 0
    noted: str = ""
    answer: bytearray = field(default_factory=bytearray)
    wanted: Wanted | None = None
    replies: list[str] = field(default_factory=list)


_EXCHANGE: ContextVar[_Exchange | None] = ContextVar("exchange", default=None)


class _WatchedGateway(Gateway):
    """Gateway that records its requests."""

    def __init__(self, note: Callable[[_Exchange], None]) -> None:
        super().__init__()
        self._show = note

    def application(self) -> ASGIApp:
        application = super().application()

        async def watched(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await application(scope, receive, send)
                return
            exchange = _Exchange(method=scope["method"], path=scope["path"])
            _EXCHANGE.set(exchange)

            async def receiving() -> Message:
                message = await receive()
                exchange.body += message.get("body", b"")
                return message

            async def sending(message: Message) -> None:
                if message["type"] == "http.response.start":
                    exchange.status = message["status"]
                    headers = dict(message.get("headers", ()))
                    exchange.noted = headers.get(NOTED.encode(), b"").decode()
                elif exchange.status >= 400:
                    exchange.answer += message.get("body", b"")
                await send(message)

            try:
                await application(scope, receiving, sending)
            finally:
                self._show(exchange)

        return watched


class _WatchedRequests(SessionLayer):
    """Session layer that hands each request to the scripted policy and to the exchange of its HTTP request."""

    async def reply(self, request: ReplyRequest, below: Reply) -> ReplyStream:
        messages, constraint = tuple(request.messages), request.constraint
        WANTED.set(Wanted(messages=messages, tools=tuple(request.callable), constraint=constraint))
        exchange = _EXCHANGE.get()
        if exchange is not None:
            exchange.wanted = Wanted(messages=messages, tools=tuple(request.tools), constraint=constraint)
        async with aclosing(below(request)) as parts:
            async for part in parts:
                if exchange is not None and isinstance(part, SampledReply):
                    exchange.replies.append(part.id)
                yield part


@functools.cache
def _renderer() -> Any:
    texts = ("You may call one or more functions to assist with the user query.", ANSWER, '{"name": "arguments"}')
    with scratch() as folder:
        train_tokenizer(texts, 400, folder)
        return load_renderer(folder, "auto", False)


def try_program(trial: ProgramTrial, say: Say) -> bool:
    """Let a program play one rollout on the scripted policy, and `say` each line: its requests, and how it ends.

    Returns:
        True if the rollout counts as completed, as it would in a run, and the program ended with status 0.

    Raises:
        BadInput: the program is not found.
    """
    program = shutil.which(trial.command[0])
    if program is None:
        raise refusal("COMMAND", "a program that can be run", repr(trial.command[0]), "name one on PATH, or its path")
    return asyncio.run(_try(trial, program, say))


async def _try(trial: ProgramTrial, program: str, say: Say) -> bool:
    renderer, replies = _renderer(), iter(trial.replies)

    def script(request: GenerateRequest) -> Sequence[int]:
        reply = next(replies, None) or said_to(WANTED.get())
        return reply_tokens(renderer, reply)

    engine = ScriptedEngine(script)
    limits = Limits(max_turns=trial.max_turns, max_tokens=10**9, max_tool_calls=10**6)
    task = Task(id="try", env="try", messages=(Said(role="user", content="-"),), data={}, limits=limits)
    recorder = Recorder(engine, renderer, sampling=Sampling(max_tokens=65536), max_context=trial.max_context)
    session = recorder.open(task, rollout_id="try/0/0", seed=0)
    session.add_layer(_WatchedRequests())
    numbers = iter(range(1, 1 << 60))

    def note(exchange: _Exchange) -> None:
        for line in _lines_of(exchange, next(numbers), session.segments):
            say(line)

    gateway = _WatchedGateway(note)
    door = await gateway.open(session, {"*": "policy"})
    try:
        ended = await _run(trial, program, door)
    finally:
        await gateway.shut(door)
    return _print_end(ended, session, engine, say)


async def _run(trial: ProgramTrial, program: str, door: Door) -> int | None:
    """Return the exit status of the program, or None if it was killed at the time limit."""
    near = ",".join(filter(None, (os.environ.get("NO_PROXY", ""), "127.0.0.1,localhost")))
    environment = {**os.environ, "NO_PROXY": near, "no_proxy": near, **dict.fromkeys(KEYS, door.key)}
    environment |= {name: door.url + behind for name, behind in ADDRESSES.items()}
    process = await asyncio.create_subprocess_exec(
        program, *trial.command[1:], env=environment, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
    )
    try:
        with waiting(shlex.join(trial.command)):
            return await asyncio.wait_for(process.wait(), trial.timeout_s)
    except TimeoutError:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and what it started
        await process.wait()


def _lines_of(exchange: _Exchange, number: int, segments: Sequence[Segment]) -> Iterator[str]:
    body = _json(exchange.body)
    model = body.get("model") or exchange.path.rpartition("/models/")[2].partition(":")[0]
    path = exchange.path.partition("/k/")[2].partition("/")[2] if exchange.path.startswith("/k/") else exchange.path
    yield f"{number}. {exchange.method} {path}: {exchange.status}"
    if exchange.wanted is not None:
        tools = ", ".join(tool.name for tool in exchange.wanted.tools) or "none"
        streamed = ", streamed" if body.get("stream") or ":stream" in path else ""
        yield f"   model {model}, {len(exchange.wanted.messages)} messages, tools: {tools}{streamed}"
    if exchange.noted:
        yield f"   noted, without effect: {exchange.noted}"
    if exchange.status >= 400:
        error = _json(exchange.answer).get("error")
        text = error.get("message") if isinstance(error, dict) else None
        yield f"   refused: {text or exchange.answer.decode(errors='replace')}"
    for id in exchange.replies:
        yield from _lines_of_reply(place_named(id), segments)
    if exchange.wanted is None and exchange.status == 200 and body.get("messages", body.get("contents")):
        yield "   answered with the reply that an equal request got"


def _lines_of_reply(place: int | None, segments: Sequence[Segment]) -> Iterator[str]:
    reply = next((s for s in segments if (s.index if s.place is None else s.place) == place), None)
    if reply is None or reply.message is None or reply.parent is None:
        return
    request = segments[reply.parent]
    texts = [_short(reply.message.content)] if reply.message.content else []
    texts += [
        f"calls {call.name}({_short(json.dumps(dict(call.arguments or {})))})" for call in reply.message.tool_calls
    ]
    yield f"   reply, {len(reply.tokens)} ids: {' '.join(texts) or 'nothing'}"
    if request.fork is not None:
        fork = request.fork
        before, after = _short(fork.before), _short(fork.after)
        yield f"   begins a branch: {fork.reason}, message {fork.message}: {before!r} -> {after!r}"
    else:
        yield "   begins the conversation" if request.parent is None else "   goes on"


def _print_end(status: int | None, session: RecordedSession, engine: ScriptedEngine, say: Say) -> bool:
    """Print how the rollout ended. Return whether it is completed, with exit status 0."""
    segments = session.segments
    sampled = [segment for segment in segments if segment.model is not None]
    prompts = {request.tokens for request in engine.requests}
    exact = sum(branch_ids(segments, segment.parent) in prompts for segment in sampled)
    parents = {segment.parent for segment in segments}
    branches = sum(segment.index not in parents for segment in segments)
    say(f"{len(sampled)} turns, {branches} branches; the prompts of {exact} are, id for id, what the engine was given")
    limit: LimitReached | None = session.limit
    if status is None:
        outcome = "truncated, timeout: the program took too long"
    elif limit is not None:
        outcome = f"truncated, {limit.reason}: {limit}"
    elif not sampled:
        outcome = f"infra_failed: the program ended with status {status} and {session.silence}"
    else:
        outcome = f"completed: the program ended with status {status}"
    say(f"a rollout of a run would be {outcome}")
    return outcome.startswith("completed") and status == 0


def _json(data: bytes | bytearray) -> dict[str, Any]:
    try:
        value = json.loads(bytes(data))
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
