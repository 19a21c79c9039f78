"""Published agent programs on a scripted policy: played as a rollout of the folder world, and what it recorded."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from folder import FolderWorld, folder_task

from sparring.errors import BadInput
from sparring.gateway.server import open_door
from sparring.generation import Completion, Delta, GenerateRequest, Sampling
from sparring.harness.by_environment import mounts_of
from sparring.harness.load import load_harness
from sparring.record.recorder import Recorder
from sparring.record.token_counts import Imitator
from sparring.record.transcript import TextRecorder, TextRequest
from sparring.render.demonstrate import reply_tokens
from sparring.render.grammars.call_format import call_id
from sparring.rollout.config import RetriesConfig, RolloutConfig
from sparring.rollout.journal import Journals
from sparring.rollout.runner import Finished, RolloutRunner
from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.sandbox.config import SandboxConfig
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import toy_renderer
from sparring.types import Limits, Message, Segment, ToolCall, ToolSpec

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / ".harnesses"
RENDERER = toy_renderer()
Reply = Message | tuple[int, ...]


def says(content: str, *calls: tuple[str, dict[str, Any]]) -> Message:
    """A reply with these calls."""
    tool_calls = tuple(
        ToolCall(id=f"call_{n}", name=name, arguments=arguments) for n, (name, arguments) in enumerate(calls)
    )
    return Message(role="assistant", content=content, tool_calls=tool_calls)


def sampled(renderer: Any, reply: Message, calls: Iterator[int]) -> tuple[int, ...]:
    """The ids of a reply, its calls under ids that the format writes; with a thought where it takes no reply without.

    Args:
        renderer: of the format.
        reply: that is sampled.
        calls: numbers of the calls of a conversation.
    """
    made = tuple(replace(call, id=call_id(renderer.name, call.name, next(calls))) for call in reply.tool_calls)
    reply = replace(reply, tool_calls=made)
    try:
        return reply_tokens(renderer, reply)
    except BadInput:
        return reply_tokens(renderer, replace(reply, reasoning="So it is."))


@dataclass
class Played:
    """A rollout: how it ended, the segments, what the engine was asked, the program's note."""

    finished: Finished
    engine: Any
    note: dict[str, Any] = field(default_factory=dict)
    renderer: Any = RENDERER

    @property
    def segments(self) -> tuple[Segment, ...]:
        return self.finished.rollout.trajectories[0].segments

    @property
    def ending(self) -> str:
        return self.finished.rollout.outcome.reason

    @property
    def reward(self) -> float | None:
        return None if self.finished.score is None else self.finished.score.reward

    @property
    def turns(self) -> int:
        return sum(segment.model is not None for segment in self.segments)

    @property
    def roots(self) -> int:
        return sum(segment.parent is None for segment in self.segments)

    @property
    def branches(self) -> int:
        """Leaves of the tree."""
        parents = {segment.parent for segment in self.segments}
        return sum(segment.index not in parents for segment in self.segments)

    @property
    def exact(self) -> float:
        """The share of sampled turns whose recorded prompt is, id for id, what the engine was given."""
        given = [request.tokens for request in self.engine.requests]
        recorded = [self._prompt(segment) for segment in self.segments if segment.model is not None]
        return sum(prompt in given for prompt in recorded) / len(recorded) if recorded else 0.0

    def prompt(self, number: int) -> str:
        """The text of a prompt that the engine was given."""
        return self.renderer.decode(self.engine.requests[number].tokens)

    def _prompt(self, segment: Segment) -> tuple[int, ...]:
        path, at = [], segment.parent
        while at is not None:
            path.append(self.segments[at].tokens)
            at = self.segments[at].parent
        return tuple(token for tokens in reversed(path) for token in tokens)


