"""Every algorithm from one start on one small task, over several seeds: does it learn, and does its own term act.

    python benchmarks/algorithms.py [--seeds 5] [--algorithms grpo,gspo] [--steps 40] [--directory runs]

The start is the quickstart's policy after its demonstrations (made once; its folder is kept), each run is recipes/algorithms.toml
with the settings below: 16 groups of 8 an update, four optimiser steps each, and an evaluation on 400 held-out tasks. Runs that are there
are not run again. A row is an algorithm: held-out success as mean over seeds with the 95 % interval of Student's t, and the
metric that shows its own term, averaged over all updates. The last line is one JSON object. It measures no time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

RECIPES = Path(__file__).parents[1] / "recipes"
LEAST = 0.6
"""Held-out success that says it has learned; the start is printed beside."""
ALGORITHMS: dict[str, tuple[list[str], str]] = {
    "grpo": (["algo.preset=grpo"], "clip_fraction"),
    "dapo": (["algo.preset=dapo"], "clip_fraction"),
    "rloo": (["algo.preset=dapo", "algo.credit=rloo"], "clip_fraction"),
    "reinforce++": (["algo.preset=dapo", "algo.credit=reinforce_plus_plus"], "clip_fraction"),
    "gspo": (["algo.preset=gspo"], "clip_fraction"),
    "cispo": (["algo.preset=cispo"], "clip_fraction"),
    "dpo": (["rl.preference={name=\"dpo\",beta=0.1}"], "margin"),
}
"""Settings of each, and the metric of its own term."""
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t at 97.5 % by the number of values."""


def main() -> None:
    """Run what is missing, print the table."""
    options = _options()
    _run("quickstart.toml", "algorithms-start", options, ['run.stages=["init","sft"]'])
    start = options.directory / "algorithms-start/sft/model"
    rows = {}
    print("| algorithm | held-out success, mean over seeds | each | own term |\n| --- | --- | --- | --- |", flush=True)
    for name in options.algorithms.split(","):
        settings, metric = ALGORITHMS[name]
        found, acted = [], []
        for seed in range(1, options.seeds + 1):
            run = f"algorithms-{name}-{seed}"
            own = [f"run.seed={seed}", f"rl.steps={options.steps}", f"models.policy.path={start}", *settings]
            _run("algorithms.toml", run, options, own)
            folder = options.directory / run
            found.append(json.loads((folder / "summary.json").read_text())["rl_success"])
            acted.append(_mean(folder, metric))
        mean, half = statistics.fmean(found), _half_width(found)
        term = statistics.fmean(acted)
        rows[name] = {"success": mean, "half_width": half, "each": found, metric: term}
        each = " ".join(f"{value:.3f}" for value in found)
        print(f"| {name} | {mean:.3f} ± {half:.3f} | {each} | {metric} {term:.4f} |", flush=True)
    claims = [
        {"name": f"{name}, least of {options.seeds} seeds", "value": min(row["each"]), "unit": "", "target": LEAST, "direction": ">="}
        for name, row in rows.items()
    ]
    print(json.dumps({"algorithms": rows, "claims": claims}))


def _run(recipe: str, name: str, options: argparse.Namespace, settings: list[str]) -> None:
    if (options.directory / name / "summary.json").exists():
        return
    words = [f"run.directory={options.directory}", "observe.progress=off", *settings]
    sets = [word for setting in words for word in ("--set", setting)]
    command = [sys.executable, "-m", "sparring.cli.main", "run", str(RECIPES / recipe), "--name", name, *sets]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def _mean(folder: Path, metric: str) -> float:
    """Of a metric over all updates that have it."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    values = [line["values"][metric] for line in lines if line["stage"] == "rl" and metric in line.get("values", {})]
    return statistics.fmean(values) if values else float("nan")


def _half_width(values: list[float]) -> float:
    return T_95[len(values)] * statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, choices=range(1, 11))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS))
    parser.add_argument("--directory", type=lambda text: Path(text).absolute(), default=Path("runs"))
    options = parser.parse_args()
    options.directory = Path(options.directory).absolute()
    if unknown := set(options.algorithms.split(",")) - ALGORITHMS.keys():
        parser.error(f"--algorithms: expected some of {', '.join(ALGORITHMS)}, got {', '.join(sorted(unknown))}")
    return options


if __name__ == "__main__":
    main()
