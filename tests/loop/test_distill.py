"""The distill stage on real parts: a student gets closer to its teachers, is continued to the bit, and is refused what
makes no sense."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file

from sparring.batch.flatten import flatten
from sparring.cli.main import main
from sparring.errors import BadInput
from sparring.launch.run import opened
from sparring.model.attention import Packed
from sparring.model.divergence import from_teacher
from sparring.model.head import TargetRows
from sparring.model.load import load
from sparring.protocols import Divergence
from sparring.recipe.load import load as read
from sparring.recipe.run_config import resolve
from sparring.render.train_tokenizer import MIN_VOCAB_SIZE, train_tokenizer
from sparring.stages.models.teacher import TeacherUse
from sparring.store.sqlite import SqliteStore


def recipe(given: Path, models: dict[str, Path], routes: str) -> Path:
    """The tiny recipe with teachers."""
    out = given.with_name("distil.toml")
    sections = "".join(f'\n[models.{name}]\npath = "{path}"\n' for name, path in models.items())
    out.write_text(given.read_text() + sections + f"\n[distill]\nteachers = {routes}\n")
    return out


def words(*settings: str) -> list[str]:
    basis = ('run.stages=["distill"]', "distill.steps=6", "distill.groups_per_step=4", "observe.progress=off")
    return [word for setting in (*basis, *settings) for word in ("--set", setting)]


def distill_metrics(
    given: Path, models: dict[str, Path], *settings: str, routes: str = '{ "*" = "teacher" }'
) -> list[dict[str, float]]:
    """Run the stage; the metrics of its steps."""
    assert main(["run", str(recipe(given, models, routes)), *words(*settings)]) == 0
    lines = (given.parent / "runs/tiny/metrics.jsonl").read_text().splitlines()
    return [found["values"] for line in lines if (found := json.loads(line))["stage"] == "distill" and "step" in found]


@pytest.fixture(scope="session")
def teacher(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, taught by the world's expert until it is sure of what it says."""
    folder = tmp_path_factory.mktemp("teacher")
    text = (Path(__file__).parent / "tiny.toml").read_text()
    head, rest = text.split("[models.policy.init]")
    world = Path(__file__).parent / "tiny_world.py:Sums"
    text = f'{head}[models.policy]\npath = "{checkpoint}"\n\n[env]{rest.partition("[env]")[2]}'.replace(
        "tests/loop/tiny_world.py:Sums", str(world)
    )
    (folder / "teach.toml").write_text(text)
    settings = (
        'run.stages=["sft"]',
        f"run.directory={folder}",
        "sft.steps=80",
        "sft.rows_per_step=8",
        "observe.progress=off",
    )
    settings += ("sft.train={learning_rate=1e-2, save_every=0}",)
    assert (
        main(["run", str(folder / "teach.toml"), *(word for setting in settings for word in ("--set", setting))]) == 0
    )
    return folder / "tiny/sft/model"


def gap(given: Path, teacher: Path, folder: Path) -> float:
    """KL(model in `folder` || teacher), a mean over what the first step's rollouts sampled: states that stay the
    same."""
    model, judge = load(str(folder)), load(str(teacher))
    with closing(SqliteStore(given.parent / "runs/tiny/store.sqlite")) as store:
        groups = [group for group in store.groups(stage="distill") if group.index < 4]
    found = []
    for row in [row for group in groups for row in flatten(group, "policy")]:
        tokens = torch.tensor(row.tokens)
        where = Packed(torch.tensor([0, len(tokens)], dtype=torch.int32))
        places = torch.tensor([place - 1 for place, weight in enumerate(row.weights["policy"]) if weight])
        with torch.no_grad():
            ours, theirs = (each.hidden(tokens, torch.arange(len(tokens)), where, places) for each in (model, judge))
            found.append(
                from_teacher(
                    model,
                    ours,
                    judge,
                    theirs,
                    TargetRows(tokens[places + 1], torch.ones(len(places)), None, None),
                    Divergence(),
                )
            )
    return torch.cat(found).mean().item()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bound", "settings"),
    [
        (0.95, ("distill.steps=60",)),
        (
            0.95,
            (
                "distill.steps=60",
                'distill.estimator="squared"',
                'distill.aggregation="sequence_mean"',
                "rollout.max_lag=1",
            ),
        ),
        (0.8, ("distill.steps=40", 'distill.over="top_k"', "distill.top_k=64")),
        (0.8, ("distill.steps=20", 'distill.over="vocabulary"', 'distill.divergence="forward"')),
        (0.8, ("distill.steps=12", 'distill.over="vocabulary"', 'distill.divergence="jensen_shannon"')),
    ],
)
def test_a_student_gets_closer_to_a_trained_teacher(
    given: Path, teacher: Path, checkpoint: Path, bound: float, settings: tuple[str, ...]
) -> None:
    """Over states that stay the same; those that the student samples become harder as it learns how to get there."""
    steps = distill_metrics(given, {"teacher": teacher}, "distill.train={learning_rate=5e-3}", *settings)
    before, after = (gap(given, teacher, folder) for folder in (checkpoint, given.parent / "runs/tiny/distill/model"))
    assert after < bound * before
    assert all(step["logprob_max_abs_diff"] == 0.0 for step in steps if "logprob_max_abs_diff" in step)


