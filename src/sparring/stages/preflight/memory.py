"""Memory of a run: of each process, and of all processes on this machine; computed from the recipe and the outlines of
the run's models (`model.outline`: shapes without weights).

The run's process holds all that has no process of its own. The policy's trainer and its critic may have ranks, the
policy's engine may have processes here or on other nodes, or servers that the user has started.

Not counted: masters of float32 parameters that are cut in two between ranks, tables of an engine that sleeps, and what
processes have in common; weights that were published count in each process that maps them.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from sparring.disk import megabytes
from sparring.engine.config import PAGE_SIZE
from sparring.engine.sizes import Sizes
from sparring.errors import BadInput, refusal
from sparring.model.hub import model_folder
from sparring.model.outline import FLOAT, Outline, outline
from sparring.model.states import state_bytes
from sparring.recipe.run_config import RunConfig
from sparring.stages.context import CHOSEN, MEMORY_WARNING_KEY, ONLINE_STAGES, POLICY, RunFiles
from sparring.stages.models.context_length import engine_of
from sparring.stages.models.model_use import UsedModel
from sparring.stages.models.uses import used_models
from sparring.stages.preflight.machine import machine_memory
from sparring.train.config import TrainConfig
from sparring.train.exchange import BUCKET
from sparring.train.sharded_parameters import OTHERWISE, SHARD, stages_of

GIB = 1 << 30
MOMENTS = 2
"""Float32 numbers of AdamW for each parameter."""
LANES, SMALLEST_LANE = 2, 256
"""Number of lanes into which a trainer on a CPU cuts a micro-batch, and the minimum number of tokens of a lane; see
`train.trainer`, `batch.packing`."""
UNCOUNTED = 0.08
"""Allowance for memory that is not counted, as a share of the rest: pieces that the C library keeps, and temporary
copies. Measured by `benchmarks/memory.py`."""
PARAMETERS = "parameters"
"""Value of `cluster.shard` with which ranks share the parameters too."""
TRAINER, ENGINE = "trainer", "engine"
"""Turns of a stage with `cluster.colocate`. First, the policy's engine sleeps; then its trainer has no gradients."""
SCALAR = " (scalar)"
"""Suffix for the name of a model with a scalar head."""
OF_RANK, OF_ENGINE = 400 << 20, 350 << 20
"""Bytes of a rank's and of an engine's process without a model: libraries and their first allocations. Measured by
`tests/loop/test_process_peaks.py`."""
LATER = 160 << 20
"""Bytes of libraries that a run imports after its check, and of its own record."""
EARLIER = 0.3
"""Share of the memory of the models of earlier stages that the C library keeps when their stage ends. From the peaks of
four long runs (log/2026-11-29-memory.md)."""
BEYOND = 1.5
"""Multiple of the machine's memory above which a run is refused: an estimate may be a third too high."""
RUN, ENGINES = "the run's process", "engine process"
"""Kinds of processes; the others are the ranks of the trained models, by their names in the table of uses."""
READ = UsedModel(use=POLICY, model=POLICY, kind="frozen")
"""Use of the policy in a process that reads its weights to send them to engines."""
PARTS = (
    (("weights", "beside"), "weights", "models.policy.dtype"),
    (("packed",), "packed weights", "models.policy.dtype"),
    (("optimiser",), "optimiser", "models.policy.lora"),
    (("step",), "gradients and activations", "train.token_budget, models.policy.gradient_checkpointing"),
    (("update",), "an update", "models.policy.lora"),
    (("cache",), "engines' caches", "engine.kv.bytes, engine.kv.offload_bytes"),
    (("sampling",), "a step of sampling", "engine.batch.max_tokens"),
    (("process", "earlier", "uncounted"), "the rest", ""),
)
"""Parts of an estimate: its fields, their name in a message, and the keys of a recipe that make the part smaller."""


