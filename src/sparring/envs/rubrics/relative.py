"""Relative rewards: judges compare the answers of a group with each other, each comparison in both orders.

A judge prefers a position as well as an answer. Let f(i, j), from 0 to 1, be how much i wins over j when i is shown
first. Then

    p(i, j) = (f(i, j) + 1 - f(j, i)) / 2

cancels any constant preference for the first position, and p(i, j) + p(j, i) = 1. Over m compared answers of a group of
n,

    u(i) = mean of p(i, j) over its opponents j           pairwise
    u(i) = 1 - rank(i) / (m - 1), ranks from 0            ranking, the mean over an order and its reverse
    value(i) = ((m - 1) u(i) + n - m) / (n - 1)

where the other n - m answers lose without a comparison: empty answers, and those capped at 0 by a gate. Their value
is 0.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import xxhash

from sparring.envs.base import final_text
from sparring.envs.executor import cooperative
from sparring.envs.rubrics.config import RELATIVE, Pairwise, Ranking, Relative, of_domain
from sparring.envs.rubrics.judge import (
    asked_of,
    check_prompt,
    fill_prompt,
    mean_verdict,
    order_constraint,
    order_reader,
)
from sparring.envs.rubrics.judges import Judges, together
from sparring.envs.rubrics.rubric import Rubric
from sparring.types import Rollout, Score, Task


class RelativeScorer:
    """Scorer that adds the values of a group's comparison to each answer's own score. Implements `Scorer`. Refuses a
    rubric without judges (`BadInput`)."""

    def __init__(self, rubric: Rubric) -> None:
        self._rubric = rubric
        self._parts = {name: part for name, part in rubric.parts.items() if isinstance(part, RELATIVE)}
        for name, part in self._parts.items():
            self._judges: Judges = asked_of(part, rubric.judges, f"env.rubric.{name}")

    @staticmethod
    def of(rubric: Rubric) -> RelativeScorer | None:
        """Return the scorer of a rubric, or None if it has no relative part."""
        return RelativeScorer(rubric) if any(isinstance(part, RELATIVE) for part in rubric.parts.values()) else None

    def check(self, task: Task) -> None:
        """Refuse a row without a column that a prompt names (`BadInput`)."""
        for part in self._parts_for(task).values():
            check_prompt(part.prompt, task, ("first", "second") if isinstance(part, Pairwise) else ("answers",))

    @cooperative
    async def score(self, task: Task, rollouts: Sequence[Rollout], scores: Sequence[Score]) -> Sequence[Score]:
        parts = self._parts_for(task)
        if len(rollouts) < 2 or not parts:
            return scores
        answers = [final_text(rollout.trajectories[0]) for rollout in rollouts]
        places = [i for i, score in enumerate(scores) if answers[i] and self._rubric.cap(score.parts) > 0]
        compared = [answers[i] for i in places]
        values_by_answer: list[dict[str, float]] = [dict.fromkeys(parts, 0.0) for _ in scores]
        for name, part in parts.items():
            strengths = await self._strengths(name, part, compared, task)
            for place, strength in zip(places, strengths, strict=True):
                num_lost = len(scores) - len(places)
                values_by_answer[place][name] = ((len(places) - 1) * strength + num_lost) / (len(scores) - 1)
        return [self._with(score, values) for score, values in zip(scores, values_by_answer, strict=True)]

    def _parts_for(self, task: Task) -> Mapping[str, Relative]:
        return of_domain(self._parts, str(task.data.get("domain", "")))

    def _with(self, score: Score, values: Mapping[str, float]) -> Score:
        sum_of = sum(self._parts[name].weight * value for name, value in values.items())
        reward = min((score.reward or 0.0) + sum_of, self._rubric.cap(score.parts))
        return replace(score, reward=reward, parts={**score.parts, **values})

    async def _strengths(self, name: str, part: Relative, answers: Sequence[str], task: Task) -> Sequence[float]:
        """Return u(i) of each answer; 0 for fewer than two answers, where it has no effect."""
        if len(answers) < 2:
            return [0.0] * len(answers)
        where = f"env.rubric.{name}"
        if isinstance(part, Pairwise):
            return await self._by_pairs(part, answers, task, where)
        return await self._by_ranks(part, answers, task, where)

    async def _by_pairs(self, part: Pairwise, answers: Sequence[str], task: Task, where: str) -> Sequence[float]:
        count = len(answers)
        num_opponents = min(part.opponents or count - 1, count - 1)
        pairs = sorted(
            {tuple(sorted((i, (i + step) % count))) for i in range(count) for step in range(1, num_opponents + 1)}
        )

        async def wins(i: int, j: int) -> float:
            question = fill_prompt(part.prompt, task, {"first": answers[i], "second": answers[j]})
            return await mean_verdict(self._judges, part, question, where)

        different = [(i, j) for i, j in pairs if answers[i] != answers[j]]
        orders = [order for i, j in different for order in ((i, j), (j, i))]
        won = dict(zip(orders, await together([wins(*order) for order in orders]), strict=True))
        totals, opponents = [0.0] * count, [0] * count
        for i, j in pairs:
            share = (won[i, j] + 1 - won[j, i]) / 2 if (i, j) in won else 0.5  # equal texts
            for place, value in ((i, share), (j, 1 - share)):
                totals[place] += value
                opponents[place] += 1
        return [total / number for total, number in zip(totals, opponents, strict=True)]

    async def _by_ranks(self, part: Ranking, answers: Sequence[str], task: Task, where: str) -> Sequence[float]:
        count = len(answers)
        read, constraint = order_reader(part, count), order_constraint(count)

        async def ranked(order: Sequence[int], sample: int) -> Sequence[int]:
            texts = "\n\n".join(f"[{number}]\n{answers[place]}" for number, place in enumerate(order, 1))
            question = fill_prompt(part.prompt, task, {"answers": texts})
            ranks = await self._judges.verdict(part, question, read, where, constraint=constraint, sample=sample)
            return [order[number] for number in ranks]

        rankings = []
        for sample in range(part.samples):
            order = list(range(count))
            random.Random(xxhash.xxh3_64_intdigest(f"{task.id}/{where}/{sample}".encode())).shuffle(order)
            rankings += [ranked(order, sample), ranked(order[::-1], sample)]
        totals = [0.0] * count
        for ranking in await together(rankings):
            for rank, place in enumerate(ranking):
                totals[place] += 1 - rank / (count - 1)
        return [total / len(rankings) for total in totals]
