"""Adapter for every dataset of the `reasoning-gym` library, with a python tool.

    [env]
    name = "reasoning_gym"
    [[env.args.datasets]]
    name = "products"
    coverage = "thin"
    demonstrations = 20
    params = { min_digits = 2, max_digits = 3 }

An item is a pure function of (dataset, params, item seed), so a `Task` carries only these, and scoring draws the item
again in its own process.
"""

from __future__ import annotations

import contextlib
import copy
import decimal
import functools
import io
import json
import os
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy
import reasoning_gym
from reasoning_gym.composite import DatasetSpec
from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import DATASETS
from reasoning_gym.utils import extract_answer

from sparring.envs.base import Env
from sparring.envs.config import EnvConfig
from sparring.envs.executor import away, cooperative
from sparring.envs.factory import DEFAULT_HELD_OUT
from sparring.envs.reasoning_gym_experts import expert_for, has_expert
from sparring.envs.schema import env_args
from sparring.envs.splits import Splits, Stream, derived_seed
from sparring.envs.tools.python import PythonTool
from sparring.errors import BadInput, EnvError, boundary, refusal
from sparring.protocols import Boxes, Expert
from sparring.types import Message, Score, Task

SEEDED_AT_CREATION = frozenset({"acre", "composite", "gsm_symbolic", "list_functions", "survo"})
"""Datasets that draw from their seed when created; the others draw when an item is asked for, and are created once."""

HASH_DEPENDENT = frozenset(
    {"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"}
)
"""Datasets with items that depend on the order of Python sets of strings, which differs between processes."""

NOISY = frozenset({"bf", "codeio"})
"""Datasets that print while they draw."""

COMPARES = frozenset({"chain_sum", "fraction_simplification", "products"})
"""Datasets whose own verifiers only compare numbers. This takes microseconds, as does the library's default verifier,
which compares texts."""

_ALONE = threading.RLock()
"""Lock for draws and verifications, because environments and task streams run on several threads."""


class Dataset(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[[env.args.datasets]]`: one dataset of the mix."""

    name: str
    """Name of the dataset in reasoning-gym."""

    weight: float = 1.0
    """Sampling weight of the dataset among the training tasks, relative to the others."""

    coverage: Literal["well", "thin"] = "well"
    """Label of how well demonstrations cover the dataset; reports are split by it."""

    demonstrations: int = 0
    """Number of distinct tasks that the expert demonstrates for supervised fine-tuning."""

    tool_share: float = 1.0
    """Share of the demonstrations in which the expert computes with the tool. In the others it writes the answer at
    once, as a model trained on plain answers does. A share below 1 leaves the use of the tool for reinforcement
    learning to teach."""

    params: dict[str, Any] = {}
    """Overrides of the dataset's own config."""

    def __post_init__(self) -> None:
        if self.weight < 0 or self.demonstrations < 0:
            raise ValueError("weight and demonstrations must be 0 or more")
        if not 0 <= self.tool_share <= 1:
            raise ValueError(f"tool_share must be between 0 and 1, got {self.tool_share}")


class Args(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[env.args]` of `reasoning_gym`."""

    datasets: tuple[Dataset, ...]
    """Datasets of the mix."""

    binary: bool = True
    """Reward 1 for a full score and 0 for anything less; false keeps the library's partial scores."""

    tool: bool = True
    """Give the agent the python tool."""

    def __post_init__(self) -> None:
        names = [dataset.name for dataset in self.datasets]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"datasets must be one or more, each once, got {names}")
        if not any(dataset.weight for dataset in self.datasets):
            raise ValueError("at least one dataset must have a weight above 0")


class ReasoningGymEnv(Env):
    """World of one item: the library's question, scored by the dataset's verifier."""

    Args = Args

    def prompt(self, task: Task) -> str:
        question: str = entry_of(task)["question"]
        return question

    @cooperative
    async def reward(self, completion: str, task: Task) -> Score:
        """Return the dataset's score of the final text, or of its `<answer>` tags."""
        raw = 0.0  # some verifiers give an empty answer a partial or full score
        if completion:
            answer = extract_answer(completion) or completion
            quick = compares(task.data["dataset"])
            raw = score_answer(task, answer) if quick else await away(score_answer, task, answer)
        success = raw >= 1.0 - 1e-9
        return Score(reward=float(success) if self.args.binary else raw, parts={"score": raw}, success=success)


class ReasoningGymToolEnv(PythonTool, ReasoningGymEnv):
    """Reasoning-gym world with the python tool."""


