"""Annotations: all per-token values that one part leaves on a row for another, declared in one place.

`Sample.annotations` maps a name to one float per token of the row, [T]. Code refers to the members of `Annotation`,
never to a literal, and a row with an undeclared name is refused. A test derives writers and readers from the source,
and checks the table in docs/path/batch.md against this declaration.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, kw_only=True, slots=True)
class Declaration:
    """Description of one annotation."""

    name: str
    """Key in `Sample.annotations`."""
    meaning: str
    """Quantity, and the tokens that have it. Other tokens have 0.0 unless the text says otherwise."""
    unit: str
    """Unit, or range of values."""
    writers: tuple[str, ...]
    """Modules below src/sparring that write it on rows."""
    readers: tuple[str, ...]
    """Modules below src/sparring that read it from rows or from their tensors."""


class Annotation(StrEnum):
    """Names of all annotations, each with its `declaration`. A member equals its name as a string."""

    declaration: Declaration

    def __new__(cls, declaration: Declaration) -> Annotation:
        """Create a member with the declared name as its value."""
        member = str.__new__(cls, declaration.name)
        member._value_ = declaration.name
        member.declaration = declaration
        return member

    REFERENCE = Declaration(
        name="reference",
        meaning="log-probability of each weighted token under the reference model",
        unit="nats",
        writers=("batch/implicit.py", "stages/preference.py", "stages/models/reference.py"),
        readers=(
            "algo/annotate/kl.py",
            "algo/config.py",
            "algo/loss/implicit.py",
            "algo/loss/policy.py",
            "algo/loss/preference/kto.py",
            "algo/loss/preference/pairs.py",
            "algo/rare/credit/prime.py",
            "algo/shaping/kl_reward.py",
            "batch/implicit.py",
        ),
    )
    IMPLICIT = Declaration(
        name="implicit",
        meaning="log-probability of each weighted token under the implicit process reward model before the update",
        unit="nats",
        writers=("stages/models/implicit.py",),
        readers=("algo/rare/credit/prime.py",),
    )
    PROXIMAL = Declaration(
        name="proximal",
        meaning="log-probability of each weighted token under the trainer's weights before the update",
        unit="nats",
        writers=("stages/models/annotators.py",),
        readers=("algo/loss/policy.py",),
    )
    PROXIMAL_SHARE = Declaration(
        name="proximal_share",
        meaning="position of the estimated `proximal` between the recorded and the current log-probability",
        unit="0 to 1",
        writers=("algo/annotate/trainer_quantity.py",),
        readers=("algo/loss/policy.py",),
    )
    TEACHER = Declaration(
        name="teacher",
        meaning="log-probability under the teacher of each token with policy weight",
        unit="nats",
        writers=("algo/annotate/cross_tokenizer.py", "algo/annotate/teacher.py"),
        readers=("algo/loss/distill.py",),
    )
    VALUE = Declaration(
        name="value",
        meaning="critic's value of the text before each weighted token, before the update",
        unit="reward",
        writers=("stages/models/critic.py",),
        readers=("algo/credit/gae.py", "algo/loss/value.py", "batch/critic.py"),
    )
    RETURN = Declaration(
        name="return",
        meaning="critic's target at each weighted token",
        unit="reward",
        writers=("algo/credit/gae.py",),
        readers=("algo/loss/value.py", "batch/critic.py"),
    )
    REWARD = Declaration(
        name="reward",
        meaning="reward of each weighted token in addition to the score, such as a KL penalty",
        unit="reward",
        writers=("algo/shaping/kl_reward.py",),
        readers=("algo/credit/members.py", "algo/shaping/kl_reward.py"),
    )
    RIGHT = Declaration(
        name="right",
        meaning="1 at each weighted token of a right rollout",
        unit="0 or 1",
        writers=("algo/rare/credit/prime.py",),
        readers=("batch/implicit.py",),
    )
    PROBABILITY_SQUARES = Declaration(
        name="probability_squares",
        meaning="sum over the vocabulary of the squared probabilities at each weighted token",
        unit="0 to 1",
        writers=("stages/models/annotators.py",),
        readers=("algo/rare/credit/optimal_token_baseline.py", "stages/models/annotators.py"),
    )
    KL_COEFFICIENT = Declaration(
        name="kl_coefficient",
        meaning="adaptive coefficient of the KL penalty, the same at every token of an update",
        unit="reward or loss per nat",
        writers=("algo/annotate/kl.py",),
        readers=("algo/loss/policy.py", "algo/shaping/kl_reward.py"),
    )
    CHOSEN = Declaration(
        name="chosen",
        meaning="1 if the gate selects the token among all of the optimiser step",
        unit="0 or 1",
        writers=("algo/loss/policy.py",),
        readers=("algo/rare/gate/clip_cov.py", "algo/rare/gate/kl_cov.py", "algo/rare/gate/m2po.py"),
    )
    ENTROPIC = Declaration(
        name="entropic",
        meaning="1 if the token is in the optimiser step's share of highest entropy (`top_entropy`)",
        unit="0 or 1",
        writers=("algo/loss/policy.py",),
        readers=("algo/loss/policy.py",),
    )
    CORRECTION_MEAN = Declaration(
        name="correction_mean",
        meaning="mean weight of the correction over the optimiser step, the same at every token",
        unit="1",
        writers=("algo/loss/policy.py",),
        readers=("algo/correction/rule.py",),
    )
    RECOUNTED = Declaration(
        name="recounted",
        meaning="factor of the token's weight, so that only tokens count that the correction keeps",
        unit="1",
        writers=("algo/loss/policy.py",),
        readers=("algo/loss/policy.py",),
    )
    OBJECTIVE = Declaration(
        name="objective",
        meaning="token's summand of the policy term's objective, for sequences of several rows",
        unit="reward",
        writers=("algo/loss/policy.py",),
        readers=("algo/loss/policy.py",),
    )
    SLOPE = Declaration(
        name="slope",
        meaning="derivative of the sum of all `objective` by the token's log-probability",
        unit="reward per nat",
        writers=("algo/loss/policy.py",),
        readers=("algo/loss/policy.py",),
    )
    RATIO = Declaration(
        name="ratio",
        meaning="token's ratio, for the metric, with `objective`",
        unit="1",
        writers=("algo/loss/policy.py",),
        readers=("algo/loss/policy.py",),
    )
    STOPPED = Declaration(
        name="stopped",
        meaning="1 if the gate stops the token, for the metric, with `objective`",
        unit="0 or 1",
        writers=("algo/loss/policy.py",),
        readers=("algo/loss/policy.py",),
    )
    CORRECTION_WEIGHT = Declaration(
        name="correction_weight",
        meaning="correction's weight of the token, for the metric, with `objective`",
        unit="1",
        writers=("algo/loss/policy.py",),
        readers=("algo/loss/policy.py",),
    )
    CORRECTION_TRUNCATED = Declaration(
        name="correction_truncated",
        meaning="1 if the correction's weight was beyond the bounds",
        unit="0 or 1",
        writers=("algo/loss/policy.py",),
        readers=("algo/loss/policy.py",),
    )
    CORRECTION_REJECTED = Declaration(
        name="correction_rejected",
        meaning="1 if the correction rejects the token",
        unit="0 or 1",
        writers=("algo/loss/policy.py",),
        readers=("algo/loss/policy.py",),
    )
    KTO_SHIFT = Declaration(
        name="kto_shift",
        meaning="mean log ratio of KTO's mismatched rows of the optimiser step, the same at every token",
        unit="nats",
        writers=("algo/loss/preference/kto.py",),
        readers=("algo/loss/preference/kto.py",),
    )
    MARGIN = Declaration(
        name="margin",
        meaning="smallest difference of rewards that a pair should have, at the token after the text",
        unit="reward",
        writers=("batch/preference.py",),
        readers=("algo/loss/preference/bradley_terry.py",),
    )
    STEP_LABEL = Declaration(
        name="step_label",
        meaning="label of each step of a solution, from 0 (wrong) to 1 (right), at the token after the step",
        unit="0 to 1",
        writers=("batch/preference.py",),
        readers=("algo/loss/step_labels.py", "stages/reward_model.py"),
    )


DECLARED = frozenset(annotation.value for annotation in Annotation)
"""Names of all annotations."""
