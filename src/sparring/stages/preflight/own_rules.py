"""Check of rules in the user's own files: each is tried on drawn groups or tokens before the run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from random import Random
from typing import Any

from sparring.algo.base import name_of
from sparring.algo.config import AlgoConfig
from sparring.algo.credit.base import BaseCredit
from sparring.algo.user_rules import own_rules
from sparring.batch.plain_groups import nouns, simple_group
from sparring.errors import BadInput, boundary, refusal
from sparring.types import Group, Sample

Values = Mapping[str, tuple[float, ...]]
"""Numbers that a rule returns, by the id of the row or group."""
GROUPS = 6


def check_own_rules(algo: AlgoConfig, group_size: int) -> list[str]:
    """Try the recipe's own rules.

    Raises:
        BadInput: a rule raises, changes its input, or gives a number that is not finite or a wrong shape; advantages or
            rewards change in a second call, with the order of groups or with rollouts that failed; or its gradient does
            not match its values.
    """
    facts = []
    for place, rule in own_rules(algo):
        where, name = f"algo.{place}", name_of(rule)
        on, fix = "tokens", "correct it"
        if place in ("shaping", "credit"):
            on = "groups"
            fix = "correct it; one group has a single rollout, for which credit may be None, and one equal rewards"
        with boundary(BadInput, where, f"{name} to run on drawn {on}", fix):
            if on == "groups":
                _try_on_groups(where, name, rule, *_drawn(algo, group_size))
            else:
                from sparring.algo.loss.trial import try_on_tokens

                try_on_tokens(algo, place, name)
        facts.append(f"{where}: {name} was tried on drawn {on}")
    return facts


def _try_on_groups(
    where: str, name: str, rule: Any, groups: Sequence[Group], samples: Sequence[Sequence[Sample]]
) -> None:
    before = deepcopy((groups, samples))
    values = _values(where, name, rule, groups, samples)
    complete = [replace(group, failed=()) for group in groups]
    others: dict[str, Any] = {"in a second call": (groups, samples)}
    others |= {"whatever rollouts failed (Group.failed)": (complete, samples)}
    if not isinstance(rule, BaseCredit) or type(rule).open is BaseCredit.open:  # else it remembers
        others["for groups in another order"] = (groups[::-1], samples[::-1])
    for what, changed in others.items():
        given = _values(where, name, rule, *changed)
        for id in sorted(values.keys() | given.keys()):
            one, other = values.get(id, ()), given.get(id, ())
            if len(one) != len(other) or not all(map(_is_close, one, other)):
                fix = "compute each group's from its scores, or from sums over all groups, without random numbers"
                raise refusal(where, f"{name} to give the same {what}", f"{one} and {other} for {id}", fix)
        if before != (groups, samples):
            raise refusal(where, f"{name} to leave its input as it is", "other groups or samples", "change a copy")


def _values(where: str, name: str, rule: Any, groups: Sequence[Group], samples: Sequence[Sequence[Sample]]) -> Values:
    """Return the advantages of each row, or the rewards of each group, that a rule gives;
    refuse a wrong shape and numbers that are not finite."""
    if isinstance(rule, BaseCredit):
        wanted = [{row.id: len(row.tokens) for row in rows} for rows in samples]
        given = [{row.id: tuple(row.advantages or ()) for row in rows} for rows in rule.open().credit(groups, samples)]
        expected = f"{name} to return all rows of each group, or none"
    else:
        wanted = [{group.id: len(group.scores)} for group in groups]
        given = [{group.id: tuple(score.reward for score in group.scores)} for group in rule.shape(list(groups))]
        expected = f"{name} to return groups {[group.id for group in groups]}"
    if len(given) != len(wanted) or any(
        list(one) not in ([], list(all)) for one, all in zip(given, wanted, strict=True)
    ):
        raise refusal(where, expected, str([list(each) for each in given]), "return them in the order given")
    values: dict[str, tuple[float, ...]] = {}
    for lengths, numbers_of in zip(wanted, given, strict=True):
        values |= numbers_of
        for id, numbers in numbers_of.items():
            if len(numbers) != lengths[id] or any(one is None or not math.isfinite(one) for one in numbers):
                finite = f"{name} to give {lengths[id]} finite numbers for {id}"
                raise refusal(where, finite, str(numbers), "correct it")
    return values


def _is_close(left: float, right: float) -> bool:
    return math.isclose(left, right, rel_tol=1e-6, abs_tol=1e-9)


def _drawn(algo: AlgoConfig, group_size: int) -> tuple[list[Group], list[list[Sample]]]:
    """Draw groups of chats with two replies each; in every second group a rollout failed. One group has a single
    rollout left, and one has equal rewards, unless a filter drops them."""
    credit, draw, plain = algo.credit, Random(0), []
    for number in range(GROUPS):
        turns = [draw.randint(1, 4), draw.randint(1, 4)]
        size = 1 if number == 1 and not algo.zero_variance_filter else group_size
        per_turn = [[float(draw.randint(0, 1)), draw.random()] for _ in range(size)]
        if number == 2 and not algo.zero_variance_filter:
            per_turn = per_turn[:1] * size
        fields: dict[str, Any] = {
            "parts": [{part: draw.random() for part in credit.parts_read} for _ in per_turn],
            "tokens": [{name: [draw.random() for _ in range(sum(turns))] for name in credit.reads} for _ in per_turn],
            **({"per_turn": per_turn} if credit.tells_turns_apart else {}),
        }
        group = simple_group([math.fsum(rewards) for rewards in per_turn], turns=turns, **fields)
        failed, baselines = [1.0] * (number % 2), [draw.random()] * credit.needs_baselines
        plain.append({**group, "failed": failed, "baselines": baselines})
    return nouns(plain)
