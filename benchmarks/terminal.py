"""Terminal tasks: what a tiny model learns by reward in a shell, and whether it learns more with what the terminal
answered in the loss (ECHO).

    python benchmarks/terminal.py [--seeds 1,2,3] [--scale 0.01] [--directory runs]

Each seed has one start, the stages init and sft of recipes/terminal.toml, and from it two runs of rl: as the recipe is,
and with `rl.observations` of `--scale`. The start and both are sampled on the held-out tasks of their seed, one rollout
a task. Told are held-out success by seed; of each arm the change since the start, paired by task over all seeds, with
its 95 % interval; and of the arm with observations the same against the arm without. What is done of a run or an
evaluation is not done again. Some half an hour a seed on one core; it measures no time. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

import msgspec
from common.figures import ROOT, SHORT_RUNS, Claims, claim, read_options
from common.short_recipes import fewest_steps

from sparring.launch.evaluate import Subject, evaluate_subjects
from sparring.launch.run import run_recipe
from sparring.observe.evaluation import TaskResult
from sparring.observe.statistics import Estimate, paired_difference
from sparring.recipe.load import load
from sparring.recipe.run_config import RunConfig

RECIPE = ROOT / "recipes/terminal.toml"
START, PLAIN, ECHO = "start", "rl", "rl with observations"
LEAST = 0.10
"""Held-out success that RL has to add, on each arm."""


def main() -> None:
    """Run what is missing, print the tables."""
    options = _options()
    print(f"| seed | {START} | {PLAIN} | {ECHO} |\n| --- | --- | --- | --- |")
    tasks: dict[str, list[TaskResult]] = defaultdict(list)
    by_seed: dict[str, list[float]] = defaultdict(list)
    for seed in options.seeds:
        for arm, results in _seed(seed, options).items():
            tasks[arm] += results
            by_seed[arm].append(_mean([_solved(result) for result in results]))
        print(f"| {seed} | {' | '.join(f'{by_seed[arm][-1]:.1%}' for arm in (START, PLAIN, ECHO))} |", flush=True)
    pairs = {"rl": (START, PLAIN), "rl with observations": (START, ECHO), "observations against none": (PLAIN, ECHO)}
    changes = {
        name: paired_difference([_solved(of) for of in tasks[before]], [_solved(of) for of in tasks[after]])
        for name, (before, after) in pairs.items()
    }
    print("\n| change | points | 95 % interval |\n| --- | --- | --- |")
    for name, change in changes.items():
        low, high = change.interval or (0.0, 0.0)
        print(f"| {name} | {change.value:+.1%} | {low:+.1%} to {high:+.1%} |")
    _print_kinds(tasks)
    print(json.dumps({"benchmark": "terminal", "success": by_seed, "claims": _claims(by_seed, changes)}))


def _seed(seed: int, options: argparse.Namespace) -> dict[str, list[TaskResult]]:
    """Train and evaluate one seed; return the results of its held-out tasks, in one order, of each arm."""
    common = fewest_steps(RECIPE) if options.short else []
    common += [f"run.directory={options.directory}", "observe.progress=off", "run.threads=1", f"run.seed={seed}"]
    name = f"terminal-{seed}"
    begun = run_recipe(load(RECIPE, [*common, f"run.name={name}-start", "run.stages=['init', 'sft']"])) / "sft/model"
    folders = {START: begun}
    for arm, scale in ((PLAIN, 0.0), (ECHO, options.scale)):
        settings = [f"run.name={name}-{scale:g}", "run.stages=['rl']", f"rl.observations={scale}"]
        folders[arm] = run_recipe(_from(load(RECIPE, [*common, *settings]), begun)) / "rl/model"
    subjects = [Subject(name=f"{name}-{arm.replace(' ', '-')}", folder=folder) for arm, folder in folders.items()]
    exam = _from(load(RECIPE, [*common, f"run.name={name}-exam"]), begun)
    found = [each.evaluation.tasks for each in evaluate_subjects(exam, subjects).evaluations]
    return {arm: [of[task] for task in sorted(of)] for arm, of in zip(folders, found, strict=True)}


def _from(config: RunConfig, begun: Path) -> RunConfig:
    """Return the recipe with weights to begin with."""
    policy = msgspec.structs.replace(config.models["policy"], path=str(begun), init=None)
    return msgspec.structs.replace(config, models={"policy": policy})


def _print_kinds(tasks: dict[str, list[TaskResult]]) -> None:
    print(f"\n| kind | tasks | {START} | {PLAIN} | {ECHO} |\n| --- | --- | --- | --- | --- |")
    kinds = sorted({result.tag for result in tasks[START]})
    for kind in kinds:
        of_kind = {arm: [_solved(result) for result in tasks[arm] if result.tag == kind] for arm in tasks}
        cells = (f"{_mean(of_kind[arm]):.1%}" for arm in (START, PLAIN, ECHO))
        print(f"| {kind} | {len(of_kind[START])} | {' | '.join(cells)} |")


def _claims(by_seed: dict[str, list[float]], changes: dict[str, Estimate]) -> Claims:
    """Ten points by every seed, and for certain over all."""

    gains = {
        arm: [after - before for before, after in zip(by_seed[START], by_seed[arm], strict=True)]
        for arm in (PLAIN, ECHO)
    }
    return [
        claim(name, value, "", LEAST, ">=")
        for arm in (PLAIN, ECHO)
        for name, value in (
            (f"{arm}: least change of a seed", min(gains[arm])),
            (f"{arm}: lower end of the change", (changes[arm].interval or (0.0, 0.0))[0]),
        )
    ]


def _solved(result: TaskResult) -> float:
    return _mean([float(solved) for solved in result.solved])


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[1, 2, 3])
    parser.add_argument("--scale", type=float, default=0.01, help="scale of the loss on what the terminal answered")
    parser.add_argument("--directory", type=lambda text: Path(text).absolute(), default=Path("runs").absolute())
    return read_options(parser, seeds=[1], directory=SHORT_RUNS)


if __name__ == "__main__":
    main()
