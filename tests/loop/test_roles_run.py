"""A recipe names its harness, and a world its roles: through the real stages, resume, replay and the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from chat_server import ChatServer, message

from sparring.cli.main import main
from sparring.store.sqlite import SqliteStore
from sparring.types import Rollout

ROOT = Path(__file__).parents[2]
DUEL, PANEL = ROOT / "recipes/duel/world.py", Path(__file__).parent / "panel_world.py"
GAME = (f"env.name={DUEL}:Duel", f"rollout.harness={DUEL}:play", "algo.preset=spiral")
ASKED = (f"env.name={PANEL}:Panel", f"rollout.harness={PANEL}:ask_the_panel")


def sparring(verb: str, *words: str | Path, settings: tuple[str, ...] = ()) -> int:
    return main([verb, *map(str, words), *(word for setting in settings for word in ("--set", setting))])


def stored_rollouts(folder: Path, stage: str) -> list[Rollout]:
    with closing(SqliteStore(folder / "store.sqlite", read_only=True)) as store:
        return [rollout for group in store.groups(stage=stage) for rollout in (*group.rollouts, *group.failed)]


@pytest.fixture(scope="module")
def duel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The game's recipe, a few steps of each stage; its folder."""
    folder = tmp_path_factory.mktemp("runs")
    small = ("sft.steps=3", "rl.steps=2", "rl.groups_per_step=2", "env.held_out=6", "env.demonstrations=40")
    more = ("eval.tasks=6", "rollout.group_size=3", "rl.train.save_every=1", "train.keep_last=3")
    files = (f"run.directory={folder}", "observe.progress=off", "run.threads=1", *GAME[:2])
    assert sparring("run", ROOT / "recipes/duel.toml", settings=(*small, *more, *files)) == 0
    return folder / "duel"


def test_every_stage_knows_the_roles_of_the_world(duel: Path) -> None:
    for stage in ("rl", "eval/rl"):
        rollouts = stored_rollouts(duel, stage)
        assert len(rollouts) == (12 if stage == "rl" else 6)
        assert {tuple(t.role for t in rollout.trajectories) for rollout in rollouts} == {("proposer", "solver")}
    with closing(SqliteStore(duel / "store.sqlite", read_only=True)) as store:
        (_, first), (_, second) = store.metrics("rl")
        checkpoint = store.last_checkpoint("rl")
        evaluated = store.get("stage/eval")["rl"]["by_role"]
    assert {"rollout/reward/proposer", "rollout/reward/solver"} <= first.keys() & second.keys()
    assert checkpoint is not None and set(checkpoint[1]["credit"]["averages"]) == {"Duel/proposer", "Duel/solver"}
    assert set(evaluated) == {"proposer", "solver"} and evaluated["solver"]["tasks"] == 6


