"""Harness that runs an unmodified agent program in the rollout's box.

The program reaches one server, the gateway with the rollout's session, and no other network. It has a home (`/agent`)
and a work folder (`/box`), which the world fills before and reads afterwards. If the world has tools, they use the
rollout's box, and the program has a box of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from sparring.errors import EnvError, LimitReached, RequestRefused, SandboxError, Unanswered, boundary, refusal
from sparring.harness.find import Installation, find_program
from sparring.harness.image_start import check_starts
from sparring.harness.preset import KEY, AgentProgram, fill, load_preset
from sparring.harness.relay import relay_to
from sparring.harness.world_tools import SampledCalls, WorldTools
from sparring.protocols import Boxes, Episode, Session, ToolHost
from sparring.reply import Reply, ReplyHead, ReplyPart, ReplyRequest, ReplyStream, SessionLayer
from sparring.sandbox.roots import HOST_IMAGES
from sparring.types import BoxSpec, ExecResult, Message, ReplyPiece, Task

T = TypeVar("T")
PORT = 8700
URL = f"http://127.0.0.1:{PORT}"
"""Address of the gateway in the box, equal in every rollout so that prompts are equal."""

HOME, WORK, MODEL = "/agent", "/box", "policy"
LONGEST_ARGUMENT = 128 << 10
"""Maximum number of bytes of an argument, a limit of the kernel."""

LAST_WORDS = 2000
"""Maximum number of characters of a program's output in an error or a note."""


class Address(Protocol):
    """Address of a session for a program outside this process.

    Attributes:
        url: URL of the server, without a path.
        key: API key of the session.
        tools: tools of the world, which the server offers; None without tools.
        reward_key: key for rewards from outside; "" if the run takes none.
    """

    url: str
    key: str
    reward_key: str
    tools: ToolHost | None


class OpenDoor(Protocol):
    """Opener of an HTTP endpoint for a session; the address has its URL and key."""

    def __call__(
        self, session: Any, *, models: Mapping[str, Any] = {}, leave_out: Sequence[str] = ()
    ) -> AbstractAsyncContextManager[Address]:
        """Open a session for as long as the context lasts.

        Args:
            models: models by the program's names for them.
            leave_out: types of the vendor's own tools that are removed from requests.
        """


