"""`LocalTrainer`: one model on one device, called from the event loop and computed on its own thread."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
import xxhash
from torch import nn

from sparring.batch.packing import pack
from sparring.batch.tensors import micro_batch
from sparring.batch.units import cut_units, pack_units
from sparring.errors import refusal
from sparring.generation import ScoreRequest, Scores
from sparring.kernels.memory import give_back
from sparring.model.attention import Packed
from sparring.model.causal import CausalModel
from sparring.model.head import token_quantities
from sparring.protocols import Loss
from sparring.train import checkpoint
from sparring.train.average import Average
from sparring.train.config import TrainConfig
from sparring.train.lanes import Lanes
from sparring.train.measure import Measures
from sparring.train.non_finite import DROPPED, FiniteSteps
from sparring.train.optimiser import Optimiser, learning_rate
from sparring.train.parts import Part, Parts, measured
from sparring.train.quantities import Quantities
from sparring.train.rank_parts import Dealt, exchanged
from sparring.train.ranks import RankLayout, agree
from sparring.train.sharded_parameters import OTHERWISE, SHARD
from sparring.train.sharded_weights import ShardedWeights
from sparring.train.survey import spread, surveyed, weighted_tokens
from sparring.train.trained_weights import TrainedWeights, WholeWeights
from sparring.types import Batch, CheckpointRef, Sample, StepResult, WeightRef
from sparring.weights.checksum import checksum
from sparring.weights.inline import Probe

T = TypeVar("T")
PerToken = tuple[float, ...]

_PROBE_TOKENS = 16
_UNITS = ("token", "turn", "sequence", "pair")
"""Units of losses that the trainer supports: a micro-batch holds whole rows and whole pairs; `survey` covers sequences
of several rows."""


class LocalTrainer:
    """Trainer of a `CausalModel` in place. If the model has an adapter for all rows, only the adapter is trained,
    published and saved. Implements `Trainer`.

    float32 trains the module's own parameters. Any other dtype has float32 master weights, accumulates gradients in
    float32 and casts after each step. All tensor work runs in one worker thread, in the order of the calls; on a CPU a
    second thread computes half of each micro-batch in parallel.

    Args:
        model: model to train; only the trainer may compute with it.
        losses: losses to train with; a batch may carry only the terms of these losses.
        total_steps: number of optimiser steps in the learning rate's schedule.
        threads: CPU threads of the worker; 0 keeps torch's number.
        teachers: models to compare rows with, by name; only the trainer may compute with them. A teacher that is an
            `Average` is updated at each version.
        layout: ranks that train the model together. All get the same calls of `forward`, `forward_backward`, `step`,
            `save` and `restore` in the same order; if they hold the parameters in shards, of `push` too.
    """

    def __init__(
        self,
        model: CausalModel,
        config: TrainConfig,
        losses: Sequence[Loss],
        *,
        name: str,
        total_steps: int,
        threads: int = 0,
        teachers: Mapping[str, CausalModel | Average] | None = None,
        layout: RankLayout = RankLayout(),
    ) -> None:
        _check_units(losses)
        self._model = model
        self._config = config
        self._losses = {loss.term: loss for loss in losses}
        self._paired = frozenset(loss.term for loss in losses if loss.needs.unit == "pair")
        # log-probabilities are always computed, to be compared with those that the engine recorded
        self._always_needed = frozenset() if model.is_scalar else frozenset({"logprob"})
        self._averages = {name: teacher for name, teacher in (teachers or {}).items() if isinstance(teacher, Average)}
        self._models = {**(teachers or {}), name: model}
        self._by_teacher = len(teachers or {}) > 1
        divergence = next((loss.needs.divergence for loss in losses if loss.needs.divergence), None)
        self._quantities = Quantities(model, teachers or {}, divergence)
        self._name = name
        self._total_steps = total_steps
        self._version = self._steps = self._updates = 0
        self._pristine = True  # False between the optimiser steps of an update
        self._has_gradients = False
        self._tokens = 0.0  # tokens trained since the last step
        self._finite = FiniteSteps(name)
        self._trained = model.adapters.everywhere or model
        if self._trained is not model:
            model.module.requires_grad_(False)
            for parameter in self._trained.parameters().values():
                parameter.requires_grad_(True)
        parameters = self._trained.parameters().items()  # of a whole model, with stored buffers
        trained = {name: p for name, p in parameters if isinstance(p, nn.Parameter)}
        self._ranks = layout.ranks
        self._optimiser = Optimiser(trained, config, layout.ranks, apart=layout.sharded)
        # the same in every run, and spread over the vocabulary
        self._probe_tokens = tuple(
            xxhash.xxh3_64_intdigest(f"probe/{index}".encode()) % model.vocab_size
            for index in range(min(_PROBE_TOKENS, model.max_positions))
        )
        self._idle_tokens = any(loss.needs.idle_tokens for loss in losses)
        threads = threads or torch.get_num_threads()
        self._loaded = dict[str, str]()
        self._weights = self._sharded(self._averages) if layout.sharded else self._whole(threads)
        self._worker = ThreadPoolExecutor(1, f"trainer-{name}", initializer=torch.set_num_threads, initargs=(threads,))

    def _whole(self, threads: int) -> TrainedWeights:
        parts: Parts = Dealt(self._optimiser, self._ranks, exchanged(self._optimiser, self._ranks))
        if self._ranks.count == 1:
            parts = Lanes(self._optimiser, threads=threads, on_cpu=self._model.device.type == "cpu")
        return WholeWeights(self._trained, self._optimiser, parts, self._ranks)

    def _sharded(self, averages: Mapping[str, Average]) -> TrainedWeights:
        if averages:
            raise refusal(SHARD, "a model without a moving average", min(averages), OTHERWISE)
        self._loaded[self._name] = checksum(self._model.state())  # afterwards no rank has all of them
        return ShardedWeights(self._model, self._optimiser, self._ranks)

    @property
    def version(self) -> int:
        return self._version

    def checksums(self) -> dict[str, str]:
        """Return the checksum of the weights of the trained model and of each teacher, by name. Call this before the
        first step."""
        others = {name: model for name, model in self._models.items() if name not in self._loaded}
        return {**self._loaded, **{name: checksum(model.state()) for name, model in others.items()}}

    async def forward(
        self, rows: Sequence[Sample], needs: Set[str] = frozenset({"logprob"})
    ) -> list[Mapping[str, PerToken]]:
        """Compute quantities of every token with weight in a loss term, under the current weights, without gradients.

        Rows are packed and computed as in `forward_backward`, so log-probabilities are bitwise equal to those of
        training. Tokens with an advantage of 0 are included.

        Args:
            needs: names of `model.head.QUANTITIES`, and `teacher`: the log-probability under the teacher that the row
                names.

        Returns:
            For each row, in order, one value per token and quantity; 0.0 at tokens without weight in any term.
        """
        return await self._run_in_worker(self._forward, rows, needs)

    async def score(self, teacher: str, request: ScoreRequest) -> Scores:
        return await self._run_in_worker(self._score, teacher, request)

    async def forward_backward(self, batch: Batch) -> Mapping[str, float]:
        """Compute the losses of a batch and add up their gradients, micro-batch by micro-batch.

        Returns:
            loss_<term>; the losses' own metrics; tokens_trained, tokens_forward (computed), tokens_shared (saved by
                shared prefixes), micro_batches; forward_backward_s. If sampled tokens were trained, also
                logprob_max_abs_diff, logprob_mean_abs_diff, mismatch_k3 and mismatch_ess (fresh tokens: see
                `Measures.add_tokens`), logprob_stale_max_abs_diff, logprob_stale_share and version_lag_max.

        After an error no gradient since the last step is left.

        Raises:
            ValueError: the batch is for another model, or has a term without a loss in this trainer.
        """
        return await self._run_in_worker(self._trained_or_dropped, batch)

    async def step(self, *, ends_update: bool = True) -> StepResult:
        """Apply the gradients and, at the end of an update, increment the version.

        Without gradients (all groups filtered) the weights do not change. After the first step of an update no token
        counts as fresh until the next version.

        Metrics: learning_rate, step_s, updated (1 if weights changed) and, with gradients, grad_norm (before clipping).
        A non-finite gradient is dropped: updated is 0, tokens_dropped is the number of the batches' tokens, and
        tokens_trained is 0 and replaces the value of `forward_backward`. The last of `non_finite.DROPPED_STEPS` such
        steps in a row raises NotFinite.
        """
        return await self._run_in_worker(self._step, ends_update)

    async def push(self) -> WeightRef:
        """Publish a copy of the trained weights with a probe: fixed tokens and their log-probabilities under these
        weights. A model with a scalar head has no probe. Weights that are not finite are refused (NotFinite)."""
        return await self._run_in_worker(self._push)

    async def save(self, path: str, *, stage: str, metrics: Mapping[str, float]) -> CheckpointRef:
        """Write a checkpoint to the folder `path`, atomically; it suffices for a bitwise equal resume. Raises NotFinite
        for weights that are not finite, and StoreError if writing fails; earlier checkpoints are then intact."""
        return await self._run_in_worker(self._save, path, stage, metrics)

    async def restore(self, ref: CheckpointRef) -> None:
        """Restore a checkpoint of a trainer with the same model and config. Raises BadInput if the config differs.
        Training then continues bitwise as if it had never stopped."""
        await self._run_in_worker(self._restore, ref)

    async def close(self) -> None:
        """Finish pending calls and end the worker threads. Can be called twice."""
        await asyncio.to_thread(self._worker.shutdown)
        await asyncio.to_thread(self._weights.parts.close)
        self.release()

    def release(self) -> None:
        """Remove published weights. May be called from another thread."""
        self._weights.close()

    async def _run_in_worker(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, function, *arguments)

    @torch.no_grad()
    def _forward(self, rows: Sequence[Sample], needs: Set[str]) -> list[Mapping[str, PerToken]]:
        packs = pack(rows, self._config.tokens_at_once)
        values = self._weights.deal(packs, partial(self._forward_rows, needs), list[dict[str, PerToken]])
        values_of = {
            id(row): of_row
            for packed, of_rows in zip(packs, values, strict=True)
            for row, of_row in zip(packed, of_rows, strict=True)
        }
        return [values_of[id(row)] for row in rows]

    def _forward_rows(self, needs: Set[str], rows: Sequence[Sample]) -> list[dict[str, PerToken]]:
        """Compute the values of `forward` for the rows of one micro-batch."""
        terms = dict.fromkeys({term for row in rows for term in row.weights}, 1.0)
        micro = micro_batch([replace(row, advantages=None) for row in rows], terms, self._model.device)
        values = self._quantities(micro, needs) if len(micro.targets) else {}
        columns = {name: iter(values[name].tolist() if values else ()) for name in needs}
        return [{name: spread(column, mask) for name, column in columns.items()} for mask in map(weighted_tokens, rows)]

    def _score(self, teacher: str, request: ScoreRequest) -> Scores:
        return self._quantities.score(teacher, request, self._version)

    def _trained_or_dropped(self, batch: Batch) -> dict[str, float]:
        try:
            return self._forward_backward(batch)
        except BaseException:
            self._drop_gradients()
            raise

    def _drop_gradients(self) -> None:
        self._optimiser.discard()
        self._has_gradients, self._tokens = False, 0.0

    def _forward_backward(self, batch: Batch) -> dict[str, float]:
        started = time.perf_counter()
        if batch.model != self._name:
            raise ValueError(f"batch {batch.step}: expected rows of model {self._name}, got rows of {batch.model}")
        unknown = batch.denominators.keys() - self._losses.keys()
        if unknown:
            raise ValueError(f"batch {batch.step}: expected terms out of {sorted(self._losses)}, got {sorted(unknown)}")
        measures = self._measures()
        all_rows = surveyed(batch.rows, batch.denominators, list(self._losses.values()), self._forward)
        packed = self._pack_by_teacher([row for row in all_rows if row.label != 0])
        parts = [cut_units(rows, self._weights.parts.lanes, self._paired, self._model.context) for rows in packed]
        for of_part in self._weights.parts.run(parts, partial(self._part, batch.denominators)):
            measures.merge(of_part)
            self._has_gradients = True
        give_back()  # memory of activations; the published weights will need about as much as the gradients
        metrics = measures.result()
        self._tokens += metrics["tokens_trained"]
        return {**metrics, "forward_backward_s": time.perf_counter() - started}

    def _pack_by_teacher(self, rows: Sequence[Sample]) -> list[list[Sample]]:
        """Pack rows into micro-batches with rows of one teacher each, so that a teacher computes only its own rows."""
        parts = [list(rows)]
        if self._by_teacher:
            names = sorted({str(row.teacher) for row in rows})
            parts = [[row for row in rows if str(row.teacher) == name] for name in names]
        return [packed for part in parts for packed in pack_units(part, self._config.tokens_at_once, self._paired)]

    def _part(self, denominators: Mapping[str, float], rows: Sequence[Sample]) -> Part | None:
        """Compute the losses of a part of a micro-batch; None if it has no token to train."""
        micro = micro_batch(rows, denominators, self._model.device, idle_tokens=self._idle_tokens)
        if not len(micro.targets):
            return None
        losses = [self._losses[term] for term in micro.weights]
        needs = self._always_needed.union(*(loss.needs.quantities for loss in losses))
        quantities = self._quantities(micro, needs)
        results = {loss.term: loss(quantities, micro) for loss in losses}
        logprobs = quantities["logprob"].detach() if self._always_needed else None
        loss = reduce(add, (result.loss for result in results.values()))
        return Part(loss, partial(measured, self._measures(), micro, logprobs, results))

    def _measures(self) -> Measures:
        return Measures(self._version, pristine=self._pristine)

    def _step(self, ends_update: bool) -> StepResult:
        started = time.perf_counter()
        rate = learning_rate(self._config, self._steps, self._total_steps)
        metrics = {"learning_rate": rate, "updated": 0.0}
        if self._has_gradients:
            norm = self._optimiser.step(rate)
            metrics |= {"grad_norm": norm, "updated": float(math.isfinite(norm))}
            metrics |= self._finite.add(norm, self._tokens, self._version + 1)
            self._weights.update()
            self._has_gradients = False
        self._steps += 1
        self._tokens = 0.0
        self._pristine = ends_update
        if ends_update:
            for average in self._averages.values():
                average.follow(self._optimiser.masters())
            self._updates += 1
            self._version += 1
        return StepResult(version=self._version, metrics={**metrics, "step_s": time.perf_counter() - started})

    @torch.no_grad()
    def _push(self) -> WeightRef:
        self._weights.check_finite(self._name, self._version)
        adapter = None if self._trained is self._model else self._name
        probe = None if self._model.is_scalar else self._probe()
        return self._weights.publish(self._name, self._version, probe, adapter=adapter)

    def _probe(self) -> Probe:
        """Return the probe: tokens [T], and the log-probabilities [T - 1] of all tokens but the first."""
        tokens, device = torch.tensor(self._probe_tokens, device=self._model.device), self._model.device
        places, heat = torch.arange(len(tokens) - 1, device=device), torch.ones(len(tokens) - 1, device=device)
        layout = Packed(torch.tensor([0, len(places)], dtype=torch.int32, device=device))
        with self._weights.computing():
            hidden = self._model.hidden(tokens[:-1], places, layout)
            quantities = token_quantities(self._model, hidden, tokens[1:], heat, frozenset({"logprob"}))
        return self._probe_tokens, tuple(quantities["logprob"].tolist())

    def _save(self, path: str, stage: str, metrics: Mapping[str, float]) -> CheckpointRef:
        self._weights.check_finite(self._name, self._version)
        manifest = {
            "model": self._name,
            "stage": stage,
            "step": self._updates,
            "optimiser_steps": self._steps,
            "version": self._version,
            "config": self._config_digest(),
            DROPPED: self._finite.in_a_row,
            "metrics": dict(metrics),
        }
        whole = {checkpoint.AVERAGE.format(name): average.state() for name, average in self._averages.items()}
        count = self._ranks.count
        shards = [checkpoint.SHARD.format(rank + 1, count) for rank in range(count)]
        if count > 1:
            manifest[checkpoint.SHARDS] = dict(zip(shards, self._optimiser.shards, strict=True))
        own = shards[self._ranks.rank] if count > 1 else checkpoint.OPTIMISER
        tensors = {own: self._optimiser.state(), **(whole if self._ranks.rank == 0 else {})}
        checkpoint.write(Path(path), tensors, manifest, self._ranks, self._weights)
        return CheckpointRef(model=self._name, stage=stage, step=self._updates, path=path, metrics=dict(metrics))

    def _restore(self, ref: CheckpointRef) -> None:
        manifest, tensors = checkpoint.read(Path(ref.path), ranks=self._ranks)
        if manifest["config"] != self._config_digest():
            raise refusal(
                f"checkpoint {ref.path}",
                "the [train] settings and moving averages that it was written with",
                "different ones",
                "restore those settings, or start a new run from its weights",
            )

        def load() -> bytes:
            with checkpoint.stored_optimiser(Path(ref.path), manifest, tensors[checkpoint.MODEL]) as stored:
                self._optimiser.load_state(stored)
            return b""

        agree(self._ranks, load)
        self._weights.load(tensors[checkpoint.MODEL])
        for name, average in self._averages.items():
            average.load_state(tensors[checkpoint.AVERAGE.format(name)])
        self._drop_gradients()
        self._finite.in_a_row = manifest[DROPPED]
        self._steps, self._updates = manifest["optimiser_steps"], manifest["step"]
        self._version, self._pristine = manifest["version"], True

    def _config_digest(self) -> str:
        """Return a digest of the settings that affect results: equal digests and equal data give equal weights."""
        settings = {**msgspec.to_builtins(self._config), "token_budget": self._config.tokens_at_once}
        for name in ("save_every", "keep_last", "best_metric", "best_is_highest"):
            del settings[name]
        if self._averages:
            settings["averages"] = {name: average.decay for name, average in self._averages.items()}
        if self._config.schedule != "constant":
            settings["total_steps"] = self._total_steps
        return xxhash.xxh3_128_hexdigest(msgspec.json.encode(settings, order="deterministic"))


def _check_units(losses: Sequence[Loss]) -> None:
    """Refuse losses whose unit is not in `_UNITS`, because a micro-batch may split it."""
    for loss in losses:
        if loss.needs.unit not in _UNITS:
            unit = f"{loss.needs.unit!r}, which micro-batches may split"
            where, expected = f"loss {loss.term}", f"one of the units {', '.join(_UNITS)}"
            raise refusal(where, expected, unit, "use a loss with one of these")
