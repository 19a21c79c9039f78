"""Processor time of the tests: what each folder took, and its budget.

Each test counts with its fixtures and the child processes that ended within it. `--processor-times FILE` writes a line
of each test (seconds, name), the longest first. `--budgets`, of `make test`, reads `budgets.toml`: a run in which a
folder takes more than its budget, or has none, fails and says so in its last lines.
"""

from __future__ import annotations

import resource
import tomllib
from collections import Counter
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import pytest

BUDGETS = Path(__file__).parent / "budgets.toml"
PROPERTY = "processor_s"


def folder_of(nodeid: str) -> str:
    """Name the folder that a test counts for: `unit/engine`, `loop`."""
    parts = nodeid.partition("::")[0].split("/")[:-1]
    return "/".join(parts[1 : 3 if "unit" in parts[:2] else 2])


def over_budget(seconds: Mapping[str, float], budgets: Mapping[str, float]) -> list[str]:
    """Return a line for each folder that took more than its budget, or has none."""
    lines = []
    for folder, taken in sorted(seconds.items()):
        if folder not in budgets:
            lines.append(f"tests/{folder}: expected a budget in tests/budgets.toml, got none; it took {taken:.0f} s")
        elif taken > budgets[folder]:
            lines.append(
                f"tests/{folder}: expected at most {budgets[folder]} s of processor time, got {taken:.0f};"
                " make its tests shorter, or mark the longest with full"
            )
    return lines


class ProcessorTime:
    """Plugin that measures each test where it runs and adds up where it is reported, with workers or alone.

    Args:
        config: the run's.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._tests: Counter[str] = Counter()
        self._before = 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, Any, Any]:
        """Take the time before a test's fixtures."""
        self._before = _taken()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, Any]:
        """Give the last report of a test what it took."""
        report = yield
        if call.when == "teardown":
            report.user_properties.append((PROPERTY, _taken() - self._before))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up; a worker's reports are added where it got its work from."""
        if report.when == "teardown":
            self._tests[report.nodeid] += dict(report.user_properties).get(PROPERTY, 0.0)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the times; fail a run over its budget."""
        file = self._config.getoption("--processor-times")
        if hasattr(self._config, "workeroutput"):
            return
        if file is not None:
            Path(file).write_text("".join(f"{seconds:.2f} {name}\n" for name, seconds in self._tests.most_common()))
        if self._over() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say what each folder took, and which took too much."""
        folders = self._folders()
        if self._config.getoption("--budgets"):
            taken = ", ".join(f"{folder} {seconds:.0f}" for folder, seconds in folders.most_common())
            terminalreporter.write_line(f"processor seconds: {folders.total():.0f} ({taken})")
        for line in self._over():
            terminalreporter.write_line(line, red=True)

    def _folders(self) -> Counter[str]:
        folders: Counter[str] = Counter()
        for name, seconds in self._tests.items():
            folders[folder_of(name)] += seconds
        return folders

    def _over(self) -> list[str]:
        if not self._config.getoption("--budgets"):
            return []
        return over_budget(self._folders(), tomllib.loads(BUDGETS.read_text(encoding="utf-8")))


def _taken() -> float:
    """Return the processor seconds of this process and of its children that have ended."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
