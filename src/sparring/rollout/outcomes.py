"""Outcomes of attempts that ended without a score: at a limit, without a turn, or by an error (law 6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sparring.errors import InfraError, JudgeError, LimitReached, PolicyFailure, Unanswered
from sparring.protocols import Session
from sparring.types import Failure, Outcome, OutcomeKind, Rollout

ANSWERED = Outcome(kind="completed", reason="answered")
MALFORMED = Outcome(kind="policy_failed", reason="malformed")
CANCELLED = Outcome(kind="cancelled", reason="cancelled")
UNSCORED = Outcome(
    kind="judge_failed",
    reason="failure",
    failure=Failure(error="JudgeError", where="score", message="neither the world nor a scorer gave a reward"),
)


def of_silence(sessions: Sequence[Session], harness: str, ended_by: PolicyFailure | None) -> Outcome | None:
    """Return the outcome of an attempt in which the policy has no turn, so that there is nothing to score; None if the
    policy has a turn. Such an attempt ended at a limit, such as a first prompt that is too long.

    Args:
        sessions: sessions of the roles that the policy speaks for.
        harness: name of the harness, for the error.
        ended_by: policy's failure that the harness raised; None if it raised none.

    Raises:
        Unanswered: no limit was hit: the harness requested nothing, or all its requests were refused.
    """
    if any(session.has_turn for session in sessions):
        return None
    limit = next((session.limit for session in sessions if session.limit is not None), None)
    if limit is not None:
        return outcome_at(limit)
    silence = next((session.silence for session in sessions), "requested no reply")
    raise Unanswered(f"{harness}: {silence}{f': {ended_by}' if ended_by is not None else ''}")


def outcome_at(limit: LimitReached) -> Outcome:
    """Return the outcome of a conversation that a limit ended."""
    kind: OutcomeKind = "policy_failed" if limit.reason in ("resources", "malformed") else "truncated"
    return Outcome(kind=kind, reason=limit.reason)


def broken_by(error: InfraError) -> Outcome:
    """Return the outcome of an attempt that the infrastructure broke."""
    kind: OutcomeKind = "judge_failed" if isinstance(error, JudgeError) else "infra_failed"
    return Outcome(kind=kind, reason="failure", failure=failure_of(error))


def failure_of(error: InfraError) -> Failure:
    """Return an error as a record. Its message begins with the place of the error."""
    where, _, message = str(error).partition(": ")
    return Failure(error=type(error).__name__, where=where if message else "", message=message or where)


def ended_as(rollout: Rollout, outcome: Outcome) -> Rollout:
    """Return the rollout with another outcome in all its trajectories."""
    return replace(rollout, trajectories=tuple(replace(t, outcome=outcome) for t in rollout.trajectories))


def unscored(rollout: Rollout, outcome: Outcome = UNSCORED) -> Rollout:
    """Return a rollout with the outcome under which it leaves its group without a score. No score is not a reward of
    0."""
    return ended_as(rollout, outcome)


def is_about(error: BaseException | None, limit: LimitReached) -> bool:
    """Return whether an error is caused by a limit, which a client may raise inside an error of its own."""
    while error is not None:
        if error is limit or str(limit) in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
