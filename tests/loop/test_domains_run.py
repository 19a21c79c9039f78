"""A recipe of several environments, start to finish: what is refused, and a run that is killed and gone on with."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from conftest import WORLD
from virtual import on_event_loop

from sparring.cli.main import main
from sparring.errors import BadInput
from sparring.recipe.load import load
from sparring.recipe.run_config import dump, resolve

TABLES = f"""
[envs.sums]
name = "{WORLD}"
held_out = 6
demonstrations = 8
weight = 3
places = 4
reward_scale = 2.0
limits = {{ max_turns = 2, max_tokens = 24 }}

[envs.chance]
name = "{str(WORLD).replace("Sums", "Chance")}"
held_out = 6
demonstrations = 8
limits = {{ max_turns = 1, max_tokens = 12 }}
pools = {{ keep_easy = 0.5 }}
"""


@pytest.fixture
def several(given: Path) -> Path:
    """The tiny recipe on two environments."""
    head, _, rest = given.read_text().partition("[env]")
    given.write_text(head + TABLES + rest[rest.index("[sft]") :])
    return given


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[envs.chance]", "[envs.sums]", "expected TOML"),
        ("weight = 3", "weight = -1", "weight must be 0 or more"),
        ("places = 4", "places = 0", "places must be at least 1"),
        ("[envs.chance]", '[envs."a/b"]', "names of letters, digits, _ and -"),
        (
            "[envs.chance]",
            '[env]\nname = "x"\n[envs.chance]',
            "exactly one of .env. and .envs.<name>. must be given, got both",
        ),
    ],
)
def test_invalid_environment_tables_are_refused(several: Path, old: str, new: str, message: str) -> None:
    several.write_text(several.read_text().replace(old, new))
    with pytest.raises(BadInput, match=message):
        load(several)


def test_weights_that_sum_to_nothing_are_refused(several: Path) -> None:
    with pytest.raises(BadInput, match="a weight above 0 in one of them"):
        load(several, ["envs.sums.weight=0", "envs.chance.weight=0"])


ASKS = """
from sparring import Env
from sparring.types import Observation, ToolSpec


class Asks(Env):
    def generate(self, random):
        return {"prompt": "Look it up.", "words": random.randint(1, 99)}

    def key(self, task):
        return str(task.data["words"])

    @property
    def tools(self):
        words = 0 if self._task is None else self._task.data["words"]
        spec = ToolSpec(name="look", description="deep " * words, parameters={"type": "object", "properties": {}})
        return (spec,) if words else ()

    async def step(self, reply):
        return Observation(done=True)

    def reward(self, completion, task):
        return float(completion == "nothing")
"""


def test_prompts_of_every_environment_are_measured_with_their_tools(
    several: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The longest of a hundred tasks, each of which has tools of its own, in the second environment of two."""
    (tmp_path / "asks.py").write_text(ASKS)
    text = several.read_text()
    several.write_text(text.replace(str(WORLD).replace("Sums", "Chance"), f"{tmp_path}/asks.py:Asks"))
    assert main(["check", str(several), "--set", 'run.stages=["rl"]']) == 0, capsys.readouterr()
    said = capsys.readouterr().out
    found = re.search(r"context: prompts of up to (\d+) tokens leave", said)
    assert found is not None and int(found[1]) > 90
    assert [said.count(f"env: {name} opens and does not reward") for name in ("sums", "chance")] == [1, 1]


def test_no_environment_is_refused(several: Path) -> None:
    text = several.read_text()
    several.write_text(text.replace(TABLES, ""))
    with pytest.raises(BadInput, match="exactly one of .env. and .envs.<name>. must be given, got none"):
        load(several)


def test_a_config_of_several_environments_is_dumped_and_read_again(several: Path, tmp_path: Path) -> None:
    config = resolve(load(several))
    (tmp_path / "again.toml").write_text(dump(config))
    assert load(tmp_path / "again.toml") == config


@on_event_loop
async def test_a_run_of_several_environments(several: Path) -> None:
    from sparring.launch.run import opened, run_recipe

    settings = ["rl.groups_per_step=4", "rl.steps=4", "run.stages=['rl', 'eval']", "eval.every=2", "eval.every_tasks=4"]
    folder = run_recipe(load(several, [*settings, "eval.no_tool_tasks=0"]))
    summary = json.loads((folder / "summary.json").read_text())
    assert summary
    async with opened(resolve(load(folder / "config.toml"))) as context:
        groups = list(context.store.groups(stage="rl"))
        assert Counter(group.task.env for group in groups) == {"sums": 12, "chance": 4}
        assert {len(t.segments) > 0 for g in groups for r in g.rollouts for t in r.trajectories} == {True}
        assert {g.task.limits.max_turns for g in groups if g.task.env == "chance"} == {1}
        told = [values for _, values in context.store.metrics("rl")]
        assert all({"rollout/sums/share", "rollout/chance/reward"} <= values.keys() for values in told)
        rewards = {score.reward for group in groups if group.task.env == "sums" for score in group.scores}
        assert max(reward for reward in rewards if reward is not None) > 0.6  # doubled: alone at most 0.6
