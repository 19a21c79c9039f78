"""The lint of annotations tells their uses apart, and a row refuses one that is not declared."""

import pytest
from annotations import LITERAL, uses

from sparring.annotations import Annotation
from sparring.batch.plain_groups import nouns, simple_group


def test_roles_are_told_apart() -> None:
    cases = {
        "x[Annotation.VALUE] = y": "write",
        "annotation = Annotation.VALUE": "write",
        "f(x[Annotation.VALUE])": "read",
        "NEEDS = (Annotation.VALUE,)": "read",
        "f({Annotation.VALUE: y})": "write",
        "row.annotated(Annotation.VALUE, y)": "write",
        "print(Annotation.VALUE)": "unknown use in print(Annotation.VALUE)",
    }
    for text, expected in cases.items():
        assert list(uses(text)) == [("value", expected)]
    assert LITERAL.search('row.annotations["value"]') and LITERAL.search('row.annotations.get("value", 0)')


def test_a_row_with_an_undeclared_annotation_is_refused_by_name() -> None:
    _, [[row]] = nouns([simple_group([1.0])])
    with pytest.raises(ValueError, match="expected annotations of sparring/annotations.py, got refrence"):
        row.annotated("refrence", (0.0,) * len(row.tokens))
    marked = row.annotated(Annotation.REFERENCE, (0.0,) * len(row.tokens))
    assert marked.annotations.keys() == {"reference"}, "a member is its name"