def test_a_rollout_of_several_roles_is_replayed_to_the_bit(duel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sparring("replay", duel, "rl/2/1") == 0
    assert "rl/2/1: 2 turns" in capsys.readouterr().out


def test_eval_tells_what_each_role_earns(duel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints = (duel / "sft/model", duel / "rl/model")
    settings = (f"run.directory={duel.parent}", "env.held_out=6", "eval.tasks=6", "observe.progress=off", *GAME[:2])
    assert sparring("eval", ROOT / "recipes/duel.toml", *checkpoints, settings=settings) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("reward/")] == ["reward/proposer", "reward/solver"] * 3


@pytest.mark.full
def test_a_game_that_was_stopped_ends_as_if_it_never_was(whole_and_resumed: Callable[..., Any]) -> None:
    (whole, resumed), _ = whole_and_resumed([*ASKED, "algo.preset=spiral"], ["model"])
    assert whole == resumed and whole[0]["account"]["trained"] > 0


def test_solvers_are_compared_inside_their_rollout(given: Path) -> None:
    settings = (*ASKED, "run.stages=['rl']", "rl.steps=1", "algo.credit.name=hierarchical")
    assert sparring("run", given, settings=settings) == 0
    roles = ("proposer", "solver/0", "solver/1")
    rollouts = stored_rollouts(given.parent / "runs/tiny", "rl")
    assert {tuple(t.role for t in rollout.trajectories) for rollout in rollouts} == {roles}
    with closing(SqliteStore(given.parent / "runs/tiny/store.sqlite", read_only=True)) as store:
        scores = [score for group in store.groups(stage="rl") for score in group.scores]
        ((_, metrics),) = store.metrics("rl")
    assert scores and all(score.per_role_turns == dict.fromkeys(roles, (0.1,)) for score in scores)
    assert metrics["tokens_trained"] > 0


def test_a_class_is_a_harness_of_every_stage(given: Path) -> None:
    settings = (
        f"rollout.harness={PANEL}:AskForBrevity",
        "run.stages=['sft', 'rl', 'eval']",
        "sft.steps=2",
        "rl.steps=1",
    )
    assert sparring("run", given, settings=(*settings, "eval.no_tool_tasks=0")) == 0
    rollouts = [
        rollout for stage in ("rl", "eval/rl") for rollout in stored_rollouts(given.parent / "runs/tiny", stage)
    ]
    told = [trajectory.segments[0].message for rollout in rollouts for trajectory in rollout.trajectories]
    assert {message.content for message in told if message is not None} == {"Be brief."}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (("rollout.harness=chess",), "rollout.harness: expected one of chat, claude-code, codex"),
        (("rollout.harness=no_file.py:play",), "rollout.harness: expected a Python file"),
        (("rollout.harness=no_module_here:play",), "rollout.harness: expected an installed module no_module_here"),
        ((f"rollout.harness={PANEL}:Panel",), "rollout.harness: expected a coroutine function"),
        (
            (f"rollout.harness={PANEL}:ask_nobody",),
            "rollout.harness: expected a harness that requests its replies from the session",
        ),
        (
            (f"rollout.harness={PANEL}:ask_a_stranger",),
            "episode.session: expected a role",
        ),
        (
            (*GAME, "env.held_out=6", "rl.reward_model=judge"),
            "rl.reward_model: expected none",
        ),
        ((f"env.name={PANEL}:Twins",), "env Twins: roles: expected roles"),
        (
            (f"env.name={PANEL}:Panel",),
            "environment Panel, task Panel/",
        ),
    ],
)
def test_harnesses_and_rewards_that_do_not_fit_the_roles_are_refused(
    given: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str], settings: tuple[str, ...], expected: str
) -> None:
    for verb, words in (("check", (given,)), ("run", (given,)), ("eval", (given, checkpoint))):
        assert sparring(verb, *words, settings=(*settings, "observe.progress=off")) == 2
        out, error = capsys.readouterr()
        assert out == "" and error.startswith(expected)
    assert not (given.parent / "runs/tiny/config.toml").exists()


