"""Peak memory of a run, computed from its recipe and its models on the meta device (`model.outline`)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sparring.errors import refusal
from sparring.model.hub import model_folder
from sparring.model.outline import Outline, Size, outline
from sparring.recipe.run_config import RunConfig
from sparring.recipe.sections.rl import CriticConfig, ImplicitConfig
from sparring.stages.context import CHOSEN, MEMORY_WARNING_KEY, ONLINE_STAGES, POLICY, RunFiles
from sparring.stages.models.context_length import engine_of
from sparring.stages.models.reference import AVERAGE, has_reference_model, is_averaging, reference_model
from sparring.stages.preflight.machine import machine_memory
from sparring.stages.runtime.saved import train_of

if TYPE_CHECKING:
    from sparring.train.config import TrainConfig

GIB = 1 << 30

FLOAT = 4
"""Bytes of each number that an optimiser keeps, whatever the dtype of the model."""
LANES, SMALLEST_LANE = 2, 256
"""Number of lanes into which a trainer on a CPU cuts a micro-batch, and the minimum number of tokens of a lane; see
`train.trainer`, `batch.packing`."""
SCATTERED = 1.2
"""Memory of a trainer's threads as a multiple of its peak use: threads keep freed pieces that are too small for the
next tensor. Measured by `benchmarks/memory.py`."""
UNCOUNTED = 0.08
"""Allowance for memory that is not counted, as a share of the rest: pieces that the C library keeps, and temporary
copies. Measured by `benchmarks/memory.py`."""
MOST_TOKENS = 1 << 17
"""Number of tokens of the largest micro-batch that is measured on the meta device; the memory of larger ones is
extrapolated."""
LATER = 160 << 20
"""Bytes of libraries that a run imports after its check, and of its own record."""

TRAINING = ("sft", "preference", "reward_model", *ONLINE_STAGES)
SERVING = (*ONLINE_STAGES, "eval")
PLAYING = ("init", "collect", "sft", *SERVING)
"""Stages that play the environment; their judges answer until the stage ends."""
SCALAR = " (scalar)"
"""Suffix for the name of a model with a scalar head."""


PARTS = (
    (("weights",), "weights", "models.policy.dtype"),
    (("packed",), "packed weights", "models.policy.dtype"),
    (("optimiser",), "optimiser", "models.policy.lora"),
    (("step",), "gradients and activations", "train.token_budget, models.policy.gradient_checkpointing"),
    (("update",), "an update", "models.policy.lora"),
    (("cache",), "engines' caches", "engine.kv.bytes, engine.kv.offload_bytes"),
    (("sampling",), "a step of sampling", "engine.batch.max_tokens"),
    (("process", "uncounted"), "the rest", ""),
)
"""Parts of an estimate: its fields, their name in a message, and the keys of a recipe that make the part smaller."""


class MemoryEstimate(NamedTuple):
    """Peak memory of a run, in the stage that needs most: numbers of parameters, then bytes. The models of a stage are
    closed when it ends."""

    stage: str
    parameters: int  # of the policy
    trained: int  # parameters that training changes: all of the policy, or an adapter's factors
    learner: int  # parameters of a critic or implicit reward model
    averaged: int  # parameters with a moving average
    process: int  # memory of the process before it has a model
    weights: int  # weights of trainers, engines and frozen models
    packed: int  # copies of all these weights in the layout that matrix products read
    optimiser: int  # moments, float32 masters of weights of another dtype, and averages
    step: int  # micro-batches, gradients and published weights of a trainer, at their peak
    update: int  # weights staged for an engine, packed ones included
    cache: int  # keys and values here and in host memory, and recurrent states
    sampling: int  # one step of generation
    uncounted: int  # allowance, added when `process` is known

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self[5:])

    @staticmethod
    def of(config: RunConfig, shapes: Mapping[str, Outline], process: int = 0) -> MemoryEstimate:
        """Return the estimate of a run.

        Args:
            shapes: outlines of its models, made by `shapes_of`.
            process: bytes that the process has now; 0: unknown.
        """
        stages = [_estimate(config, shapes, stage, process) for stage in config.run.stages or ("none",)]
        return max(stages, key=lambda estimate: estimate.total)

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

    Raises:
        BadInput: a checkpoint is missing, or the library makes no model of its config.
    """
    names = {POLICY, *(name for stage in config.run.stages for part in _other_models(config, stage) for name in part)}
    scalar = {name for name in (config.rl.reward_model,) if name}
    scalar |= {POLICY} if "reward_model" in config.run.stages else set()
    if learner := _learner(config):
        (scalar if isinstance(learner, CriticConfig) else names).add(learner.model)
    every = {(name, name in scalar) for name in names | scalar} | {(POLICY, False)}
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