@pytest.mark.slow
def test_a_teacher_of_another_tongue_teaches(given: Path, teacher: Path, checkpoint: Path, tmp_path: Path) -> None:
    """One domain has a teacher that reads the student's tokens, the other one that has to be told in bytes."""
    other = tmp_path / "other"
    shutil.copytree(teacher, other)
    train_tokenizer([], MIN_VOCAB_SIZE, other)
    settings = (
        "distill.train={learning_rate=3e-3}",
        "distill.steps=8",
        'distill.tokenizers="any"',
        "distill.observations=0.1",
    )
    steps = distill_metrics(
        given, {"teacher": teacher, "other": other}, *settings, routes='{ even = "teacher", "*" = "other" }'
    )
    assert all(step["distill_gap"] > 0 for step in steps)
    assert gap(given, teacher, given.parent / "runs/tiny/distill/model") != gap(given, teacher, checkpoint)


@pytest.mark.slow
def test_the_policy_teaches_itself_what_a_success_tells(given: Path, teacher: Path) -> None:
    world = Path(__file__).parent / "tiny_world.py:Chance"
    settings = (
        f"models.policy.path={teacher}",
        f"env.name={world}",
        'distill.feedback="sibling"',
        'distill.over="top_k"',
    )
    steps = distill_metrics(given, {}, *settings, routes='{ "*" = "policy" }')
    assert any(step["rollout/success"] > 0 for step in steps), "else nobody is told anything"
    assert any(step["divergence"] > 0 for step in steps)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["teacher", "average"])
def test_a_killed_run_ends_with_the_same_bits(given: Path, teacher: Path, name: str, killed_and_finished) -> None:
    settings = ('distill.over="top_k"', "distill.train={learning_rate=3e-3, save_every=2}", "observe.progress=plain")
    if name == "average":
        world = Path(__file__).parent / "tiny_world.py:Chance"
        settings += (
            f"models.policy.path={teacher}",
            f"env.name={world}",
            'distill.feedback="sibling"',
            "distill.decay=0.5",
        )
    models = {"teacher": teacher} if name == "teacher" else {}
    asked = str(recipe(given, models, f'{{ "*" = "{name}" }}'))

    def line(folder: str, *more: str) -> list[str]:
        return [
            "run",
            asked,
            *words(*settings, "observe.lines_every_s=0", f"run.directory={given.parent / folder}", *more),
        ]

    def weights(folder: str) -> dict[str, bytes]:
        found = load_file(given.parent / folder / "tiny/distill/model/model.safetensors")
        return {tensor: values.tobytes() for tensor, values in found.items()}

    assert main(line("whole")) == 0
    killed_and_finished(line("killed"), ["distill 3/6"])
    assert weights("killed") == weights("whole")
    if name == "average":
        assert main(line("itself", 'distill.teachers={"*"="policy"}')) == 0
        assert weights("itself") != weights("whole"), "the average is not what is served"


def test_it_is_evaluated_beside_its_training(given: Path, checkpoint: Path) -> None:
    distill_metrics(given, {"teacher": checkpoint}, "eval.every=3", "eval.every_tasks=6")
    with closing(SqliteStore(given.parent / "runs/tiny/store.sqlite")) as store:
        found = dict(store.metrics("distill/eval"))
        groups = [len(list(store.groups(stage=f"distill/eval/{step}"))) for step in found]
    assert max(found) == 6 and all(values["tasks"] == 6 for values in found.values()) and set(groups) == {6}


