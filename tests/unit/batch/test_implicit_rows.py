"""Rows of an implicit process reward model: what credit `prime` leaves becomes replies that somebody wanted or not."""

from dataclasses import replace

import pytest

from sparring.algo.rare.credit.prime import Prime
from sparring.batch.implicit import implicit_rows
from sparring.batch.plain_groups import nouns, simple_group
from sparring.errors import SparringError
from sparring.generation import KeptSets

TOKENS = {"implicit": [-1.0, -2.0, -1.5], "reference": [-1.5, -1.0, -0.5]}


def credited_group(rewards, **fields):
    """Two replies each, of two tokens and one; in the second member the second goes on from the prompt, a branch of its
    own."""
    given = {"tokens": [TOKENS] * len(rewards), "follows": [[-1, 0], [-1, -1], [-1, 0]][: len(rewards)], **fields}
    groups, samples = nouns([simple_group(rewards, turns=(2, 1), **given)])
    return groups, samples, Prime().credit(groups, samples)[0]


def test_a_reply_of_a_right_rollout_is_wanted_and_weighs_one():
    _, _, rows = credited_group([0.75, 0.25, 0.5])
    taught = implicit_rows(rows)
    assert [row.label for row in taught] == [1.0, -1.0, -1.0, -1.0]
    assert len({row.group for row in taught}) == 3 and taught[1].group == taught[2].group
    weights = [[weight for weight in row.weights["preference"] if weight] for row in taught]
    assert weights == [[1 / 3] * 3, [1 / 3] * 2, [1 / 3], [1 / 3] * 3]
    for row, before in zip(taught, rows, strict=True):
        assert (row.id, row.tokens) == (before.id, before.tokens) and row.annotations.keys() == {"reference"}
        assert row.annotations["reference"] == before.annotations["reference"] and row.versions is None is row.logprobs


def test_the_scorers_success_overrides_the_reward():
    groups, samples, _ = credited_group([0.75, 0.25])
    scores = tuple(
        replace(score, success=success) for score, success in zip(groups[0].scores, (False, True), strict=True)
    )
    [rows] = Prime().credit([replace(groups[0], scores=scores)], samples)
    assert [row.label for row in implicit_rows(rows)] == [-1.0, 1.0, 1.0]
    [rows] = Prime(solved_above=0.1).credit(groups, samples)
    assert [row.label for row in implicit_rows(rows)] == [1.0, 1.0, 1.0]


def test_the_reference_is_renormalised_over_the_kept_sets():
    _, _, rows = credited_group([1.0, 0.0])
    kept = KeptSets(rows=(b"\x01\0\0\0",) * len(rows[0].tokens))
    first, *_ = implicit_rows(
        [replace(rows[0], temperature=0.5, kept=kept, bias=((),) * len(rows[0].tokens)), *rows[1:]]
    )
    assert (first.temperature, first.kept, first.bias) == (0.5, kept, ((),) * len(rows[0].tokens))


def test_rows_of_another_credit_are_an_error():
    _, samples, rows = credited_group([1.0, 0.0])
    with pytest.raises(SparringError, match="expected the annotation 'right'"):
        implicit_rows(samples[0])
    silent = replace(rows[0], weights={"policy": (0.0,) * len(rows[0].tokens)})
    assert implicit_rows([silent]) == []
