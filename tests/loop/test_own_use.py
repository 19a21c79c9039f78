"""A use of a model that a file adds to the table: planned, checked, counted, trained and resumed as the built-in ones,
beside another trained model."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from virtual import on_event_loop

from sparring.algo.loss.value import ValueLoss
from sparring.batch.critic import value_rows
from sparring.errors import BadInput
from sparring.launch.resume import check_raised
from sparring.launch.run import opened
from sparring.protocols import Loss
from sparring.recipe.load import load
from sparring.recipe.run_config import RunConfig, resolve
from sparring.recipe.sections.rl import RlConfig
from sparring.stages import rl
from sparring.stages.context import RunFiles, given_checkpoint
from sparring.stages.models.learner import Learner
from sparring.stages.models.uses import USES, trained_models
from sparring.stages.preflight.memory import RunMemory, checkpoint_bytes, shapes_of
from sparring.stages.preflight.metric_names import names_of

SETTINGS = (
    *("run.stages=['rl']", "observe.progress=off", "algo.preset=ppo", "rl.steps=2", "rl.train.save_every=1"),
    *("rl.critic.train.learning_rate=0.003", "rl.minibatches=2"),
)


class ProbeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The section of the use."""

    model: str = "policy"
    train: dict[str, Any] = {}


class RlWithProbe(RlConfig, frozen=True, kw_only=True):
    probe: ProbeConfig | None = None


class RunWithProbe(RunConfig, frozen=True, kw_only=True):
    rl: RlWithProbe = RlWithProbe()


class Probe(Learner):
    """A value model that no credit rule reads, to compare the critic with."""

    name, title, metrics, rank = "probe", "a probe", ("probe/*",), "probe rank"
    scalar = True
    rows = staticmethod(value_rows)

    def loss(self, config: RunConfig) -> Loss:
        return ValueLoss(clip=0.0)

    def head(self, folder: Path) -> str:
        return "new scalar"

    def check_model(self, files: RunFiles, name: str) -> None:
        if name != "policy":
            raise BadInput("rl.probe.model: expected policy")


@pytest.fixture
def probe() -> Iterator[Probe]:
    """The line of the table."""
    use = Probe()
    USES.append(use)
    yield use
    USES.remove(use)


def probed(given: Path, *settings: str, **section: Any) -> RunConfig:
    plain = load(given, [*SETTINGS, *settings])
    whole, keys = ({name: getattr(of, name) for name in of.__struct_fields__} for of in (plain, plain.rl))
    return resolve(RunWithProbe(**{**whole, "rl": RlWithProbe(**keys, probe=ProbeConfig(**section))}))


def test_a_use_of_a_file_is_checked_and_counted(given: Path, probe: Probe) -> None:
    config = probed(given, train={"learning_rate": 0.005, "schedule": "linear"})
    rates = [(use, one.train and one.train.learning_rate) for use, one in trained_models(config, "rl").items()]
    assert rates == [("policy", 0.001), ("critic", 0.003), ("probe", 0.005)]
    assert "probe/*" in names_of(config, "rl")
    shapes = shapes_of(config, given_checkpoint(config))
    without = msgspec.structs.replace(config, rl=msgspec.structs.replace(config.rl, probe=None))
    alone, beside = (RunMemory.of(each, shapes).largest[0].each for each in (without, config))
    critic = shapes["policy (scalar)"]
    assert checkpoint_bytes(config, shapes) - checkpoint_bytes(without, shapes) == 12 * critic.parameters
    assert beside.optimiser - alone.optimiser == 8 * critic.parameters
    ranks = msgspec.structs.replace(config.cluster, kind="local", ranks=2)
    (processes,) = RunMemory.of(msgspec.structs.replace(config, cluster=ranks), shapes).stages
    assert [one.kind for one in processes if one.kind.endswith("rank")] == ["trainer rank", "critic rank", "probe rank"]

    async def checked(config: RunConfig) -> list[str]:
        async with opened(config) as context:
            with pytest.raises(BadInput, match="a schedule of the probe that ends above 0"):
                check_raised(context.store, config, {"rl": (1, 2)})
            return [fact for use in USES for fact in use.check(context)]

    assert "rl: a probe that begins as policy" in asyncio.run(checked(config))
    with pytest.raises(BadInput, match=r"rl\.probe\.model: expected policy"):
        asyncio.run(checked(probed(given, model="judge", train={"schedule": "linear"})))


@on_event_loop
async def test_two_trained_models_beside_the_policy_go_on_from_a_checkpoint(given: Path, probe: Probe) -> None:
    async with opened(probed(given)) as context:
        ended = []
        for _ in range(2):
            result = await rl.run(context)
            await context.cluster.close()
            files = (Path(result[name]) / "model.safetensors" for name in ("model", "critic", "probe"))
            ended.append([hashlib.sha256(file.read_bytes()).hexdigest() for file in files])
            steps = [step for step, _ in context.store.metrics("rl")]
            shutil.rmtree(context.folder / "rl/checkpoints/step-000002")
        assert ended[0] == ended[1] and len({*ended[0]}) == 3 and steps == [1, 2]
        saved = context.folder / "rl/checkpoints/step-000001"
        assert {"critic", "probe"} <= {path.name for path in saved.iterdir()}
        [(_, metrics), _] = context.store.metrics("rl")
        assert metrics["probe/tokens_trained"] == metrics["critic/tokens_trained"] > 0
        assert metrics["optimiser_steps"] == 6, "two minibatches of each model"
