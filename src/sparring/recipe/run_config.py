"""`RunConfig`: a whole run, made of its parts' configs; resolved for a machine, and dumped as a recipe again.

A key's meaning stands beside its owner: in the part's own `config.py`, or in `recipe.sections`.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from sparring.algo.config import INEXACT, AlgoConfig
from sparring.algo.correction.rule import Correction
from sparring.engine.config import EngineConfig
from sparring.envs.config import EnvConfig
from sparring.envs.rubrics.config import judging
from sparring.errors import refusal
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

DOMAIN_NAME = re.compile(r"[A-Za-z0-9_-]+")


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole run. Every section is the config of the part that bears its name."""

    run: RunSection
    """Name, directory and stages of the run."""

    models: dict[str, ModelConfig]
    """Models stand once, by name; every part names one. `policy` is the one that is trained."""

    env: EnvConfig | None = None
    """The world. A run has this table, or `[envs.<name>]` for each of several."""

    envs: dict[str, DomainConfig] = {}
    """Several worlds by name, mixed by their weights. A name is letters, digits, `_` and `-`."""

    sandbox: SandboxConfig = SandboxConfig()
    """Sandbox of the policy's code."""

    engine: EngineConfig = EngineConfig()
    """Engine, which samples tokens."""

    render: RenderConfig = RenderConfig()
    """Rendering of messages to tokens."""

    rollout: RolloutConfig = RolloutConfig()
    """Rollouts, which make scored groups of tasks."""

    train: TrainConfig = TrainConfig()
    """Trainer, which updates the weights."""

    algo: AlgoConfig = AlgoConfig()
    """Algorithm, which makes advantages and losses of scores."""

    collect: CollectConfig = CollectConfig()
    """The stage that gathers a teacher's traces."""

    sft: SftConfig = SftConfig()
    """The supervised stage."""

    preference: PreferenceConfig = PreferenceConfig()
    """The stage that learns from compared replies."""

    reward_model: RewardModelConfig = RewardModelConfig()
    """The stage that trains a reward model."""

    rl: RlConfig = RlConfig()
    """The reinforcement-learning stage."""

    distill: DistillConfig = DistillConfig()
    """The distillation stage."""

    eval: EvalConfig = EvalConfig()
    """The evaluation stage."""

    export: ExportConfig = ExportConfig()
    """The export stage."""

    observe: ObserveConfig = ObserveConfig()
    """Metrics and the places that they are sent to."""

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
        if self.rollout.rewards_within_s is None:
            for key, env in self.environments.items():
                if env.reward == "outside":
                    raise ValueError(f"rollout.rewards_within_s must be set where {key}.reward is outside, got none")

    @property
    def environments(self) -> dict[str, EnvConfig]:
        """The environments by the key of their tables: `env`, or `envs.<name>` of each."""
        return {"env": self.env} if self.env is not None else {f"envs.{name}": each for name, each in self.envs.items()}

    def harness_of(self, environment: str) -> str:
        """Return the harness of an environment: by its name of several, whatever the name of the only one."""
        domain = self.envs.get(environment)
        return domain.harness if domain is not None and domain.harness else self.rollout.harness

    @property
    def harnesses(self) -> set[str]:
        """The harnesses of the environments."""
        return {self.harness_of(key.partition(".")[2]) for key in self.environments}

    @property
    def world(self) -> EnvConfig:
        """The environment; of several the first."""
        return next(iter(self.environments.values()))

    @property
    def judging(self) -> set[str]:
        """Models that the rubrics of the environments ask."""
        return {name for each in self.environments.values() for name in judging(each.rubric)}


def resolve(config: RunConfig) -> RunConfig:
    """Replace what depends on the machine, `device = "auto"` and `threads = 0`, and on other sections, `correction =
    "auto"`. A resolved config resolves to itself.

    Raises:
        BadInput: the device is not there.
    """
    device = config.run.device
    if device != "cpu":
        usable = _cuda_usable()
        if device == "cuda" and not usable:
            raise refusal(
                "run.device", "a GPU and a torch built for it", "none that can be used", 'write "cpu" or "auto"'
            )
        device = "cuda" if usable else "cpu"
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
    """Return the complete config as TOML text that loads to an identical config.

    Raises:
        BadInput: a value that TOML cannot express, such as None where the default is something else.
    """
    text = tomli_w.dumps(_without_none(msgspec.to_builtins(config)))
    if msgspec.convert(tomllib.loads(text), RunConfig, strict=True) != config:
        raise refusal(
            "the config", "values that TOML can express", "a None or a NaN", "leave those keys at their defaults"
        )
    return text


def _without_none(value: Any) -> Any:
    """TOML has no null: an absent key means the default, which `dump` verifies to be the same."""
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return [_without_none(v) for v in value] if isinstance(value, (list, tuple)) else value


def _cuda_usable() -> bool:
    """Return True if the driver shows a device and the installed torch was built for it, without importing torch."""
    torch = importlib.util.find_spec("torch")
    if torch is None or not torch.origin or not (Path(torch.origin).parent / "lib" / "libtorch_cuda.so").exists():
        return False
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
