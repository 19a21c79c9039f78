"""Writes the measured table and the curve of docs/real.md, and README.md's sentence, from a finished run:
`python docs/write_real.py runs/smollm2`."""

import json
import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
BEGIN = "<!-- real: python docs/write_real.py runs/{} -->\n"
END = "<!-- end -->"
WRAPPED = runpy.run_path(str(Path(__file__).with_name("wrap.py")))["wrapped"]
WIDTH, HEIGHT, LEFT, TOP = 720, 220, 44, 12
"""Of the picture, in pixels."""
SENTENCE = re.compile(r"from [\d.]+% to [\d.]+% of \d+ held-out instructions\s\([^;]*; one seed, \d+ minutes")


def table(run: Path) -> str:
    """Return a run's figures as Markdown."""
    summary = json.loads((run / "summary.json").read_text())
    rows = ["| held-out tasks | before | after RL |", "| --- | --- | --- |"]
    for name, entry in summary["by_dataset"].items():
        rows.append(f"| {name} ({entry['tasks']}) | {entry['init']:.0%} | {entry['rl']:.0%} |")
    before, after = (
        "{:.1%} ({:.1%} to {:.1%})".format(*(summary[f"{stage}_success{end}"] for end in ("", "_low", "_high")))
        for stage in ("init", "rl")
    )
    change = summary["change"]
    rows.append(f"| **all** ({summary['eval_tasks']}) | {before} | **{after}** |")
    wall = ", ".join(f"{stage} {seconds:.0f} s" for stage, seconds in summary["wall_s"].items())
    points = "{:+.1f} points ({:+.1f} to {:+.1f})".format(
        *(100 * change[f"difference{end}"] for end in ("", "_low", "_high"))
    )
    facts = (
        f"In brackets: the 95 % interval. Task by task: **{points}**. Largest difference between engine and trainer"
        f" log-probabilities over {summary['tokens_trained']:,} trained tokens: **{summary['logprob_max_abs_diff']!r}**. Wall clock: {wall};"
        f" {summary['peak_rss_bytes'] / 2**30:.1f} GiB."
    )
    return WRAPPED("\n".join(rows) + "\n\n" + facts + "\n")


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
    """Replace the text between the run's two marks, and its picture."""
    run = Path(sys.argv[1])
    page, begin = ROOT / "docs" / "real.md", BEGIN.format(run.name)
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(END), re.DOTALL)
    page.write_text(pattern.sub(lambda _: begin + table(run) + END, page.read_text()))
    (ROOT / "docs" / f"real-{run.name}.svg").write_text(curve(run))
    if run.name == "smollm2":
        readme = ROOT / "README.md"
        readme.write_text(WRAPPED(SENTENCE.sub(lambda _: sentence(run), readme.read_text())))


def sentence(run: Path) -> str:
    """Return what README.md says of the run."""
    summary = json.loads((run / "summary.json").read_text())
    rates = [f"{summary[f'{stage}_success']:.1%}" for stage in ("init", "rl")]
    points = [f"{100 * summary['change'][key]:.1f}" for key in ("difference", "difference_low", "difference_high")]
    minutes = round(sum(summary["wall_s"].values()) / 60)
    return (
        f"from {rates[0]} to {rates[1]} of {summary['eval_tasks']} held-out instructions"
        f" (+{points[0]} points, 95 %: {points[1]} to {points[2]}; one seed, {minutes} minutes"
    )


if __name__ == "__main__":
    main()
