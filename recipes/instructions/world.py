"""Verifiable instructions: write about a topic, and follow one to three instructions that a program can check.

    [env]
    name = "recipes/instructions/world.py:Instructions"
    held_out = 300
    args = { max_instructions = 2, held_kinds = ["numbered", "exclaim", "words_in_order"] }

The reward is the share of instructions that the reply follows, and 0 for a reply that is not plain text about the topic
(`substance`). The idea is IFEval's (Zhou et al. 2023, arXiv 2311.07911); kinds, wording, topics and checks are our own.
"""

from __future__ import annotations

import functools
from random import Random
from typing import Any

import msgspec
from catalogue import KINDS, can_stand_with, companions
from kind import Params, ReplyPlan, Scope
from reply import ReplyText
from solver import solve
from substance import says_something
from topics import TOPICS

from sparring.envs.base import Env
from sparring.envs.config import EnvConfig
from sparring.envs.executor import cooperative
from sparring.envs.factory import DEFAULT_HELD_OUT
from sparring.envs.schema import env_args
from sparring.envs.splits import Splits, Stream, derived_seed, order
from sparring.errors import refusal
from sparring.protocols import Boxes, Expert
from sparring.types import Message, Score, Task

OPENINGS = (
    "Write a short text about {topic}.",
    "Tell me briefly about {topic}.",
    "Write something short about {topic}.",
    "Say a few words about {topic}.",
    "Please write a little about {topic}.",
)
"""First sentences of prompts."""

HELD_TAG = "held-{kind}"
"""Tag of evaluation tasks with a kind of instruction that is never trained."""


