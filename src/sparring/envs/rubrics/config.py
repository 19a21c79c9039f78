"""`[env.rubric.<name>]`: parts of a rubric, by kind; docs/rewards.md explains what they compute."""

from __future__ import annotations

import math
import re
from typing import Any, Literal

import msgspec


class PartConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """Settings that every kind of part has."""

    weight: float = 1.0
    """Weight of the part's value in the reward; below 0 for unwanted behaviour, 0 for a part that only gates or
    decides."""

    gate: float | None = None
    """Smallest value that passes the gate. A rollout that fails the gate has a reward of at most `cap`."""

    cap: float = 0.0
    """Upper bound of the reward after a failed gate. At 0, a failed gate ends scoring: no further part runs."""

    decides: bool = False
    """Count success by this part alone: its value must be 1. If no part decides, every part with a weight above 0 must
    be 1."""

    domains: tuple[str, ...] = ()
    """Values of the `domain` column of the rows that the part applies to; empty: all rows."""

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, (self.weight, self.cap, self.gate or 0.0))):
            raise ValueError("weight, gate and cap must be finite")
        if self.gate is None and self.cap != 0:
            raise ValueError("cap must be left out without a gate")
        if self.gate is None and self.weight == 0 and not self.decides:
            raise ValueError("a part of weight 0 must have a gate, or set decides = true")


class TextPart(PartConfig, frozen=True, kw_only=True):
    """Settings of a part that reads only the answer's text."""

    find: str = ""
    """Regular expression for the relevant part of the answer: its last match, or that match's first group. No match is
    worth 0. Empty: the whole answer."""

    time_limit_s: float = 2.0
    """Processor time of one check, in seconds. An answer that takes longer is worth 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _compiles(find=self.find)
        if not self.time_limit_s > 0:
            raise ValueError("time_limit_s must be above 0")


class ComparedPart(TextPart, frozen=True, kw_only=True):
    """Settings of a part that compares the answer with a column of the row."""

    column: str = "answer"
    """Column to compare with."""

    column_find: str = ""
    """Regular expression for the relevant part of the column, as `find`. A row without a match is refused."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _compiles(column_find=self.column_find)


class Exact(ComparedPart, frozen=True, kw_only=True, tag="exact"):
    """1 if the two texts are equal; a column with a list names several right answers."""

    case: bool = False
    """Distinguish upper and lower case."""

    punctuation: bool = True
    """Compare punctuation too. If false, 1.5 and 15 are equal."""


class Fuzzy(ComparedPart, frozen=True, kw_only=True, tag="fuzzy"):
    """Similarity of two texts: 2 L / (m + n) for texts of length m and n, with L the length of their longest common
    subsequence."""

    unit: Literal["characters", "words"] = "characters"
    """Unit of the lengths."""

    at_least: float | None = None
    """Threshold that turns the similarity into 1 (reached) or 0."""


class Number(ComparedPart, frozen=True, kw_only=True, tag="number"):
    """1 if the last number of the answer equals the column's."""

    tolerance: float = 0.0
    """Largest relative difference from the column's number."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tolerance >= 0:
            raise ValueError("tolerance must be 0 or more")


class Mathematics(ComparedPart, frozen=True, kw_only=True, tag="math"):
    """1 if `math-verify` finds the two expressions equal. Of decimal numbers, 6 digits after the point must agree."""


class Regex(TextPart, frozen=True, kw_only=True, tag="regex"):
    """1 if the answer has a match."""

    pattern: str
    """Regular expression in Python's syntax."""

    whole: bool = False
    """Match the whole answer rather than a part of it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _compiles(pattern=self.pattern)


class Json(TextPart, frozen=True, kw_only=True, tag="json"):
    """Check of a JSON answer against a schema, and against the fields of a column."""

    schema: dict[str, Any] = {}
    """JSON schema; an answer that does not match it is worth 0."""

    column: str = ""
    """Column with an object, or its JSON text, to compare with; empty: only the schema is checked."""

    fields: tuple[str, ...] = ()
    """Fields to compare, `a.b` for a nested one; empty: all fields of the column."""

    partial: bool = False
    """Return the share of right fields. If false, all must be right."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fields and not self.column:
            raise ValueError("fields must be left out without a column")


class Code(PartConfig, frozen=True, kw_only=True, tag="code"):
    """Share of the row's tests, run in a box, that the answer, a Python program, passes."""

    column: str = "tests"
    """Column with the tests: a list of `{stdin, stdout}`, one run of the program each; or Python with assert
    statements, a text or a list of texts, each run in a process of its own that calls the program's functions. If the
    row's column `shared` is true, they run in the program's process, where it can forge the verdict: see
    docs/limits.md."""

    reference: str = "answer"
    """Column with a right program: `sparring check` refuses a row if this program fails the row's tests. A row without
    the column has no program to run. Empty: no row has one."""

    find: str = ""
    """Regular expression for the program in the answer: the last match, or its first group. Empty: the last fenced code
    block, or the whole answer if there is none."""

    partial: bool = False
    """Return the share of passed tests. If false, all must pass."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _compiles(find=self.find)


class Function(PartConfig, frozen=True, kw_only=True, tag="function"):
    """Reward of a Python function: `def name(completion: str, answer: str) -> float`, `async` or not."""

    function: str
    """Function as `path/to/file.py:name` or `package.module:name`. It may take `completion`, `task` and any column."""

    timeout_s: float = 60.0
    """Maximum wall-clock time of one call, in seconds. A longer call is a failure of the function, not of the
    policy."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.timeout_s > 0:
            raise ValueError("timeout_s must be above 0")


