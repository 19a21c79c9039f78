"""Trees of labelled replies: each sampled token is trained once or is accounted for by name, whatever branched."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from segments import sampled

from sparring.algo.aggregation import aggregated, denominator
from sparring.algo.config import AlgoConfig
from sparring.algo.credit.distilled import Distilled
from sparring.algo.credit.pairs import Pairs
from sparring.algo.pipeline import load_credit
from sparring.batch.batches import assemble
from sparring.batch.flatten import flatten
from sparring.types import Group, Outcome, Rollout, Score, Segment, Task, TokenAccount, Trajectory

TASK = Task(id="t", env="e", messages=())
DONE = Outcome(kind="completed", reason="answered")
LABELS = ("agent", "auxiliary", "compaction", "lost")
UNTRAINED = ("auxiliary", "lost")

replies = st.lists(
    st.tuples(
        st.integers(0, 9),  # the reply that it goes on from; it has its own root where there is none of this number
        st.sampled_from(LABELS),
        st.integers(0, 3),  # its tokens
        st.sampled_from(("policy", "policy", "policy", "other")),
        st.integers(0, 2),  # tokens that a tool said before
    ),
    min_size=1,
    max_size=9,
)


def trajectory(id, drawn):
    """A forest of replies whose tokens are all different."""
    segments, at, token = [], [], 1
    for follows, label, count, model, said in drawn:
        parent = at[follows] if follows < len(at) else None
        if parent is None or said:
            told = tuple(range(token, token + max(1, said)))
            segments.append(Segment(index=len(segments), parent=parent, source="tool", tokens=told))
            parent, token = len(segments) - 1, token + len(told)
        tokens = tuple(range(token, token + count))
        token += count
        at.append(len(segments))
        segments.append(sampled(len(segments), parent, tokens, model=model, label=label))
    return Trajectory(id=id, task="t", role="policy", segments=tuple(segments), outcome=DONE)


def group(trees, rewards=None, failed=()):
    def rollout(index, tree):
        return Rollout(id=tree.id, task=TASK, index=index, attempt=0, purpose="train", trajectories=(tree,))

    return Group(
        id="g",
        index=0,
        task=TASK,
        rollouts=tuple(rollout(index, tree) for index, tree in enumerate(trees)),
        scores=tuple(Score(reward=reward) for reward in rewards or range(len(trees))),
        failed=tuple(rollout(-1 - index, tree) for index, tree in enumerate(failed)),
    )


def tokens_of(trees, *labels):
    return [
        (tree.id, token)
        for tree in trees
        for segment in tree.segments
        if segment.model == "policy" and segment.label in labels
        for token in segment.tokens
    ]


def weighted(rows, term="policy"):
    return [
        (row.trajectory, token)
        for row in rows
        for token, weight in zip(row.tokens, row.weights.get(term, ()), strict=True)
        if weight
    ]


@given(st.lists(replies, min_size=2, max_size=3))
@settings(max_examples=120, deadline=None)
def test_each_turn_token_and_no_other_has_weight_in_exactly_one_row(drawn):
    trees = [trajectory(f"g/{number}", tree) for number, tree in enumerate(drawn)]
    made = group(trees, failed=trees[:1])
    rows = flatten(made, "policy")
    turns = Counter(tokens_of(trees, "agent", "compaction"))
    assert Counter(weighted(rows)) == turns and set(turns.values()) <= {1}
    [batch] = assemble([made], rows, credit=load_credit(AlgoConfig(), seed=0), model="policy", step=1)
    account = batch.account
    assert account.balanced
    assert (account.auxiliary, account.lost) == tuple(len(tokens_of(trees, label)) for label in UNTRAINED)
    assert account.failed == len(tokens_of(trees[:1], *LABELS))
    assert account.trained + account.filtered + account.zero_advantage == len(turns)
    shares = Counter()
    for row in aggregated(rows, "sequence_mean", 1):
        shares[row.trajectory] += sum(row.weights["policy"])
    assert all(share == pytest.approx(1.0) for share in shares.values()), "all branches are one sequence"
    assert denominator(rows, "sequence_sum") == len({id for id, _ in turns})
    [moved] = Distilled().credit([made], [rows])
    assert Counter(weighted(moved, "distill")) == turns
    [compared] = Pairs().credit([made], [rows])
    if compared:
        assert Counter(weighted(compared, "preference")) == turns


def test_a_lost_reply_before_a_turn_is_context():
    """Where a record labels so: what comes after is trained behind it, and it is not."""
    lost = [(9, "agent", 1, "policy", 1), (0, "lost", 2, "policy", 1), (1, "agent", 1, "policy", 0)]
    [row] = flatten(group([trajectory("g/0", lost)]), "policy")
    assert row.tokens == (1, 2, 3, 4, 5, 6)
    assert row.weights["policy"] == (0, 1, 0, 0, 0, 1)
    assert row.logprobs == (0, -0.5, 0, 0, 0, -0.5)


def test_a_deleted_reply_is_trained_and_a_lost_one_is_not():
    tree = [
        (9, "agent", 1, "policy", 1),
        (0, "agent", 2, "policy", 1),  # malformed: the client went back
        (0, "lost", 3, "policy", 1),  # the connection broke
        (0, "agent", 4, "policy", 1),
        (9, "auxiliary", 5, "policy", 1),
        (3, "compaction", 6, "policy", 1),
    ]
    made = group([trajectory("g/0", tree), trajectory("g/1", tree)])
    [batch] = assemble(
        [made], flatten(made, "policy"), credit=load_credit(AlgoConfig(), seed=0), model="policy", step=1
    )
    assert batch.account == TokenAccount(sampled=42, trained=26, auxiliary=10, lost=6)
    turns = [turn.tokens for turn in made.rollouts[0].trajectories[0].turns]
    assert [len(tokens) for tokens in turns] == [1, 2, 4, 6]


def test_accounts_add_up():
    one = TokenAccount(sampled=7, trained=1, filtered=1, zero_advantage=1, failed=1, auxiliary=2, lost=1)
    assert one.balanced and (one + one) == TokenAccount(
        sampled=14, trained=2, filtered=2, zero_advantage=2, failed=2, auxiliary=4, lost=2
    )
    assert not replace(one, lost=0).balanced
