"""Every algorithm from one start on one small task, over several seeds: does it learn, and does its own term act.

    python benchmarks/algorithms.py [--seeds 5] [--algorithms grpo,gspo] [--steps 20] [--directory runs]

The start is the quickstart's policy after its demonstrations (made once; its folder is kept), each run is
recipes/algorithms.toml with the settings below: 16 groups of 8 an update, twelve optimiser steps each, and an
evaluation on 400 held-out tasks. What is done of a run is not done again. A row is an algorithm: held-out success as
mean over seeds with the 95 % interval of Student's t, and the metric that shows its own term, averaged over all
updates; then the curves of training. The last line is one JSON object. It measures no time.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from common.figures import SHORT_RUNS, Claims, read_options
from common.figures import claim as claimed
from common.short_recipes import fewest_steps

RECIPES = Path(__file__).parents[1] / "recipes"
LEAST = 0.6
"""Held-out success that says that it has learned; the start's is printed beside."""
ACTIVE = (0.01, 0.30)
"""Where an algorithm's own term lies if it acts and does not stifle: a share of what is trained."""
NARROW = 'algo.gate={name="clip",low=0.1,high=0.1}'
FILTER = "algo.zero_variance_filter=true"
CRITIC = "rl.critic={train={learning_rate=1e-3}}"
ALGORITHMS: dict[str, tuple[list[str], str]] = {
    "ppo": (["algo.preset=ppo", CRITIC, NARROW], "clip_fraction"),
    "grpo": (["algo.preset=grpo", FILTER], "clip_fraction"),
    "rloo": (["algo.preset=dapo", "algo.credit=rloo"], "clip_fraction"),
    "reinforce++": (["algo.preset=reinforce_plus_plus", NARROW], "clip_fraction"),
    "gspo": (["algo.preset=gspo", 'algo.gate={name="clip",low=0.006,high=0.008}', FILTER], "clip_fraction"),
    "cispo": (
        ["algo.preset=cispo", 'algo.gate={name="cispo",high=0.03}', "rl.train.learning_rate=1e-4", FILTER],
        "clip_fraction",
    ),
    "dapo": (["algo.preset=dapo"], "clip_fraction"),
    "dpo": (['rl.preference={name="dpo",beta=0.1}'], "reward_margin"),
}
"""Settings of each, and the metric of its own term. RLOO's paper has one optimiser step an update and no gate; here are
twelve, so it has DAPO's. GSPO's bounds are for replies of thousands of tokens, these have about sixty. Half the usual
0.2, and CISPO's upper bound of 0.03, are for steps as small as these: after twelve of them most ratios are still within
a few percent of 1. CISPO stops no token: at the others' learning rate two of five seeds wrote longer and longer until
nothing was right. What compares the members of a group has DAPO's filter, so that steps are of one size whichever is
tried."""
SHOWN = (1, 2, 3, 4, 6, 8, 12, 16, 20)
"""Updates at which the curves are printed; the JSON has them all."""
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t at 97.5 % by the number of values."""


def main() -> None:
    """Run what is missing, print the table."""
    options = _options()
    begun = start(options.directory, short=options.short)
    exam = ['run.stages=["init","eval"]', 'eval.checkpoints=["init"]', f"models.policy.path={begun}"]
    before = _summary(run("algorithms.toml", "algorithms-before", options.directory, exam, short=options.short))[
        "init_success"
    ]
    print(f"the start: {before:.3f}\n", flush=True)
    print("| algorithm | held-out success, mean over seeds | each | own term | least, most of a seed |")
    print("| --- | --- | --- | --- | --- |")
    rows = {}
    for name in options.algorithms.split(","):
        settings, metric = ALGORITHMS[name]
        found, acted, curves = [], [], []
        for seed in range(1, options.seeds + 1):
            own = [f"run.seed={seed}", f"rl.steps={options.steps}", f"models.policy.path={begun}", *settings]
            folder = run("algorithms.toml", f"algorithms-{name}-{seed}", options.directory, own, short=options.short)
            found.append(_summary(folder)["rl_success"])
            acted.append(_mean(folder, metric))
            curves.append(_values(folder, "rollout/success"))
        rows[name] = {
            "each": found,
            "term": metric,
            "acted": acted,
            "curve": [list(of) for of in zip(*curves, strict=True)],
        }
        each = " ".join(f"{value:.3f}" for value in found)
        term = f"{metric} {statistics.fmean(acted):.4f} | {min(acted):.4f}, {max(acted):.4f}"
        print(f"| {name} | {interval(found)} | {each} | {term} |", flush=True)
    _print_curves(rows)
    claims = [claim for name in rows for claim in _claims(name, rows[name])]
    print(json.dumps({"start": before, "algorithms": rows, "claims": claims}))


def _claims(name: str, row: dict[str, Any]) -> Claims:
    def claim(what: str, value: float, target: float, direction: str = ">=") -> dict[str, object]:
        return claimed(f"{name}: {what}", value, "", target, direction)

    sizes = [abs(value) for value in row["acted"]]
    term, least, most = row["term"], min(sizes), max(sizes)
    acts = [claim(f"least size of {term} of a seed", least, ACTIVE[0])]
    if term == "clip_fraction":
        acts.append(claim(f"most {term} of a seed", most, ACTIVE[1], "<="))
    return [claim("least success of a seed", min(row["each"]), LEAST), *acts]


def start(directory: Path, *, short: bool) -> Path:
    """The policy that all of them begin with: the quickstart's after its demonstrations."""
    stages = ['run.stages=["init","sft"]']
    return run("quickstart.toml", "algorithms-start", directory, stages, short=short) / "sft/model"


