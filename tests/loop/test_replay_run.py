"""An asynchronous run, or some of its steps, or one rollout that several versions sampled, is done again from its
log."""

from __future__ import annotations

import math
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from stored import sql

from sparring.cli.main import main
from sparring.log import step_name
from sparring.rollout.resample import turns_of
from sparring.store.codec import StoredRollout, encode
from sparring.store.sqlite import SqliteStore
from sparring.types import Rollout

TINY = Path(__file__).parent / "tiny.toml"
WORLD = Path(__file__).parent / "tiny_world.py"
STEPS = 6
MAX_LAG = 2
TABLES = f"""
[envs.short]
name = "{WORLD}:Sums"
held_out = 6
demonstrations = 8
limits = {{ max_turns = 2, max_tokens = 24 }}

[envs.long]
name = "{WORLD}:Sums"
held_out = 6
limits = {{ max_turns = 2, max_tokens = 1300 }}
"""
SETTINGS = (
    'run.stages=["init", "rl"]',
    "rollout.sampling.max_turn_tokens=1300",
    "rollout.sampling.min_turn_tokens=1200",
    f"rollout.max_lag={MAX_LAG}",
    "rollout.group_size=2",
    f"rl.steps={STEPS}",
    "rl.groups_per_step=1",
    "engine.batch.max_running=3",
    "observe.lines_every_s=0",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run. Steps on short turns end while long ones are under way, which their updates
    meet."""
    folder = tmp_path_factory.mktemp("replayed")
    head, _, rest = TINY.read_text().partition("[env]")
    recipe = folder / "several.toml"
    recipe.write_text(
        head.replace("max_positions = 512", "max_positions = 1600") + TABLES + rest[rest.index("[sft]") :]
    )
    words = [f"run.directory={folder}", *SETTINGS]
    assert main(["run", str(recipe), *(word for setting in words for word in ("--set", setting))]) == 0
    return folder / "tiny"


def rollouts(run: Path) -> list[Rollout]:
    store = SqliteStore(run / "store.sqlite", read_only=True)
    try:
        return [rollout for group in store.groups(stage="rl") for rollout in group.rollouts]
    finally:
        store.close()


def written(run: Path) -> dict[Path, int]:
    """When each file was written; readers of a store write the index of its log."""
    return {path: path.stat().st_mtime_ns for path in run.rglob("*") if not path.name.endswith("-shm")}


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    capsys.readouterr()
    assert main(["replay", *words]) == code
    out, error = capsys.readouterr()
    return out or error


def test_a_run_is_sampled_and_trained_again(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turns = list(turns_of(rollouts(run), "policy"))
    across = sum(len(turn.recorded.versions.values) > 1 for turn in turns)
    tokens = sum(len(turn.segment.tokens) for turn in turns)
    before = written(run)
    text = said(capsys, str(run))
    assert across and f"rl: {len(turns)} turns, {across} of them across versions, {tokens} tokens sampled again" in text
    assert f"weights of steps 1 to {STEPS} are the recorded ones\nidentical, bit for bit" in text
    assert written(run) == before


def test_steps_begin_at_a_checkpoint(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, str(run), "--steps", f"{STEPS}:", "--threads", "2")
    with closing(SqliteStore(run / "store.sqlite", read_only=True)) as store:  # the last two and the best are there
        start = max((ref.step for ref in store.checkpoints("rl") if ref.step <= STEPS - 1 - MAX_LAG), default=0)
    after = f" from the checkpoint of step {start}" if start else ""
    assert f"weights of steps {start + 1} to {STEPS} are the recorded ones{after}" in text
    text = said(capsys, str(run), "--steps", f"{STEPS}", "--no-sampling")
    assert text == (
        f"rl: weights of steps 5 to {STEPS} are the recorded ones from the checkpoint of step 4\n"
        "identical, bit for bit\n"
    )


def test_a_rollout_of_several_versions_is_sampled_again(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turn = next(t for t in turns_of(rollouts(run), "policy") if len(t.recorded.versions.values) > 1)
    text = said(capsys, str(run), turn.trajectory.id)
    assert "1 of them across versions, " in text and text.endswith("identical, bit for bit\n")


def test_weights_without_a_checkpoint_are_trained_again(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = next(rollout.id for rollout in rollouts(run) if rollout.id.startswith("rl/5/"))
    checkpoints = run / "rl/checkpoints"
    checkpoints.rename(run / "away")
    try:
        text = said(capsys, str(run), name)
    finally:
        (run / "away").rename(checkpoints)
    assert "weights of steps 1 to " in text and text.endswith("identical, bit for bit\n")


def nudged(rollout: Rollout) -> Rollout:
    """The record with one bit of its 8th log-probability turned."""
    (trajectory,) = rollout.trajectories
    at = next(n for n, segment in enumerate(trajectory.segments) if segment.logprobs)
    segment = trajectory.segments[at]
    logprobs = list(segment.logprobs or ())
    logprobs[7] = math.nextafter(logprobs[7], -1.0)
    segments = (*trajectory.segments[:at], replace(segment, logprobs=tuple(logprobs)), *trajectory.segments[at + 1 :])
    return replace(rollout, trajectories=(replace(trajectory, segments=segments),))


def test_another_bit_is_named(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "forged"
    shutil.copytree(run, folder)
    store = SqliteStore(folder / "store.sqlite")
    rollout = nudged(store.load("rl/2/1"))
    store.close()
    data = encode(StoredRollout.of(rollout, rollout.task))
    sql(folder, "UPDATE rollouts SET data = ? WHERE id = 'rl/2/1'", data)
    text = said(capsys, str(folder), code=1)
    assert ", position 7: logprob -0x" in text and text.endswith("DIFFERENT\n")
    assert next(line for line in text.splitlines() if "position" in line).startswith("rl/2/1, segment ")


def test_other_weights_are_named(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "forged"
    shutil.copytree(run, folder)
    store = SqliteStore(folder / "store.sqlite")
    name = step_name("rl", 2)
    ((_, entry),) = store.entries("rl", name=name, kinds=["published"])
    digests = bytearray(entry.data["digests"])
    digests[8] ^= 1
    store.record(replace(entry, data={"checksum": "0" * 32, "digests": bytes(digests)}))
    store.close()
    first = "SELECT min(row) FROM log WHERE name = ? AND kind = 'published'"
    sql(folder, f"DELETE FROM log WHERE row = ({first})", name)
    text = said(capsys, str(folder), "--no-sampling", code=1)
    assert "rl step 2: expected the weights" in text and "first in tensor model." in text
    assert text.endswith("DIFFERENT\n")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--steps", "3:9"], "--steps: expected steps from 1 to 6"),
        (["--steps", "0:2"], "--steps: expected steps from 1 to 6"),
        (["--steps", "4:2"], "--steps: expected steps from 1 to 6"),
        (["--stage", "sft"], "stage sft: expected steps whose weights were published, got sft, which trains nothing"),
        (["--stage", "distill"], "stage distill: expected steps whose weights were published, got 0 published steps"),
        (["--threads", "0"], "--threads: expected at least 1, got 0"),
        (["rl/0/0", "--no-sampling"], "expected either ROLLOUT or --stage, --steps and --no-sampling, got both"),
    ],
)
def test_what_cannot_be_done_again(
    run: Path, capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    assert expected in said(capsys, str(run), *words, code=2)


def test_a_stage_whose_input_is_gone_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "without"
    shutil.copytree(run, folder)
    shutil.rmtree(folder / "init")
    message = said(capsys, str(folder), code=2)
    gone = folder / "init/model"
    assert f"stage rl: expected the weights that stage init wrote, got no {gone}; restore it" in message
