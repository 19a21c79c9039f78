"""Chat with a checkpoint, in the world of its run or with a Python tool in a box."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from sparring.cluster.inline import InlineCluster
from sparring.engine.config import BatchConfig, EngineConfig
from sparring.errors import BadInput, EnvError, LimitReached
from sparring.generation import Sampling
from sparring.kernels.devices import resolve_device
from sparring.launch.chat_world import UNLIMITED, ChatSetting, ChatWorld, bare_setting, setting_of
from sparring.launch.checkpoint import CONFIG, find_checkpoint, is_run_or_step, run_of
from sparring.model.config import ModelConfig
from sparring.model.hub import base_folder
from sparring.protocols import Renderer
from sparring.recipe.load import load_recorded
from sparring.recipe.run_config import RunConfig
from sparring.record.recorder import Recorder
from sparring.render.config import RenderConfig
from sparring.render.load import load_renderer
from sparring.sandbox.make import make_boxes
from sparring.stages.context import POLICY
from sparring.stages.models.context_length import max_context, outline_of
from sparring.train.config import TrainConfig
from sparring.types import Message, Task, ToolSpec

MAX_TURNS = 8


class Chat:
    """Chat of one conversation at a time. The engine caches the conversation; the box is open as long as the
    conversation.

    Attributes:
        notes: sentences for the user before the first question.
        cut_short: reason why the last answer was cut short; "" if it was not.
        proposals: texts of held-out tasks of the run; empty for a bare checkpoint.

    Args:
        path: Hugging Face folder, or a run or one of its saved steps. The chat of a run uses the run's world and tasks.
        temperature: sampling temperature; 0 is greedy.
        max_tokens: maximum number of sampled tokens in one turn.
        seed: the same seed and words give the same answers.
    """

    def __init__(self, path: Path, *, tools: bool, temperature: float, max_tokens: int, seed: int) -> None:
        checkpoint = find_checkpoint(path)
        run = run_of(path) if is_run_or_step(path) else None
        recipe = None if run is None else load_recorded(run / CONFIG)
        policy = ModelConfig(path=str(checkpoint)) if recipe is None else recipe.models[POLICY]
        model = msgspec.structs.replace(policy, path=str(checkpoint), init=None, lora=None, served=None)
        render = RenderConfig() if recipe is None else recipe.render
        engine = EngineConfig(batch=BatchConfig(max_running=1))
        threads = len(os.sched_getaffinity(0))
        self._cluster = InlineCluster(
            models={POLICY: model},
            train=TrainConfig(),
            engine=engine,
            device=resolve_device("auto", "device"),
            threads=threads,
        )
        serving, folder = self._cluster.engine(POLICY, path=str(checkpoint)), base_folder(checkpoint)
        renderer = load_renderer(folder, model.renderer, model.thinking, render.control_tokens, render.thoughts)
        setting, self.notes = _choose_setting(recipe, tools, renderer)
        self._recorder = Recorder(
            serving,
            renderer,
            sampling=Sampling(temperature=temperature, max_tokens=max_tokens),
            max_context=max_context(outline_of(checkpoint), engine, model.dtype),
        )
        task = Task(id="chat", env="chat", messages=(), limits=UNLIMITED)
        self._session = self._recorder.open(task, rollout_id="chat", seed=seed, role=POLICY)
        self._tasks = setting.tasks if setting is not None else ()
        self.proposals = tuple(_text(task) for task in self._tasks)
        self._boxes = None if setting is None else make_boxes(msgspec.structs.replace(setting.sandbox, servers=1))
        self._world = None if setting is None or self._boxes is None or not tools else ChatWorld(setting, self._boxes)
        self.cut_short = ""

    async def begin(self, number: int = 0) -> list[Message]:
        """Start a new conversation and return its first messages. `number` is the proposal to begin with, from 1; 0
        lets the user begin."""
        task = self._tasks[number - 1] if number else None
        if self._world is not None:
            return await self._world.begin(task)
        return [] if task is None else list(task.messages)

    async def reply(self, messages: Sequence[Message]) -> tuple[Message, list[Message]]:
        """Return the answer to a conversation, and the messages between the two: tool calls and their results.

        Raises:
            LimitReached: the conversation exceeds the model's context.
        """
        between: list[Message] = []
        specs = self._world.tools if self._world is not None else ()
        for _ in range(MAX_TURNS):
            answer = await self._sample_reply([*messages, *between], specs)
            if self.cut_short or self._world is None:
                return answer, between
            observation = await self._world.step(answer)
            if observation.done or not observation.messages:
                return answer, between
            between += [answer, *observation.messages]
        return replace(answer, tool_calls=()), between

    async def _sample_reply(self, messages: Sequence[Message], specs: Sequence[ToolSpec]) -> Message:
        """Return one reply. If a limit cut the reply short, return the part that was sampled."""
        before, self.cut_short = len(self._session.segments), ""
        try:
            return await self._session.complete(messages, specs)
        except LimitReached as limit:
            if len(self._session.segments) == before:
                raise
            full = "the model's context is full, /new begins again"
            self.cut_short = "max-tokens is used up" if limit.reason == "max_tokens" else full
            message = self._session.segments[-1].message
            assert message is not None, "a session ends its record with what was sampled"
            return replace(message, tool_calls=())

    async def close(self) -> None:
        """Close the engine and the box."""
        try:
            if self._world is not None:
                await self._world.close()
        finally:
            await self._session.close()
            await self._cluster.close()
            if self._boxes is not None:
                await self._boxes.close()


def _choose_setting(
    recipe: RunConfig | None, tools: bool, renderer: Renderer
) -> tuple[ChatSetting | None, tuple[str, ...]]:
    """Return the setting of a chat and sentences about it for the user. A bare checkpoint whose chat format cannot show
    tools gets no tools."""
    if recipe is None:
        if not tools:
            return None, ()
        setting = bare_setting()
        try:
            renderer.render([Message(role="user", content="Who?")], setting.make().tools)
        except BadInput as error:
            return None, (f"without the Python tool: {error}",)
        return setting, ()
    try:
        return setting_of(recipe), ()
    except (BadInput, EnvError) as error:
        return None, (f"without the tools and tasks of its run: {error}",)


def _text(task: Task) -> str:
    return " ".join(" ".join(m.content for m in task.messages if m.role != "system").split())
