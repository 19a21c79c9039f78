"""`Rubric`: named parts with weights and gates -> one `Score` with the value of each part.

reward = sum of weight * value over the parts of the row's domain
if a gate fails (value < gate): reward = min(reward, cap)
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Protocol

from sparring.envs.answers import finite
from sparring.envs.rubrics.code import ProgramTests
from sparring.envs.rubrics.config import RELATIVE, TEXT, Code, Function, Mathematics, Part, Pointwise, of_domain
from sparring.envs.rubrics.function import CalledFunction
from sparring.envs.rubrics.judge import JudgedAnswer
from sparring.envs.rubrics.judges import Judges, together
from sparring.envs.rubrics.proof_cache import Proven, digest
from sparring.envs.rubrics.text import Text, targets_of
from sparring.envs.rubrics.workers import Workers
from sparring.errors import BadInput, JudgeError, boundary, refusal, refusal_in
from sparring.protocols import Sandbox
from sparring.types import Score, Task

SIMPLE = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?")
"""Pattern of right answers that need no check: plain decimal numbers."""
FULL = 1 - 1e-9
"""Smallest value that counts as 1 for success."""


class Check(Protocol):
    """Check of an answer by one part of a rubric."""

    def check(self, task: Task) -> None:
        """Refuse a row that the part cannot judge. Raises `BadInput`."""

    async def value(self, completion: str, task: Task, box: Sandbox | None) -> float:
        """Return the part's value for an answer. Raises `JudgeError` if the part itself fails, `SandboxError` if a box
        does."""


class TextCheck:
    """Check that reads only the text. Implements `Check`."""

    def __init__(self, config: Text, workers: Workers) -> None:
        self._config, self._workers = config, workers

    def check(self, task: Task) -> None:
        targets_of(self._config, task.data)

    async def prove(self, task: Task) -> None:
        """Refuse a row with a right answer that the check cannot read completely (`BadInput`). Raises `JudgeError` if
        the check itself fails."""
        if not isinstance(self._config, Mathematics):
            return
        for target in targets_of(self._config, task.data):
            if SIMPLE.fullmatch(target) is None and (why := await self._workers.unread(self._config, target)):
                remedy = "correct the row, pick what counts with column_find, or compare it as a text: kind exact"
                where = f"column {self._config.column}"
                raise refusal(where, "an answer that math-verify reads whole", f"{target[:80]!r}: {why}", remedy)

    async def value(self, completion: str, task: Task, box: Sandbox | None) -> float:
        return await self._workers.worth(self._config, completion, targets_of(self._config, task.data))


class Rubric:
    """Scorer of single answers. `relative.RelativeScorer` handles the parts that compare the answers of a group.

    Args:
        workers: processes that check texts; started when needed.
        proven: cache of rows that passed `prove`.

    Attributes:
        needs_box: whether a part runs the answer.

    Raises:
        BadInput: a part has no judges.
    """

    def __init__(
        self,
        parts: Mapping[str, Part],
        *,
        workers: Workers | None = None,
        judges: Judges | None = None,
        proven: Proven | None = None,
    ) -> None:
        self._proven = proven or Proven(None)
        self.parts = dict(parts)
        self.judges = judges
        self.needs_box = any(isinstance(part, Code) for part in parts.values())
        workers = workers or Workers()
        pointwise = {name: part for name, part in self.parts.items() if not isinstance(part, RELATIVE)}
        self._checks = {name: _check_of(name, part, workers, judges) for name, part in pointwise.items()}

    def check(self, task: Task) -> None:
        """Refuse a row that cannot be scored.

        Raises:
            BadInput: no part applies to the row's domain, or the row lacks something that a part needs.
        """
        parts = self._parts_for(task)
        if not parts:
            domains = sorted({domain for part in self.parts.values() for domain in part.domains})
            actual = repr(str(task.data.get("domain", "")))
            raise refusal(
                f"task {task.id}, domain", f"one of {', '.join(domains)}", actual, "add a part for it to env.rubric"
            )
        if not any(part.weight for part in parts.values()):
            raise refusal(
                f"task {task.id}", "a part of env.rubric with a weight", "none but gates", "give one a weight"
            )
        for name in parts:
            if name in self._checks:
                try:
                    self._checks[name].check(task)
                except BadInput as error:
                    raise refusal_in(f"task {task.id}, env.rubric.{name}", error) from error

    async def prove(self, task: Task, box: Sandbox | None) -> bool:
        """Refuse a row with a right answer that a part cannot read, with tests that judge nothing, or with a right
        program that fails the tests (`BadInput`). Rows that pass are cached. Return False if the row has no right
        program."""
        programs = False
        for name in self._parts_for(task):
            check = self._checks.get(name)
            if not isinstance(check, (TextCheck, ProgramTests)):
                continue
            row = digest(self.parts[name], {key: value for key, value in task.data.items() if key != "id"}, task.box)
            if row not in self._proven:
                try:
                    if isinstance(check, TextCheck):
                        await check.prove(task)
                    else:
                        assert box is not None, "a world with needs_box gives its tasks a box"
                        await check.prove(task, box)
                except BadInput as error:
                    raise refusal_in(f"task {task.id}, env.rubric.{name}", error) from error
                self._proven.add(row)
            programs |= isinstance(check, ProgramTests) and check.has_reference(task)
        return programs

    async def score(self, completion: str, task: Task, box: Sandbox | None = None) -> Score:
        """Score an answer. An empty answer is worth 0 and runs no part. The reward is None (not scored) if only
        relative parts have a weight.

        Raises:
            JudgeError: a part failed, which says nothing about the answer.
        """
        parts = {name: part for name, part in self._parts_for(task).items() if name in self._checks}
        if not completion:
            return Score(reward=0.0, parts=dict.fromkeys(parts, 0.0), success=False)
        values: dict[str, float] = {}
        for name in [n for n, part in parts.items() if part.gate is not None and part.cap == 0]:
            values[name] = await self._value(name, completion, task, box)
            if self.cap(values) == 0:
                return Score(reward=0.0, parts=values, success=False)
        rest = [name for name in parts if name not in values]
        values.update(zip(rest, await together([self._value(n, completion, task, box) for n in rest]), strict=True))
        values = {name: values[name] for name in parts}
        weighed = {name: part.weight for name, part in parts.items() if part.weight}
        if not weighed and len(parts) < len(self._parts_for(task)):
            return Score(reward=None, parts=values, success=self._success(parts, values))
        reward = min(sum(weight * values[name] for name, weight in weighed.items()), self.cap(values))
        return Score(reward=reward, parts=values, success=self._success(parts, values))

    def cap(self, values: Mapping[str, float]) -> float:
        """Return the smallest cap among the failed gates; infinity if none failed."""
        gates = [(self.parts[name], value) for name, value in values.items() if name in self.parts]
        return min((part.cap for part, value in gates if part.gate is not None and value < part.gate), default=math.inf)

    def _success(self, parts: Mapping[str, Pointwise], values: Mapping[str, float]) -> bool | None:
        deciding = [name for name, part in parts.items() if part.decides]
        deciding = deciding or [name for name, part in parts.items() if part.weight > 0]
        is_success = all(values[name] >= FULL for name in deciding) and self.cap(values) == math.inf
        return is_success if deciding or not is_success else None

    def _parts_for(self, task: Task) -> dict[str, Any]:
        return of_domain(self.parts, str(task.data.get("domain", "")))

    async def _value(self, name: str, completion: str, task: Task, box: Sandbox | None) -> float:
        where = f"env.rubric.{name}"
        with boundary(JudgeError, where):
            value = await self._checks[name].value(completion, task, box)
        try:
            return finite("value", value)
        except ValueError as error:
            raise JudgeError(f"{where}: {error}") from error


def _check_of(name: str, part: Pointwise, workers: Workers, judges: Judges | None) -> Check:
    if isinstance(part, TEXT):
        return TextCheck(part, workers)
    if isinstance(part, Code):
        return ProgramTests(part)
    if isinstance(part, Function):
        return CalledFunction(part, f"env.rubric.{name}.function")
    return JudgedAnswer(part, judges, f"env.rubric.{name}")
