"""A host of tools that fails alone: whether its failures become rewards, and what is learned under them.

    python benchmarks/failures.py [--seeds 5] [--steps 90] [--failing 0.15] [--directory runs]

Each seed has a start of its own (recipes/failures/start.toml) and three runs of recipes/failures.toml from it: with a
host that never fails; with one of which `--failing` of all calls raise the same error; and the same under old rules, by
which a rollout that breaks twice under one message failed by the policy. All are evaluated with a host that never
fails, on the 1,000 held-out tasks of their seed.

A reward is fake where a rollout is scored as the policy's failure for what the host did: nothing else fails by the
policy here. Told are the share of fakes among all scored rollouts, that among the rollouts of groups that are trained
(groups of equal rewards are not), the share of rollouts that were lost, and held-out success. What is done of a run or
an evaluation is not done again. Some fifteen minutes on one core; it measures no time. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import statistics
from contextlib import closing
from pathlib import Path
from typing import Any

from common.figures import ROOT, SHORT_RUNS, Claims, claim, read_options
from common.short_recipes import fewest_steps

from sparring.launch.evaluate import Subject, evaluate_subjects
from sparring.launch.run import run_recipe
from sparring.observe.statistics import mean
from sparring.recipe.load import load
from sparring.recipe.run_config import RunConfig
from sparring.store.sqlite import SqliteStore
from sparring.types import Group

WORLD = ROOT / "recipes/failures/world.py"
OLD = ["env.args.rebuildable=false", f"rollout.harness={WORLD}:OldRules"]
MOST_FAKES = 0.002
"""Largest share of the rewards that may be fake."""


def main() -> None:
    """Run what is missing, print the table."""
    options = _options()
    arms: dict[str, list[str]] = {
        "no failures": [],
        "failures": [f"env.args.failing={options.failing}"],
        "failures, old rules": [f"env.args.failing={options.failing}", *OLD],
    }
    print("| host | seed | held-out success | fake rewards | of groups that differ | lost |")
    print("| --- | --- | --- | --- | --- | --- |")
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    for seed in range(1, options.seeds + 1):
        for name, row in _seed(seed, arms, options).items():
            rows[name].append(row)
            cells = [f"{row[key]:.2%}" for key in ("success", "fakes", "trained_fakes", "lost")]
            print(f"| {name} | {seed} | {' | '.join(cells)} |", flush=True)
    print("\n| host | held-out success, 95 % interval | fake rewards | of groups that differ | lost |")
    print("| --- | --- | --- | --- | --- |")
    totals = {name: _total(of_seeds) for name, of_seeds in rows.items()}
    for name, total in totals.items():
        low, high = total["interval"] or (float("nan"), float("nan"))
        cells = [f"{total[key]:.3%}" for key in ("fakes", "trained_fakes", "lost")]
        print(f"| {name} | {total['success']:.2%} ({low:.2%} to {high:.2%}) | {' | '.join(cells)} |")
    print(json.dumps({"benchmark": "failures", "seeds": rows, "totals": totals, "claims": _claims(totals)}))


def _seed(seed: int, arms: dict[str, list[str]], options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Train and evaluate one seed; return the figures of each run."""
    common = [f"run.directory={options.directory}", "observe.progress=off", "run.threads=1", f"run.seed={seed}"]
    world = f"env.name={WORLD}:Shelves"
    begun = _recipe("failures/start", [*common, world, f"run.name=failures-start-{seed}"], options)
    start = run_recipe(begun)
    common += [world, f"models.policy.path={start / 'sft/model'}", f"rl.steps={options.steps}"]
    runs: dict[str, Path] = {}
    for arm, settings in arms.items():
        named = f"run.name=failures-{seed}-{arm.replace(', ', '-').replace(' ', '-')}"
        runs[arm] = run_recipe(_recipe("failures", [*common, named, *settings], options))
    subjects = [Subject(name=folder.name, folder=folder / "rl/model") for folder in runs.values()]
    exam = _recipe("failures", [*common, "run.name=failures-exam"], options)
    evaluations = evaluate_subjects(exam, subjects).evaluations
    return {
        arm: {"success": of.evaluation.success.value or 0.0, **_rewards(folder)}
        for (arm, folder), of in zip(runs.items(), evaluations, strict=True)
    }


def _recipe(name: str, settings: list[str], options: argparse.Namespace) -> RunConfig:
    """Return a recipe with these settings, by its fewest steps with `--short`."""
    path = ROOT / f"recipes/{name}.toml"
    return load(path, [*(fewest_steps(path) if options.short else ()), *settings])


def _rewards(folder: Path) -> dict[str, float]:
    """Return the shares of fake rewards and of lost rollouts of a run, with the counts that they are of."""
    counts = dict.fromkeys(("scored", "fake", "trained", "trained_fake", "admitted"), 0)
    with closing(SqliteStore(folder / "store.sqlite", read_only=True)) as store:
        for group in store.groups(stage="rl"):
            fake, scored = _fakes(group), len(group.rollouts)
            is_trained = len({score.reward for score in group.scores}) > 1
            lost = {rollout.index for rollout in group.failed} - {rollout.index for rollout in group.rollouts}
            counts["scored"] += scored
            counts["fake"] += fake
            counts["trained"] += scored * is_trained
            counts["trained_fake"] += fake * is_trained
            counts["admitted"] += scored + len(lost)
    return counts | {
        "fakes": counts["fake"] / counts["scored"],
        "trained_fakes": counts["trained_fake"] / max(1, counts["trained"]),
        "lost": 1 - counts["scored"] / counts["admitted"],
    }


def _fakes(group: Group) -> int:
    return sum(rollout.outcome.kind == "policy_failed" for rollout in group.rollouts)


def _total(seeds: list[dict[str, float]]) -> dict[str, Any]:
    """Return the mean success of all seeds with its interval, and the shares over all their rollouts."""
    sums = {key: sum(seed[key] for seed in seeds) for key in ("scored", "fake", "trained", "trained_fake", "admitted")}
    successes = [seed["success"] for seed in seeds]
    return {
        "success": statistics.fmean(successes),
        "interval": mean(successes).interval,
        "fakes": sums["fake"] / sums["scored"],
        "trained_fakes": sums["trained_fake"] / max(1, sums["trained"]),
        "lost": 1 - sums["scored"] / sums["admitted"],
    }


def _claims(totals: dict[str, dict[str, Any]]) -> Claims:
    """Few fakes, and success within the interval without failures; the old rules, whose success lies below it."""
    low, high = totals["no failures"]["interval"] or (0.0, 1.0)
    new, old = totals["failures"], totals["failures, old rules"]

    return [
        claim("fake rewards", new["fakes"], "", MOST_FAKES, "<="),
        claim("fake rewards of groups with different rewards", new["trained_fakes"], "", MOST_FAKES, "<="),
        claim("success, at least the interval without failures", new["success"], "", low, ">="),
        claim("success, at most the interval without failures", new["success"], "", high, "<="),
        claim("old rules: fake rewards", old["fakes"], "", MOST_FAKES, ">="),
        claim("old rules: success below the interval without failures", old["success"], "", low, "<="),
    ]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, choices=range(1, 11))
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--failing", type=float, default=0.15, help="share of calls that fail")
    parser.add_argument("--directory", type=lambda text: Path(text).absolute(), default=Path("runs").absolute())
    return read_options(parser, seeds=1, steps=1, directory=SHORT_RUNS)


if __name__ == "__main__":
    main()
