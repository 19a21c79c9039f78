"""`sparring eval`: chooses the subjects, runs their evaluations, and compares the results."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
import xxhash

from sparring.dashboard.evaluations import FOLDERS
from sparring.engine.config import EngineConfig
from sparring.envs.rubrics.config import Function
from sparring.errors import refusal
from sparring.launch.checkpoint import CONFIG, find_checkpoint
from sparring.launch.interrupts import block
from sparring.launch.rehearsal import rehearse
from sparring.launch.resume import keep_tokenizer
from sparring.launch.run import opened
from sparring.launch.run_server import answered_outside
from sparring.model.config import ModelConfig, ServedConfig
from sparring.observe.config import ObserveConfig
from sparring.observe.evaluation import compare, verdict
from sparring.observe.progress import progress
from sparring.observe.results import RESULT, Compared, Evaluated, Results, read_result, write_results
from sparring.recipe.run_config import RunConfig, dump, resolve
from sparring.recipe.sections.evaluation import EvalConfig
from sparring.recipe.sections.rl import RlConfig
from sparring.recipe.sections.run import RunSection
from sparring.recipe.url_secrets import has_user
from sparring.recipe.url_secrets import refused as url_refused
from sparring.rollout.config import GatewayConfig, RolloutConfig
from sparring.stages.context import POLICY
from sparring.stages.models.reward_model import OWN
from sparring.user_files.neighbours import with_neighbours

ENDPOINT = ("http://", "https://", "unix:")
"""Prefixes of an endpoint's address."""

REWARD_MODEL = "own_reward_model"
"""Name of the run's reward model in the recipe of an evaluation."""

