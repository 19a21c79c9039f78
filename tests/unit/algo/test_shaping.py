"""Shaping and selection: limits of tasks, refusals, and what credit makes of shaped scores."""

import asyncio
from dataclasses import replace

import msgspec
import pytest
from refusals import refused_at

from sparring.algo.credit.reinforce import Reinforce
from sparring.algo.filter.difficulty import Difficulty
from sparring.algo.rare.shaping.linear_length import LinearLength
from sparring.algo.rare.shaping.stop_properly import StopProperly
from sparring.algo.rules import ShapingRule
from sparring.algo.shaping.kl_reward import KlReward
from sparring.algo.shaping.overlong import Overlong
from sparring.batch.plain_groups import by_member, nouns, simple_group
from sparring.errors import BadInput
from sparring.types import Limits


def test_the_tasks_own_limit_is_the_default():
    [group], _ = nouns([simple_group([1.0, 1.0], lengths=(6, 11))])
    group = replace(group, task=replace(group.task, limits=Limits(max_tokens=10)))
    [shaped] = Overlong(buffer=4).shape([group])
    assert [score.reward for score in shaped.scores] == [1.0, 0.0]


def test_a_share_of_a_negative_reward_is_refused():
    """To be cut off would pay: 0 instead of -1."""
    [group], _ = nouns([simple_group([1.0, -1.0], cut=(False, True))])
    with refused_at("algo.shaping stop_properly", "rewards of at least 0"):
        StopProperly().shape([group])
    [fine], _ = nouns([simple_group([1.0, 0.5], cut=(False, True))])
    assert [score.reward for score in StopProperly().shape([fine])[0].scores] == [1.0, 0.0]


def test_shaping_amounts_belong_to_the_end_of_a_rollout():
    plain = [simple_group([1.0], turns=(1, 1), per_turn=[[0.75, 0.0]])]
    groups, samples = nouns(plain)
    shaped = LinearLength(price=0.25, by_success=False).shape(groups)
    assert by_member(plain, Reinforce().credit(shaped, samples)) == [[[0.5, -0.25]]]


def test_a_penalty_in_the_reward_reaches_credit_token_by_token():
    plain = [simple_group([1.0], turns=(2,), tokens=[{"logprob": [-1.0, -2.0], "reference": [-2.0, -1.0]}])]
    groups, samples = nouns(plain)
    penalised = [asyncio.run(KlReward(coefficient=0.5).annotate(rows)) for rows in samples]
    assert by_member(plain, Reinforce().credit(groups, penalised)) == [[[1.0, 1.5]]]
    twice = [asyncio.run(KlReward(coefficient=0.5).annotate(rows)) for rows in penalised]
    assert by_member(plain, Reinforce().credit(groups, twice)) == [[[1.0, 2.0]]], "rewards add up"


def test_a_penalty_without_a_reference_is_refused():
    _, [rows] = nouns([simple_group([1.0])])
    with pytest.raises(BadInput, match=r"\[algo\] kl_reward.*annotation 'reference'"):
        asyncio.run(KlReward().annotate(rows))


def test_the_scorers_success_takes_precedence_over_rewards():
    [group], _ = nouns([simple_group([1.0, 1.0])])
    assert not Difficulty().keep(group)
    doubted = replace(group, scores=(replace(group.scores[0], success=False), group.scores[1]))
    assert Difficulty().keep(doubted)
    assert not Difficulty().keep(replace(group, rollouts=(), scores=()))


def test_settings_without_sense_are_refused():
    wrong = (
        {"name": "overlong", "buffer": 0},
        {"name": "overlong", "limit": 3, "buffer": 4},
        {"name": "linear_length", "price": -1.0},
        {"name": "stop_properly", "keeps": 2.0},
    )
    for settings in wrong:
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(settings, ShapingRule)
    for settings in ({"lowest": 0.5, "highest": 0.4}, {"lowest": 0.5, "highest": 0.5}, {"highest": 2.0}):
        with pytest.raises(ValueError):
            Difficulty(**settings)
    with pytest.raises(ValueError):
        KlReward(coefficient=-1.0)
