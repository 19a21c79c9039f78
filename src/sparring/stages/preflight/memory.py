"""Peak memory of a process of a run, computed from the recipe and the outlines of its models (`model.outline`)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from sparring.model.hub import model_folder
from sparring.model.outline import Outline, outline
from sparring.recipe.run_config import RunConfig
from sparring.stages.context import ONLINE_STAGES, POLICY
from sparring.stages.models.context_length import engine_of
from sparring.stages.models.uses import trained_models, used_models
from sparring.stages.preflight.rank_memory import FLOAT, Gathering, buckets, gathering, shard

if TYPE_CHECKING:
    from sparring.stages.models.model_use import UsedModel
    from sparring.train.config import TrainConfig

GIB = 1 << 30

LANES, SMALLEST_LANE = 2, 256
"""Number of lanes into which a trainer on a CPU cuts a micro-batch, and the minimum number of tokens of a lane; see
`train.trainer`, `batch.packing`."""
UNCOUNTED = 0.08
"""Allowance for memory that is not counted, as a share of the rest: pieces that the C library keeps, and temporary
copies. Measured by `benchmarks/memory.py`."""
EARLIER = 0.3
"""Share of the memory of the models of earlier stages that the C library keeps when their stage ends. From the peaks of
four long runs (log/2026-11-29-memory.md)."""
LATER = 160 << 20
"""Bytes of libraries that a run imports after its check, and of its own record."""

SCALAR = " (scalar)"
"""Suffix for the name of a model with a scalar head."""


PARTS = (
    (("weights",), "weights", "models.policy.dtype"),
    (("packed",), "packed weights", "models.policy.dtype"),
    (("optimiser",), "optimiser", "models.policy.lora"),
    (("step",), "gradients and activations", "train.token_budget, models.policy.gradient_checkpointing"),
    (("update", "published"), "an update", "models.policy.lora"),
    (("cache",), "engines' caches", "engine.kv.bytes, engine.kv.offload_bytes"),
    (("sampling",), "a step of sampling", "engine.batch.max_tokens"),
    (("process", "earlier", "uncounted"), "the rest", ""),
)
"""Parts of an estimate: its fields, their name in a message, and the keys of a recipe that make the part smaller."""


class TrainedModel(NamedTuple):
    """Model that is trained, with the settings of its trainer and the name of a process that trains a part of it."""

    model: Outline
    train: TrainConfig
    rank: str


class StageModels(NamedTuple):
    """Models that a process holds in a stage. The models of a stage are closed when it ends.

    Attributes:
        trainers: models that are trained.
        teachers: frozen models that the policy's trainer computes.
        frozen: other models that only compute.
        engines: names of models with an engine.
        files: models whose weights are read or written, and not computed.
        averaged: number of parameters of the policy with a moving average in this stage.
        ranks: number of processes that share the trainers' optimisers; 1: this process alone.
        sharded: whether they share the parameters too.
        starts_empty: whether the policy's engine starts without a model, so that its first weights come as an update.
        turn: whose turn it is with `cluster.colocate`: of the trainers, while the policy's engine is asleep, or of this
            engine, while the trainers have no gradients; "": both compute at any time.
    """

    stage: str
    trainers: tuple[TrainedModel, ...] = ()
    teachers: tuple[Outline, ...] = ()
    frozen: tuple[Outline, ...] = ()
    engines: tuple[str, ...] = ()
    files: tuple[Outline, ...] = ()
    averaged: int = 0
    ranks: int = 1
    sharded: bool = False
    starts_empty: bool = False
    turn: Literal["", "trainers", "engine"] = ""

    @property
    def computed(self) -> list[Outline]:
        """Models without an engine that are computed."""
        return [*(one.model for one in self.trainers), *self.teachers, *self.frozen]

    @property
    def awake(self) -> tuple[str, ...]:
        """Names of models with an engine that is awake."""
        return tuple(name for name in self.engines if name != POLICY or self.turn != "trainers")

    @property
    def updates(self) -> bool:
        """Whether the policy's engine here takes weights beside those that it serves."""
        return POLICY in self.awake and (self.starts_empty or (self.stage in ONLINE_STAGES and self.turn == ""))

    @property
    def turns(self) -> tuple[StageModels, ...]:
        """The models at the turn of the trainers and at that of the policy's engine, with `cluster.colocate`."""
        if self.stage not in ONLINE_STAGES:
            return (self,)
        return self._replace(turn="trainers"), self._replace(turn="engine")

    @staticmethod
    def of(config: RunConfig, shapes: Mapping[str, Outline], stage: str) -> StageModels:
        """Return all models of a stage that the run computes itself, in whichever process."""
        used = used_models(config, stage)
        frozen = [one for one in used if one.kind == "frozen"]
        models = StageModels(
            stage=stage,
            trainers=tuple(
                TrainedModel(_model(shapes, one.model, scalar=one.scalar), one.train, one.rank)
                for one in used
                if one.train is not None
            ),
            teachers=tuple(_model(shapes, one.model) for one in frozen if one.trainer),
            frozen=tuple(_model(shapes, one.model, scalar=one.scalar) for one in frozen if not one.trainer),
            engines=tuple(one.model for one in used if one.kind == "engine"),
            averaged=_num_trained(shapes[POLICY]) if _averages(used) else 0,
        )
        idle = not models.computed and not models.engines  # init and export hold the weights that they write
        return models._replace(files=(shapes[POLICY],)) if idle else models


