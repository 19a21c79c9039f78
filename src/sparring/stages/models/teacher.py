"""Teachers of a run: models that the policy imitates, and models whose distribution it learns."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from sparring.algo.annotate.cross_tokenizer import AcrossTokenizers, TeacherTokenizer
from sparring.algo.annotate.feedback import sibling_feedback
from sparring.algo.annotate.provenance import SampleProvenance
from sparring.algo.annotate.teacher import ScoreClient, ScoringEngine, TeacherRows
from sparring.errors import refusal
from sparring.generation import ScoreRequest
from sparring.model.config import ModelConfig
from sparring.model.hub import base_folder, model_folder
from sparring.protocols import Annotator, Cluster, Engine, EnvFactory, Trainer
from sparring.recipe.run_config import RunConfig
from sparring.render.demonstrate import reply_tokens
from sparring.render.tokenizer import load_tokenizer
from sparring.stages.context import POLICY, Context, renderer_of
from sparring.stages.models.context_length import engine_of, max_context, outline_of
from sparring.stages.models.model_use import ModelUse, UsedModel, check_answers
from sparring.stages.models.reference import AVERAGE, TrainerTeacher, check_reserved_name
from sparring.stages.models.teacher_format import check_format, student_folder
from sparring.types import Message

OWN = (POLICY, AVERAGE)
"""Teachers that are the policy itself: the served one, and its moving average."""


class TeacherUse(ModelUse):
    """Use of a model whose traces the policy imitates (collect) or whose distribution it learns (distill)."""

    name, metrics = "teacher", ("divergence", "distill_gap", "teacher/*")

    def models(self, config: RunConfig, stage: str) -> list[UsedModel]:
        if stage == "collect":
            return self.engines(config, set(config.collect.by_domain.values()))
        if stage != "distill":
            return []
        named = set(config.distill.teachers.values()) - {POLICY}  # the policy is served already
        frozen = named if config.distill.over == "vocabulary" else named & {AVERAGE}
        decay = {AVERAGE: config.distill.decay}
        computed = [
            UsedModel(use=self.name, model=name, kind="frozen", trainer=POLICY, decay=decay.get(name))
            for name in sorted(frozen)
        ]
        return [*computed, *self.engines(config, named - frozen)]

    def check(self, context: Context) -> list[str]:
        """Refuse teachers that cannot be imitated, and teachers that cannot score what the student samples."""
        return [*_check_collect(context.config), *_check_distill(context.config, context.factory)]

    async def ask(self, context: Context) -> list[str]:
        """Refuse a remote teacher of an unfinished stage that does not answer."""
        config, facts = context.config, []
        by_stage = (
            ("collect", config.collect.by_domain, context.judges.check),
            ("distill", config.distill.teachers, partial(_score_a_token, config, context.cluster)),
        )
        for stage, routes, ask in by_stage:
            if stage not in config.run.stages or context.done(stage) is not None:
                continue
            for name in sorted(set(routes.values()) & config.models.keys()):
                if config.models[name].served is not None:
                    await check_answers(config, name, "a teacher", ask)
                    facts.append(f"{stage}: {name} answers")
        return facts


async def _score_a_token(config: RunConfig, cluster: Cluster, name: str) -> None:
    engine = cluster.engine(name, path=str(teacher_folder(config, name)))
    stage = config.distill
    try:
        await engine.score(
            ScoreRequest(id="check", tokens=(0, 1), first=1, top_k=stage.top_k if stage.over == "top_k" else 0)
        )
    finally:
        await engine.close()


def teacher_annotator(
    config: RunConfig, cluster: Cluster, watch: SampleProvenance, *, engine: Engine, trainer: Trainer, source: Path
) -> Annotator:
    """Return the annotator that asks the teachers of `[distill]` about the policy's rows."""
    stage = config.distill
    own: dict[str, ScoringEngine] = {POLICY: engine, AVERAGE: TrainerTeacher(trainer, AVERAGE)}
    engines: dict[str, ScoringEngine] = {}
    if stage.over != "vocabulary":
        for name in sorted(set(stage.teachers.values())):
            engines[name] = own[name] if name in OWN else cluster.engine(name, path=str(teacher_folder(config, name)))
    asker = ScoreClient(
        max_concurrent=stage.max_concurrent_scores, retries=stage.retries, retry_delay_s=stage.retry_delay_s
    )
    student = renderer_of(config, source)
    if stage.tokenizers == "any":
        tokenizers = {name: teacher_tokenizer(config, name) for name in engines}
        return AcrossTokenizers(watch, stage.teachers, engines, asker, student=student, tokenizers=tokenizers)
    return TeacherRows(
        watch,
        stage.teachers,
        engines,
        asker,
        top_k=stage.top_k if stage.over == "top_k" else 0,
        reading=sibling_feedback(watch, student) if stage.feedback == "sibling" else None,
        max_tokens=min(
            max_context_of(config, POLICY, source) if name in OWN else max_context_of(config, name)
            for name in stage.teachers.values()
        ),
    )


