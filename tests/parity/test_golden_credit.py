"""Every credit rule against its golden vectors, and the vectors against a wrong sign."""

import msgspec
import numpy as np
import pytest
from golden import credit
from golden.credit import REFERENCES, cases
from golden.credit_by_hand import EXAMPLES
from golden.mutants import mutants

from sparring.algo.rules import CreditRule
from sparring.batch.plain_groups import by_member, nouns

RULES = sorted(REFERENCES)


def credited(case):
    """What the rule of a case gives: its advantages by member, and its samples."""
    rule = msgspec.convert({"name": case["rule"], **case["settings"]}, CreditRule).open()
    groups, samples = nouns(case["groups"])
    after = rule.credit(groups, samples)
    for before, rows in zip(samples, after, strict=True):
        assert not rows or [row.id for row in rows] == [row.id for row in before]
        assert not rows or [row.weights for row in rows] == [row.weights for row in before]
    return by_member(case["groups"], after), after


def differs(ours, expected, relative=1e-9):
    """Whether two lists of advantages by group and member are apart, relative to the largest of them."""
    if [of is None for of in ours] != [of is None for of in expected]:
        return True
    ours, expected = ([x for of in both if of is not None for m in of for x in m] for both in (ours, expected))
    scale = max([1e-3, *map(abs, expected)])
    return len(ours) != len(expected) or not np.allclose(ours, expected, rtol=0, atol=relative * scale)


def disagrees(reference, case, ours):
    """Whether a reference gives something else than we do for a case, or cannot compute."""
    try:
        with np.errstate(all="ignore"):
            return differs(ours, credit.plain(reference(case["groups"], case["settings"])))
    except (ValueError, IndexError, ZeroDivisionError):
        return True


@pytest.mark.parametrize("name", RULES)
def test_a_rule_gives_its_golden_vectors(name):
    for case in cases(name):
        ours, samples = credited(case)
        assert not differs(ours, case["advantages"]), case["name"]
        if "returns" in case:
            assert not differs(by_member(case["groups"], samples, "return"), case["returns"]), case["name"]


@pytest.mark.parametrize("name", RULES)
def test_one_wrong_sign_in_the_equation_is_found(name):
    ours = [(case, credited(case)[0]) for case in cases(name)]
    wrong = list(mutants(REFERENCES[name]))
    assert wrong
    for changed, reference in wrong:
        assert any(disagrees(reference, case, of) for case, of in ours), changed


@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_rule_and_reference_agree_with_the_example_worked_by_hand(name):
    case = {"rule": name, **EXAMPLES[name]}
    expected = [
        [[a] * sum(m["turns"]) if isinstance(a, float) else a for m, a in zip(group["members"], of, strict=True)]
        for group, of in zip(case["groups"], case["advantages"], strict=True)
    ]
    assert not differs(credit.plain(REFERENCES[name](case["groups"], case["settings"])), expected), REFERENCES[
        name
    ].__doc__
    assert not differs(credited(case)[0], expected)


@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_vectors_are_several_and_say_something(name):
    vectors = list(cases(name))
    assert len(vectors) >= 6
    assert any(of is not None and any(any(m) for m in of) for case in vectors for of in case["advantages"]), "all zero"
