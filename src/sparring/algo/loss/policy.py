"""Policy term: a gated surrogate of the ratio between the current and an earlier policy.

Shapes: M weighted tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from sparring.algo.aggregation import recounted
from sparring.algo.config import AlgoConfig
from sparring.algo.tokens import Gated, PolicyTokens, StepGate, bounded
from sparring.algo.user_rules import naming
from sparring.annotations import Annotation
from sparring.protocols import Divergence, LossResult, Needs


class _Objective(NamedTuple):
    """Surrogate objective of M tokens, to be maximised: summands `parts` [M] with gradient, and `columns` as in
    `Corrected`."""

    parts: torch.Tensor
    columns: Mapping[str, torch.Tensor]


class PolicyLoss:
    """Policy term of every algorithm of `[algo]`, assembled from the parts that the config names.

        loss = - sum_t weight_t * correction_t * gate(ratio_t, A_t) / denominator
               + kl.coefficient * sum_t weight_t * kl_t / denominator
               - entropy_bonus * sum_t weight_t * H_t / denominator

    The aggregation sets weights and denominator, over all micro-batches of the optimiser step; with the correction's
    `denominator = "kept"` both count kept tokens only.

    The ratio is relative to the anchor. "behaviour" is the engine's recorded log-probability. "proximal" is the
    trainer's own before the update (decoupled PPO, arXiv 2505.24298, equation 5). It is the annotation `proximal`. If
    each batch is trained once, there is no such annotation, and the current log-probability without gradient takes its
    place. "loglinear" interpolates between the recorded and the current log-probability by the annotation
    `proximal_share`.

    Values that depend on all tokens of an optimiser step are computed in a first pass (`survey`) and come back as
    annotations. This includes the first sum, if a part combines whole sequences (unit "sequence") and the rows of a
    trajectory may be in different micro-batches: its summands come back as `objective`, its derivatives by each
    log-probability as `slope`. Together they give the value and the gradient of the sum. Implements `Loss`.
    """

    term = "policy"

    def __init__(self, config: AlgoConfig) -> None:
        self._config = config
        self.needs = Needs(
            quantities=frozenset({"logprob", "entropy", *(["divergence"] if config.compares_whole else [])}),
            divergence=Divergence(kind="reverse", over="vocabulary") if config.compares_whole else None,
            unit=config.unit,
            survey=config.needs_survey,
            idle_tokens=config.needs_idle_tokens,
        )

    def __call__(self, quantities: Mapping[str, torch.Tensor], micro_batch: Any) -> LossResult:
        """Compute the term's part of the loss from `logprob` and `entropy` [M] float32 with gradient; for the KL
        estimator "full" also from `divergence` [M] from the reference.

        Returns:
            A scalar, and as (sum, count) over weighted tokens the metrics clip_fraction (share of tokens that the gate
                counts as clipped), ratio (to the anchor), approx_kl (from the sampling policy), entropy, the
                correction's metrics and, with a KL penalty, reference_kl.
        """
        config, weights = self._config, self._weights(micro_batch)
        old, tokens = self._tokens(quantities, micro_batch)
        objective = self._objective_from_survey(tokens) or self._objective(old, tokens, weights)
        total = objective.parts.sum()
        columns = {**objective.columns, **_local_columns(tokens)}
        if config.entropy_bonus:
            total = total + config.entropy_bonus * (weights * quantities["entropy"]).sum()
        if config.kl.coefficient:
            full_distribution = config.compares_whole
            kl = (
                quantities["divergence"]
                if full_distribution
                else config.kl(quantities["logprob"], micro_batch.annotations[Annotation.REFERENCE])
            )
            coefficient = (
                config.kl.coefficient
                if config.kl.target is None
                else micro_batch.annotations[Annotation.KL_COEFFICIENT]
            )
            total = total - (weights * coefficient * kl).sum()
            columns["reference_kl"] = kl.detach()
        return LossResult(loss=-total / micro_batch.denominators[self.term], metrics=_metrics(columns, tokens.weighted))

    @torch.no_grad()
    def survey(self, quantities: Mapping[str, torch.Tensor], micro_batch: Any) -> dict[Annotation, torch.Tensor]:
        """Compute per-token values that depend on all M tokens of an optimiser step.

        These are `chosen` by the gate and `entropic` by `top_entropy` (each 0.0 or 1.0), `correction_mean`, `recounted`
        (factors for the weights of kept tokens), and the first sum of the loss for sequences with several rows. Takes
        the arguments of the loss, for the whole step at once.
        """
        config, columns = self._config, dict[Annotation, torch.Tensor]()
        old, tokens = self._tokens(quantities, micro_batch)
        if isinstance(config.gate, StepGate):
            columns[Annotation.CHOSEN] = config.gate.chosen(bounded(config.ratio(tokens)), tokens).to(old.dtype)
        if config.top_entropy < 1:
            count = max(1, round(config.top_entropy * int(tokens.weighted.sum())))
            columns[Annotation.ENTROPIC] = tokens.largest(tokens.entropy, count).to(old.dtype)
        if config.correction_rule.normalise:
            columns[Annotation.CORRECTION_MEAN] = (
                config.correction_rule.mean(old, tokens).to(old.dtype).expand(len(old))
            )
        if config.correction_rule.denominator == "kept":
            kept_tokens = config.correction_rule(old, tokens).weights > 0
            columns[Annotation.RECOUNTED] = recounted(
                micro_batch.weights[self.term], kept_tokens, tokens.sequences, config.aggregation
            ).to(old.dtype)
        if config.unit == "sequence" and len(micro_batch.trajectory.unique()) < len(micro_batch.trajectory):
            annotations = {**micro_batch.annotations, **columns}
            columns |= self._sequence_columns(quantities, replace(micro_batch, annotations=annotations))
        return columns

    def _sequence_columns(
        self, quantities: Mapping[str, torch.Tensor], micro_batch: Any
    ) -> dict[Annotation, torch.Tensor]:
        """Compute the first sum of the loss as annotations: its summands, its slopes and its metrics."""
        with torch.enable_grad():
            logprob = quantities["logprob"].detach().requires_grad_(True)
            old, tokens = self._tokens({**quantities, "logprob": logprob}, micro_batch)
            objective = self._objective(old, tokens, self._weights(micro_batch))
            [slope] = torch.autograd.grad(objective.parts.sum(), logprob)
        columns = objective.columns
        measured = {Annotation.RATIO: columns["ratio"], Annotation.STOPPED: columns["clip_fraction"]}
        if not self._config.correction_rule.does_nothing:
            measured |= {
                Annotation.CORRECTION_WEIGHT: columns["correction_weight"],
                Annotation.CORRECTION_TRUNCATED: columns["correction_truncated"],
                Annotation.CORRECTION_REJECTED: columns["correction_rejected"],
            }
        return {Annotation.OBJECTIVE: objective.parts.detach(), Annotation.SLOPE: slope, **measured}

    def _objective_from_survey(self, tokens: PolicyTokens) -> _Objective | None:
        """Rebuild the objective, with value and gradient, from a first pass; None without a first pass."""
        annotations = tokens.annotations
        if Annotation.SLOPE not in annotations:
            return None
        gradient_term = annotations[Annotation.SLOPE] * (tokens.logprob - tokens.logprob.detach())
        columns = {"ratio": annotations[Annotation.RATIO], "clip_fraction": annotations[Annotation.STOPPED]}
        if not self._config.correction_rule.does_nothing:
            columns |= {
                "correction_weight": annotations[Annotation.CORRECTION_WEIGHT],
                "correction_truncated": annotations[Annotation.CORRECTION_TRUNCATED],
                "correction_rejected": annotations[Annotation.CORRECTION_REJECTED],
            }
        return _Objective(annotations[Annotation.OBJECTIVE] + gradient_term, columns)

    def _objective(self, old: torch.Tensor, tokens: PolicyTokens, weights: torch.Tensor) -> _Objective:
        config = self._config
        with naming(config.correction_rule):
            corrected = config.correction_rule(old, tokens)
        with naming(config.gate if config.loss is None else config.loss):
            if config.loss is None:
                log_ratio = bounded(config.ratio(tokens))
                gated = config.gate(log_ratio, tokens)
            else:
                log_ratio = tokens.log_ratio
                gated = Gated(surrogate=-config.loss(tokens), stopped=~tokens.weighted & False)
        surrogate = corrected.weights * gated.surrogate
        if config.top_entropy < 1:
            surrogate = surrogate * tokens.annotations[Annotation.ENTROPIC]
        ratio = log_ratio.detach().exp()
        columns = {"clip_fraction": gated.stopped.to(ratio.dtype), "ratio": ratio, **corrected.columns}
        return _Objective(weights * surrogate, columns)

    def _weights(self, micro_batch: Any) -> torch.Tensor:
        """Return the token weights [M], corrected for the number of kept tokens if the denominator is "kept"."""
        weights: torch.Tensor = micro_batch.weights[self.term]
        if self._config.correction_rule.denominator == "kept":
            weights = weights * micro_batch.annotations[Annotation.RECOUNTED]
        return weights

    def _tokens(self, quantities: Mapping[str, torch.Tensor], micro_batch: Any) -> tuple[torch.Tensor, PolicyTokens]:
        """Return the trainer's log-probabilities before the update [M], and the policy tokens of the micro-batch."""
        now, behaviour = quantities["logprob"].detach(), micro_batch.behaviour_logprobs
        old = micro_batch.annotations.get(Annotation.PROXIMAL, now)
        share = micro_batch.annotations.get(Annotation.PROXIMAL_SHARE)
        if self._config.anchor == "loglinear" and share is not None:
            old = behaviour + share * (now - behaviour)
        return old, PolicyTokens(
            logprob=quantities["logprob"],
            anchor=behaviour if self._config.anchor == "behaviour" else old,
            behaviour=behaviour,
            advantages=micro_batch.advantages,
            entropy=quantities["entropy"],
            weighted=micro_batch.weights["policy"] != 0,
            sequences=micro_batch.trajectory[micro_batch.rows],
            turns=micro_batch.turns,
            annotations=micro_batch.annotations,
        )


@torch.no_grad()
def _local_columns(tokens: PolicyTokens) -> dict[str, torch.Tensor]:
    """Compute each token's contribution to the metrics that need no other token, [M]."""
    # k3 of http://joschu.net/blog/kl-approx.html with samples from the behaviour policy: never negative, unbiased
    moved = bounded(tokens.logprob - tokens.behaviour)
    return {"approx_kl": moved.exp() - 1.0 - moved, "entropy": tokens.entropy}


@torch.no_grad()
def _metrics(columns: Mapping[str, torch.Tensor], weighted: torch.Tensor) -> dict[str, tuple[float, float]]:
    """Sum columns [M] over the weighted tokens, as (sum, count)."""
    sums = torch.stack([column[weighted].double().sum() for column in columns.values()]).tolist()
    count = float(weighted.sum())
    return {name: (value, count) for name, value in zip(columns, sums, strict=True)}
