"""`[env.rubric.<name>]`: the parts of a rubric, each with its kind. What they compute is said in docs/rewards.md."""

from __future__ import annotations

import math
import re
from typing import Any, Literal

import msgspec


class PartConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    """Settings of every kind of part."""

    weight: float = 1.0
    """The part's value times this is added to the reward; below 0 for what is not wanted, 0 for a mere gate."""

    gate: float | None = None
    """The least value that passes. A rollout that does not pass has at most `cap` as reward."""

    cap: float = 0.0
    """The most that is left behind a closed gate. At 0 a closed gate ends it: no further part is asked."""

    decides: bool = False
    """Count success by this part: it must be 1. If no part decides, every part of a weight above 0 must be 1."""

    domains: tuple[str, ...] = ()
    """Rows it is for, by their `domain` column; empty: all rows."""

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, (self.weight, self.cap, self.gate or 0.0))):
            raise ValueError("weight, gate and cap must be finite")
        if self.gate is None and self.cap != 0:
            raise ValueError("cap must be left out without a gate")
        if self.gate is None and self.weight == 0 and not self.decides:
            raise ValueError("a part of weight 0 must have a gate, or set decides = true")


class TextPart(PartConfig, frozen=True, kw_only=True):
    """A part that reads the answer's text alone."""

    find: str = ""
    """Regular expression for the part of the answer that counts: its last match, or that match's first group. No match
    is worth 0. Empty: the whole answer."""

    time_limit_s: float = 2.0
    """Processor time of one check. An answer that takes longer is worth 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _compiles(find=self.find)
        if not self.time_limit_s > 0:
            raise ValueError("time_limit_s must be above 0")


class ComparedPart(TextPart, frozen=True, kw_only=True):
    """A part that compares the answer with a column of the row."""

    column: str = "answer"
    """The column to compare with."""

    column_find: str = ""
    """Regular expression for the part of the column that counts, as `find`. A row without a match is refused."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _compiles(column_find=self.column_find)


class Exact(ComparedPart, frozen=True, kw_only=True, tag="exact"):
    """1 where the two texts are the same; a column with a list names several right ones."""

    case: bool = False
    """Compare upper and lower case as different."""

    punctuation: bool = True
    """Compare punctuation too. If false, 1.5 and 15 are the same."""


class Fuzzy(ComparedPart, frozen=True, kw_only=True, tag="fuzzy"):
    """Share of two texts that is the same: 2 L / (m + n), where L is the length of their longest common subsequence."""

    unit: Literal["characters", "words"] = "characters"
    """Unit of the subsequence and of both lengths."""

    at_least: float | None = None
    """Makes a yes or no of it: 1 from this similarity on, else 0."""


class Number(ComparedPart, frozen=True, kw_only=True, tag="number"):
    """1 where the last number of the answer is the column's."""

    tolerance: float = 0.0
    """Largest difference, as a share of the column's number."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tolerance >= 0:
            raise ValueError("tolerance must be 0 or more")


class Mathematics(ComparedPart, frozen=True, kw_only=True, tag="math"):
    """1 where `math-verify` finds the two equal."""

    tolerance_digits: int = 6
    """Digits after the point that must agree where one of the two is a decimal number."""


class Regex(TextPart, frozen=True, kw_only=True, tag="regex"):
    """1 where the answer has a match."""

    pattern: str
    """The regular expression, as Python writes them."""

    whole: bool = False
    """Match the whole answer, not a part of it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _compiles(pattern=self.pattern)