def run(recipe: str, name: str, directory: Path, settings: list[str], *, short: bool) -> Path:
    """Run a recipe, or what is missing of it, by its fewest steps if `short`; the folder."""
    words = [*settings, *(fewest_steps(RECIPES / recipe) if short else ())]
    words += [f"run.directory={directory}", "observe.progress=off"]
    sets = [word for setting in words for word in ("--set", setting)]
    command = [sys.executable, "-m", "sparring.cli.main", "run", str(RECIPES / recipe), "--name", name, *sets]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return directory / name


def _summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def _print_curves(rows: dict[str, Any]) -> None:
    """Success of what each update was made of, sampled before it."""
    shown = [update for update in SHOWN if all(update <= len(row["curve"]) for row in rows.values())]
    print(f"\n| sampled for update | {' | '.join(map(str, shown))} |\n| --- |{' --- |' * len(shown)}")
    for name, row in rows.items():
        print(f"| {name} | {' | '.join(interval(row['curve'][update - 1], 2) for update in shown)} |")


def _mean(folder: Path, metric: str) -> float:
    """Of a metric over all updates that have it; nan if nothing was trained, as in the short form."""
    values = _values(folder, metric)
    return statistics.fmean(values) if values else math.nan


def _values(folder: Path, metric: str) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["values"][metric] for line in lines if line["stage"] == "rl" and metric in line.get("values", {})]


def interval(values: list[float], digits: int = 3) -> str:
    """Their mean and the half width of its 95 % interval; of one value no interval is known."""
    mean = f"{statistics.fmean(values):.{digits}f}"
    return (
        mean
        if len(values) < 2
        else f"{mean} ± {T_95[len(values)] * statistics.stdev(values) / len(values) ** 0.5:.{digits}f}"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, choices=range(1, 11))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS))
    parser.add_argument("--directory", type=lambda text: Path(text).absolute(), default=Path("runs"))
    options = read_options(parser, seeds=1, steps=1, algorithms="grpo", directory=SHORT_RUNS)
    if unknown := set(options.algorithms.split(",")) - ALGORITHMS.keys():
        parser.error(f"--algorithms: expected some of {', '.join(ALGORITHMS)}, got {', '.join(sorted(unknown))}")
    return options


if __name__ == "__main__":
    main()
