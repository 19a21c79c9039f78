"""Annotations: all per-token values that one part leaves on a row for another, declared in one place.

`Sample.annotations` maps a name to one float per token of the row, [T]. Code names a member of `Annotation`, and a row
with an undeclared name is refused. The table in docs/path/batch.md says which modules write and read each.
"""

from __future__ import annotations

from enum import StrEnum


class Annotation(StrEnum):
    """Names of all annotations. A member equals its name as a string.

    Attributes:
        meaning: quantity, and the tokens that have it. Other tokens have 0.0 unless the text says otherwise.
        unit: unit, or range of values.
    """

    meaning: str
    unit: str

    def __new__(cls, name: str, meaning: str, unit: str) -> Annotation:
        """Create a member with this name as its value."""
        member = str.__new__(cls, name)
        member._value_ = name
        member.meaning, member.unit = meaning, unit
        return member

    REFERENCE = "reference", "log-probability of each weighted token under the reference model", "nats"
    IMPLICIT = (
        "implicit",
        "log-probability of each weighted token under the implicit process reward model before the update",
        "nats",
    )
    PROXIMAL = (
        "proximal",
        "log-probability of each weighted token under the trainer's weights before the update",
        "nats",
    )
    PROXIMAL_SHARE = (
        "proximal_share",
        "position of the estimated `proximal` between the recorded and the current log-probability",
        "0 to 1",
    )
    TEACHER = "teacher", "log-probability under the teacher of each token with policy weight", "nats"
    VALUE = "value", "critic's value of the text before each weighted token, before the update", "reward"
    RETURN = "return", "critic's target at each weighted token", "reward"
    REWARD = "reward", "reward of each weighted token in addition to the score, such as a KL penalty", "reward"
    RIGHT = "right", "1 at each weighted token of a right rollout", "0 or 1"
    PROBABILITY_SQUARES = (
        "probability_squares",
        "sum over the vocabulary of the squared probabilities at each weighted token",
        "0 to 1",
    )
    KL_COEFFICIENT = (
        "kl_coefficient",
        "adaptive coefficient of the KL penalty, the same at every token of an update",
        "reward or loss per nat",
    )
    CHOSEN = "chosen", "1 if the gate selects the token among all of the optimiser step", "0 or 1"
    ENTROPIC = (
        "entropic",
        "1 if the token is in the optimiser step's share of highest entropy (`top_entropy`)",
        "0 or 1",
    )
    CORRECTION_MEAN = (
        "correction_mean",
        "mean weight of the correction over the optimiser step, the same at every token",
        "1",
    )
    RECOUNTED = "recounted", "factor of the token's weight, so that only tokens count that the correction keeps", "1"
    OBJECTIVE = "objective", "token's summand of the policy term's objective, for sequences of several rows", "reward"
    SLOPE = "slope", "derivative of the sum of all `objective` by the token's log-probability", "reward per nat"
    RATIO = "ratio", "token's ratio, for the metric, with `objective`", "1"
    STOPPED = "stopped", "1 if the gate stops the token, for the metric, with `objective`", "0 or 1"
    CORRECTION_WEIGHT = "correction_weight", "correction's weight of the token, for the metric, with `objective`", "1"
    CORRECTION_TRUNCATED = "correction_truncated", "1 if the correction's weight was beyond the bounds", "0 or 1"
    CORRECTION_REJECTED = "correction_rejected", "1 if the correction rejects the token", "0 or 1"
    KTO_SHIFT = (
        "kto_shift",
        "mean log ratio of KTO's mismatched rows of the optimiser step, the same at every token",
        "nats",
    )
    MARGIN = "margin", "smallest difference of rewards that a pair should have, at the token after the text", "reward"
    STEP_LABEL = (
        "step_label",
        "label of each step of a solution, from 0 (wrong) to 1 (right), at the token after the step",
        "0 to 1",
    )


DECLARED = frozenset(Annotation)
"""Names of all annotations."""
