"""Which tests a run has, and on which kernel paths they compute.

Tests marked `full` are those of `make test-full`, which gives `--full`; a run without it leaves them out.

A test that asks for `kernel_path`, itself or by `usefixtures`, runs once on each path of the run. This is the best of
this processor; with `--kernel-paths two`, the portable one too. With `--kernel-paths every` they are all that this
machine can compute, in software where it has no instructions for them, and tests that ask for none are left out.

`@pytest.mark.kernel_paths(NAME, ...)`, at a test or at one of its parameters, leaves it these paths alone; "best" is
the one in use. With `hardware=True` it runs only where the processor itself computes the path; with `portable=False`,
of a run over two paths, on the best alone.

There are no cases of what cannot be computed. The last line of the run names the paths without any, and why.

Beside it, garbage collections of the tests' process are as rare as the program's, and leave out what is there before the
first test, modules and the tests themselves: no test calls `gc.unfreeze`, after which a collection takes 0.6 s. `processor_time.py` counts what tests take of the processor.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
from processor_time import ProcessorTime

FIXTURE = "kernel_path"
COMPUTED = pytest.StashKey[dict[str, str]]()
"""Of every path "", or why no test of the run computes on it; empty where none asked."""


def pytest_addoption(parser: pytest.Parser) -> None:
    said = "two: best and portable; every: all that this machine computes, and only tests that ask for one"
    parser.addoption("--kernel-paths", choices=("best", "two", "every"), default="best", help=said)
    parser.addoption("--full", action="store_true", help="with the tests marked full")
    parser.addoption("--budgets", action="store_true", help="fail where a folder takes more than tests/budgets.toml")
    parser.addoption("--processor-times", metavar="FILE", help="write the processor time of each test")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "kernel_paths(*names, hardware=False, portable=True): the paths that a test is for"
    )
    config.stash[COMPUTED] = {}
    config.pluginmanager.register(ProcessorTime(config))
    gc.set_threshold(50_000)


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()


def paths_of(config: pytest.Config) -> tuple[str, ...]:
    """Those that tests of this run compute on."""
    from sparring.kernels import ops

    which = config.getoption("--kernel-paths")
    if which != "two":
        return ops.path_names(software=True) if which == "every" else (ops.path_name(),)
    portable = () if ops.why_not("exact-kernels", software=False) else ("exact-kernels",)
    return tuple(dict.fromkeys((ops.path_name(), *portable)))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if FIXTURE in metafunc.fixturenames:
        metafunc.parametrize(FIXTURE, paths_of(metafunc.config), indirect=True)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is of the full suite, and for other paths; of a run over every path, what asks for none."""
    every, full = config.getoption("--kernel-paths") == "every", config.getoption("--full")
    left = [
        item
        for item in items
        if not (_is_for(item, path) if (path := _path_of(item)) else not every)
        or not (full or item.get_closest_marker("full") is None)
    ]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in set(left)]
    computed = set(filter(None, map(_path_of, items)))
    if computed:
        from sparring.kernels.paths import ALL_PATHS

        config.stash[COMPUTED] = {name: "" if name in computed else _why_not(name, config) for name in ALL_PATHS}


def _path_of(item: pytest.Item) -> str | None:
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get(FIXTURE)


def _is_for(item: pytest.Item, path: str) -> bool:
    from sparring.kernels import ops

    best, marks = path == ops.path_name(), list(item.iter_markers("kernel_paths"))
    for mark in marks:
        names = set(mark.args)
        if names and path not in names and not (best and "best" in names):
            return False
        if mark.kwargs.get("hardware") and ops.why_not(path, software=False):
            return False
        if not mark.kwargs.get("portable", True) and not best and item.config.getoption("--kernel-paths") == "two":
            return False
    return True


def _why_not(name: str, config: pytest.Config) -> str:
    """Why no test computes on a path. Builds nothing that the run did not need."""
    from sparring.kernels import ops

    every = config.getoption("--kernel-paths") == "every"
    absent = ops.why_not(name, software=every)
    if every or name == "exact-device":
        return absent or "no test of this run is for it"
    return f"{absent}; make test-paths tries software" if absent else "make test-paths has it"


@pytest.fixture
def kernel_path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every kernel path of the run in turn, by name; whatever was in use, and as many threads, afterwards."""
    import torch

    from sparring.kernels import ops

    before, threads = ops.path_name(), torch.get_num_threads()
    ops.use(request.param)
    yield request.param
    ops.use(before)
    torch.set_num_threads(threads)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker tells what it computed."""
    output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[FIXTURE] = session.config.stash[COMPUTED]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """The one that gave the work hears it."""
    node.config.stash[COMPUTED].update(getattr(node, "workeroutput", {}).get(FIXTURE, {}))


def pytest_unconfigure(config: pytest.Config) -> None:
    """The last line."""
    reporter, found = config.pluginmanager.get_plugin("terminalreporter"), config.stash.get(COMPUTED, {})
    if reporter is not None and found:
        computed = ", ".join(name for name, absent in found.items() if not absent)
        others = ", ".join(f"{name} ({absent})" for name, absent in found.items() if absent)
        reporter.write_line(f"kernel paths computed: {computed}; not computed: {others or 'none'}")
