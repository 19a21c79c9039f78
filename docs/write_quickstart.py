"""Writes the measured table of docs/quickstart.md, and its success in README.md, from a finished run:
`python docs/write_quickstart.py runs/quickstart`."""

import json
import re
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BEGIN = "<!-- quickstart: python docs/write_quickstart.py runs/quickstart -->\n"
END = "<!-- end -->"
WRAPPED = runpy.run_path(str(Path(__file__).with_name("wrap.py")))["wrapped"]


def table(summary: dict) -> str:
    """Return the run's figures as Markdown."""
    rows = [
        "| dataset | tool demonstrated | after SFT | after RL | held-out tasks |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, entry in summary["by_dataset"].items():
        covered = {"well": "always", "thin": "seldom"}[entry["coverage"]]
        rows.append(f"| {name} | {covered} | {entry['sft']:.1%} | {entry['rl']:.1%} | {entry['tasks']} |")
    rows.append(
        f"| **all** | | {summary['sft_success']:.1%} | **{summary['rl_success']:.1%}** | {summary['eval_tasks']} |"
    )
    wall = ", ".join(f"{stage} {seconds:.0f} s" for stage, seconds in summary["wall_s"].items())
    facts = (
        f"At least {summary['rl_success_low']:.1%} with 95 % confidence; {summary['no_tool_success']:.1%} with the tool host"
        f" switched off. Largest difference between engine and trainer log-probabilities over {summary['tokens_trained']:,}"
        f" trained tokens: **{summary['logprob_max_abs_diff']!r}**.\nWall clock on two cores: {wall};"
        f" {summary['peak_rss_bytes'] / 2**30:.1f} GiB."
    )
    return WRAPPED("\n".join(rows) + "\n\n" + facts + "\n")


def main() -> None:
    """Replace the text between the two marks."""
    summary = json.loads((Path(sys.argv[1]) / "summary.json").read_text())
    page = ROOT / "docs" / "quickstart.md"
    text = page.read_text()
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    page.write_text(pattern.sub(lambda _: BEGIN + table(summary) + END, text))
    readme = ROOT / "README.md"
    solved = f"{summary['rl_success']:.1%} of {summary['eval_tasks']:,} held-out tasks"
    readme.write_text(re.sub(r"[\d.]+% of [\d,]+ held-out tasks", solved, readme.read_text()))


if __name__ == "__main__":
    main()
