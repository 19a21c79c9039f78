"""Training tasks of an online stage: of one environment, or a mixture of several by weight."""

from __future__ import annotations

from collections.abc import Mapping

from sparring.envs.domains import Domains
from sparring.protocols import EnvFactory, TaskSource
from sparring.recipe.run_config import RunConfig
from sparring.tasks.mix import Mix
from sparring.tasks.pools import DifficultyPools


def training_tasks(
    config: RunConfig, factory: EnvFactory, pools: DifficultyPools | None, *, drops_equal: bool
) -> TaskSource:
    """Return the training tasks of a run.

    Args:
        pools: pools that skip tasks by difficulty; each of several environments may have pools of its own.
        drops_equal: whether updates leave out groups of equal rewards.
    """
    seed = config.run.seed
    if not isinstance(factory, Domains):
        return _pooled(factory.tasks("train", seed), pools, seed)
    sources = {
        name: _pooled(source, config.envs[name].pools or pools, seed)
        for name, source in factory.sources("train", seed).items()
    }
    weights = {name: domain.weight for name, domain in config.envs.items()}
    return Mix(sources, weights, drops_equal=drops_equal)


def data_files(config: RunConfig) -> dict[str, str]:
    """Return a description of each file with training tasks, by the environment's name; a single environment has the
    empty name."""
    environments = config.environments
    return {key.partition(".")[2]: f"{key}.data ({env.data})" for key, env in environments.items() if env.data}


def domain_metrics(source: TaskSource) -> Mapping[str, float]:
    """Return the metrics of each environment of a mixture; empty for another source."""
    return source.metrics() if isinstance(source, Mix) else {}


def _pooled(source: TaskSource, pools: DifficultyPools | None, seed: int) -> TaskSource:
    return source if pools is None else pools.open(source, seed=seed)
