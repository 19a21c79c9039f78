"""Data of the stages `preference` and `reward_model`: compared replies, rendered as tokens and split from held-out
rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TypeVar

import xxhash

from sparring.algo.loss.preference.config import KtoConfig
from sparring.batch.preference import CHOSEN, REJECTED
from sparring.errors import BadInput, refusal, refusal_in
from sparring.observe.statistics import wilson
from sparring.protocols import EnvFactory, Renderer
from sparring.recipe.run_config import RunConfig
from sparring.recipe.sections.preference import StepsConfig, TurnsConfig
from sparring.stages.context import POLICY
from sparring.stages.data.demonstrations import Conversation
from sparring.tasks.preferences import (
    JudgedTurns,
    Messages,
    Preference,
    Solution,
    read_preferences,
    read_solutions,
    read_turns,
)
from sparring.types import Message, ToolSpec

R = TypeVar("R", bound=Preference | Solution | JudgedTurns)


def preference_rows(config: RunConfig) -> list[Preference]:
    """Return the rows of `[preference] data`."""
    section = config.preference
    single = isinstance(section.loss, KtoConfig)
    rows = read_preferences(_required_file(section.data, "preference"), single=single)
    if single and len({row.prompt for row in rows}) < 2:
        raise refusal("preference.data", "replies to at least two prompts with kto", "one prompt", "add rows")
    return rows


def reward_rows(config: RunConfig) -> list[Preference] | list[Solution] | list[JudgedTurns]:
    """Return the rows of `[reward_model] data`."""
    section = config.reward_model
    path = _required_file(section.data, "reward_model")
    if isinstance(section.loss, TurnsConfig):
        return read_turns(path)
    return read_solutions(path) if isinstance(section.loss, StepsConfig) else read_preferences(path)


def check_compared(config: RunConfig, factory: EnvFactory) -> tuple[list[str], list[Conversation]]:
    """Refuse a preference or reward_model stage without data, and adapters in the reward_model stage, which trains
    whole weights. Return facts, one sentence each, and the conversations that will be trained on."""
    facts, pairs = [], []
    tools = factory.make().tools
    for stage, read in (("preference", preference_rows), ("reward_model", reward_rows)):
        if stage not in config.run.stages:
            continue
        section, rows = getattr(config, stage), read(config)
        trained, held_out = split_held_out(rows, section.held_out, config.run.seed, stage)
        facts.append(f"{stage}: {len(trained)} rows to train on, {len(held_out)} held out")
        pairs += [
            Conversation(name=row.where, messages=(*row.prompt, *replied), tools=tools)
            for row in rows
            for replied in _replies(row)
        ]
    if "reward_model" in config.run.stages and config.models[POLICY].lora is not None:
        actual, fix = "a section", "leave one of them out"
        raise refusal("models.policy.lora", "none with the stage reward_model, which trains whole weights", actual, fix)
    return facts, pairs


def _required_file(path: str | None, section: str) -> str:
    if path is None:
        raise refusal(
            f"{section}.data", "a file of rows to train on", "none", f"set it, or leave out the stage {section}"
        )
    return path


def _replies(row: Preference | Solution | JudgedTurns) -> list[Messages]:
    if isinstance(row, JudgedTurns):
        return [row.reply]
    if isinstance(row, Solution):
        return [(Message(role="assistant", content="\n".join(row.steps)),)]
    return [side for side in (row.chosen, row.rejected) if side is not None]


def split_held_out(rows: Sequence[R], held_out: int, seed: int, section: str) -> tuple[list[R], list[R]]:
    """Split rows into training rows and at least `held_out` held-out rows. All rows of a prompt fall on the same side;
    which side depends only on the seed and the prompts.

    Raises:
        BadInput: no row is left to train on.
    """
    of_prompt: dict[Messages, list[R]] = {}
    for row in rows:
        of_prompt.setdefault(row.prompt, []).append(row)
    order = sorted(of_prompt, key=lambda prompt: xxhash.xxh3_64_intdigest(f"held out/{seed}/{prompt}".encode()))
    sizes = itertools.accumulate((len(of_prompt[prompt]) for prompt in order), initial=0)
    apart = {prompt for prompt, before in zip(order, sizes, strict=False) if before < held_out}
    if len(apart) == len(of_prompt):
        actual = f"{held_out} of {len(rows)} rows, {len(of_prompt)} prompts"
        raise refusal(f"{section}.held_out", "prompts left to train on", actual, "lower it or add rows")
    return [row for row in rows if row.prompt not in apart], [row for row in rows if row.prompt in apart]


def render_reply(
    renderer: Renderer, tools: Sequence[ToolSpec], where: str, prompt: Messages, reply: Messages, longest: int
) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Return prompt and reply as token ids, as the engine would have seen and sampled them, with marks of the sampled
    ids.

    Raises:
        BadInput: the chat format cannot write the reply, or it has more than `longest` tokens.
    """
    from sparring.render.demonstrate import demonstration_tokens

    try:
        rendered = demonstration_tokens(renderer, (*prompt, *reply), tools)
    except BadInput as error:
        raise refusal_in(where, error) from error
    if len(rendered.tokens) > longest:
        actual, fix = f"{len(rendered.tokens)} tokens", "shorten it, leave it out, or take another model"
        raise refusal(where, f"at most {longest} tokens, the positions of the model", actual, fix)
    # assistant messages of the prompt are not part of the reply
    earlier, marks, before = sum(message.role == "assistant" for message in prompt), [], False
    for mark in rendered.sampled:
        earlier -= mark and not before
        marks.append(mark and earlier < 0)
        before = mark
    return rendered.tokens, tuple(marks)


def render_sides(
    renderer: Renderer, tools: Sequence[ToolSpec], row: Preference, longest: int
) -> Iterator[tuple[str, float, tuple[int, ...], tuple[bool, ...]]]:
    """Yield the name, label, ids and marks of each reply of a row, as `render_reply` returns them.

    Raises:
        BadInput: for the reasons of `render_reply`, or both replies have the same ids.
    """
    seen = None
    for label, side, replied in ((CHOSEN, "chosen", row.chosen), (REJECTED, "rejected", row.rejected)):
        if replied is None:
            continue
        tokens, sampled = render_reply(renderer, tools, row.where, row.prompt, replied, longest)
        if tokens == seen:
            raise same_ids(row.where)
        seen = tokens
        yield f"{row.where} {side}", label, tokens, sampled


def same_ids(where: str) -> BadInput:
    """Return the error for a row whose replies have equal token ids, so that nothing can be learned from the row."""
    actual = "the same ids twice: the chat format writes both alike"
    return refusal(where, "two replies of different tokens", actual, "correct the row or leave it out")


def rate(right: int, count: int) -> dict[str, float]:
    """Return `accuracy`, the share `right / count`, with `low` and `high` of its 95 % interval, and `count`."""
    low, high = wilson(right, count)
    return {"accuracy": right / count, "low": low, "high": high, "count": count}


def in_words(figures: dict[str, float], what: str) -> str:
    """Return a result of `rate` as text."""
    interval = f"{figures['low']:.1%} to {figures['high']:.1%}"
    return f"held out: {figures['accuracy']:.1%} of {figures['count']} {what} ({interval})"