def teacher_tokenizer(config: RunConfig, name: str) -> TeacherTokenizer:
    """Return the tokenizer of the model `name` of the recipe."""
    folder = base_folder(teacher_folder(config, name))
    renderer = renderer_of(config, folder, name)
    end = reply_tokens(renderer, Message(role="assistant", content="."))[-1]
    return TeacherTokenizer(
        renderer=renderer, encode=load_tokenizer(folder).encode, end=end, max_tokens=max_context_of(config, name)
    )


def max_context_of(config: RunConfig, name: str, folder: Path | None = None) -> int:
    """Return the maximum number of tokens that model `name` reads at once; `folder` replaces its folder in the
    recipe."""
    spec, shape = config.models[name], outline_of(folder or teacher_folder(config, name))
    engine = engine_of(config, name)
    alone = spec.served is None and engine.kind == "native"
    return max_context(shape, engine, spec.dtype) if alone else shape.max_positions


def teacher_folder(config: RunConfig, name: str) -> Path:
    """Return the checkpoint or adapter folder of model `name`."""
    return model_folder(config.models[name])


def _check_collect(config: RunConfig) -> list[str]:
    if "collect" not in config.run.stages:
        return []
    section = config.collect
    key = "collect.teachers" if section.teachers else "collect.model"
    return [_check_collect_model(config, key, name) for name in sorted(set(section.by_domain.values()))]


def _check_collect_model(config: RunConfig, key: str, name: str) -> str:
    models = config.models
    if name not in models:
        names = ", ".join(sorted(models))
        raise refusal(key, f"a model of the recipe, one of {names}", repr(name), f"add [models.{name}]")
    spec = models[name]
    _check_key(spec)
    if spec.served is not None and spec.served.kind == "chat":
        return f"collect: from {spec.served.served_model} at {spec.served.url}"
    if spec.path is None:
        raise refusal(f"models.{name}.path", "the checkpoint of the teacher", "none", "name one")
    return f"collect: from {teacher_folder(config, name)}"


def _check_distill(config: RunConfig, factory: EnvFactory) -> list[str]:
    stage = config.distill
    if "distill" not in config.run.stages:
        if config.eval.teachers:
            raise refusal("eval.teachers", "a stage distill in run.stages", "none", "leave it out, or add the stage")
        return []
    checkpoints = config.eval.checkpoints
    if config.eval.teachers and "distill" not in checkpoints:
        fix = "add it, or leave eval.teachers out"
        raise refusal("eval.checkpoints", '"distill", to compare it with its teachers', str(list(checkpoints)), fix)
    if not stage.teachers:
        raise refusal(
            "distill.teachers", "at least one teacher", "none", 'write { "*" = "teacher" } and [models.teacher]'
        )
    for domain, name in stage.teachers.items():
        _check_teacher(config, f"distill.teachers.{domain}", name)
    _check_untruncated(config)
    names = ", ".join(f"{name} for {domain}" for domain, name in sorted(stage.teachers.items()))
    formats = [line for name in sorted(set(stage.teachers.values())) for line in check_format(config, factory, name)]
    return [f"distill: {stage.divergence} over {stage.over}; teachers: {names}", *formats]


