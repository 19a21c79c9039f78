"""Teachers of a run: their folders, the annotator that asks them, and the checks that they can teach."""

from __future__ import annotations

from pathlib import Path

from sparring.algo.annotate.across import AcrossTokenizers, TeacherTokenizer
from sparring.algo.annotate.feedback import sibling_feedback
from sparring.algo.annotate.provenance import SampleProvenance
from sparring.algo.annotate.teacher import ScoreClient, ScoringEngine, TeacherRows
from sparring.errors import refusal
from sparring.model.config import ModelConfig
from sparring.model.hub import base_folder, model_folder
from sparring.protocols import Annotator, Cluster, Engine, EnvFactory, Trainer
from sparring.recipe.run_config import RunConfig
from sparring.render.demonstrate import reply_tokens
from sparring.render.tokenizer import load_tokenizer
from sparring.stages.context import POLICY, renderer_of
from sparring.stages.models.context_length import engine_of, max_context, outline_of
from sparring.stages.models.reference import AVERAGE, TrainerTeacher, check_reserved_name
from sparring.stages.models.teacher_format import check_format, student_folder
from sparring.types import Message

OWN = (POLICY, AVERAGE)
"""Teachers that are the policy itself: the served one, and its moving average."""


def teacher_annotator(
    config: RunConfig, cluster: Cluster, watch: SampleProvenance, *, engine: Engine, trainer: Trainer, source: Path
) -> Annotator:
    """Return the annotator that asks the teachers of `[distill]` about the policy's rows.

    Args:
        watch: finds the group and the rollout of a row.
        engine: engine of the policy.
        trainer: trainer of the policy and of its moving average.
        source: checkpoint folder that the policy starts from.
    """
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
    """Return the checkpoint or adapter folder of model `name`.

    Raises:
        BadInput: the folder does not exist.
    """
    return model_folder(config.models[name])


def check_collect(config: RunConfig) -> list[str]:
    """Refuse a teacher of the collect stage that the recipe does not have or that has no checkpoint, and a missing API
    key."""
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


def check_distill(config: RunConfig, factory: EnvFactory) -> list[str]:
    """Refuse a missing teacher, a teacher that does not read the student's tokens, and a teacher that scores another
    distribution than the student samples from."""
    stage = config.distill
    if "distill" not in config.run.stages:
        if config.eval.teachers:
            raise refusal("eval.teachers", "a stage distill in run.stages", "none", "leave it out, or add the stage")
        return []
    checkpoints = config.eval.checkpoints
    if config.eval.teachers and "distill" not in checkpoints:
        do = "add it, or leave eval.teachers out"
        raise refusal("eval.checkpoints", '"distill", to compare it with its teachers', str(list(checkpoints)), do)
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
            got, do = (
                "the policy without feedback",
                'set distill.feedback = "sibling", or name another',
            )
            raise refusal(where, "a teacher that has more information than the policy", got, do)
        return
    spec = models[name]
    if spec.served is not None and config.eval.teachers:
        got, do = f"{name}, which is served elsewhere", "leave it out, and evaluate that one with `sparring eval`"
        raise refusal("eval.teachers", "teachers whose weights are on this machine", got, do)
    if spec.path is None:
        raise refusal(f"models.{name}.path", "the checkpoint of a teacher", "none", "name one")
    if spec.served is not None and spec.served.kind == "chat":
        got, do = '"chat", which returns text alone', 'serve it by "openai" or "remote", or collect from it'
        raise refusal(f"models.{name}.served.kind", "a server that scores token ids", got, do)
    elsewhere = spec.served is not None and spec.served.kind == "openai"
    if elsewhere and stage.over != "vocabulary" and config.rollout.sampling.temperature != 1:
        got, do = f"{config.rollout.sampling.temperature:g}", 'set it to 1, or serve the teacher as kind "remote"'
        raise refusal(
            "rollout.sampling.temperature", f"1, the only temperature at which the server of {name} scores", got, do
        )
    if spec.served is not None and stage.over == "vocabulary":
        got, do = "one that is served elsewhere", 'set distill.over = "top_k" or "token", or leave out served'
        raise refusal(f"models.{name}.served", 'a teacher on this machine with distill.over = "vocabulary"', got, do)
    _check_key(spec)
    folder, student = teacher_folder(config, name), student_folder(config)
    if stage.tokenizers == "any":
        return
    if student is not None and _vocabulary(folder) == _vocabulary(student):
        init = models[POLICY].init
        longest = outline_of(student).max_positions if init is None else init.max_positions
        if (most := outline_of(folder).max_positions) < longest:
            do = "take a student of fewer positions (models.policy.init.max_positions), or another teacher"
            raise refusal(
                f"models.{name}.path", f"a teacher of at least the student's {longest} positions", f"{most}", do
            )
        return
    do = 'take a student that has its tokenizer (models.policy.init.tokenizer), or set distill.tokenizers = "any"'
    raise refusal(f"models.{name}.path", "a teacher with the student's tokenizer", f"a different one in {folder}", do)


def _check_untruncated(config: RunConfig) -> None:
    """Refuse truncated sampling of the student: a teacher scores the whole distribution."""
    sampling, defaults = config.rollout.sampling, type(config.rollout.sampling)()
    for key in ("top_p", "top_k", "min_p", "logit_bias", "min_turn_tokens", "constraint"):
        if getattr(sampling, key) != getattr(defaults, key):
            expected = "its default while the run distils, because teachers score the distribution without truncation"
            raise refusal(f"rollout.sampling.{key}", expected, repr(getattr(sampling, key)), "leave it out")


def _vocabulary(folder: Path) -> dict[str, int]:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(base_folder(folder) / "tokenizer.json")).get_vocab()
