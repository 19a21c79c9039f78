"""`[distill]`: on-policy distillation."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from sparring.recipe.sections.overrides import TrainOverrides
from sparring.recipe.sections.stop import StopConfig


class DistillConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[distill]`: on-policy distillation. The policy samples, and becomes what its teachers make of what it sampled.

    With q the policy's distribution in the place of a sampled token y, p the teacher's:

        over token        policy_gradient  advantage log p(y) - log q(y)      (Lu, On-Policy Distillation, 2025)
                          squared          (log q(y) - log p(y))^2 / 2
        over top_k or     reverse          KL(q || p)
        vocabulary        forward          KL(p || q)
                          jensen_shannon   beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q
                                           (GKD, arXiv 2306.13649, section 2)

    top_k is over the teacher's likeliest tokens and, as one outcome, all others.
    """

    steps: int = 100
    """Optimiser steps."""

    groups_per_step: int = 16
    """Tasks per step; `[rollout] group_size` rollouts of each."""

    train: TrainOverrides = {}
    """Keys of `[train]` that this stage replaces, such as `learning_rate`."""

    stop: StopConfig | None = None
    """End before the last step. None: all steps are done."""

    teachers: dict[str, str] = {}
    """Teachers by domain: the tag of a task, else its environment, else "*" for all that no other is for; each the name
    of a model, as in { "*" = "teacher" } with [models.teacher]."""

    over: Literal["token", "top_k", "vocabulary"] = "token"
    """Quantity compared at each sampled token. token: the log-probabilities of that token alone; top_k: the teacher's
    `top_k` likeliest tokens, and all others as one; vocabulary: the whole distributions, with the teachers computed
    beside the trainer."""

    divergence: Literal["reverse", "forward", "jensen_shannon"] = "reverse"
    """reverse: KL(student || teacher); forward: KL(teacher || student); jensen_shannon: of `beta` (GKD, arXiv
    2306.13649). The sampled token alone knows the reverse one only."""

    beta: float = 0.5
    """jensen_shannon = beta KL(teacher || mixture) + (1 - beta) KL(student || mixture), of which beta is the teacher's
    share."""

    top_k: int = 32
    """Likeliest tokens of the teacher, under `over` = "top_k"."""

    estimator: Literal["policy_gradient", "squared"] = "policy_gradient"
    """Under `over` = "token": the teacher's log-probability minus the student's as the advantage of each token; or half
    its square as a loss. Their gradients are equal where the weights that are trained sampled the token."""

    ratio_cap: float = 2.0
    """Largest weight of a token that older weights sampled, under `estimator` = "policy_gradient"."""

    tokenizers: Literal["same", "any"] = "same"
    """any: what the student said is said to a teacher in the teacher's own tokens, and compared wherever a token of
    both ends; for `over` = "token"."""

    feedback: Literal["none", "sibling"] = "none"
    """sibling: the teacher is shown a successful rollout of the same task and reads what the student wrote without it
    (SDPO, arXiv 2601.20802); it may then be the policy itself, "policy" as its engine serves it at that time, or
    "average". A rollout whose group has no other success teaches nothing."""

    decay: float = 0.95
    """Of the teacher "average", the moving average of the policy, which begins as the policy does: after every update
    average = decay * average + (1 - decay) * policy (SDPO's regularised teacher)."""

    observations: float = 0.0
    """Scale of a cross-entropy loss on the tokens that tools answered (ECHO, arXiv 2605.24517); 0: none."""

    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """token_mean: every token counts the same; sequence_mean: every trajectory does."""

    max_concurrent_scores: int = 64
    """Requests to teachers under way at once."""

    retries: int = 2
    """Repetitions of a request that a teacher failed to answer."""

    retry_delay_s: float = 0.5
    """Longest pause before the first repetition; doubles with each. The pause itself is drawn evenly below it, so that
    many do not ask again at the same instant."""

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
