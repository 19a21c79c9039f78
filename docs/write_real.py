"""Writes the measured tables and curves of docs/real.md, and README.md's sentence, from finished runs:
`python docs/write_real.py runs/smollm2 runs/smollm2-calls`. Rows of other runs stay as they are."""

import json
import re
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BEGIN = "<!-- real: python docs/write_real.py runs/{} -->\n"
END = "<!-- end -->"
ALL = "<!-- real: all -->\n"
NAMED = {
    "init": "before",
    "sft": "after demonstrations",
    "rl": "after RL",
    "distill": "after distillation",
}
"""Stages that are evaluated, as the tables name them."""
WRAPPED = runpy.run_path(str(Path(__file__).with_name("wrap.py")))["wrapped"]
WIDTH, HEIGHT, LEFT, TOP = 720, 220, 44, 12
"""Of the picture, in pixels."""
SENTENCE = re.compile(r"from [\d.]+% to [\d.]+% of \d+ held-out instructions\s\([^;]*; seed 1, \d+ minutes")


def evaluated(summary: Mapping[str, Any]) -> list[str]:
    """Return the stages that a run evaluated, in the order of `NAMED`."""
    return [stage for stage in NAMED if summary.get(f"{stage}_success") is not None]


def percent(summary: Mapping[str, Any], stage: str) -> str:
    """Return a stage's share of successes with its interval."""
    return "{:.1%} ({:.1%} to {:.1%})".format(*(summary[f"{stage}_success{end}"] for end in ("", "_low", "_high")))


def points(summary: Mapping[str, Any]) -> str:
    """Return the change, task by task, with its interval; empty if one stage alone was evaluated."""
    change = summary["change"]
    if change is None:
        return ""
    values = (100 * change[f"difference{end}"] for end in ("", "_low", "_high"))
    return "{:+.1f} points ({:+.1f} to {:+.1f})".format(*values)


def row(run: Path) -> str:
    """Return a run's row of the table of all."""
    summary = json.loads((run / "summary.json").read_text())
    rates = [percent(summary, stage) if stage in evaluated(summary) else "" for stage in NAMED]
    minutes = round(sum(summary["wall_s"].values()) / 60)
    cells = [f"`{run.name}`", str(summary["eval_tasks"]), *rates, points(summary), f"{minutes} min"]
    return f"| {' | '.join(cells)} |"


def overview(text: str, runs: Sequence[Path]) -> str:
    """Return the page with the rows of `runs` in the table of all."""
    begin, rest = text.split(ALL, 1)
    old, after = rest.split(END, 1)
    rows = {line.split("`")[1]: line for line in old.splitlines() if line.startswith("| `")}
    rows |= {run.name: row(run) for run in runs}
    head = ["run", "held-out tasks", *NAMED.values(), "change", "wall clock"]
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}", *(rows[name] for name in sorted(rows))]
    return begin + ALL + "\n".join(lines) + "\n" + END + after


def table(run: Path) -> str:
    """Return a run's figures as Markdown."""
    summary = json.loads((run / "summary.json").read_text())
    stages = evaluated(summary)
    rows = [f"| held-out tasks | {' | '.join(NAMED[stage] for stage in stages)} |", f"|{' --- |' * (len(stages) + 1)}"]
    for name, entry in summary["by_dataset"].items():
        rows.append(f"| {name} ({entry['tasks']}) | {' | '.join(f'{entry[stage]:.0%}' for stage in stages)} |")
    *before, after = (percent(summary, stage) for stage in stages)
    rows.append(f"| **all** ({summary['eval_tasks']}) | {' | '.join([*before, f'**{after}**'])} |")
    wall = ", ".join(f"{stage} {seconds:.0f} s" for stage, seconds in summary["wall_s"].items())
    change, difference = points(summary), summary["logprob_max_abs_diff"]
    facts = ["In brackets: the 95 % interval."]
    if change:
        facts.append(f"Task by task: **{change}**.")
    if difference is not None:
        tokens = f"{summary['tokens_trained']:,} trained tokens"
        facts.append(
            f"Largest difference between engine and trainer log-probabilities over {tokens}: **{difference!r}**."
        )
    facts.append(f"Wall clock: {wall}; {summary['peak_rss_bytes'] / 2**30:.1f} GiB.")
    return WRAPPED("\n".join(rows) + "\n\n" + " ".join(facts) + "\n")


def curve(run: Path, metric: str = "rollout/success") -> str:
    """Return the share of sampled rollouts that succeed, by step, as a picture (SVG)."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line["values"] for line in lines if line.get("stage") == "rl" and "step" in line]
    values = [step[metric] for step in steps if metric in step]
    smooth = [sum(part) / len(part) for part in (values[max(0, n - 2) : n + 3] for n in range(len(values)))]

    def path(points: Sequence[float]) -> str:
        step, high = (WIDTH - LEFT - 10) / max(1, len(points) - 1), HEIGHT - TOP - 24
        return " ".join(f"{LEFT + n * step:.1f},{TOP + (1 - y) * high:.1f}" for n, y in enumerate(points))

    marks = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = TOP + (1 - share) * (HEIGHT - TOP - 24)
        marks.append(f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        marks.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{share:.0%}</text>')
    marks.append(f'<text x="{LEFT}" y="{HEIGHT - 6}">step 1</text>')
    marks.append(f'<text x="{WIDTH - 10}" y="{HEIGHT - 6}" text-anchor="end">step {len(values)}</text>')
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"',
            'font-family="sans-serif" font-size="11">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
            *marks,
            f'<polyline points="{path(values)}" fill="none" stroke="#9bc" stroke-width="1"/>',
            f'<polyline points="{path(smooth)}" fill="none" stroke="#147" stroke-width="2"/>',
            "</svg>\n",
        ]
    )


def main() -> None:
    """Replace the rows and tables of the runs that are named, and their pictures."""
    runs = [Path(name) for name in sys.argv[1:]]
    page = ROOT / "docs" / "real.md"
    text = overview(page.read_text(), runs)
    for run in runs:
        begin = BEGIN.format(run.name)
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(END), re.DOTALL)
        if begin in text:
            text = pattern.sub(lambda _, run=run, begin=begin: begin + table(run) + END, text)
            (ROOT / "docs" / f"real-{run.name}.svg").write_text(curve(run))
        if run.name == "smollm2":
            readme = ROOT / "README.md"
            readme.write_text(WRAPPED(SENTENCE.sub(lambda _, run=run: sentence(run), readme.read_text())))
    page.write_text(text)


def sentence(run: Path) -> str:
    """Return what README.md says of the run."""
    summary = json.loads((run / "summary.json").read_text())
    rates = [f"{summary[f'{stage}_success']:.1%}" for stage in ("init", "rl")]
    change = [f"{100 * summary['change'][key]:.1f}" for key in ("difference", "difference_low", "difference_high")]
    minutes = round(sum(summary["wall_s"].values()) / 60)
    return (
        f"from {rates[0]} to {rates[1]} of {summary['eval_tasks']} held-out instructions"
        f" (+{change[0]} points, 95 %: {change[1]} to {change[2]}; seed 1, {minutes} minutes"
    )


if __name__ == "__main__":
    main()
