"""`RunConfig`: the config of a run, made of its parts' configs, resolved for a machine, and dumped as a recipe.

Each key is documented in its part's `config.py`, or in `recipe.sections`.
"""

from __future__ import annotations

import os
import re
import tomllib
from contextlib import suppress
from typing import Any

import msgspec
import tomli_w

from sparring.algo.config import INEXACT, AlgoConfig
from sparring.algo.correction.rule import Correction
from sparring.cluster.config import ClusterConfig
from sparring.engine.config import EngineConfig
from sparring.envs.config import EnvConfig
from sparring.envs.rubrics.config import judging
from sparring.errors import refusal
from sparring.kernels.devices import resolve_device
from sparring.model.config import ModelConfig
from sparring.observe.config import ObserveConfig
from sparring.recipe.sections.distill import DistillConfig
from sparring.recipe.sections.domains import DomainConfig
from sparring.recipe.sections.evaluation import EvalConfig, ExportConfig
from sparring.recipe.sections.imitation import CollectConfig, SftConfig
from sparring.recipe.sections.preference import PreferenceConfig, RewardModelConfig
from sparring.recipe.sections.rl import RlConfig
from sparring.recipe.sections.run import RunSection
from sparring.render.config import RenderConfig
from sparring.rollout.config import RolloutConfig
from sparring.sandbox.config import SandboxConfig
from sparring.train.config import TrainConfig
from sparring.validation import InvalidValue, convert

DOMAIN_NAME = re.compile(r"[A-Za-z0-9_-]+")


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Config of a run. Each section is the config of the part with its name."""

    run: RunSection
    """Name, directory and stages of the run."""

    models: dict[str, ModelConfig]
    """Models by name, to which the parts refer. `policy` is the trained one."""

    env: EnvConfig | None = None
    """Environment. A run has this table, or several tables `[envs.<name>]`."""

    envs: dict[str, DomainConfig] = {}
    """Several environments by name, mixed by their weights. A name has letters, digits, `_` and `-`."""

    sandbox: SandboxConfig = SandboxConfig()
    """Sandbox of the policy's code."""

    engine: EngineConfig = EngineConfig()
    """Engine, which samples tokens."""

    cluster: ClusterConfig = ClusterConfig()
    """Processes of the run."""

    render: RenderConfig = RenderConfig()
    """Rendering of messages to tokens."""

    rollout: RolloutConfig = RolloutConfig()
    """Rollouts, which turn tasks into scored groups."""

    train: TrainConfig = TrainConfig()
    """Trainer, which updates the weights."""

    algo: AlgoConfig = AlgoConfig()
    """Algorithm, which turns scores into advantages and losses."""

    collect: CollectConfig = CollectConfig()
    """Stage that collects a teacher's traces."""

    sft: SftConfig = SftConfig()
    """Stage of supervised fine-tuning."""

    preference: PreferenceConfig = PreferenceConfig()
    """Stage of preference learning."""

    reward_model: RewardModelConfig = RewardModelConfig()
    """Stage that trains a reward model."""

    rl: RlConfig = RlConfig()
    """Stage of reinforcement learning."""

    distill: DistillConfig = DistillConfig()
    """Stage of distillation."""

    eval: EvalConfig = EvalConfig()
    """Stage of evaluation."""

    export: ExportConfig = ExportConfig()
    """Stage of export."""

    observe: ObserveConfig = ObserveConfig()
    """Metrics and their sinks."""

    def __post_init__(self) -> None:
        if "policy" not in self.models:
            raise ValueError(f"models must have a table [models.policy], got {sorted(self.models) or 'no table'}")
        if (self.env is None) == (not self.envs):
            raise ValueError(
                f"exactly one of [env] and [envs.<name>] must be given, got {'both' if self.envs else 'none'}"
            )
        for name in self.envs:
            if not DOMAIN_NAME.fullmatch(name):
                raise ValueError(f"envs must have names of letters, digits, _ and -, got {name!r}")
        if self.envs and not any(domain.weight for domain in self.envs.values()):
            raise ValueError("envs must have a weight above 0 in one of them, got weights that are all 0")
        placed = {"local": ("native", "vllm"), "ray": ("native",)}.get(self.cluster.kind, (self.engine.kind,))
        if self.engine.kind not in placed or (self.engine.urls and self.cluster.kind != "inline"):
            engine = f"{self.engine.kind}{' with urls' * bool(self.engine.urls)}"
            raise ValueError(
                f'engine.kind must be {" or ".join(placed)} with cluster.kind "{self.cluster.kind}", got {engine}'
            )
        if self.cluster.colocate:
            self._check_turns()
        if self.rollout.rewards.within_s is None:
            for key, env in self.environments.items():
                if env.reward == "outside":
                    raise ValueError(f"rollout.rewards.within_s must be set where {key}.reward is outside, got none")

    def _check_turns(self) -> None:
        """Refuse `cluster.colocate` where trainer and engine cannot take turns."""
        kind, lag, adapter = self.engine.kind, self.rollout.max_lag, self.models["policy"].lora
        if lag:
            raise ValueError(
                f"rollout.max_lag must be 0 with cluster.colocate, whose engine sleeps at times, got {lag}"
            )
        if kind != "native":
            raise ValueError(f'engine.kind must be "native" with cluster.colocate, got {kind}, which cannot sleep')
        if adapter is not None:
            reason = "whose base model the engine could not get back"
            raise ValueError(f"models.policy.lora must be left out with cluster.colocate, got an adapter, {reason}")

    @property
    def environments(self) -> dict[str, EnvConfig]:
        """Environments by the key of their table: `env`, or `envs.<name>`."""
        return {"env": self.env} if self.env is not None else {f"envs.{name}": each for name, each in self.envs.items()}

    def harness_of(self, environment: str) -> str:
        """Return the harness of an environment by its name, which is "" if the run has only one."""
        domain = self.envs.get(environment)
        return domain.harness if domain is not None and domain.harness else self.rollout.harness

    @property
    def harnesses(self) -> set[str]:
        """Harnesses of the environments."""
        return {self.harness_of(key.partition(".")[2]) for key in self.environments}

    @property
    def world(self) -> EnvConfig:
        """Environment of the run, or the first of several."""
        return next(iter(self.environments.values()))

    @property
    def judging(self) -> set[str]:
        """Names of the models that judge for the environments' rubrics."""
        return {name for each in self.environments.values() for name in judging(each.rubric)}


