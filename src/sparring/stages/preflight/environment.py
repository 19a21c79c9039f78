"""Check of the environment: its tasks open, its expert earns a reward, and an empty answer earns none."""

from __future__ import annotations

from collections.abc import Sequence

from sparring.envs.domains import factory_of
from sparring.errors import BadInput, refusal
from sparring.harness.load import BUILT_IN
from sparring.harness.workers import NAME as WORKERS
from sparring.protocols import EnvFactory
from sparring.recipe.run_config import RunConfig
from sparring.record.identity import tools_key
from sparring.record.token_counts import Imitator
from sparring.rollout.seeds import digest
from sparring.stages.context import Context, given_checkpoint
from sparring.stages.data.demonstrations import Conversation, Demonstrations, demonstration_tasks, read_demonstrations
from sparring.stages.models.imitator import imitator_of
from sparring.stages.preflight.expert import check_expert
from sparring.stages.preflight.harness import play_silently, playable
from sparring.stages.preflight.rendering import SOME
from sparring.stages.preflight.workers import Rehearsal, check_idle
from sparring.types import Message, Score, Task

DRAWN_AGAIN = 8
"""Number of tasks that are drawn a second time."""
LONGEST = 3
"""Number of tasks of an environment that are opened to measure their prompts, if a task may set its own tools."""
LOOKED_AT = 1000
"""Maximum number of tasks of a split that are searched for a field."""


async def check_environment(
    context: Context, tasks: Sequence[Task], rehearsal: Rehearsal | None
) -> tuple[list[str], list[Conversation], list[Conversation]]:
    """Play one task of each environment and of each kind that is demonstrated.

    An empty answer must earn no reward, and the expert must succeed or earn more. A worker that requests no reply must
    get no score.

    Returns:
        Facts, the conversations that were played, and the conversations to imitate; `[sft] data` may add more.
    """
    config = context.config
    firsts = list({task.env: task for task in reversed(tasks)}.values())[::-1]
    for first in firsts:
        if rehearsal is not None and not rehearsal.command and config.harness_of(first.env) == WORKERS:
            await check_idle(context, first, rehearsal)
    if _experts_demonstrate(config):
        facts, played, demonstrated = await _play_experts(context, rehearsal)
        firsts = [first for first in firsts if first.env not in {each.task.env for each in played if each.task}]
    else:
        facts, played, demonstrated = [], [], []
        if _file_demonstrates(config):
            demonstrated = read_demonstrations(context, context.factory)
            facts.append(f"sft: {len(demonstrated)} conversations in {config.sft.data}")
    for first in firsts:
        played += await _play_empty(context, first)
        facts.append(f"env: {first.env} opens and does not reward an empty answer")
    for task in _longest_with_own_tools(config, context.factory, tasks, played):
        played += await _play_empty(context, task)
    return facts, played, demonstrated


def _experts_demonstrate(config: RunConfig) -> bool:
    imitates = "sft" in config.run.stages and "collect" not in config.run.stages
    return config.sft.data is None and (_is_fresh(config) or imitates)


def _file_demonstrates(config: RunConfig) -> bool:
    return config.sft.data is not None and (_is_fresh(config) or "sft" in config.run.stages)


def _is_fresh(config: RunConfig) -> bool:
    return "init" in config.run.stages and given_checkpoint(config) is None


async def _play_experts(
    context: Context, rehearsal: Rehearsal | None
) -> tuple[list[str], list[Conversation], list[Conversation]]:
    """Have experts play one task of each tag; return the values of `check_environment`."""
    facts, played, demonstrated, imitator = [], [], [], imitator_of(context)
    for example in _first_of_each_tag(context.config, context.factory):
        silent = await _play_empty(context, example)
        played += silent
        conversations = await _play_expert(context, example, imitator, rehearsal)
        if conversations is None:
            tools = ", ".join(sorted(rehearsal.own_tools)) if rehearsal is not None else ""
            own = (
                f"its expert calls {tools}, which is no tool of the world; a worker that has it can prove it (--worker)"
            )
            facts.append(f"env: {example.tag or example.env}: {own}; an empty answer {_reward(silent) or 0.0:g}")
            continue
        score, earned, nothing = conversations[0].score, _reward(conversations), _reward(silent) or 0.0
        if score is None or earned is None or not (earned > nothing or _may_be_zero(score)):
            expected = "an expert that succeeds, or earns more than an empty answer"
            actual = f"reward {earned} and {nothing:g} for an empty answer"
            raise refusal(f"task {example.id}", expected, actual, "correct expert or scorer")
        played += conversations
        facts.append(f"env: {example.tag or example.env}: expert {earned:g}, empty answer {nothing:g}")
        demonstrated += conversations
    by_experts = await check_expert(context, imitator)
    return facts, played + by_experts, demonstrated + by_experts


