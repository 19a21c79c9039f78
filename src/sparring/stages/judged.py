"""What a rubric needs of a run: judges that stand in `[models]` and answer, and a reward in evaluation too."""

from __future__ import annotations

from sparring.envs.rubrics.config import RELATIVE, AskedPart, judging
from sparring.errors import InfraError, refusal
from sparring.model.hub import local_folder
from sparring.stages.context import POLICY, Context

ABLE = ("native", "remote")
"""Kinds of engines that can hold a reply to a constraint."""


async def check_judges(context: Context) -> list[str]:
    """Prove that everybody whom the rubric asks answers.

    Returns:
        What was found, one sentence each.

    Raises:
        BadInput: a judge is not there, cannot do what is asked of it, or does not answer; or nothing can be evaluated.
    """
    config = context.config
    for name in config.engines:
        if name not in config.models or name == POLICY:
            others = ", ".join(n for n in config.models if n != POLICY) or "none"
            raise refusal(f"engines.{name}", f"a model beside the policy ({others})", repr(name), "add it to [models]")
    asked = {name: part for name, part in config.env.rubric.items() if isinstance(part, AskedPart)}
    for name, part in asked.items():
        _check_model(context, f"env.rubric.{name}", part)
    by_itself = any(part.weight and not isinstance(part, RELATIVE) for part in config.env.rubric.values())
    if asked and not by_itself and "eval" in config.run.stages:
        expected, got = "a part that says what one answer is worth, for the stage eval", "parts that compare a group's"
        raise refusal("env.rubric", expected, got, "add one, or leave eval out of run.stages")
    models = sorted(judging(config.env.rubric))
    for model in models:
        try:
            await context.judges.check(model)
        except InfraError as error:
            do = "start its server, or correct [engines]"
            raise refusal(f"models.{model}", "a judge that answers", str(error), do) from error
    return [f"judges: {model} answers" for model in models]


def _check_model(context: Context, where: str, part: AskedPart) -> None:
    """The model stands in `[models]`, with weights or at least a tokenizer to load, and its engine can do what the part says."""
    config = context.config
    spec = config.models.get(part.model)
    if spec is None or spec.path is None or part.model == POLICY:
        got = "the policy" if part.model == POLICY else "none" if spec is None else "one without a path"
        do = "add a model that judges, under a name of its own"
        raise refusal(f"{where}.model", f"a table [models.{part.model}] with a path", got, do)
    local_folder(spec.path)
    engine = config.engines.get(part.model)
    if part.constrain and engine is not None and engine.kind not in ABLE:
        got = f'true with an engine of kind "{engine.kind}", which asks nobody between two tokens'
        raise refusal(f"{where}.constrain", "false", got, "leave it out, and let find pick the verdict")
