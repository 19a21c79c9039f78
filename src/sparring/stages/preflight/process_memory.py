"""Memory of each process of a run, and of all that share this machine.

The run's process holds all that has no process of its own. The policy's trainer and its critic may have ranks, the
policy's engine may have processes here or on other nodes, or servers that the user has started.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from sparring.disk import megabytes
from sparring.errors import BadInput, refusal
from sparring.model.outline import Outline
from sparring.recipe.run_config import RunConfig
from sparring.stages.context import CHOSEN, MEMORY_WARNING_KEY, ONLINE_STAGES, POLICY, RunFiles
from sparring.stages.preflight.machine import machine_memory
from sparring.stages.preflight.memory import (
    GIB,
    MemoryEstimate,
    StageModels,
    published_bytes,
    resident,
    with_earlier,
    with_later,
)
from sparring.stages.preflight.rank_memory import gathering
from sparring.train.sharded_parameters import OTHERWISE, SHARD

RANK, ENGINE = 400 << 20, 350 << 20
"""Bytes of a rank's and of an engine's process without a model: libraries, and what they begin with. Measured by
`tests/loop/test_process_peaks.py`."""
RUN, ENGINES = "the run's process", "engine process"
"""Kinds of processes; the others are the ranks of the trained models, by their names in the table of uses."""


BEYOND = 1.5
"""Multiple of the machine's memory above which a run is refused: an estimate may be a third too high."""
PARAMETERS = "parameters"
"""Value of `cluster.shard` with which ranks share the parameters too."""


class Processes(NamedTuple):
    """Processes of a run that need the same memory.

    Attributes:
        here: whether they are on the machine of the run's process.
    """

    kind: str
    number: int
    each: MemoryEstimate
    here: bool = True

    @property
    def total(self) -> int:
        """All their bytes. Published weights count once: one rank publishes, and engines map the same file."""
        return self.number * (self.each.total - self.each.published) + self.each.published

    def in_words(self) -> str:
        """Return the memory of one of them as text."""
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
            shapes: outlines of its models, made by `memory.shapes_of`.
            process: bytes that the run's process has now; 0: unknown.
        """
        stages = [StageModels.of(config, shapes, stage) for stage in config.run.stages or ("none",)]
        if config.cluster.colocate:
            stages = [turn for models in stages for turn in models.turns]
        every = [list(_processes(config, shapes, models, process)) for models in stages]
        own = with_earlier([processes[0].each for processes in every])
        return RunMemory(
            tuple((run._replace(each=each), *others) for each, (run, *others) in zip(own, every, strict=True))
        )

    @property
    def largest(self) -> tuple[Processes, ...]:
        """Processes of the stage that needs most on this machine."""
        return max(self.stages, key=_here)

    @property
    def total(self) -> int:
        """Bytes on this machine."""
        return _here(self.largest)

    def peaks(self) -> list[Processes]:
        """Return the processes of each kind in the stage in which one of them needs most."""
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


def _here(processes: tuple[Processes, ...]) -> int:
    return sum(one.total for one in processes if one.here)


def _processes(
    config: RunConfig, shapes: Mapping[str, Outline], models: StageModels, process: int
) -> Iterator[Processes]:
    cluster, policy = config.cluster, shapes[POLICY]
    elsewhere = POLICY in models.engines and (bool(config.engine.urls) or cluster.kind != "inline")
    ranks = cluster.ranks if models.trainers else 1
    publishes = models.stage in ONLINE_STAGES
    yield Processes(RUN, 1, _of_run(config, shapes, models, with_later(process), elsewhere=elsewhere, ranks=ranks))
    for number, trainer in enumerate(models.trainers if ranks > 1 else ()):
        sharded = cluster.shard == PARAMETERS
        held = StageModels(stage=models.stage, trainers=(trainer,), ranks=ranks, sharded=sharded, turn=models.turn)
        if number == 0:
            held = held._replace(teachers=models.teachers, averaged=models.averaged)
        published = published_bytes(policy) if publishes and number == 0 else 0
        each = MemoryEstimate.of_stage(config, shapes, held, RANK * (process > 0), published)
        yield Processes(trainer.rank, ranks, each, here=cluster.kind == "local")
    if elsewhere and not config.engine.urls:
        held = StageModels(stage=models.stage, engines=(POLICY,), starts_empty=True, turn=models.turn)
        published = policy.weights if held.awake else 0
        each = MemoryEstimate.of_stage(config, shapes, held, ENGINE * (process > 0), published)
        yield Processes(ENGINES, cluster.engines, each, here=cluster.kind == "local")


def _of_run(
    config: RunConfig,
    shapes: Mapping[str, Outline],
    models: StageModels,
    process: int,
    *,
    elsewhere: bool,
    ranks: int,
) -> MemoryEstimate:
    """Return the estimate of the run's own process. It reads the policy to send the first weights to engines elsewhere,
    and keeps the weights that it sent last for engines that come back.

    Args:
        elsewhere: whether the policy's engines are other processes.
    """
    policy, held = shapes[POLICY], models
    if elsewhere:
        held = held._replace(engines=tuple(name for name in models.engines if name != POLICY))
    if ranks > 1:
        held = held._replace(trainers=(), teachers=(), averaged=0)
    kept = published_bytes(policy) if elsewhere and models.stage in ONLINE_STAGES else 0
    later = MemoryEstimate.of_stage(config, shapes, held, process, kept * (2 if ranks > 1 else 1))
    if not elsewhere or held.trainers:  # a trainer's first step takes more than what it follows
        return later
    reading = held._replace(frozen=(*held.frozen, policy))
    return max(later, MemoryEstimate.of_stage(config, shapes, reading, process), key=lambda each: each.total)


def smaller_layout(
    config: RunConfig, shapes: Mapping[str, Outline], memory: int, process: int = 0
) -> tuple[str, RunMemory] | None:
    """Return the smallest change of the layout with which the run fits into `memory`, as settings, and its memory then;
    None if there is none.

    Args:
        process: bytes that the run's process has now; 0: unknown.
    """
    for settings in _layouts(config, shapes):
        cluster = msgspec.structs.replace(config.cluster, **settings)
        found = RunMemory.of(msgspec.structs.replace(config, cluster=cluster), shapes, process)
        if found.total <= memory:
            return _changed(config, settings), found
    return None


def _layouts(config: RunConfig, shapes: Mapping[str, Outline]) -> Iterator[dict[str, Any]]:
    """Yield the settings of layouts that may need less, the smallest change first. More ranks with all parameters never
    need less of one machine; ranks with parameters in shards may."""
    cluster = config.cluster
    if can_take_turns(config):
        yield {"colocate": True}
    if cluster.kind == "local":
        fewer = [range(count, 0, -1) for count in (cluster.ranks, cluster.engines)]
        for ranks, engines in sorted(itertools.product(*fewer), key=sum, reverse=True)[1:]:
            yield {"ranks": ranks, "engines": engines, "shard": cluster.shard if ranks > 1 else "optimiser"}
        yield {"kind": "inline", "ranks": 1, "engines": 1, "shard": "optimiser"}
    if cluster.kind != "ray" and all(can_be_sharded(config, shapes, stage) for stage in config.run.stages):
        yield {"kind": "local", "ranks": max(2, cluster.ranks), "shard": PARAMETERS}


def _changed(config: RunConfig, settings: Mapping[str, int | str]) -> str:
    """Return those of the settings of `[cluster]` that differ from a config's, as a recipe has them."""
    differing = {key: value for key, value in settings.items() if getattr(config.cluster, key) != value}
    return " and ".join(f"cluster.{key} = {json.dumps(value)}" for key, value in differing.items())


