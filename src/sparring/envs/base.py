"""`Env`: the base class of worlds.

An exception that a world raises is a failure of the world (`EnvError`), never a reward. What the model gets wrong (an
unknown tool, a wrong argument, broken JSON) comes back to the model as the tool's answer.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, ClassVar, NamedTuple, cast

import msgspec

from sparring.envs.answers import finite
from sparring.envs.executor import away, cooperative
from sparring.envs.schema import arguments_type, checked, tool_spec
from sparring.errors import EnvError, boundary, refusal
from sparring.protocols import Expert, Sandbox, Scorer
from sparring.types import DEFAULT_ROLES, Message, Observation, Score, Task, ToolCall, ToolSpec, Trajectory


class ToolError(Exception):
    """Error that a tool raises to tell the model that its call was wrong. The model gets the error's text as the tool's
    answer."""


class NoArgs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Empty settings, for a world without `[env.args]`."""


def tool(
    function: Callable[..., Any] | None = None, *, name: str | None = None, description: str | None = None
) -> Callable[..., Any]:
    """Mark a method as a tool: `@tool`, or `@tool(name=..., description=...)` to replace its name and docstring."""

    def mark(method: Callable[..., Any]) -> Callable[..., Any]:
        method.__tool__ = {"name": name, "description": description}  # type: ignore[attr-defined]
        return method

    return mark if function is None else mark(function)


class Env:
    """Environment ("world") of one rollout. An author writes a prompt, a reward and, where the world has any, tools;
    every method may be overridden.

        class Multiply(Env):
            def generate(self, random):
                a, b = random.randint(2, 99), random.randint(2, 99)
                return {"prompt": f"{a} * {b} = ?", "answer": str(a * b)}

            def reward(self, completion, task):
                return float(completion.strip() == task.data["answer"])

    Attributes:
        Args: a msgspec struct of the world's settings; `[env.args]` of a recipe is checked against it.
        functions: plain functions offered as tools, in addition to the methods marked with `@tool`.
        needs_box: whether `open` is handed a box.
        success_at: lowest reward that counts as a success; None: the world reports no success.
        scorer: second scoring pass over a whole group, for rewards that compare its rollouts.
        shared_thread: run the environments of all rollouts on one thread, for state that is bound to an event loop,
            such as an HTTP client at module level. A call that blocks then stops all of them. By default each
            environment has a thread of its own from creation to closing.
        roles: names of the roles. A world with several implements `step_of` and `score_all` instead of `step`, `score`
            and `reward`, and its recipe names a harness that plays every role.
        reward_name: name of the reward in errors; empty: class and method.
    """

    Args: ClassVar[type[msgspec.Struct]] = NoArgs
    functions: ClassVar[Sequence[Callable[..., Any]]] = ()
    needs_box: bool = False
    success_at: ClassVar[float | None] = 1.0
    shared_thread: ClassVar[bool] = False
    roles: tuple[str, ...] = DEFAULT_ROLES
    reward_name: str = ""
    _task: Task | None = None

    @cooperative
    def __init__(self, args: Any = None) -> None:
        self.args: Any = self.Args() if args is None else args
        self.box: Sandbox | None = None
        self.scorer: Scorer | None = None
        self._tools = _tools_of(cast("Any", type(self)))

    # What an author writes.

    def generate(self, random: Random) -> Mapping[str, Any] | None:
        """Draw one task's data from `random` alone. None (the default): the world's tasks come from a file."""
        return None

    def prompt(self, task: Task) -> str | Sequence[Message]:
        """Return the task's prompt for the model; `task.data["prompt"]` by default."""
        prompt: str | Sequence[Message] = task.data["prompt"]
        return prompt

    def key(self, task: Task) -> str | None:
        """Return a deduplication key for tasks with identical prompts: a game with one prompt and many seeds returns
        the seed. Tasks with equal keys count as one task and are held out together. None (the default): the prompt is
        the key."""
        return None

    def check(self, task: Task) -> None:
        """Refuse a task that `reward` could not score (`BadInput`), before anything starts."""

    async def prove(self, task: Task, box: Sandbox | None) -> bool:
        """Refuse a task from a file if `reward` does not accept the task's own right answer (`BadInput`). `sparring
        check` calls it for every task, with a box if the world needs one. Return False (the default) if the task has no
        right answer to check."""
        return False

    @cooperative
    async def prepare(self, task: Task, box: Sandbox) -> None:
        """Fill the task's box, before `open`. If a world overrides this method, a snapshot of the box is made
        afterwards. Verifiers are forks of this snapshot. A retry may get a fork too, without another call of `prepare`,
        so state of the world object itself belongs in `open`."""

    def reward(self, completion: str, task: Task) -> Any:
        """Return the reward of the final answer: a float, a bool, a `Score`, or None for not scored. May be `async`."""
        raise NotImplementedError(f"{type(self).__name__} needs a method reward(self, completion, task)")

    def expert(self, task: Task) -> Expert | Mapping[str, Expert] | None:
        """Return the scripted demonstration of a task: a function from the messages so far to the next reply, or one
        such function per role. None (the default): there is no demonstration."""
        return None

    # The protocol.

    @property
    def task(self) -> Task:
        """The task that `open` was called with; `BadInput` if it has not been called."""
        if self._task is None:
            remedy = "await open(task, box) first; prompt, check and expert run before it and are handed their task"
            raise refusal(f"{type(self).__name__}.task", "a task", "an environment that was not opened", remedy)
        return self._task

    @task.setter
    def task(self, task: Task) -> None:
        """Keep the task that `open` was called with."""
        self._task = task

    @property
    @cooperative
    def tools(self) -> tuple[ToolSpec, ...]:
        """Tools that the model may call."""
        return tuple(each.spec for each in self._tools.values())

    @cooperative
    async def open(self, task: Task, box: Sandbox | None) -> Observation:
        """Begin the task with its box. Return an observation whose messages, if any, follow the task's own messages."""
        self.task, self.box = task, box
        return Observation()

    @cooperative
    async def step(self, reply: Message) -> Observation:
        """Run the reply's tool calls in order; a reply without tool calls ends the episode.

        Raises:
            EnvError: a tool raised anything but `ToolError`.
        """
        if not reply.tool_calls:
            return Observation(done=True)
        answers = [await self._answer(call) for call in reply.tool_calls]
        return Observation(messages=tuple(answers))

    async def step_of(self, role: str, reply: Message) -> Observation:
        """Answer the reply of one role, in a world with several roles."""
        raise NotImplementedError(f"{type(self).__name__} needs a method step_of(self, role, reply)")

    async def score_all(self, trajectories: Mapping[str, Trajectory]) -> Score | None:
        """Score a rollout of a world with several roles. `trajectories` has one trajectory for each role that
        replied."""
        raise NotImplementedError(f"{type(self).__name__} needs a method score_all(self, trajectories)")

    @cooperative
    async def score(self, trajectory: Trajectory) -> Score | None:
        """Score the final answer: the text of the last assistant message, or "" if the rollout ended before one.

        Raises:
            EnvError: the reward raised, or returned no number.
        """
        where = self.reward_name or f"{type(self).__name__}.reward"
        with boundary(EnvError, where):
            value = await away(self.reward, final_text(trajectory), self.task)
        if value is None or isinstance(value, Score):
            return value
        try:
            reward = finite("reward", value)
        except ValueError as error:
            raise EnvError(f"{where}: {error}") from error
        with boundary(EnvError, f"{type(self).__name__}.success_at"):
            success = None if self.success_at is None else reward >= self.success_at - 1e-9
        return Score(reward=reward, success=success)

    @cooperative
    async def close(self) -> None:
        """Release what `open` acquired, except the box, which the caller closes."""

    async def _answer(self, call: ToolCall) -> Message:
        # names of files may be no UTF-8, and a model may write half a character: both are shown as escapes
        content = (await self._call(call)).encode("utf-8", "backslashreplace").decode()
        return Message(role="tool", content=content, tool_call_id=call.id, name=call.name)

    async def _call(self, call: ToolCall) -> str:
        if call.name not in self._tools:
            return f"error: no tool {call.name!r}, there is {', '.join(self._tools) or 'none'}"
        if call.arguments is None:
            return f"error: {call.name}: expected arguments that are a JSON object"
        called = self._tools[call.name]
        try:
            arguments = checked(call.arguments, called.arguments)
        except ValueError as error:
            return f"error: {call.name}: {error}"
        with boundary(EnvError, f"{type(self).__name__}, tool {call.name}"):
            try:
                value = await away(called.bound(self), **arguments)
            except ToolError as error:
                return f"error: {error}"
            try:
                return value if isinstance(value, str) else msgspec.json.encode(value).decode()
            except UnicodeEncodeError:
                return json.dumps(msgspec.to_builtins(value))


