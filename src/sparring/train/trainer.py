"""`LocalTrainer`: one model on one device, called from the event loop and computed on its own thread."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
import xxhash
from torch import nn

from sparring.batch.packing import pack
from sparring.batch.tensors import MicroBatch, micro_batch
from sparring.batch.units import cut_units, pack_units
from sparring.errors import refusal
from sparring.generation import ScoreRequest, Scores
from sparring.kernels.memory import give_back
from sparring.model.attention import Packed
from sparring.model.causal import CausalModel
from sparring.model.divergence import from_teacher, from_tops
from sparring.model.head import TargetRows, score_tokens, token_quantities
from sparring.protocols import Divergence, Loss, LossResult
from sparring.train import checkpoint
from sparring.train.average import Average
from sparring.train.begun import Begun, begun
from sparring.train.config import TrainConfig
from sparring.train.finite import FiniteSteps, check_finite
from sparring.train.lane_sums import LaneSums
from sparring.train.measure import Measures
from sparring.train.optimiser import Optimiser, learning_rate
from sparring.train.survey import surveyed
from sparring.types import Batch, CheckpointRef, Sample, StepResult, WeightRef
from sparring.weights.inline import Probe, publish

T = TypeVar("T")
PerToken = tuple[float, ...]

_PROBE_TOKENS = 16
_LANES = 2
"""Number of micro-batches that a CPU computes in parallel, so that one uses the threads that the other leaves idle
between parallel regions. It is the same on every machine, because the division of rows decides the last bits of a
gradient."""
_UNITS = ("token", "turn", "sequence", "pair")
"""Units of losses that the trainer supports: a micro-batch holds whole rows and whole pairs; `survey` covers sequences
of several rows."""


class _MicroBatchResult(NamedTuple):
    """Result of one micro-batch: log-probabilities [M] (None for a scalar head), and the loss of each term."""

    micro: MicroBatch
    logprobs: torch.Tensor | None
    results: Mapping[str, LossResult]


class LocalTrainer:
    """Trainer of a `CausalModel` in place. If the model has an adapter for all rows, only the adapter is trained,
    published and saved. Implements `Trainer`.

    float32 trains the module's own parameters. Any other dtype has float32 master weights, accumulates gradients in
    float32 and casts after each step. All tensor work runs in one worker thread, in the order of the calls; on a CPU a
    second thread computes half of each micro-batch in parallel.

    Args:
        model: model to train; only the trainer may compute with it.
        losses: losses by which it trains; a batch may carry only their terms.
        name: name of the model in the run.
        total_steps: number of optimiser steps in the learning rate's schedule.
        threads: CPU threads of the worker; 0 keeps torch's number.
        teachers: models to compare rows with, by name; only the trainer may compute with them. A moving average follows
            the trained weights at each version.
    """

    def __init__(
        self,
        model: CausalModel,
        config: TrainConfig,
        losses: Sequence[Loss],
        *,
        name: str,
        total_steps: int,
        version: int = 0,
        threads: int = 0,
        teachers: Mapping[str, CausalModel | Average] | None = None,
    ) -> None:
        for loss in losses:
            if loss.needs.unit not in _UNITS:
                got = f"{loss.needs.unit!r}, which micro-batches may split"
                raise refusal(
                    f"loss {loss.term}", f"one of the units {', '.join(_UNITS)}", got, "use a loss with one of these"
                )
        self._model = model
        self._config = config
        self._losses = {loss.term: loss for loss in losses}
        self._paired = frozenset(loss.term for loss in losses if loss.needs.unit == "pair")
        # log-probabilities are always computed, to be compared with those that the engine recorded
        self._always_needed = frozenset() if model.is_scalar else frozenset({"logprob"})
        self._divergence = next((loss.needs.divergence for loss in losses if loss.needs.divergence), None)
        self._averages = {name: teacher for name, teacher in (teachers or {}).items() if isinstance(teacher, Average)}
        self._teachers = {
            name: teacher.model if isinstance(teacher, Average) else teacher
            for name, teacher in (teachers or {}).items()
        }
        self._name = name
        self._total_steps = total_steps
        self._version = version
        self._steps = self._updates = 0
        self._pristine = True  # False between the optimiser steps of an update
        self._has_gradients = False
        self._tokens = 0.0  # tokens trained since the last step
        self._finite, self._begun = FiniteSteps(name), Begun()
        self._trained = model.adapters.everywhere or model
        if self._trained is not model:
            model.module.requires_grad_(False)
            for parameter in self._trained.parameters().values():
                parameter.requires_grad_(True)
        parameters = self._trained.parameters().items()  # of a whole model, with stored buffers
        self._optimiser = Optimiser({name: p for name, p in parameters if isinstance(p, nn.Parameter)}, config)
        # the same in every run, and spread over the vocabulary
        self._probe_tokens = tuple(
            xxhash.xxh3_64_intdigest(f"probe/{index}".encode()) % model.vocab_size
            for index in range(min(_PROBE_TOKENS, model.max_positions))
        )
        self._idle_tokens = any(loss.needs.idle_tokens for loss in losses)
        self._lanes = _LANES if model.device.type == "cpu" else 1
        self._sums = LaneSums(self._optimiser, one_thread=self._lanes == 1)
        self._threads = threads or torch.get_num_threads()
        # torch keeps its number of threads per calling thread, so each worker sets its own
        self._worker, self._second_worker = (
            ThreadPoolExecutor(1, f"trainer-{name}", initializer=torch.set_num_threads, initargs=(count,))
            for count in (self._threads, max(1, self._threads // 2))
        )

    @property
    def version(self) -> int:
        return self._version

    async def forward(
        self, rows: Sequence[Sample], needs: Set[str] = frozenset({"logprob"})
    ) -> list[Mapping[str, PerToken]]:
        """Compute quantities of every token that some term weighs, under the current weights, without gradients.

        Rows are packed and computed as in `forward_backward`, so log-probabilities are bitwise equal to training's.
        Tokens with an advantage of 0 are included.

        Args:
            needs: names of `model.head.QUANTITIES`, and `teacher`: the log-probability under the teacher that the row
                names.

        Returns:
            For each row, in order, one value per token and quantity; 0.0 at tokens that no term weighs.
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

        Raises:
            ValueError: the batch is for another model, or has a term without a loss in this trainer.
        """
        return await self._run_in_worker(self._forward_backward, batch)

    async def step(self, *, ends_update: bool = True) -> StepResult:
        """Apply the gradients and, at the end of an update, increment the version.

        Without gradients (all groups filtered) the weights do not change. After the first step of an update no token
        counts as fresh until the next version.

        Metrics: learning_rate, step_s, updated (1 if weights changed) and, with gradients, grad_norm (before clipping).
        A non-finite gradient is dropped: updated is 0, tokens_dropped is the number of the batches' tokens, and
        tokens_trained is 0 and replaces the value of `forward_backward`. For a run whose first steps read some
        gradients in the wrong order, tensors_misplaced is the number of such tensors.

        Raises:
            NotFinite: the step is the last of several in a row with a non-finite gradient (`finite.DROPPED_STEPS`).
        """
        return await self._run_in_worker(self._step, ends_update)

    async def push(self) -> WeightRef:
        """Publish a copy of the trained weights with a probe: fixed tokens and their log-probabilities under these
        weights. A model with a scalar head has no probe.

        Raises:
            NotFinite: a weight is infinite or not a number.
        """
        return await self._run_in_worker(self._push)

    async def save(self, path: str, *, stage: str, metrics: Mapping[str, float]) -> CheckpointRef:
        """Write a checkpoint to the folder `path`, atomically; it suffices for a bitwise resume.

        Raises:
            StoreError: the disk is full or cannot be written; earlier checkpoints are intact.
            NotFinite: a weight is infinite or not a number.
        """
        return await self._run_in_worker(self._save, path, stage, metrics)

    async def restore(self, ref: CheckpointRef) -> None:
        """Restore a checkpoint of a trainer with the same model and config. Training then continues bitwise as if it
        had never stopped.

        Raises:
            BadInput: there is no checkpoint, or it was written under another config.
            StoreError: the checkpoint is damaged.
        """
        await self._run_in_worker(self._restore, ref)

    async def close(self) -> None:
        """Finish pending calls and end the worker threads. Can be called twice."""
        await asyncio.to_thread(self._worker.shutdown)
        await asyncio.to_thread(self._second_worker.shutdown)

    async def _run_in_worker(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, function, *arguments)

    @torch.no_grad()
    def _forward(self, rows: Sequence[Sample], needs: Set[str]) -> list[Mapping[str, PerToken]]:
        values_of: dict[int, Mapping[str, PerToken]] = {}
        for packed in pack(rows, self._config.tokens_at_once):
            terms = dict.fromkeys({term for row in packed for term in row.weights}, 1.0)
            micro = micro_batch([replace(row, advantages=None) for row in packed], terms, self._model.device)
            values = self._quantities(micro, needs) if len(micro.targets) else {}
            columns = {name: iter(values[name].tolist() if values else ()) for name in needs}
            for row in packed:
                weighted = [any(weights) for weights in zip(*row.weights.values(), strict=True)] or [False] * len(
                    row.tokens
                )
                values_of[id(row)] = {
                    name: tuple(next(column) if is_weighted else 0.0 for is_weighted in weighted)
                    for name, column in columns.items()
                }
        return [values_of[id(row)] for row in rows]

    @torch.no_grad()
    def _score(self, teacher: str, request: ScoreRequest) -> Scores:
        model, count = self._teachers[teacher], len(request.tokens) - 1
        tokens, places = torch.tensor(request.tokens, device=model.device), torch.arange(count, device=model.device)
        layout = Packed(torch.tensor([0, count], dtype=torch.int32, device=model.device))
        hidden = model.hidden(tokens[:-1], places, layout, places[request.first - 1 :])
        temperature = torch.full((len(hidden),), request.temperature, device=model.device)
        scores = score_tokens(model, hidden, tokens[request.first :], temperature, request.top_k)
        return Scores(
            logprobs=tuple(scores.logprob.tolist()),
            entropies=tuple(scores.entropy.tolist()),
            top_ids=tuple(map(tuple, scores.top_ids.tolist())),
            top_logprobs=tuple(map(tuple, scores.top_logprobs.tolist())),
            version=self._version,
        )

    def _forward_backward(self, batch: Batch) -> dict[str, float]:
        started = time.perf_counter()
        if batch.model != self._name:
            raise ValueError(f"batch {batch.step}: expected rows of model {self._name}, got rows of {batch.model}")
        unknown = batch.denominators.keys() - self._losses.keys()
        if unknown:
            raise ValueError(f"batch {batch.step}: expected terms out of {sorted(self._losses)}, got {sorted(unknown)}")
        measures = Measures(self._version, pristine=self._pristine)
        all_rows = surveyed(batch.rows, batch.denominators, list(self._losses.values()), self._forward)
        with self._sums.collecting():
            for rows in self._pack_by_teacher([row for row in all_rows if row.label != 0]):
                parts = cut_units(rows, self._lanes, self._paired, self._model.context)
                for part in self._compute_lanes(parts, batch.denominators):
                    measures.add_tokens(part.micro, part.logprobs)
                    for term, result in part.results.items():
                        measures.add_loss(term, result)
                    self._has_gradients = True
        give_back()  # memory of activations; the published weights will need about as much as the gradients
        metrics = measures.result()
        self._tokens += metrics["tokens_trained"]
        return {**metrics, "forward_backward_s": time.perf_counter() - started}

    def _pack_by_teacher(self, rows: Sequence[Sample]) -> list[list[Sample]]:
        """Pack rows into micro-batches, separately for each teacher, so that each teacher computes only its own
        rows."""
        parts = [list(rows)]
        if len(self._teachers) > 1:
            names = sorted({str(row.teacher) for row in rows})
            parts = [[row for row in rows if str(row.teacher) == name] for name in names]
        return [packed for part in parts for packed in pack_units(part, self._config.tokens_at_once, self._paired)]

    def _compute_lanes(
        self, parts: Sequence[Sequence[Sample]], denominators: Mapping[str, float]
    ) -> list[_MicroBatchResult]:
        """Compute one or two micro-batches in parallel, leaving out micro-batches without tokens to train."""
        self._sums.begin()
        if len(parts) == 1 or self._threads == 1:
            results = [self._micro_batch(lane, rows, denominators) for lane, rows in enumerate(parts)]
        else:
            second = self._second_worker.submit(self._micro_batch, 1, parts[1], denominators)
            torch.set_num_threads(self._threads - self._threads // 2)
            try:
                results = [self._micro_batch(0, parts[0], denominators)]
            finally:
                torch.set_num_threads(self._threads)
                wait([second])
            results.append(second.result())
        return [part for part in results if part is not None]

    def _micro_batch(
        self, lane: int, rows: Sequence[Sample], denominators: Mapping[str, float]
    ) -> _MicroBatchResult | None:
        micro = micro_batch(rows, denominators, self._model.device, idle_tokens=self._idle_tokens)
        result = self._compute_losses(lane, micro) if len(micro.targets) else None
        self._sums.end(lane)
        return result

    def _compute_losses(self, lane: int, micro: MicroBatch) -> _MicroBatchResult:
        losses = [self._losses[term] for term in micro.weights]
        quantities = self._quantities(micro, self._always_needed.union(*(loss.needs.quantities for loss in losses)))
        results = {loss.term: loss(quantities, micro) for loss in losses}
        self._sums.backward(lane, reduce(add, (result.loss for result in results.values())))
        return _MicroBatchResult(micro, quantities["logprob"].detach() if self._always_needed else None, results)

    def _quantities(self, micro: MicroBatch, needs: Set[str]) -> dict[str, torch.Tensor]:
        layout = Packed(micro.cu_seqlens, micro.shared)
        hidden = self._model.hidden(micro.tokens, micro.positions, layout, micro.predicting)
        target_rows = TargetRows(micro.targets, micro.temperature, micro.kept, micro.bias)
        own = needs - {"divergence", "teacher"}
        quantities = token_quantities(
            self._model, hidden, target_rows.targets, target_rows.temperature, own, target_rows.kept, target_rows.bias
        )
        if "divergence" in needs and self._divergence is not None:
            quantities["divergence"] = self._teacher_divergence(micro, hidden, target_rows, self._divergence)
        if "teacher" in needs:
            quantities["teacher"] = self._teacher_logprobs(micro, target_rows)
        return quantities

    def _teacher_divergence(
        self, micro: MicroBatch, hidden: torch.Tensor, target_rows: TargetRows, form: Divergence
    ) -> torch.Tensor:
        """Compute the divergence [M] of the model, with output `hidden` [M, D], from each token's teacher; 0 without a
        teacher."""
        if form.over == "top_k":
            if micro.tops is None:
                raise ValueError("expected rows with a teacher's top-k tokens, got none; run its annotator first")
            return from_tops(self._model, hidden, micro.temperature, micro.tops, form)
        divergence = hidden.new_zeros(len(hidden), dtype=torch.float32)
        for mask, teacher, output in self._teacher_outputs(micro):
            divergence = divergence.index_put(
                (mask,), from_teacher(self._model, hidden[mask], teacher, output, target_rows.select(mask), form)
            )
        return divergence

    @torch.no_grad()
    def _teacher_logprobs(self, micro: MicroBatch, target_rows: TargetRows) -> torch.Tensor:
        """Compute each token's log-probability [M] under its teacher, in the distribution it was drawn from; 0 without
        a teacher."""
        logprobs = torch.zeros_like(micro.temperature)
        for mask, teacher, output in self._teacher_outputs(micro):
            logprobs[mask] = token_quantities(
                teacher, output, *target_rows.select(mask)[:2], {"logprob"}, *target_rows.select(mask)[2:]
            )["logprob"]
        return logprobs

    def _teacher_outputs(self, micro: MicroBatch) -> Iterator[tuple[torch.Tensor, CausalModel, torch.Tensor]]:
        """Yield for each teacher that rows name: the mask [M] of its tokens, its model, and its output at them."""
        layout = Packed(micro.cu_seqlens, micro.shared)
        for name, mask in micro.teachers.items():
            teacher = self._teachers[name]
            with torch.no_grad():
                output = teacher.hidden(micro.tokens, micro.positions, layout, micro.predicting[mask])
            yield mask, teacher, output

    def _step(self, ends_update: bool) -> StepResult:
        started = time.perf_counter()
        rate = learning_rate(self._config, self._steps, self._total_steps, ends_late=self._begun.ends_late)
        metrics = {"learning_rate": rate, "updated": 0.0}
        if self._has_gradients:
            norm = self._optimiser.step(rate)
            metrics |= {"grad_norm": norm, "updated": float(math.isfinite(norm))}
            metrics |= self._finite.add(norm, self._tokens, self._version + 1)
            if self._begun.misplaced and self._optimiser.reordered:
                metrics["tensors_misplaced"] = float(len(self._optimiser.reordered))
            self._write_back()
            self._has_gradients = False
        self._steps += 1
        self._tokens = 0.0
        self._pristine = ends_update
        if ends_update:
            for average in self._averages.values():
                average.follow(self._optimiser.masters)
            self._updates += 1
            self._version += 1
        return StepResult(version=self._version, metrics={**metrics, "step_s": time.perf_counter() - started})

    def _write_back(self) -> None:
        if self._optimiser.has_masters:
            self._trained.load_state({**self._trained.state(), **self._optimiser.cast()})
        else:
            self._trained.refresh()

    @torch.no_grad()
    def _push(self) -> WeightRef:
        check_finite(self._trained.state(), self._name, self._version)
        adapter = None if self._trained is self._model else self._name
        probe = None if self._model.is_scalar else self._probe()
        return publish(self._name, self._version, self._trained.state(), probe, adapter=adapter)

    def _probe(self) -> Probe:
        """Return the probe's tokens [T] and the log-probabilities [T - 1] of all but the first."""
        tokens = self._probe_tokens
        device = self._model.device
        row = torch.tensor(tokens[:-1], device=device)
        hidden = self._model.hidden(
            row,
            torch.arange(len(row), device=device),
            Packed(torch.tensor([0, len(row)], dtype=torch.int32, device=device)),
        )
        targets = torch.tensor(tokens[1:], device=device)
        quantities = token_quantities(
            self._model, hidden, targets, torch.ones(len(row), device=device), frozenset({"logprob"})
        )
        return tokens, tuple(quantities["logprob"].tolist())

    def _save(self, path: str, stage: str, metrics: Mapping[str, float]) -> CheckpointRef:
        check_finite(self._trained.state(), self._name, self._version)
        manifest = {
            "model": self._name,
            "stage": stage,
            "step": self._updates,
            "optimiser_steps": self._steps,
            "version": self._version,
            "config": self._config_digest(),
            **self._begun.manifest(),
            "metrics": dict(metrics),
        }
        tensors = {checkpoint.MODEL: self._trained.state(), checkpoint.OPTIMISER: self._optimiser.state()}
        for name, average in self._averages.items():
            tensors[checkpoint.AVERAGE.format(name)] = average.state()
        checkpoint.write(Path(path), tensors, manifest)
        return CheckpointRef(model=self._name, stage=stage, step=self._updates, path=path, metrics=dict(metrics))

    def _restore(self, ref: CheckpointRef) -> None:
        manifest, tensors = checkpoint.read(Path(ref.path))
        if manifest["config"] != self._config_digest():
            raise refusal(
                f"checkpoint {ref.path}",
                "the [train] settings and moving averages that it was written with",
                "different ones",
                "restore those settings, or start a new run from its weights",
            )
        self._optimiser.load_state(tensors[checkpoint.OPTIMISER])
        self._trained.load_state(tensors[checkpoint.MODEL])
        for name, average in self._averages.items():
            average.load_state(tensors[checkpoint.AVERAGE.format(name)])
        self._has_gradients = False
        self._steps, self._updates = manifest["optimiser_steps"], manifest["step"]
        self._version, self._pristine, self._begun = manifest["version"], True, begun(manifest)

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
