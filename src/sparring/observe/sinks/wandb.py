"""Weights & Biases, an extra: `pip install sparring[wandb]`."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparring.errors import BadInput, boundary
from sparring.observe.sinks.sink import SampleRow


class WandbSink:
    """Logs `<stage>/<name>` to one wandb run, which a resumed run continues: its id lies in the run's folder.

    Args:
        folder: the run's, where wandb keeps its files too.
        project: of wandb.
        name: what wandb shows; several runs may have it.
        config: what the run is, shown beside it.

    Raises:
        BadInput: wandb opens no run, as where nobody is logged in.
    """

    def __init__(self, folder: str | Path, *, project: str, name: str, config: Mapping[str, Any]) -> None:
        import wandb

        file = Path(folder) / "wandb.id"
        if not file.exists():
            file.write_text(secrets.token_hex(4))
        # console: a live view's redrawn lines are no log
        quiet = wandb.Settings(console="off")
        do = "run `wandb login`, set WANDB_MODE=offline, or remove wandb"
        with boundary(BadInput, "observe.sinks", "wandb to open a run", do):
            self._run = wandb.init(
                project=project,
                name=name,
                id=file.read_text(),
                resume="allow",
                dir=str(folder),
                config=dict(config),
                reinit="create_new",
                settings=quiet,
            )

    def start(self, stage: str, total_steps: int, at_once: int = 1) -> None:
        """Let the stage's values be drawn over its own steps."""
        self._run.define_metric(f"{stage}/step")
        self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Send the values."""
        self._run.log({f"{stage}/step": step, **{f"{stage}/{name}": value for name, value in values.items()}})

    def samples(self, stage: str, step: int, rows: Sequence[SampleRow]) -> None:
        """Send a table `<stage>/samples`."""
        import wandb

        columns = ["step", "rollout", "task", "conversation", "reward", "outcome"]
        data = [[step, row.rollout, row.task, row.conversation, row.reward, row.outcome] for row in rows]
        self._run.log({f"{stage}/step": step, f"{stage}/samples": wandb.Table(columns=columns, data=data)})

    def event(self, stage: str, text: str) -> None:
        """Send nothing: the run's store and `metrics.jsonl` hold events."""

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
