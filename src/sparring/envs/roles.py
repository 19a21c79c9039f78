"""Names of an environment's roles, and checks of an environment with several roles."""

from __future__ import annotations

import re

from sparring.envs.base import Env
from sparring.errors import refusal
from sparring.protocols import AnyEnv
from sparring.types import DEFAULT_ROLES

NAME = re.compile(r"[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*")
RETRY, BROKEN = "retry-", "broken-"
"""Prefixes of the last part of an attempt's id: `retry-` for a retry, `broken-` for an attempt that broke and was
rebuilt. In a trajectory's id, the last part is the role instead."""


def roles_of(env: AnyEnv) -> tuple[str, ...]:
    """Return the roles that a world names, in its order, or `policy` if it names none."""
    return tuple(getattr(env, "roles", DEFAULT_ROLES))


def check_roles(env: AnyEnv) -> tuple[str, ...]:
    """Return a world's roles. They have distinct names, and a world with several implements `step_of` and `score_all`.

    Raises:
        BadInput: a name is invalid or occurs twice, there is no name, or a method is missing.
    """
    where = f"env {type(env).__name__}: roles"
    declared = getattr(env, "roles", DEFAULT_ROLES)
    if not isinstance(declared, (tuple, list)) or not declared or not all(isinstance(role, str) for role in declared):
        raise refusal(where, "a tuple of names, like ('proposer', 'solver')", repr(declared), "correct it")
    roles = tuple(declared)
    for role in roles:
        if roles.count(role) > 1:
            raise refusal(where, "roles of different names", f"two called {role!r}", "rename one")
        if not NAME.fullmatch(role) or role.startswith((RETRY, BROKEN)):
            expected = f"names of letters, digits, _, - and /, not beginning with {RETRY} or {BROKEN}"
            raise refusal(where, expected, repr(role), "rename it")
    for method in ("step_of", "score_all") if len(roles) > 1 else ():
        if getattr(type(env), method, getattr(Env, method)) is getattr(Env, method):
            remedy = f"write {method}, or name one role"
            raise refusal(where, f"a method {method} in an environment of the roles {', '.join(roles)}", "none", remedy)
    return roles
