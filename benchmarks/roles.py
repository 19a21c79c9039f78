"""Two roles of one policy that train each other: whether both get better, and that neither does when each earns what
the other deserves.

    python benchmarks/roles.py [--seeds 3] [--directory runs]

Of each seed: recipes/duel.toml, and the same with the world `Swapped`, each with that seed. The weights after `sft` and
after `rl` are sampled on 200 held-out tasks of the game (its seed's own), where the proposer's reward is the share of
valid proposals, and on 200 questions to the solver alone: the same for every seed, and never asked in the game. Told
are both shares before and after, by seed, and the change with its 95 % interval over tasks: of the proposer over all
tasks of all seeds, of the solver over the questions, each by its mean over seeds. About a minute a seed; what is done of
a run or an evaluation is not done again. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common.figures import ROOT, SHORT_RUNS, Claims, claim, read_options
from common.short_recipes import fewest_steps

from sparring.launch.evaluate import Subject, evaluate_subjects
from sparring.launch.run import run_recipe
from sparring.observe.evaluation import Evaluation, TaskResult
from sparring.observe.statistics import Estimate, paired_difference
from sparring.recipe.load import load

RECIPE = ROOT / "recipes/duel.toml"
WORLD = ROOT / "recipes/duel/world.py"
KINDS = {"duel": "Duel", "swapped": "Swapped"}
ROLES = ("proposer", "solver")
QUESTIONS_SEED = 1


def main() -> None:
    """Run what is missing, print the table."""
    options = _options()
    print("| rewards | seed | valid proposals | right answers |\n| --- | --- | --- | --- |")
    changes: dict[str, dict[str, Estimate]] = {}
    for kind in KINDS:
        by_seed = [_seed(kind, seed, options) for seed in range(1, options.seeds + 1)]
        for seed, shares in enumerate(by_seed, 1):
            cells = (" -> ".join(f"{_mean(of):.1%}" for of in shares[role]) for role in ROLES)
            print(f"| {kind} | {seed} | {' | '.join(cells)} |", flush=True)
        proposer = [[share for shares in by_seed for share in shares["proposer"][when]] for when in (0, 1)]
        questions = [zip(*(shares["solver"][when] for shares in by_seed), strict=True) for when in (0, 1)]
        solver = [[_mean(of_question) for of_question in of] for of in questions]
        changes[kind] = {
            "proposer": paired_difference(proposer[0], proposer[1]),
            "solver": paired_difference(solver[0], solver[1], options.seeds * len(solver[0])),
        }
    print("\n| rewards | role | change | 95 % interval |\n| --- | --- | --- | --- |")
    for kind, of_roles in changes.items():
        for role, change in of_roles.items():
            low, high = change.interval or (0.0, 0.0)
            print(f"| {kind} | {role} | {change.value:+.1%} | {low:+.1%} to {high:+.1%} |")
    print(json.dumps({"seeds": options.seeds, "claims": [claim for kind in KINDS for claim in _claims(kind, changes)]}))


def _seed(kind: str, seed: int, options: argparse.Namespace) -> dict[str, list[list[float]]]:
    """Train one seed; of each role the share of successes of each task, after `sft` and after `rl`."""
    name = f"roles-{kind}-{seed}"
    settings = fewest_steps(RECIPE) if options.short else []
    settings += [
        f"run.directory={options.directory}",
        f"rollout.harness={WORLD}:play",
        "run.stages=['init', 'sft', 'rl']",
    ]
    settings += [f"run.seed={seed}", "observe.progress=off"]
    folder = run_recipe(load(RECIPE, [*settings, f"run.name={name}", f"env.name={WORLD}:{KINDS[kind]}"]))
    subjects = [Subject(name=f"{name}-{stage}", folder=folder / stage / "model") for stage in ("sft", "rl")]
    game = load(RECIPE, [*settings, "run.name=roles-game", f"env.name={WORLD}:Duel"])
    alone = ["rollout.harness=chat", f"env.name={WORLD}:Solver", "env.demonstrations=0", f"run.seed={QUESTIONS_SEED}"]
    questions = load(RECIPE, [*settings, "run.name=roles-questions", *alone])
    return {
        "proposer": _shares(game, subjects, lambda task: task.by_role["proposer"][0]),
        "solver": _shares(questions, subjects, lambda task: float(task.solved[0])),
    }


def _shares(config: Any, subjects: Sequence[Subject], share: Callable[[TaskResult], float]) -> list[list[float]]:
    evaluations: list[Evaluation] = [found.evaluation for found in evaluate_subjects(config, subjects).evaluations]
    return [[share(evaluation.tasks[name]) for name in sorted(evaluation.tasks)] for evaluation in evaluations]


def _claims(kind: str, changes: dict[str, dict[str, Estimate]]) -> Claims:
    """Both rise: the interval lies above 0. Swapped, neither does: it does not."""
    direction = ">=" if kind == "duel" else "<="
    return [
        claim(f"{kind}: {role}, lower end of the change", (change.interval or (0.0, 0.0))[0], "", 0.0, direction)
        for role, change in changes[kind].items()
    ]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, choices=range(1, 10))
    parser.add_argument("--directory", type=lambda text: Path(text).absolute(), default=Path("runs").absolute())
    return read_options(parser, seeds=1, directory=SHORT_RUNS)


if __name__ == "__main__":
    main()