def _longest_with_own_tools(
    config: RunConfig, factory: EnvFactory, tasks: Sequence[Task], played: Sequence[Conversation]
) -> list[Task]:
    """Return, for each environment that sets tools per task, the tasks with the longest data. Only an opened task shows
    the length of its prompt, so the caller opens these."""
    longest: list[Task] = []
    own = {task.env: tools_key(factory_of(factory, task).make().tools) for task in tasks}
    others = {each.task.env for each in played if each.task and tools_key(each.tools) != own.get(each.task.env)}
    for env in sorted(others):
        if config.harness_of(env) in BUILT_IN:  # other harnesses add their own tools
            of_env = {task.id: task for task in tasks if task.env == env}.values()
            longest += sorted(of_env, key=lambda task: len(repr((task.messages, task.data))))[-LONGEST:]
    return longest


async def _play_expert(
    context: Context, task: Task, imitator: Imitator | None, rehearsal: Rehearsal | None
) -> list[Conversation] | None:
    """Have the expert play a task; return its conversations, or None if it calls a tool that only the user's workers
    have."""
    if rehearsal is not None:
        rehearsal.own_tools.clear()
    try:
        async with playable(task):
            return await Demonstrations(context, imitator).play_expert(task)
    except BadInput:
        if rehearsal is None or not rehearsal.own_tools:
            raise
        return None


def first_tasks(config: RunConfig, factory: EnvFactory) -> Sequence[Task]:
    """Return the first training tasks."""
    source = factory.tasks("train", config.run.seed)
    tasks = [task for task in (source.next() for _ in range(SOME)) if task is not None]
    if not tasks:
        raise refusal("[env]", "at least one training task", "none", "add data")
    return tasks


def check_repeats(config: RunConfig, factory: EnvFactory, tasks: Sequence[Task]) -> None:
    """Refuse an environment that draws other tasks the second time: a resumed run would hold out different tasks."""
    source = factory.tasks("train", config.run.seed)
    for first in tasks[:DRAWN_AGAIN]:
        again = source.next()
        if again is None or digest(again) != digest(first):
            actual = f"another for {first.id}: {_excerpt(first)} and {'none' if again is None else _excerpt(again)}"
            fix = "draw from the generator that generate(self, random) is handed, and from nothing else"
            raise refusal(f"env {first.env}", "the same task whenever it is drawn", actual, fix)


def _excerpt(task: Task) -> str:
    return repr(task.messages[-1].content if task.messages else task.data)[:60]


def check_shown(config: RunConfig, factory: EnvFactory) -> None:
    """Refuse a field of `rollout.gateway.shown_to_workers` that none of the first `LOOKED_AT` tasks of either split
    has."""
    missing, fields = set(config.rollout.gateway.shown_to_workers), set[str]()
    for split in ("train", "eval"):
        source = factory.tasks(split, config.run.seed)
        for _ in range(LOOKED_AT if missing else 0):
            task = source.next()
            if task is None or not missing:
                break
            fields |= task.data.keys()
            missing -= task.data.keys()
    if missing:
        expected = f"fields of a task's data: {', '.join(sorted(fields)) or 'none has any'}"
        actual = ", ".join(map(repr, sorted(missing)))
        raise refusal("rollout.gateway.shown_to_workers", expected, actual, "correct it, or leave it out")


def _first_of_each_tag(config: RunConfig, factory: EnvFactory) -> Sequence[Task]:
    first: dict[str, Task] = {}
    for task in demonstration_tasks(config, factory):
        first.setdefault(task.tag, task)
    return list(first.values())


def _reward(conversations: Sequence[Conversation]) -> float | None:
    score = conversations[0].score
    return None if score is None else score.reward


def _may_be_zero(score: Score) -> bool:
    """Return whether a reward of 0 or less may be right: the environment calls it a success (a draw), or it rewards
    roles separately, so that their sum may be 0."""
    return score.success is True or score.per_role is not None


def _is_unscored(conversations: Sequence[Conversation]) -> bool:
    score = conversations[0].score
    return score is None or (score.reward is None and not score.per_role)


def _wants_scores(config: RunConfig, factory: EnvFactory) -> bool:
    """Return whether training has no other reward than the environment's own."""
    others = (config.rollout.rewards.within_s, config.rl.reward_model, factory.scorer)
    return "rl" in config.run.stages and others == (None, None, None)


async def _play_empty(context: Context, task: Task) -> list[Conversation]:
    silent = await play_silently(context, task)
    if _is_unscored(silent) and _wants_scores(context.config, context.factory):
        async with playable(task):
            answered = await Demonstrations(context).play(task, lambda messages: Message(role="assistant", content="?"))
        if _is_unscored(answered):
            fix = "return a number from reward, or set rollout.rewards.within_s where rewards come from outside"
            raise refusal(f"task {task.id}", "a reward of an answer", "None for an empty answer and for '?'", fix)
    if (_reward(silent) or 0.0) > 0:  # a negative reward is a penalty, which is right
        actual = f"{_reward(silent):g}"
        raise refusal(f"task {task.id}", "no reward for an empty answer", actual, "correct the scorer: it can be gamed")
    return silent
