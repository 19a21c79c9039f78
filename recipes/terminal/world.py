"""A shell, a folder, and one of thirty kinds of tasks: files, text, git, archives, services that must run.

    [env]
    name = "recipes/terminal/world.py:Terminal"

Worth 1 where the end state is what was asked for, else 0. It is judged from outside (`kind.py`).
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from random import Random
from typing import Any

import archives
import files
import msgspec
import repositories
import services
import texts
from kind import Kind, setting, tree

from sparring.envs.base import Env
from sparring.envs.executor import cooperative
from sparring.envs.tools.bash import BashTool
from sparring.errors import SpoiltFile, refusal
from sparring.protocols import Expert, Sandbox
from sparring.types import Message, Observation, Score, Task, ToolCall, Trajectory

KINDS: dict[str, Kind] = {
    kind.name: kind for module in (files, texts, repositories, archives, services) for kind in module.KINDS
}
FAMILIES = tuple(dict.fromkeys(kind.family for kind in KINDS.values()))
RULE = "Change nothing else in this folder."
HOST_IMAGES, PATH = ("python", "host"), "/usr/bin:/bin"
"""Images of boxes that have the host's programs, and where these are."""


class Args(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[env.args]`."""

    families: tuple[str, ...] = FAMILIES
    """Families of kinds."""

    kinds: tuple[str, ...] = ()
    """Kinds; empty: all of the families."""

    lucky: float = 0.0
    """Share of tasks, of those in parts, of which the last part was done before: demonstrations leave it out."""

    knowing: float = 0.0
    """Share of demonstrations that do not look at what one has to know, because the expert knows it."""

    def __post_init__(self) -> None:
        for given, known in ((self.families, FAMILIES), (self.kinds, KINDS)):
            unknown = [name for name in given if name not in known]
            if unknown:
                raise ValueError(f"expected some of {', '.join(known)}, got {', '.join(unknown)}")
        if not self.families and not self.kinds:
            raise ValueError("families and kinds are both empty: name one")
        if not (0 <= self.lucky <= 1 and 0 <= self.knowing <= 1):
            raise ValueError("lucky and knowing are shares from 0 to 1")


class Terminal(BashTool, Env):
    """One task in one folder."""

    Args = Args
    kept: Any = None

    def __init__(self, args: Any = None) -> None:
        super().__init__(args)
        chosen = self.args.kinds or [kind.name for kind in KINDS.values() if kind.family in self.args.families]
        self.kinds = [KINDS[name] for name in chosen]

    def generate(self, random: Random) -> dict[str, Any]:
        kind = random.choice(self.kinds)
        lucky, knowing = random.random() < self.args.lucky, random.random() < self.args.knowing
        data: dict[str, Any] = {"setup": [], "looks": 0, "parts": False} | kind.draw(random)
        if lucky and data["parts"]:
            *data["commands"], done = data["commands"]
            data["setup"] = [*data["setup"], done]
        if knowing:
            data["commands"] = data["commands"][data["looks"] :]
        return data | {"kind": kind.name, "tag": kind.name, "prompt": f"{data['prompt']} {RULE}"}

    def key(self, task: Task) -> str:
        """Tasks of one prompt differ in what is in the folder."""
        told = {name: task.data.get(name) for name in ("prompt", "before", "setup", "git")}
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]

    def check(self, task: Task) -> None:
        """Refuse kinds whose programs this machine does not have, in boxes that have the host's."""
        if task.box is not None and task.box.image in HOST_IMAGES:
            check_programs(self.kinds)

    @cooperative
    async def open(self, task: Task, box: Sandbox | None) -> Observation:
        opened = await super().open(task, box)
        assert box is not None, "a world with needs_box is opened with a box"
        kind, data = KINDS[task.data["kind"]], task.data
        await box.upload(tree(data["before"]))
        await setting(box, data["setup"])
        self.kept = await kind.begin(box, data)
        await box.snapshot()  # what a verifier is a fork of
        self.kept = await kind.serve(box, data) or self.kept
        return opened

    @cooperative
    async def score(self, trajectory: Trajectory) -> Score:
        """Return 1 or 0, whatever became of the conversation: what counts is the state."""
        assert self.box is not None, "scored while it is open"
        kind, data = KINDS[self.task.data["kind"]], self.task.data
        try:
            right = await kind.alive(self.box, data, self.kept)
            await self.box.snapshot(ends=True)
            right = right and await kind.judge(self.box, data, self.kept)
        except SpoiltFile:  # it is not there, or not what it should be
            right = False
        return Score(reward=float(right), success=right)

    def expert(self, task: Task) -> Expert:
        commands = task.data["commands"]

        def reply(messages: Sequence[Message]) -> Message:
            done = sum(message.role == "tool" for message in messages)
            if done == len(commands):
                return Message(role="assistant", content="Done.")
            call = ToolCall(id=f"call_{done}", name="bash", arguments={"command": commands[done]})
            return Message(role="assistant", tool_calls=(call,))

        return reply


def check_programs(wanted: Sequence[Kind], path: str = PATH) -> None:
    """Refuse kinds whose programs this machine's boxes do not have.

    Raises:
        BadInput: a program is not there.
    """
    missing = {
        program: [kind.name for kind in wanted if program in kind.programs]
        for program in dict.fromkeys(program for kind in wanted for program in kind.programs)
        if shutil.which(program, path=path) is None
    }
    for program, names in missing.items():
        left = [family for family in FAMILIES if not any(KINDS[name].family == family for name in names)]
        do = f"install it, or set env.args.families to some of {', '.join(left)}, or env.args.kinds to others"
        raise refusal("env.args", f"a program {program} for the kinds {', '.join(names)}", f"none in {path}", do)
