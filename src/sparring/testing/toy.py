"""Toy stack: a tokenizer trained in a moment, an environment with one tool, and an engine script that plays it.

The environment asks for a sum. The policy calls `add`, reads the result and answers. A whole rollout takes about a
millisecond, so tests need no model.
"""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import xxhash

from sparring.envs.splits import Stream
from sparring.generation import GenerateRequest
from sparring.protocols import Boxes, Renderer, Sandbox
from sparring.render.config import Thoughts
from sparring.render.demonstrate import reply_tokens
from sparring.render.difference import TemplateRenderer
from sparring.render.library import LibraryRenderer
from sparring.render.load import load_renderer
from sparring.render.train_tokenizer import train_tokenizer
from sparring.testing.scripted_engine import Script
from sparring.types import Limits, Message, Observation, Score, Task, ToolCall, ToolSpec, Trajectory

_NUMBER = {"type": "integer"}
ADD = ToolSpec(
    name="add",
    description="Adds two numbers.",
    parameters={"type": "object", "properties": {"a": _NUMBER, "b": _NUMBER}, "required": ["a", "b"]},
)
_TEXTS = (
    'What is 12 + 34?\n<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": 34}}\n</tool_call>',
    "You may call one or more functions to assist with the user query. user assistant system tool",
    '{"type": "function", "function": {"name": "add", "description": "Adds two numbers.", "parameters": {}}}',
    "The answer is 46.",
)


@functools.cache
def toy_renderer(
    vocab_size: int = 400, name: str = "auto", thinking: bool = False, thoughts: Thoughts = "template"
) -> LibraryRenderer | TemplateRenderer:
    """Return the Qwen3 renderer over a tokenizer trained on a few sentences, cached per process."""
    with tempfile.TemporaryDirectory() as folder:
        train_tokenizer(_TEXTS, vocab_size, folder)
        return load_renderer(folder, name, thinking, thoughts=thoughts)


def toy_task(number: int = 0, *, split: str = "train", limits: Limits = Limits()) -> Task:
    """Return the sum with this number. Tasks of different splits have different ranges of numbers."""
    drawn = xxhash.xxh3_64_intdigest(f"{split}/{number}".encode())
    a, b = drawn % 50 + (50 if split == "eval" else 0), drawn // 50 % 50
    return Task(
        id=f"{split}-{number}",
        env="toy",
        messages=(Message(role="user", content=f"What is {a} + {b}?"),),
        data={"a": a, "b": b},
        limits=limits,
        seed=number,
        tag="sums",
    )


class ToyEnv:
    """One sum. A reply without a call ends the task; the last number of that reply is the answer. Implements
    `SingleEnv`."""

    tools: tuple[ToolSpec, ...] = (ADD,)

    def __init__(self) -> None:
        self._task: Task | None = None
        self._answer: str | None = None
        self.closed = False

    async def open(self, task: Task, box: Sandbox | None) -> Observation:
        """Return an observation without messages: the task's own message is the question."""
        self._task = task
        return Observation()

    async def step(self, reply: Message) -> Observation:
        if not reply.tool_calls:
            self._answer = reply.content
            return Observation(done=True)
        return Observation(
            messages=tuple(
                Message(role="tool", content=_add(call.arguments), tool_call_id=call.id, name=call.name)
                for call in reply.tool_calls
            )
        )

    async def score(self, trajectory: Trajectory) -> Score | None:
        """Return reward 1 for the right sum, else 0."""
        if self._task is None:
            return None
        numbers = re.findall(r"-?\d+", self._answer or "")
        right = bool(numbers) and int(numbers[-1]) == self._task.data["a"] + self._task.data["b"]
        return Score(reward=float(right), success=right)

    async def close(self) -> None:
        self.closed = True


class ToyTasks(Stream):
    """Endless sums, or `length` sums."""

    def __init__(self, split: str, length: int | None) -> None:
        super().__init__(lambda index: toy_task(index, split=split) if length is None or index < length else None)


class ToyWorld:
    """Environments of sums. Implements `EnvFactory`."""

    name = "toy"
    scorer = None

    def make(self) -> ToyEnv:
        return ToyEnv()

    async def prove(self, boxes: Boxes) -> tuple[int, int]:
        """Return zeros: there is no file with rows to prove."""
        return 0, 0

    def tasks(self, split: str, seed: int) -> ToyTasks:
        return ToyTasks(split, None if split == "train" else 20)

    def expert(self, task: Task) -> Callable[[Sequence[Message]], Message] | None:
        return lambda messages: _expert(task.data["a"], task.data["b"], messages[-1])


def toy_script(renderer: Renderer, *, errors_in_ten: int = 0) -> Script:
    """Return a scripted policy of the toy environment that reads its prompt: the expert, with wrong answers in
    `errors_in_ten` of ten cases.

    An error depends only on the request's seed and prompt, so a group of rollouts has right and wrong answers.
    """

    def script(request: GenerateRequest) -> tuple[int, ...]:
        text = renderer.decode(request.tokens)
        a, b = map(int, re.findall(r"What is (-?\d+) \+ (-?\d+)\?", text)[-1])
        answers = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", text.rpartition("What is")[2], re.DOTALL)
        last = Message(role="tool", content=answers[-1]) if answers else Message(role="user")
        drawn = xxhash.xxh3_64_intdigest(f"{request.sampling.seed}/{len(request.tokens)}".encode())
        if answers and drawn % 10 < errors_in_ten:
            last = Message(role="tool", content=str(int(answers[-1]) + 1))
        return reply_tokens(renderer, _expert(a, b, last), (ADD,))

    return script


def _expert(a: int, b: int, last: Message) -> Message:
    if last.role == "tool":
        return Message(role="assistant", content=f"The answer is {last.content}.")
    return Message(role="assistant", tool_calls=(ToolCall(id="call_0", name="add", arguments={"a": a, "b": b}),))


def _add(arguments: Mapping[str, Any] | None) -> str:
    try:
        return str(int(arguments["a"]) + int(arguments["b"])) if arguments else "error: no arguments"
    except (KeyError, TypeError, ValueError) as cause:
        return f"error: {cause}"
