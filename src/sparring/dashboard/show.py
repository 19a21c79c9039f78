"""Rollouts of a run as plain text."""

from __future__ import annotations

import bisect
import json
import os
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

from sparring.dashboard.page_data import GROUP_STAGES
from sparring.dashboard.report import open_store
from sparring.dashboard.rollouts import members
from sparring.errors import refusal
from sparring.protocols import Store
from sparring.types import Group, Message, Rollout, Score

MOST = 1 << 31
"""Upper bound of a stage's groups."""


def show(folder: str | os.PathLike[str], name: str | None = None) -> Iterator[str]:
    """Yield a run's rollouts as lines, also while it goes on: the task of a group, and of each rollout its reward, its
    outcome and its conversation. The same as `sparring show`, which escapes control characters of the text as well.

    Args:
        name: id of a scored group or rollout, such as `rl/12` or `rl/12/3`; None: the newest group of each stage.

    Raises:
        BadInput: the folder has no run, or the run has no such group.
        StoreError: the store cannot be read.
    """
    with closing(open_store(Path(folder))) as store:
        found = _newest(store) if name is None else _named(store, name)
        if not found:
            newest = ", ".join(group.id for group in _newest(store)) or "none yet"
            advice = f"name another, or none (the newest of each stage: {newest})"
            raise refusal(str(folder), "the id of a scored group or rollout", repr(name or "no group"), advice)
        for group in found:
            yield _line(f"=== {group.id}: task {group.task.id}, weights of version {group.version}")
            for message in group.task.messages:
                yield from _message(message)
            for rollout, score in members(group):
                if name in (None, group.id, rollout.id):
                    yield from ("", _line(_result(rollout, score)), *conversation(rollout, group.task.messages))


def conversation(rollout: Rollout, told: tuple[Message, ...] = ()) -> Iterator[str]:
    """Yield the messages of a rollout's trajectories in the order of their requests, without prompt messages that are
    in `told`. A message's text is indented, so that no line of the text looks like a heading."""
    for trajectory in rollout.trajectories:
        if len(rollout.trajectories) > 1:
            yield _line(f"  role {trajectory.role}:")
        last = None
        for segment in trajectory.segments:
            if segment.fork is not None or segment.parent != last:
                why = f"{segment.fork.reason} {segment.fork.agent}".strip() if segment.fork else "goes on"
                yield _line(f"  branch ({why}):")
            last = segment.index
            known = segment.source == "prompt" and segment.fork is None and segment.message in told
            if segment.message is not None and not known:
                notes = [segment.label] if segment.model is not None and segment.label != "agent" else []
                yield from _message(segment.message, *notes, *["cut by a limit"] * (segment.finish_reason == "length"))


def _newest(store: Store) -> list[Group]:
    """Return the last group of each stage, found by bisection over the group indices."""
    stages = {stage: lambda first, stage=stage: not _first(store, stage, first) for stage in GROUP_STAGES}
    ends = {stage: bisect.bisect_left(range(MOST), True, key=is_behind) for stage, is_behind in stages.items()}
    return [group for stage, end in ends.items() if end for group in _first(store, stage, end - 1)]


def _named(store: Store, name: str) -> list[Group]:
    places = [place.rpartition("/")[::2] for place in (name, name.rpartition("/")[0])]
    numbers = [(stage, int(number)) for stage, number in places if number.isdecimal() and len(number) < 10]
    groups = [group for stage, number in numbers for group in _first(store, stage, number)]
    return [each for each in groups if name in (each.id, *(rollout.id for rollout in (*each.rollouts, *each.failed)))]


def _first(store: Store, stage: str, first: int) -> list[Group]:
    """Return the first group from index `first` on, as a list; empty without such a group."""
    return list(islice(store.groups(stage=stage, first=first), 1))


def _result(rollout: Rollout, score: Score | None) -> str:
    outcome, tokens = rollout.outcome, sum(len(turn.tokens) for t in rollout.trajectories for turn in t.turns)
    values = {} if score is None else {"reward": score.reward, **(score.per_role or {}), **score.parts}
    worth = ", ".join(f"{name} {value:.4g}" for name, value in values.items() if value is not None) or "not scored"
    broke = f": {outcome.failure.error}: {outcome.failure.message}" if outcome.failure else ""
    return f"--- {rollout.id}: {worth}; {outcome.kind} ({outcome.reason}{broke}); {tokens} tokens"


def _message(message: Message, *notes: str) -> Iterator[str]:
    called, reasoning = message.tool_calls, message.reasoning
    yield _line(f"  {' '.join(filter(None, (message.role, message.name)))}{''.join(f' ({note})' for note in notes)}:")
    calls = [f"call: {c.name}({c.raw if c.arguments is None else json.dumps(dict(c.arguments))})" for c in called]
    for text in (f"thought: {reasoning}" if reasoning else "", str(message.content or ""), *calls):
        yield from (f"    {line}" for line in text.split("\n") if text)


def _line(text: str) -> str:
    return text.replace("\n", "\\n")
