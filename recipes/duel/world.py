"""A game of two roles, played by one policy: the proposer writes two numbers, the solver says which is larger."""

import re
from collections.abc import Sequence

from sparring.envs.base import Env
from sparring.errors import LimitReached
from sparring.types import Message, Observation, Score

LOWEST, HIGHEST = 10, 99


class Duel(Env):
    """The proposer earns 1 for two different numbers from the range that it is given, the solver 1 for the larger.

    A proposal that breaks the rules is replaced: the solver is asked in every rollout, and what it earns does not hang
    on the proposal being valid.
    """

    roles = ("proposer", "solver")
    pair: Sequence[int] = ()
    valid = right = False  # a rollout that a limit cuts short is scored too

    def generate(self, random):
        low, high, pair = drawn(random, reserved=False)
        return {"prompt": f"Two numbers from {low} to {high}.", "low": low, "high": high, "spare": pair}

    async def step_of(self, role, reply):
        if role == "solver":
            self.right = reply.content.strip() == str(max(self.pair))
            return Observation(done=True)
        numbers = [int(number) for number in re.findall(r"\d+", reply.content)]
        self.valid = re.fullmatch(r"\d+ \d+", reply.content.strip()) is not None and self.allows(*numbers)
        self.pair = numbers if self.valid else self.task.data["spare"]
        return Observation(messages=(Message(role="user", content=question(self.pair)),))

    def allows(self, a, b):
        low, high = self.task.data["low"], self.task.data["high"]
        return a != b and low <= min(a, b) and max(a, b) <= high and not is_reserved(a, b)

    async def score_all(self, trajectories):
        earned = {"proposer": float(self.valid), "solver": float(self.right)}
        return Score(reward=sum(earned.values()) / 2, success=self.valid and self.right, per_role=earned)

    def expert(self, task):
        a, b = task.data["spare"]
        return {
            "proposer": lambda messages: Message(role="assistant", content=f"{a} {b}"),
            "solver": lambda messages: Message(role="assistant", content=str(max(a, b))),
        }


async def play(episode):
    """Ask the proposer, then the solver."""
    opening = await episode.env.open(episode.task, episode.box)
    try:
        proposal = await episode.session("proposer").complete([*episode.task.messages, *opening.messages])
    except LimitReached:  # its reply was cut short: the game goes on, and its trajectory is marked as truncated
        proposal = Message(role="assistant")
    asked = await episode.env.step(proposal, role="proposer")
    answer = await episode.session("solver").complete(asked.messages)
    await episode.env.step(answer, role="solver")


class Swapped(Duel):
    """The control: each role earns what the other deserves."""

    async def score_all(self, trajectories):
        score = await super().score_all(trajectories)
        proposer, solver = score.per_role.values()
        return Score(reward=score.reward, success=score.success, per_role={"proposer": solver, "solver": proposer})


class Solver(Env):
    """The solver alone, asked for pairs that are never asked in the game."""

    roles = ("solver",)

    def generate(self, random):
        _, _, pair = drawn(random, reserved=True)
        return {"prompt": question(pair), "answer": str(max(pair))}

    def reward(self, completion, task):
        return float(completion == task.data["answer"])


def drawn(random, *, reserved):
    """Draw a range of at least 10 numbers, and two different numbers of it."""
    while True:
        low, high = sorted(random.sample(range(LOWEST, HIGHEST + 1), 2))
        if high - low < 10:
            continue
        pair = random.sample(range(low, high + 1), 2)
        if is_reserved(*pair) == reserved:
            return low, high, pair


def is_reserved(a, b):
    """Whether a pair is kept for the evaluation of the solver: one in ten is."""
    return (a + b) % 10 == 7


def question(pair):
    """Ask for the larger number."""
    return f"{pair[0]} or {pair[1]}?"
