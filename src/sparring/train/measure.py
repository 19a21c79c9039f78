"""Metrics of one forward_backward, summed over its micro-batches.

Shapes: M weighted tokens of a micro-batch.
"""

from __future__ import annotations

from collections import defaultdict

import msgspec
import numpy as np
import torch

from sparring.algo.tokens import LARGEST_LOG_RATIO
from sparring.batch.tensors import MicroBatch
from sparring.protocols import LossResult


class PlainMeasures(msgspec.Struct, frozen=True, kw_only=True):
    """Measures as plain data: losses by term, (sum, count) by metric, maxima, counts, and the sums of `mismatch_*`."""

    losses: dict[str, float]
    sums: dict[str, tuple[int | float, int | float]]
    maxima: dict[str, int | float]
    counts: dict[str, int]
    mismatch: tuple[float, ...]


class Measures:
    """Sums, counts and maxima of one batch. A metric without contributions is absent, which differs from 0.

    `pristine` is False after the first optimiser step of an update, when the weights are not those of `version`.
    """

    def __init__(self, version: int, *, pristine: bool = True) -> None:
        self._version = version
        self._pristine = pristine
        self._losses: dict[str, float] = defaultdict(float)
        self._sums: dict[str, tuple[float, float]] = {}
        self._maxima: dict[str, float] = {}
        self._counts: dict[str, int] = defaultdict(int)
        self._mismatch = np.zeros(4)

    def add_loss(self, term: str, result: LossResult) -> None:
        """Add the result of one term on one micro-batch."""
        self._losses[term] += result.loss.item()
        for name, (amount, count) in result.metrics.items():
            before = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = (before[0] + amount, before[1] + count)

    def add_tokens(self, micro: MicroBatch, logprobs: torch.Tensor | None) -> None:
        """Count the weighted tokens, and compare their log-probabilities with the log-probabilities that the engine
        recorded.

        A token is fresh if weights of this trainer's version sampled it and computed all KV that the token attended to.
        Only for fresh tokens the two log-probabilities have to be equal (law 3). All other sampled tokens are stale and
        have separate metrics.

        For the n fresh tokens, with d = the trainer's log-probability - the engine's and the importance weight w =
        exp(d):

            logprob_max_abs_diff   max |d|
            logprob_mean_abs_diff  sum |d| / n
            mismatch_k3            sum (w - 1 - d) / n: estimates KL(engine || trainer), unbiased, never negative
                                   (k3 of http://joschu.net/blog/kl-approx.html)
            mismatch_ess           (sum w)^2 / (n * sum w^2), from 1 / n to 1: the effective sample size as a share
                                   of n (Kish, Survey Sampling, 1965)

        Equal log-probabilities give exactly 0, 0, 0 and 1.

        Args:
            logprobs: [M] float32 log-probabilities of the training forward pass; None for a scalar head.
        """
        self._counts["tokens"] += len(micro.targets)
        self._counts["forward"] += len(micro.tokens)
        self._counts["shared"] += int(micro.shared.sum())
        self._counts["micro_batches"] += 1
        if logprobs is None:
            return
        versions, kv_versions = micro.versions.cpu().numpy(), micro.kv_versions.cpu().numpy()
        sampled = versions >= 0
        fresh = sampled & (versions == self._version) & (kv_versions == self._version) & self._pristine
        stale = sampled & ~fresh
        difference = (logprobs.detach() - micro.behaviour_logprobs).abs().cpu().numpy()
        self._maximum("logprob_max_abs_diff", difference[fresh])
        self._maximum("logprob_stale_max_abs_diff", difference[stale])
        self._maximum("version_lag_max", self._version - versions[sampled])
        self._compare((logprobs.detach() - micro.behaviour_logprobs).double().cpu().numpy()[fresh])
        self._counts["sampled"] += int(sampled.sum())
        self._counts["stale"] += int(stale.sum())

    def plain(self) -> PlainMeasures:
        """Return everything as plain data."""
        return PlainMeasures(
            losses=dict(self._losses),
            sums=dict(self._sums),
            maxima=dict(self._maxima),
            counts=dict(self._counts),
            mismatch=tuple(self._mismatch.tolist()),
        )

    def merge(self, later: PlainMeasures) -> None:
        """Add the measures of later parts. Adding single parts in their order gives the same bits as one `Measures` for
        all parts."""
        for term, loss in later.losses.items():
            self._losses[term] += loss
        for name, (amount, count) in later.sums.items():
            before = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = (before[0] + amount, before[1] + count)
        for name, largest in later.maxima.items():
            self._raise_maximum(name, largest)
        for name, number in later.counts.items():
            self._counts[name] += number
        self._mismatch = self._mismatch + np.array(later.mismatch)

    def result(self) -> dict[str, float]:
        """Return all metrics by name."""
        metrics = {f"loss_{term}": value for term, value in self._losses.items()}
        metrics |= {name: amount / count for name, (amount, count) in self._sums.items() if count}
        metrics |= self._maxima
        if self._counts["fresh"]:
            count, (gaps, k3, weights, squares) = self._counts["fresh"], self._mismatch
            metrics |= {"logprob_mean_abs_diff": (gaps / count).item(), "mismatch_k3": (k3 / count).item()}
            metrics["mismatch_ess"] = (weights * weights / (count * squares)).item()
        if self._counts["sampled"]:
            metrics["logprob_stale_share"] = self._counts["stale"] / self._counts["sampled"]
        metrics["tokens_trained"] = float(self._counts["tokens"])
        metrics["tokens_forward"] = float(self._counts["forward"])
        metrics["tokens_shared"] = float(self._counts["shared"])
        metrics["micro_batches"] = float(self._counts["micro_batches"])
        return metrics

    def _compare(self, difference: np.ndarray) -> None:
        """Add up the mismatch of fresh tokens in float64, because an exact engine must have exactly 0."""
        # an engine may report minus infinity for a token that it sampled: it must not make the sum infinite
        bounded = np.clip(difference, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
        weights = np.exp(bounded)
        parts = (np.abs(difference), weights - 1.0 - bounded, weights, weights * weights)
        self._mismatch = self._mismatch + np.array([part.sum() for part in parts])
        self._counts["fresh"] += len(difference)

    def _maximum(self, name: str, values: np.ndarray) -> None:
        if len(values):
            self._raise_maximum(name, values.max().item())

    def _raise_maximum(self, name: str, largest: float) -> None:
        # NaN must win: a comparison with it is false, so it would vanish from a plain max
        before = self._maxima.get(name, 0.0)
        self._maxima[name] = largest if largest != largest or largest > before else before