class ProgramRequests(SessionLayer):
    """Session layer that counts a program's requests and records what ends its rollout. It adds the calls in replies to
    the account `calls`.

    Attributes:
        limit: limit that the rollout hit, or None. The context length does not count, since a client may compact and go
            on.
        refused: permanent refusal of a request, or None.
    """

    def __init__(self, session: Session, calls: SampledCalls) -> None:
        self.session = session
        self.calls = calls
        calls.when_over = self._hit
        self.requests = 0
        self.limit: LimitReached | None = None
        self.refused: RequestRefused | None = None
        self._end = asyncio.Event()

    @property
    def unanswered(self) -> str:
        """Description of what happened to the requests, if the rollout has nothing to score: no request was answered
        with a turn, and none hit a limit of the rollout or of the context. Otherwise ""."""
        session = self.session
        return "" if session.has_turn or session.limit is not None else session.silence

    async def reply(self, request: ReplyRequest, below: Reply) -> ReplyStream:
        self.requests += 1
        self.calls.go_on(request.messages)
        if self.limit is not None and self.limit.reason == "max_tool_calls":  # calls from code have hit their limit
            raise self.limit
        offered = _OfferedCalls(self.calls)
        try:
            async with aclosing(below(request)) as parts:
                async for part in parts:
                    offered.add(part)
                    yield part
        except (LimitReached, RequestRefused) as error:
            self._hit(error)
            raise

    def overflow(self, limit: LimitReached) -> None:
        self.requests += 1

    def deliver(self, reply: str, delivered: bool) -> None:
        if not delivered:
            self.calls.reopen(reply)

    async def awaited(self, work: Awaitable[T], grace_s: float) -> T | None:
        """Return the result of a client's work. Cancel it and return None if it has not ended `grace_s` seconds after
        the rollout hit a limit or a request was refused for good."""
        working, over = asyncio.ensure_future(work), asyncio.ensure_future(self._end.wait())
        try:
            await asyncio.wait((working, over), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                await asyncio.wait((working,), timeout=grace_s)
            return working.result() if working.done() else None
        finally:
            working.cancel()
            over.cancel()
            await asyncio.gather(working, over, return_exceptions=True)

    def _hit(self, error: LimitReached | RequestRefused) -> None:
        if isinstance(error, RequestRefused):
            self.refused = error
            self._end.set()
        elif error.reason != "context_length":
            self.limit = error
            self._end.set()


class _OfferedCalls:
    """Calls of one reply. Each call may run as soon as it is read from the stream."""

    def __init__(self, calls: SampledCalls) -> None:
        self._calls, self._reply, self._num_offered = calls, "", 0

    def add(self, part: ReplyPart) -> None:
        """Offer the calls of a part of the reply, or of the whole reply."""
        if isinstance(part, ReplyHead):
            self._reply = part.id
        elif isinstance(part, ReplyPiece):
            if part.call is not None:
                self._calls.offer(self._reply, self._num_offered, part.call)
                self._num_offered += 1
        else:
            for at, call in enumerate(part.message.tool_calls[self._num_offered :], start=self._num_offered):
                self._calls.offer(part.id, at, call)


class ProgramHarness:
    """Harness that runs an agent program. Boxes of this run need its `mounts`: files and folders of the host, by their
    path in the boxes. Implements `protocols.Harness`."""

    def __init__(
        self, name: str, preset: AgentProgram, script: str, installation: Installation, open_door: OpenDoor
    ) -> None:
        self.name = name
        self.mounts: Mapping[str, str] = installation.mounts
        self._preset, self._script, self._installation, self._open_door = preset, script, installation, open_door

    def box_of(self, task: Task, *, tools: bool) -> BoxSpec:
        """Return the box for a rollout of a task: the task's own, with larger limits if the program runs in it. If the
        world has tools, the program has another box."""
        spec = task.box or BoxSpec(timeout_s=60.0)
        return spec if tools else self._with_program_limits(spec)

    def _with_program_limits(self, spec: BoxSpec) -> BoxSpec:
        preset = self._preset
        return replace(
            spec,
            memory_bytes=max(spec.memory_bytes, preset.memory_bytes),
            disk_bytes=max(spec.disk_bytes, preset.disk_bytes),
            processes=max(spec.processes, preset.processes),
        )

    async def check_image(self, task: Task, boxes: Boxes, *, tools: bool) -> bool:
        """Start the program in a box of the task's image. Return False if the task has no image of its own, or the
        program runs in another box."""
        spec, installed = self.box_of(task, tools=tools), self._installation
        if tools or spec.image in HOST_IMAGES:
            return False
        lines = (installed.in_images, installed.start)
        await check_starts(self.name, boxes, spec, lines, self._environment({}), PORT)
        return True

    async def run(self, episode: Episode) -> None:
        """Let the program work on the task until it ends.

        Raises:
            LimitReached: the program exceeded its time or memory.
            EnvError: the world failed.
            Unanswered: the program ended without a reply or a limit: it made no request, or was refused.
            BadInput: the world has tools, but the preset has no table for them.
            SandboxError: the boxes run no programs.
        """
        box = _box_of(episode)
        with boundary(EnvError, f"environment {episode.task.env}, task {episode.task.id}: open"):
            observation = await episode.env.open(episode.task, episode.box)
        if observation.done:
            return
        if episode.env.tools and self._preset.with_tools is None:
            do = f"use a preset with a table [with_tools], or leave the tools to {self.name}"
            raise refusal(KEY, "a program that is handed the world's tools", f"{self.name}, which takes none", do)
        messages = (*episode.task.messages, *observation.messages)
        calls = SampledCalls(episode.task.limits.max_tool_calls, from_code=self._preset.calls_from_code)
        requests, tools = ProgramRequests(episode.session(), calls), WorldTools(episode.env, calls)
        own = await box.beside(self._with_program_limits(BoxSpec())) if episode.env.tools else box
        try:
            async with AsyncExitStack() as stack:
                stack.enter_context(requests.session.layered(requests))
                with episode.queue():  # the wait for the gateway has no time limit
                    door = await stack.enter_async_context(
                        self._open_door(requests.session, models=self._preset.models, leave_out=self._preset.leave_out)
                    )
                door.tools = tools if episode.env.tools else None
                has_own = own is box and self.box_of(episode.task, tools=False).image not in HOST_IMAGES
                start = self._installation.in_images if has_own else self._installation.start
                result = await self._run(own, start, door, requests, messages)
        finally:
            if own is not box:
                await own.close()
        episode.note("program", _note_of(self.name, result, requests))
        self._judge(result, requests)
        if requests.session.last_words is not None:
            await tools.answer(requests.session.last_words)

    async def _run(
        self,
        box: Any,
        start: Sequence[str],
        door: Address,
        requests: ProgramRequests,
        messages: Sequence[Message],
    ) -> ExecResult:
        """Write the program's files, run the program, whose command begins with `start`, and return its result."""
        values = self._values(door, requests.session, messages)
        files = dict(self._preset.files)
        words = self._preset.command[1:]
        if door.tools is not None and self._preset.with_tools is not None:
            files |= self._preset.with_tools.files
            words += self._preset.with_tools.arguments
        for path, text in files.items():
            await box.write(f"{HOME}/{path}", fill(text, values).encode())
        if self._script:  # written unchanged: a prompt filled into source code could become code
            await box.write(f"{HOME}/agent.py", self._script.encode())
        argv = [*start, *(fill(word, values) for word in words)]
        if max(len(word.encode()) for word in argv) >= LONGEST_ARGUMENT:
            raise refusal(self.name, "a prompt that fits an argument (128 KiB)", "a longer one", "give it as stdin")
        own = {name: fill(text, values) for name, text in self._preset.environment.items()}
        running: Awaitable[ExecResult] = box.program(
            argv,
            environment=self._environment(own),
            stdin=fill(self._preset.stdin, values),
            port=PORT,
            timeout_s=self._preset.timeout_s,
            output_bytes=self._preset.output_bytes,
            served=relay_to(door.url),
        )
        result = await requests.awaited(running, self._preset.grace_s)
        return result or ExecResult(exit_code=137, stdout="", stderr="", wall_s=0.0, timed_out=True)

    def _environment(self, own: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of the program, with its preset's `own` variables."""
        places = {"PATH": self._installation.search, "HOME": HOME, "TMPDIR": "/tmp", "LANG": "C.UTF-8", "TZ": "UTC"}
        return {**places, **self._installation.environment, **own}

    def _values(self, door: Address, session: Session, messages: Sequence[Message]) -> dict[str, Any]:
        preset = self._preset
        texts = [*preset.command, preset.stdin, *preset.files.values(), *preset.environment.values()]
        has_system = any("{system}" in text for text in texts)
        return {
            "url": URL,
            "key": door.key,
            "model": MODEL,
            "context": session.max_context,
            "reply": session.max_reply,
            "recent": session.max_context // 8,
            "tools": f"{URL}/mcp",
            "system": "\n\n".join(m.content for m in messages if m.role == "system"),
            "prompt": "\n\n".join(m.content for m in messages if not has_system or m.role != "system"),
        }

    def _judge(self, result: ExecResult, requests: ProgramRequests) -> None:
        """Raise the error that the end of the program stands for, if any. The exit status is ignored, because the
        session knows of limits and failures.

        Raises:
            Unanswered: no request was answered.
            LimitReached: the rollout hit a limit, or the program was killed at one.
        """
        if requests.unanswered:
            raise Unanswered(f"harness {self.name}: {_end_of(result)} and {requests.unanswered}{_last_words(result)}")
        if requests.limit is not None:
            raise requests.limit
        if result.out_of_memory:
            raise LimitReached("resources", f"harness {self.name}: {_end_of(result)}")
        if result.timed_out:
            raise LimitReached("timeout", f"harness {self.name}: {_end_of(result)}")


def load_program(name: str, folder: Path, open_door: OpenDoor, *, calls_from_code: bool = False) -> ProgramHarness:
    """Return the harness of the preset `name`, which may also be a path to a preset. `folder` is searched for the
    program. `calls_from_code` sets the preset's key of this name."""
    preset, script = load_preset(name)
    if calls_from_code and not preset.calls_from_code:
        preset = msgspec.structs.replace(preset, calls_from_code=True)
    return ProgramHarness(name, preset, script, find_program(preset, folder), open_door)


def _box_of(episode: Episode) -> Any:
    """Return the box of an episode. Raises SandboxError if the box runs no programs."""
    box = episode.box
    if box is None or not hasattr(box, "program"):
        raise SandboxError(f"{KEY}: expected a box that runs programs; do: set sandbox.enabled = true")
    return box


def _note_of(name: str, result: ExecResult, requests: ProgramRequests) -> dict[str, Any]:
    return {
        "harness": name,
        "exit_code": result.exit_code,
        "failed": bool(result.exit_code) and requests.limit is None and not (result.timed_out or result.out_of_memory),
        "wall_s": result.wall_s,
        "requests": requests.requests,
        "unsampled_calls": requests.calls.unsampled,
        "timed_out": result.timed_out,
        "out_of_memory": result.out_of_memory,
        "stdout": result.stdout[-LAST_WORDS:],
        "stderr": result.stderr[-LAST_WORDS:],
    }


def _end_of(result: ExecResult) -> str:
    if result.timed_out:
        return f"the program was killed after {result.wall_s:.3g} s"
    if result.out_of_memory:
        return "the program was killed, for its memory was over its limit"
    return f"the program ended with status {result.exit_code}"


def _last_words(result: ExecResult) -> str:
    text = (result.stderr.strip() or result.stdout.strip())[-LAST_WORDS:]
    return f": {text}" if text else ""
