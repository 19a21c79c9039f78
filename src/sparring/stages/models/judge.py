"""Judges of rubrics: checks that their models answer, and that a rubric can score an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparring.envs.rubrics.config import RELATIVE, AskedPart, of_domain
from sparring.errors import refusal
from sparring.model.hub import model_folder
from sparring.recipe.run_config import RunConfig
from sparring.stages.context import PLAYING_STAGES, POLICY, Context
from sparring.stages.models.model_use import ModelUse, UsedModel, check_answers


class JudgeUse(ModelUse):
    """Use of a model that a rubric asks."""

    name, metrics = "judge", ("judge/*",)

    def models(self, config: RunConfig, stage: str) -> list[UsedModel]:
        return self.engines(config, config.judging if stage in PLAYING_STAGES else ())

    async def ask(self, context: Context) -> list[str]:
        """Refuse a judge that is missing, does not answer, or is on a server that cannot constrain its verdict. Refuse
        a rubric that cannot score an evaluation."""
        config = context.config
        evaluates = ("eval" in config.run.stages or config.eval.every) and config.rl.reward_model is None
        for key, env in config.environments.items():
            for name, part in env.rubric.items():
                if isinstance(part, AskedPart):
                    _check_model(config, f"{key}.rubric.{name}", part)
            if evaluates:
                _check_absolute_part(f"{key}.rubric", env.rubric)
        models = sorted(config.judging)
        for model in models:
            await check_answers(config, model, "a judge", context.judges.check)
        return [f"judges: {model} answers" for model in models]


def _check_absolute_part(where: str, rubric: Mapping[str, Any]) -> None:
    """Refuse a rubric without a part that scores a single answer, in any domain: an evaluation has no groups to
    compare."""
    for domain in sorted({name for part in rubric.values() for name in part.domains}) or [""]:
        parts = of_domain(dict(rubric), domain).values()
        if parts and not any(part.weight and not isinstance(part, RELATIVE) for part in parts):
            actual = f"only parts that compare the answers of a group{f' in domain {domain!r}' if domain else ''}"
            expected, fix = "a part that scores one answer by itself, for evaluations", "add one, or evaluate nothing"
            raise refusal(where, expected, actual, fix)


def _check_model(config: RunConfig, where: str, part: AskedPart) -> None:
    """Refuse a judge without a table `[models.<name>]`, the policy as a judge, and a judge on a server that cannot
    constrain the verdict."""
    spec = config.models.get(part.model)
    chat = spec is not None and spec.served is not None and spec.served.kind == "chat"
    if spec is None or part.model == POLICY or not (spec.path or chat):
        actual = "the policy" if part.model == POLICY else "none" if spec is None else "one without a path"
        fix = "add a model that judges, under a name of its own"
        raise refusal(f"{where}.model", f"a table [models.{part.model}] with a path", actual, fix)
    if spec.path is not None:
        model_folder(spec)
    if part.constrain and spec.served is not None and spec.served.kind != "remote":
        actual = f'true with a server of kind "{spec.served.kind}", which takes no token masks from its client'
        raise refusal(f"{where}.constrain", "false", actual, "leave it out, and set find to the pattern of the verdict")
