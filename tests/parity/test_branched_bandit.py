"""Credit in conversations that branch, against the enumerated gradient of the expected reward.

Three bandits are small enough to go through all that can be sampled. In each a turn pulls one of two arms, with odds
that depend on what it was told, and earns something; the end earns something that depends on all arms.

    delegated    a leader starts two sub-agents at once, one of which has two turns, and goes on behind their answers
    compacted    a conversation is summed up and goes on from the summary, in a branch of its own
    retried      a first arm that is malformed is deleted by the client, which asks again; so fewer turns may follow

Ours is the path from recorded trees to advantages and weights of rows. What the mean must be is worked out on paper:
where a rule is without bias it is the derivative of the mean reward, written without the logarithm's trick.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations_with_replacement, product
from typing import Any

import msgspec
import pytest
import torch

from sparring.algo.config import AlgoConfig, named
from sparring.algo.pipeline import load_credit
from sparring.batch.batches import Plan, assemble
from sparring.batch.flatten import flatten
from sparring.generation import Runs
from sparring.types import Fork, Group, Outcome, Rollout, Score, Segment, Task, Trajectory

Pull = tuple[str, int, int]
"""A turn's name, what it was told, and the arm that it pulled."""
Pulls = tuple[Pull, ...]
Told = tuple[int | None, Fork | None, tuple[str, ...]]
"""What a turn goes on from (the place of a segment; None begins a root), its fork, and the turns that it quotes."""
Gradient = dict[str, torch.Tensor]
TASK = Task(id="task", env="bandit", messages=())
DONE = Outcome(kind="completed", reason="answered")
SUM = {"gate": "none", "aggregation": "sequence_sum", "zero_variance_filter": False}
NAMES = ("lead", "first", "other", "second", "again", "summary", "last")
EARNED = {
    name: [[0.3 + 0.7 * ((3 * at + 2 * ctx) % 5 / 4), -0.4 + 0.25 * at - 0.3 * ctx] for ctx in range(4)]
    for at, name in enumerate(NAMES)
}
"""What a turn earns, by what it was told and its arm."""


@dataclass(frozen=True, eq=False)
class Bandit:
    """A world: who pulls in the order of requests, and how that is recorded.

    Attributes:
        ask: the next turn after some pulls and what it is told; None at the end.
        told: how the turn of a name is recorded after some pulls.
        follows: on paper, the turn behind that of a name.
        beside: on paper, by the name of a turn the chains that hang on it.
    """

    ask: Callable[[Mapping[str, int]], tuple[str, int] | None]
    told: Callable[[str, Mapping[str, int]], Told]
    follows: Callable[[str, Mapping[str, int]], str | None]
    beside: Mapping[str, tuple[tuple[str, ...], ...]]

    def paths(self, pulls: Pulls = ()) -> Iterator[Pulls]:
        """Yield all that may happen."""
        asked = self.ask({name: arm for name, _, arm in pulls})
        if asked is None:
            yield pulls
        else:
            for arm in range(2):
                yield from self.paths((*pulls, (*asked, arm)))


def delegated() -> Bandit:
    names = ("lead", "first", "other", "second", "last")

    def ask(arms: Mapping[str, int]) -> tuple[str, int] | None:
        told = {
            "lead": lambda: 0,
            "first": lambda: arms["lead"],
            "other": lambda: arms["lead"],
            "second": lambda: arms["first"],
            "last": lambda: 2 * arms["second"] + arms["other"],
        }
        return next(((name, told[name]()) for name in names if name not in arms), None)

    def told(name: str, at: Mapping[str, int]) -> Told:
        if name in ("first", "other"):
            return None, Fork(reason="agent", of=at["lead"], agent=name), ("lead",)
        return (
            {"lead": None, "second": at.get("first"), "last": at.get("lead")}[name],
            None,
            (("second", "other") if name == "last" else ()),
        )

    follows = {"lead": "last", "first": "second", "second": "last", "other": "last", "last": None}
    return Bandit(ask, told, lambda name, _: follows[name], {"lead": (("first", "second"), ("other",))})


