"""How much an engine that disagrees with its trainer hurts, and what helps.

    python benchmarks/mismatch.py [--seeds 3] [--steps 20] [--noise 0,0.03,0.1] [--directory runs]

The start and the task are those of benchmarks/algorithms.py. The engine serves every weight with a fixed error of a
known share of its tensor's root mean square: it runs here, behind the token server, and each run reaches it with
`[engine] kind = "remote"` (`common/disturbed_engine.py`). At 0 it is the recipe's own, which is exact, and there is
nothing to do: one row. The advantages, the clip and the twelve optimiser steps an update are DAPO's in all rows; what
differs is what is done about the mismatch. What was learned is evaluated by an exact engine, on 400 held-out tasks: mean over seeds
with the 95 % interval of Student's t, and the differences seed by seed to the exact engine and to what nothing is done
about, likewise. Told beside it: the mean of |log p_trainer - log p_engine| and of k3 over the trained tokens. The last
line is one JSON object. It measures no time.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from algorithms import interval, start
from algorithms import run as run_recipe
from common.disturbed_engine import DisturbedEngine
from common.figures import SHORT_RUNS, read_options
from common.served import ServerThread

from sparring.engine.config import EngineConfig
from sparring.model.load import load

CORRECTIONS: dict[str, list[str]] = {
    "none, ratio to the trainer's own before the update": ['algo.anchor="proximal"', "algo.correction=none"],
    "none, ratio to what sampled": ['algo.anchor="behaviour"', "algo.correction=none"],
    "tis": ['algo.anchor="proximal"', "algo.correction=tis"],
    "icepop": ['algo.anchor="proximal"', "algo.correction=icepop"],
    "mis": ['algo.anchor="proximal"', "algo.correction=mis"],
    "geometric": ['algo.anchor="proximal"', "algo.correction=geometric"],
}
"""What is done about the mismatch; the first is what is done where nobody thinks of it."""


def main() -> None:
    """Run what is missing, print a table."""
    options = _options()
    begun = start(options.directory, short=options.short)
    corrections = dict(list(CORRECTIONS.items())[:1]) if options.short else CORRECTIONS
    rows = []
    print(
        "| noise | correction | held-out success, mean over seeds | each | mean difference | k3 |\n| --- | --- | --- | --- | --- | --- |"
    )
    for noise in options.noise:
        for name, settings in corrections.items() if noise else [next(iter(CORRECTIONS.items()))]:
            found = [_one(options, begun, noise, name, settings, seed) for seed in range(1, options.seeds + 1)]
            each = [one["success"] for one in found]
            row = {"noise": noise, "correction": name, "each": each}
            row |= {key: statistics.fmean(one[key] for one in found) for key in ("difference", "k3")}
            rows.append(row)
            values = " ".join(f"{value:.3f}" for value in each)
            print(
                f"| {noise:g} | {name} | {interval(each)} | {values} | {row['difference']:.4f} | {row['k3']:.2e} |",
                flush=True,
            )
    _differences(rows)
    print(json.dumps({"rows": rows}))


def _differences(rows: list[dict[str, Any]]) -> None:
    """Print each row less the exact engine's and less that of its noise about which nothing is done, seed by seed."""
    exact = next((row for row in rows if not row["noise"]), None)
    print("\n| noise | correction | less the exact engine | less nothing done |\n| --- | --- | --- | --- |")
    for row in rows:
        nothing = next(other for other in rows if other["noise"] == row["noise"])
        told = [_less(row, other) for other in (exact, nothing)]
        print(f"| {row['noise']:g} | {row['correction']} | {' | '.join(told)} |")


def _less(row: dict[str, Any], other: dict[str, Any] | None) -> str:
    if other is None or other is row:
        return ""
    return interval([a - b for a, b in zip(row["each"], other["each"], strict=True)])


def _one(
    options: argparse.Namespace, begun: Path, noise: float, name: str, settings: list[str], seed: int
) -> dict[str, Any]:
    """Train one with the noise, evaluate it without."""
    label = f"mismatch-{noise:g}-{list(CORRECTIONS).index(name)}-{seed}"
    own = [
        f"run.seed={seed}",
        f"rl.steps={options.steps}",
        f"models.policy.path={begun}",
        'run.stages=["rl"]',
        *settings,
    ]
    with _engine(options.directory, begun, noise) as engine:
        folder = run_recipe("algorithms.toml", label, options.directory, [*own, *engine], short=options.short)
    exact = [
        f"run.seed={seed}",
        'run.stages=["init","eval"]',
        'eval.checkpoints=["init"]',
        f"models.policy.path={folder / 'rl/model'}",
    ]
    judged = run_recipe("algorithms.toml", f"{label}-judged", options.directory, exact, short=options.short)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [
        line["values"] for line in lines if line["stage"] == "rl" and "logprob_mean_abs_diff" in line.get("values", {})
    ]
    if not steps and not options.short:
        raise SystemExit(
            f"{folder}: nothing to learn from: with noise {noise:g} every rollout earns the same; try less"
        )
    return {
        "success": json.loads((judged / "summary.json").read_text())["init_success"],
        "difference": _mean([step["logprob_mean_abs_diff"] for step in steps]),
        "k3": _mean([step["mismatch_k3"] for step in steps]),
    }


def _mean(values: list[float]) -> float:
    return statistics.fmean(values) if values else math.nan


@contextmanager
def _engine(directory: Path, begun: Path, noise: float) -> Iterator[list[str]]:
    """Settings of `[engine]` for a run, and the server that they name while the context lasts; none without noise.

    The socket's path is the same in every run of this benchmark, so that a finished run is found with the settings it
    was started with.
    """
    if not noise:
        yield []
        return
    directory.mkdir(parents=True, exist_ok=True)
    disturbed = DisturbedEngine(load(begun), EngineConfig(), noise=noise)
    server = ServerThread(disturbed, begun, unix=directory / f"mismatch-{noise:g}.socket")
    try:
        yield ['engine.kind="remote"', f"engine.urls=['{server.url}']"]
    finally:
        server.stop()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, choices=range(1, 11))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--noise", type=lambda text: [float(part) for part in text.split(",")], default=[0.0, 0.03, 0.1]
    )
    parser.add_argument("--directory", type=lambda text: Path(text).absolute(), default=Path("runs").absolute())
    return read_options(parser, seeds=1, steps=1, noise=[0.03], directory=SHORT_RUNS)


if __name__ == "__main__":
    main()
