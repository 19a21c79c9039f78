"""Processor time of the tests: what each folder took, and its budget.

Each test counts with its fixtures and the child processes that ended within it. `--processor-times FILE` writes a line
of each test (seconds, name), the longest first. `--budgets`, of `make test`, reads `budgets.toml`: a run in which a
folder takes more than its budget, or has none, fails and says so in its last lines.

The same work takes more processor time on a slower processor, or on one whose cores and caches others use. So a fixed
piece of work is timed between tests, now and then: where it takes longer than `PACE_S`, budgets are longer by as much.
"""

from __future__ import annotations

import resource
import statistics
import time
import tomllib
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

BUDGETS = Path(__file__).parent / "budgets.toml"
PROPERTY, PACE = "processor_s", "pace_s"
PACE_S = 0.05
"""Processor seconds of `_pace` where the budgets hold as they are. An idle AMD EPYC took 0.04 to 0.06. On the mean of a run
of the short suite, which took 1,633 processor seconds there, it took 0.063."""
PACE_EVERY_S = 10.0


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


def slowness(paces: Sequence[float]) -> float:
    """Return by how much a processor is slower than that of the budgets, or 1: it is not, or nothing was timed.

    Args:
        paces: seconds that `_pace` took, each time.
    """
    return max(1.0, statistics.mean(paces or [0.0]) / PACE_S)


class ProcessorTime:
    """Plugin that measures each test where it runs and adds up where it is reported, with workers or alone.

    Args:
        config: the run's.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._tests: Counter[str] = Counter()
        self._before, self._paced = 0.0, 0.0
        self._paces: list[float] = []

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
            if self._config.getoption("--budgets") and time.monotonic() - self._paced > PACE_EVERY_S:
                report.user_properties.append((PACE, _pace()))
                self._paced = time.monotonic()
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up; a worker's reports are added where it got its work from."""
        if report.when == "teardown":
            told = dict(report.user_properties)
            self._tests[report.nodeid] += told.get(PROPERTY, 0.0)
            self._paces += [told[PACE]] if PACE in told else []

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
            terminalreporter.write_line(f"budgets are those of tests/budgets.toml times {slowness(self._paces):.2f}")
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
        budgets = tomllib.loads(BUDGETS.read_text(encoding="utf-8"))
        longer = slowness(self._paces)
        return over_budget(self._folders(), {folder: round(seconds * longer) for folder, seconds in budgets.items()})


def _taken() -> float:
    """Return the processor seconds of this process and of its children that have ended."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def _pace() -> float:
    """Return the processor seconds of a fixed piece of work: objects, text and dictionaries, as most of a test is."""
    before = time.thread_time()
    words = [f"{number:x}" for number in range(60_000)]
    counts: dict[str, int] = {}
    for word in words:
        counts[word[-3:]] = counts.get(word[-3:], 0) + len(word)
    "".join(sorted(words))
    return time.thread_time() - before
