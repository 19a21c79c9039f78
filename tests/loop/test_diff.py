"""`sparring diff` on real runs, and on copies of them in which one thing was changed."""

from __future__ import annotations

import math
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import TINY, WORLD

from sparring.cli.main import main
from sparring.store.codec import StoredRollout, decode, encode


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


@pytest.fixture
def diff_lines(capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Runs the verb; the lines that it prints."""

    def lines(one: Path, other: Path, code: int = 1) -> list[str]:
        capsys.readouterr()
        assert main(["diff", str(one), str(other)]) == code
        out, error = capsys.readouterr()
        return (error if code == 2 else out).splitlines()

    return lines


def change_rollout(folder: Path, rollout: str, change: Callable[[StoredRollout], StoredRollout]) -> None:
    with closing(sqlite3.connect(folder / "store.sqlite")) as store, store:
        ((data,),) = store.execute("SELECT data FROM rollouts WHERE id = ?", (rollout,)).fetchall()
        changed = encode(change(decode(data, StoredRollout)))
        store.execute("UPDATE rollouts SET data = ? WHERE id = ?", (changed, rollout))


def with_segment(stored: StoredRollout, **changes: object) -> StoredRollout:
    """The same rollout with another first sampled segment."""
    trajectory = stored.trajectories[0]
    first = next(segment.index for segment in trajectory.segments if segment.model is not None)
    segments = tuple(replace(s, **changes) if s.index == first else s for s in trajectory.segments)
    return StoredRollout(
        **{
            **{name: getattr(stored, name) for name in stored.__struct_fields__},
            "trajectories": (replace(trajectory, segments=segments),),
        }
    )


def first_sampled(stored: StoredRollout):
    return next(segment for segment in stored.trajectories[0].segments if segment.model is not None)


def test_another_seed_begins_with_other_weights(
    run: Path, tmp_path: Path, diff_lines: Callable[..., list[str]]
) -> None:
    """Two runs of one recipe are compared where a run that was stopped is whole: test_pipeline.py."""
    settings = ("run.seed=4", 'run.stages=["init"]', f"run.directory={tmp_path}", f"env.name={WORLD}")
    assert main(["run", str(TINY), *(word for setting in settings for word in ("--set", setting))]) == 0
    other = tmp_path / "tiny"
    lines = diff_lines(run, other)
    assert lines[0].startswith("settings that differ: ") and "run.seed (3 -> 4), run.stages (" in lines[0]
    assert lines[1].startswith(
        f"init, the weights in {run}/init/model and {other}/init/model: model.embed_tokens.weight, "
    )
    assert "value at (0, 0): " in lines[1] and lines[2] == "DIFFERENT"


def test_a_changed_token_is_named(run: Path, copy: Path, diff_lines: Callable[..., list[str]]) -> None:
    tokens: list[int] = []

    def change(stored: StoredRollout) -> StoredRollout:
        tokens.extend(first_sampled(stored).tokens)
        return with_segment(stored, tokens=(*tokens[:1], tokens[1] + 1, *tokens[2:]))

    change_rollout(copy, "rl/3/1", change)
    *_, line, end = diff_lines(run, copy)
    values = f"{tokens[1]} in {run}; {tokens[1] + 1} in {copy}"
    assert (line, end) == (f"rl step 2, rl/3/1 turn 1: sampled token 1: {values}", "DIFFERENT")


def test_a_changed_bit_of_a_logprob_is_named(run: Path, copy: Path, diff_lines: Callable[..., list[str]]) -> None:
    def change(stored: StoredRollout) -> StoredRollout:
        first, *rest = first_sampled(stored).logprobs or ()
        return with_segment(stored, logprobs=(math.nextafter(first, 0), *rest))

    change_rollout(copy, "rl/0/2", change)
    assert diff_lines(run, copy)[-2].startswith("rl step 1, rl/0/2 turn 1: log-probability of sampled token 0: -")


def test_the_published_tensor_that_differs_is_named(
    run: Path, copy: Path, diff_lines: Callable[..., list[str]]
) -> None:
    with closing(sqlite3.connect(copy / "store.sqlite")) as store, store:
        where = "WHERE kind = 'published' AND name = 'rl@2'"
        ((data,),) = store.execute(f"SELECT data FROM log {where}").fetchall()
        entry = decode(data, dict)
        digests = bytearray(entry["digests"])
        digests[8 * 3] ^= 1
        changed = encode({"checksum": "0" * 32, "digests": bytes(digests)})
        store.execute(f"UPDATE log SET data = ? {where}", (changed,))
    *_, line, tensor, _ = diff_lines(run, copy)
    expected = f"rl step 2: checksum of the published weights: {entry['checksum']} in {run}; {'0' * 32} in {copy}"
    assert (line, tensor) == (
        expected,
        "the first tensor that differs: model.layers.0.mlp.gate_proj.weight",
    )


@pytest.mark.parametrize("stage", ["sft", "rl"])
def test_one_byte_of_a_stages_weights_is_named(
    run: Path, copy: Path, diff_lines: Callable[..., list[str]], stage: str
) -> None:
    file = copy / stage / "model/model.safetensors"
    content = bytearray(file.read_bytes())
    content[-4] ^= 1  # of the last tensor's last value
    file.write_bytes(content)
    before, line, *_ = diff_lines(run, copy)
    assert before == f"the same: {'init' if stage == 'sft' else 'init, sft'}"
    folders = f"{run}/{stage}/model and {copy}/{stage}/model"
    assert line.startswith(f"{stage}, the weights in {folders}: model.norm.weight, value at (31): ")


def test_a_run_that_was_stopped_is_a_beginning_of_the_other(
    run: Path, copy: Path, diff_lines: Callable[..., list[str]]
) -> None:
    with closing(sqlite3.connect(copy / "store.sqlite")) as store, store:
        store.execute("DELETE FROM groups WHERE stage LIKE 'eval/%' OR number >= 2")
        store.execute("DELETE FROM metrics WHERE stage = 'rl' AND step >= 2")
        store.execute("DELETE FROM log WHERE name GLOB 'rl/[2-9]*' OR name GLOB 'rl/1[0-9]*' OR name GLOB 'rl@[2-6]'")
        store.execute("DELETE FROM pairs WHERE key IN ('stage/rl', 'stage/eval', 'stage/export')")
    line = f"{copy} ends in stage rl after step 1; the same until then"
    assert diff_lines(run, copy)[-2:] == diff_lines(copy, run)[-2:] == [line, "DIFFERENT"]
    assert diff_lines(copy, copy, code=0)[-1] == "equal, bit for bit"


def test_evaluations_are_compared_too(
    run: Path, copy: Path, tmp_path: Path, diff_lines: Callable[..., list[str]]
) -> None:
    """As `sparring eval` leaves them, in folders of their own."""
    config = (copy / "config.toml").read_text()
    start, _, rest = config.partition("stages = [")
    (copy / "config.toml").write_text(f'{start}stages = ["eval"]\n{rest.partition("]")[2]}')
    with closing(sqlite3.connect(copy / "store.sqlite")) as store, store:
        store.execute("DELETE FROM groups WHERE stage != 'rl'")
        store.execute("UPDATE groups SET stage = 'eval'")
        store.execute("DELETE FROM pairs WHERE key LIKE 'stage/%'")
    other = Path(shutil.copytree(copy, tmp_path / "other"))
    assert diff_lines(copy, other, code=0) == ["the same: eval", "equal, bit for bit"]
    change_rollout(other, "rl/1/0", lambda stored: with_segment(stored, tokens=first_sampled(stored).tokens[::-1]))
    assert diff_lines(copy, other)[0].startswith("eval, rl/1/0 turn 1: sampled token 0: ")
    with closing(sqlite3.connect(other / "store.sqlite")) as store, store:
        store.execute("DELETE FROM groups WHERE number > 0")
    assert diff_lines(copy, other)[0] == f"{other} ends in stage eval after rl/0; the same until then"


def test_a_folder_without_a_run_is_refused(run: Path, tmp_path: Path, diff_lines: Callable[..., list[str]]) -> None:
    (line,) = diff_lines(run, tmp_path / "none", code=2)
    assert line.startswith(f"{tmp_path}/none: expected the folder of a run")
    (tmp_path / "config.toml").write_text((run / "config.toml").read_text())
    (line,) = diff_lines(tmp_path, run, code=2)
    assert line.startswith(f"{tmp_path}/store.sqlite: expected the store")
