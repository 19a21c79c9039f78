"""The installation of the programs: what cannot be installed is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.harness
HERE = Path(__file__).parent


def installed(folder: Path, bin: Path) -> subprocess.CompletedProcess[str]:
    """Run the installation with the programs of one folder and no index of Python packages."""
    environment = {**os.environ, "PATH": str(bin), "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    words = [sys.executable, str(HERE / "install.py"), str(folder)]
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=False)


def test_where_nothing_installs_each_is_named_and_the_status_says_so(tmp_path: Path) -> None:
    done = installed(tmp_path / "programs", tmp_path)
    assert done.returncode == 1, done.stdout
    lines = [line for line in (HERE / "requirements.txt").read_text().splitlines() if line and line[0] != "#"]
    for name in [*json.loads((HERE / "package.json").read_text())["dependencies"], *lines]:
        assert f"{name}: not installed; it is unverified" in done.stdout


def test_a_package_that_does_not_install_does_not_hold_up_the_others(tmp_path: Path) -> None:
    """A package manager that refuses one package, which it is asked for together with others, then alone."""
    programs = tmp_path / "bin"
    programs.mkdir()
    npm = programs / "npm"
    npm.write_text("#!/bin/sh\nif /bin/grep -q pi-coding-agent package.json; then exit 1; fi\n")
    npm.chmod(0o755)
    done = installed(tmp_path / "programs", programs)
    assert done.returncode == 0, done.stdout
    assert "@mariozechner/pi-coding-agent: not installed; it is unverified" in done.stdout
    assert "@openai/codex: not installed" not in done.stdout
    kept = json.loads((tmp_path / "programs/package.json").read_text())["dependencies"]
    assert len(kept) == len(json.loads((HERE / "package.json").read_text())["dependencies"]) - 1
