"""Data of the page as one plain value, read from a run's folder and store in one pass over the groups."""

from __future__ import annotations

import json
import math
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from sparring.algo.config import AlgoConfig, named
from sparring.algo.pipeline import load_credit
from sparring.algo.user_rules import is_own
from sparring.dashboard.evaluations import OF_A_RUN, evaluations
from sparring.dashboard.pick import Picker
from sparring.dashboard.rollouts import group_advantages, group_entries
from sparring.dashboard.token_text import Piece, load_pieces
from sparring.protocols import Credit, Store
from sparring.types import POLICY
from sparring.validation import convert

POINTS = 600
"""Maximum number of points of a curve, and of events; longer curves are averaged over equal stretches."""

TRAIN_STAGES = ("sft", "preference", "reward_model", "rl", "rl/eval", "distill", "distill/eval")
"""Stages that may have metrics, including their evaluations during training."""

AT_THE_END = {
    "loss_imitate": "loss",
    "rollout/reward": "reward",
    "rollout/success": "success",
    "rollout/tokens_mean": "tokens per rollout",
    "entropy": "entropy",
}
"""Metrics whose last value the stage table shows, with their labels in the table."""

PICKS = 3
"""Number of groups of the rl stage that the page shows of each kind (first, last, between, best, worst, failed)."""

GROUP_STAGES = ("rl", "distill", *(f"eval/{name}" for name in OF_A_RUN), "eval")
"""Names under which a run or an evaluation may store groups."""


def gather(run_dir: Path, store: Store) -> dict[str, Any]:
    """Return the page's data. Of the run's folder, `summary.json`, `config.toml` and checkpoints are read if they
    exist."""
    _, config = read_config(run_dir)
    credit = credit_of(config)
    outcomes: Counter[str] = Counter()
    entries: list[dict[str, Any]] = []
    num_rollouts = 0
    for stage in GROUP_STAGES:
        picker = Picker(per_kind=PICKS if stage == "rl" else 1)
        for group in store.groups(stage=stage):
            picker.take(group)
            rollouts = (*group.rollouts, *group.failed)
            num_rollouts += len(rollouts)
            if stage == "rl":
                outcomes.update(rollout.outcome.kind for rollout in rollouts)
        for group, names in picker.picked():
            advantages = group_advantages(group, credit) if credit and stage == "rl" else {}
            entries += group_entries(group, names, stage, advantages)
    return {
        **figures(run_dir, store),
        "outcomes": shares(outcomes),
        "rollouts": entries,
        "rollouts_seen": num_rollouts,
        "pieces": used_pieces(vocabulary(run_dir, config), entries),
    }


def figures(run_dir: Path, store: Store) -> dict[str, Any]:
    """Return the page's data without the groups."""
    summary = _summary(run_dir / "summary.json")
    config_text, config = read_config(run_dir)
    metrics = {stage: _curves(store.metrics(stage)) for stage in TRAIN_STAGES}
    return {
        "name": run_dir.resolve().name,
        "written": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M"),
        "lede": _lede(config, summary),
        "summary": {key: value for key, value in summary.items() if isinstance(value, (int, float, str))},
        "stages": _stages(summary, metrics),
        "metrics": {stage: curves for stage, curves in metrics.items() if curves["steps"]},
        "evaluation": _evaluation(summary),
        "evaluations": evaluations(run_dir, store, config),
        "events": [event for event in store.events() if "kind" in event][-POINTS:],
        "account": _account(summary),
        "config": config_text,
    }


def credit_of(config: Mapping[str, Any]) -> Credit | None:
    """Return the credit rule of a run's config; None if advantages depend on more than the stored group, or on a rule
    in the user's own file, which is not executed."""
    parts, of_loss = named(config.get("algo", {})), ("ratio", "gate", "loss", "correction")
    before_loss = {part: rule for part, rule in parts.items() if part not in of_loss}
    if any(is_own(rule.get("name")) for rule in (before_loss.get("credit", {}), *before_loss.get("shaping", ()))):
        return None
    algo = convert(before_loss, AlgoConfig)
    return load_credit(algo, seed=0) if algo.sees_one_group else None


