"""The policy term: a gated surrogate of the ratio between the policy and the one that sampled.

Shapes: M weighted tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sparring.algo.config import AlgoConfig
from sparring.algo.tokens import PolicyTokens, bounded
from sparring.protocols import LossResult, Needs


class PolicyLoss:
    """What every algorithm of `[algo]` has in common; what sets them apart is chosen there.

        loss = - sum_t weight_t * correction_t * gate(ratio_t, A_t) / denominator
               + kl.coefficient * sum_t weight_t * kl_t / denominator - entropy_bonus * sum_t weight_t * H_t / denominator

    Weights and the denominator are the aggregation's and global: over every micro-batch of the optimiser step. The ratio is to
    the
    anchor: the engine's recorded log-probability, or the trainer's own before the update ("proximal", decoupled PPO, arXiv
    2505.24298, equation 5): then the annotation `proximal`, or where there is none because the batch is trained once, those of
    this very forward, without gradient.
    """

    term = "policy"

    def __init__(self, config: AlgoConfig) -> None:
        self._config = config
        self.needs = Needs(
            quantities=frozenset({"logprob", "entropy"}),
            unit=config.ratio.unit,
            idle_tokens=config.needs_idle_tokens,
        )

    def __call__(self, quantities: Mapping[str, torch.Tensor], micro_batch: Any) -> LossResult:
        """The term's share of the update's loss.

        Args:
            quantities: `logprob` [M] and `entropy` [M] float32 with gradient.
            micro_batch: `batch.tensors.MicroBatch`.

        Returns:
            A scalar, and the metrics clip_fraction (share of tokens that the gate stops), ratio (to the anchor), approx_kl (to
            what sampled), entropy, and where there is a reference reference_kl, as (sum, count) over the policy's tokens, beside
            those of the correction.
        """
        config, weights = self._config, micro_batch.weights[self.term]
        old = micro_batch.annotations.get("proximal", quantities["logprob"].detach())
        tokens = _tokens(quantities, micro_batch, old if config.anchor == "proximal" else micro_batch.behaviour_logprobs)
        corrected = config.correction_rule(old, tokens)
        log_ratio = bounded(config.ratio(tokens))
        gated = config.gate(log_ratio, tokens)
        total = (weights * corrected.weights * gated.surrogate).sum()
        metrics = {**_metrics(tokens, log_ratio, gated.stopped), **corrected.metrics}
        if config.entropy_bonus:
            total = total + config.entropy_bonus * (weights * quantities["entropy"]).sum()
        if config.kl.coefficient:
            kl = config.kl(quantities["logprob"], micro_batch.annotations["reference"])
            total = total - config.kl.coefficient * (weights * kl).sum()
            metrics["reference_kl"] = (kl.detach()[tokens.ours].double().sum().item(), metrics["ratio"][1])
        return LossResult(loss=-total / micro_batch.denominators[self.term], metrics=metrics)


def _tokens(quantities: Mapping[str, torch.Tensor], micro_batch: Any, anchor: torch.Tensor) -> PolicyTokens:
    return PolicyTokens(
        logprob=quantities["logprob"],
        anchor=anchor,
        behaviour=micro_batch.behaviour_logprobs,
        advantages=micro_batch.advantages,
        entropy=quantities["entropy"],
        ours=micro_batch.weights["policy"] != 0,
        rows=micro_batch.rows,
        turns=micro_batch.turns,
        annotations=micro_batch.annotations,
    )


@torch.no_grad()
def _metrics(tokens: PolicyTokens, log_ratio: torch.Tensor, stopped: torch.Tensor) -> dict[str, tuple[float, float]]:
    ours = tokens.ours
    # k3 of http://joschu.net/blog/kl-approx.html with samples from the behaviour policy: always positive, unbiased
    moved = bounded(tokens.logprob - tokens.behaviour)
    kl = (moved.exp() - 1.0 - moved)[ours]
    sums = torch.stack([(stopped & ours).sum(), log_ratio.exp()[ours].sum(), kl.sum(), tokens.entropy[ours].sum(), ours.sum()])
    *found, count = sums.double().tolist()
    return {name: (value, count) for name, value in zip(("clip_fraction", "ratio", "approx_kl", "entropy"), found, strict=True)}
