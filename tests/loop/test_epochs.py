"""A data file is gone through again and again: each time with other random numbers, also after a resume."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file

from sparring.cli.main import main
from sparring.envs.base import Env
from sparring.envs.config import EnvConfig
from sparring.envs.factory import WorldFactory
from sparring.generation import GenerateRequest
from sparring.harness.chat import ChatHarness
from sparring.kernels import ops
from sparring.record.recorder import Recorder
from sparring.render.demonstrate import reply_tokens
from sparring.rollout.config import RolloutConfig
from sparring.rollout.runner import RolloutRunner
from sparring.rollout.scheduler import Scheduler
from sparring.rollout.seeds import rollout_seed
from sparring.rollout.window import Window
from sparring.sandbox.bubblewrap import BubblewrapBoxes
from sparring.sandbox.config import SandboxConfig
from sparring.store.sqlite import SqliteStore
from sparring.testing.clock import run_virtual
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import toy_renderer
from sparring.types import Group, Message, Rollout, Task, WeightRef

ARMS = "abcd"


class Bandit(Env):
    """Four arms, of which one pays."""

    def reward(self, completion: str, task: Task) -> float:
        return float(completion == task.data["answer"])


def bandits(count: int) -> WorldFactory:
    """As many rows to train on, and one that is held out."""
    rows = [{"id": str(number), "prompt": f"machine {number}:", "answer": "a"} for number in range(count + 1)]
    return WorldFactory("bandit", Bandit, EnvConfig(name="bandit", data="rows", held_out=1), lambda path, columns: rows)


def seeds_of(rollouts: Sequence[Rollout]) -> list[int]:
    """What each rollout's first turn was sampled with."""
    sampled = [[s.sampling.seed for t in r.trajectories for s in t.segments if s.sampling] for r in rollouts]
    return [seeds[0] for seeds in sampled]


class Machine:
    """The bandits' policy, four logits a task, behind a scheduler that sends one group at a time to be learnt from.

    Args:
        world: the tasks.
        visits: of each task.
        baseline: roll every task out once more.
        version: of the policy that the engine serves.
    """

    def __init__(
        self, world: WorldFactory, visits: int, *, group_size: int = 8, baseline: bool = False, version: int = 0
    ) -> None:
        self.source = world.tasks("train", 0)
        self.logits = {task.data["prompt"]: torch.tensor([-2.0, 0.0, 0.0, 0.0]) for task in world._train}
        self.arms = [reply_tokens(toy_renderer(), Message(role="assistant", content=arm)) for arm in ARMS]
        self.engine = ScriptedEngine(self._pull, version=version)
        config = RolloutConfig(group_size=group_size)
        recorder = Recorder(self.engine, toy_renderer(), sampling=config.sampling.build())
        runner = RolloutRunner(world, BubblewrapBoxes(SandboxConfig(enabled=False)), recorder, ChatHarness(), config)
        self.window = Window(1, 0, visits * len(self.logits))
        self.scheduler = Scheduler(
            runner,
            self.source,
            self.window,
            run_seed=5,
            engine_version=lambda: self.engine.version,
            baseline=runner if baseline else None,
        )

    def chances(self) -> torch.Tensor:
        """Of the arm that pays, of every task."""
        return torch.stack(list(self.logits.values())).softmax(-1)[:, 0]

    def groups(self, learning_rate: float = 0.0, most: int | None = None) -> list[Group]:
        """All of them, or the first ones; the policy learns from each before the next is sampled."""

        async def taken() -> list[Group]:
            found: list[Group] = []
            async for group in self.scheduler.groups():
                found.append(group)
                self._learn(group, learning_rate)
                version = self.engine.version + 1
                await self.engine.pull(
                    WeightRef(model="policy", version=version, checksum="", transport="", location=None)
                )
                self.window.release(version)
                if len(found) == most:
                    break
            await self.scheduler.close()
            return found

        return run_virtual(taken())[0]

    def _pull(self, request: GenerateRequest) -> tuple[int, ...]:
        """One arm, drawn as an engine draws a token."""
        text = toy_renderer().decode(request.tokens)
        logits = next(logits for prompt, logits in self.logits.items() if prompt in text)
        one, seed = torch.ones(1), torch.tensor([request.sampling.seed], dtype=torch.uint64)
        nothing, place = torch.zeros(1, dtype=torch.int64), torch.tensor([len(request.tokens)])
        arm, _, _ = ops.sample(logits[None], one, nothing, one, torch.zeros(1), seed, place)
        return self.arms[int(arm)]

    def _learn(self, group: Group, learning_rate: float) -> None:
        """One step of GRPO on the task's own logits."""
        rewards = torch.tensor([score.reward for score in group.scores])
        if rewards.min() == rewards.max():
            return
        advantages = (rewards - rewards.mean()) / rewards.std()
        said = [t.segments[-1].message.content for r in group.rollouts for t in r.trajectories]
        chosen = torch.eye(len(ARMS))[[ARMS.index(text) for text in said]]
        logits = self.logits[group.task.data["prompt"]]
        logits += learning_rate * (advantages[:, None] * (chosen - logits.softmax(-1))).mean(0)