def compacted() -> Bandit:
    names = ("lead", "summary", "last")

    def ask(arms: Mapping[str, int]) -> tuple[str, int] | None:
        before = {"lead": 0, "summary": arms.get("lead", 0), "last": arms.get("summary", 0)}
        return next(((name, before[name]) for name in names if name not in arms), None)

    def told(name: str, at: Mapping[str, int]) -> Told:
        if name == "last":
            return None, Fork(reason="compaction"), ("summary",)
        return at.get("lead"), None, ()

    follows = {"lead": "summary", "summary": "last", "last": None}
    return Bandit(ask, told, lambda name, _: follows[name], {})


def retried() -> Bandit:
    def ask(arms: Mapping[str, int]) -> tuple[str, int] | None:
        if "lead" not in arms:
            return "lead", 0
        if arms["lead"] == 0 and "again" not in arms:
            return "again", 0
        return None if "last" in arms else ("last", arms.get("again", 1))

    def told(name: str, at: Mapping[str, int]) -> Told:
        if name == "again":
            return 0, Fork(reason="deleted", of=0), ()
        return (at.get("again", at.get("lead")) if name == "last" else None), None, ()

    def follows(name: str, arms: Mapping[str, int]) -> str | None:
        return {"lead": "again" if "again" in arms else "last", "again": "last", "last": None}[name]

    return Bandit(ask, told, follows, {})


BANDITS = {"delegated": delegated(), "compacted": compacted(), "retried": retried()}


def outcome(pulls: Pulls) -> float:
    """What the end earns: a number that depends on all arms."""
    return 0.2 + sum(0.37 * (at + 1) * arm for at, (_, _, arm) in enumerate(pulls)) ** 2 % 1.7


def earned(pull: Pull) -> float:
    return EARNED[pull[0]][pull[1]][pull[2]]


def reward(pulls: Pulls) -> float:
    return outcome(pulls) + sum(map(earned, pulls))


def policy() -> dict[str, torch.Tensor]:
    """Logits by name [what was told, arm]."""
    draw = torch.Generator().manual_seed(5)
    return {name: torch.randn(4, 2, generator=draw, dtype=torch.double).requires_grad_() for name in NAMES}


def chance(tables: Mapping[str, torch.Tensor], pulls: Pulls) -> torch.Tensor:
    """The probability of all pulls, differentiable."""
    return torch.stack([tables[name].softmax(-1)[told, arm] for name, told, arm in pulls]).prod()


def slope(bandit: Bandit, tables: Mapping[str, torch.Tensor], value: Callable[[Pulls], float]) -> Gradient:
    """The derivative of the mean of something that paths have."""
    mean = torch.stack([chance(tables, pulls) * value(pulls) for pulls in bandit.paths()]).sum()
    found = torch.autograd.grad(mean, list(tables.values()), allow_unused=True)
    return {name: torch.zeros(4, 2) if g is None else g for name, g in zip(tables, found, strict=True)}


@cache
def recorded(bandit: Bandit, pulls: Pulls, id: str, linked: bool) -> Trajectory:
    """The tree of a path. A reply is one token, which names the pull; without links nothing says what quotes what."""
    segments: list[Segment] = []
    at: dict[str, int] = {}
    for pull in pulls:
        name, _, _ = pull
        parent, fork, quotes = bandit.told(name, at)
        quoted = tuple(at[other] for other in quotes) if linked else ()
        said = Segment(index=len(segments), parent=parent, source="tool", tokens=(TOKENS["", 0, 0],), quotes=quoted)
        segments.append(replace(said, fork=fork if linked else None))
        at[name] = len(segments)
        reply = Segment(
            index=len(segments),
            parent=len(segments) - 1,
            source="policy",
            tokens=(TOKENS[pull],),
            model="policy",
            logprobs=(-1.0,),
            versions=Runs.of(0, 1),
            label="compaction" if name == "summary" else "agent",
        )
        segments.append(reply)
    return Trajectory(id=id, task=TASK.id, role="policy", segments=tuple(segments), outcome=DONE)


TOKENS = {pull: at for at, pull in enumerate([("", 0, 0), *product(NAMES, range(4), range(2))])}
PULLS = {at: pull for pull, at in TOKENS.items()}
Annotate = Callable[[Pulls, Pull], Mapping[str, float]]


