"""The weights, the store and the metrics of a run are the same for every number of ranks and threads."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import pytest
from test_fleet_run import check_same, words
from test_ranks_run import measured

from sparring.cli.main import main
from sparring.testing.tiny_models import tiny_model

FAMILIES = ("qwen3", "qwen3_moe")
DTYPES = ("float32", "bfloat16")
LAYOUTS = tuple(itertools.product((1, 2, 3), (1, 2)))
DIAGONAL = (
    ("qwen3", "float32", (2, 1)),
    ("qwen3", "bfloat16", (3, 2)),
    ("qwen3_moe", "float32", (3, 1)),
    ("qwen3_moe", "bfloat16", (2, 2)),
)
"""One of each family and dtype; numbers of ranks and threads."""


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "dtype", "layouts"),
    [
        *((family, dtype, (layout,)) for family, dtype, layout in DIAGONAL),
        *(
            pytest.param(family, dtype, LAYOUTS, marks=pytest.mark.slow)
            for family, dtype in itertools.product(FAMILIES, DTYPES)
        ),
    ],
)
def test_no_layout_changes_a_bit(
    family: str,
    dtype: str,
    layouts: tuple[tuple[int, int], ...],
    given: Path,
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = tiny_model(family, tmp_path / "model", seed=2, vocab_size=420, max_position_embeddings=512)
    for file in checkpoint.iterdir():
        if not (model / file.name).exists():
            shutil.copyfile(file, model / file.name)
    same = ('run.stages=["rl", "eval"]', f"models.policy.path={model}", f"models.policy.dtype={dtype}")
    assert main(words(given, "own", *same)) == 0
    own = measured(given.parent / "runs/own")
    assert len(own) == 6 and all(values["tokens_trained"] > 0 for values in own)
    for ranks, threads in layouts:
        name, cluster = (
            f"{ranks}-{threads}",
            ("cluster.kind=local", f"cluster.ranks={ranks}", "cluster.engine_threads=1"),
        )
        kept = (f"run.threads={threads}", *(cluster if ranks > 1 else ()), f"cluster.rank_threads={threads}")
        assert main(words(given, name, *same, *kept)) == 0
        check_same(given, name, capsys)
        assert measured(given.parent / "runs" / name) == own, name
