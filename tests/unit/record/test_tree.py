"""Where a request continues what was sampled, and where it begins anew."""

from __future__ import annotations

import dataclasses

import pytest

from sparring.generation import Completion, Runs, Sampling
from sparring.protocols import Renderer
from sparring.record.identity import message_key
from sparring.record.tree import Tree
from sparring.render.demonstrate import reply_tokens
from sparring.testing.conversations import TOOL, answer, call, say, user
from sparring.testing.toy import toy_renderer
from sparring.types import Message, ToolCall, ToolSpec

TOOLS = (TOOL,)


def ask(tree: Tree, messages: list[Message], reply: Message, tools: tuple[ToolSpec, ...] = TOOLS) -> list[int]:
    """Let the tree record `reply`; returns the path of segment indices from the root to it."""
    turn = tree.plan(messages, tools)
    tokens = reply_tokens(tree.renderer, reply, tools)
    runs = Runs.of(0, len(tokens))
    completion = Completion(
        tokens=tokens, logprobs=(-1.0,) * len(tokens), finish_reason="stop", versions=runs, kv_versions=runs
    )
    tree.append(turn, completion, reply, Sampling(), "policy")
    path = [len(tree.segments) - 1]
    while (parent := tree.segments[path[0]].parent) is not None:
        path.insert(0, parent)
    return path


def tree(renderer: Renderer | None = None) -> Tree:
    """An empty tree over the toy renderer."""
    return Tree(renderer or toy_renderer())


def test_a_conversation_that_grows_is_one_branch():
    t = tree()
    first = [user("Hi"), call("1")]
    assert ask(t, first[:1], first[1]) == [0, 1]
    assert ask(t, [*first, answer("1")], say("One.")) == [0, 1, 2, 3]
    assert ask(t, [*first, answer("1"), say("One."), user("Sure?")], say("Yes.")) == [0, 1, 2, 3, 4, 5]
    assert [s.source for s in t.segments] == ["prompt", "policy", "tool", "policy", "prompt", "policy"]
    assert [s.model for s in t.segments] == [None, "policy"] * 3
    assert t.segments[2].message == answer("1")


def test_the_same_message_in_another_form_is_no_edit():
    t = tree()
    mine = Message(
        role="assistant", tool_calls=(ToolCall(id="call_0", name="python", arguments={"code": "1", "n": 1}),)
    )
    ask(t, [user("Hi")], mine)
    theirs = Message(
        role="assistant",
        content=" ",
        reasoning="",
        tool_calls=(ToolCall(id="x9", name="python", arguments={"n": 1, "code": "1"}),),
    )
    assert theirs != mine and message_key(theirs) == message_key(mine)
    assert ask(t, [user("Hi"), theirs, dataclasses.replace(answer("1"), tool_call_id="x9")], say("1")) == [0, 1, 2, 3]


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
    t = tree()
    ask(t, [user("Hi")], call("1"))
    assert ask(t, edited, say("One.")) == [2, 3]
    assert t.segments[2].tokens == toy_renderer().render(edited, TOOLS).tokens
    assert t.segments[2].source == ("harness" if edited[1].role == "assistant" else "prompt")


def test_a_reply_that_we_did_not_say_is_never_recorded_as_sampled():
    t = tree()
    ask(t, [user("Hi")], say("Hello."))
    foreign = [user("Hi"), say("Hello."), user("And?"), say("Somebody else's."), user("So?")]
    assert ask(t, foreign, say("Well.")) == [2, 3]
    sampled = [token for s in t.segments if s.model for token in s.tokens]
    assert "Somebody" not in toy_renderer().decode(sampled)


def test_two_continuations_fork_where_they_part():
    t = tree()
    ask(t, [user("Hi")], call("1"))
    assert ask(t, [user("Hi"), call("1"), answer("1")], say("One.")) == [0, 1, 2, 3]
    assert ask(t, [user("Hi"), call("1"), answer("2")], say("Two.")) == [0, 1, 4, 5]
    assert ask(t, [user("Hi"), call("1"), answer("2")], say("2.")) == [0, 1, 4, 6], "what was told is stored once"


def test_other_tools_are_another_conversation():
    t = tree()
    ask(t, [user("Hi")], say("Hello."))
    other = (dataclasses.replace(TOOL, description="Another."),)
    assert ask(t, [user("Hi"), say("Hello."), user("So?")], say("Yes."), other) == [2, 3]


def test_a_template_that_rewrites_history_gets_a_new_branch():
    t = tree(toy_renderer(thinking=True))
    ask(t, [user("Hi")], say("A", reasoning="One"))
    assert ask(t, [user("Hi"), say("A", reasoning="One"), user("B")], say("C")) == [2, 3]
    assert "One" not in t.renderer.decode(t.segments[2].tokens)


def test_lines_of_turns_that_extend_each_other_share_a_lane():
    t = tree()
    first = t.plan([user("Hi")], TOOLS)
    ask(t, [user("Hi")], call("1"))
    second, fork = (t.plan([user("Hi"), call("1"), answer(text)], TOOLS) for text in "12")
    assert second.lane != first.lane, "the plan before it took the first lane"
    assert len({first.lane, second.lane, fork.lane}) == 3


def test_a_request_without_a_question_is_an_error():
    for messages in ([], [user("Hi"), say("Hello.")]):
        with pytest.raises(ValueError, match="must end with a message that is no reply"):
            tree().plan(messages, ())
