"""`[distill]`: on-policy distillation."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from sparring.recipe.sections.overrides import TrainOverrides
from sparring.recipe.sections.stop import StopConfig


class DistillConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[distill]`: on-policy distillation: the policy samples, and learns from its teachers' distributions over its
    samples.

    With q the policy's and p the teacher's distribution at the position of a sampled token y:

        over token        policy_gradient  advantage log p(y) - log q(y)      (Lu, On-Policy Distillation, 2025)
                          squared          (log q(y) - log p(y))^2 / 2
        over top_k or     reverse          KL(q || p)
        vocabulary        forward          KL(p || q)
                          jensen_shannon   beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q
                                           (GKD, arXiv 2306.13649, section 2)

    top_k compares the teacher's likeliest tokens, and all others as one outcome.
    """

    steps: int = 100
    """Number of optimiser steps."""

    groups_per_step: int = 16
    """Number of tasks per step, with `[rollout] group_size` rollouts each."""

    train: TrainOverrides = {}
    """Keys of `[train]` that this stage replaces, such as `learning_rate`."""

    stop: StopConfig | None = None
    """Early stopping. None: all steps are done."""

    teachers: dict[str, str] = {}
    """Teachers by domain: the tag of a task, else its environment, else "*" for all others. Each is the name of a
    model, as in { "*" = "teacher" } with [models.teacher]."""

    over: Literal["token", "top_k", "vocabulary"] = "token"
    """Quantity compared at each sampled token. token: the log-probabilities of that token; top_k: the teacher's `top_k`
    likeliest tokens, with all other tokens as one outcome; vocabulary: the whole distributions, with the teachers
    computed in the trainer."""

    divergence: Literal["reverse", "forward", "jensen_shannon"] = "reverse"
    """Divergence. reverse: KL(student || teacher); forward: KL(teacher || student); jensen_shannon: with `beta` (GKD,
    arXiv 2306.13649). A sampled token alone allows only reverse."""

    beta: float = 0.5
    """Teacher's share in jensen_shannon = beta KL(teacher || mixture) + (1 - beta) KL(student || mixture)."""

    top_k: int = 32
    """Number of the teacher's likeliest tokens, under `over` = "top_k"."""

    estimator: Literal["policy_gradient", "squared"] = "policy_gradient"
    """Estimator under `over` = "token": the teacher's log-probability minus the student's as the advantage of each
    token; or half its square as a loss. Their gradients are equal if the trained weights sampled the token."""

    ratio_cap: float = 2.0
    """Maximum weight of a token that older weights sampled, under `estimator` = "policy_gradient"."""

    tokenizers: Literal["same", "any"] = "same"
    """Tokenizers of the teachers. any: the student's text is encoded in the teacher's tokens, and compared wherever a
    token ends in both; for `over` = "token"."""

    feedback: Literal["none", "sibling"] = "none"
    """Additional input of the teacher. sibling: a successful rollout of the same task, which the student did not see
    (SDPO, arXiv 2601.20802). The teacher may then be the policy itself: "policy" as the engine currently serves it, or
    "average". A rollout without another success in its group is not trained."""

    decay: float = 0.95
    """Decay of the teacher "average", the policy's moving average, which starts as the policy: after every update
    average = decay * average + (1 - decay) * policy (SDPO's regularised teacher)."""

    observations: float = 0.0
    """Weight of a cross-entropy loss on the tokens of tool answers (ECHO, arXiv 2605.24517); 0: none."""

    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Aggregation of token losses. token_mean: every token has the same weight; sequence_mean: every trajectory has the
    same weight."""

    max_concurrent_scores: int = 64
    """Maximum number of concurrent requests to teachers."""

    retries: int = 2
    """Maximum number of retries of a request that a teacher failed to answer."""

    retry_delay_s: float = 0.5
    """Upper bound of the pause before the first retry, in seconds; doubles with each retry. The pause is drawn
    uniformly below the bound (full jitter)."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.groups_per_step < 1 or self.max_concurrent_scores < 1:
            raise ValueError("steps, groups_per_step and max_concurrent_scores must be at least 1")
        if not 0 < self.decay < 1:
            raise ValueError(f'decay must lie between 0 and 1, got {self.decay}; at 0 it is the teacher "policy"')
        if not 0 < self.beta < 1:
            raise ValueError(
                f"beta must lie between 0 and 1, got {self.beta}; for the ends set divergence to forward or reverse"
            )
        if self.over == "token" and self.divergence != "reverse":
            raise ValueError(
                f'divergence must be "reverse" with over = "token", got "{self.divergence}"; set over = "top_k"'
            )
        if self.tokenizers == "any" and (self.over != "token" or self.feedback != "none"):
            raise ValueError(
                'tokenizers = "any" needs over = "token" and feedback = "none": the two share text, not token ids'
            )
        if self.feedback != "none" and self.over == "vocabulary":
            raise ValueError(
                'feedback needs over = "token" or "top_k": the teacher reads another text than the student'
            )
        if not 0 <= self.observations < math.inf:
            raise ValueError(f"observations must be 0 or more, got {self.observations}")
        if self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        if not self.ratio_cap >= 1:
            raise ValueError(f"ratio_cap must be at least 1, the weight of equal probabilities, got {self.ratio_cap}")
        if self.retries < 0 or self.retry_delay_s < 0:
            raise ValueError("retries and retry_delay_s must be 0 or more")
