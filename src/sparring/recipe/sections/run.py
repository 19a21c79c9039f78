"""`[run]`: what a run is called, where it lives and which stages it consists of."""

from __future__ import annotations

from typing import Literal

import msgspec

MAX_THREADS = 1024
"""More than any one machine has a use for; the threading library ends the process where it cannot start them."""


StageName = Literal["init", "collect", "sft", "preference", "reward_model", "rl", "distill", "eval", "export"]


class RunSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[run]`: what this run is called, where it lives and what it consists of."""

    name: str
    """The run's folder is `<directory>/<name>`."""

    directory: str = "runs"
    """Folder of all runs."""

    seed: int = 0
    """Everything random in the run derives from it."""

    stages: tuple[StageName, ...] = ("init", "sft", "rl", "eval", "export")
    """In this order; a stage that is already done in the run's folder is not repeated."""

    after: tuple[str, ...] = ()
    """Recipes whose runs come first, in this order, but for those that are done: files, relative to where you stand.
    This one may name what they have written, such as teachers."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`, `cpu` or `cuda`."""

    threads: int = 0
    """CPU threads of the trainer and of the engine each; 0 takes every core."""

    memory: Literal["refuse", "warn"] = "refuse"
    """Treatment of a run that is estimated to need more memory than the machine has. refuse: it is not begun; warn: it
    is begun, and if it ends for want of memory, the estimate is repeated."""

    redo: Literal["train", "sample"] = "train"
    """Treatment of the steps behind the last checkpoint of a run that goes on. train: they are trained again from what
    was recorded, to the same weights; sample: what was recorded of them counts no longer, for a machine whose processor
    or libraries compute other bits."""

    damaged: Literal["refuse", "pass_over"] = "refuse"
    """Treatment of a newest checkpoint that cannot be read. refuse: the run ends and says so; pass_over: it goes on
    from the one before, and trains the steps behind that again from what was recorded."""

    def __post_init__(self) -> None:
        if self.name in ("", ".", "..") or "/" in self.name or "\0" in self.name:
            raise ValueError(f"name must be one folder name, got {self.name!r}")
        if len(set(self.stages)) != len(self.stages):
            raise ValueError(f"stages must not repeat, got {list(self.stages)}")
        if not 0 <= self.threads <= MAX_THREADS:
            raise ValueError(f"threads must be 0 (all) to {MAX_THREADS}, got {self.threads}")