class InstructionsArgs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[env.args]`."""

    min_instructions: int = 1
    """Minimum number of instructions of a task."""

    max_instructions: int = 3
    """Maximum number of instructions of a task."""

    max_sentences: int = 4
    """Maximum number of sentences, points or paragraphs that an instruction asks for."""

    kinds: tuple[str, ...] = ()
    """Kinds to draw from; empty: all."""

    held_kinds: tuple[str, ...] = ()
    """Kinds that occur only in evaluations."""

    held_topics: int = 30
    """Number of topics that occur only in evaluations, chosen by a hash of their names."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_instructions <= self.max_instructions <= 5:
            raise ValueError("expected 1 <= min_instructions <= max_instructions <= 5")
        if self.max_sentences < 1 or self.max_sentences > 8:
            raise ValueError(f"max_sentences must be from 1 to 8, got {self.max_sentences}")
        if not 1 <= self.held_topics < len(TOPICS):
            raise ValueError(f"held_topics must be from 1 to {len(TOPICS) - 1}, got {self.held_topics}")
        for key in ("kinds", "held_kinds"):
            names = getattr(self, key)
            unknown = [name for name in names if name not in KINDS]
            if unknown or len(set(names)) != len(names):
                wrong = f"{unknown[0]!r}; there are {', '.join(KINDS)}" if unknown else "one twice"
                raise ValueError(f"{key} must name kinds, each once, got {wrong}")
        if not self.trained:
            raise ValueError("held_kinds must leave a kind to train")
        for name in (*self.trained, *self.held_kinds):
            if not can_stand_with(name, self.trained, self.min_instructions):
                raise ValueError(f"min_instructions is {self.min_instructions}, and {name!r} stands with fewer others")

    @property
    def trained(self) -> tuple[str, ...]:
        """Kinds of training tasks."""
        return tuple(name for name in self.kinds or KINDS if name not in self.held_kinds)


class InstructionsEnv(Env):
    """World of one task: a text about a topic, checked instruction by instruction."""

    Args = InstructionsArgs

    @cooperative
    def reward(self, completion: str, task: Task) -> Score:
        """Return the share of instructions that the reply follows; 0 without substance. Parts: `substance`, and each
        kind by its name."""
        return score(completion, task.data)

    def expert(self, task: Task) -> Expert:
        reply = solution(task.data, task.seed)
        return lambda messages: Message(role="assistant", content=reply or "")


class Instructions:
    """Factory of the world. Implements `protocols.EnvFactory`.

    Raises:
        BadInput: the settings are inconsistent.
    """

    name = "instructions"
    makes_at_once = True

    def __init__(self, config: EnvConfig) -> None:
        if config.data:
            raise refusal("env.data", "nothing, for the world draws its tasks", repr(config.data), "leave it out")
        self._config = config
        self.scorer = None
        self._args: InstructionsArgs = env_args(config.args, InstructionsArgs)
        names = sorted(TOPICS)
        places = sorted(range(len(names)), key=lambda place: derived_seed("topic", names[place]))
        self._held_out_topics = tuple(names[place] for place in places[: self._args.held_topics])
        self._training_topics = tuple(names[place] for place in places[self._args.held_topics :])
        self._splits: dict[int, Splits] = {}

    def make(self) -> Env:
        return InstructionsEnv(self._args)

    def tasks(self, split: str, seed: int) -> Stream:
        """Return `train` (endless), `eval` or `demonstration` (finite, distinct prompts). No topic and no held-out kind
        of `eval` occurs in another split. `eval` takes the kinds in turn, so any first n of its tasks are spread evenly
        over them.

        Raises:
            BadInput: the split is unknown, or there are too few distinct tasks.
        """
        if seed not in self._splits:
            self._splits[seed] = Splits(
                self.name,
                functools.partial(self._draw, seed),
                held_out=self._config.held_out or DEFAULT_HELD_OUT,
                demonstrations=self._config.demonstrations,
                share=self._config.held_out_share,
            )
        return self._splits[seed].stream(split)

    def expert(self, task: Task) -> Expert:
        return InstructionsEnv(self._args).expert(task)

    async def prove(self, boxes: Boxes) -> tuple[int, int]:
        """Return (0, 0): there are no rows to check."""
        return 0, 0

    def _draw(self, seed: int, split: str, index: int, attempt: int) -> Task | None:
        """Return a task, or None if the drawn instructions cannot be followed together."""
        task_seed = derived_seed(seed, self.name, split, index, attempt)
        random = Random(task_seed)
        trained, tag = self._args.trained, "{kind}"
        if split == "eval":
            topics, led = self._held_out_topics, (*trained, *self._args.held_kinds)
            lead = led[order(seed, index // len(led), len(led))[index % len(led)]]
            tag = HELD_TAG if lead in self._args.held_kinds else tag
        else:
            topics, lead = self._training_topics, random.choice(trained)
        data = draw_data(random, random.choice(topics), lead, self._args)
        if data is None or solution(data, task_seed) is None:
            return None
        system = (Message(role="system", content=self._config.system),) if self._config.system else ()
        return Task(
            id=f"{self.name}/{split}/{index}",
            env=self.name,
            messages=(*system, Message(role="user", content=data["prompt"])),
            data=data,
            limits=self._config.limits,
            seed=task_seed,
            tag=tag.format(kind=lead),
        )


def draw_data(random: Random, topic: str, lead: str, args: InstructionsArgs) -> dict[str, Any] | None:
    """Return a task's data: prompt, topic, and instructions that include the kind `lead`; None if too few kinds are
    compatible."""
    count = random.randint(args.min_instructions, args.max_instructions)
    names = [lead]
    while len(names) < count:
        compatible = companions(names, args.trained)
        if not compatible:
            break
        names.append(random.choice(compatible))
    if len(names) < args.min_instructions:
        return None
    scope = Scope(family=TOPICS[topic], max_sentences=args.max_sentences)
    random.shuffle(names)
    instructions = [{"kind": name, **KINDS[name].draw(random, scope)} for name in names]
    sentences = [KINDS[params["kind"]].say(params, random) for params in instructions]
    prompt = " ".join([random.choice(OPENINGS).format(topic=topic), *sentences])
    return {"prompt": prompt, "topic": topic, "instructions": instructions}


def score(completion: str, data: Params) -> Score:
    """Return the score of a reply.

    Args:
        completion: reply.
        data: data of the task, as `draw_data` returns it.
    """
    reply = ReplyText(completion.strip())
    instructions = data["instructions"]
    substance = says_something(reply, data["prompt"], TOPICS[data["topic"]])
    kept = {each["kind"]: float(substance and KINDS[each["kind"]].kept(reply, each)) for each in instructions}
    reward = sum(kept.values()) / len(kept)
    return Score(reward=reward, parts={"substance": float(substance), **kept}, success=all(kept.values()))


def solution(data: Params, seed: int) -> str | None:
    """Return a reply that follows all instructions of a task, or None if none is found."""
    plan = ReplyPlan()
    for params in data["instructions"]:
        plan.require(KINDS[params["kind"]].plan(params))
    return solve(plan, data["topic"], Random(seed), lambda text: bool(score(text, data).success))
