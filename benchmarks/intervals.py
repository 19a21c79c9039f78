"""How often the intervals of `sparring eval` cover what they are about, simulated.

    python benchmarks/intervals.py [--evaluations 1000]

A policy solves task after task, each with a chance of its own that is drawn from one of nine shapes; the interval of
the success rate is of the mean chance. A row of the first table is a shape, a column a number of tasks; a cell the
least and the most coverage over 1, 4 and 16 samples of each task. The second is of the change between two evaluations:
how often its interval covers, and how wide it is as a multiple of Student's. In the third one task in twenty is turned
from hardly ever into nearly always solved, what no interval can know of that has not seen one. Half a minute; no time
is measured. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math

import numpy as np
from common.figures import claim, read_options

from sparring.observe.statistics import paired_difference, paired_mean_difference, rate

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
DESIGNS = [(tasks, samples) for tasks in (10, 20, 50) for samples in (1, 8)]
LEAST = 0.91
"""What is claimed of the eight shapes."""
LEAST_OF_CHANGES, WIDEST = 0.93, 1.1
"""And of changes."""


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


def change(shape: str, tasks: int, samples: int, evaluations: int, turned: float = 0.0) -> tuple[float, float]:
    """The share of intervals of a change that cover it, and how wide they are as a multiple of Student's, where it has
    one.

    Args:
        shape: of the chances before; those after are equal but of tasks that were turned.
        tasks: of an evaluation.
        samples: of a task.
        evaluations: simulated.
        turned: the share of tasks that have one chance in twenty before and nine in ten after, in place of any shape.
    """
    draw = np.random.default_rng([tasks, samples, *shape.encode()])
    covered, width, students = 0, 0.0, 0.0
    for _ in range(evaluations):
        p = chances(draw, shape, tasks) if not turned else np.full(tasks, 0.05)
        q = np.where(draw.random(tasks) < turned, 0.9, p)
        before, after = ((draw.binomial(samples, odds) / samples).tolist() for odds in (p, q))
        low, high = paired_difference(before, after, tasks * samples).interval or (0.0, 0.0)
        covered += low <= turned * 0.85 <= high
        if (student := paired_mean_difference(before, after).interval) is not None:
            width, students = width + high - low, students + student[1] - student[0]
    return covered / evaluations, width / students


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evaluations", type=int, default=1000, help="simulated for each cell")
    evaluations = read_options(parser, evaluations=5).evaluations
    print(
        f"| chances of the tasks | {' | '.join(f'{count} tasks' for count in TASKS)} |\n|{' --- |' * (len(TASKS) + 1)}"
    )
    every = []
    for shape in SHAPES:
        cells = [[coverage(shape, tasks, samples, evaluations) for samples in SAMPLES] for tasks in TASKS]
        every += [value for cell in cells for value in cell]
        print(
            f"| {shape} | {' | '.join(f'{100 * min(cell):.1f} to {100 * max(cell):.1f} %' for cell in cells)} |",
            flush=True,
        )
    rare = {tasks: coverage("rare", tasks, 16, evaluations) for tasks in TASKS}
    told = [f"{100 * value:.1f} %" for value in rare.values()]
    print(f"| Beta(0.05, 1.95), 16 samples alone | {' | '.join(told)} |\n", flush=True)
    changes = {shape: [change(shape, *design, evaluations) for design in DESIGNS] for shape in SHAPES}
    print(f"| a change; chances | {' | '.join(f'{tasks} x {samples}' for tasks, samples in DESIGNS)} |")
    print(f"|{' --- |' * (len(DESIGNS) + 1)}")
    for shape, found in changes.items():
        print(f"| {shape} | {' | '.join(f'{100 * covered:.1f} %, {width:.2f}' for covered, width in found)} |")
    turned = {f"{tasks} x {samples}": change("", tasks, samples, evaluations, 0.05)[0] for tasks, samples in DESIGNS}
    print(f"| one task in twenty turned | {' | '.join(f'{100 * covered:.1f} %' for covered in turned.values())} |\n")
    least, widest = "least coverage of the interval of a change", "width of the interval of a change over Student's"
    of_changes = [pair for each in changes.values() for pair in each]
    claims = [
        claim("least coverage of a 95 % interval", min(every), "", LEAST, ">="),
        claim(least, min(covered for covered, _ in of_changes), "", LEAST_OF_CHANGES, ">="),
        claim(widest, max(width for _, width in of_changes), "", WIDEST),
    ]
    figures = {"rare": rare, "turned": turned, "claims": claims}
    print(json.dumps({"benchmark": "intervals", "evaluations": evaluations, **figures}))


if __name__ == "__main__":
    main()
