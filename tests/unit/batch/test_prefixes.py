"""The walk through a tree of prefixes: everything is there, once, and in the form that attention reads."""

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from sparring.batch.prefixes import lay_out, walk

# few ids, so that much is shared, and such that bytes in the machine's own order would compare wrongly
IDS = st.sampled_from([0, 1, 255, 256, 70_000])
FORESTS = st.lists(st.lists(IDS, max_size=8), max_size=12)


def distinct_prefixes(sequences):
    return {tuple(sequence[: end + 1]) for sequence in sequences for end in range(len(sequence))}


@given(FORESTS)
@example([[], [1], [], [1], [1, 0], [256]])
def test_every_path_spells_its_sequence_without_duplicates(sequences):
    layout = lay_out([np.array(sequence, dtype=np.int64) for sequence in sequences])
    assert len(layout.paths) == len(sequences)
    for sequence, path in zip(sequences, layout.paths, strict=True):
        assert layout.tokens[path].tolist() == sequence
        assert layout.positions[path].tolist() == list(range(len(sequence)))
        assert (np.diff(path) > 0).all()
    assert len(layout.tokens) == len(layout.positions) == len(distinct_prefixes(sequences))
    assert set().union(*(path.tolist() for path in layout.paths)) == set(range(len(layout.tokens)))


@given(FORESTS)
def test_each_sequence_of_the_walk_extends_a_prefix_of_the_previous_one(sequences):
    layout = lay_out([np.array(sequence, dtype=np.int64) for sequence in sequences])
    assert layout.cu_seqlens.dtype == layout.shared.dtype == np.int32
    spelled, before = [], []
    for begin, end, kept in zip(layout.cu_seqlens, layout.cu_seqlens[1:], layout.shared, strict=False):
        assert kept <= len(before)
        before = before[:kept] + layout.tokens[begin:end].tolist()
        spelled.append(before)
    assert spelled == sorted(sequences)


def test_equal_sequences_keep_their_order():
    assert walk([[7, 8], [7], [7, 8], [3]]) == ([3, 1, 0, 2], [0, 0, 1, 2])
    assert walk([]) == ([], [])
