"""Validation of the observations and scores that environments and scorers return. A value passes, or an error says why
it is invalid."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, get_args

from sparring.generation import Constraint
from sparring.types import Message, Observation, Role, Score, Trajectory
from sparring.validation import number, plain_scalar

ROLES = frozenset(get_args(Role))


def observed(answer: object) -> Observation:
    """Return an environment's answer if it is a valid observation: known roles, text that UTF-8 can encode, a finite
    reward.

    Raises:
        TypeError: the answer is no Observation, or a part has a wrong type.
        ValueError: the reward is not finite, a role is unknown, or a text cannot be encoded.
    """
    if not isinstance(answer, Observation):
        raise TypeError(f"expected an Observation, got {answer!r:.80}")
    if not isinstance(answer.messages, (tuple, list)):
        raise TypeError(f"expected a tuple of messages, got {answer.messages!r:.80}")
    for message in answer.messages:
        if not isinstance(message, Message) or not isinstance(message.content, str):
            raise TypeError(f"expected messages with a text, got {message!r:.80}")
        if message.role not in ROLES:
            raise ValueError(f"expected a message of system, user, assistant or tool, got one of {message.role!r:.80}")
        message.content.encode()
    _check_state(answer.state_key)
    if not isinstance(answer.constraint, (Constraint, type(None))):
        raise TypeError(f"expected a Constraint or None, got {answer.constraint!r:.80}")
    return answer if answer.reward is None else replace(answer, reward=finite("reward", answer.reward))


def rated(score: object, roles: Sequence[str], trajectories: Sequence[Trajectory] = ()) -> Score | None:
    """Return a valid score with its numbers converted to Python's own.

    Args:
        roles: names of the roles that can be rewarded.
        trajectories: trajectories of the rollout; values per turn are checked against their turns.

    Raises:
        TypeError: the score is no Score, or a part has a wrong type.
        ValueError: a reward is not finite, a role is unknown, or values do not match the turns.
    """
    if score is None:
        return None
    if not isinstance(score, Score):
        raise TypeError(f"expected a Score or None, got {score!r:.80}")
    success = plain_scalar(score.success)
    if not isinstance(success, (bool, type(None))):
        raise TypeError(f"expected success to be True, False or None, got {score.success!r:.80}")
    if not isinstance(score.parts, Mapping):
        raise TypeError(f"expected parts by name, got {score.parts!r:.80}")
    for name in score.parts:
        if not isinstance(name, str):
            raise TypeError(f"expected names of parts, got {name!r:.80}")
    score = replace(
        score,
        success=success,
        reward=None if score.reward is None else finite("reward", score.reward),
        parts={name: finite(f"part {name}", value) for name, value in score.parts.items()},
        per_role=score.per_role
        and {role: finite(f"reward of {role}", reward) for role, reward in score.per_role.items()},
        per_turn=_finite_rewards(score.per_turn),
        per_role_turns=score.per_role_turns
        and {role: _finite_rewards(rewards) for role, rewards in score.per_role_turns.items()},
    )
    _check_roles(score, roles)
    for trajectory in trajectories:
        lengths = [len(turn.tokens) for turn in trajectory.turns]
        if lengths:  # an expert's rollout has no sampled tokens
            _check_turns(score, trajectory.role, lengths, alone=len(trajectories) == 1)
    if score.per_step is None or len(trajectories) != 1:
        return score
    return replace(
        score, per_step=tuple(tuple((end, finite("step", reward)) for end, reward in steps) for steps in score.per_step)
    )


def _check_roles(score: Score, roles: Sequence[str]) -> None:
    """Refuse values for unknown roles, and values without a role if there are several roles."""
    of_roles = (score.per_role, score.per_role_turns, score.per_role_states)
    unnamed = sorted({role for of_role in of_roles for role in of_role or {}} - set(roles))
    if unnamed:
        raise ValueError(f"expected a score of the roles {', '.join(roles)}, got one of {unnamed[0]!r}")
    if len(roles) > 1 and (score.per_turn, score.per_step, score.states) != (None, None, None):
        raise ValueError("expected per_role_turns and per_role_states where there are several roles, got per_turn")


def _check_turns(score: Score, role: str, lengths: Sequence[int], *, alone: bool) -> None:
    """Refuse values per turn that do not match the role's turns of `lengths` tokens, and per step if it is `alone`."""
    turns, states = score.turns_of(role), score.states_of(role)
    if turns is not None:
        _one_per_turn("per_turn", turns, lengths)
    for state in _one_per_turn("states", states, lengths) if states is not None else ():
        _check_state(state)
    if score.per_step is None or not alone:
        return
    for steps, length in zip(_one_per_turn("per_step", score.per_step, lengths), lengths, strict=True):
        ends = [end for end, _ in steps]
        if ends != sorted(set(ends)) or ends and not 0 < ends[0] <= ends[-1] <= length:
            raise ValueError(f"expected steps that end in their turn of {length} tokens, in order, got ends at {ends}")
        for _, reward in steps:
            finite("reward of a step", reward)


def _one_per_turn(what: str, values: Any, lengths: Sequence[int]) -> Sequence[Any]:
    if not isinstance(values, (tuple, list)):
        raise TypeError(f"expected {what} as a tuple, got {values!r:.80}")
    if len(values) != len(lengths):
        raise ValueError(f"expected {what} of the {len(lengths)} sampled turns, got {len(values)}")
    return values


def _check_state(state: object) -> None:
    if not isinstance(state, (str, type(None))):
        raise TypeError(f"expected the state of a turn as a text or None, got {state!r:.80}")


def finite(what: str, value: object) -> float:
    """Convert a finite real number, as `validation.number` does, to a Python float. Refuse anything else with a
    ValueError that names it by `what`."""
    with suppress(ValueError):
        if math.isfinite(converted := number(what, value)):
            return converted
    raise ValueError(f"expected a finite number as {what}, got {value!r:.80}")


def _finite_rewards(rewards: object) -> Any:
    """Convert the rewards of turns to Python floats; return anything but a list or tuple unchanged, for later
    checks."""
    if not isinstance(rewards, (tuple, list)):
        return rewards
    return tuple(finite("reward of a turn", reward) for reward in rewards)
