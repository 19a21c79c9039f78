"""Preflight: everything that can be wrong is found here, not half an hour in. Trains nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from sparring.engine.config import EngineConfig
from sparring.errors import refusal
from sparring.model.outline import Outline
from sparring.rollout.window import check_window
from sparring.sandbox.check import check_sandbox
from sparring.stages.context import ORDER, POLICY, TOLD, Context
from sparring.stages.data.contamination import check_unseen_files
from sparring.stages.data.demonstrations import Conversation, demonstrate, given_conversations
from sparring.stages.data.preferences import check_compared
from sparring.stages.models.adapters import check_lora
from sparring.stages.models.critic import check_critic
from sparring.stages.models.implicit_reward import check_implicit
from sparring.stages.models.objective import check_imitation, check_online
from sparring.stages.models.reference import check_reference
from sparring.stages.models.reward_scorers import check_reward_model
from sparring.stages.models.teachers import check_collect, check_distill, check_teachers_answer
from sparring.stages.preflight.dimensions import folder_shape
from sparring.stages.preflight.engine import check_served
from sparring.stages.preflight.harness import playable, play_silently
from sparring.stages.preflight.judges import check_judges
from sparring.stages.preflight.memory import Held, in_words, resident, shapes_of
from sparring.stages.preflight.policy import check_model
from sparring.stages.preflight.rendering import SOME, check_rendering
from sparring.stages.rl import ANNOTATIONS, correction_chosen
from sparring.stages.runtime.baselines import check_against
from sparring.stages.runtime.evaluation import held_out
from sparring.stages.runtime.periodic_evaluation import check_beside
from sparring.types import Score, Task

GIB = 1 << 30


async def check(context: Context) -> list[str]:
    """Prove that the run can work, cheapest first.

    Returns:
        What was found, one sentence each.

    Raises:
        BadInput: the run would fail, and why.
    """
    config = context.config
    facts = _stages(context)
    if context.given() is not None:
        folder_shape(context.given())
    shapes = shapes_of(config, context.given())
    shape = shapes[POLICY]
    facts += check_lora(context) + check_critic(context) + check_implicit(context)
    facts += check_reward_model(context, context.given()) + check_collect(context) + check_distill(context)
    facts += _memory(context, shapes) + _engine(context, shape)
    _sampling(context)
    facts += check_served(context)
    if "rl" in config.run.stages:
        if config.rl.preference is None:
            config.algo.check(config.rollout.group_size, ANNOTATIONS)
        check_reference(context)
    for stage in {"rl", "distill"} & set(config.run.stages):
        # a teacher compares with nobody: a rollout may be alone in its group
        alone = msgspec.structs.replace(config.rollout, group_size=max(2, config.rollout.group_size))
        check_window(
            config.rollout if stage == "rl" else alone,
            groups_per_step=config.rl.groups_per_step if stage == "rl" else config.distill.groups_per_step,
            engine_tokens=config.engine.kv_tokens or None,
            rollout_tokens=shape.max_positions,
        )
    if "rl" in config.run.stages:
        facts += ["rollouts: the window cannot deadlock", correction_chosen(config)]
    facts += await check_judges(context) + await check_teachers_answer(context)
    facts += _held_out(context) + check_beside(context)
    tasks = _some_tasks(context)
    task = tasks[0]
    if task.box is not None:
        check_sandbox(config.sandbox)
        facts.append(f"sandbox: {config.sandbox.bwrap} isolates a command on this machine")
        proven, rows = await context.factory.prove(context.boxes) if config.sandbox.enabled else (0, 0)
        if proven:
            facts.append(f"env: {proven} of {rows} rows have a right program, which passes their tests")
    found, held, shown = await _world(context, task)
    about, compared = check_compared(context)
    shown += compared
    about += check_online(config) + check_imitation(config)
    facts += about + found + check_rendering(context, shape, tasks, shown, held)
    return facts + check_model(context, shape)


def _stages(context: Context) -> list[str]:
    """The order of stages makes sense: each finds weights to start from."""
    stages, given = context.config.run.stages, context.given()
    if list(stages) != sorted(stages, key=ORDER.index):
        order = " -> ".join(sorted(stages, key=ORDER.index))
        raise refusal("run.stages", order, " -> ".join(stages), "write them in this order")
    if "init" not in stages and given is None:
        raise refusal(
            "run.stages", "`init` first", str(list(stages)), "add it, or give a checkpoint: models.policy.path"
        )
    checkpoints = context.config.eval.checkpoints
    if "eval" in stages and not set(checkpoints) & set(stages):
        raise refusal(
            "eval.checkpoints", f"one of the run's stages {list(stages)}", str(list(checkpoints)), "add one of these"
        )
    return [f"stages: {' -> '.join(stages)}"]


def _sampling(context: Context) -> None:
    """Rollouts differ, or they teach nothing."""
    if not {"rl", "distill"} & set(context.config.run.stages):
        return
    rollout = context.config.rollout
    if rollout.temperature == 0:
        raise refusal("rollout.temperature", "above 0 while the run trains", "0", "raise it: greedy rollouts are equal")
    if rollout.top_k == 1:
        raise refusal(
            "rollout.top_k", "another than 1 while the run trains", "1", "raise it: greedy rollouts are equal"
        )
    if rollout.min_p == 1:
        raise refusal("rollout.min_p", "below 1 while the run trains", "1.0", "lower it: greedy rollouts are equal")


def _engine(context: Context, shape: Outline) -> list[str]:
    """Nothing is asked of another engine than our own that it cannot do, or that whoever serves it decides; and vLLM is
    there."""
    engine, rollout = context.config.engine, context.config.rollout
    if engine.kind == "native":
        return []
    theirs = {
        "vllm": "leave it out; vLLM's own settings go into engine.vllm.arguments",
        "remote": "leave it out; give it to `sparring serve`, as --set engine.{name}={value}",
        "openai": "leave it out; it is the server's to decide",
    }[engine.kind]
    ours, alone = EngineConfig(), ("idle_kv_bytes", "speculation", *(() if engine.kind == "remote" else ("kv_tokens",)))
    for name in alone if engine.kind == "vllm" else (*alone, "kv_across_turns", "live_kv"):
        if (value := getattr(engine, name)) != getattr(ours, name):
            expected = 'engine.kind = "native", which alone reads it'
            raise refusal(f"engine.{name}", expected, repr(value), theirs.format(name=name, value=value))
    if rollout.constraint is not None and engine.kind != "remote":
        expected = f'none with engine.kind = "{engine.kind}", which asks nobody between two tokens'
        got, do = f"one, of kind {rollout.constraint.kind}", 'leave it out, or set engine.kind = "native"'
        raise refusal("rollout.constraint", expected, got, do)
    return _vllm(context, shape) if engine.kind == "vllm" else []


def _vllm(context: Context, shape: Outline) -> list[str]:
    """vLLM is there, and keeps and samples as the recipe says."""
    from sparring.engine.adapters.vllm_server import find_vllm
    from sparring.engine.adapters.vllm_wire import WHOLE_VOCABULARY, truncates

    engine, rollout = context.config.engine, context.config.rollout
    if engine.kv_across_turns == "offload":
        raise refusal("engine.kv_across_turns", '"keep" or "drop" with vLLM', '"offload"', "choose one of these")
    if truncates(rollout.sampling()) and not rollout.top_k and shape.vocab_size > WHOLE_VOCABULARY:
        expected = (
            f"one beside top_p and min_p with vLLM, whose kept tokens are known as the likeliest of {shape.vocab_size}"
        )
        raise refusal("rollout.top_k", expected, "0", "set it, or truncate nothing")
    return [f"engine: {find_vllm(engine)} has vLLM"]


def _memory(context: Context, shapes: Mapping[str, Outline]) -> list[str]:
    """What the run holds at the most is there, in memory and on disk; a run with `memory = "warn"` is told that it is
    not."""
    config, held = context.config, Held.of(context.config, shapes, resident())
    here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    warnings = []
    if config.run.device == "cpu" and held.total > here:
        do = "lower train.token_budget, engine.kv_bytes or engine.offload_bytes, or take a smaller model"
        got = f"{here / GIB:.1f} GiB on this machine"
        if config.run.memory == "refuse":
            raise refusal("memory", in_words(held), got, f'{do}; run.memory = "warn" goes on all the same')
        warnings.append(f"memory: warning: expected {in_words(held)}, got {got}; {do}")
    free = shutil.disk_usage(context.folder).free
    disk = ((held.trained + held.learner) * 12 + held.averaged * 4) * (config.train.keep_last + 1) * 2
    if disk > free:
        raise refusal(
            str(context.folder),
            f"{disk / GIB:.1f} GiB of disk for checkpoints",
            f"{free / GIB:.1f} GiB",
            "free disk space",
        )
    millions = held.parameters / 1e6
    about = f"memory: about {held.total / GIB:.2f} GiB of {here / GIB:.0f} GiB"
    facts = [f"{about} for {millions:.2f} million parameters, most of it in stage {held.stage}", *warnings]
    context.store.put(TOLD, facts[-1])
    return facts


def _held_out(context: Context) -> list[str]:
    """There are as many held-out tasks as the evaluation asks for, and no file trains on them.

    Raises:
        BadInput: there are fewer, or one does.
    """
    config = context.config
    if "eval" not in config.run.stages:
        if config.eval.against:
            do = "add it, or leave eval.against out"
            raise refusal("eval.against", "a stage eval, whose result is compared", str(list(config.run.stages)), do)
        return []
    tasks = held_out(context, config.eval.tasks)
    check_unseen_files(context, tasks)
    there = len(tasks)
    if config.eval.no_tool_tasks > there:
        few = f"at most {there}, the tasks of the evaluation"
        raise refusal("eval.no_tool_tasks", few, str(config.eval.no_tool_tasks), "lower it")
    return [f"eval: {there} held-out tasks", *check_against(context, tasks)]


async def _world(context: Context, task: Task) -> tuple[list[str], list[Conversation], list[Conversation]]:
    """Open one world of each kind of task; an empty answer must not be rewarded, and its expert must succeed or earn
    more.

    Returns:
        What was found, the conversations that were held, and those to imitate, of which some may be read from `[sft]
        data`.
    """
    config = context.config
    fresh = "init" in config.run.stages and context.given() is None
    if not fresh and ("sft" not in config.run.stages or "collect" in config.run.stages and config.sft.data is None):
        silent = await _empty(context, task)
        return [f"env: {context.factory.name} opens and does not reward an empty answer"], silent, []
    if config.sft.data is not None:
        silent = await _empty(context, task)
        rows = given_conversations(context)
        return [f"sft: {len(rows)} conversations in {config.sft.data}"], silent, rows
    facts, held, shown = [], [], []
    for example in _one_of_each(context):
        silent = await _empty(context, example)
        async with playable(example):
            conversations = await demonstrate(context, example)
        score, earned, nothing = conversations[0].score, _earned(conversations), _earned(silent) or 0.0
        if score is None or earned is None or not (earned > nothing or _told_apart(score)):
            expected = "an expert that succeeds, or earns more than an empty answer"
            got = f"reward {earned} and {nothing:g} for an empty answer"
            raise refusal(f"task {example.id}", expected, got, "correct expert or scorer")
        held += [*silent, *conversations]
        facts.append(f"env: {example.tag or example.env}: expert {earned:g}, empty answer {nothing:g}")
        shown += conversations
    return facts, held, shown


def _some_tasks(context: Context) -> Sequence[Task]:
    """The first training tasks.

    Raises:
        BadInput: there is none.
    """
    source = context.factory.tasks("train", context.config.run.seed)
    tasks = [task for task in (source.next() for _ in range(SOME)) if task is not None]
    if not tasks:
        raise refusal("[env]", "at least one training task", "none", "add data")
    return tasks


def _one_of_each(context: Context) -> Sequence[Task]:
    """The first demonstrated task of every tag.

    Raises:
        BadInput: there is none.
    """
    source = context.factory.tasks("demonstration", context.config.run.seed)
    first: dict[str, Task] = {}
    while (task := source.next()) is not None:
        first.setdefault(task.tag, task)
    if not first:
        raise refusal(
            "[env]",
            "tasks to demonstrate (a fresh model's tokenizer and the sft stage learn from demonstrations)",
            "none",
            "raise the environment's demonstrations or set sft.data; or start from a checkpoint and leave sft out",
        )
    return list(first.values())


def _earned(conversations: Sequence[Conversation]) -> float | None:
    """What the rollout earned whose conversations these are."""
    score = conversations[0].score
    return None if score is None else score.reward


def _told_apart(score: Score) -> bool:
    """Whether a reward of 0 or less may be right: the world calls it a success, as a draw of a zero-sum game, or pays
    its roles each for itself, so that all together earn nothing."""
    return score.success is True or score.per_role is not None


async def _empty(context: Context, task: Task) -> list[Conversation]:
    """Play a task with empty answers, which must not be rewarded."""
    silent = await play_silently(context, task)
    if (_earned(silent) or 0.0) > 0:  # less than nothing is a penalty, and right
        got = f"{_earned(silent):g}"
        raise refusal(f"task {task.id}", "no reward for an empty answer", got, "correct the scorer: it can be gamed")
    return silent


def check_directory(directory: Path) -> None:
    """Prove that folders can be made in `directory`, without making any.

    Raises:
        BadInput: something else is in the way, or it is not ours to write.
    """
    there = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        got = "one without the right to write" if there.is_dir() else "a file"
        raise refusal("run.directory", f"a folder at {there}", got, "choose another")
