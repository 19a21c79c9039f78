"""File format of evaluation results."""

from __future__ import annotations

from pathlib import Path

import msgspec

from sparring.errors import refusal
from sparring.observe.atomic_write import write_whole
from sparring.observe.evaluation import Comparison, Evaluation, Verdict

RESULT = "evaluation.json"
"""Name of the file in an evaluation's folder."""


class Evaluated(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluation and its subject, as in `evaluation.json`. `folder` contains the record."""

    name: str
    folder: str = ""
    environment: str
    seed: int
    temperature: float
    evaluation: Evaluation


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """Changes from `before` to `after`, with the gate's verdict."""

    before: str
    after: str
    comparison: Comparison
    figure: str | None = None
    margin: float | None = None
    verdict: Verdict | None = None


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a result file."""

    evaluations: tuple[Evaluated, ...]
    comparisons: tuple[Compared, ...] = ()

    @property
    def evaluation(self) -> Evaluation:
        """Evaluation of the last subject."""
        return self.evaluations[-1].evaluation

    @property
    def comparison(self) -> Comparison | None:
        """Comparison of the last subject with the first; None for a single subject."""
        return self.comparisons[-1].comparison if self.comparisons else None


def read_result(path: Path) -> Evaluated:
    """Return the only evaluation of a result file.

    Raises:
        BadInput: the file cannot be read, is no result file, or has several evaluations.
    """
    try:
        results = msgspec.json.decode(path.read_bytes(), type=Results)
    except (OSError, msgspec.MsgspecError) as error:
        raise refusal(
            str(path), f"a result file of sparring eval, such as {RESULT}", str(error), "check the path"
        ) from error
    if len(results.evaluations) != 1:
        actual = str(len(results.evaluations))
        raise refusal(str(path), "one evaluation", actual, f"give the {RESULT} of one of them")
    return results.evaluations[0]


def write_results(results: Results, path: Path) -> None:
    """Write a result file atomically; raise BadInput if that fails."""
    try:
        write_whole(path, msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    except OSError as error:
        raise refusal(
            str(path), "a file that can be written", error.strerror or str(error), "choose another"
        ) from error
