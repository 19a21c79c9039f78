"""Three recipes that differ in `cluster.colocate` and `rollout.max_lag` alone: seconds, memory and success of each.

    python benchmarks/turns.py [--only colocated,lag,asynchronous]

Memory is the largest sum, over the moments looked at (ten a second), of what the run's processes have for themselves
and of their shares of what they have in common (`Pss` of /proc/PID/smaps_rollup). Seconds are those of the stage rl;
success is that of 200 held-out tasks. Runs that are there already are not done again: remove runs/turns-*. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common.figures import ROOT, SHORT_RUNS, read_options
from common.short_recipes import shorten

NAMES = ("colocated", "lag", "asynchronous")
PAUSE_S = 0.1


def family(root: int) -> list[int]:
    """Return the ids of a process and of all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1]) if entry.name.isdecimal() else 0
        except OSError:
            continue
        children.setdefault(parent, []).append(int(entry.name) if entry.name.isdecimal() else 0)
    found = [root]
    for one in found:
        found += children.get(one, [])
    return found


def memory(process: int) -> int:
    """Return the bytes of a process, 0 if it has ended."""
    try:
        shares = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{process}/smaps_rollup").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(shares[1]) << 10 if shares else 0


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Run a recipe in a folder with `recipes`, and return its figures."""
    command = [sys.executable, "-m", "sparring.cli.main", "run", f"recipes/turns/{name}.toml"]
    most = 0
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        assert run.stdout is not None
        text = ""
        while run.poll() is None:
            most = max(most, sum(map(memory, family(run.pid))))
            time.sleep(PAUSE_S)
        text = run.stdout.read()
    assert run.returncode == 0, text
    summary = json.loads((folder / f"runs/turns-{name}/summary.json").read_text())
    seconds = re.search(r"\brl ([\d.]+) s", text)
    said = re.search(r"memory: about ([\d.]+) GiB", text)
    assert seconds is not None and said is not None, text
    gib = most / 2**30
    figures = {"rl_s": float(seconds[1]), "peak_gib": round(gib, 3), "said_gib": float(said[1])}
    return {**figures, **{key: summary[key] for key in ("rl_success", "rl_success_low", "rl_success_high")}}


def main() -> None:
    """Run the recipes that are named, and print their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(NAMES))
    options, folder, found = read_options(parser, only="colocated"), ROOT, {}
    if options.short:
        folder = SHORT_RUNS
        shutil.copytree(ROOT / "recipes", folder / "recipes")
        for recipe in folder.rglob("*.toml"):
            shorten(recipe)
    for name in options.only.split(","):
        found[name] = measure(name, folder)
        print(name, json.dumps(found[name]), flush=True)
    print(json.dumps({"benchmark": "turns", "recipes": found}))


if __name__ == "__main__":
    main()