def groups(chances: Mapping[Pulls, float], size: int) -> Iterator[tuple[float, tuple[Pulls, ...]]]:
    """Every group of this size that may come, whatever the order of its members, with its probability."""
    for members in combinations_with_replacement(chances, size):
        orders = math.factorial(size) / math.prod(math.factorial(count) for count in Counter(members).values())
        yield orders * math.prod(chances[pulls] for pulls in members), members


def group_of(bandit: Bandit, members: Sequence[Pulls], linked: bool, states: bool) -> Group:
    trajectories = [recorded(bandit, pulls, f"g/{place}", linked) for place, pulls in enumerate(members)]
    return Group(
        id="g",
        index=0,
        task=TASK,
        rollouts=tuple(
            Rollout(id=t.id, task=TASK, index=place, attempt=0, purpose="train", trajectories=(t,))
            for place, t in enumerate(trajectories)
        ),
        scores=tuple(
            Score(
                reward=reward(pulls),
                per_turn=tuple(map(earned, pulls)),
                states=tuple(name for name, _, _ in pulls) if states else None,
            )
            for pulls in members
        ),
    )


def moved(
    bandit: Bandit,
    tables: Mapping[str, torch.Tensor],
    algo: Mapping[str, Any],
    size: int = 1,
    *,
    annotate: Annotate | None = None,
    linked: bool = True,
    states: bool = False,
) -> Gradient:
    """The mean gradient of what an update of one group raises, before it is divided by anything."""
    config = msgspec.convert(named({**SUM, **algo}), AlgoConfig)
    pushed: Counter[Pull] = Counter()
    chances = {pulls: chance(tables, pulls).item() for pulls in bandit.paths()}
    for likely, members in groups(chances, size):
        group = group_of(bandit, members, linked, states)
        rows = flatten(group, "policy")
        for name in annotate(members[0], members[0][0]) if annotate else ():
            rows = [row.annotated(name, column(row, name, members, annotate)) for row in rows]
        credit = load_credit(config, seed=0)
        [batch] = assemble([group], rows, credit=credit, model="policy", step=1, plan=Plan(idle_rows=True))
        for row in batch.rows:
            for token, weight, advantage in zip(row.tokens, row.weights["policy"], row.advantages or (), strict=True):
                pushed[PULLS[token]] += likely * weight * advantage
    logs = {name: table.log_softmax(-1) for name, table in tables.items()}
    total = torch.stack([amount * logs[name][told, arm] for (name, told, arm), amount in pushed.items() if name]).sum()
    found = torch.autograd.grad(total, list(tables.values()), allow_unused=True)
    return {name: torch.zeros(4, 2) if g is None else g for name, g in zip(tables, found, strict=True)}


def column(row: Any, name: str, members: Sequence[Pulls], annotate: Annotate) -> tuple[float, ...]:
    """An annotation of each token of a row that has weight."""
    pulls = members[int(row.trajectory[2:])]
    weighted = zip(row.tokens, row.weights["policy"], strict=True)
    return tuple(annotate(pulls, PULLS[token])[name] if weight else 0.0 for token, weight in weighted)


def equal(ours: Gradient, expected: Gradient, scale: float = 1.0) -> bool:
    assert max(float(of.abs().max()) for of in expected.values()) > 1e-2
    return all(
        torch.allclose(ours[name], scale * of.to(ours[name]), rtol=1e-7, atol=1e-9) for name, of in expected.items()
    )


def to_go(bandit: Bandit, pulls: Pulls, discount: float) -> dict[str, float]:
    """On paper: what each turn has to go, by name."""
    arms = {name: arm for name, _, arm in pulls}
    own = {pull[0]: earned(pull) for pull in pulls}

    def value(name: str | None) -> float:
        if name is None:
            return 0.0
        beside = sum(
            discount ** (1 + n) * own[other] for chain in bandit.beside.get(name, ()) for n, other in enumerate(chain)
        )
        behind = bandit.follows(name, arms)
        end = outcome(pulls) if behind is None else 0.0
        return own[name] + beside + end + discount * value(behind)

    return {name: value(name) for name in own}


