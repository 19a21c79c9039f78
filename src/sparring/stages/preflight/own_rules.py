"""Check of rules in the user's own files: each is tried on drawn groups or tokens before the run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

from sparring.algo.config import AlgoConfig
from sparring.algo.credit.base import BaseCredit
from sparring.algo.own import own_name
from sparring.batch.plain_groups import nouns, simple_group
from sparring.errors import BadInput, boundary, refusal
from sparring.types import Group, Sample

Values = Mapping[str, tuple[float, ...]]
"""Numbers that a rule gives, by the id of their row or group."""
GROUPS = 6


def check_own_rules(algo: AlgoConfig, group_size: int) -> list[str]:
    """Try the recipe's own rules.

    Raises:
        BadInput: a rule raises, changes its input, or gives a number that is not finite or a wrong shape; advantages
            or rewards change in a second call, with the order of groups or with rollouts that failed; or its gradient
            is not that of its values.
    """
    facts = []
    for place in ("gate", "loss", "correction"):
        if name := own_name(getattr(algo, place)):
            from sparring.algo.loss.trial import TOKENS, try_on_tokens

            with boundary(BadInput, f"algo.{place}", f"{name} to run on {TOKENS} drawn tokens", "correct it"):
                try_on_tokens(algo, place, name)
            facts.append(f"algo.{place}: {name} was tried on {TOKENS} drawn tokens")
    for place, rule in (*(("shaping", rule) for rule in algo.shaping), ("credit", algo.credit)):
        if name := own_name(rule):
            do = "correct it; one group has a single rollout, for which a credit may return None, and one equal rewards"
            with boundary(BadInput, f"algo.{place}", f"{name} to run on {GROUPS} drawn groups", do):
                _try_on_groups(f"algo.{place}", name, rule, *_drawn(algo, group_size))
            facts.append(f"algo.{place}: {name} was tried on {GROUPS} drawn groups")
    return facts


def _try_on_groups(
    where: str, name: str, rule: Any, groups: Sequence[Group], samples: Sequence[Sequence[Sample]]
) -> None:
    given = deepcopy((groups, samples))
    values = _values(where, name, rule, groups, samples)
    if got := _difference(values, _values(where, name, rule, groups, samples)):
        raise refusal(where, f"{name} to give the same in a second call", got, "use no random numbers and no state")
    if given != (groups, samples):
        raise refusal(where, f"{name} to leave its input as it is", "other groups or samples", "change copies of them")
    has_state = isinstance(rule, BaseCredit) and type(rule).open is not BaseCredit.open
    if not has_state and (got := _difference(values, _values(where, name, rule, groups[::-1], samples[::-1]))):
        do = "compute each group's from that group, or from sums over all of them"
        raise refusal(where, f"{name} to give the same for groups in another order", got, do)
    complete = [replace(group, failed=()) for group in groups]
    if got := _difference(values, _values(where, name, rule, complete, samples)):
        expected = f"{name} to give the same whatever rollouts failed (Group.failed)"
        raise refusal(where, expected, got, "do not read them: they have no score")


def _values(
    where: str, name: str, rule: Any, groups: Sequence[Group], samples: Sequence[Sequence[Sample]]
) -> dict[str, tuple[float, ...]]:
    """Return the advantages of each row, or the rewards of each group, that a rule gives.

    Raises:
        BadInput: they are of a wrong shape, or not finite.
    """
    if isinstance(rule, BaseCredit):
        credited = rule.open().credit(groups, samples)
        wanted, given = ([[row.id for row in rows] for rows in of] for of in (samples, credited))
        if len(given) != len(wanted) or any(ids not in ([], all) for ids, all in zip(given, wanted, strict=True)):
            do = "keep the order of groups and rows"
            raise refusal(where, f"{name} to return all rows of each group, or none", f"{given} of {wanted}", do)
        lengths = {row.id: len(row.tokens) for rows in samples for row in rows}
        values = {row.id: tuple(row.advantages or ()) for rows in credited for row in rows}
    else:
        shaped = rule.shape(list(groups))
        lengths = {group.id: len(group.scores) for group in groups}
        values = {group.id: tuple(score.reward for score in group.scores) for group in shaped}
        if list(values) != list(lengths):
            do = "return each group once, in the order given"
            raise refusal(where, f"{name} to return groups {list(lengths)}", str(list(values)), do)
    for id, numbers in values.items():
        if len(numbers) != lengths[id] or not all(number is not None and math.isfinite(number) for number in numbers):
            raise refusal(where, f"{name} to give {lengths[id]} finite numbers for {id}", str(numbers), "correct it")
    return values


def _difference(one: Values, other: Values) -> str:
    """Return the first place in which two results differ, or an empty text."""
    for id in sorted(one.keys() | other.keys()):
        left, right = one.get(id, ()), other.get(id, ())
        if len(left) != len(right) or not all(map(partial(math.isclose, rel_tol=1e-6, abs_tol=1e-9), left, right)):
            return f"{left} and {right} for {id}"
    return ""


def _drawn(algo: AlgoConfig, group_size: int) -> tuple[list[Group], list[list[Sample]]]:
    """Draw groups of chats with two replies each; in every second group a rollout failed. One group has a single
    rollout left, and one has equal rewards, unless a filter drops them."""
    credit, draw, plain = algo.credit, Random(0), []
    for number in range(GROUPS):
        turns = [draw.randint(1, 4), draw.randint(1, 4)]
        num_tokens, size = sum(turns), 1 if number == 1 and not algo.zero_variance_filter else group_size
        per_turn = [[float(draw.randint(0, 1)), draw.random()] for _ in range(size)]
        if number == 2 and not algo.zero_variance_filter:
            per_turn = per_turn[:1] * size
        fields: dict[str, Any] = {
            "parts": [{part: draw.random() for part in credit.parts_read} for _ in per_turn],
            "tokens": [{name: [draw.random() for _ in range(num_tokens)] for name in credit.reads} for _ in per_turn],
            **({"per_turn": per_turn} if credit.tells_turns_apart else {}),
        }
        group = simple_group([math.fsum(rewards) for rewards in per_turn], turns=turns, **fields)
        failed, baselines = [1.0] * (number % 2), [draw.random()] * credit.needs_baselines
        plain.append({**group, "failed": failed, "baselines": baselines})
    return nouns(plain)
