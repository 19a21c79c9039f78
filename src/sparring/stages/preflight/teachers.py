"""Check of teachers on other servers: they answer."""

from __future__ import annotations

from functools import partial

from sparring.generation import ScoreRequest
from sparring.protocols import Cluster
from sparring.recipe.run_config import RunConfig
from sparring.stages.context import Context
from sparring.stages.models.teachers import teacher_folder
from sparring.stages.preflight.judges import check_answers


async def check_teachers_answer(context: Context) -> list[str]:
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