def paper(
    bandit: Bandit,
    tables: Mapping[str, torch.Tensor],
    advantages: Callable[[Sequence[Pulls]], Sequence[Mapping[str, float]]],
    size: int = 1,
) -> Gradient:
    """The mean gradient where a rule's equation gives these advantages, by member and name of the turn."""
    logs = {name: table.log_softmax(-1) for name, table in tables.items()}
    chances = {pulls: chance(tables, pulls).item() for pulls in bandit.paths()}
    pushed: Counter[Pull] = Counter()
    for likely, members in groups(chances, size):
        for pulls, of in zip(members, advantages(members), strict=True):
            for pull in pulls:
                pushed[pull] += likely * of[pull[0]]
    total = torch.stack([amount * logs[name][told, arm] for (name, told, arm), amount in pushed.items()]).sum()
    found = torch.autograd.grad(total, list(tables.values()), allow_unused=True)
    return {name: torch.zeros(4, 2) if g is None else g for name, g in zip(tables, found, strict=True)}


def true_values(bandit: Bandit, tables: Mapping[str, torch.Tensor]) -> Annotate:
    """A critic that knows: what a turn has to go in the mean, after all that was sampled before it."""
    sums: Counter[Pulls] = Counter()
    weights: Counter[Pulls] = Counter()
    for pulls in bandit.paths():
        likely = chance(tables, pulls).item()
        for at, (name, _, _) in enumerate(pulls):
            sums[*pulls[:at], (name, -1, -1)] += likely * to_go(bandit, pulls, 1.0)[name]
            weights[*pulls[:at], (name, -1, -1)] += likely

    def annotate(pulls: Pulls, pull: Pull) -> Mapping[str, float]:
        state = (*pulls[: pulls.index(pull)], (pull[0], -1, -1))
        return {"value": sums[state] / weights[state]}

    return annotate


def wrong_value(pulls: Pulls, pull: Pull) -> Mapping[str, float]:
    """A critic that has learned nothing yet; it sees what the turn was told, and not the arm."""
    return {"value": 0.9 - 0.21 * NAMES.index(pull[0]) + 0.4 * pull[1]}


@pytest.fixture(params=sorted(BANDITS))
def bandit(request: pytest.FixtureRequest) -> Bandit:
    return BANDITS[request.param]


REINFORCE = {"credit": {"name": "reinforce", "baseline": 0.4}}


def test_returns_along_links_give_the_gradient_of_the_mean_reward(bandit: Bandit) -> None:
    tables = policy()
    assert equal(moved(bandit, tables, REINFORCE), slope(bandit, tables, reward))


def test_without_links_what_followed_two_sub_agents_is_not_put_down_to_them() -> None:
    """Where conversations follow one another, a later one that nothing links hangs on the one before, so that returns
    have no bias all the same. Not so where the leader goes on behind both."""
    tables, bandit = policy(), BANDITS["delegated"]
    assert not equal(moved(bandit, tables, REINFORCE, linked=False), slope(bandit, tables, reward))
    for name in ("compacted", "retried"):
        other = BANDITS[name]
        assert equal(moved(other, tables, REINFORCE, linked=False), slope(other, tables, reward))


def test_discounted_returns_are_those_on_paper(bandit: Bandit) -> None:
    tables = policy()
    rule = {"credit": {"name": "reinforce", "discount": 0.8}}
    expected = paper(bandit, tables, lambda members: [to_go(bandit, pulls, 0.8) for pulls in members])
    assert equal(moved(bandit, tables, rule), expected)


@pytest.mark.parametrize("decay", [1.0, 0.6, 0.0])
def test_gae_is_without_bias_where_the_critic_knows_or_nothing_is_bootstrapped(bandit: Bandit, decay: float) -> None:
    tables = policy()
    rule = {"credit": {"name": "gae", "whiten": False, "lambda_policy": decay}}
    expected = slope(bandit, tables, reward)
    assert equal(moved(bandit, tables, rule, annotate=true_values(bandit, tables)), expected)
    assert equal(moved(bandit, tables, rule, annotate=wrong_value), expected) == (decay == 1.0)