def plays(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Proposes as asked, and says the smaller number where the first is even."""
    words = body["messages"][-1]["content"].rstrip(".?").split()
    if words[0] == "Two":
        low = int(words[3])
        return message(f"{low} {low + 1}" if (2 * low + 1) % 10 != 7 else f"{low} {low + 2}")
    first, second = int(words[0]), int(words[2])
    return message(str(max(first, second) if first % 2 else min(first, second)))


def test_collection_keeps_the_conversation_of_each_role(given: Path) -> None:
    server = ChatServer(lambda body: message(".") if body["max_tokens"] == 1 else plays(body))
    try:
        served = f'\n[models.teacher]\nserved = {{ kind = "chat", url = "{server.url}", served_model = "big" }}\n'
        given.write_text(given.read_text() + served + "\n[collect]\ntasks = 12\n")
        settings = (*GAME, "env.held_out=6", "env.limits.max_turns=1", "run.stages=['collect']")
        assert sparring("run", given, settings=settings) == 0
    finally:
        server.stop()
    rows = [json.loads(line) for line in (given.parent / "runs/tiny/collect/traces.jsonl").read_text().splitlines()]
    by_role = {role: [row for row in rows if row["role"] == role] for role in ("proposer", "solver")}
    assert len(by_role["proposer"]) == 12 > len(by_role["solver"]) > 0, "each role's own reward decides"
    for role, words in (("proposer", "Two numbers from"), ("solver", " or ")):
        for row in by_role[role]:
            asked, reply = row["messages"]
            assert words in asked["content"] and reply["role"] == "assistant" and row["reward"] == 1.0


@pytest.mark.full
def test_collection_leaves_out_the_roles_of_other_models(given: Path, checkpoint: Path) -> None:
    server = ChatServer(lambda body: message(".") if body["max_tokens"] == 1 else plays(body))
    try:
        opponent(given, checkpoint, solver="opponent")
        served = f'\n[models.teacher]\nserved = {{ kind = "chat", url = "{server.url}", served_model = "big" }}\n'
        given.write_text(given.read_text() + served + "\n[collect]\ntasks = 4\n")
        settings = (*GAME, "env.held_out=6", "env.limits.max_turns=1", "run.stages=['collect']")
        assert sparring("run", given, settings=settings) == 0
    finally:
        server.stop()
    rows = [json.loads(line) for line in (given.parent / "runs/tiny/collect/traces.jsonl").read_text().splitlines()]
    assert [row["role"] for row in rows] == ["proposer"] * 4


def opponent(given: Path, checkpoint: Path, **roles: str) -> None:
    """Give the recipe other models, and roles that are theirs."""
    table = "".join(f'"{role.replace("_", "/")}" = "{name}"\n' for role, name in roles.items())
    given.write_text(
        f'''{given.read_text()}
[models.opponent]
path = "{checkpoint}"

[models.far]
path = "{checkpoint}"
served = {{ kind = "chat", url = "http://127.0.0.1:9", served_model = "big" }}

[models.bare.init]
hidden_size = 32

[rollout.roles]
{table}'''
    )


def test_another_model_speaks_for_a_role(given: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opponent(given, checkpoint, solver_1="opponent")
    settings = (*ASKED, "algo.preset=spiral", "run.stages=['rl', 'eval']", "eval.no_tool_tasks=0", "rl.steps=2")
    assert sparring("run", given, settings=(*settings, "rl.train.save_every=1", "rl.train.keep_last=2")) == 0
    assert "opponent speaks for the role solver/1" in capsys.readouterr().out
    run = given.parent / "runs/tiny"
    sampled = dict.fromkeys(("policy", "opponent"), 0)
    for stage in ("rl", "eval/rl"):
        for rollout in stored_rollouts(run, stage):
            models = {t.role: {s.model for s in t.segments} - {None} for t in rollout.trajectories}
            assert models == {"proposer": {"policy"}, "solver/0": {"policy"}, "solver/1": {"opponent"}}
            for segment in (s for t in rollout.trajectories for s in t.segments if s.model and stage == "rl"):
                sampled[str(segment.model)] += len(segment.tokens)
    with closing(SqliteStore(run / "store.sqlite", read_only=True)) as store:
        trained = sum(metrics["tokens_trained"] for _, metrics in store.metrics("rl"))
        versions = store.get("stage/eval")["rl"]["versions"]
    assert trained == sampled["policy"] and sampled["opponent"] > 0
    assert versions == [0, 0], "an evaluation tells the versions of the policy"
    assert sparring("replay", run, "rl/2/1") == 0
    out = capsys.readouterr().out
    assert "rl/2/1: 2 turns" in out and "role solver/1: another model than the policy spoke" in out


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        (
            {"judge": "opponent"},
            "rollout.roles.judge: expected a role of the environment (proposer, solver/0, solver/1)",
        ),
        (
            {"proposer": "nobody"},
            "rollout.roles.proposer: expected a model of the recipe (bare, far, opponent, policy)",
        ),
        ({"proposer": "bare"}, "models.bare.path: expected the checkpoint that speaks for rollout.roles.proposer"),
        ({"proposer": "far"}, "models.far.served.kind: expected a server"),
        (
            dict.fromkeys(("proposer", "solver_0", "solver_1"), "opponent"),
            "rollout.roles: expected a role",
        ),
    ],
)
def test_a_role_that_no_model_serves_is_refused(
    given: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str], roles: dict[str, str], expected: str
) -> None:
    opponent(given, checkpoint, **roles)
    for verb, words in (("check", ()), ("run", ()), ("eval", (checkpoint,))):
        assert sparring(verb, given, *words, settings=(*ASKED, "run.stages=['rl']", "observe.progress=off")) == 2
        out, error = capsys.readouterr()
        assert out == "" and error.startswith(expected)


@pytest.mark.slow
def test_both_roles_learn_and_neither_does_with_rewards_swapped(tmp_path: Path) -> None:
    """One seed of the benchmark, a minute."""
    command = [sys.executable, str(ROOT / "benchmarks/roles.py"), "--seeds", "1", "--directory", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=1000)
    claims = json.loads(done.stdout.splitlines()[-1])["claims"]
    assert [claim["direction"] for claim in claims] == [">=", ">=", "<=", "<="]
    for claim in claims:
        assert (claim["value"] > claim["target"]) == (claim["direction"] == ">="), claim["name"]
