"""Single-turn function calls of BFCL, scored by BFCL's own checker: `make bfcl` brings the package into .bfcl.

    [env]
    name = "recipes/bfcl/world.py:Calls"

A task is a question and functions; what is right is a reply with the right calls, or, where no function fits, a reply in
words. No function of a held-out task is one of a training task, candidates included.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from checker import Checker
from gold import reply, tools
from package import CATEGORIES, Row, installed, rows
from split import dealt, in_turn

from sparring.envs.base import Env
from sparring.envs.config import EnvConfig
from sparring.envs.executor import cooperative
from sparring.envs.schema import env_args
from sparring.envs.splits import Stream, derived_seed, listed, order, unknown_split
from sparring.errors import refusal
from sparring.protocols import Boxes, Expert
from sparring.types import Message, Observation, Score, Task, ToolSpec, Trajectory


class Args(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[env.args]`."""

    folder: str = ".bfcl"
    """Folder of the package and its interpreter."""

    categories: tuple[str, ...] = ("simple_python", "multiple", "parallel", "irrelevance")
    """Categories of BFCL."""

    longest: int = 2000
    """Longest task, in characters of its question and of its functions' JSON; longer ones are left out."""

    share: float = 0.25
    """Share of each category that is held out, as near as groups of functions allow."""

    def __post_init__(self) -> None:
        unknown = set(self.categories) - set(CATEGORIES)
        if unknown or not self.categories:
            raise ValueError(f"categories must be some of {', '.join(CATEGORIES)}, got {sorted(unknown) or 'none'}")
        if not 0 < self.share < 1:
            raise ValueError(f"share must be between 0 and 1, got {self.share}")


class FunctionCalls(Env):
    """One question, one reply."""

    def __init__(self, checker: Checker) -> None:
        super().__init__()
        self._checker = checker

    @property
    @cooperative
    def tools(self) -> tuple[ToolSpec, ...]:
        """The functions of the task; none where there is no task, as in a chat that the user begins."""
        return () if self._task is None else tools(self._task.data.get("functions", ()))

    @cooperative
    async def step(self, reply: Message) -> Observation:
        """End: calls are judged, not run."""
        return Observation(done=True)

    @cooperative
    async def score(self, trajectory: Trajectory) -> Score:
        """Ask BFCL about the calls; a reply that a limit cut short is not right.

        `Score.parts` has `bfcl`, its verdict; `read`, whether every call could be read; `named`, whether the names are
        the right ones, as often as they have to be.
        """
        answer = trajectory.answer if trajectory.outcome.kind == "completed" else None
        if answer is None or answer.message is None:
            return Score(reward=0.0, success=False, parts={"bfcl": 0.0, "read": 0.0, "named": 0.0})
        return await judged(self._checker, self.task.data, answer.message)


async def judged(checker: Checker, data: Mapping[str, Any], reply: Message) -> Score:
    """Score one reply.

    A call that cannot be read (broken JSON, no name) makes the reply wrong. BFCL passes over such calls; and where no
    function fits, it takes a reply without one for right, be it empty. Here such a reply must say something: a model
    that says nothing has refused nothing, and would learn to be silent.

    Args:
        checker: that is asked.
        data: of the task.
        reply: of the model.

    Raises:
        EnvError: the checker gave no verdict.
    """
    read = [call for call in reply.tool_calls if call.arguments is not None]
    calls = [{call.name: call.arguments} for call in read]
    verdict = await checker.verdict(data["category"], data["functions"], data["answer"], calls)
    right = [name for call in data["answer"] for name in call]
    whole = len(read) == len(reply.tool_calls)
    success = verdict.valid and whole and bool(reply.tool_calls or reply.content.strip())
    parts = {
        "bfcl": float(verdict.valid),
        "read": float(whole),
        "named": float(sorted(call.name for call in read) == sorted(right)),
    }
    return Score(reward=float(success), success=success, parts=parts)


class Calls:
    """The `EnvFactory`.

    Raises:
        BadInput: the package is not there, or settings that it does not have.
    """

    name = "bfcl"
    makes_at_once = True

    def __init__(self, config: EnvConfig) -> None:
        self._config, self.scorer = config, None
        self.args: Args = env_args(config.args, Args)
        package = installed(Path(self.args.folder))
        self.checker = Checker(package)
        read = [row for category in self.args.categories for row in rows(package.data, category)]
        fitting = [row for row in read if length(row) <= self.args.longest]
        self.left_out = len(read) - len(fitting)
        train, held = (in_turn(side) for side in dealt(fitting, self.args.share))
        if not train or not held:
            got = f"{len(train)} tasks for training and {len(held)} for evaluation"
            raise refusal("env.args", "tasks for both", got, "raise longest, or change share")
        self._rows = {row.id: row for row in fitting}
        self.train, self.held_out = (
            [self._task("train", row) for row in train],
            [self._task("eval", row) for row in held],
        )

    def make(self) -> Env:
        """Return one world for one rollout."""
        return FunctionCalls(self.checker)

    def tasks(self, split: str, seed: int) -> Stream:
        """Return `train` (endless), `eval` or `demonstration` (finite); what is held out is the same for every seed.

        Raises:
            BadInput: no such split.
        """
        if split == "train":
            return Stream(lambda index: self._shuffled(seed, index))
        if split == "eval":
            return listed(self.held_out[: self._config.held_out or None])
        if split == "demonstration":
            return listed(self.train[: self._config.demonstrations])
        raise unknown_split(self.name, split)

    async def judged(self, task: Task, reply: Message) -> Score:
        """Score a reply to a task, outside of any run."""
        return await judged(self.checker, task.data, reply)

    async def prove(self, boxes: Boxes) -> tuple[int, int]:
        """Return nothing to prove: recipes/bfcl/prove.py asks BFCL about every expert's reply."""
        return 0, 0

    def expert(self, task: Task) -> Expert:
        """Return the demonstration: the right calls, or words where no function fits."""
        row = self._rows[task.data["id"]]
        return lambda messages: reply(row)

    def _shuffled(self, seed: int, index: int) -> Task:
        epoch, place = divmod(index, len(self.train))
        return self.train[order(seed, epoch, len(self.train))[place]]

    def _task(self, split: str, row: Row) -> Task:
        system = (Message(role="system", content=self._config.system),) if self._config.system else ()
        data = {"id": row.id, "category": row.category, "functions": row.functions, "answer": row.answer}
        return Task(
            id=f"{self.name}/{split}/{row.id}",
            env=self.name,
            messages=(*system, Message(role="user", content=row.question)),
            data=data,
            limits=self._config.limits,
            seed=derived_seed(row.id),
            tag=row.category,
            key=row.id,
        )


def length(row: Row) -> int:
    """Return the characters of a task: its question and its functions' JSON."""
    return len(row.question) + len(msgspec.json.encode(row.functions))