class MemoryEstimate(NamedTuple):
    """Peak memory of one process, in the stage that needs most: numbers of parameters, then bytes."""

    stage: str
    parameters: int  # of the policy
    trained: int  # parameters that training changes: all of the policy, or an adapter's factors
    learner: int  # parameters of models that learn beside it
    averaged: int  # parameters with a moving average
    process: int  # memory of the process before it has a model
    weights: int  # weights of trainers, engines and frozen models
    packed: int  # copies of all these weights in the layout that matrix products read
    optimiser: int  # moments, float32 masters of weights of another dtype, and averages
    step: int  # micro-batches, gradients and published weights of a trainer, at their peak
    update: int  # weights staged for an engine, packed ones included
    published: int  # published weights that stay beside a step; equal processes have them once
    cache: int  # keys and values here and in host memory, and recurrent states
    sampling: int  # one step of generation
    uncounted: int  # allowance, added when `process` is known
    earlier: int = 0  # what the process keeps of the models of earlier stages

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self[5:])

    @staticmethod
    def of(config: RunConfig, shapes: Mapping[str, Outline], process: int = 0) -> MemoryEstimate:
        """Return the estimate of a run in one process, whatever its layout.

        Args:
            shapes: outlines of its models, made by `shapes_of`.
            process: bytes that the process has now; 0: unknown.
        """
        stages = [StageModels.of(config, shapes, stage) for stage in config.run.stages or ("none",)]
        estimates = [MemoryEstimate.of_stage(config, shapes, models, with_later(process)) for models in stages]
        return max(with_earlier(estimates), key=lambda estimate: estimate.total)

    @staticmethod
    def of_stage(
        config: RunConfig, shapes: Mapping[str, Outline], models: StageModels, process: int = 0, published: int = 0
    ) -> MemoryEstimate:
        """Return the estimate of a process with these models.

        Args:
            process: bytes of the process without models; 0: unknown.
            published: bytes of published weights that stay beside a step.
        """
        return _estimate(config, shapes, models, process, published)

    def parts(self) -> list[tuple[str, int, str]]:
        """Return name, bytes and keys of each of `PARTS`."""
        return [(name, sum(getattr(self, field) for field in fields), keys) for fields, name, keys in PARTS]

    def in_words(self) -> str:
        """Return the total and its parts as text."""
        shares = ", ".join(f"{name} {size / GIB:.1f}" for name, size, _ in self.parts() if size)
        return f"{self.total / GIB:.1f} GiB in stage {self.stage} ({shares})"

    def largest(self) -> str:
        """Return the three largest parts that keys of a recipe make smaller, each with these keys."""
        parts = sorted((part for part in self.parts() if part[2]), key=lambda part: part[1], reverse=True)[:3]
        return "; ".join(f"{name} {size / GIB:.2f} GiB (less by {keys})" for name, size, keys in parts)


def with_earlier(estimates: Sequence[MemoryEstimate]) -> list[MemoryEstimate]:
    """Return the estimates of one process in the order of its stages, with what each stage finds of those before."""
    found, held, stage = list[MemoryEstimate](), 0, ""
    for each in estimates:
        if each.stage != stage:  # not the other turn of the same stage
            stage, held = each.stage, max([held, *(one.total - one.process - one.earlier for one in found)])
        found.append(each._replace(earlier=int(EARLIER * held)))
    return found


def resident() -> int:
    """Return the resident memory of this process in bytes; 0: the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def shapes_of(config: RunConfig, start: Path | None) -> dict[str, Outline]:
    """Return the outlines of all models of this process by their name in `[models]`; a model with a scalar head has the
    suffix `SCALAR`.

    A model without a checkpoint is as large as the policy, which starts from the folder `start` or as a fresh model.
    """
    used = used_models(config, *config.run.stages)
    every = {(one.model, one.scalar) for one in used} | {(POLICY, False)}
    return {name + SCALAR * head: _outline(config, name, start, scalar=head) for name, head in sorted(every)}


def _outline(config: RunConfig, name: str, start: Path | None, *, scalar: bool) -> Outline:
    own = name in config.models and name != POLICY and config.models[name].path is not None
    spec = config.models[name] if own else config.models[POLICY]
    source = model_folder(spec) if own else start or spec.init
    assert source is not None, "a model has a path or an init"
    return outline(
        source,
        dtype=spec.dtype,
        numerics=spec.numerics,
        scalar=scalar,
        lora=None if own or scalar else spec.lora,
        gradient_checkpointing=spec.gradient_checkpointing,
    )


def with_later(process: int) -> int:
    """Return the bytes of a process that has imported all that a run needs; 0: unknown."""
    return process and process + LATER


def _model(shapes: Mapping[str, Outline], name: str, *, scalar: bool = False) -> Outline:
    """Return the outline of a model, with the head if it is there; without an outline, the policy's."""
    keys = (name + SCALAR, name) if scalar else (name, name + SCALAR)
    return next((shapes[key] for key in keys if key in shapes), shapes[POLICY])