class Requested:
    """An engine, and the requests that it was given."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.requests: list[GenerateRequest] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: GenerateRequest) -> Completion:
        self.requests.append(request)
        return await self._engine.generate(request)

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Delta | Completion]:
        self.requests.append(request)
        async for part in self._engine.stream(request):
            yield part


class Unhurried(ScriptedEngine):
    """A scripted engine that lets others run after each token, so that a reply is read while it is sampled."""

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Delta | Completion]:
        async for part in super().stream(request):
            yield part
            await asyncio.sleep(0)


class Cuts:
    """Relay in front of a door that closes a connection in mid-stream, once for each size.

    Args:
        sizes: bytes of answers that come through a connection before it is closed.

    Attributes:
        left: sizes at which nothing was cut yet.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.left = list(sizes)

    @asynccontextmanager
    async def open_door(self, session: Any, **settings: Any) -> AsyncIterator[Any]:
        """Open a door whose connections go through the relay."""
        async with open_door(session, **settings) as door:
            port = int(door.url.rpartition(":")[2])

            async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                upstream = socket.socket()
                upstream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # little waits between door and client
                upstream.setblocking(False)
                await asyncio.get_running_loop().sock_connect(upstream, ("127.0.0.1", port))
                answers, requests = await asyncio.open_connection(sock=upstream, limit=1024)
                try:
                    await asyncio.gather(self._forward(reader, requests), self._answer(answers, writer))
                except ConnectionError:
                    pass
                finally:
                    for side in (writer, requests):
                        side.transport.abort()

            server = await asyncio.start_server(relay, "127.0.0.1", 0)
            door.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            try:
                yield door
            finally:
                server.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.write_eof()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward answers up to the next size.

        Raises:
            ConnectionAbortedError: it was reached.
        """
        forwarded = 0
        while data := await reader.read(256):
            writer.write(data)
            await writer.drain()
            forwarded += len(data)
            if self.left and forwarded >= self.left[0]:
                self.left.pop(0)
                raise ConnectionAbortedError
        writer.write_eof()


def play(
    harness: str,
    replies: Sequence[Reply] | Callable[[str], Reply],
    *,
    tools: tuple[ToolSpec, ...] = (),
    limits: Limits = Limits(max_turns=40, max_tokens=100_000, max_tool_calls=80),
    max_context: int = 400_000,
    prompt: str = "Do it.",
    native: Any = None,
    fail_on: Collection[int] = (),
    cuts: Cuts | None = None,
    by_expert: bool = False,
    renderer: Any = RENDERER,
) -> Played:
    """Play a rollout of the folder world.

    Args:
        harness: as a recipe names it.
        replies: in the order in which they are asked for, or by the text of the prompt; a tuple is ids.
        tools: of the world.
        limits: of the task.
        max_context: ids.
        prompt: of the task.
        native: an engine that samples in the place of the scripted one.
        fail_on: numbers of the requests, counted from 1, that the scripted engine fails.
        cuts: closes connections in mid-stream.
        by_expert: messages are replied by an expert whom the policy is to imitate: no ids are sampled.
        renderer: of the policy.
    """
    left = iter(()) if callable(replies) else iter(replies)
    calls = itertools.count()

    def script(request: GenerateRequest) -> Sequence[int]:
        reply = replies(renderer.decode(request.tokens)) if callable(replies) else next(left)
        return sampled(renderer, reply, calls) if isinstance(reply, Message) else reply

    scripted = ScriptedEngine if cuts is None else Unhurried
    engine: Any = scripted(script, fail_on=fail_on) if native is None else Requested(native)
    notes: list[tuple[str, dict[str, Any]]] = []
    loaded = load_harness(harness, ("policy",), open_door if cuts is None else cuts.open_door, PROGRAMS)
    log = Journals(recorded=lambda kind, name, data: notes.append((kind, dict(data))))

    async def expert(request: TextRequest) -> Message:
        prompt = renderer.decode(renderer.render(request.messages, request.tools).tokens)
        reply = replies(prompt) if callable(replies) else next(left)
        assert isinstance(reply, Message)
        return reply

    async def main() -> Finished:
        boxes = BubblewrapBoxes(SandboxConfig(servers=1), mounts_of(loaded))
        sampling = Sampling(max_tokens=64 if native is not None else 4096)
        recorder: Any = Recorder(engine, renderer, sampling=sampling, max_context=max_context)
        if by_expert:
            ids = partial(reply_tokens, renderer)
            imitator = Imitator(renderer=renderer, reply_ids=ids, max_context=max_context, max_reply=4096)
            recorder = TextRecorder(expert, "expert", imitator)
        runner = RolloutRunner(
            FolderWorld(tools), boxes, recorder, loaded, RolloutConfig(retries=RetriesConfig(rebuilds=0)), log=log
        )
        try:
            task = folder_task(limits=limits, prompt=prompt)
            return await runner.run(task, rollout_id="rl/0/0", index=0, seed=7)
        finally:
            await engine.close()
            await boxes.close()

    finished = asyncio.run(main())
    return Played(finished, engine, next((data for kind, data in notes if kind == "program"), {}), renderer)