def shares(kinds: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return the outcomes of the rl stage's rollouts with counts and shares, the most frequent first."""
    total = sum(kinds.values())
    return [{"name": name, "count": n, "share": n / total} for name, n in Counter(kinds).most_common()]


def _curves(rows: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, Any]:
    """Return the steps and one list per metric, None for missing values, with at most `POINTS` points."""
    stretch = max(1, math.ceil(len(rows) / POINTS))
    parts = [rows[start : start + stretch] for start in range(0, len(rows), stretch)]
    names = sorted({name for _, values in rows for name in values})
    values = {name: [_average(name, [v[name] for _, v in part if name in v]) for part in parts] for name in names}
    return {"steps": [part[-1][0] for part in parts], "last": rows[-1][0] if rows else 0, "values": values}


def _average(name: str, values: Sequence[float]) -> float | None:
    """Return the mean of finite values. For a metric that is a maximum, return their maximum, so that no outlier is
    averaged away."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return None
    return float(f"{max(finite) if '_max' in name else math.fsum(finite) / len(finite):.6g}")


def _summary(path: Path) -> dict[str, Any]:
    """Return the run's summary, or {} before its end."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def read_config(run_dir: Path) -> tuple[str, dict[str, Any]]:
    """Return a run's config as text and as data; both empty if there is none."""
    path = run_dir / "config.toml"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return text, tomllib.loads(text)


def _lede(config: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    run, env = config.get("run", {}), config.get("env", {})
    named = env.get("name") or env.get("reward") or ", ".join(config.get("envs", {}))
    facts = [f"environment {named}"] if named else []
    facts += [f"stages {', '.join(run['stages'])}"] if "stages" in run else []
    facts += [f"device {run['device']}"] if "device" in run else []
    facts += [f"seed {run['seed']}"] if "seed" in run else []
    unfinished = "" if summary else " The run has not written its summary yet."
    return (" · ".join(facts) or "A run without a stored configuration.") + unfinished


def _stages(summary: Mapping[str, Any], metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for name, wall_s in summary.get("wall_s", {}).items():
        if name == "total":
            continue
        curves = metrics.get(name, {"last": 0, "values": {}})
        ends = {label: curves["values"][key][-1] for key, label in AT_THE_END.items() if key in curves["values"]}
        facts = {label: value for label, value in ends.items() if value is not None}
        rows.append({"name": name, "wall_s": wall_s, "steps": curves["last"], "facts": facts})
    return rows


def _evaluation(summary: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return success rates with 95 % intervals, by dataset and in total."""
    by_dataset = summary.get("by_dataset")
    if not by_dataset:
        return None
    before = "init" if summary.get("sft_success") is None else "sft"
    after = "rl" if summary.get("distill_success") is None else "distill"
    rows = [
        {
            "name": name,
            "coverage": entry.get("coverage"),
            "tasks": entry["tasks"],
            "before": _rate(entry.get(before), entry["intervals"].get(before)),
            "after": _rate(entry.get(after), entry["intervals"].get(after)),
        }
        for name, entry in by_dataset.items()
    ]
    tasks = summary.get("eval_tasks") or sum(row["tasks"] for row in rows)
    total = {
        "name": "all together",
        "tasks": tasks,
        "before": _overall(summary, before),
        "after": _overall(summary, after),
    }
    return {"rows": rows, "total": total}


def _overall(summary: Mapping[str, Any], stage: str) -> tuple[float, float, float] | None:
    ends: list[Any] = [summary.get(f"{stage}_success_{end}") for end in ("low", "high")]
    return _rate(summary.get(f"{stage}_success"), None if None in ends else ends)


def _rate(rate: float | None, interval: Sequence[float] | None) -> tuple[float, float, float] | None:
    return None if rate is None or interval is None else (rate, interval[0], interval[1])


def _account(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the account of sampled training tokens, by the names of `TokenAccount`."""
    account = summary.get("tokens") or {}
    names = {
        "trained": "trained",
        "filtered": "group without variance",
        "zero_advantage": "zero advantage",
        "failed": "failed",
        "auxiliary": "auxiliary replies",
        "lost": "replies that never arrived",
        "dropped": "gradient not finite",
    }
    entries = [{"name": names[key], "tokens": account[key]} for key in names if account.get(key)]
    missing = account.get("sampled", 0) - sum(entry["tokens"] for entry in entries)
    return entries + ([{"name": "UNACCOUNTED", "tokens": missing}] if missing > 0 else [])


def vocabulary(run_dir: Path, config: Mapping[str, Any]) -> dict[int, Piece]:
    """Return the text of every token of the policy; {} without a tokenizer, in which case the page shows ids."""
    folders = [run_dir, *sorted(run_dir.glob("*/")), *sorted(run_dir.glob("*/*/"))]
    checkpoint = config.get("models", {}).get(POLICY, {}).get("path")
    folders += [Path(checkpoint)] if checkpoint else []
    file = next((f / "tokenizer.json" for f in folders if (f / "tokenizer.json").is_file()), None)
    return load_pieces(file) if file else {}


def used_pieces(pieces: Mapping[int, Piece], entries: Sequence[Mapping[str, Any]]) -> dict[int, Piece]:
    """Return the text of the tokens in `entries`."""
    used = {token for entry in entries for segment in entry["segments"] for token in segment["tokens"]}
    return {token: pieces[token] for token in sorted(used) if token in pieces}
