"""Part `judge`: prompts for a judging model and strict parsers of its replies."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from sparring.envs.rubrics.config import AskedPart, Judge, Ranking, Verdict
from sparring.envs.rubrics.judges import Judges, together
from sparring.envs.rubrics.text import last_match
from sparring.errors import refusal
from sparring.generation import Constraint
from sparring.protocols import Sandbox
from sparring.types import Task
from sparring.validation import read_json

_NAME = re.compile(r"\{(\w+)\}")


class JudgedAnswer:
    """Mean of `samples` verdicts on one answer. Implements `Check`."""

    def __init__(self, config: Judge, judges: Judges | None, where: str) -> None:
        self._config, self._judges, self._where = config, asked_of(config, judges, where), where

    def check(self, task: Task) -> None:
        check_prompt(self._config.prompt, task, ("completion",))

    async def value(self, completion: str, task: Task, box: Sandbox | None) -> float:
        question = fill_prompt(self._config.prompt, task, {"completion": completion})
        return await mean_verdict(self._judges, self._config, question, self._where)


async def mean_verdict(judges: Judges, part: Verdict, question: str, where: str) -> float:
    """Return the mean of a part's verdicts on one question."""
    read, constraint = reader(part), verdict_constraint(part)
    samples = range(part.samples)
    values = await together(
        [judges.verdict(part, question, read, where, constraint=constraint, sample=sample) for sample in samples]
    )
    return sum(values) / len(values)


def asked_of(part: AskedPart, judges: Judges | None, where: str) -> Judges:
    """Return the judges of a part, or refuse a rubric without judges (`BadInput`)."""
    if judges is None:
        raise refusal(where, "models that judge", "none", "run it by a recipe, or construct the rubric with Judges")
    return judges


def check_prompt(prompt: str, task: Task, names: tuple[str, ...]) -> None:
    """Refuse a prompt with a placeholder that is neither in `names` nor a column of the row (`BadInput`)."""
    available = {*names, *_values(task)}
    unknown = [name for name in _NAME.findall(prompt) if name not in available]
    if unknown:
        names_text = ", ".join(sorted(available))
        raise refusal(
            "prompt", f"names among {names_text}", f"{{{unknown[0]}}}", "correct it, or map the column in env.columns"
        )


def fill_prompt(prompt: str, task: Task, names: Mapping[str, str]) -> str:
    """Return the prompt with its placeholders replaced. Placeholders in the replacements stay as they are."""
    values = {**_values(task), **names}
    return _NAME.sub(lambda match: values[match[1]], prompt)


def _values(task: Task) -> dict[str, str]:
    prompt = "\n\n".join(message.content for message in task.messages if message.role != "system")
    texts = {n: value if isinstance(value, str) else json.dumps(value, default=str) for n, value in task.data.items()}
    return {"prompt": prompt, **texts}


def reader(part: Verdict) -> Callable[[str], float | None]:
    """Return the parser of a reply: exactly one of the choices, a number in the range, or a JSON object with either in
    `field`. The parser returns None for anything else."""

    def read(reply: str) -> float | None:
        text: Any = last_match(part.find, reply)
        if text is None:
            return None
        if part.field or part.range is not None:
            text = _json(text)
        if part.field:
            text = text.get(part.field) if isinstance(text, dict) else None
        if part.range is None:
            return part.choices.get(text) if isinstance(text, str) else None
        low, high = part.range
        if not isinstance(text, (int, float)) or isinstance(text, bool) or not low <= text <= high:
            return None
        return (text - low) / (high - low)

    return read


def verdict_constraint(part: Verdict) -> Constraint:
    """Return the constraint that makes every reply a verdict. The constraint of a range is a list of numbers, since a
    free number could have endless digits: the whole numbers of a range with whole ends and 3 to 1,001 of them, or else
    101 equally spaced numbers."""
    words: list[Any] = list(part.choices) if part.range is None else _steps(*part.range)
    if not part.field:
        return Constraint(kind="regex", source="|".join(f"({re.escape(str(word))})" for word in words))
    inner = {part.field: {"enum": words}}
    schema = {"type": "object", "properties": inner, "required": [part.field], "additionalProperties": False}
    return Constraint(kind="json_schema", source=json.dumps(schema))


def _steps(low: float, high: float) -> list[float]:
    if low == int(low) and high == int(high) and 2 <= high - low <= 1000:
        return list(range(int(low), int(high) + 1))
    return [min(high, max(low, float(f"{low + (high - low) * step / 100:.6g}"))) for step in range(101)]


def order_reader(part: Ranking, count: int) -> Callable[[str], tuple[int, ...] | None]:
    """Return the parser of a ranking. It takes a JSON list of the numbers 1 to `count`, each once, and returns them as
    indices from 0; for anything else it returns None."""

    def read(reply: str) -> tuple[int, ...] | None:
        text = last_match(part.find, reply)
        order = None if text is None else _json(text)
        if not isinstance(order, list) or any(type(number) is not int for number in order):
            return None
        return tuple(n - 1 for n in order) if sorted(order) == list(range(1, count + 1)) else None

    return read


def order_constraint(count: int) -> Constraint:
    """Return the constraint of a ranking: a list of `count` numbers."""
    number = {"type": "integer", "minimum": 1, "maximum": count}
    schema = {"type": "array", "items": number, "minItems": count, "maxItems": count}
    return Constraint(kind="json_schema", source=json.dumps(schema))


def _json(text: str) -> Any:
    try:
        return read_json(text)
    except ValueError:
        return None
