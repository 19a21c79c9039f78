"""A checkpoint to talk to, with a Python tool in a box."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sparring.cluster.inline import InlineCluster
from sparring.engine.config import EngineConfig
from sparring.envs.base import Env
from sparring.envs.tools.python import PythonTool
from sparring.errors import LimitReached
from sparring.generation import Sampling
from sparring.model.config import ModelConfig
from sparring.model.hub import base_folder
from sparring.protocols import Sandbox
from sparring.record.recorder import Recorder
from sparring.render.load import load_renderer
from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.sandbox.check import check_sandbox
from sparring.sandbox.config import SandboxConfig
from sparring.stages.context import POLICY
from sparring.stages.models.context_length import max_context, outline_of
from sparring.train.config import TrainConfig
from sparring.types import BoxSpec, Limits, Message, Task, ToolSpec

MAX_TURNS = 8


class _World(PythonTool, Env):
    """A world that is nothing but the tool."""


class Chat:
    """One conversation. What was said before stays in the engine's cache; the box lives as long as the chat.

    Attributes:
        cut_short: why the last answer ended before its end, "" where it did not.

    Args:
        checkpoint: a Hugging Face folder.
        tools: whether the Python tool is offered.
        temperature: 0 is greedy.
        max_tokens: sampled tokens in one turn.
        seed: the same seed and words give the same answers.
    """

    def __init__(self, checkpoint: Path, *, tools: bool, temperature: float, max_tokens: int, seed: int) -> None:
        if tools:
            check_sandbox(SandboxConfig())
        model, engine = ModelConfig(path=str(checkpoint)), EngineConfig(max_running=1)
        threads = len(os.sched_getaffinity(0))
        self._cluster = InlineCluster(
            models={POLICY: model}, train=TrainConfig(), engine=engine, device="cpu", threads=threads
        )
        self._recorder = Recorder(
            self._cluster.engine(POLICY, path=str(checkpoint)),
            load_renderer(base_folder(checkpoint)),
            sampling=Sampling(temperature=temperature, max_tokens=max_tokens),
            max_context=max_context(outline_of(checkpoint), engine, model.dtype),
        )
        limits = Limits(max_turns=1 << 30, max_tokens=1 << 30, max_tool_calls=1 << 30)
        task = Task(id="chat", env="chat", messages=(), limits=limits, box=BoxSpec())
        self._session = self._recorder.open(task, rollout_id="chat", seed=seed, role=POLICY, priority=0)
        self._boxes = BubblewrapBoxes(SandboxConfig(servers=1))
        self._world = _World() if tools else None
        self._task = task
        self._box: Sandbox | None = None
        self.cut_short = ""

    async def reply(self, messages: Sequence[Message]) -> tuple[Message, list[Message]]:
        """The answer to a conversation, and the messages on the way to it: calls and their results.

        Raises:
            LimitReached: the conversation has grown past the model's context.
        """
        between: list[Message] = []
        specs = self._world.tools if self._world is not None else ()
        for _ in range(MAX_TURNS):
            answer = await self._said([*messages, *between], specs)
            if self.cut_short:
                return answer, between
            if self._world is None or not answer.tool_calls:
                return answer, between
            if self._box is None:
                self._box = await self._boxes.take(BoxSpec())
                await self._world.open(self._task, self._box)
            observation = await self._world.step(answer)
            between += [answer, *observation.messages]
        return replace(answer, tool_calls=()), between

    async def _said(self, messages: Sequence[Message], specs: Sequence[ToolSpec]) -> Message:
        """One reply, also where it was cut short: what was said up to there."""
        before, self.cut_short = len(self._session.segments), ""
        try:
            return await self._session.complete(messages, specs)
        except LimitReached as limit:
            if len(self._session.segments) == before:
                raise
            full = "the model's context is full, /new begins again"
            self.cut_short = "max-tokens is used up" if limit.reason == "max_tokens" else full
            said = self._session.segments[-1].message
            assert said is not None, "a session ends its record with what was sampled"
            return replace(said, tool_calls=())

    async def close(self) -> None:
        """Stop the engine and the box."""
        if self._box is not None:
            await self._box.close()
        await self._session.close()
        await self._cluster.close()
        await self._boxes.close()
