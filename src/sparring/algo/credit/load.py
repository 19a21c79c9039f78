"""Which credit a config asks for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sparring.algo.aggregation import aggregated, denominator
from sparring.algo.config import AlgoConfig
from sparring.algo.credit.pass_at_k import PassAtK
from sparring.algo.credit.rae import RaeCredit
from sparring.algo.credit.rules import CreditRule, open_rule
from sparring.algo.credit.shuffled import Shuffled
from sparring.algo.credit.statistics import all_equal
from sparring.protocols import Credit
from sparring.types import Group, Sample


class Assigned:
    """A credit rule between what shapes and selects groups before it and what aggregates tokens behind it; implements
    `Credit`.

    Args:
        config: `[algo]`.
        max_tokens: the constant length where the config leaves it open.
    """

    def __init__(self, config: AlgoConfig, *, max_tokens: int) -> None:
        self._config = config
        self._rule = open_rule(config.credit)
        self._max_tokens = config.max_tokens or max_tokens

    def credit(self, groups: Sequence[Group], samples: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
        """Set advantages and weights. A group that a filter leaves out gives an empty list; no rule sees it.
        Difficulty, and which answers are right, is what the scorer said; equal rewards are those after shaping.

        Raises:
            ValueError: as the rule.
        """
        config, shaped = self._config, list(groups)
        for rule in config.shaping:
            shaped = rule.shape(shaped)
        stays = [self._stays(group, after) for group, after in zip(groups, shaped, strict=True)]
        chosen = [(group, rows) for group, rows, stay in zip(shaped, samples, stays, strict=True) if stay]
        credited = iter(self._rule.credit([group for group, _ in chosen], [rows for _, rows in chosen]))
        counted = [aggregated(next(credited), config.aggregation, self._max_tokens) if stay else [] for stay in stays]
        if config.right_answers is None:
            return counted
        return [config.right_answers.imitated(group, rows) for group, rows in zip(groups, counted, strict=True)]

    def denominator(self, rows: Iterable[Sample]) -> float | None:
        """What the policy term of an update with these rows is divided by; None: by the sum of its weights."""
        return denominator(rows, self._config.aggregation)

    def state(self) -> Mapping[str, Any]:
        """What the rule remembers of earlier updates; nothing for most."""
        return self._rule.state() if isinstance(self._rule, RaeCredit) else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        if isinstance(self._rule, RaeCredit):
            self._rule.restore(state)

    def _stays(self, group: Group, shaped: Group) -> bool:
        difficulty = self._config.difficulty
        kept = difficulty is None or difficulty.keep(group)
        return kept and not (self._config.zero_variance_filter and _is_flat(shaped, self._config.credit))


def load_credit(config: AlgoConfig, *, seed: int, max_tokens: int = 1) -> Credit:
    """The credit of `config`; `seed` is the run's and matters for the shuffled control only."""
    credit = Assigned(config, max_tokens=max_tokens)
    return Shuffled(credit, seed=seed) if config.control == "shuffled" else credit


def _is_flat(group: Group, rule: CreditRule) -> bool:
    """Whether what its roles earned says nothing: all rollouts the same, or what is the same to the rule."""
    earned: dict[str, list[float]] = {}
    for rollout, score in zip(group.rollouts, group.scores, strict=True):
        for trajectory in rollout.trajectories:
            earned.setdefault(trajectory.role, []).append(score.of(trajectory.role) or 0.0)
    says_nothing = rule.says_nothing if isinstance(rule, PassAtK) else all_equal
    return all(says_nothing(rewards) for rewards in earned.values())
