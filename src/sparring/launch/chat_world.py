"""World of a chat: the world of the checkpoint's run, or a Python tool alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from sparring.envs.base import Env
from sparring.envs.registry import load_env
from sparring.envs.rubrics.judges import Judges, Replies
from sparring.envs.tools.python import PythonTool
from sparring.errors import JudgeError, refusal
from sparring.protocols import AnyEnv, Boxes, Sandbox
from sparring.recipe.run_config import RunConfig
from sparring.rollout.guarded_env import GuardedEnv
from sparring.sandbox.check import check_sandbox
from sparring.sandbox.config import SandboxConfig
from sparring.tasks.files import read_rows
from sparring.types import BoxSpec, Limits, Message, Observation, Task, ToolSpec

PROPOSED = 3

LOOKED_AT = 64
"""Number of held-out tasks from which the proposals are chosen."""

UNLIMITED = Limits(max_turns=1 << 30, max_tokens=1 << 30, max_tool_calls=1 << 30)


class _PythonWorld(PythonTool, Env):
    """World that consists of the Python tool."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatSetting:
    """Environment, tasks and sandbox of a chat. `tasks` are proposed to the user; `blank` is the task of a conversation
    that begins with the user's own words."""

    make: Callable[[], AnyEnv]
    tasks: tuple[Task, ...] = ()
    blank: Task
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)


def bare_setting() -> ChatSetting:
    """Return a setting with a Python tool in a box and without tasks."""
    check_sandbox(SandboxConfig())
    return ChatSetting(
        make=_PythonWorld, blank=Task(id="chat", env="chat", messages=(), limits=UNLIMITED, box=BoxSpec())
    )


def setting_of(config: RunConfig) -> ChatSetting:
    """Return a setting with the world of a run and some of its held-out tasks, of different kinds if there are several.

    Raises:
        BadInput: the world is missing, has several roles, or needs a box that this machine cannot make.
    """
    factory = load_env(config.world, read_rows, Judges(_no_judge))
    roles = GuardedEnv(factory.make).roles
    if len(roles) > 1:
        raise refusal("sparring chat", "an environment of one role", f"the roles {', '.join(roles)}", "use --no-tools")
    source = factory.tasks("eval", config.run.seed)
    held_out = [task for task in islice(iter(source.next, None), LOOKED_AT) if task is not None]
    kinds: dict[str, Task] = {}
    for task in held_out:
        kinds.setdefault(task.tag, task)
    tasks = [*kinds.values(), *(task for task in held_out if kinds[task.tag] is not task)][:PROPOSED]
    box = held_out[0].box if held_out else None
    if box is not None:
        check_sandbox(config.sandbox)
    system = (Message(role="system", content=config.world.system),) if config.world.system else ()
    blank = Task(id="chat", env=factory.name, messages=system, limits=UNLIMITED, box=box)
    return ChatSetting(make=factory.make, tasks=tuple(tasks), blank=blank, sandbox=config.sandbox)


async def _no_judge(name: str) -> Replies:
    """Refuse to open a judge, because a chat scores nothing."""
    raise JudgeError(f"model {name}: expected a chat, which scores nothing, got a request to a judge")


class ChatWorld:
    """World of the current conversation, made again for each conversation. The caller closes `boxes`."""

    def __init__(self, setting: ChatSetting, boxes: Boxes) -> None:
        self._setting, self._boxes = setting, boxes
        self._task = setting.blank
        self._world = GuardedEnv(setting.make)
        self._box: Sandbox | None = None
        self._is_open = False

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """Tools that the model may call."""
        return self._world.tools

    async def begin(self, task: Task | None) -> list[Message]:
        """Close the world of the last conversation, open the world of `task`, and return its first messages. Without a
        task, the user begins."""
        await self.close()
        self._world, self._task = GuardedEnv(self._setting.make), task or self._setting.blank
        if task is None:
            return list(self._task.messages)
        observation = await self._open()
        return [*task.messages, *observation.messages]

    async def step(self, reply: Message) -> Observation:
        """Return the world's answer to a reply. Without a task, the world is opened at the first reply that calls a
        tool."""
        if not self._is_open:
            if not reply.tool_calls:
                return Observation(done=True)
            await self._open()
        return await self._world.step(reply)

    async def close(self) -> None:
        """Close the box and the world. Safe to call twice."""
        box, self._box, was_open, self._is_open = self._box, None, self._is_open, False
        if was_open:
            await self._world.close()
        if box is not None:
            await box.close()

    async def _open(self) -> Observation:
        if self._task.box is not None:
            self._box = await self._boxes.take(self._task.box)
        observation = await self._world.open(self._task, self._box)
        self._is_open = True
        return observation
