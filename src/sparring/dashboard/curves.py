"""A run's metrics as tables for other programs."""

from __future__ import annotations

import csv
from contextlib import closing
from pathlib import Path

from sparring.dashboard.page_data import TRAIN_STAGES
from sparring.dashboard.report import open_store


def write_curves(run_dir: Path) -> list[Path]:
    """Write `curves/STAGE.csv` for every stage with metrics of a run, finished or not, and return the files. Rows are
    steps, columns are metrics, numbers are as recorded; a missing metric is an empty cell."""
    with closing(open_store(run_dir)) as store:
        metrics = {stage: store.metrics(stage) for stage in TRAIN_STAGES}
    files = []
    for stage, rows in metrics.items():
        if rows:
            files.append(run_dir / "curves" / f"{stage.replace('/', '-')}.csv")
            files[-1].parent.mkdir(exist_ok=True)
            names = sorted({name for _, values in rows for name in values})
            with files[-1].open("w", newline="", encoding="utf-8") as file:
                table = csv.DictWriter(file, ["step", *names])
                table.writeheader()
                table.writerows({"step": step, **values} for step, values in rows)
    return files
