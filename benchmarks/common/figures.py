"""What benchmarks have in common: their command line, the claims that they print, and what a process has used."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SHORT_RUNS = Path("runs/short").absolute()
"""Folder of the runs of a short form, which begins without any."""

Claims = list[dict[str, object]]


def read_options(parser: argparse.ArgumentParser, **short: Any) -> argparse.Namespace:
    """Read the command line of a benchmark, with an option `--short`.

    Args:
        short: defaults under `--short`, with which the benchmark takes seconds. What is given by name still counts.
    """
    parser.add_argument(
        "--short", action="store_true", help="take seconds, to see that it runs; its figures mean nothing"
    )
    if parser.parse_args().short:
        parser.set_defaults(**short)
        shutil.rmtree(SHORT_RUNS, ignore_errors=True)
    return parser.parse_args()


def claim(name: str, value: float, unit: str, target: float, direction: str = "<=") -> dict[str, object]:
    """Return a figure with its target, in the form that all benchmarks share."""
    return {"name": name, "value": round(value, 3), "unit": unit, "target": target, "direction": direction}


def processor_s(process: int) -> float:
    """Return the processor seconds of all threads of another process, of those that have ended too."""
    times = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


def resident_bytes() -> int:
    """Return the bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