class ReasoningGym:
    """Factory of reasoning-gym worlds. Implements `protocols.EnvFactory`.

    Attributes:
        coverage: "well" or "thin" by dataset.

    Raises:
        BadInput: a dataset or a parameter is unknown, or a dataset needs a fixed hash seed.
    """

    name = "reasoning_gym"
    makes_at_once = True

    def __init__(self, config: EnvConfig) -> None:
        self._config = config
        self.scorer = None
        self._args: Args = env_args(config.args, Args)
        self._by_name = {dataset.name: dataset for dataset in self._args.datasets}
        self.coverage: Mapping[str, str] = {d.name: d.coverage for d in self._args.datasets}
        self._splits: dict[int, Splits] = {}
        for index, dataset in enumerate(self._args.datasets):
            _check(dataset, f"env.args.datasets.{index}")

    def make(self) -> Env:
        return (ReasoningGymToolEnv if self._args.tool else ReasoningGymEnv)(self._args)

    def tasks(self, split: str, seed: int) -> Stream:
        """Return `train` (endless), `eval` or `demonstration` (finite, distinct prompts); no eval prompt occurs in
        another split.

        `eval` takes the datasets in turn, so any first n of its tasks are spread evenly over them.

        Raises:
            BadInput: the split is unknown, or a dataset has too few distinct prompts.
        """
        if seed not in self._splits:
            self._splits[seed] = Splits(
                self.name,
                functools.partial(self._draw, seed, self._demonstration_datasets()),
                held_out=self._config.held_out or DEFAULT_HELD_OUT,
                demonstrations=sum(d.demonstrations for d in self._args.datasets),
                share=self._config.held_out_share,
            )
        return self._splits[seed].stream(split)

    async def prove(self, boxes: Boxes) -> tuple[int, int]:
        return 0, 0

    def expert(self, task: Task) -> Expert | None:
        """Return the scripted demonstration: one tool call followed by its output as the answer, or the answer at once.
        None if the dataset has no expert or the agent no tool."""
        if not self._args.tool:
            return None
        if derived_seed(task.seed, "tool") / 2**31 < self._by_name[task.data["dataset"]].tool_share:
            return expert_for(task)
        return lambda messages: Message(role="assistant", content=entry_of(task)["answer"])

    def _demonstration_datasets(self) -> tuple[Dataset, ...]:
        """Return the dataset of every demonstration, with rare datasets spread evenly."""
        places = [((i + 0.5) / d.demonstrations, d.name) for d in self._args.datasets for i in range(d.demonstrations)]
        return tuple(self._by_name[name] for _, name in sorted(places))

    def _draw(self, seed: int, demonstrated: Sequence[Dataset], split: str, index: int, attempt: int) -> Task | None:
        if split == "eval":
            dataset = self._args.datasets[index % len(self._args.datasets)]
        elif split == "demonstration":
            dataset = demonstrated[index]
        else:
            dataset = self._dataset_at(derived_seed(seed, "dataset", index) / 2**31)
        item_seed = derived_seed(seed, dataset.name, split, index, attempt)
        data = {"dataset": dataset.name, "params": dataset.params, "seed": item_seed, "index": index}
        entry = item(dataset.name, dataset.params, item_seed)
        if entry["answer"] == "":
            return None  # base_conversion writes zero as "", which leaves an unusable question and answer
        system = (Message(role="system", content=self._config.system),) if self._config.system else ()
        return Task(
            id=f"{dataset.name}/{split}/{index}",
            env=self.name,
            messages=(*system, Message(role="user", content=entry["question"])),
            data=data,
            limits=self._config.limits,
            box=self._config.box if self._args.tool else None,
            seed=item_seed,
            tag=dataset.name,
        )

    def _dataset_at(self, uniform: float) -> Dataset:
        """Return the dataset that a number in [0, 1) selects, in proportion to the weights."""
        remaining = uniform * sum(d.weight for d in self._args.datasets)
        weighted = [d for d in self._args.datasets if d.weight]
        for dataset in weighted[:-1]:
            remaining -= dataset.weight
            if remaining < 0:
                return dataset
        return weighted[-1]


def entry_of(task: Task) -> dict[str, Any]:
    """Draw a task's item (question, answer, metadata) again."""
    return item(task.data["dataset"], task.data["params"], task.data["seed"])


