"""How often the intervals of `sparring eval` cover what they are about, simulated.

    python benchmarks/intervals.py [--evaluations 1000]

A policy solves task after task, each with a chance of its own that is drawn from one of nine shapes; the interval of the success
rate is of the mean chance. A row of the first table is a shape, a column a number of tasks; a cell the least and the most
coverage over 1, 4 and 16 samples of each task. The second is how much wider the interval of a change is than one that adds no
tasks to those that there are. Half a minute; no time is measured. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
from statistics import NormalDist

import numpy as np

from sparring.observe.statistics import paired_difference, rate

SHAPES: dict[str, tuple[float, float]] = {
    "all alike, even odds": (math.inf, 0.5),
    "all alike, one in ten": (math.inf, 0.1),
    "Beta(1/2, 1/2)": (0.5, 0.5),
    "Beta(1, 1)": (1.0, 1.0),
    "Beta(2, 2)": (2.0, 2.0),
    "Beta(8, 1)": (8.0, 1.0),
    "Beta(1, 4)": (1.0, 4.0),
    "Beta(1/4, 1/4)": (0.25, 0.25),
}
"""Parameters of a beta distribution; of the first two the second is the chance of every task."""
RARE = (0.05, 1.95)
"""The ninth: hardly a task is solved at all, one in forty of all samples."""
TASKS, SAMPLES = (10, 20, 50, 100, 200), (1, 4, 16)
LEAST = 0.91
"""What is claimed of the eight shapes."""


def chances(draw: np.random.Generator, shape: str, tasks: int) -> np.ndarray:
    """Of each task."""
    a, b = SHAPES.get(shape, RARE)
    return np.full(tasks, b) if a == math.inf else draw.beta(a, b, tasks)


def truth(shape: str) -> float:
    """The mean chance."""
    a, b = SHAPES.get(shape, RARE)
    return b if a == math.inf else a / (a + b)


def coverage(shape: str, tasks: int, samples: int, evaluations: int) -> float:
    """The share of evaluations whose interval has the mean chance inside."""
    draw = np.random.default_rng([tasks, samples, *shape.encode()])
    covered = 0
    for _ in range(evaluations):
        solved = draw.binomial(samples, chances(draw, shape, tasks)) / samples
        low, high = rate(solved.tolist(), tasks * samples).interval or (0.0, 0.0)
        covered += low <= truth(shape) <= high
    return covered / evaluations


def widening(tasks: int, samples: int, evaluations: int) -> float:
    """How much wider an interval of a change is, where chances are spread evenly, than 1.96 standard errors either way."""
    draw = np.random.default_rng([tasks, samples])
    found = []
    for _ in range(evaluations):
        p = chances(draw, "Beta(1, 1)", tasks)
        before, after = (draw.binomial(samples, p) / samples for _ in range(2))
        change = paired_difference(before.tolist(), after.tolist())
        low, high = change.interval or (0.0, 0.0)
        found.append((high - low) / (2 * NormalDist().inv_cdf(0.975) * (change.standard_error or math.nan)))
    return float(np.mean(found)) - 1


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evaluations", type=int, default=1000, help="simulated for each cell")
    evaluations = parser.parse_args().evaluations
    print(f"| chances of the tasks | {' | '.join(f'{count} tasks' for count in TASKS)} |\n|{' --- |' * (len(TASKS) + 1)}")
    every = []
    for shape in SHAPES:
        cells = [[coverage(shape, tasks, samples, evaluations) for samples in SAMPLES] for tasks in TASKS]
        every += [value for cell in cells for value in cell]
        print(f"| {shape} | {' | '.join(f'{100 * min(cell):.1f} to {100 * max(cell):.1f} %' for cell in cells)} |", flush=True)
    rare = {tasks: coverage("rare", tasks, 16, evaluations) for tasks in TASKS}
    cells = [f"{100 * value:.1f} %" for value in rare.values()]
    print(f"| Beta(0.05, 1.95), 16 samples alone | {' | '.join(cells)} |\n", flush=True)
    wider = {f"{tasks} x {samples}": widening(tasks, samples, evaluations // 5) for tasks, samples in ((100, 4), (100, 16), (1000, 16))}
    print("| tasks x samples | an interval of a change is wider by |\n| --- | --- |")
    print("".join(f"| {name} | {100 * value:.0f} % |\n" for name, value in wider.items()))
    claims = [
        {"name": "least coverage of a 95 % interval", "value": min(every), "unit": "", "target": LEAST, "direction": ">="}
    ]
    print(json.dumps({"benchmark": "intervals", "evaluations": evaluations, "rare": rare, "wider": wider, "claims": claims}))


if __name__ == "__main__":
    main()
