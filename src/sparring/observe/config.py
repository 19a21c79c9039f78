"""The `[observe]` section of a recipe."""

from __future__ import annotations

from typing import Literal

import msgspec

SinkName = Literal["jsonl", "tensorboard", "wandb"]


class ObserveConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sinks of metrics, and the display of progress."""

    sinks: tuple[SinkName, ...] = ("jsonl", "tensorboard")
    """Sinks of metrics: `jsonl` writes `metrics.jsonl`, `tensorboard` writes `tensorboard/`, both in the run's folder;
    `wandb` needs the extra."""

    progress: Literal["auto", "live", "plain", "off"] = "auto"
    """Display of progress; `auto` is live in a terminal and plain lines elsewhere."""

    lines_every_s: float = 5.0
    """Minimum seconds between plain progress lines of a stage; the first and the last step are always printed."""

    wandb_project: str = "sparring"
    """Project that `wandb` logs to."""

    samples: int = 4
    """Number of rollouts of a step that `tensorboard` and `wandb` show as a table; 0: none."""

    samples_every: int = 10
    """Number of steps between such tables; the first step has one."""

    def __post_init__(self) -> None:
        if len(set(self.sinks)) != len(self.sinks):
            raise ValueError(f"sinks must not repeat, got {list(self.sinks)}")
        if self.samples < 0 or self.samples_every < 1:
            raise ValueError("samples must be 0 or more, and samples_every 1 or more")
        if self.lines_every_s < 0:
            raise ValueError("lines_every_s must be 0 or more")