def can_be_sharded(config: RunConfig, shapes: Mapping[str, Outline], stage: str) -> bool:
    """Return whether the parameters that a stage trains can be held in shards."""
    try:
        check_shards(config, shapes, stage)
    except BadInput:
        return False
    return True


def check_shards(config: RunConfig, shapes: Mapping[str, Outline], stage: str) -> None:
    """Refuse a stage whose parameters cannot be held in shards.

    Raises:
        BadInput: a trained model is of another family, has an adapter, or a moving average follows it.
    """
    models = StageModels.of(config, shapes, stage)
    for trainer in models.trainers:
        gathering(trainer.model)
    if models.averaged:
        raise refusal(SHARD, "a model without a moving average", f"one in stage {stage}", OTHERWISE)


def can_take_turns(config: RunConfig) -> bool:
    """Return whether `cluster.colocate` could be set."""
    exclusive = config.cluster.kind == "ray" or config.engine.urls or config.engine.kind != "native"
    return not (exclusive or config.rollout.max_lag or config.models[POLICY].lora or config.cluster.colocate)


def check_memory(files: RunFiles, shapes: Mapping[str, Outline]) -> list[str]:
    """Warn of a run whose processes on this machine exceed its memory. Refuse one that needs more than `BEYOND` times
    that, unless `run.memory = "warn"`, and one whose checkpoints exceed the disk."""
    config, process = files.config, resident()
    for stage in config.run.stages if config.cluster.shard == PARAMETERS else ():
        check_shards(config, shapes, stage)
    found, here, warnings = RunMemory.of(config, shapes, process), machine_memory(), []
    if config.run.device == "cpu" and found.total > here:
        do = "lower train.token_budget, engine.kv.bytes or engine.kv.offload_bytes, or take a smaller model"
        if (smaller := smaller_layout(config, shapes, here, process)) is not None:
            do = f"set {smaller[0]}, which takes {smaller[1].total / GIB:.1f} GiB, or {do}"
        got = f"{here / GIB:.1f} GiB on this machine"
        if config.run.memory == "refuse" and found.total > BEYOND * here:
            raise refusal("memory", found.in_words(), got, f'{do}; or set run.memory = "warn" to begin all the same')
        warnings.append(f"memory: warning: expected {found.in_words()}, got {got}; {do}")
    estimate = found.largest[0].each
    _check_disk(files, estimate)
    about = f"memory: about {found.total / GIB:.2f} GiB of {here / GIB:.0f} GiB"
    millions, peaks = estimate.parameters / 1e6, found.peaks()
    facts = [f"{about} for {millions:.2f} million parameters, most of it in stage {estimate.stage}", *warnings]
    files.store.put(MEMORY_WARNING_KEY, facts[-1])
    largest = max(peaks, key=lambda one: one.each.total)
    whose = ""
    if len(peaks) > 1:
        facts.append(f"memory: {', '.join(one.in_words() for one in peaks)}")
        whose = f" of {largest.kind}"
    chosen = files.store.get(CHOSEN)
    return [*facts, f"memory: the largest parts{whose}: {largest.each.largest()}", *([chosen] if chosen else [])]


def _check_disk(files: RunFiles, estimate: MemoryEstimate) -> None:
    free, kept = shutil.disk_usage(files.folder).free, files.config.train.keep_last + 1
    disk = ((estimate.trained + estimate.learner) * 12 + estimate.averaged * 4) * kept * 2
    if disk > free:
        expected = f"{megabytes(disk)} of disk for checkpoints"
        raise refusal(str(files.folder), expected, megabytes(free), "free disk space")