class Json(TextPart, frozen=True, kw_only=True, tag="json"):
    """The answer is JSON: of a schema, and with the fields that the column has."""

    schema: dict[str, Any] = {}
    """JSON schema; an answer that is not of it is worth 0."""

    column: str = ""
    """A column with an object (or its JSON text) to compare with; empty: the schema is all."""

    fields: tuple[str, ...] = ()
    """Fields to compare, `a.b` for one inside another; empty: all that the column has."""

    partial: bool = False
    """Give the share of right fields. If false, all must be right."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fields and not self.column:
            raise ValueError("fields must be left out without a column")


class Code(PartConfig, frozen=True, kw_only=True, tag="code"):
    """The answer is a Python program that passes the tests of the row, in the task's box."""

    column: str = "tests"
    """A column with tests: a list of `{stdin, stdout}`, of which each is a run of the program; or Python with assert
    statements, as one text or a list of them, of which each is run in a process of its own that calls the program's
    functions. A row whose column `shared` is true has them run in the program's process, where they can be forged: see
    docs/limits.md."""

    reference: str = "answer"
    """A column with a right program: `sparring check` runs it against the row's tests and refuses a row that it fails.
    A row without the column is not run; empty: none is."""

    find: str = ""
    """The program in the answer: the last match, its first group if it has one; empty: the last fenced block. An answer
    without one is all program."""

    partial: bool = False
    """Give the share of passed tests. If false, all must pass."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _compiles(find=self.find)


class Function(PartConfig, frozen=True, kw_only=True, tag="function"):
    """Reward of a Python function: `def name(completion: str, answer: str) -> float`, `async` or not."""

    function: str
    """`path/to/file.py:name` or `package.module:name`. It may ask for `completion`, `task` and any column."""

    timeout_s: float = 60.0
    """Wall clock of one call; the function has failed when it is over, not the policy."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.timeout_s > 0:
            raise ValueError("timeout_s must be above 0")


class AskedPart(PartConfig, frozen=True, kw_only=True):
    """A part that a language model judges."""

    model: str
    """The judge: a name of `[models]`."""

    prompt: str
    """The judge's prompt. `{completion}` stands for the answer, `{prompt}` and any other column for the row's."""

    system: str = ""
    """A system message before it."""

    find: str = ""
    """Regular expression for the verdict in the judge's reply: its last match, or that match's first group. Empty: the
    whole reply."""

    samples: int = 1
    """Verdicts whose mean counts."""

    temperature: float = 0.0
    """Of its sampling; above 0 where there are several samples."""

    max_tokens: int = 256
    """Most tokens of a reply."""

    constrain: bool = False
    """Constrain sampling so that the reply is a verdict; servers of kind openai and chat cannot."""

    timeout_s: float = 60.0
    """Wall clock of one reply."""

    retries: int = 2
    """Repetitions of a request after a failure, a time-out, or a reply without a verdict."""

    retry_delay_s: float = 0.5
    """Longest pause before the first retry; doubles with each. The pause itself is drawn evenly below it, so that many
    do not ask again at the same instant."""

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
    """A part whose judge gives one of several words, or a number."""

    choices: dict[str, float] = {}
    """Words it may answer, and what each is worth."""

    range: tuple[float, float] | None = None
    """Or the lowest and the highest number it may give; these are worth 0 and 1."""

    field: str = ""
    """Name of the field with the verdict, for replies that are a JSON object."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.choices) == (self.range is not None):
            raise ValueError("exactly one of choices and range must be given")
        if self.range is not None and not (all(map(math.isfinite, self.range)) and self.range[0] < self.range[1]):
            raise ValueError("range must be two finite numbers, the lower first")
        if not all(0 <= value <= 1 for value in self.choices.values()):
            raise ValueError("the values of choices must lie between 0 and 1")


class Judge(Verdict, frozen=True, kw_only=True, tag="judge"):
    """A language model judges the answer by itself."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _asks(self.prompt, "completion")


class Pairwise(Verdict, frozen=True, kw_only=True, tag="pairwise"):
    """A language model compares the answers of a group in pairs, `{first}` and `{second}`, each pair in both orders."""

    opponents: int = 0
    """Answers that each is compared with, the next ones in a ring; 0: all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.opponents < 0:
            raise ValueError("opponents must be 0 or more")
        _asks(self.prompt, "first", "second")
        _no_gate(self)


class Ranking(AskedPart, frozen=True, kw_only=True, tag="ranking"):
    """A language model ranks the answers of a group, `{answers}`, shown in an order and in its reverse. It replies with
    a JSON list of their numbers, the best first."""

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
    """Return the models that a rubric asks."""
    return {part.model for part in rubric.values() if isinstance(part, AskedPart)}


def of_domain(rubric: dict[str, Any], domain: str) -> dict[str, Any]:
    """Return the parts for rows of `domain`."""
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