CONTENT = (".safetensors", ".bin", ".json", ".jinja", ".model", ".txt")
"""Suffixes of the files of a checkpoint that affect its samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """Subject of an evaluation: a folder with weights, or a model served at an endpoint. For an endpoint, the folder
    has the tokenizer."""

    name: str
    folder: Path
    endpoint: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """Condition that a metric may fall by at most `margin`. The metric is success, reward, pass@k or pass^k; "" is
    success, or reward if the world reports no success."""

    margin: float
    figure: str = ""


def evaluate_subjects(config: RunConfig, subjects: Sequence[Subject | Path], gate: Gate | None = None) -> Results:
    """Evaluate each subject, and compare each with the first. The path of an earlier result file is read instead.

    Each evaluation has a folder under `<run.directory>/<run.name>/evaluations`. The folder's name is derived from all
    settings that affect the samples. Recorded rollouts are not run again.

    Raises:
        BadInput: a subject, the recipe or the gate is refused.
    """
    config = resolve(config)
    read = [read_result(each) if isinstance(each, Path) else each for each in subjects]
    if gate is not None and len(subjects) < 2:
        advice = "name the baseline first, then the one to compare with it"
        raise refusal("--gate", "two checkpoints or endpoints to compare", "one", advice)
    if gate is not None and gate.figure:
        _check_figure(gate.figure, config.eval, [each if isinstance(each, Evaluated) else None for each in read])
    evaluations = block(_evaluate_all(config, read))
    comparisons = [compared(evaluations[0], other, gate) for other in evaluations[1:]]
    return Results(evaluations=tuple(evaluations), comparisons=tuple(comparisons))


def compared(before: Evaluated, after: Evaluated, gate: Gate | None = None) -> Compared:
    """Return the comparison of two evaluations.

    Raises:
        BadInput: the evaluations have different tasks, or lack the metric of the gate.
    """
    comparison = compare(before.evaluation, after.evaluation)
    if gate is None:
        return Compared(before=before.name, after=after.name, comparison=comparison)
    figure = gate.figure or comparison.figure
    if figure not in comparison.changes:
        raise _no_such_figure(figure, list(comparison.changes))
    says = verdict(comparison.changes[figure], gate.margin)
    return Compared(
        before=before.name, after=after.name, comparison=comparison, figure=figure, margin=gate.margin, verdict=says
    )


def _check_figure(figure: str, config: EvalConfig, results: Sequence[Evaluated | None]) -> None:
    """Raise BadInput if the evaluations will not have a gate's metric, before hours of sampling. A result of None
    stands for an evaluation that is still to be made."""
    evaluations = [result.evaluation for result in results if result is not None]
    samples = min(config.samples if result is None else result.evaluation.samples for result in results)
    ks = config.ks if results[0] is None else sorted(map(int, results[0].evaluation.pass_at))
    solving = all(evaluation.success.tasks for evaluation in evaluations)
    passes = [f"pass{sign}{k}" for sign in "@^" for k in ks if k <= samples and solving]
    figures = [*(["success"] if solving else []), "reward", *passes]
    if figure not in figures:
        raise _no_such_figure(figure, figures)


def _no_such_figure(figure: str, figures: Sequence[str]) -> Exception:
    return refusal("--figure", f"one of {', '.join(figures)}", figure, "name one of these, or raise --samples and --k")


def evaluated_as(config: RunConfig, name: str, tokenizer: Path | None) -> Subject | Path:
    """Return the subject of a name: an endpoint's URL, a result file, or the folder of a checkpoint or a run. An
    endpoint's tokenizer is in `tokenizer`, else that of the recipe's policy.

    Raises:
        BadInput: the folder does not exist, or an endpoint has no tokenizer.
    """
    from sparring.model.hub import model_folder, with_template

    if name.startswith(ENDPOINT):
        if has_user(name, "url"):
            raise url_refused("CHECKPOINT", "url")
        policy = config.models[POLICY]
        if tokenizer is None and policy.path is None:
            raise refusal(name, "a tokenizer for the endpoint's tokens", "none", "give its folder: --tokenizer FOLDER")
        folder = model_folder(policy) if tokenizer is None else find_checkpoint(tokenizer)
        return Subject(name=name, folder=folder, endpoint=name)
    if "://" in name:
        scheme = f"the scheme {name.partition(':')[0]!r}"
        raise refusal(name, f"a folder, or an endpoint's URL ({', '.join(ENDPOINT)})", scheme, "correct it")
    path = Path(name)
    if path.suffix == ".json":
        return path
    return Subject(name=name, folder=with_template(find_checkpoint(path), config.models[POLICY].template))


def check_writable(path: Path) -> None:
    """Raise BadInput if a result file cannot be written, before hours of work for it."""
    if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise refusal(str(path), "a file in a writable folder", "none", "choose another")


def evaluation_folder(config: RunConfig, subject: Subject) -> Path:
    """Return the folder of an evaluation's record. Its name is the subject, and a digest of all settings that affect
    the samples."""
    recipe = _recipe(config, subject, "", "")
    run = RunSection(name="-", seed=recipe.run.seed, device=recipe.run.device)
    settings = msgspec.to_builtins(msgspec.structs.replace(recipe, run=run, observe=ObserveConfig()))
    digest = xxhash.xxh3_64(msgspec.json.encode(settings, order="sorted"))
    for path in _deciding_files(config, subject):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while part := file.read(1 << 24):
                digest.update(part)
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", subject.name).strip("-.")[-48:]
    return Path(config.run.directory) / config.run.name / FOLDERS / f"{slug}-{digest.hexdigest()[:10]}"


async def _evaluate_all(config: RunConfig, subjects: Sequence[Subject | Evaluated]) -> list[Evaluated]:
    """Evaluate each subject without a result. Programs outside the process see all evaluations as one run."""
    from sparring.stages.preflight.directory import check_directory

    check_directory(Path(config.run.directory))
    run, tell = Path(config.run.directory) / config.run.name, partial(_tell, config.observe)
    async with AsyncExitStack() as stack:
        if any(isinstance(subject, Subject) for subject in subjects):
            answered = answered_outside(config, run / FOLDERS, tell, gateway_too=False, keys_of=run)
            await stack.enter_async_context(answered)
        return [await _evaluate(config, each) if isinstance(each, Subject) else each for each in subjects]


def _tell(config: ObserveConfig, stage: str, text: str) -> None:
    sink = progress(config)
    sink.event(stage, text)
    sink.close()


async def _evaluate(config: RunConfig, subject: Subject) -> Evaluated:
    from sparring.harness.by_environment import mounts_of
    from sparring.harness.load import BUILT_IN
    from sparring.rollout.evaluate import EvalPlan
    from sparring.sandbox.check import check_sandbox
    from sparring.stages.models.judge import JudgeUse
    from sparring.stages.models.player import PlayerUse
    from sparring.stages.models.reward_model import RewardModelUse
    from sparring.stages.preflight.harness import check_files, play_silently
    from sparring.stages.runtime.evaluation import evaluate_folder, held_out

    folder = evaluation_folder(config, subject)
    recipe = resolve(_recipe(config, subject, str(folder.parent), folder.name))
    _write_recipe(folder, recipe)
    async with opened(recipe) as context:
        context = dataclasses.replace(context, config=msgspec.structs.replace(recipe, eval=config.eval))
        tasks = held_out(context.config, context.factory, config.eval.tasks)
        if tasks[0].box is not None or mounts_of(context.harness) is not None:
            check_sandbox(config.sandbox)
            check_files(context.config, context.harness)
        await JudgeUse().ask(context)
        RewardModelUse().check(context)
        PlayerUse().check(context)
        if config.harness_of(tasks[0].env) not in BUILT_IN:
            await rehearse(context, lambda rehearsed, _: play_silently(rehearsed, tasks[0]))
        plan = EvalPlan(tasks=tasks, run_seed=config.run.seed, samples=config.eval.samples)
        evaluation = await evaluate_folder(context, str(subject.folder), plan)
        result = Evaluated(
            name=subject.name,
            folder=str(folder),
            environment=context.factory.name,
            seed=config.run.seed,
            temperature=config.rollout.sampling.temperature,
            evaluation=evaluation,
        )
        write_results(Results(evaluations=(result,)), folder / RESULT)
        return result


def _write_recipe(folder: Path, recipe: RunConfig) -> None:
    """Write the recipe and the tokenizer of an evaluation into its folder, whose name has the recipe's digest."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).write_text(dump(recipe), encoding="utf-8")
        keep_tokenizer(folder, recipe)
    except OSError as error:
        raise refusal(
            str(folder), "a folder that can be created", error.strerror or str(error), "choose another --name"
        ) from error


