"""The whole loop over several seeds: from a base model to one distilled student, held against the student that imitates
instead.

    python benchmarks/full_loop.py [--seeds 3] [--directory runs]

Of each seed: `sparring run recipes/full-loop.toml` as one command, timed, in a folder of its own with copies of the
recipes that have that seed. Told are held-out success by domain (1,000 tasks each) before and after, what share of each
teacher's success the student has, with its 95 % interval, and the paired difference to the student's start, fine-tuned
on as many of its teachers' samples: all as in the run's summary.json. What is done of a run is not done again, and then
its time is not told. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common.figures import SHORT_RUNS, Claims, read_options
from common.figures import claim as claimed
from common.short_recipes import shorten

RECIPES = Path(__file__).parents[1] / "recipes"
DOMAINS = ("people", "walks")


def main() -> None:
    """Run what is missing, print the tables."""
    options = _options()
    found = {}
    for seed in range(1, options.seeds + 1):
        found[seed] = _seed(options.directory / f"full-loop-{seed}", seed, short=options.short)
    print(
        "\n| seed | domain | student's start | teacher | student | kept of the teacher, 95 % interval |\n| --- | --- | --- | --- | --- | --- |"
    )
    for seed, one in found.items():
        for domain in DOMAINS:
            student, start, teacher = _of(one, domain)
            kept = "nothing to keep"
            if teacher["success"]:
                kept = f"{teacher['kept']:.1%} ({teacher['kept_low']:.1%} to {teacher['kept_high']:.1%})"
            print(f"| {seed} | {domain} | {start:.1%} | {teacher['success']:.1%} | {student:.1%} | {kept} |")
    print(
        "\n| seed | student | imitation | difference, 95 % interval | tokens trained | parameters, student to teacher | wall clock |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for seed, one in found.items():
        told, other = one["summary"], one["summary"]["against"]["imitation"]
        wall = "" if one["wall_s"] is None else f"{one['wall_s']:.0f} s"
        print(
            f"| {seed} | {told['distill_success']:.1%} | {other['value']:.1%} | {other['difference']:+.1%} "
            f"({other['difference_low']:+.1%} to {other['difference_high']:+.1%}) | {told['tokens_trained']:,}, {other['tokens_trained']:,} "
            f"| {one['size']:.2f} | {wall} |"
        )
    print(json.dumps({"seeds": found, "claims": [claim for seed in found for claim in _claims(seed, found[seed])]}))


def _seed(folder: Path, seed: int, *, short: bool) -> dict[str, Any]:
    shutil.copytree(RECIPES, folder / "recipes", dirs_exist_ok=True)
    for recipe in (folder / "recipes").rglob("*.toml"):
        recipe.write_text(recipe.read_text().replace("\nseed = 1\n", f"\nseed = {seed}\n"))
        if short:
            shorten(recipe)
    runs = folder / "runs"
    fresh = not runs.exists()
    started = time.monotonic()
    command = [sys.executable, "-m", "sparring.cli.main", "run", "recipes/full-loop.toml"]
    done = subprocess.run(command, cwd=folder, env=os.environ, capture_output=True, text=True)
    wall_s = time.monotonic() - started
    if done.returncode:
        raise SystemExit(f"{folder}: {' '.join(command)}\n{done.stdout}{done.stderr}")
    return {
        "summary": json.loads((runs / "full-loop/summary.json").read_text()),
        "size": _parameters(runs / "full-loop/export") / _parameters(runs / "full-loop-people/rl/model"),
        "wall_s": wall_s if fresh else None,
    }


def _of(one: dict[str, Any], domain: str) -> tuple[float, float, dict[str, float]]:
    """Of a domain: the student's success, its start's, and what is told of its teacher."""
    told = one["summary"]
    return (
        told["by_dataset"][domain]["distill"],
        told["against"]["start"]["by_dataset"][domain],
        told["teachers"][domain],
    )


def _claims(seed: int, one: dict[str, Any]) -> Claims:
    def claim(what: str, value: float, target: float, direction: str = ">=") -> dict[str, object]:
        return claimed(f"seed {seed}: {what}", value, "", target, direction)

    told, other = one["summary"], one["summary"]["against"]["imitation"]
    claims = [claim("parameters, student to teacher", one["size"], 0.5, "<=")]
    for domain in DOMAINS:
        _, start, teacher = _of(one, domain)
        claims.append(claim(f"{domain}, the student's start", start, 0.5, "<="))
        claims.append(claim(f"{domain}, kept of the teacher", teacher["kept"] or 0, 0.95))
        claims.append(claim(f"{domain}, its lower bound", teacher["kept_low"] or 0, 0.9))
    claims.append(claim("student less imitation, lower bound", other["difference_low"], 0.0))
    claims.append(claim("tokens of imitation to the student's", other["tokens_trained"] / told["tokens_trained"], 0.98))
    if one["wall_s"] is not None:
        claims.append(claim("wall clock in minutes", one["wall_s"] / 60, 20, "<="))
    return claims


def _parameters(folder: Path) -> int:
    from safetensors.numpy import load_file

    return sum(tensor.size for tensor in load_file(folder / "model.safetensors").values())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, choices=range(1, 10))
    parser.add_argument("--directory", type=lambda text: Path(text).absolute(), default=Path("runs").absolute())
    return read_options(parser, seeds=1, directory=SHORT_RUNS)


if __name__ == "__main__":
    main()