def test_gae_with_a_wrong_critic_is_its_equation(bandit: Bandit) -> None:
    tables, discount, decay = policy(), 0.9, 0.7

    def advantages(members: Sequence[Pulls]) -> list[dict[str, float]]:
        of = []
        for pulls in members:
            arms = {name: arm for name, _, arm in pulls}
            value = {pull[0]: wrong_value(pulls, pull)["value"] for pull in pulls}
            go, made = to_go(bandit, pulls, discount), dict[str, float]()
            for name in reversed(value):
                behind = bandit.follows(name, arms)
                here = go[name] - (discount * go[behind] if behind else 0.0)  # with what hangs on it
                after = (value[behind], made[behind]) if behind else (0.0, 0.0)
                made[name] = here + discount * after[0] - value[name] + discount * decay * after[1]
            of.append(made)
        return of

    rule = {"credit": {"name": "gae", "whiten": False, "lambda_policy": decay, "discount": discount}}
    assert equal(moved(bandit, tables, rule, annotate=wrong_value), paper(bandit, tables, advantages))


@pytest.mark.parametrize(
    ("credit", "scale"),
    [
        ("rloo", 2.0),
        ({"name": "grpo", "normalise": False}, 1.0),  # less the mean of two equals is half a comparison
    ],
)
def test_rules_of_outcomes_take_all_branches_for_one_sequence(bandit: Bandit, credit: Any, scale: float) -> None:
    tables = policy()
    assert equal(moved(bandit, tables, {"credit": credit}, 2), slope(bandit, tables, reward), scale)


def pair(values: Sequence[float]) -> list[float]:
    """(x - mean) / std of one value or two."""
    if len(values) < 2 or abs(values[0] - values[1]) < 1e-12:
        return [0.0] * len(values)
    high = 1 / math.sqrt(2)
    return [high, -high] if values[0] > values[1] else [-high, high]


def test_turn_level_compares_turns_in_the_same_place(bandit: Bandit) -> None:
    """MT-GRPO: a turn of a sub-agent with that of the sibling's, the last with the last, whatever was retried."""
    tables, weight = policy(), 0.3

    def advantages(members: Sequence[Pulls]) -> list[dict[str, float]]:
        turns = [{pull[0]: earned(pull) for pull in pulls if pull[0] != "last"} for pulls in members]
        rest = [reward(pulls) - sum(of.values()) for pulls, of in zip(members, turns, strict=True)]
        outcomes = pair(rest)
        made = []
        for number in range(len(members)):
            of = {"last": outcomes[number]}
            for name in turns[number]:
                same = [other for other, its in enumerate(turns) if name in its]
                of[name] = weight * outcomes[number] + pair([turns[n][name] for n in same])[same.index(number)]
            made.append(of)
        return made

    rule = {"name": "turn_level", "outcome_weight": weight, "epsilon": 1e-12}
    assert equal(moved(bandit, tables, {"credit": rule}, 2), paper(bandit, tables, advantages, 2))


def test_gigpo_compares_returns_along_links_of_turns_in_one_state(bandit: Bandit) -> None:
    tables, discount, weight = policy(), 0.8, 0.5

    def advantages(members: Sequence[Pulls]) -> list[dict[str, float]]:
        mean = sum(map(reward, members)) / len(members)
        go = [to_go(bandit, pulls, discount) for pulls in members]
        made = []
        for pulls, of in zip(members, go, strict=True):
            same = {name: [other[name] for other in go if name in other] for name in of}
            made.append(
                {name: reward(pulls) - mean + weight * (of[name] - sum(at) / len(at)) for name, at in same.items()}
            )
        return made

    rule = {"name": "gigpo", "divide": False, "discount": discount, "step_weight": weight}
    assert equal(moved(bandit, tables, {"credit": rule}, 2, states=True), paper(bandit, tables, advantages, 2))


def test_process_supervision_sums_normalised_rewards_along_links(bandit: Bandit) -> None:
    tables = policy()

    def advantages(members: Sequence[Pulls]) -> list[dict[str, float]]:
        every = torch.tensor([earned(pull) for pulls in members for pull in pulls], dtype=torch.double)
        normal = iter(((every - every.mean()) / (every.std() + 1e-6)).tolist())
        made = []
        for pulls in members:
            own, arms = {pull[0]: next(normal) for pull in pulls}, {name: arm for name, _, arm in pulls}
            of: dict[str, float] = {}
            for name in reversed(own):
                behind = bandit.follows(name, arms)
                beside = sum(own[other] for chain in bandit.beside.get(name, ()) for other in chain)
                of[name] = own[name] + beside + (of[behind] if behind else 0.0)
            made.append(of)
        return made

    assert equal(moved(bandit, tables, {"credit": "process"}, 1), paper(bandit, tables, advantages, 1))


