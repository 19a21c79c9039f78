"""Preferences end to end on the tiny model: rows of a file become weights that prefer what the rows do, on prompts
never seen."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from sparring.cli.main import main
from sparring.store.sqlite import SqliteStore


def run_tiny(recipe: Path, *overrides: str) -> None:
    assert main(["run", str(recipe), *(word for override in overrides for word in ("--set", override))]) == 0


def stage_result(tmp_path: Path, stage: str) -> dict:
    store = SqliteStore(tmp_path / "runs/tiny/store.sqlite", read_only=True)
    result, metrics = store.get(f"stage/{stage}"), [values for _, values in store.metrics(stage)]
    store.close()
    return {**(result or {}), "metrics": metrics}


def pairs(count: int) -> list[dict[str, object]]:
    """Who replies with low digits is preferred to who replies with high ones."""
    draw = random.Random(2)
    rows = []
    for _ in range(count):
        low, high = ("".join(draw.choice(digits) for _ in range(draw.randint(2, 5))) for digits in ("0123", "6789"))
        rows.append({"prompt": f"{draw.randrange(10**6)} ?", "chosen": low, "rejected": high})
    return rows


def write_rows(tmp_path: Path, rows: list[dict[str, object]]) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


LOSSES = {
    "dpo": {},
    "robust_dpo": {"flip_rate": 0.1},
    "ipo": {"length_averaged": "true"},
    "kto": {"beta": 0.3},
    "simpo": {},
    "orpo": {"strength": 1.0},
}


def settings(stage: str, data: Path, loss: dict[str, object], *, steps: int) -> list[str]:
    return [
        f"{stage}.data={data}",
        f'run.stages=["{stage}"]',
        f"{stage}.steps={steps}",
        f"{stage}.rows_per_step=16",
        f"{stage}.held_out=40",
        f"{stage}.train.learning_rate=0.01",
        *(f"{stage}.loss.{key}={value}" for key, value in loss.items()),
    ]


@pytest.mark.parametrize(
    "name", ["dpo", *(pytest.param(name, marks=pytest.mark.slow) for name in LOSSES if name != "dpo")]
)
def test_the_policy_learns_to_prefer(given: Path, tmp_path: Path, name: str) -> None:
    data = write_rows(tmp_path, pairs(120))
    run_tiny(given, *settings("preference", data, {"name": name, **LOSSES[name]}, steps=12))
    result = stage_result(tmp_path, "preference")
    assert result["rows"] == 80 and result["held_out"]["count"] == (80 if name == "kto" else 40)
    assert result["held_out"]["accuracy"] > 0.9 and result["held_out"]["low"] > 0.8
    assert json.loads((tmp_path / "runs/tiny/summary.json").read_text())["held_out"] == {
        "preference": result["held_out"]
    }
    first, last = result["metrics"][0], result["metrics"][-1]
    assert last["loss_preference"] < first["loss_preference"]
    if name not in ("simpo", "orpo"):
        assert first["reward_chosen"] == first["reward_rejected"] == 0.0  # the reference is the model it began with
    assert ("loss_imitate" in first) == (name == "orpo")
    assert (Path(result["model"]) / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_reward_model_learns_what_replies_are_worth(given: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path, pairs(120))
    run_tiny(given, *settings("reward_model", data, {"name": "bradley_terry", "centre": 0.01}, steps=12))
    result = stage_result(tmp_path, "reward_model")
    assert (
        result["held_out"]["accuracy"] > 0.9 and result["held_out"]["low"] > 0.8 and result["held_out"]["count"] == 40
    )
    assert result["metrics"][0]["loss_preference"] == pytest.approx(0.6931472)
    config = json.loads((Path(result["model"]) / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"]


def solutions(count: int) -> list[dict[str, object]]:
    """Steps of low digits are right, steps of high ones wrong, whatever stands before them."""
    draw, rows = random.Random(4), []
    for _ in range(count):
        labels = [draw.random() < 0.6 for _ in range(3)]
        steps = [
            "".join(draw.choice("0123" if right else "6789") for _ in range(draw.randint(1, 4))) for right in labels
        ]
        rows.append({"prompt": f"{draw.randrange(10**6)} ?", "steps": steps, "labels": labels})
    return rows


@pytest.mark.slow
def test_a_process_reward_model_learns_which_steps_are_right(given: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path, solutions(200))
    run_tiny(given, *settings("reward_model", data, {"name": "steps"}, steps=30))
    result = stage_result(tmp_path, "reward_model")
    assert result["held_out"]["count"] == 120
    assert result["held_out"]["accuracy"] > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["preference", "reward_model"])
def test_a_stage_that_was_stopped_goes_on_to_the_same_weights(given: Path, tmp_path: Path, stage: str) -> None:
    """Stopped where its third checkpoint cannot be written: a file stands where the folder is to be."""
    data = write_rows(tmp_path, pairs(20))
    overrides = [*settings(stage, data, {}, steps=6), f"{stage}.held_out=4", f"{stage}.train.save_every=2"]
    run_tiny(given, *overrides)
    whole = (tmp_path / f"runs/tiny/{stage}/model/model.safetensors").read_bytes()
    (tmp_path / "runs/tiny").rename(tmp_path / "runs/whole")
    (tmp_path / "runs/tiny").mkdir()
    SqliteStore(tmp_path / "runs/tiny/store.sqlite").close()  # without a record, what stands there is another run's
    blocked = tmp_path / f"runs/tiny/{stage}/checkpoints/step-000004"
    blocked.parent.mkdir(parents=True)
    blocked.with_name(blocked.name + ".tmp").write_text("in the way")
    words = [word for override in overrides for word in ("--set", override)]
    assert main(["run", str(given), *words]) != 0
    assert len(stage_result(tmp_path, stage)["metrics"]) == 4
    blocked.with_name(blocked.name + ".tmp").unlink()
    run_tiny(given, *overrides)
    assert (tmp_path / f"runs/tiny/{stage}/model/model.safetensors").read_bytes() == whole


ONE = {"prompt": "a", "chosen": "b", "rejected": "c"}
BAD_ROWS = [
    ({"prompt": "a", "chosen": "b"}, "rows.jsonl:2: expected a column 'rejected'"),
    ({**ONE, "rejected": 3}, "rows.jsonl:2, rejected, messages: expected a list"),
    ({**ONE, "rejected": "b"}, "rows.jsonl:2: expected two different replies"),
    ({"chosen": "b", "rejected": "c"}, "rows.jsonl:2: expected a prompt"),
    ({**ONE, "margin": "big"}, "rows.jsonl:2, margin: expected a number"),
    ({**ONE, "prompt": "a" * 600}, "rows.jsonl:2: expected fewer tokens than the 512 positions of the model"),
]


@pytest.mark.parametrize(("row", "message"), BAD_ROWS, ids=[message.split(": ")[1][:40] for _, message in BAD_ROWS])
def test_a_row_that_cannot_be_trained_is_refused_first(given: Path, tmp_path: Path, capfd, row, message: str) -> None:
    data = write_rows(tmp_path, [ONE, row])
    words = [word for override in settings("preference", data, {}, steps=1)[:2] for word in ("--set", override)]
    assert main(["check", str(given), *words]) == 2
    assert message in capfd.readouterr().err


def test_contradicting_settings_are_refused(given: Path, tmp_path: Path, capfd) -> None:
    data = write_rows(tmp_path, [ONE, ONE])
    for overrides, message in (
        (
            ["preference.held_out=2"],
            "preference.held_out: expected prompts left to train on",
        ),
        (
            ["preference.loss.name=kto"],
            "preference.data: expected replies to at least two prompts",
        ),
        (["preference.loss.name=orpo", "preference.imitate=0"], "imitate must be above 0 with orpo"),
        (
            ["preference.loss.name=robust_dpo", "preference.loss.flip_rate=0.5"],
            "flip_rate must be 0 or more and below 0.5",
        ),
        (["run.stages=['preference', 'sft']"], "run.stages: expected sft -> preference"),
    ):
        words = [
            word
            for override in (*settings("preference", data, {}, steps=1)[:2], *overrides)
            for word in ("--set", override)
        ]
        assert main(["check", str(given), *words]) == 2
        assert message in capfd.readouterr().err


@pytest.mark.slow
def test_a_reward_model_of_the_run_scores_its_rollouts(given: Path, tmp_path: Path) -> None:
    """Preferences, then the reward model, then reinforcement learning on what it says."""
    data = write_rows(tmp_path, pairs(60))
    overrides = [*settings("reward_model", data, {}, steps=6), "run.stages=['reward_model', 'rl', 'eval']"]
    overrides += ["reward_model.held_out=4", "rl.reward_model=reward_model", "rl.reward_weight=2.0", "rl.steps=2"]
    run_tiny(given, *overrides)
    store = SqliteStore(tmp_path / "runs/tiny/store.sqlite", read_only=True)
    scores = [score for group in store.groups(stage="rl") for score in group.scores]
    held_out = store.get("eval/rl")
    result, input_of_rl = store.get("stage/rl"), store.get("stage/reward_model")["model"]
    store.close()
    assert scores and all(score.reward is not None and "reward_model" in score.parts for score in scores)
    assert len({score.parts["reward_model"] for score in scores}) > 1
    words = [word for override in overrides for word in ("--set", override)]
    assert (
        main(["eval", str(given), str(tmp_path / "runs/tiny/rl/model"), *words, "--json", str(tmp_path / "found.json")])
        == 0
    )
    [again] = json.loads((tmp_path / "found.json").read_text())["evaluations"]
    assert again["evaluation"]["reward"] == {**held_out["reward"], "interval": list(held_out["reward"]["interval"])}
    assert held_out["reward"]["value"] != held_out["success"]["value"]
    assert "score.weight" not in (Path(result["model"]) / "model.safetensors").read_bytes()[:20000].decode(
        errors="replace"
    )
    assert "score.weight" in (Path(input_of_rl) / "model.safetensors").read_bytes()[:20000].decode(errors="replace")


def judged_turns(count: int) -> list[dict[str, object]]:
    """Replies of low digits are right, those of high ones wrong, whatever stands before them."""
    draw, rows = random.Random(5), []
    for _ in range(count):
        labels = [draw.random() < 0.5 for _ in range(2)]
        messages = []
        for right in labels:
            messages.append({"role": "user", "content": f"{draw.randrange(10**4)} ?"})
            said = "".join(draw.choice("0123" if right else "6789") for _ in range(draw.randint(1, 4)))
            messages.append({"role": "assistant", "content": said})
        rows.append({"messages": messages, "labels": labels})
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("credit", ["process", "turn_level"])
def test_a_process_reward_model_of_the_run_scores_every_turn(given: Path, tmp_path: Path, credit: str) -> None:
    """Conversations with judged turns, then the reward model, then reinforcement learning on what it says of turns."""
    data = write_rows(tmp_path, judged_turns(160))
    overrides = [
        *settings("reward_model", data, {"name": "turns"}, steps=60),
        "run.stages=['reward_model', 'rl']",
        "rl.steps=2",
    ]
    overrides += ["rl.reward_model=reward_model", "rl.reward_by=turn", "rl.reward_weight=0.5", f"algo.credit={credit}"]
    run_tiny(given, *overrides)
    judged, result = stage_result(tmp_path, "reward_model"), stage_result(tmp_path, "rl")
    assert judged["held_out"]["count"] == 80 and judged["held_out"]["accuracy"] > 0.9
    store = SqliteStore(tmp_path / "runs/tiny/store.sqlite", read_only=True)
    members = [pair for group in store.groups(stage="rl") for pair in zip(group.rollouts, group.scores, strict=True)]
    store.close()
    for rollout, score in members:
        assert score.per_turn is not None and len(score.per_turn) == rollout.trajectories[0].usage.turns
        assert all(0.0 < earned < 0.5 for earned in score.per_turn)
        assert score.parts["reward_model"] == pytest.approx(2 * sum(score.per_turn) / len(score.per_turn))
        assert score.reward is not None and 0.0 <= score.reward - sum(score.per_turn) < 1.0 + 1e-9, "the world's own"
    assert len({earned for _, score in members for earned in score.per_turn or ()}) > len(members) / 2
    account = result["account"]
    assert account["trained"] > 0 and result["logprob_max_abs_diff"] == 0.0
    assert all(metrics["grad_norm"] > 0 for metrics in result["metrics"])


@pytest.mark.slow
@pytest.mark.parametrize("credit", ["process", "reinforce_plus_plus"])
def test_a_process_reward_model_of_the_run_scores_every_step(given: Path, tmp_path: Path, credit: str) -> None:
    """Solutions whose steps were judged, then reinforcement learning on what the model says of the steps inside each
    turn. What the tiny policy says has few lines: here a blank ends a step."""
    data, stages = write_rows(tmp_path, solutions(160)), "run.stages=['reward_model', 'rl']"
    overrides = [*settings("reward_model", data, {"name": "steps", "separator": '" "'}, steps=20), stages]
    overrides += [
        "rl.reward_model=reward_model",
        "rl.reward_by=step",
        "rl.steps=2",
        f"algo.credit={credit}",
        "rl.reward_weight=0.5",
    ]
    run_tiny(given, *overrides)
    store = SqliteStore(tmp_path / "runs/tiny/store.sqlite", read_only=True)
    members = [pair for group in store.groups(stage="rl") for pair in zip(group.rollouts, group.scores, strict=True)]
    store.close()
    for rollout, score in members:
        lengths = [len(s.tokens) for s in rollout.trajectories[0].segments if s.model is not None and s.tokens]
        assert score.per_step is not None and score.per_turn is not None and len(score.per_step) == len(lengths)
        for length, steps, earned in zip(lengths, score.per_step, score.per_turn, strict=True):
            assert all(0 < end <= length and 0.0 < reward < 0.5 for end, reward in steps)
            assert not steps or steps[-1][0] == length and earned == pytest.approx(sum(reward for _, reward in steps))
    assert max(len(steps) for _, score in members for steps in score.per_step or ()) > 1, "some turns have several"
    result = stage_result(tmp_path, "rl")
    assert result["account"]["trained"] > 0 and all(metrics["grad_norm"] > 0 for metrics in result["metrics"])


def test_turn_rewards_without_a_model_or_a_credit_for_them_are_refused(given: Path, tmp_path: Path, capfd) -> None:
    data = write_rows(tmp_path, judged_turns(4))
    stages = [
        f"reward_model.data={data}",
        "run.stages=['reward_model', 'rl']",
        "rl.reward_model=reward_model",
        "rl.reward_by=turn",
    ]
    turns = [*stages, "reward_model.loss=turns"]
    rules = "gae, gigpo, optimal_token_baseline, process, reinforce, reinforce_plus_plus, turn_level"
    for overrides, message in (
        (["rl.reward_by=turn"], 'reward_by = "turn" needs a reward_model that scores each'),
        (["rl.reward_separator=;", *turns], 'reward_separator must be left out unless reward_by = "step"'),
        (
            [*turns, "rl.reward_by=step", "algo.credit=process"],
            "rl.reward_by: expected a reward model trained on steps",
        ),
        (
            [*stages, "algo.credit=process"],
            "rl.reward_by: expected a reward model trained on turns",
        ),
        (
            turns,
            f'rl.reward_by: expected a credit that reads turn rewards with "turn" ({rules})',
        ),
        ([*turns, "rl.preference=dpo"], "got rl.preference"),
    ):
        words = [word for override in overrides for word in ("--set", override)]
        assert main(["check", str(given), *words]) == 2
        assert message in capfd.readouterr().err
    data.write_text("".join(json.dumps(row) + "\n" for row in solutions(4)))
    steps = [*stages, "reward_model.loss=steps", "rl.reward_by=step", "rl.reward_separator=;", "algo.credit=process"]
    assert main(["check", str(given), *(word for override in steps for word in ("--set", override))]) == 2
    assert "rl.reward_separator: expected none" in capfd.readouterr().err
    words = [
        word for override in (*stages, "algo.credit=process", "reward_model.loss=turns") for word in ("--set", override)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in judged_turns(4)))
    assert main(["check", str(given), *words]) == 0
    assert "rl: the stage reward_model scores every turn" in capfd.readouterr().out


def test_a_reward_model_is_named_and_fits(given: Path, checkpoint: Path, tmp_path: Path, capfd) -> None:
    (tmp_path / "other").mkdir()
    for name, text in (("config.json", (checkpoint / "config.json").read_text()), ("tokenizer.json", "{}")):
        (tmp_path / "other" / name).write_text(text)
    for overrides, message in (
        (["rl.reward_model=reward_model"], "rl.reward_model: expected a stage reward_model before rl"),
        (
            ["rl.reward_model=judge"],
            "rl.reward_model: expected one of reward_model, got 'judge'",
        ),
        (
            ["rl.reward_model=judge", f"models.judge.path={tmp_path / 'other'}"],
            "models.judge.path: expected the policy's tokenizer.json",
        ),
        (
            ["rl.reward_model=judge", f"models.judge.path={checkpoint}"],
            f"models.judge.path: {checkpoint / 'config.json'}: expected a checkpoint with a scalar head",
        ),
    ):
        words = [word for override in ("run.stages=['rl']", *overrides) for word in ("--set", override)]
        assert main(["check", str(given), *words]) == 2
        assert message in capfd.readouterr().err


@pytest.mark.parametrize("section", ["rl.reward_model=judge", "rl.critic.model=judge"])
def test_an_auxiliary_model_with_a_shorter_context_is_refused(
    given: Path, checkpoint: Path, tmp_path: Path, capfd, section: str
) -> None:
    shutil.copytree(checkpoint, tmp_path / "short")
    config = json.loads((tmp_path / "short/config.json").read_text())
    config |= {"max_position_embeddings": 511}
    if "reward" in section:
        config |= {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    (tmp_path / "short/config.json").write_text(json.dumps(config))
    overrides = ["run.stages=['rl']", f"models.judge.path={tmp_path / 'short'}", section]
    overrides += ['algo.preset="ppo"'] if "critic" in section else []
    assert main(["check", str(given), *(word for override in overrides for word in ("--set", override))]) == 2
    assert "models.judge.path: expected a model" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dpo", "simpo"])
def test_rollouts_are_compared_online(given: Path, tmp_path: Path, name: str) -> None:
    """The world rewards by length: what is trained is the best of a group against its worst, and at the first step
    policy and reference agree to the bit."""
    overrides = ["run.stages=['rl']", f"rl.preference={name}", "rl.steps=4", "rollout.group_size=4"]
    run_tiny(given, *overrides)
    result = stage_result(tmp_path, "rl")
    first, last = result["metrics"][0], result["metrics"][-1]
    assert result["logprob_max_abs_diff"] == 0.0
    assert ("loss_policy" in first, "loss_preference" in first) == (False, True)
    account = result["account"]
    assert account["trained"] > 0 and account["zero_advantage"] > 0
    assert account["sampled"] == sum(account[name] for name in ("trained", "filtered", "zero_advantage", "failed"))
    if name == "dpo":
        assert first["reward_chosen"] == first["reward_rejected"] == 0.0
    assert last["loss_preference"] != first["loss_preference"]


def test_contradicting_settings_of_online_comparisons_are_refused(given: Path, capfd) -> None:
    for overrides, message in (
        (["rl.preference=kto"], 'rl.preference.name: expected one of "dpo", "robust_dpo", "ipo", "simpo"'),
        (
            ["rl.preference=dpo", "algo.kl.coefficient=0.1"],
            "[algo]: expected neither kl nor entropy_bonus with rl.preference",
        ),
    ):
        words = [word for override in ("run.stages=['rl']", *overrides) for word in ("--set", override)]
        assert main(["check", str(given), *words]) == 2
        assert message in capfd.readouterr().err