class AskedPart(PartConfig, frozen=True, kw_only=True):
    """Settings of a part that a language model judges."""

    model: str
    """Judge: a name of `[models]`."""

    prompt: str
    """Prompt of the judge. `{completion}` stands for the answer, `{prompt}` for the row's prompt, and other names for
    its columns."""

    system: str = ""
    """System message before the prompt."""

    find: str = ""
    """Regular expression for the verdict in the judge's reply: its last match, or that match's first group. Empty: the
    whole reply."""

    samples: int = 1
    """Number of verdicts per answer, which are averaged."""

    temperature: float = 0.0
    """Sampling temperature; above 0 for several samples."""

    max_tokens: int = 256
    """Maximum number of tokens of a reply."""

    constrain: bool = False
    """Constrain sampling so that every reply is a verdict; servers of kind openai and chat cannot."""

    timeout_s: float = 60.0
    """Maximum wall-clock time of one reply, in seconds."""

    retries: int = 2
    """Maximum number of retries after a failure, a time-out, or a reply without a verdict."""

    retry_delay_s: float = 0.5
    """Upper bound of the pause before the first retry, in seconds; doubles with each retry. The pause is drawn
    uniformly below the bound (full jitter)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _compiles(find=self.find)
        if (
            self.samples < 1
            or self.max_tokens < 1
            or self.retries < 0
            or self.retry_delay_s < 0
            or not self.timeout_s > 0
        ):
            raise ValueError(
                "samples and max_tokens must be at least 1, retries and retry_delay_s 0 or more, timeout_s above 0"
            )
        if self.temperature < 0 or (self.samples > 1 and self.temperature == 0):
            raise ValueError(
                "temperature must be 0 or more, and above 0 for several samples: greedy ones are all the same"
            )
        if self.find and self.constrain:
            raise ValueError("find must be left out with constrain, under which the reply is the verdict alone")


class Verdict(AskedPart, frozen=True, kw_only=True):
    """Settings of a part with a judge that replies with one of several words, or with a number."""

    choices: dict[str, float] = {}
    """Allowed words and their values."""

    range: tuple[float, float] | None = None
    """Lowest and highest allowed number, which are worth 0 and 1; instead of `choices`."""

    field: str = ""
    """Field with the verdict, for replies that are a JSON object."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.choices) == (self.range is not None):
            raise ValueError("exactly one of choices and range must be given")
        if self.range is not None and not (all(map(math.isfinite, self.range)) and self.range[0] < self.range[1]):
            raise ValueError("range must be two finite numbers, the lower first")
        if not all(0 <= value <= 1 for value in self.choices.values()):
            raise ValueError("the values of choices must lie between 0 and 1")


class Judge(Verdict, frozen=True, kw_only=True, tag="judge"):
    """Verdict of a language model on one answer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _asks(self.prompt, "completion")


class Pairwise(Verdict, frozen=True, kw_only=True, tag="pairwise"):
    """Pairwise comparison of a group's answers, `{first}` and `{second}`, by a language model, each pair in both
    orders."""

    opponents: int = 0
    """Number of opponents per answer: the answers that follow it, with the first after the last. 0: all others."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.opponents < 0:
            raise ValueError("opponents must be 0 or more")
        _asks(self.prompt, "first", "second")
        _no_gate(self)


class Ranking(AskedPart, frozen=True, kw_only=True, tag="ranking"):
    """Ranking of a group's answers, `{answers}`, by a language model, in an order and in its reverse. The reply is a
    JSON list of their numbers, the best first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _asks(self.prompt, "answers")
        _no_gate(self)


Pointwise = Exact | Fuzzy | Number | Mathematics | Regex | Json | Code | Function | Judge
Relative = Pairwise | Ranking
Part = Pointwise | Relative

TEXT = (Exact, Fuzzy, Number, Mathematics, Regex, Json)
RELATIVE = (Pairwise, Ranking)


def judging(rubric: dict[str, Any]) -> set[str]:
    """Return the models that judge for a rubric."""
    return {part.model for part in rubric.values() if isinstance(part, AskedPart)}


def of_domain(rubric: dict[str, Any], domain: str) -> dict[str, Any]:
    """Return the parts that apply to rows of `domain`."""
    return {name: part for name, part in rubric.items() if not part.domains or domain in part.domains}


def _compiles(**patterns: str) -> None:
    for name, pattern in patterns.items():
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{name} must be a regular expression: {error}") from error


def _asks(prompt: str, *names: str) -> None:
    missing = [f"{{{name}}}" for name in names if f"{{{name}}}" not in prompt]
    if missing:
        raise ValueError(f"prompt must contain {' and '.join(missing)}")


def _no_gate(part: PartConfig) -> None:
    if part.gate is not None or part.decides:
        raise ValueError(
            "a part that compares the answers of a group must have neither gate nor decides: its value is relative"
        )