def _recipe(config: RunConfig, subject: Subject, directory: str, name: str) -> RunConfig:
    """Return the sections of a recipe that an evaluation reads, without settings of its size and its reports."""
    served = _endpoint_server(config.engine, subject.endpoint) if subject.endpoint else None
    spec = msgspec.structs.replace(config.models[POLICY], path=str(subject.folder), init=None, lora=None, served=served)
    run = config.run
    return RunConfig(
        run=RunSection(
            name=name or "-",
            directory=directory,
            seed=run.seed,
            stages=("eval",),
            device=run.device,
            threads=run.threads,
        ),
        models={**config.models, **_reward_model(config), POLICY: spec},
        env=config.env,
        envs=config.envs,
        sandbox=config.sandbox,
        engine=config.engine,
        rollout=_without_addresses(config.rollout),
        rl=_rewards(config),
        eval=EvalConfig(tasks=config.eval.tasks),
        observe=ObserveConfig(sinks=(), progress=config.observe.progress, lines_every_s=config.observe.lines_every_s),
    )


def _without_addresses(config: RolloutConfig) -> RolloutConfig:
    """Return the settings of rollouts without addresses of servers and waiting times for workers, which do not affect
    the samples."""
    fields = config.gateway.shown_to_workers
    return msgspec.structs.replace(config, gateway=GatewayConfig(shown_to_workers=fields))


def _rewards(config: RunConfig) -> RlConfig:
    """Return settings with the recipe's reward model alone. The reward model of the run's own stage gets the name
    `REWARD_MODEL`."""
    name = REWARD_MODEL if config.rl.reward_model == OWN else config.rl.reward_model
    return RlConfig(reward_model=name, reward_weight=config.rl.reward_weight)


def _reward_model(config: RunConfig) -> dict[str, ModelConfig]:
    """Return the reward model that the run's own stage has trained, if the run scores with it."""
    if config.rl.reward_model != OWN:
        return {}
    folder = Path(config.run.directory) / config.run.name / OWN / "model"
    if not folder.is_dir():
        advice = "run the recipe first, or name a model: --set rl.reward_model=NAME"
        raise refusal("rl.reward_model", f"the model of the stage {OWN} in {folder}", "no such folder", advice)
    return {REWARD_MODEL: msgspec.structs.replace(config.models[POLICY], path=str(folder), init=None, lora=None)}


def _endpoint_server(engine: EngineConfig, url: str) -> ServedConfig:
    """Return the server of an endpoint: OpenAI's completions if the address ends in /v1, else `sparring serve`."""
    kind: Literal["openai", "remote"] = "openai" if url.rstrip("/").endswith("/v1") else "remote"
    return ServedConfig(kind=kind, url=url, api_key_env=engine.api_key_env, served_model=engine.served_model)


def _deciding_files(config: RunConfig, subject: Subject) -> list[Path]:
    """Return the files that affect samples and scores: of the checkpoint, the models of other roles, the reward models,
    the adapters' bases, and the environment."""
    from sparring.model.hub import base_folder, model_folder

    models, reward = {**config.models, **_reward_model(config)}, _rewards(config).reward_model
    beside = sorted({*config.judging, *config.rollout.roles.values()} - {POLICY})
    specs = [models[name] for name in (reward, *beside) if name in models]
    named = [subject.folder, *(model_folder(spec) for spec in specs if spec.path is not None)]
    folders = dict.fromkeys(folder for each in named for folder in (each, base_folder(each)))
    files = [file for folder in folders for file in sorted(folder.iterdir()) if file.suffix in CONTENT]
    environments = list(config.environments.values())
    functions = [p.function for env in environments for p in env.rubric.values() if isinstance(p, Function)]
    harnesses = [config.rollout.harness, *(domain.harness for domain in config.envs.values())]
    worlds = [name for env in environments for name in (env.name, env.reward)]
    sources = [name.rpartition(":")[0] for name in (*worlds, *harnesses, *functions)]
    data = [path for env in environments for path in (env.data, env.eval_data)]
    paths = [Path(part) for part in (*sources, *data) if part]
    there = [path for path in paths if path.is_file()]
    return files + [each for path in there for each in (with_neighbours(path) if path.suffix == ".py" else [path])]
