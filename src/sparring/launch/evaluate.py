"""`sparring eval`: what is evaluated, where its record lies, and what comes out."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from sparring.config import RunConfig, dump, resolve
from sparring.engine.config import EngineConfig
from sparring.errors import refusal
from sparring.launch.block import block
from sparring.launch.run import CONFIG, opened
from sparring.observe.config import ObserveConfig
from sparring.observe.evaluation import Evaluation, compare, verdict
from sparring.observe.results import RESULT, Compared, Evaluated, Results, read_result, write_results
from sparring.stages.config import EvalConfig, RunSection
from sparring.stages.context import POLICY, Context

CONTENT = (".safetensors", ".bin", ".json", ".jinja", ".model", ".txt")
"""Endings of the files that decide what a checkpoint says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """What is evaluated: the weights of a folder, or what answers at an endpoint, of which the folder has the tokenizer."""

    name: str
    folder: Path
    endpoint: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """A figure (success, reward, pass@k, pass^k; "" is success, or reward where a world knows none) may fall by `margin`."""

    margin: float
    figure: str = ""


def evaluate_subjects(config: RunConfig, subjects: Sequence[Subject | Path], gate: Gate | None = None) -> Results:
    """Evaluate each subject, and compare each with the first. A path is an earlier result file, which is read.

    Every evaluation has a folder of its own under `<run.directory>/<run.name>/evaluations`, whose name hangs on all that decides
    what is sampled. What is recorded there is not run again.

    Raises:
        BadInput: a subject, the recipe or the gate is refused.
        EvaluationFailed: infrastructure or judge broke too many rollouts.
    """
    config = resolve(config)
    known = {index: read_result(path) for index, path in enumerate(subjects) if isinstance(path, Path)}
    if gate is not None and len(subjects) < 2:
        do = "name the baseline first, then the other"
        raise refusal("--gate", "a baseline and what is held against it", "one subject", do)
    evaluations = []
    for index, subject in enumerate(subjects):
        evaluations.append(known[index] if isinstance(subject, Path) else block(_evaluated(config, subject)))
    comparisons = [compared(evaluations[0], other, gate) for other in evaluations[1:]]
    return Results(evaluations=tuple(evaluations), comparisons=tuple(comparisons))


def compared(before: Evaluated, after: Evaluated, gate: Gate | None = None) -> Compared:
    """The comparison of two evaluations.

    Raises:
        BadInput: they are not of the same tasks, or have no figure of the gate's name.
    """
    found = compare(before.evaluation, after.evaluation)
    if gate is None:
        return Compared(before=before.name, after=after.name, comparison=found)
    figure = gate.figure or ("success" if "success" in found.changes else "reward")
    if figure not in found.changes:
        raise refusal("--figure", f"one of {', '.join(found.changes)}", figure, "name one of these, or raise --samples and --k")
    says = verdict(found.changes[figure], gate.margin)
    return Compared(
        before=before.name, after=after.name, comparison=found, figure=figure, margin=gate.margin, verdict=says
    )


def check_writable(path: Path) -> None:
    """Prove that a result file can be written, before hours of work for it.

    Raises:
        BadInput: it cannot.
    """
    if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise refusal(str(path), "a file in a folder that can be written", "none", "choose another")


def evaluation_folder(config: RunConfig, subject: Subject) -> Path:
    """Where the record of an evaluation lies: named by the subject and by a digest of what decides what is sampled."""
    told = _recipe(config, subject, "", "")
    settings = msgspec.to_builtins(msgspec.structs.replace(told, run=RunSection(name="-", seed=told.run.seed)))
    found = xxhash.xxh3_64(msgspec.json.encode(settings, order="sorted"))
    for path in _deciding(config, subject):
        found.update(path.name.encode())
        with path.open("rb") as file:
            while part := file.read(1 << 24):
                found.update(part)
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", subject.name).strip("-.")[-48:]
    return Path(config.run.directory) / config.run.name / "evaluations" / f"{slug}-{found.hexdigest()[:10]}"


async def _evaluated(config: RunConfig, subject: Subject) -> Evaluated:
    from sparring.rollout.evaluate import EvalPlan
    from sparring.sandbox.check import check_sandbox
    from sparring.stages.check import check_directory
    from sparring.stages.eval import evaluate_folder, held_out
    from sparring.stages.served import check_served

    check_directory(Path(config.run.directory))
    folder = evaluation_folder(config, subject)
    recipe = resolve(_recipe(config, subject, str(folder.parent), folder.name))
    _write_recipe(folder, recipe)
    async with opened(recipe) as context:
        context = dataclasses.replace(context, config=msgspec.structs.replace(recipe, eval=config.eval))
        tasks = held_out(context, config.eval.tasks)
        if tasks[0].box is not None:
            check_sandbox(config.sandbox)
        if subject.endpoint:
            check_served(context)
        plan = EvalPlan(tasks=tasks, run_seed=config.run.seed, samples=config.eval.samples)
        evaluation = await evaluate_folder(context, str(subject.folder), plan)
        result = _told(context, subject, evaluation)
        write_results(Results(evaluations=(result,)), folder / RESULT)
        return result


def _told(context: Context, subject: Subject, evaluation: Evaluation) -> Evaluated:
    config = context.config
    return Evaluated(
        name=subject.name,
        environment=context.factory.name,
        seed=config.run.seed,
        temperature=config.rollout.temperature,
        evaluation=evaluation,
    )


def _write_recipe(folder: Path, recipe: RunConfig) -> None:
    """What was evaluated and how, beside the record; the digest in the folder's name says that it is no other."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).write_text(dump(recipe), encoding="utf-8")
    except OSError as error:
        raise refusal(str(folder), "a folder that can be made", error.strerror or str(error), "choose another --name") from error


def _recipe(config: RunConfig, subject: Subject, directory: str, name: str) -> RunConfig:
    """Those parts of a recipe that an evaluation reads, and nothing that only says how much of it is done or told."""
    spec = msgspec.structs.replace(config.models[POLICY], path=str(subject.folder), init=None, lora=None)
    run = config.run
    return RunConfig(
        run=RunSection(
            name=name or "-", directory=directory, seed=run.seed, stages=("eval",), device=run.device, threads=run.threads
        ),
        models={POLICY: spec},
        env=config.env,
        sandbox=config.sandbox,
        engine=_endpoint(config.engine, subject.endpoint) if subject.endpoint else config.engine,
        rollout=config.rollout,
        eval=EvalConfig(tasks=config.eval.tasks),
        observe=ObserveConfig(sinks=(), progress=config.observe.progress, lines_every_s=config.observe.lines_every_s),
    )


def _endpoint(engine: EngineConfig, url: str) -> EngineConfig:
    """The engine that speaks to an endpoint: OpenAI's completions where the address ends in /v1, else `sparring serve`."""
    speaks_openai = url.rstrip("/").endswith("/v1")
    kind = "openai" if speaks_openai else "remote"
    return msgspec.structs.replace(engine, kind=kind, url=url, as_served=not speaks_openai)


def _deciding(config: RunConfig, subject: Subject) -> list[Path]:
    """The files that decide what is sampled: of the checkpoint and what it adapts, and of the environment."""
    from sparring.model.hub import base_folder

    folders = dict.fromkeys((subject.folder, base_folder(subject.folder)))
    files = [file for folder in folders for file in sorted(folder.iterdir()) if file.suffix in CONTENT]
    env = config.env
    named = [Path(part) for part in (env.name.rpartition(":")[0], env.reward.rpartition(":")[0], env.data, env.eval_data) if part]
    return files + [path for path in named if path.is_file()]