def _averages(used: Sequence[UsedModel]) -> bool:
    return any(one.decay is not None for one in used)


def _estimate(
    config: RunConfig, shapes: Mapping[str, Outline], models: StageModels, process: int, published: int
) -> MemoryEstimate:
    policy, engines = shapes[POLICY], [(name, _model(shapes, name)) for name in models.awake]
    asleep = policy.tables * (len(models.engines) - len(models.awake))
    trainers = [one.model for one in models.trainers]
    computed = [*models.computed, *(one for _, one in engines)]
    # gradient sums of all trainers exist at once; the micro-batches of one trainer are freed before another's begin
    sums = sum(shard(one.trained, models.ranks).gradients for one in trainers)
    gathered = [gathering(one) for one in trainers] if models.sharded else []
    sizes = [
        _micro_batch(config, one.model, one.train, models.ranks, gathered[number] if gathered else None)
        for number, one in enumerate(models.trainers)
    ]
    step = sums + max(sizes, default=0)
    brought = policy.weights + policy.packed if models.starts_empty else policy.staged()
    update = brought if models.updates else 0
    # published weights reuse the memory of the policy's gradient sums
    sent = published_bytes(trainers[0]) if trainers and not gathered else 0
    in_update = max(sums, sent)
    if models.turn == "engine" and models.ranks == 1:  # what the trainer published is freed within this turn
        step = in_update = sent
    whole = [one for one in computed if not (gathered and one in trainers)]
    larger = in_update + update > step
    # the average of a float32 model serves as its frozen copy and takes no memory of its own
    beside = models.averaged * FLOAT if policy.model.dtype.itemsize != FLOAT else 0
    learners = [one for use, one in trained_models(config, *config.run.stages).items() if use != POLICY]
    estimate = MemoryEstimate(
        stage=models.stage,
        parameters=policy.parameters,
        trained=_num_trained(policy),
        learner=sum(_model(shapes, one.model, scalar=one.scalar).parameters for one in learners),
        averaged=_num_trained(policy) if _averages(used_models(config, *config.run.stages)) else 0,
        process=process,
        weights=sum(one.weights for one in (*whole, *models.files))
        + sum(one.tables for one in (*computed, *models.files))
        + sum(one.parameters for one in gathered)
        + asleep,
        packed=sum(one.packed for one in whole) + sum(one.packed for one in gathered),
        optimiser=sum(shard(one.trained, models.ranks, apart=models.sharded).optimiser for one in trainers) + beside,
        step=in_update if larger else step,
        update=update if larger else 0,
        published=published,
        cache=sum(_cache(config, one, name) for name, one in engines),
        sampling=sum(_sampling(config, one, name) for name, one in engines),
        uncounted=0,
    )
    return estimate._replace(uncounted=int(UNCOUNTED * estimate.total) if process else 0)


def published_bytes(model: Outline) -> int:
    """Return the bytes of the weights that a trainer publishes."""
    return sum(one.nbytes for one in model.trained)


def _num_trained(model: Outline) -> int:
    return sum(one.numel() for one in model.trained)


def _micro_batch(config: RunConfig, model: Outline, train: TrainConfig, ranks: int, gathered: Gathering | None) -> int:
    """Return the memory of a micro-batch, cut into lanes as the trainer cuts it, without the float32 sums of gradients.
    Lanes are computed side by side, or in turn with one thread; a rank computes one, and keeps its gradients until it
    has sent them: all of them, or with parameters in shards those of a stage."""
    tokens = train.tokens_at_once
    lanes = LANES if tokens >= LANES * SMALLEST_LANE else 1
    size = model.micro_batch(-(-tokens // lanes), keeps_gradients=ranks > 1 and gathered is None)
    if gathered is not None:
        return size + gathered.parameters + gathered.exchanged
    if ranks > 1:
        return size + buckets(model.trained)
    return size if config.run.threads == 1 else size * lanes


def _cache(config: RunConfig, model: Outline, name: str) -> int:
    """Return the bytes of an engine's caches: pages on its device (one more for the probe of an update), pages in host
    memory, and recurrent states."""
    from sparring.engine.sizes import Sizes
    from sparring.model.states import state_bytes

    sizes = Sizes.of(model.model, engine_of(config, name))
    states = (sizes.num_states + 1) * state_bytes(model.model.recurrent) if model.model.recurrent else 0
    return (sizes.num_pages + 1 + sizes.host_pages) * sizes.page_bytes + states


def _sampling(config: RunConfig, model: Outline, name: str) -> int:
    engine = engine_of(config, name)
    dtype = config.models.get(name, config.models[POLICY]).dtype
    tokens = min(engine.batch.max_tokens, engine.kv.capacity(model.token_bytes(dtype)))
    return model.step(tokens, min(tokens, engine.batch.max_running))
