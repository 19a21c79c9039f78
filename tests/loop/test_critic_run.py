"""PPO with a critic: it learns what rollouts earn beside the policy, and both go on from a checkpoint to the same
bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.numpy import load_file

from sparring.cli.main import main
from sparring.store.sqlite import SqliteStore

SETTINGS = [
    "observe.progress=off",
    "rl.minibatches=2",
    "rl.passes=2",
    "algo.preset=ppo",
    "rl.critic.train.learning_rate=0.003",
    "rl.critic.warmup_steps=1",
]


def test_policy_and_critic_end_with_the_same_bits_after_a_resume(whole_and_resumed) -> None:
    (whole, resumed), metrics = whole_and_resumed(SETTINGS, ("model", "critic"))
    critic = Path(whole[0]["critic"])
    assert whole == resumed
    assert load_file(critic / "model.safetensors")["score.weight"].any(), "the head begins at zero and has learned"
    assert (critic / "tokenizer.json").is_file()
    warming, *later = metrics
    assert warming["tokens_trained"] == 0 and warming["critic/tokens_trained"] > 0
    assert "loss_policy" not in warming and warming["critic/value"] != warming["critic/return"]
    for values in later:
        assert values["critic/learning_rate"] == 0.003 and values["learning_rate"] == 0.001
        assert values["logprob_max_abs_diff"] == 0.0, "the weights that sampled are the trainer's, critic or not"
        assert values["optimiser_steps"] == 8, "two minibatches and two passes of each model"
    account = whole[0]["account"]
    assert (
        account["sampled"] == sum(account[name] for name in ("trained", "zero_advantage"))
        and account["zero_advantage"] > 0
    )
    # every sampled token that stays in the update teaches the critic, whatever its advantage, once a pass
    assert sum(values["critic/tokens_trained"] for values in metrics) == 2 * account["sampled"]


@pytest.mark.slow
def test_a_critic_of_another_run_goes_on_with_its_head(given: Path, tmp_path: Path) -> None:
    """VAPO; the first run's critic knows nothing at first, the second run's begins as what the first has become."""
    common = [
        "run.stages=['rl']",
        "algo.preset=vapo",
        "rl.steps=3",
        "rl.critic.train.learning_rate=0.01",
        "rl.critic.clip=0",
    ]
    first, second = tmp_path / "runs/first", tmp_path / "runs/second"
    others = [f"models.judge.path={first / 'rl/critic'}", "rl.critic.model=judge"]
    values = []
    for folder, overrides in ((first, common), (second, [*common, *others])):
        words = [word for override in (f"run.name={folder.name}", *overrides) for word in ("--set", override)]
        assert main(["run", str(given), *words]) == 0
        store = SqliteStore(folder / "store.sqlite", read_only=True)
        values.append([metrics for _, metrics in store.metrics("rl")])
        store.close()
    assert values[0][0]["critic/value"] == 0.0 and values[0][-1]["critic/value"] > 0.0
    assert values[1][0]["critic/value"] > 0.0 and values[1][0]["critic/loss_value"] < values[0][0]["critic/loss_value"]


def test_vapo_imitates_what_was_right(given: Path, tmp_path: Path) -> None:
    """About half of the rollouts of this world are right."""
    overrides = [
        "run.stages=['rl']",
        f"env.name={Path(__file__).parent / 'tiny_world.py'}:Chance",
        "algo.preset=vapo",
        "rl.steps=2",
    ]
    words = [
        word for override in (*overrides, "rl.critic.clip=0", "rl.train.save_every=0") for word in ("--set", override)
    ]
    assert main(["run", str(given), *words]) == 0
    store = SqliteStore(tmp_path / "runs/tiny/store.sqlite", read_only=True)
    first, groups = store.metrics("rl")[0][1], [group for group in store.groups(stage="rl") if group.index < 2]
    store.close()
    members = [pair for group in groups for pair in zip(group.rollouts, group.scores, strict=True)]
    assert {score.success for _, score in members} == {True, False}
    sampled = [
        s for r, score in members if score.success for t in r.trajectories for s in t.segments if s.model is not None
    ]
    logprobs = [logprob for segment in sampled for logprob in segment.logprobs or ()]
    assert first["loss_imitate"] == pytest.approx(-0.1 * sum(logprobs) / len(logprobs), rel=1e-5)


REFUSED = [
    (["algo.credit=gae"], "rl.critic: expected a table"),
    (["rl.critic.clip=0.2"], "rl.critic: expected no table"),
    (
        ["rl.critic.clip=0.2", "rl.preference.name=dpo"],
        "rl.critic: expected no table, because only credit 'gae' uses it",
    ),
    (["algo.preset=ppo", "rl.critic.model=reward_model"], "rl.critic.model: expected a stage reward_model before rl"),
    (
        ["algo.preset=vapo", "rl.critic.model=judge"],
        "rl.critic.model: expected one of policy",
    ),
    (["algo.preset=ppo", "rl.critic.warmup_steps=6"], "critic.warmup_steps must be below steps"),
    (["algo.preset=ppo", "rl.critic.train.learning_rat=1"], "rl.critic.train.learning_rat: expected one of"),
    (["algo.preset=ppo", "rl.critic.clip=-1"], "clip and warmup_steps must be 0 or more"),
    (
        ["algo.preset=ppo", "rl.critic.clip=0", "models.policy.lora.rank=4"],
        "rl.critic.model: expected weights without an adapter",
    ),
    (
        ["algo.right_answers.coefficient=0.1", "rl.observations=0.05"],
        "algo.right_answers: expected none with rl.observations",
    ),
    (
        ["algo.right_answers.coefficient=0.1", "rl.preference.name=dpo"],
        "algo.right_answers: expected none with rl.preference",
    ),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=[" ".join(overrides) for overrides, _ in REFUSED])
def test_contradicting_settings_are_refused(given: Path, capfd, overrides: list[str], message: str) -> None:
    words = [word for override in ("run.stages=['rl']", *overrides) for word in ("--set", override)]
    assert main(["check", str(given), *words]) == 2
    assert message in capfd.readouterr().err