def _estimate(config: RunConfig, shapes: Mapping[str, Outline], stage: str, process: int) -> MemoryEstimate:
    policy, section = shapes[POLICY], _learner(config)

    def model(name: str, *heads: str) -> Outline:
        return next((shapes[name + head] for head in heads or ("", SCALAR) if name + head in shapes), policy)

    heads = (SCALAR, "") if isinstance(section, CriticConfig) else ("",)
    learner = None if section is None else model(section.model, *heads)
    trained = model(POLICY, SCALAR) if stage == "reward_model" else policy
    averaging = [name for name in config.run.stages if name in ONLINE_STAGES and is_averaging(config, name)]
    averaged = _num_trained(policy) if averaging else 0
    # the average of a float32 model serves as its frozen copy and takes no memory of its own
    beside = averaged * FLOAT if stage in averaging and policy.model.dtype.itemsize != FLOAT else 0
    frozen, others = _other_models(config, stage)
    trainers = [trained] if stage in TRAINING else []
    trainers += [learner] if stage == "rl" and learner is not None else []
    serving = [POLICY] * config.cluster.engines if stage in SERVING and config.engine.kind != "openai" else []
    engines = [*serving, *others]
    every = [*trainers, *map(model, [*frozen, *engines])]
    every += [] if trainers or engines else [policy]  # init and export hold the weights that they write
    trains = [train_of(config, stage) if stage in TRAINING else config.train]
    trains += [config.train.replaced(section.train)] if section is not None else []
    sizes = [(one, _micro_batch(config, one, train)) for one, train in zip(trainers, trains, strict=False)]
    # gradient sums of all trainers exist at once; the micro-batches of one trainer are freed before another's begin
    sums = sum(parameter.numel() * FLOAT for one, _ in sizes for parameter in one.trained)
    step = sums + max((int(SCATTERED * size.kept) + size.returned for _, size in sizes), default=0)
    staged, packed = (part if stage in ONLINE_STAGES and serving else Size() for part in policy.staged())
    # published weights reuse the memory of the policy's gradient sums
    published = sum(one.nbytes for one in trained.trained) if trainers else 0
    update, in_update = staged.total + packed.total, max(sums, published)
    larger = in_update + update > step
    estimate = MemoryEstimate(
        stage=stage,
        parameters=policy.parameters,
        trained=_num_trained(policy),
        learner=0 if learner is None else learner.parameters,
        averaged=averaged,
        process=(process + LATER * (process > 0)) * (1 + (len(serving) if config.cluster.kind != "inline" else 0)),
        weights=sum(one.weights.total + one.tables for one in every),
        packed=sum(one.packed.total for one in every) if trainers or engines or frozen else 0,
        optimiser=sum(_optimiser(one) for one in trainers) + beside,
        step=in_update if larger else step,
        update=update if larger else 0,
        cache=sum(_cache(config, model(name), name) for name in engines),
        sampling=sum(_sampling(config, model(name), name) for name in engines),
        uncounted=0,
    )
    return estimate._replace(uncounted=int(UNCOUNTED * estimate.total) if process else 0)


def _num_trained(model: Outline) -> int:
    return sum(one.numel() for one in model.trained)


def _optimiser(model: Outline) -> int:
    """Return the bytes of two moments, and of float32 masters of weights of another dtype."""
    return sum((2 + (one.dtype.itemsize != FLOAT)) * one.numel() * FLOAT for one in model.trained)


