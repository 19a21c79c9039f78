"""The lint of annotations tells their uses apart, and a row refuses one that is not declared."""

import pytest
from annotations import literal_keys, uses, with_parents

from sparring.annotations import Annotation
from sparring.batch.plain_groups import nouns, simple_group


@pytest.mark.parametrize(
    "text",
    [
        'x = row.annotations["reference"]',
        'x = row.annotations.get("reference", 0)',
        'x = "reference" not in row.annotations',
        'x = Sample(annotations={"reference": y})',
        'x = row.annotated("reference", y)',
        'x = member.with_steps(y, "right")',
        'x = member.read("value", "gae")',
        'x = TrainerQuantity(forward, "reference", "logprob")',
    ],
)
def test_a_literal_where_an_annotation_is_named_is_found(text: str) -> None:
    assert len(list(literal_keys(with_parents(text)))) == 1


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
        assert list(uses(with_parents(text))) == [("value", expected)]


def test_a_row_with_an_undeclared_annotation_is_refused_by_name() -> None:
    _, [[row]] = nouns([simple_group([1.0])])
    with pytest.raises(ValueError, match="expected annotations of sparring/annotations.py, got refrence"):
        row.annotated("refrence", (0.0,) * len(row.tokens))
    marked = row.annotated(Annotation.REFERENCE, (0.0,) * len(row.tokens))
    assert marked.annotations.keys() == {"reference"}, "a member is its name"
