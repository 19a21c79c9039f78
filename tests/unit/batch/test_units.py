"""Rows that a loss looks at together stay together."""

from hypothesis import given
from hypothesis import strategies as st

from sparring.batch.packing import lanes, pack
from sparring.batch.preference import mismatched, preference_batch, reply
from sparring.batch.units import cut_units, pack_units, units
from sparring.types import Sample

PAIRED = frozenset({"preference"})


def row(number, group, tokens, term="preference"):
    weights = (0.0,) * (len(tokens) - 1) + (1.0,)
    return Sample(
        id=str(number), group=group, source="expert", tokens=tuple(tokens), weights={term: weights}, label=1.0
    )


groups = st.lists(
    st.tuples(st.integers(0, 5), st.lists(st.integers(0, 3), min_size=2, max_size=20), st.booleans()),
    min_size=1,
    max_size=24,
)


@given(groups, st.integers(1, 60))
def test_no_pair_is_split_and_no_row_lost(drawn, budget):
    rows = [
        row(n, str(group), tokens, "preference" if ours else "imitate") for n, (group, tokens, ours) in enumerate(drawn)
    ]
    packs = pack_units(rows, budget, PAIRED)
    assert sorted(r.id for part in packs for r in part) == sorted(r.id for r in rows)
    where = {r.id: place for place, part in enumerate(packs) for r in part}
    for unit in units(rows, PAIRED):
        assert len({where[r.id] for r in unit}) == 1
    for part in packs:
        distinct = {r.tokens[: n + 1] for r in part for n in range(len(r.tokens))}
        assert len(distinct) <= budget or len(units(part, PAIRED)) == 1
        halves = cut_units(part, 2, PAIRED)
        assert sorted(r.id for half in halves for r in half) == sorted(r.id for r in part)
        for unit in units(part, PAIRED):
            assert len({place for place, half in enumerate(halves) for r in half if r in unit}) == 1


def test_units_of_single_rows_are_packed_like_rows():
    rows = [row(n, str(n), [7, n, *range(n)]) for n in range(9)]
    assert pack_units(rows, 12, PAIRED) == pack(rows, 12)
    assert cut_units(rows, 2, PAIRED) == lanes(rows, 2)


def test_a_mismatched_row_of_kto_is_judged_and_does_not_count():
    wanted, other = (
        reply((1, 2, last), (False, True, True), id=str(last), group=str(last), label=1.0, share=1.0) for last in (3, 4)
    )
    batch = preference_batch([(wanted, mismatched(wanted, other, 9))], step=1, model="policy")
    assert [row.label for row in batch.rows] == [1.0, 0.0] and any(batch.rows[1].weights["preference"])
    assert batch.denominators == {"preference": sum(wanted.weights["preference"])}
