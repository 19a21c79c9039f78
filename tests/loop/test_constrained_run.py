"""A whole run whose rollouts are held to a text: trained exactly (law 2), replayed to the bit (law 8), refused by name
(law 10)."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sparring.cli.main import main
from sparring.render.tokenizer import load_tokenizer
from sparring.store.sqlite import SqliteStore
from sparring.types import Segment

PATTERN = "[0-9]{2,4}( or [a-z]{1,3})?"


def words(settings: tuple[str, ...]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def trained(recipe: Path, *settings: str) -> tuple[Path, list[Segment]]:
    """The folder of a run of two exact steps, and what was sampled for them; with this seed each has rewards that
    differ."""
    assert (
        main(
            [
                "run",
                str(recipe),
                *words(('run.stages=["rl"]', "rl.steps=2", "rl.train.save_every=1", "run.seed=2", *settings)),
            ]
        )
        == 0
    )
    folder = recipe.parent / "runs" / "tiny"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line["values"] for line in lines if line["stage"] == "rl" and "step" in line]
    assert len(steps) == 2 and all(values["tokens_trained"] > 0 for values in steps)
    assert [(values["logprob_max_abs_diff"], values["ratio"]) for values in steps] == [(0.0, 1.0)] * 2
    store = SqliteStore(folder / "store.sqlite", read_only=True)
    rollouts = [rollout for group in store.groups(stage="rl") for rollout in group.rollouts]
    store.close()
    return folder, [
        s for rollout in rollouts for trajectory in rollout.trajectories for s in trajectory.segments if s.model
    ]


def replayed(folder: Path, capsys: pytest.CaptureFixture[str], *rollouts: str) -> None:
    for rollout in rollouts or ("rl/0/0", "rl/3/2"):
        capsys.readouterr()
        assert main(["replay", str(folder), rollout]) == 0
        assert capsys.readouterr().out.endswith("identical, bit for bit\n")


def test_a_run_under_a_regular_expression(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    constraint = f'rollout.sampling.constraint={{kind="regex", source="{PATTERN}"}}'
    folder, turns = trained(given, constraint, "rollout.sampling.top_p=0.9")
    ended = [turn for turn in turns if turn.tokens[-1] in turn.sampling.stop]
    assert len(ended) > len(turns) / 2 and all(re.fullmatch(PATTERN, turn.message.content) for turn in ended)
    assert all(turn.sampling.constraint.source == PATTERN and turn.kept is not None for turn in turns)
    replayed(folder, capsys)


def test_a_run_with_stop_strings_bias_and_a_minimum(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = (
        'rollout.sampling.stop_strings=["e", "1"]',
        "rollout.sampling.min_turn_tokens=3",
        "rollout.sampling.logit_bias=[[300, -2.0], [68, 1.5]]",
    )
    folder, turns = trained(given, *settings)
    stopped = [
        turn for turn in turns if turn.tokens[-1] not in turn.sampling.stop and set("e1") & set(turn.message.content)
    ]
    assert stopped and all(turn.sampling.stop_strings == ("e", "1") for turn in turns)
    assert all(len(turn.tokens) >= 3 for turn in turns)
    replayed(folder, capsys)


WORDS = """
from sparring.envs.base import Env
from sparring.types import Score


class Words(Env):
    def generate(self, random):
        return {"prompt": f"Is {random.randint(0, 99)} even?"}

    async def score(self, trajectory):
        replies = [segment.message for segment in trajectory.segments if segment.model]
        return Score(reward=float(bool(replies) and all(reply.content in ("yes", "no") for reply in replies)))
"""


@pytest.mark.full
def test_a_run_that_thinks_before_its_constraint_earns_what_one_without_thoughts_does(
    given: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world, end = given.parent / "words.py", load_tokenizer(checkpoint).added_tokens["</think>"]
    world.write_text(WORDS)
    settings = (
        *('run.stages=["rl"]', "rl.steps=1", 'models.policy.renderer="qwen3.5"', f"env.name={world}:Words"),
        'rollout.sampling.constraint={kind="regex", source="(yes|no)"}',
        f"rollout.sampling.logit_bias=[[{end}, 9.0]]",  # an untrained policy never ends a thought
    )
    for thinking, where in (("false", ""), ("true", "behind its thought, ")):
        chosen = words((*settings, f"models.policy.thinking={thinking}"))
        assert main(["check", str(given), *chosen]) == 0
        assert f"rollout: {where}every reply is held to its regex" in capsys.readouterr().out
        assert main(["run", str(given), *chosen, "--set", f'run.name="{thinking}"']) == 0
        lines = (given.parent / "runs" / thinking / "metrics.jsonl").read_text().splitlines()
        [values] = [line["values"] for line in map(json.loads, lines) if line["stage"] == "rl" and "step" in line]
        assert values["rollout/reward"] == 1.0
    replayed(given.parent / "runs" / thinking, capsys, "rl/0/0", "rl/1/2")


REFUSED = {
    "rollout.sampling.stop_strings=['']": "expected",
    'rollout.sampling.constraint={kind="glob", source="*"}': "rollout.sampling.constraint.kind",
    'rollout.sampling.constraint={kind="regex"}': "rollout.sampling.constraint",
    "rollout.sampling.min_turn_tokens=13": "min_turn_tokens",
    "rollout.sampling.logit_bias=[[90000, 1.0]]": "[rollout]: expected each biased token once and below",
    "rollout.sampling.logit_bias=[[4, 1.0], [4, 2.0]]": "[rollout]: expected each biased token once",
}


@pytest.mark.parametrize("setting", REFUSED)
def test_what_cannot_be_asked_for_is_refused_before_the_run(
    given: Path, setting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(given), *words(('run.stages=["rl"]', setting))]) == 2
    assert REFUSED[setting] in capsys.readouterr().err


UNCOMPILED = {
    "regex": ("(a|b", "rollout.sampling.constraint: regex: expected one that compiles"),
    "json_schema": ('{"type": "nothing"}', "rollout.sampling.constraint: json schema: expected one that compiles"),
    "lark": ("start: nowhere", "rollout.sampling.constraint: lark: expected one that compiles"),
}


@pytest.mark.parametrize("kind", UNCOMPILED)
def test_a_constraint_that_does_not_compile_is_refused(
    given: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source, message = UNCOMPILED[kind]
    setting = f"rollout.sampling.constraint={{kind={json.dumps(kind)}, source={json.dumps(source)}}}"
    assert main(["check", str(given), *words(('run.stages=["rl"]', setting))]) == 2
    assert message in capsys.readouterr().err


ASKING = """

class Asking(Sums):
    async def open(self, task, box):
        said = await super().open(task, box)
        return type(said)(messages=said.messages, constraint=Constraint(kind="regex", source="(no end"))
"""


def test_a_world_that_asks_for_what_does_not_compile_is_refused(
    given: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = given.parent / "asking.py"
    begin, imports, rest = (Path(__file__).parent / "tiny_world.py").read_text().partition("from sparring.envs.base")
    world.write_text(f"{begin}from sparring.generation import Constraint\n{imports}{rest}{ASKING}")
    assert main(["check", str(given), *words(('run.stages=["rl"]', f"env.name={world}:Asking"))]) == 2
    said = capsys.readouterr().err
    assert "task " in said and ": constraint: regex: expected one that compiles" in said
