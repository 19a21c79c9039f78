"""Weights & Biases, an extra: `pip install sparring[wandb]`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class WandbSink:
    """Logs `<stage>/<name>` to one wandb run, which a resumed run continues.

    Args:
        folder: where wandb keeps its files.
        project: of wandb.
        name: of the run, and its id within the project.
        config: what the run is, shown beside it.
    """

    def __init__(self, folder: str | Path, *, project: str, name: str, config: Mapping[str, Any]) -> None:
        import wandb

        self._run = wandb.init(
            project=project, name=name, id=name, resume="allow", dir=str(folder), config=dict(config), reinit=True
        )

    def start(self, stage: str, total_steps: int) -> None:
        """Let the stage's values be drawn over its own steps."""
        self._run.define_metric(f"{stage}/step")
        self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Send the values."""
        self._run.log({f"{stage}/step": step, **{f"{stage}/{name}": value for name, value in values.items()}})

    def event(self, stage: str, text: str) -> None:
        """Nothing to send: the run's store and `metrics.jsonl` hold events."""

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