class MemoryEstimate(NamedTuple):
    """Peak memory of one process, in the stage that needs most, in bytes."""

    stage: str
    process: int = 0  # memory of the process before it has a model
    weights: int = 0  # weights of trainers, engines and frozen models
    beside: int = 0  # weights that were published and stay, or that init and export write
    packed: int = 0  # copies of all these weights in the layout that matrix products read
    optimiser: int = 0  # moments, float32 masters of weights of another dtype, and averages
    step: int = 0  # micro-batches, gradients and published weights of a trainer, at their peak
    update: int = 0  # weights staged for an engine, packed ones included
    cache: int = 0  # keys and values here and in host memory, and recurrent states
    sampling: int = 0  # one step of generation
    uncounted: int = 0  # allowance, added when `process` is known
    earlier: int = 0  # what the process keeps of the models of earlier stages

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self[1:])

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


def estimate(
    config: RunConfig,
    shapes: Mapping[str, Outline],
    models: Sequence[UsedModel],
    *,
    stage: str,
    turn: str = "",
    process: int = 0,
    beside: int = 0,
) -> MemoryEstimate:
    """Return the memory estimate of a process that computes `models` of a stage.

    Args:
        shapes: outlines of the run's models, made by `shapes_of`.
        turn: `TRAINER` or `ENGINE` with `cluster.colocate`; "": trainer and engine compute at any time.
        process: bytes of the process without models; 0: unknown.
        beside: bytes of further weights in the process.
    """
    policy, ranks, size = shapes[POLICY], config.cluster.ranks, Counter(beside=beside)
    sharded = ranks > 1 and config.cluster.shard == PARAMETERS
    sums = micro_batch = published = update = 0
    for used in models:
        model = shape_of(shapes, used)
        gathered = gathered_bytes(model) if sharded and used.train is not None else 0
        whole = gathered / model.weights if gathered else 1.0
        size["weights"] += int(whole * model.weights) + model.tables
        size["packed"] += int(whole * model.packed)
        wide = model.model.dtype.itemsize == FLOAT
        if used.train is not None:
            share = -(-model.num_trained // ranks) * FLOAT
            size["optimiser"] += share * (MOMENTS + (sharded or not wide))
            # gradient sums of all trainers exist at once; one trainer's micro-batches are freed before another's begin
            sums, micro_batch = sums + share, max(micro_batch, _micro_batch(config, model, used.train, gathered))
            published = published or (0 if sharded else model.published)
        elif used.kind == "engine":
            cache, sampling = _engine(config, model, used.model)
            size += Counter(cache=cache, sampling=sampling)
            if used.model == POLICY and _is_served(config):
                update = policy.weights + policy.packed
            elif used.model == POLICY and stage in ONLINE_STAGES and not turn:
                update = policy.staged
        elif used.decay is not None and not wide:  # the average of a float32 model serves as its frozen copy
            size["optimiser"] += policy.num_trained * FLOAT
    step, in_update = sums + micro_batch, max(sums, published)  # published weights reuse the memory of gradient sums
    if turn == ENGINE and ranks == 1:  # what the trainer published is freed within this turn
        step = in_update = published
    size += Counter(step=step) if in_update + update <= step else Counter(step=in_update, update=update)
    found = MemoryEstimate(stage, process, **size)
    return found._replace(uncounted=int(UNCOUNTED * found.total) if process else 0)


def resident() -> int:
    """Return the resident memory of this process in bytes; 0: the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def shapes_of(config: RunConfig, start: Path | None) -> dict[str, Outline]:
    """Return the outlines of all models that the run computes, by their name in `[models]`; a model with a scalar head
    has the suffix `SCALAR`.

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


def shape_of(shapes: Mapping[str, Outline], used: UsedModel) -> Outline:
    """Return the outline of a model, if possible with the same head; for a model without an outline, the policy's."""
    names = (used.model + SCALAR * used.scalar, used.model, used.model + SCALAR, POLICY)
    return next(shapes[name] for name in names if name in shapes)


def _is_served(config: RunConfig) -> bool:
    """Return whether the policy's engines are other processes than the run's."""
    return bool(config.engine.urls) or config.cluster.kind != "inline"


def gathered_bytes(model: Outline) -> int:
    """Return the bytes of the largest decoder stage of a model, which a rank with sharded parameters gathers at once.

    Raises:
        BadInput: the model cannot be held in shards.
    """
    sizes = {str(id(one)): one.nbytes for one in model.trained}
    stages = stages_of(model.model, {int(name): name for name in sizes})
    return max(sum(sizes[name] for name in stage) for stage in stages)


def _micro_batch(config: RunConfig, model: Outline, train: TrainConfig, gathered: int) -> int:
    """Return the bytes of a micro-batch, cut into lanes as the trainer cuts it, without the float32 sums of gradients.
    Lanes are computed at the same time; with one thread, in turn. A rank computes one lane, and keeps its gradients, or
    those of a gathered stage, until they are sent, in one bucket for each direction. A gradient larger than a bucket is
    sent alone."""
    ranks, tokens = config.cluster.ranks, train.tokens_at_once
    lanes = LANES if tokens >= LANES * SMALLEST_LANE else 1
    size = model.micro_batch(-(-tokens // lanes), keeps_gradients=ranks > 1 and not gathered)
    if ranks > 1:
        bucket = max(BUCKET, *(one.nbytes for one in model.trained))
        return size + gathered + 2 * min(gathered or model.published, bucket)
    return size if config.run.threads == 1 else size * lanes


def _engine(config: RunConfig, model: Outline, name: str) -> tuple[int, int]:
    """Return the bytes of an engine's caches, and of one engine step. Caches are KV pages on the device (one more to
    probe an update), KV pages in host memory, and recurrent states."""
    engine = engine_of(config, name)
    sizes = Sizes.of(model.model, engine)
    states = (sizes.num_states + 1) * state_bytes(model.model.recurrent)
    tokens = min(engine.batch.max_tokens, sizes.num_pages * PAGE_SIZE)
    cache = (sizes.num_pages + 1 + sizes.host_pages) * sizes.page_bytes + states
    return cache, model.step(tokens, min(tokens, engine.batch.max_running))


class Processes(NamedTuple):
    """Processes of a run that need the same memory.

    Attributes:
        here: whether the processes are on the machine of the run's process.
    """

    kind: str
    number: int
    each: MemoryEstimate
    here: bool = True

    def in_words(self) -> str:
        """Return the memory of one of the processes as text."""
        each = f"{self.each.total / GIB:.2f} GiB in"
        if self.kind == RUN:
            return f"{each} {self.kind}"
        plural = f"{self.kind}es" if self.kind.endswith("s") else f"{self.kind}s"
        return f"{each} one {self.kind}" if self.number == 1 else f"{each} each of {self.number} {plural}"


class RunMemory(NamedTuple):
    """Memory of a run: its processes in each stage; with `cluster.colocate`, at each turn."""

    stages: tuple[tuple[Processes, ...], ...]

    @staticmethod
    def of(config: RunConfig, shapes: Mapping[str, Outline], process: int = 0) -> RunMemory:
        """Return the memory of a run.

        Args:
            shapes: outlines of its models, made by `shapes_of`.
            process: bytes that the run's process has now; 0: unknown.

        Raises:
            BadInput: parameters that a stage trains cannot be held in shards.
        """
        stages, before = list[tuple[Processes, ...]](), 0
        for stage in config.run.stages or ("none",):
            turns = (TRAINER, ENGINE) if config.cluster.colocate and stage in ONLINE_STAGES else ("",)
            found = [tuple(_processes(config, shapes, stage, turn, process)) for turn in turns]
            for run, *others in found:
                each = run.each._replace(earlier=int(EARLIER * before))
                stages.append((run._replace(each=each), *others))
            before = max(before, *(run.each.total - run.each.process for run, *_ in found))
        return RunMemory(tuple(stages))

    @property
    def largest(self) -> tuple[Processes, ...]:
        """Processes of the stage that needs most on this machine."""
        return max(self.stages, key=_bytes_here)

    @property
    def total(self) -> int:
        """Bytes of the run's processes on this machine, in the stage that needs most."""
        return _bytes_here(self.largest)

    def peaks(self) -> list[Processes]:
        """Return for each kind of process its entry from the stage in which one process needs most memory."""
        most: dict[str, Processes] = {}
        for one in (one for stage in self.stages for one in stage):
            if one.kind not in most or one.each.total > most[one.kind].each.total:
                most[one.kind] = one
        return list(most.values())

    def in_words(self) -> str:
        """Return the bytes on this machine, and their parts or processes, as text."""
        first = self.largest[0]
        if len(self.largest) == 1:
            return first.each.in_words()
        parts = ", ".join(one.in_words() for one in self.largest if one.here)
        return f"{self.total / GIB:.1f} GiB in stage {first.each.stage} ({parts})"


def _bytes_here(processes: tuple[Processes, ...]) -> int:
    return sum(one.number * one.each.total for one in processes if one.here)


def _processes(
    config: RunConfig, shapes: Mapping[str, Outline], stage: str, turn: str, process: int
) -> Iterator[Processes]:
    """Yield the run's process, which has all models without a process of their own, and the others."""
    cluster, policy, every = config.cluster, shapes[POLICY], used_models(config, stage)
    engine = [one for one in every if one.kind == "engine" and one.model == POLICY]
    served, ranked, here = bool(engine) and _is_served(config), cluster.ranks > 1, cluster.kind == "local"
    awake = [one for one in every if turn != TRAINER or one not in engine]
    trained = [one for one in awake if one.train is not None]
    own = [one for one in awake if not (served and one in engine or ranked and (one in trained or one.trainer))]
    published = policy.published if stage in ONLINE_STAGES else 0
    count = partial(estimate, config, shapes, stage=stage, turn=turn)
    kept = published if served else 0
    if not every:
        kept = policy.weights + policy.tables
    elif served and (ranked or not trained):
        own, kept = [*own, READ], 0
    yield Processes(RUN, 1, count(own, process=process and process + LATER, beside=kept))
    for one in trained if ranked else ():
        computed = [one, *(other for other in awake if other.trainer == one.use)]
        if cluster.shard == PARAMETERS and any(other.decay is not None for other in computed):
            raise refusal(SHARD, "a model without a moving average", f"one in stage {stage}", OTHERWISE)
        kept = published if one.use == POLICY else 0
        each = count(computed, process=OF_RANK * (process > 0), beside=kept)
        yield Processes(one.rank, cluster.ranks, each, here)
    if served and not config.engine.urls:
        computed = [one for one in engine if one in awake]
        kept = policy.weights if computed else 0  # a file that it maps
        each = count(computed, process=OF_ENGINE * (process > 0), beside=kept)
        yield Processes(ENGINES, cluster.engines, each, here)


def smaller_layout(
    config: RunConfig, shapes: Mapping[str, Outline], memory: int, process: int = 0
) -> tuple[str, RunMemory] | None:
    """Return the smallest change of the layout (settings as text) with which the run fits into `memory` bytes, and the
    changed run's memory; None if no layout fits.

    Args:
        process: bytes that the run's process has now; 0: unknown.
    """
    for settings in _layouts(config):
        cluster = msgspec.structs.replace(config.cluster, **settings)
        try:
            found = RunMemory.of(msgspec.structs.replace(config, cluster=cluster), shapes, process)
        except BadInput:  # parameters that cannot be held in shards
            continue
        if found.total <= memory:
            changed = {key: value for key, value in settings.items() if getattr(config.cluster, key) != value}
            return " and ".join(f"cluster.{key} = {json.dumps(value)}" for key, value in changed.items()), found
    return None


def _layouts(config: RunConfig) -> Iterator[dict[str, Any]]:
    """Yield the settings of layouts that may need less memory, the smallest change first. More ranks on one machine
    save memory only with sharded parameters."""
    cluster = config.cluster
    exclusive = cluster.kind == "ray" or config.engine.urls or config.engine.kind != "native"
    if not (exclusive or config.rollout.max_lag or config.models[POLICY].lora or cluster.colocate):
        yield {"colocate": True}
    if cluster.kind == "local":
        fewer = [range(count, 0, -1) for count in (cluster.ranks, cluster.engines)]
        for ranks, engines in sorted(itertools.product(*fewer), key=sum, reverse=True)[1:]:
            yield {"ranks": ranks, "engines": engines, "shard": cluster.shard if ranks > 1 else "optimiser"}
        yield {"kind": "inline", "ranks": 1, "engines": 1, "shard": "optimiser"}
    if cluster.kind != "ray":
        yield {"kind": "local", "ranks": max(2, cluster.ranks), "shard": PARAMETERS}


def check_memory(files: RunFiles, shapes: Mapping[str, Outline]) -> list[str]:
    """Warn of a run whose processes here exceed this machine's memory. Refuse a run that needs more than `BEYOND` times
    that memory, unless `run.memory = "warn"`, and a run whose checkpoints exceed the disk."""
    config, process = files.config, resident()
    found, here, warnings = RunMemory.of(config, shapes, process), machine_memory(), []
    if config.run.device == "cpu" and found.total > here:
        remedy = "lower train.token_budget, engine.kv.bytes or engine.kv.offload_bytes, or take a smaller model"
        if (smaller := smaller_layout(config, shapes, here, process)) is not None:
            remedy = f"set {smaller[0]}, which takes {smaller[1].total / GIB:.1f} GiB, or {remedy}"
        machine = f"{here / GIB:.1f} GiB on this machine"
        if config.run.memory == "refuse" and found.total > BEYOND * here:
            otherwise = f'{remedy}; or set run.memory = "warn" to begin all the same'
            raise refusal("memory", found.in_words(), machine, otherwise)
        warnings.append(f"memory: warning: expected {found.in_words()}, got {machine}; {remedy}")
    _check_disk(files, shapes)
    about = f"memory: about {found.total / GIB:.2f} GiB of {here / GIB:.0f} GiB"
    millions, peaks, stage = shapes[POLICY].parameters / 1e6, found.peaks(), found.largest[0].each.stage
    facts = [f"{about} for {millions:.2f} million parameters, most of it in stage {stage}", *warnings]
    files.store.put(MEMORY_WARNING_KEY, facts[-1])
    largest, whose = max(peaks, key=lambda one: one.each.total), ""
    if len(peaks) > 1:
        facts.append(f"memory: {', '.join(one.in_words() for one in peaks)}")
        whose = f" of {largest.kind}"
    chosen = files.store.get(CHOSEN)
    return [*facts, f"memory: the largest parts{whose}: {largest.each.largest()}", *([chosen] if chosen else [])]


def checkpoint_bytes(config: RunConfig, shapes: Mapping[str, Outline]) -> int:
    """Return the bytes of a checkpoint of a run: 12 for each parameter that is trained, 4 for each with a moving
    average."""
    used = used_models(config, *config.run.stages)
    trained = {POLICY: shapes[POLICY].num_trained}
    trained |= {one.use: shape_of(shapes, one).num_trained for one in used if one.train is not None}
    return 12 * sum(trained.values()) + 4 * trained[POLICY] * any(one.decay is not None for one in used)


def _check_disk(files: RunFiles, shapes: Mapping[str, Outline]) -> None:
    free, kept = shutil.disk_usage(files.folder).free, files.config.train.keep_last + 1
    size = checkpoint_bytes(files.config, shapes) * kept * 2
    if size > free:
        expected = f"{megabytes(size)} of disk for checkpoints"
        raise refusal(str(files.folder), expected, megabytes(free), "free disk space")
