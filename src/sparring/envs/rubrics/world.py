"""`[env.rubric]`: a world that is nothing but the rows of a data file and a rubric over them."""

from __future__ import annotations

from sparring.envs.base import Env
from sparring.envs.executor import at_home, cooperative
from sparring.envs.rubrics.relative import RelativeScorer
from sparring.envs.rubrics.rubric import Rubric
from sparring.envs.tools.python import PythonTool
from sparring.protocols import Sandbox
from sparring.types import Score, Task


class RubricWorld(Env):
    """Single-turn: the prompt comes from the row, the reward from the rubric."""

    @cooperative
    def __init__(self, rubric: Rubric) -> None:
        super().__init__()
        self._rubric = rubric
        self.needs_box = type(self).needs_box or rubric.needs_box
        self.scorer = self._relative = RelativeScorer.of(rubric)

    def check(self, task: Task) -> None:
        """Refuse a row that the rubric cannot score.

        Raises:
            BadInput: it cannot.
        """
        self._rubric.check(task)
        if self._relative is not None:
            self._relative.check(task)

    async def prove(self, task: Task, box: Sandbox | None) -> bool:
        """Refuse a row that the rubric does not judge as it says: see `Rubric.prove`. Return False if the row has no
        right program.

        Raises:
            BadInput: it does not.
        """
        return await self._rubric.prove(task, box)

    @cooperative
    async def reward(self, completion: str, task: Task) -> Score:
        """Return the rubric's score."""
        return await at_home(self._rubric.score, completion, task, self.box)


class RubricWorldWithPython(PythonTool, RubricWorld):
    """The same with the python tool."""
