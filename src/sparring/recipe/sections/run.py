"""`[run]`: name, folder and stages of a run."""

from __future__ import annotations

from typing import Literal

import msgspec

MAX_THREADS = 1024
"""Maximum number of threads; the threading library ends the process if it cannot start them."""


StageName = Literal["init", "collect", "sft", "preference", "reward_model", "rl", "distill", "eval", "export"]


class RunSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[run]`: name, folder and stages of the run."""

    name: str
    """Name of the run; its folder is `<directory>/<name>`."""

    directory: str = "runs"
    """Folder of all runs."""

    seed: int = 0
    """Seed of everything random in the run."""

    stages: tuple[StageName, ...] = ("init", "sft", "rl", "eval", "export")
    """Stages in this order; a stage that is done in the run's folder is not repeated."""

    after: tuple[str, ...] = ()
    """Recipes to run first, in this order, unless done: paths relative to the working directory. This recipe may use
    their output, such as teachers."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device: `auto`, `cpu` or `cuda`."""

    threads: int = 0
    """Number of CPU threads of the trainer and of the engine each; 0: all cores."""

    memory: Literal["refuse", "warn"] = "refuse"
    """Treatment of a run with an estimated need of more than 1.5 times the machine's memory. refuse: it does not start;
    warn: it starts. Above the machine's memory there is a warning, which is repeated if memory runs out."""

    redo: Literal["train", "sample"] = "train"
    """Treatment of the steps after the last checkpoint of a resumed run. train: they are trained again from the record,
    to the same weights; sample: their record is dropped, for a machine with other numerical results."""

    damaged: Literal["refuse", "pass_over"] = "refuse"
    """Treatment of a latest checkpoint that cannot be read. refuse: the run ends with an error; pass_over: it resumes
    from the checkpoint before, and trains the later steps again from the record."""

    def __post_init__(self) -> None:
        if self.name in ("", ".", "..") or "/" in self.name or "\0" in self.name:
            raise ValueError(f"name must be one folder name, got {self.name!r}")
        if len(set(self.stages)) != len(self.stages):
            raise ValueError(f"stages must not repeat, got {list(self.stages)}")
        if not 0 <= self.threads <= MAX_THREADS:
            raise ValueError(f"threads must be 0 (all) to {MAX_THREADS}, got {self.threads}")