def final_text(trajectory: Trajectory) -> str:
    """Return the agent's last message of a completed trajectory, stripped, as the final answer; "" if there is none.

    A truncated reply is no answer: "4" may be the beginning of "42".
    """
    if trajectory.outcome.kind != "completed":
        return ""
    reply = trajectory.answer and trajectory.answer.message
    return reply.content.strip() if reply and not reply.tool_calls else ""


class _Tool(NamedTuple):
    spec: ToolSpec
    method: str | None  # a name and not the method itself, since the instances of a class share one table of tools
    function: Callable[..., Any]
    arguments: type[msgspec.Struct]

    def bound(self, env: Env) -> Callable[..., Any]:
        return self.function if self.method is None else getattr(env, self.method)


@functools.cache
def _tools_of(kind: type[Env]) -> dict[str, _Tool]:
    """Return the tools by name: functions first, then methods in source order, base classes before subclasses."""
    methods = dict.fromkeys(
        name for base in reversed(kind.__mro__) for name, value in vars(base).items() if hasattr(value, "__tool__")
    )
    marked = [(name, getattr(kind, name)) for name in methods if hasattr(getattr(kind, name), "__tool__")]
    tools: dict[str, _Tool] = {}
    for method, function in [*((None, f) for f in kind.functions), *marked]:
        spec = tool_spec(function, **getattr(function, "__tool__", {}))
        if spec.name in tools:
            raise refusal(kind.__name__, "tools of different names", f"two called {spec.name!r}", "rename one")
        tools[spec.name] = _Tool(spec, method, function, arguments_type(function, f"tool {spec.name}"))
    return tools
