"""A world that returns more than fits anywhere: its rollout is truncated, and what it returned is not even rendered."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from common.appending import AppendingRenderer
from fates import EmptyBox, Fates, make_stack

from sparring.errors import LimitReached
from sparring.generation import Rendered
from sparring.harness.chat import ChatHarness
from sparring.protocols import Sandbox
from sparring.record.recorder import Recorder
from sparring.record.request import CHARACTERS_PER_TOKEN
from sparring.rollout.runner import RolloutRunner
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import ToyEnv, ToyWorld, toy_task
from sparring.types import Message, Observation, Outcome, Task, ToolSpec

HUGE = "too much " * 12_000_000  # 108 MB; a megabyte takes seconds to render, and 300 MB


class Talks(ToyEnv):
    """Says too much, at once or when a tool is called."""

    def __init__(self, at_once: bool) -> None:
        super().__init__()
        self.at_once = at_once

    async def open(self, task: Task, box: Sandbox | None) -> Observation:
        await super().open(task, box)
        return Observation(messages=(Message(role="user", content=HUGE),) if self.at_once else ())

    async def step(self, reply: Message) -> Observation:
        answer = await super().step(reply)
        calls = [Message(role="tool", content=HUGE, tool_call_id=call.id, name=call.name) for call in reply.tool_calls]
        return answer if answer.done else Observation(messages=tuple(calls))


class TalkativeWorld(ToyWorld):
    """Makes such worlds."""

    def __init__(self, at_once: bool) -> None:
        self.at_once = at_once

    def make(self) -> Talks:
        return Talks(self.at_once)


class NoBoxes:
    """No box is asked for."""

    async def take(self, spec: object) -> EmptyBox:
        return EmptyBox(Fates())

    async def close(self) -> None:
        pass


@pytest.mark.parametrize(("at_once", "turns"), [(True, 0), (False, 1)])
def test_an_observation_of_100_mb_truncates_its_rollout(at_once: bool, turns: int) -> None:
    stack = make_stack()
    runner = RolloutRunner(TalkativeWorld(at_once), NoBoxes(), stack.recorder, ChatHarness(), stack.config)
    done = asyncio.run(runner.run(toy_task(), rollout_id="rl/0/0", index=0, seed=1))
    assert done.rollout.outcome == Outcome(kind="truncated", reason="context_length")
    assert done.rollout.trajectories[0].usage.turns == turns
    assert (done.score is None) == (turns == 0), "where nothing was sampled there is nothing to score"


class CountingRenderer(AppendingRenderer):
    """Counts the characters that it was given to render."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = 0

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, generation: bool = True) -> Rendered:
        self.characters += sum(len(message.content) for message in messages)
        return super().render(messages, tools, generation=generation)


def asked(renderer: CountingRenderer, contents: Sequence[str]) -> None:
    engine = ScriptedEngine(lambda request: (7, 0))
    recorder = Recorder(engine, renderer, max_context=100)
    session = recorder.open(toy_task(), rollout_id="r", seed=1)
    asyncio.run(session.complete([Message(role="user", content=content) for content in contents]))


@pytest.mark.parametrize("contents", [["1 " * 1_000_000], ["1 2 3 4 5 6 7 8 9"] * 100_000])
def test_only_the_beginning_is_rendered(contents: list[str]) -> None:
    renderer = CountingRenderer()
    with pytest.raises(LimitReached, match="r: a prompt of more than 200 tokens, room for 100") as limit:
        asked(renderer, contents)
    assert limit.value.reason == "context_length"
    assert renderer.characters <= 5 * 100 * CHARACTERS_PER_TOKEN


def test_a_long_text_of_few_tokens_is_rendered() -> None:
    renderer = CountingRenderer()
    asked(renderer, ["1" + " " * 10_000])
    assert renderer.characters >= 10_000
