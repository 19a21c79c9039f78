"""What follows a turn, and what hangs on it: branches, quotes, agents, branches that were left."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from segments import sampled

from sparring.algo.credit.succession import succession
from sparring.types import Evidence, Fork, Outcome, Segment, Trajectory

DONE = Outcome(kind="completed", reason="answered")


class Talk:
    """A trajectory as it grows: turns are named by their numbers."""

    def __init__(self):
        self.segments = []
        self.replies = []

    def ask(self, after=None, *, quotes=(), fork=None, of=None, agent="", label="agent", told=True):
        """A request behind the reply to an earlier one (None: a root), and its reply; `of` names a reply."""
        parent = None if after is None else self.replies[after]
        if told:
            left = None if of is None else self.replies[of]
            said = Segment(index=len(self.segments), parent=parent, source="prompt", tokens=(1,))
            said = replace(said, quotes=tuple(self.replies[q] for q in quotes))
            self.segments.append(replace(said, fork=fork and Fork(reason=fork, of=left, agent=agent)))
            parent = said.index
        reply = sampled(
            len(self.segments),
            parent,
            (2,),
            logprobs=(-1.0,),
            label=label,
            evidence=Evidence(agent=agent) if agent else None,
        )
        self.replies.append(reply.index)
        self.segments.append(reply)
        return self

    def order(self):
        return succession(self.trajectory())

    def trajectory(self):
        return Trajectory(id="t", task="t", role="policy", segments=tuple(self.segments), outcome=DONE)


def test_a_chat_is_followed_turn_by_turn():
    order = Talk().ask().ask(0).ask(1).order()
    assert (order.following, order.main, order.addresses()) == ((1, 2, None), (0, 1, 2), [(0,), (1,), (2,)])
    assert Talk().order().following == ()


def test_sub_agents_are_followed_by_the_turn_after_their_answers():
    """0 starts 1 and 2 at once; 3 is the second turn of the first; 4 reads both answers."""
    talk = Talk().ask()
    talk.ask(fork="agent", of=0, quotes=(0,)).ask(fork="agent", of=0, quotes=(0,)).ask(1).ask(0, quotes=(3, 2))
    order = talk.order()
    assert order.following == (4, 3, 4, 4, None)
    assert order.beside == ((1, 2), (), (), (), ()) and order.main == (0, 4)
    assert order.addresses() == [(0,), (0, 0, 0), (0, 1, 0), (0, 0, 1), (1,)]


def test_a_sub_agents_sub_agent_hangs_on_the_sub_agent():
    talk = Talk().ask().ask(fork="agent", of=0).ask(fork="agent", of=1).ask(1, quotes=(2,)).ask(0, quotes=(3,))
    order = talk.order()
    assert order.following == (4, 3, 3, 4, None) and order.beside == ((1,), (2,), (), (), ())


def test_a_background_agent_hangs_on_the_last_turn_requested_before_it():
    """Nothing tells which call began it, so the last before it and all before that have it to go."""
    talk = Talk().ask().ask(0).ask(fork="agent", agent="b").ask(1).ask(3, quotes=(2,))
    order = talk.order()
    assert order.following == (1, 3, 4, 4, None) and order.beside == ((), (2,), (), (), ())


def test_a_handed_over_conversation_continues_with_the_other_agent():
    order = Talk().ask().ask(fork="agent", of=0, quotes=(0,), agent="b").ask(1, agent="b").order()
    assert order.following == (1, 2, None) and order.main == (0, 1, 2)


def test_a_sub_agent_in_the_same_conversation_is_a_side_chain():
    order = Talk().ask().ask(0, fork="agent", of=0, agent="b").ask(1, agent="b").ask(0, quotes=(2,)).order()
    assert order.following == (3, 2, 3, None) and order.beside[0] == (1,)


@pytest.mark.parametrize("reason", ["edited", "deleted", "inserted", "system", "tools", "template"])
def test_an_abandoned_branch_is_followed_by_its_replacement(reason):
    order = Talk().ask().ask(0).ask(1).ask(fork=reason, of=0).ask(3).order()
    assert order.following == (1, 2, 3, 4, None) and order.beside == ((),) * 5
    unlinked = Talk().ask().ask(0).ask(1).ask().ask(3).order()
    assert unlinked.following == (1, 2, None, 4, None) and unlinked.main == (3, 4)


def test_a_deleted_turn_is_followed_by_its_replacement():
    """1 went on from 0 and was deleted; 2 goes on from 0 in its place."""
    order = Talk().ask().ask(0).ask(0, fork="deleted", of=0).order()
    assert order.following == (2, 2, None) and order.beside == ((1,), (), ()) and order.main == (0, 2)


def test_samples_of_one_request_are_side_chains():
    """Two replies to the same request, of which one is gone on from: nothing follows the other."""
    talk = Talk().ask().ask(0)
    talk.segments.append(replace(talk.segments[-1], index=len(talk.segments)))
    talk.replies.append(len(talk.segments) - 1)
    order = talk.ask(1).order()
    assert order.following == (1, 3, None, None) and order.beside[1] == (2,)


def test_a_summary_is_followed_by_the_branch_that_quotes_it():
    order = Talk().ask().ask(0, label="compaction").ask(fork="compaction", quotes=(1,)).order()
    assert order.following == (1, 2, None) and order.main == (0, 1, 2)


@pytest.mark.parametrize("label", ["lost", "auxiliary"])
def test_a_reply_that_is_no_turn_is_skipped_in_the_succession(label):
    talk = Talk().ask().ask(0, label=label).ask(1).ask(fork="auxiliary", label=label).ask(2, quotes=(1,))
    assert talk.order().following == (1, 2, None)


def test_parallel_agents_do_not_follow_each_other():
    """Roots without a quote: what one agent edited was not left by the other."""
    talk = Talk().ask(agent="a").ask(fork="agent", agent="b").ask(0, agent="a").ask(fork="edited", agent="b")
    order = talk.order()
    assert order.following == (2, 3, None, None) and order.main == (0, 2)


KINDS = ("on", "on", "agent", "deleted", "rewritten", "compaction")
asked = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 20), st.integers(0, 3)),
    min_size=1,
    max_size=9,
)


def talk_of(drawn):
    """Requests that clients make: an agent goes on, goes back a turn, rewrites or sums up its conversation, or starts
    another, whose last reply it quotes once."""
    talk, agents, parents, quoted, starter = Talk(), [], [], set(), {0: None}
    for number, (kind, which, quote) in enumerate(drawn):
        own = agents[which % number] if number else 0
        latest = max((n for n in range(number) if agents[n] == own), default=None)
        ends = [
            max(n for n in range(number) if agents[n] == agent) for agent in sorted({*agents}) if starter[agent] == own
        ]
        open_ends = [end for end in ends if end not in quoted]
        quotes = [open_ends[quote % len(open_ends)]] if quote and open_ends else []
        agents.append(number if kind == "agent" and number else own)
        starter.setdefault(agents[-1], own)
        parent, fork, of = latest, None, None
        if number and kind == "agent":
            parent, fork, of, quotes = None, "agent", latest, []
        elif number and kind == "deleted":
            parent, fork, of = parents[latest], "deleted", parents[latest]
        elif number and kind == "rewritten":
            parent, fork = None, "edited"
            of = which % number if agents[which % number] == own else None
        elif number and kind == "compaction":
            parent, fork, quotes = None, "compaction", [*quotes, latest]
        quoted.update(quotes)
        parents.append(parent)
        talk.ask(parent, quotes=quotes, fork=fork, of=of, agent=str(agents[-1]))
    return talk


@given(asked)
@settings(max_examples=150, deadline=None)
def test_a_return_counts_every_reward_once_at_most_and_the_outcome_once(drawn):
    """Of any tree with any links: the return of a turn is a sum of rewards in which none stands twice, with its own,
    those behind it on its branch and the outcome among them, and none from before it."""
    talk = talk_of(drawn)
    order, turns = talk.order(), talk.trajectory().turns
    count = len(turns)
    assert all(follows is None or follows > turn for turn, follows in enumerate(order.following))
    assert sorted(turn for chain in order.chains.values() for turn in chain) == list(range(count))
    hanging = [first for of in order.beside for first in of]
    assert len(set(hanging)) == len(hanging) and set(hanging) <= set(order.chains)
    assert len(set(order.addresses())) == count
    steps = order.steps([1] * count)
    assert len({place.address for place in steps}) == count
    assert all(place.before is None or place.before < step for step, place in enumerate(steps))

    def returns(rewards, rest):
        to_go = order.earned([[reward] for reward in rewards], 1.0, rest)
        for turn in reversed(range(count)):
            follows = order.following[turn]
            to_go[turn][0] += 0.0 if follows is None else to_go[follows][0]
        return [value for [value] in to_go]

    assert returns([0.0] * count, 1.0) == [1.0] * count, "the outcome"
    for earning in range(count):
        counted = returns([float(turn == earning) for turn in range(count)], 0.0)
        assert set(counted) <= {0.0, 1.0} and counted[earning] == 1.0
        assert not any(counted[earning + 1 :]), "what was earned before"
        above = {s.index for s in talk.trajectory().path(turns[earning].index)}
        assert all(counted[turn] == 1.0 for turn in range(count) if turns[turn].index in above)
