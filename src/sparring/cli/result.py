"""Table of a run's result in the terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparring.errors import refusal
from sparring.observe.terminal import say

EVALUATED = {
    "init": "before",
    "sft": "after SFT",
    "preference": "after preferences",
    "rl": "after RL",
    "distill": "after distillation",
}
"""Stages with evaluated weights, and their columns."""


def print_result(folder: Path) -> None:
    """Print `summary.json`: success by dataset, the exactness figure, tokens and time.

    Raises:
        BadInput: the run has no summary.
    """
    file = folder / "summary.json"
    if not file.is_file():
        raise refusal(str(folder), "a finished run with summary.json", "none", "run its recipe first")
    for line in result_lines(json.loads(file.read_text(encoding="utf-8"))):
        say(line)


def result_lines(summary: Mapping[str, Any]) -> list[str]:
    """Return the lines of the table, without missing parts."""
    columns = {key: name for key, name in EVALUATED.items() if summary.get(f"{key}_success") is not None}
    datasets = summary.get("by_dataset", {}).items()
    covered = any(entry.get("coverage") for _, entry in datasets)
    rows = [("dataset", *(["coverage"] * covered), *columns.values(), "tasks")]
    for name, entry in datasets:
        coverage = [entry.get("coverage") or ""] * covered
        rows.append((name, *coverage, *(number(entry.get(key)) for key in columns), str(entry["tasks"])))
    together = [number(summary.get(f"{key}_success")) for key in columns]
    rows.append(("all together", *([""] * covered), *together, str(summary.get("eval_tasks", ""))))
    lines = (table(rows) if datasets else plain(rows)) if columns else []
    judged = summary.get("held_out", {}).items()
    teachers = summary.get("teachers", {}).items()
    against = summary.get("against", {}).items()
    change = summary.get("change")
    facts = {
        "change, task by task": "" if change is None else _change(change),
        **{f"held out, judged right after {name}": f"{number(of['accuracy'])} of {of['count']}" for name, of in judged},
        **{f"of the success of the teacher {name}, the student has": _kept(of) for name, of in teachers},
        **{f"more than {name}, task by task": _lead(of) for name, of in against},
        "lower end of the 95 % interval after RL": number(summary.get("rl_success_low")),
        "with the tool host switched off": number(summary.get("no_tool_success")),
        "engine against trainer, largest log-probability difference": _plain(summary.get("logprob_max_abs_diff")),
        "tokens sampled / trained": _pair(summary.get("tokens_sampled"), summary.get("tokens_trained")),
        "wall clock": _wall(summary.get("wall_s", {})),
    }
    present = {name: value for name, value in facts.items() if value}
    width = max(map(len, present), default=0)
    return lines + [""] * bool(lines) + [f"{name:<{width}}  {value}" for name, value in present.items()]


def table(rows: list[tuple[str, ...]]) -> list[str]:
    """Return aligned columns, the first to the left, with rules below the head and above the last row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([f"{first:<{widths[0]}}", *cells]))
    rule = "-" * len(lines[0])
    return [lines[0], rule, *lines[1:-1], rule, lines[-1]]


def plain(rows: list[tuple[str, ...]]) -> list[str]:
    """Return a table without a rule above its last row."""
    *lines, _, last = table(rows)
    return [*lines, last]


def number(value: float | None, percent: bool = True, signed: bool = False) -> str:
    """Return a number, or a share in percent, as text; None is empty."""
    sign = "+" if signed else ""
    return "" if value is None else f"{100 * value:{sign}.1f} %" if percent else f"{value:{sign}.4g}"


def _kept(of: Mapping[str, float]) -> str:
    teacher = f"{number(of['success'])} of {of['tasks']}"
    return f"{number(of['kept'])} ({number(of['kept_low'])} to {number(of['kept_high'])}; teacher {teacher})"


def _change(of: Mapping[str, Any]) -> str:
    """Return a change as text: `+40.0 points (+34.5 to +45.1; rl against init, 340 tasks)`."""
    return _difference(of, f"{of['after']} against {of['before']}, {of['tasks']} tasks")


def _lead(of: Mapping[str, Any]) -> str:
    """Return a lead as text: `+1.1 points (+0.5 to +1.7; it has 97.7 % of 2000 tasks, trained on 344,886 tokens at
    last)`."""
    value = number(of["value"], of["figure"] == "success")
    trained = "" if of["tokens_trained"] is None else f", trained on {of['tokens_trained']:,} tokens at last"
    return _difference(of, f"it has {value} of {of['tasks']} tasks{trained}")


def _difference(of: Mapping[str, Any], behind: str) -> str:
    """Return a difference of success in points, or of reward, with its interval and a remark."""
    success = of["figure"] == "success"
    more, low, high = (
        "none" if one is None else f"{100 * one:+.1f}" if success else f"{one:+.4g}"
        for one in (of["difference"], of["difference_low"], of["difference_high"])
    )
    return f"{more}{' points' if success else ' of reward'} ({low} to {high}; {behind})"


def _plain(value: float | None) -> str:
    return "" if value is None else repr(float(value))


def _pair(sampled: int | None, trained: int | None) -> str:
    return "" if sampled is None or trained is None else f"{sampled:,} / {trained:,}"


def _wall(wall_s: Mapping[str, float]) -> str:
    stages = {name: value for name, value in wall_s.items() if name != "total"}
    parts = ", ".join(f"{name} {value:.0f} s" for name, value in stages.items())
    return f"{sum(stages.values()):.0f} s ({parts})" if stages else ""
