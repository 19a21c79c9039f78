"""Credit pipeline of a config: shaping, filters, the credit rule and aggregation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sparring.algo.aggregation import aggregated, denominator
from sparring.algo.config import AlgoConfig
from sparring.algo.credit.base import BaseCredit
from sparring.algo.credit.shuffled import Shuffled
from sparring.algo.user_rules import naming
from sparring.protocols import Credit
from sparring.types import Group, Sample


class CreditPipeline:
    """Pipeline around a credit rule: shaping and filters of groups before it, aggregation after it.

    Difficulty and right answers are judged by the score before shaping, the zero-variance filter by rewards after
    shaping. A filtered group gives an empty list, and no rule sees it. Aggregation "constant" divides by `max_tokens`
    if the config sets no length. Implements `Credit`.
    """

    def __init__(self, config: AlgoConfig, *, max_tokens: int) -> None:
        self._config = config
        self._rule = config.credit.open()
        self._max_tokens = config.max_tokens or max_tokens

    def credit(self, groups: Sequence[Group], samples: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
        config, shaped = self._config, list(groups)
        for rule in config.shaping:
            with naming(rule):
                shaped = rule.shape(shaped)
        stays = [self._passes_filters(group, after) for group, after in zip(groups, shaped, strict=True)]
        chosen = [(group, rows) for group, rows, stay in zip(shaped, samples, stays, strict=True) if stay]
        with naming(config.credit):
            credited = iter(self._rule.credit([group for group, _ in chosen], [rows for _, rows in chosen]))
        aggregated_rows = [
            aggregated(next(credited), config.aggregation, self._max_tokens) if stay else [] for stay in stays
        ]
        if config.right_answers is None:
            return aggregated_rows
        return [config.right_answers.imitated(group, rows) for group, rows in zip(groups, aggregated_rows, strict=True)]

    def denominator(self, rows: Iterable[Sample]) -> float | None:
        return denominator(rows, self._config.aggregation)

    def state(self) -> Mapping[str, Any]:
        return self._rule.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self._rule.restore(state)

    def _passes_filters(self, group: Group, shaped: Group) -> bool:
        difficulty = self._config.difficulty
        in_range = difficulty is None or difficulty.keep(group)
        return in_range and not (self._config.zero_variance_filter and _is_flat(shaped, self._config.credit))


def load_credit(config: AlgoConfig, *, seed: int, max_tokens: int = 1) -> Credit:
    """Return the credit pipeline of `config`. The run's `seed` only affects the shuffled control."""
    credit = CreditPipeline(config, max_tokens=max_tokens)
    return Shuffled(credit, seed=seed) if config.control == "shuffled" else credit


def _is_flat(group: Group, rule: BaseCredit) -> bool:
    """Return whether the rewards of each role give no advantage under the rule."""
    earned: dict[str, list[float]] = {}
    for rollout, score in zip(group.rollouts, group.scores, strict=True):
        for trajectory in rollout.trajectories:
            earned.setdefault(trajectory.role, []).append(score.of(trajectory.role) or 0.0)
    return all(rule.says_nothing(rewards) for rewards in earned.values())
