"""Of what a package plays that is not installed, the tests are not collected, and a line says what would be needed."""

from __future__ import annotations

import importlib.util
import shutil

import pytest

PLAYS = importlib.util.find_spec("scienceworld") is not None and shutil.which("java") is not None
collect_ignore = [] if PLAYS else ["test_scienceworld.py"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was not played."""
    if not PLAYS:
        terminalreporter.write_line("ScienceWorld was not played: install Java and pip install scienceworld==1.2.3")
