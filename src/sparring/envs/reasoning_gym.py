"""The adapter that serves every dataset of the `reasoning-gym` library, with a python tool.

    [env]
    name = "reasoning_gym"
    [[env.args.datasets]]
    name = "products"
    coverage = "thin"
    demonstrations = 20
    params = { min_digits = 2, max_digits = 3 }

A task is a pure function of (dataset, params, item seed), so that is all that a `Task` carries: the item is drawn again
where it is scored, in whatever process that is.
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
"""Datasets that draw from their seed when they are made; all others when an item is asked for, and are made once."""

HASH_DEPENDENT = frozenset(
    {"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"}
)
"""Datasets whose items follow the order of Python sets of strings, which differs between processes."""

NOISY = frozenset({"bf", "codeio"})
"""Datasets that print while they draw."""

COMPARES = frozenset({"chain_sum", "fraction_simplification", "products"})
"""Datasets whose own verifiers only compare numbers, in microseconds, as the library's common one compares texts."""

_ALONE = threading.RLock()
"""Held while the library draws or verifies: environments and the feed of tasks are on threads of their own."""


class Dataset(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[[env.args.datasets]]`: one dataset of the mix."""

    name: str
    """Name of the dataset in reasoning-gym."""

    weight: float = 1.0
    """Weight of the dataset among the training tasks, relative to the others'."""

    coverage: Literal["well", "thin"] = "well"
    """Coverage of the dataset by demonstrations; reports are split by it."""

    demonstrations: int = 0
    """Distinct tasks that the expert demonstrates for supervised fine-tuning."""

    tool_share: float = 1.0
    """Share of its demonstrations in which the expert computes with the tool; in the others it knows the answer and
    writes it at once, as a model that was trained on plain answers does: what is left to learn from rewards is to use
    the tool."""

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
    """The mix."""

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
    """One item: the question as it is, scored by the dataset's own verifier."""

    Args = Args

    def prompt(self, task: Task) -> str:
        """Return the question."""
        question: str = entry_of(task)["question"]
        return question

    @cooperative
    async def reward(self, completion: str, task: Task) -> Score:
        """Return the dataset's score of the final text, or of what stands in `<answer>` tags there."""
        raw = 0.0  # of an empty answer, for which some verifiers give a little, or all
        if completion:
            answer = extract_answer(completion) or completion
            quick = compares(task.data["dataset"])
            raw = score_answer(task, answer) if quick else await away(score_answer, task, answer)
        success = raw >= 1.0 - 1e-9
        return Score(reward=float(success) if self.args.binary else raw, parts={"score": raw}, success=success)


class ReasoningGymToolEnv(PythonTool, ReasoningGymEnv):
    """The same with the python tool."""


class ReasoningGym:
    """The `EnvFactory`.

    Attributes:
        coverage: dataset name -> "well" or "thin".

    Raises:
        BadInput: an unknown dataset, parameters that it does not have, or one that needs a fixed hash seed.
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
        """Return one world for one rollout."""
        return (ReasoningGymToolEnv if self._args.tool else ReasoningGymEnv)(self._args)

    def tasks(self, split: str, seed: int) -> Stream:
        """Return `train` (endless), `eval` or `demonstration` (finite, each prompt once); no eval prompt occurs in
        another.

        Evaluation deals the datasets in turn, so that its first n tasks are even over them.

        Raises:
            BadInput: no such split, or a dataset with too few different prompts.
        """
        if seed not in self._splits:
            self._splits[seed] = Splits(
                self.name,
                functools.partial(self._draw, seed, self._demonstrated()),
                held_out=self._config.held_out or DEFAULT_HELD_OUT,
                demonstrations=sum(d.demonstrations for d in self._args.datasets),
                share=self._config.held_out_share,
            )
        return self._splits[seed].stream(split)

    async def prove(self, boxes: Boxes) -> tuple[int, int]:
        """Return nothing to prove: there is no file with rows."""
        return 0, 0

    def expert(self, task: Task) -> Expert | None:
        """Return the scripted demonstration: one tool call, then its output as the answer, or the answer at once; None
        where there is none."""
        if not self._args.tool:
            return None
        if derived_seed(task.seed, "tool") / 2**31 < self._by_name[task.data["dataset"]].tool_share:
            return expert_for(task)
        return lambda messages: Message(role="assistant", content=entry_of(task)["answer"])

    def _demonstrated(self) -> tuple[Dataset, ...]:
        """Return the dataset of every demonstration, the rarer spread evenly among the others."""
        places = [((i + 0.5) / d.demonstrations, d.name) for d in self._args.datasets for i in range(d.demonstrations)]
        return tuple(self._by_name[name] for _, name in sorted(places))

    def _draw(self, seed: int, demonstrated: Sequence[Dataset], split: str, index: int, attempt: int) -> Task | None:
        if split == "eval":
            dataset = self._args.datasets[index % len(self._args.datasets)]
        elif split == "demonstration":
            dataset = demonstrated[index]
        else:
            dataset = self._chosen(derived_seed(seed, "dataset", index) / 2**31)
        item_seed = derived_seed(seed, dataset.name, split, index, attempt)
        data = {"dataset": dataset.name, "params": dataset.params, "seed": item_seed, "index": index}
        entry = item(dataset.name, dataset.params, item_seed)
        if entry["answer"] == "":
            return None  # base_conversion writes zero as nothing, so that there is neither a question nor an answer
        system = (Message(role="system", content=self._config.system),) if self._config.system else ()
        return Task(
            id=f"{dataset.name}/{split}/{index}",
            env=self.name,
            messages=(*system, Message(role="user", content=entry["question"])),
            data=data,
            limits=self._config.limits.limits(),
            box=self._config.box.spec() if self._args.tool else None,
            seed=item_seed,
            tag=dataset.name,
        )

    def _chosen(self, uniform: float) -> Dataset:
        """Return the dataset at this point of the weights laid end to end."""
        left = uniform * sum(d.weight for d in self._args.datasets)
        weighted = [d for d in self._args.datasets if d.weight]
        for dataset in weighted[:-1]:
            left -= dataset.weight
            if left < 0:
                return dataset
        return weighted[-1]


def entry_of(task: Task) -> dict[str, Any]:
    """Return the library's item (question, answer, metadata) of a task, drawn again."""
    return item(task.data["dataset"], task.data["params"], task.data["seed"])


def score_answer(task: Task, answer: str) -> float:
    """Return the library's own score of an answer, 0 to 1; 0 where its verifier cannot even read the answer.

    Raises:
        EnvError: the verifier raises on the right answer as well, so that it is not the policy's doing.
    """
    name, seed, params = task.data["dataset"], task.data["seed"], _canonical(task.data["params"])
    entry = _item(name, params, seed)
    with decimal.localcontext(decimal.Context()) if compares(name) else _undisturbed(seed, name):
        verifier = _made(name, params, 0) if compares(name) else _dataset(name, params, seed)
        try:
            with boundary(EnvError, f"reasoning-gym's verifier of {name}"):
                return float(verifier.score_answer(answer, copy.deepcopy(entry)))
        except EnvError:
            with boundary(EnvError, f"reasoning-gym's verifier of {name}, on its own answer"):
                verifier.score_answer(entry["answer"], copy.deepcopy(entry))
            return 0.0


def compares(name: str) -> bool:
    """Return whether a dataset's verifier only compares the answer with the right one: it draws nothing, and takes no
    time to speak of."""
    verifier = DATASETS[name][0].score_answer
    return name in COMPARES or verifier is ProceduralDataset.score_answer and name not in SEEDED_AT_CREATION


def item(name: str, params: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Return one item of a dataset: a pure function of its arguments, which is more than the library promises.

    Returns:
        question, answer and metadata. The caller leaves it unchanged, for it is cached.
    """
    return _item(name, _canonical(params), seed)


@functools.lru_cache(maxsize=4096)
def _item(name: str, params: str, seed: int) -> dict[str, Any]:
    with _undisturbed(seed, name):
        entry: dict[str, Any] = _dataset(name, params, seed)[0]
        return entry


def _dataset(name: str, params: str, seed: int) -> Any:
    """Return the dataset object that holds the item at index 0."""
    if name in SEEDED_AT_CREATION:
        return _made(name, params, seed)
    dataset = _made(name, params, 0)
    dataset.seed = seed
    return dataset


@functools.lru_cache(maxsize=512)
def _made(name: str, params: str, seed: int) -> Any:
    settings = json.loads(params)
    if name == "composite":
        settings["datasets"] = [DatasetSpec(**spec) for spec in settings.get("datasets", ())]
    return reasoning_gym.create_dataset(name, **{"size": 16, **settings}, seed=seed)


def _canonical(params: Mapping[str, Any]) -> str:
    return json.dumps(msgspec.to_builtins(params), sort_keys=True)


@contextlib.contextmanager
def _undisturbed(seed: int, name: str) -> Iterator[None]:
    """Shut off what leaks in and out of the library: global generators, the decimal context, prints, other threads."""
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