def score_answer(task: Task, answer: str) -> float:
    """Return the library's score of an answer, from 0 to 1; 0 if the verifier cannot read the answer.

    Raises:
        EnvError: the verifier raises on the right answer as well, so the policy is not to blame.
    """
    name, seed, params = task.data["dataset"], task.data["seed"], _canonical(task.data["params"])
    entry = _item(name, params, seed)
    with decimal.localcontext(decimal.Context()) if compares(name) else _isolated_library(seed, name):
        verifier = _create(name, params, 0) if compares(name) else _dataset(name, params, seed)
        try:
            with boundary(EnvError, f"reasoning-gym's verifier of {name}"):
                return float(verifier.score_answer(answer, copy.deepcopy(entry)))
        except EnvError:
            with boundary(EnvError, f"reasoning-gym's verifier of {name}, on its own answer"):
                verifier.score_answer(entry["answer"], copy.deepcopy(entry))
            return 0.0


def compares(name: str) -> bool:
    """Return whether a dataset's verifier only compares the answer with the right one: it draws nothing and is fast."""
    verifier = DATASETS[name][0].score_answer
    return name in COMPARES or verifier is ProceduralDataset.score_answer and name not in SEEDED_AT_CREATION


def item(name: str, params: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Return question, answer and metadata of one item of a dataset, cached: not to be modified. They are a pure
    function of the arguments; the library alone does not guarantee this."""
    return _item(name, _canonical(params), seed)


@functools.lru_cache(maxsize=4096)
def _item(name: str, params: str, seed: int) -> dict[str, Any]:
    with _isolated_library(seed, name):
        entry: dict[str, Any] = _dataset(name, params, seed)[0]
        return entry


def _dataset(name: str, params: str, seed: int) -> Any:
    if name in SEEDED_AT_CREATION:
        return _create(name, params, seed)
    dataset = _create(name, params, 0)
    dataset.seed = seed
    return dataset


@functools.lru_cache(maxsize=512)
def _create(name: str, params: str, seed: int) -> Any:
    settings = json.loads(params)
    if name == "composite":
        settings["datasets"] = [DatasetSpec(**spec) for spec in settings.get("datasets", ())]
    return reasoning_gym.create_dataset(name, **{"size": 16, **settings}, seed=seed)


def _canonical(params: Mapping[str, Any]) -> str:
    return json.dumps(msgspec.to_builtins(params), sort_keys=True)


@contextlib.contextmanager
def _isolated_library(seed: int, name: str) -> Iterator[None]:
    """Call the library with global random generators seeded and restored afterwards, a fresh decimal context, prints
    discarded, and other threads kept out."""
    quiet = contextlib.redirect_stdout(io.StringIO()) if name in NOISY else contextlib.nullcontext()
    with _ALONE, quiet, decimal.localcontext(decimal.Context()):
        state, array_state = random.getstate(), numpy.random.get_state()
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(state)
            numpy.random.set_state(array_state)


def _check(dataset: Dataset, where: str) -> None:
    if dataset.name not in DATASETS:
        raise refusal(f"{where}.name", f"one of {', '.join(sorted(DATASETS))}", repr(dataset.name), "correct the name")
    inner = [d.get("name") for d in dataset.params.get("datasets", ())] if dataset.name == "composite" else []
    unstable = HASH_DEPENDENT.intersection([dataset.name, *inner])
    if unstable and os.environ.get("PYTHONHASHSEED", "random") == "random":
        raise refusal(
            f"{where}.name",
            "PYTHONHASHSEED in the environment",
            f"none, and the items of {', '.join(sorted(unstable))} change with Python's hash seed",
            "start with PYTHONHASHSEED=0, so that a resumed run sees the same tasks",
        )
    for key in ("seed", "size"):
        if key in dataset.params:
            raise refusal(f"{where}.params.{key}", "no such key", "one", "remove it: every item has a seed of its own")
    if dataset.demonstrations and not has_expert(dataset.name):
        raise refusal(
            f"{where}.demonstrations",
            f"0, for {dataset.name} has no expert",
            str(dataset.demonstrations),
            "leave it out",
        )
    fields = DATASETS[dataset.name][1].__dataclass_fields__
    for key in dataset.params:
        if key not in fields:
            parameters = ", ".join(f for f in fields if f not in ("seed", "size")) or "none"
            raise refusal(f"{where}.params", f"parameters of {dataset.name} ({parameters})", repr(key), "correct it")
    with boundary(BadInput, f"{where}.params", f"parameters that {dataset.name} takes", "correct them"):
        item(dataset.name, dataset.params, 0)
