"""Table of some rollouts of a step, for sinks that show one."""

from __future__ import annotations

from sparring.dashboard.show import conversation
from sparring.observe.config import ObserveConfig
from sparring.observe.sinks.sink import SampleRow
from sparring.protocols import Store
from sparring.types import Rollout, Score

MOST_CHARACTERS = 4000
"""Maximum number of characters of a conversation in the table."""


def sample_rows(config: ObserveConfig, store: Store, stage: str, groups_per_step: int, step: int) -> list[SampleRow]:
    """Return the first rollouts of a step if the recipe asks for a table of this step."""
    if not config.samples or (step - 1) % config.samples_every or not config.sinks:
        return []
    rows: list[SampleRow] = []
    for group in store.groups(stage=stage, first=(step - 1) * groups_per_step, end=step * groups_per_step):
        rows += [_row(rollout, score) for rollout, score in zip(group.rollouts, group.scores, strict=True)]
        if len(rows) >= config.samples:
            break
    return rows[: config.samples]


def _row(rollout: Rollout, score: Score) -> SampleRow:
    text = "\n".join(conversation(rollout))
    cut = text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]} ..."
    return SampleRow(
        rollout=rollout.id,
        task=rollout.task.id,
        conversation=cut,
        reward=score.reward,
        outcome=rollout.outcome.kind,
    )