def _check_key(spec: ModelConfig) -> None:
    from sparring.engine.adapters.client import read_api_key

    if spec.served is not None:
        read_api_key(spec.served.api_key_env)


def _check_teacher(config: RunConfig, where: str, name: str) -> None:
    models, stage = config.models, config.distill
    check_reserved_name(config, name, "distill.teachers")
    if name not in (*models, AVERAGE):
        names = ", ".join(sorted(models))
        raise refusal(where, f"a model of the recipe, one of {names}, or {AVERAGE}", repr(name), f"add [models.{name}]")
    if name in OWN:
        if stage.feedback == "none":
            actual, fix = (
                "the policy without feedback",
                'set distill.feedback = "sibling", or name another',
            )
            raise refusal(where, "a teacher that has more information than the policy", actual, fix)
        return
    spec = models[name]
    if spec.served is not None and config.eval.teachers:
        actual, fix = f"{name}, which is served elsewhere", "leave it out, and evaluate that one with `sparring eval`"
        raise refusal("eval.teachers", "teachers whose weights are on this machine", actual, fix)
    if spec.path is None:
        raise refusal(f"models.{name}.path", "the checkpoint of a teacher", "none", "name one")
    if spec.served is not None and spec.served.kind == "chat":
        actual, fix = '"chat", which returns text alone', 'serve it by "openai" or "remote", or collect from it'
        raise refusal(f"models.{name}.served.kind", "a server that scores token ids", actual, fix)
    elsewhere = spec.served is not None and spec.served.kind == "openai"
    if elsewhere and stage.over != "vocabulary" and config.rollout.sampling.temperature != 1:
        actual, fix = f"{config.rollout.sampling.temperature:g}", 'set it to 1, or serve the teacher as kind "remote"'
        raise refusal(
            "rollout.sampling.temperature", f"1, the only temperature at which the server of {name} scores", actual, fix
        )
    if spec.served is not None and stage.over == "vocabulary":
        actual, fix = "one that is served elsewhere", 'set distill.over = "top_k" or "token", or leave out served'
        raise refusal(
            f"models.{name}.served", 'a teacher on this machine with distill.over = "vocabulary"', actual, fix
        )
    _check_key(spec)
    folder, student = teacher_folder(config, name), student_folder(config)
    if stage.tokenizers == "any":
        return
    if student is not None and _vocabulary(folder) == _vocabulary(student):
        init = models[POLICY].init
        longest = outline_of(student).max_positions if init is None else init.max_positions
        if (most := outline_of(folder).max_positions) < longest:
            fix = "take a student of fewer positions (models.policy.init.max_positions), or another teacher"
            raise refusal(
                f"models.{name}.path", f"a teacher of at least the student's {longest} positions", f"{most}", fix
            )
        return
    fix = 'take a student that has its tokenizer (models.policy.init.tokenizer), or set distill.tokenizers = "any"'
    raise refusal(f"models.{name}.path", "a teacher with the student's tokenizer", f"a different one in {folder}", fix)


def _check_untruncated(config: RunConfig) -> None:
    sampling, defaults = config.rollout.sampling, type(config.rollout.sampling)()
    for key in ("top_p", "top_k", "min_p", "logit_bias", "min_turn_tokens", "constraint"):
        if getattr(sampling, key) != getattr(defaults, key):
            expected = "its default while the run distils, because teachers score the distribution without truncation"
            raise refusal(f"rollout.sampling.{key}", expected, repr(getattr(sampling, key)), "leave it out")


def _vocabulary(folder: Path) -> dict[str, int]:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(base_folder(folder) / "tokenizer.json")).get_vocab()