def test_two_epochs_of_a_two_row_file_draw_other_numbers() -> None:
    groups = Machine(bandits(2), 2, group_size=3).groups()
    assert sorted(g.task.id for g in groups[:2]) == sorted(g.task.id for g in groups[2:])
    drawn = [seed for group in groups for seed in seeds_of(group.rollouts)]
    assert len(drawn) == len(set(drawn)) == 12


def test_a_scheduler_that_is_restored_in_the_second_epoch_draws_the_numbers_of_one_that_was_not() -> None:
    whole = Machine(bandits(2), 3, group_size=3)
    drawn = [seeds_of(group.rollouts) for group in whole.groups()]
    first = Machine(bandits(2), 3, group_size=3)
    begun = [seeds_of(group.rollouts) for group in first.groups(most=3)]
    second = Machine(bandits(2), 3, group_size=3, version=3)
    second.scheduler.restore(first.scheduler.state(3))
    assert begun + [seeds_of(group.rollouts) for group in second.groups()] == drawn


def test_baselines_draw_other_numbers_in_every_epoch() -> None:
    machine = Machine(bandits(2), 2, group_size=1, baseline=True)
    groups = machine.groups()
    members = {seed for group in groups for seed in seeds_of(group.rollouts)}
    assert len({request.sampling.seed for request in machine.engine.requests} - members) == 4


def test_another_stage_draws_other_numbers() -> None:
    task = Task(id="a", env="a", messages=())
    assert rollout_seed(1, "train", task, 0, "rl/4") != rollout_seed(1, "train", task, 0, "distill/4")


@pytest.mark.slow
def test_bandits_that_hardly_ever_pay_are_learnt() -> None:
    """40 tasks from p = 0.043, 60 visits each: a group of 8 sees the arm that pays in three of ten visits at first.
    With the same numbers in every visit two thirds of the tasks never see it, and the mean ends at 0.32."""
    machine = Machine(bandits(40), 60)
    assert machine.chances().mean() == pytest.approx(0.0432, abs=1e-4)
    machine.groups(learning_rate=0.25)
    assert machine.chances().mean() > 0.7 and machine.chances().min() > 0.1


@pytest.fixture
def words(given: Path, tmp_path: Path) -> list[str]:
    """`sparring run` of the tiny checkpoint on a file of two rows, and one that is held out: six updates, three
    epochs."""
    rows = [{"prompt": f"{number} + 2 = ?", "answer": str(number + 2)} for number in (3, 4, 5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = (
        f"env.data={tmp_path / 'rows.jsonl'}",
        "env.held_out=1",
        'run.stages=["rl"]',
        "rl.groups_per_step=1",
        "observe.lines_every_s=0",
    )
    return ["run", str(given), *(word for setting in settings for word in ("--set", setting))]


def groups_in(folder: Path) -> dict[int, list[int]]:
    """Index of every group that counts -> what its rollouts were sampled with."""
    with closing(SqliteStore(folder / "store.sqlite", read_only=True)) as store:
        return {group.index: seeds_of(group.rollouts) for group in store.groups(stage="rl")}


def weights(folder: Path) -> dict[str, bytes]:
    return {name: tensor.tobytes() for name, tensor in load_file(folder / "rl/model/model.safetensors").items()}


@pytest.mark.full
def test_a_killed_run_goes_on_with_the_numbers_of_the_whole_one(
    words: list[str], tmp_path: Path, killed_and_finished
) -> None:
    killed_and_finished([*words, "--name", "killed"], ["rl 3/6"])
    assert main([*words, "--name", "whole"]) == 0
    whole, killed = tmp_path / "runs/whole", tmp_path / "runs/killed"
    drawn = [seed for seeds in groups_in(whole).values() for seed in seeds]
    assert len(drawn) == len(set(drawn)) == 18
    assert groups_in(killed) == groups_in(whole)
    assert weights(killed) == weights(whole)