def resolve(config: RunConfig) -> RunConfig:
    """Replace values that depend on the machine (`device = "auto"`, `threads = 0`) or on other sections (`correction =
    "auto"`). A resolved config resolves to itself."""
    device = resolve_device(config.run.device, "run.device")
    threads = config.run.threads or len(os.sched_getaffinity(0))
    algo = config.algo
    if algo.correction == "auto":
        policy = config.models.get("policy")
        exact = config.engine.exact and (policy is None or policy.numerics == "exact")
        chosen: dict[str, Any] = {"correction": Correction()} if exact else INEXACT
        if algo.anchor == "loglinear":  # which is a proximal policy, too
            chosen = {**chosen, "anchor": algo.anchor}
        algo = msgspec.structs.replace(algo, **chosen)
    return msgspec.structs.replace(
        config, run=msgspec.structs.replace(config.run, device=device, threads=threads), algo=algo
    )


def dump(config: RunConfig) -> str:
    """Return the complete config as TOML that loads to an identical config.

    Raises:
        BadInput: TOML cannot express a value, such as None for a key with another default.
    """
    text, same = tomli_w.dumps(_without_none(msgspec.to_builtins(config))), False
    with suppress(InvalidValue):
        same = convert(tomllib.loads(text), type(config)) == config
    if not same:
        raise refusal(
            "the config", "values that TOML can express", "a None or a NaN", "leave those keys at their defaults"
        )
    return text


def _without_none(value: Any) -> Any:
    """Drop None, which TOML lacks: an absent key means the default, and `dump` checks that they are equal."""
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return [_without_none(v) for v in value] if isinstance(value, (list, tuple)) else value
