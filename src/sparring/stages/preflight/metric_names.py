"""Check of the metrics that choose the best checkpoint or end a stage."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from sparring.errors import refusal
from sparring.observe.metric_table import HELD_OUT, SAMPLED, TRAINED
from sparring.recipe.run_config import RunConfig
from sparring.stages.context import ONLINE_STAGES, TRAINING_STAGES
from sparring.stages.models.policy import train_of
from sparring.stages.models.uses import USES
from sparring.stages.runtime.checkpoint_names import is_held_out


def names_of(config: RunConfig, stage: str) -> tuple[str, ...]:
    """Return the names of all metrics of a stage; a star stands for any name."""
    held_out = tuple(f"{stage}/eval/{name}" for name in HELD_OUT) if config.eval.every else ()
    of_uses = tuple(name for use in USES for name in use.metrics)
    trained, sampled = (tuple(metric.name for metric in metrics) for metrics in (TRAINED, SAMPLED))
    return (*held_out, *sampled, *of_uses, *trained) if stage in ONLINE_STAGES else trained


def check_metrics(config: RunConfig) -> list[str]:
    """Refuse `train.best_metric` and `stop.metric` of names that no stage of the run reports."""
    stages = [stage for stage in TRAINING_STAGES if stage in config.run.stages]
    general, default = config.train.best_metric, type(config.train)().best_metric
    followed = [stage for stage in stages if "best_metric" not in getattr(config, stage).train]
    every = [name for stage in followed for name in names_of(config, stage)]
    if followed and general not in ("", default):
        _check(config, "train.best_metric", general, every)
    for stage in set(stages) - set(followed):
        metric = train_of(config, stage).best_metric
        if metric:
            _check(config, f"{stage}.train.best_metric", metric, names_of(config, stage))
    return list(_stops(config))


def _stops(config: RunConfig) -> Iterator[str]:
    for stage in ONLINE_STAGES:
        stop = getattr(config, stage).stop
        if stop is None or stage not in config.run.stages:
            continue
        _check(config, f"{stage}.stop.metric", stop.metric, names_of(config, stage))
        waits = ", for whose evaluation updates wait" if is_held_out(stage, stop.metric) else ""
        yield f"{stage}: may end before step {getattr(config, stage).steps}, by {stop.metric}{waits}"


def _check(config: RunConfig, where: str, metric: str, names: tuple[str, ...] | list[str]) -> None:
    if any(fnmatchcase(metric, name) for name in names):
        return
    beside = [stage for stage in ONLINE_STAGES if is_held_out(stage, metric)]
    if beside and not config.eval.every and any(fnmatchcase(metric, f"{beside[0]}/eval/{name}") for name in HELD_OUT):
        fix = "set eval.every, or name a metric of training"
        raise refusal(where, "a metric that the run has", f"{metric}, without evaluation beside training", fix)
    allowed = ", ".join(name for name in dict.fromkeys(names) if not name.startswith(("time/", "engine/", "rank/")))
    raise refusal(where, f"a metric of the run: {allowed}", repr(metric), "name one of these; * stands for any name")
