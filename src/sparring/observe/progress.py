"""Progress: a live view in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from sparring.observe.config import ObserveConfig
from sparring.observe.headline import Pace, clock_text, headlines
from sparring.observe.sinks.console import ConsoleSink
from sparring.observe.sinks.sink import Fanout, SampleRow, Sink
from sparring.observe.terminal import printable

if TYPE_CHECKING:
    from rich.console import Console, Group


def progress(config: ObserveConfig, stream: TextIO | None = None) -> Sink:
    """Return the progress display of `[observe] progress`, on `stream` (standard output by default)."""
    stream = sys.stdout if stream is None else stream
    if config.progress == "off":
        return Fanout(())
    if config.progress == "live" or (config.progress == "auto" and stream.isatty()):
        from rich.console import Console

        return LiveProgress(Console(file=stream))
    return ConsoleSink(stream, every_s=config.lines_every_s)


class LiveProgress:
    """Progress that redraws in place: a bar with step, time and ETA, above the headline figures. Finished stages and
    events scroll up. Implements `Sink`."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._console = console
        self._stage = ""
        self._pace = Pace(0)
        self._values: Mapping[str, float] = {}
        self._live = Live(console=console, get_renderable=self._view, refresh_per_second=4, transient=True)
        self._live.start()

    def start(self, stage: str, total_steps: int, at_once: int = 1) -> None:
        """Show a new stage; the result of the previous stage stays above it as a line."""
        self._finish()
        self._stage, self._pace, self._values = stage, Pace(total_steps, at_once=at_once), {}

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Show a step of the current stage. Steps of other stages that run meanwhile are ignored."""
        if stage != self._stage:
            return
        self._pace.advance(step)
        self._values = dict(values)

    def samples(self, stage: str, step: int, rows: Sequence[SampleRow]) -> None:
        """Print nothing: rollouts are in the report."""

    def event(self, stage: str, text: str, facts: Mapping[str, Any] = {}) -> None:
        """Print a line above the view."""
        self._console.print(printable(f"{stage}: {text}"), markup=False, highlight=False)

    def close(self) -> None:
        self._finish()
        self._live.stop()

    def _finish(self) -> None:
        if self._stage:
            figures = "".join(f"  {label} {text}" for label, text in headlines(self._values))
            line = f"{self._stage} {self._steps()}  {clock_text(self._pace.elapsed_s)}{figures}"
            self._console.print(line, markup=False, highlight=False)
        self._stage = ""

    def _steps(self) -> str:
        return f"{self._pace.step}/{self._pace.total_steps}" if self._pace.total_steps else ""

    def _view(self) -> Group:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        if not self._stage:
            return Group()
        top = Table.grid(padding=(0, 2))
        top.add_row(
            Text(self._stage, style="bold cyan"),
            ProgressBar(total=max(1, self._pace.total_steps), completed=self._pace.step, width=30),
            Text(f"step {self._steps()}" if self._pace.total_steps else "working"),
            Text(f"{clock_text(self._pace.elapsed_s)} elapsed"),
            Text(f"eta {clock_text(self._pace.remaining_s)}"),
        )
        figures = headlines(self._values)
        below = Table.grid(padding=(0, 2))
        if figures:
            below.add_row(*(Text(label, style="dim") for label, _ in figures))
            below.add_row(*(Text(text, style="bold") for _, text in figures))
        return Group(top, below)
