"""Where a request continues what was sampled, and where it begins anew."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from common.appending import AppendingRenderer
from common.planned import planned
from conversations import TOOL, answer, call, say, user
from unit.record.played import record

from sparring.generation import Completion, Runs, Sampling
from sparring.record.tree import Tree
from sparring.render.demonstrate import reply_tokens
from sparring.testing.toy import toy_renderer
from sparring.types import Message, ToolCall

TOOLS = (TOOL,)


def ask(tree: Tree, messages: list[Message], reply: Message) -> list[int]:
    """Let the tree record `reply`; returns the path of segment indices from the root to it."""
    record(tree, messages, reply, TOOLS)
    path = [len(tree.segments) - 1]
    while (parent := tree.segments[path[0]].parent) is not None:
        path.insert(0, parent)
    return path


def test_a_conversation_that_grows_is_one_branch():
    t = Tree(toy_renderer())
    first = [user("Hi"), call("1")]
    assert ask(t, first[:1], first[1]) == [0, 1]
    assert ask(t, [*first, answer("1")], say("One.")) == [0, 1, 2, 3]
    assert ask(t, [*first, answer("1"), say("One."), user("Sure?")], say("Yes.")) == [0, 1, 2, 3, 4, 5]
    assert [s.source for s in t.segments] == ["prompt", "policy", "tool", "policy", "prompt", "policy"]
    assert [s.model for s in t.segments] == [None, "policy"] * 3
    assert t.segments[2].message == answer("1")


@pytest.mark.parametrize(
    "edited",
    [
        [user("Hi!"), call("1"), answer("1")],  # the question was changed
        [user("Hi"), call("2"), answer("1")],  # our own reply was changed
        [user("Hi"), call("1", reasoning="Hm."), answer("1")],  # a thought was put into our mouth
        [user("A summary of it all"), answer("1")],  # the history was compacted
    ],
)
def test_an_edited_history_begins_a_new_branch(edited):
    t = Tree(toy_renderer())
    ask(t, [user("Hi")], call("1"))
    assert ask(t, edited, say("One.")) == [2, 3]
    assert t.segments[2].tokens == toy_renderer().render(edited, TOOLS).tokens
    assert t.segments[2].source == ("harness" if edited[1].role == "assistant" else "prompt")


def test_a_reply_of_the_client_is_never_recorded_as_sampled():
    t = Tree(toy_renderer())
    ask(t, [user("Hi")], say("Hello."))
    foreign = [user("Hi"), say("Hello."), user("And?"), say("Somebody else's."), user("So?")]
    assert ask(t, foreign, say("Well.")) == [2, 3]
    sampled = [token for s in t.segments if s.model for token in s.tokens]
    assert "Somebody" not in toy_renderer().decode(sampled)


def test_two_continuations_fork_at_their_difference():
    t = Tree(toy_renderer())
    ask(t, [user("Hi")], call("1"))
    assert ask(t, [user("Hi"), call("1"), answer("1")], say("One.")) == [0, 1, 2, 3]
    assert ask(t, [user("Hi"), call("1"), answer("2")], say("Two.")) == [0, 1, 4, 5]
    assert ask(t, [user("Hi"), call("1"), answer("2")], say("2.")) == [0, 1, 4, 6], "what was told is stored once"


def test_turns_that_extend_each_other_share_a_lane():
    t = Tree(toy_renderer())
    first = planned(t, [user("Hi")], TOOLS)
    ask(t, [user("Hi")], call("1"))
    second, fork = (planned(t, [user("Hi"), call("1"), answer(text)], TOOLS) for text in "12")
    assert second.lane != first.lane, "the plan before it took the first lane"
    assert len({first.lane, second.lane, fork.lane}) == 3


def test_a_request_without_a_message_is_an_error():
    with pytest.raises(ValueError, match="must have a message"):
        planned(Tree(toy_renderer()), [], ())


class Read(Mapping[str, int]):
    """Arguments of a call that count how often they are read."""

    def __init__(self) -> None:
        self.times = 0

    def __getitem__(self, key: str) -> int:
        return 1

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[str]:
        self.times += 1
        return iter(("x",))


def size(root: object) -> int:
    """Bytes of all that an object holds, each once: what it refers to, through containers and slots."""
    seen: set[int] = set()
    waiting: list[Any] = [root]
    total = 0
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, type):
            continue
        seen.add(id(one))
        total += sys.getsizeof(one)
        if isinstance(one, dict):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, tuple | list | set):
            waiting += one
        else:
            waiting += [getattr(one, name) for name in getattr(type(one), "__slots__", ()) if hasattr(one, name)]
    return total


def long_session(turns: int, branches: int = 1) -> tuple[Tree, list[Message]]:
    """Lines of turns in turn, 64 ids said and 64 told in each; and the replies."""
    t, replies = Tree(AppendingRenderer()), []
    lines = [[user("1000")] for _ in range(branches)]
    for turn in range(turns):
        for number, messages in enumerate(lines):
            tokens = (*range(1000 * turn + number + 1, 1000 * turn + number + 64), 0)
            runs = Runs.of(0, 64)
            logprobs = tuple(-1.0 / (turn + at + 1) for at in range(64))
            completion = Completion(
                tokens=tokens, logprobs=logprobs, finish_reason="stop", versions=runs, kv_versions=runs
            )
            said = ToolCall(id="call_0", name="f", arguments=Read())
            reply = dataclasses.replace(t.renderer.parse(tokens, ()), tool_calls=(said,))
            t.append(planned(t, messages, ()), completion, reply, Sampling(), "policy")
            replies.append(reply)
            messages += [reply, answer(" ".join(str(2000 * turn + number + at) for at in range(63)))]
    return t, replies


@pytest.mark.parametrize("branches", [1, 16])
def test_the_memory_of_a_record_is_proportional_to_its_ids(branches):
    a_token = []
    for turns in (8, 128):
        t, _ = long_session(turns, branches)
        a_token.append(size(t) / sum(len(segment.tokens) for segment in t.segments))
    assert a_token[1] < 1.1 * a_token[0] and max(a_token) < 150


@pytest.mark.parametrize("branches", [1, 16])
def test_a_late_turn_reads_no_more_than_an_early_one(branches):
    for turns in (8, 128):
        t, replies = long_session(turns, branches)
        assert t.renderer.bridged <= 128 * turns * branches, "a bridge is given the last told and the last said"
        assert max(reply.tool_calls[0].arguments.times for reply in replies) == 1


def test_a_prompt_is_all_messages_and_replies():
    t, replies = long_session(3)
    conversation = [user("1000")]
    for turn, reply in enumerate(replies):
        conversation += [reply, answer(" ".join(str(2000 * turn + at) for at in range(63)))]
        turn = planned(t, conversation, ())
        assert t.prompt(turn) == t.renderer.render(conversation, ()).tokens
        assert turn.length == len(t.prompt(turn)) and turn.source == "tool"


def test_equal_messages_in_other_objects_continue_the_same_lane():
    t = Tree(toy_renderer())
    first = [user("Hi"), call("1")]
    ask(t, first[:1], first[1])
    for turn in range(3):
        lane = planned(t, [*map(dataclasses.replace, first), answer(str(turn))], TOOLS).lane
        assert lane == turn, "the first goes on with the lane, the others fork"
    same = [user("Hi"), dataclasses.replace(first[1]), answer("1")]
    assert ask(t, same, say("One.")) == [0, 1, 2, 3]
    assert ask(t, [*same, say("One."), user("So?")], say("Yes.")) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "template"])
def test_a_bridge_only_needs_the_end_of_a_prompt(name, thinking):
    renderer = toy_renderer(name=name, thinking=thinking)
    prompt = renderer.render([user("Hi"), call("1"), answer("1")], TOOLS).tokens
    turn = renderer.render([user("Hi"), call("1")], TOOLS, generation=False).tokens
    said = reply_tokens(renderer, call("2"), TOOLS)
    whole, end = (renderer.bridge(p, said, [answer("2")], TOOLS) for p in (prompt, prompt[len(turn) - 1 :]))
    assert whole[len(prompt) :] == end[len(prompt) - len(turn) + 1 :]


@pytest.mark.parametrize("kind", [list, tuple])
def test_an_early_edit_before_an_unchanged_reply_is_noticed(kind):
    t = Tree(toy_renderer())
    talk = [user("Hi"), call("1"), answer("1"), say("One.")]
    ask(t, kind(talk[:1]), talk[1])
    assert ask(t, kind(talk[:3]), talk[3]) == [0, 1, 2, 3]
    for edited in ([user("Ho"), *talk[1:]], [talk[0], call("2"), *talk[2:]], [*talk[:2], answer("2"), talk[3]]):
        assert planned(t, kind([*edited, user("Sure?")]), TOOLS).parent != 3
    assert planned(t, kind([*talk, user("Sure?")]), TOOLS).parent == 3
