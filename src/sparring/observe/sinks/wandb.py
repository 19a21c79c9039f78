"""Sink of Weights & Biases, an extra: `pip install sparring[wandb]`."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparring.errors import BadInput, boundary
from sparring.observe.sinks.sink import SampleRow


class WandbSink:
    """Sink that logs `<stage>/<name>` to one wandb run. A resumed run continues its wandb run, whose id is in the run's
    folder. Implements `Sink`.

    Args:
        folder: folder of the run, also for wandb's files.
        name: display name in wandb, not necessarily unique.

    Raises:
        BadInput: wandb cannot open a run, for example because there is no login.
    """

    def __init__(self, folder: str | Path, *, project: str, name: str, config: Mapping[str, Any]) -> None:
        import wandb

        file = Path(folder) / "wandb.id"
        if not file.exists():
            file.write_text(secrets.token_hex(4))
        # a live view redraws its lines, which a log should not contain
        quiet = wandb.Settings(console="off")
        fix = "run `wandb login`, set WANDB_MODE=offline, or remove wandb"
        with boundary(BadInput, "observe.sinks", "wandb to open a run", fix):
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
        """Make wandb plot the stage's values over the stage's own steps."""
        self._run.define_metric(f"{stage}/step")
        self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")

    def log(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        self._run.log({f"{stage}/step": step, **{f"{stage}/{name}": value for name, value in values.items()}})

    def samples(self, stage: str, step: int, rows: Sequence[SampleRow]) -> None:
        """Log the table `<stage>/samples`."""
        import wandb

        columns = ["step", "rollout", "task", "conversation", "reward", "outcome"]
        data = [[step, row.rollout, row.task, row.conversation, row.reward, row.outcome] for row in rows]
        self._run.log({f"{stage}/step": step, f"{stage}/samples": wandb.Table(columns=columns, data=data)})

    def event(self, stage: str, text: str, facts: Mapping[str, Any] = {}) -> None:
        """Log the text `<stage>/event`."""
        self._run.log({f"{stage}/event": text} | ({f"{stage}/step": facts["at_step"]} if "at_step" in facts else {}))

    def close(self) -> None:
        self._run.finish()
