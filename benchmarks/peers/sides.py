"""Processes that are measured in turns: one computes while the others wait, so that a change of the machine meets all
of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.figures import ROOT

TORCH = "torch==2.13.0"


def install(venv: Path, requirements: Path, *without_needs: str) -> None:
    """A peer's virtual environment, unless it is there already with these requirements. torch comes first: a CPU build
    then.

    Args:
        venv: the folder.
        requirements: a file for pip.
        without_needs: packages that are installed without what they say they need.
    """
    wanted = "\n".join([TORCH, *without_needs, requirements.read_text()])
    stamp = venv / ".stamp"
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    print(f"installing {requirements.stem} into {venv.name}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    pip: list[str | Path] = [venv / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, TORCH], check=True)
    for package in without_needs:
        subprocess.run([*pip, "--no-deps", package], check=True)
    subprocess.run([*pip, "-r", requirements], check=True)
    stamp.write_text(wanted)


def environment(threads: int, *, sleeping: bool = True) -> dict[str, str]:
    """Of a measured process. `sleeping`: waiting threads sleep, as in our Makefile; else they spin for a while."""
    kept = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    ours = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    return {**kept, **ours, **({"OMP_WAIT_POLICY": "PASSIVE"} if sleeping else {})}


class Side:
    """One of the processes. For each line on its standard input it computes one turn and prints one JSON object; in
    between it sleeps.

    Args:
        command: started at once.
        variables: its environment.
    """

    def __init__(self, command: Sequence[object], variables: Mapping[str, str]) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (until the process ends)
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        self._command = " ".join(map(str, command))
        self._process = subprocess.Popen([*map(str, command)], env=dict(variables), text=True, **pipes)

    def turn(self, ask: str = "go") -> dict[str, Any]:
        """One turn, and what came of it."""
        assert self._process.stdin is not None
        self._process.stdin.write(ask + "\n")
        self._process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """The next object that it prints."""
        assert self._process.stdout is not None
        for text in self._process.stdout:
            if text.startswith("{"):
                found: dict[str, Any] = json.loads(text)
                return found
        self.close()
        raise AssertionError(f"{self._command} ended too early")

    def close(self) -> None:
        """Wait for its end; show what it complained about if that was not in order."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self._process.wait():
            self._errors.seek(0)
            sys.exit(f"{self._errors.read()}\n{self._command}: exit status {self._process.returncode}")