def _micro_batch(config: RunConfig, model: Outline, train: TrainConfig) -> Size:
    """Return the memory of a micro-batch, cut into lanes as the trainer cuts it, without the float32 sums of gradients.
    Lanes are computed side by side, or in turn with one thread."""
    budget = train.tokens_at_once
    tokens = min(budget, MOST_TOKENS)
    lanes = LANES if tokens >= LANES * SMALLEST_LANE else 1
    size = model.micro_batch(-(-tokens // lanes))
    if tokens < budget:  # activations grow with the tokens
        size = size.times(-(-budget // tokens))
    return size if config.run.threads == 1 else size.times(lanes)


def _learner(config: RunConfig) -> CriticConfig | ImplicitConfig | None:
    """Return the section of the critic or implicit reward model; a credit rule needs at most one."""
    return (config.rl.critic or config.rl.implicit) if "rl" in config.run.stages else None


def _other_models(config: RunConfig, stage: str) -> tuple[list[str], list[str]]:
    """Return the models of a stage other than the policy and its critic: frozen ones (a reference, a reward model,
    teachers over the whole vocabulary), and those with an engine in this process."""
    frozen = [reference_model(config)] if stage == "rl" and has_reference_model(config) else []
    engines: list[str] = []
    if stage in SERVING:
        frozen += [config.rl.reward_model] if config.rl.reward_model is not None else []
        engines += sorted({*config.rollout.roles.values()} - {POLICY})
    if stage == "distill":
        teachers = sorted(set(config.distill.teachers.values()) - {POLICY})  # the policy is served already
        by_vocabulary = config.distill.over == "vocabulary"
        frozen += [name for name in teachers if by_vocabulary or name == AVERAGE]
        engines += [name for name in teachers if not by_vocabulary and name != AVERAGE]
    if stage == "collect":
        engines += sorted(set(config.collect.by_domain.values()))
    if stage in PLAYING:
        engines += sorted(config.judging)
    return frozen, [name for name in engines if name not in config.models or config.models[name].served is None]


def _cache(config: RunConfig, model: Outline, name: str) -> int:
    """Return the bytes of an engine's caches: pages on its device (one more for the probe of an update), pages in host
    memory, and recurrent states."""
    from sparring.engine.sizes import Sizes
    from sparring.model.states import state_bytes

    sizes = Sizes.of(model.model, engine_of(config, name))
    states = (sizes.num_states + 1) * state_bytes(model.model.recurrent) if model.model.recurrent else 0
    return (sizes.num_pages + 1 + sizes.host_pages) * sizes.page_bytes + states


def _sampling(config: RunConfig, model: Outline, name: str) -> int:
    """Return the bytes of one step of an engine over its largest number of tokens."""
    engine = engine_of(config, name)
    dtype = config.models.get(name, config.models[POLICY]).dtype
    tokens = min(engine.batch.max_tokens, engine.kv.capacity(model.token_bytes(dtype)))
    return model.step(tokens, min(tokens, engine.batch.max_running)).total


def check_memory(files: RunFiles, shapes: Mapping[str, Outline]) -> list[str]:
    """Refuse a run whose peak memory or checkpoints exceed the machine; `run.memory = "warn"` only warns of memory."""
    config, estimate = files.config, MemoryEstimate.of(files.config, shapes, resident())
    here, warnings = machine_memory(), []
    if config.run.device == "cpu" and estimate.total > here:
        do = "lower train.token_budget, engine.kv.bytes or engine.kv.offload_bytes, or take a smaller model"
        got = f"{here / GIB:.1f} GiB on this machine"
        if config.run.memory == "refuse":
            raise refusal("memory", estimate.in_words(), got, f'{do}; or set run.memory = "warn" to begin all the same')
        warnings.append(f"memory: warning: expected {estimate.in_words()}, got {got}; {do}")
    free = shutil.disk_usage(files.folder).free
    disk = ((estimate.trained + estimate.learner) * 12 + estimate.averaged * 4) * (config.train.keep_last + 1) * 2
    if disk > free:
        expected, got = f"{disk / GIB:.1f} GiB of disk for checkpoints", f"{free / GIB:.1f} GiB"
        raise refusal(str(files.folder), expected, got, "free disk space")
    millions = estimate.parameters / 1e6
    about = f"memory: about {estimate.total / GIB:.2f} GiB of {here / GIB:.0f} GiB"
    facts = [f"{about} for {millions:.2f} million parameters, most of it in stage {estimate.stage}", *warnings]
    files.store.put(MEMORY_WARNING_KEY, facts[-1])
    chosen = files.store.get(CHOSEN)
    return [*facts, f"memory: the largest parts: {estimate.largest()}", *([chosen] if chosen else [])]
