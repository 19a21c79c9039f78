"""What acts on scores, against its golden vectors, and the vectors against a wrong sign."""

import asyncio

import msgspec
import numpy as np
import pytest
from golden.mutants import mutants
from golden.shaping import EXAMPLES, REFERENCES, cases

from sparring.algo.filter.difficulty import Difficulty
from sparring.algo.rules import ShapingRule
from sparring.algo.shaping.kl_reward import KlReward
from sparring.batch.plain_groups import by_member, nouns

SHAPING = {kind.__struct_config__.tag for kind in ShapingRule.__args__}


def acted(case):
    """What our rule makes of a case."""
    groups, samples = nouns(case["groups"])
    if case["rule"] == "difficulty":
        return [Difficulty(**case["settings"]).keep(group) for group in groups]
    if case["rule"] == "kl_reward":
        rule = KlReward(**case["settings"])
        return by_member(case["groups"], [asyncio.run(rule.annotate(rows)) for rows in samples], "reward")
    rule = msgspec.convert({"name": case["rule"], **case["settings"]}, ShapingRule)
    after = rule.shape(groups)
    for group, was in zip(after, groups, strict=True):
        assert (group.rollouts, group.failed) == (was.rollouts, was.failed)
        for score, before, rollout in zip(group.scores, was.scores, group.rollouts, strict=True):
            changed = sum(score.of(t.role) - before.of(t.role) for t in rollout.trajectories)
            parts = [value for name, value in score.parts.items() if name.split("/")[0] == case["rule"]]
            assert sum(parts) == pytest.approx(changed) and len(parts) == len(rollout.trajectories)
    return [
        [score.of(t.role) for score, rollout in zip(g.scores, g.rollouts, strict=True) for t in rollout.trajectories]
        for g in after
    ]


def same(ours, expected):
    def flat(values):
        return [x for value in values for x in flat(value)] if isinstance(values, list) else [float(values)]

    return np.allclose(flat(ours), flat(expected), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_a_rule_gives_its_golden_vectors(name):
    for case in cases(name):
        assert same(acted(case), case["expected"]), case["name"]


@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_one_wrong_sign_in_the_equation_is_found(name):
    ours = [(case, acted(case)) for case in cases(name)]
    wrong = list(mutants(REFERENCES[name]))
    assert wrong
    for changed, reference in wrong:
        given = [[reference(group, case["settings"]) for group in case["groups"]] for case, _ in ours]
        assert any(not same(of, theirs) for (_, of), theirs in zip(ours, given, strict=True)), changed


@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_rule_and_reference_agree_with_the_example_worked_by_hand(name):
    case = {"rule": name, **EXAMPLES[name]}
    assert same([REFERENCES[name](group, case["settings"]) for group in case["groups"]], case["expected"])
    assert same(acted(case), case["expected"])


def test_vectors_cover_every_rule():
    assert SHAPING | {"difficulty", "kl_reward"} == set(REFERENCES)