def test_prime_sums_implied_rewards_along_links(bandit: Bandit) -> None:
    tables, beta = policy(), 0.5

    def implied(pull: Pull) -> float:
        return beta * (0.3 * NAMES.index(pull[0]) - 0.2 * pull[2])

    def annotate(pulls: Pulls, pull: Pull) -> Mapping[str, float]:
        return {"implicit": implied(pull) / beta - 1.0, "reference": -1.0}

    def advantages(members: Sequence[Pulls]) -> list[dict[str, float]]:
        made = []
        for pulls, sibling in (members, tuple(reversed(members))):
            less = sum(map(implied, sibling)) / len(sibling)
            own, arms = {pull[0]: implied(pull) - less for pull in pulls}, {name: arm for name, _, arm in pulls}
            of: dict[str, float] = {}
            for name in reversed(own):
                behind = bandit.follows(name, arms)
                beside = sum(own[other] for chain in bandit.beside.get(name, ()) for other in chain)
                of[name] = own[name] + beside + (of[behind] if behind else 0.0)
            made.append({name: value + reward(pulls) - reward(sibling) for name, value in of.items()})
        return made

    rule = {"name": "prime", "beta": beta}
    ours = moved(bandit, tables, {"credit": rule}, 2, annotate=annotate)
    assert equal(ours, paper(bandit, tables, advantages, 2))


def test_the_optimal_token_baseline_weighs_what_was_collected_along_links(bandit: Bandit) -> None:
    """A sub-agent's first turn has collected its leader's gradient and its own, not that of the other sub-agent."""
    tables, likely = policy(), math.exp(-1.0)
    leads = {"first": "lead", "other": "lead", "second": "first"} if bandit is BANDITS["delegated"] else {}

    def annotate(pulls: Pulls, pull: Pull) -> Mapping[str, float]:
        return {"probability_squares": likely**2 + 0.1 * NAMES.index(pull[0]) + 0.05 * pull[1]}

    def advantages(members: Sequence[Pulls]) -> list[dict[str, float]]:
        by_place: list[list[tuple[int, str, float, float]]] = [[] for _ in range(5)]
        for number, pulls in enumerate(members):
            go, collected = to_go(bandit, pulls, 1.0), dict[str, float]()
            for place, pull in enumerate(pulls):
                before = leads.get(pull[0], "lead" if leads else pulls[place - 1][0])
                own = 1 - 2 * likely + annotate(pulls, pull)["probability_squares"]
                collected[pull[0]] = own + (collected[before] if place else 0.0)
                by_place[place].append((number, pull[0], collected[pull[0]], go[pull[0]]))
        made: list[dict[str, float]] = [{} for _ in members]
        for same in by_place:
            baseline = sum(w * g for _, _, w, g in same) / sum(w for _, _, w, _ in same) if len(same) > 1 else 0.0
            for number, name, _, g in same:
                made[number][name] = g - baseline
        return made

    ours = moved(bandit, tables, {"credit": "optimal_token_baseline"}, 2, annotate=annotate)
    assert equal(ours, paper(bandit, tables, advantages, 2))


def test_reinforce_plus_plus_normalises_returns_along_links(bandit: Bandit) -> None:
    tables = policy()

    def advantages(members: Sequence[Pulls]) -> list[dict[str, float]]:
        go = [to_go(bandit, pulls, 1.0) for pulls in members]
        every = torch.tensor([value for of in go for value in of.values()], dtype=torch.double)
        scale = every.std(correction=0) + 1e-8
        return [{name: float((value - every.mean()) / scale) for name, value in of.items()} for of in go]

    ours = moved(bandit, tables, {"credit": "reinforce_plus_plus"}, 1)
    assert equal(ours, paper(bandit, tables, advantages, 1))
