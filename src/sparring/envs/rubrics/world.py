"""`[env.rubric]`: a world made of a rubric and the rows of a data file."""

from __future__ import annotations

from sparring.envs.base import Env
from sparring.envs.executor import at_home, cooperative
from sparring.envs.rubrics.relative import RelativeScorer
from sparring.envs.rubrics.rubric import Rubric
from sparring.envs.tools.python import PythonTool
from sparring.protocols import Sandbox
from sparring.types import Score, Task


class RubricWorld(Env):
    """Single-turn world: the prompt comes from the row, the reward from the rubric."""

    @cooperative
    def __init__(self, rubric: Rubric) -> None:
        super().__init__()
        self._rubric = rubric
        self.needs_box = type(self).needs_box or rubric.needs_box
        self.scorer = self._relative = RelativeScorer.of(rubric)

    def check(self, task: Task) -> None:
        self._rubric.check(task)
        if self._relative is not None:
            self._relative.check(task)

    async def prove(self, task: Task, box: Sandbox | None) -> bool:
        return await self._rubric.prove(task, box)

    @cooperative
    async def reward(self, completion: str, task: Task) -> Score:
        return await at_home(self._rubric.score, completion, task, self.box)


class RubricWorldWithPython(PythonTool, RubricWorld):
    """Rubric world with the python tool."""