@pytest.mark.full
def test_a_world_that_only_a_second_pass_scores_is_distilled(given: Path, checkpoint: Path) -> None:
    """Nothing leaves its group unscored, and the account says that all was trained."""
    world = Path(__file__).parent / "tiny_world.py:Compared"
    settings = (
        f"env.name={world}",
        "distill.steps=1",
        "distill.groups_per_step=1",
        "rollout.sampling.max_turn_tokens=4",
    )
    [step] = distill_metrics(given, {"teacher": checkpoint}, *settings)
    with closing(SqliteStore(given.parent / "runs/tiny/store.sqlite")) as store:
        groups, result = list(store.groups(stage="distill")), store.get("stage/distill")
    assert [[score.reward for score in group.scores] for group in groups] == [[0.0, 1.0, 2.0]]
    assert not any(group.failed for group in groups) and step["rollout/reward"] == 1.0
    assert result["account"]["trained"] == result["account"]["sampled"] > 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("distill.teachers={}",), "distill.teachers: expected at least one teacher"),
        (('distill.teachers={odd="nobody"}',), "distill.teachers.odd: expected a model of the recipe"),
        (('distill.teachers={"*"="policy"}',), "a teacher that has more information than the policy"),
        (
            ('distill.teachers={"*"="average"}', 'distill.over="vocabulary"'),
            "a teacher that has more information than the policy",
        ),
        (('distill.teachers={"*"="average"}', "models.average.path=there"), "models.average: expected another name"),
        (('distill.teachers={"*"="bytes"}',), "models.bytes.path: expected a teacher with the student's tokenizer"),
        (
            ("eval.teachers=true", 'eval.checkpoints=["init"]'),
            'eval.checkpoints: expected "distill", to compare it with its teachers',
        ),
        (("eval.teachers=true", 'run.stages=["init"]'), "eval.teachers: expected a stage distill"),
        (("models.teacher.thinking=true",), "models.teacher.thinking: expected false, as of models.policy"),
        (("models.teacher.renderer=template",), "models.teacher.renderer: expected 'auto', as of models.policy"),
        (("rollout.sampling.top_p=0.9",), "rollout.sampling.top_p: expected its default while the run distils"),
        (("rollout.sampling.min_turn_tokens=2",), "rollout.sampling.min_turn_tokens: expected its default"),
        (
            ('models.teacher.served={url="http://127.0.0.1:1/v1"}', 'distill.over="vocabulary"'),
            'a teacher on this machine with distill.over = "vocabulary"',
        ),
        (
            ('models.teacher.served={url="http://a/v1"}', "rollout.sampling.temperature=0.7"),
            "rollout.sampling.temperature: expected 1",
        ),
        (
            ('models.teacher.served={kind="chat", url="http://a/v1", served_model="m"}',),
            "a server that scores token ids",
        ),
        (
            ('models.teacher.served={url="http://a/v1", api_key_env="NO_SUCH_KEY"}',),
            "environment variable NO_SUCH_KEY: expected an API key",
        ),
    ],
)
def test_contradicting_settings_are_refused(
    given: Path, checkpoint: Path, tmp_path: Path, settings: tuple[str, ...], said: str
) -> None:
    other = tmp_path / "bytes"
    shutil.copytree(checkpoint, other)
    train_tokenizer([], MIN_VOCAB_SIZE, other)
    file = recipe(given, {"teacher": checkpoint, "bytes": other}, '{ "*" = "teacher" }')

    async def check_lines() -> list[str]:
        async with opened(resolve(read(file, words(*settings)[1::2]))) as context:
            return TeacherUse().check(context)

    with pytest.raises(BadInput, match=re.escape(said)):
        asyncio.run(check_lines())


def test_what_makes_sense_is_said(given: Path, checkpoint: Path) -> None:
    file = recipe(given, {"teacher": checkpoint}, '{ odd = "teacher" }')

    async def check_lines() -> list[str]:
        async with opened(resolve(read(file, words()[1::2]))) as context:
            return TeacherUse().check(context)

    assert asyncio.run(check_lines()) == ["distill: reverse over token; teachers: teacher for odd"]


OTHER = (
    "{%- for m in messages %}{{ m.role|upper }}: {{ m.content }}<|im_end|>\n{%- endfor %}"
    "{%- if add_generation_prompt %}ASSISTANT: {% endif %}"
)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ((), "distill: warning: the chat template of teacher writes another prompt than the student's, 'USER"),
        (('models.teacher.served={url="http://a/v1"}',), "the chat template of teacher writes another prompt"),
        (('distill.tokenizers="any"', "models.teacher.thinking=true"), ""),
        (("eval.teachers=true", "models.teacher.thinking=true", 'eval.checkpoints=["distill"]'), "writes another"),
    ],
)
def test_a_teacher_of_another_format_is_told(
    given: Path, checkpoint: Path, tmp_path: Path, settings: tuple[str, ...], said: str
) -> None:
    """Where it judges the student's prompts; not where it reads its own."""
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    (other / "chat_template.jinja").write_text(OTHER)
    file = recipe(given, {"teacher": other}, '{ "*" = "teacher" }')

    async def check_lines() -> list[str]:
        async with opened(resolve(read(file, words(*settings)[1::2]))) as context:
            return TeacherUse().check(context)

    facts = asyncio.run(check_lines())
    assert said in facts[-1] and len(facts) == (2 if said else 1)
