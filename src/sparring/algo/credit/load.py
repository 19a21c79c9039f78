"""Which credit a config asks for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sparring.algo.aggregation import aggregated, denominator
from sparring.algo.config import AlgoConfig
from sparring.algo.credit.shuffled import Shuffled
from sparring.protocols import Credit
from sparring.types import Group, Sample


class Assigned:
    """A credit rule between what selects groups before it and what aggregates tokens behind it; implements `Credit`.

    Args:
        config: `[algo]`.
        max_tokens: the constant length where the config leaves it open.
    """

    def __init__(self, config: AlgoConfig, *, max_tokens: int) -> None:
        self._config = config
        self._max_tokens = config.max_tokens or max_tokens

    def credit(self, groups: Sequence[Group], samples: Sequence[Sequence[Sample]]) -> list[list[Sample]]:
        """Set advantages and weights. A group that the filter leaves out gives an empty list; no rule sees it.

        Raises:
            ValueError: as the rule.
        """
        config = self._config
        stays = [not (config.zero_variance_filter and _is_flat(group)) for group in groups]
        chosen = [(group, rows) for group, rows, stay in zip(groups, samples, stays, strict=True) if stay]
        credited = iter(config.credit.credit([group for group, _ in chosen], [rows for _, rows in chosen]))
        return [aggregated(next(credited), config.aggregation, self._max_tokens) if stay else [] for stay in stays]

    def denominator(self, rows: Iterable[Sample]) -> float | None:
        """What the policy term of an update with these rows is divided by; None: by the sum of its weights."""
        return denominator(rows, self._config.aggregation)


def load_credit(config: AlgoConfig, *, seed: int, max_tokens: int = 1) -> Credit:
    """The credit of `config`; `seed` is the run's and matters for the shuffled control only."""
    credit = Assigned(config, max_tokens=max_tokens)
    return Shuffled(credit, seed=seed) if config.control == "shuffled" else credit


def _is_flat(group: Group) -> bool:
    return len({score.reward for score in group.scores}) <= 1
