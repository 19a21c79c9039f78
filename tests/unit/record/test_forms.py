"""What clients do to a conversation and what is still the same: the next prompt is the recorded ids and what is new."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from common.planned import planned
from conversations import SYSTEM, TOOL, answer, say, user
from unit.record.played import TOOLS, record
from virtual import on_virtual_clock

from sparring.algo.credit.succession import succession
from sparring.record.recorder import Recorder
from sparring.record.text_tree import TextTree
from sparring.record.tree import Tree
from sparring.render.demonstrate import reply_tokens
from sparring.reply import NO_EVIDENCE
from sparring.testing.clock import run_virtual
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import toy_renderer, toy_task
from sparring.types import Evidence, Fork, Limits, Message, Outcome, ToolCall, Trajectory

RENDERER = toy_renderer()


def calls(*codes: str, content: str = "", reasoning: str | None = None) -> Message:
    """A reply that calls the tool several times at once."""
    made = tuple(
        ToolCall(id=f"call_0_{n}", name="python", arguments={"code": c, "n": 10000.0}) for n, c in enumerate(codes)
    )
    return Message(role="assistant", content=content, reasoning=reasoning, tool_calls=made)


def leaves(tree: Tree, messages: list[Message], tools=TOOLS, evidence: Evidence = NO_EVIDENCE) -> Fork | None:
    """Why the segment that such a request adds leaves the others; None where it goes on."""
    record(tree, messages, say("Then."), tools, evidence)
    added = max((s for s in tree.segments if s.model is None), key=lambda s: s.index)
    return added.fork


START = [SYSTEM, user("Hi")]
REPLY = calls("1", "2", content="So: ", reasoning="Hm.")
MALFORMED_TEXT = '{"name": "python", "argum'
MALFORMED = Message(
    role="assistant",
    content="Well: ",
    tool_calls=(
        ToolCall(id="call_0_0", name="python", arguments=None, raw=MALFORMED_TEXT),
        ToolCall(id="call_0_1", name="python", arguments={"code": "2"}),
    ),
)
NO_NAME = Message(role="assistant", tool_calls=(ToolCall(id="call_0_0", name="", arguments=None, raw='{"code": "1"}'),))


def renumbered(message: Message) -> Message:
    """The reply with the client's own ids of calls."""
    return replace(message, tool_calls=tuple(replace(c, id=f"x{n}") for n, c in enumerate(message.tool_calls)))


def with_argument(**arguments: str) -> ToolCall:
    """The malformed call as its client sends it back."""
    return replace(MALFORMED.tool_calls[0], arguments=arguments, raw="")


def with_arguments(change: Callable[[dict], dict]) -> Message:
    """The reply with other arguments."""
    return replace(
        REPLY, tool_calls=tuple(replace(call, arguments=change(dict(call.arguments))) for call in REPLY.tool_calls)
    )


@pytest.mark.parametrize(
    ("reply", "sent"),
    [
        pytest.param(MALFORMED, [replace(MALFORMED, content="Well:")], id="malformed as a call"),
        pytest.param(
            MALFORMED,
            [replace(MALFORMED, tool_calls=(with_argument(), MALFORMED.tool_calls[1]))],
            id="malformed that its client mended",
        ),
        pytest.param(
            MALFORMED,
            [replace(MALFORMED, tool_calls=(replace(with_argument(why="?"), name="invalid"), MALFORMED.tool_calls[1]))],
            id="malformed that its client renamed",
        ),
        pytest.param(
            NO_NAME,
            [Message(role="assistant", tool_calls=(ToolCall(id="x", name="", arguments={"code": "1"}),))],
            id="malformed that is JSON",
        ),
    ],
)
def test_a_reply_in_another_form_is_the_same(reply: Message, sent: list[Message]):
    tree = Tree(RENDERER)
    record(tree, START, reply)
    assert leaves(tree, [*START, *sent, answer("1"), answer("2")]) is None
    assert [s.parent for s in tree.segments] == [None, 0, 1, 2], "one branch"
    again = [*START, *sent, answer("1"), answer("2"), say("Then."), user("And?")]
    assert leaves(tree, again) is None and tree.segments[-1].parent == 4, "and it stays one"


NUMBERS = '{"a": [1e4, -0.0, 1e21, 9007199254740993], "b": {"c": 0.1, "d": 5e-324, "e": 1.0}}'
AS_JAVASCRIPT = '{"b": {"e": 1, "d": 5e-324, "c": 0.1}, "a": [10000, 0, 1000000000000000000000, 9007199254740992]}'


def test_numbers_of_the_same_double_are_equal_in_any_notation():
    def called(text: str) -> Message:
        call = ToolCall(id="call_0_0", name="python", arguments=json.loads(text))
        return Message(role="assistant", tool_calls=(call,))

    tree = Tree(RENDERER)
    record(tree, START, called(NUMBERS))
    assert leaves(tree, [*START, called(AS_JAVASCRIPT), answer("1")]) is None
    for other in (("1e4", "10001"), ("0.1", "0.10000000000000002"), ('"e": 1.0', '"e": true'), ("1e4", '"10000"')):
        fork = leaves(tree, [*START, called(NUMBERS.replace(*other)), answer("1")])
        assert fork is not None and fork.reason == "edited", other


@pytest.mark.parametrize("change", [lambda a: {**a, "more": None}, lambda a: {"code": a["code"]}, lambda a: {}])
def test_an_argument_that_is_added_or_dropped_is_an_edit(change: Callable[[dict], dict]):
    tree = Tree(RENDERER)
    record(tree, START, REPLY)
    fork = leaves(tree, [*START, with_arguments(change), answer("1"), answer("2")])
    assert fork is not None and fork.reason == "edited" and fork.before != fork.after


def test_forms_of_a_malformed_call_are_recognised_by_the_sessions_ids_alone():
    theirs = replace(MALFORMED, tool_calls=tuple(replace(c, id=f"f:{n}") for n, c in enumerate(MALFORMED.tool_calls)))
    tree = Tree(RENDERER)
    record(tree, START, theirs)
    mended = replace(theirs, tool_calls=(replace(with_argument(), id="f:0"), theirs.tool_calls[1]))
    fork = leaves(tree, [*START, mended, answer("1"), answer("2")])
    assert fork is not None and fork.reason == "edited", "a format writes its own ids again"


@pytest.mark.parametrize("reply", [calls("1", "2", "3"), MALFORMED], ids=["calls", "malformed"])
def test_reordered_calls_and_answers_are_recognised_by_their_ids(reply: Message):
    tree = Tree(RENDERER)
    record(tree, START, reply)
    moved = replace(reply, tool_calls=reply.tool_calls[::-1])
    told = [Message(role="tool", content=call.id, tool_call_id=call.id) for call in reply.tool_calls]
    asked = [*START, moved, told[-1], *told[:-1]]
    assert leaves(tree, asked) is None
    assert leaves(tree, [*asked[:3], *told, say("Then."), user("Go on.")]) is None, "told once, it goes on"
    theirs = Tree(RENDERER)
    other = replace(reply, tool_calls=tuple(replace(call, id=f"f:{call.id}") for call in reply.tool_calls))
    record(theirs, START, other)
    fork = leaves(theirs, [*START, replace(other, tool_calls=other.tool_calls[::-1]), *told])
    assert fork is not None and fork.reason == "edited", "a format writes its own ids again"


def test_an_experts_calls_interleaved_with_answers_are_one_reply_with_the_clients_ids():
    tree, reply = TextTree("expert"), calls("1", "2", "3", content="So:")
    tree.answer(tree.ask(tree.plan(START, TOOLS)), reply, NO_EVIDENCE, None)
    first, *others = renumbered(reply).tool_calls
    sent = [replace(reply, tool_calls=(first,)), answer("0")]
    for number, one in enumerate(others, 1):
        sent += [Message(role="assistant", tool_calls=(one,)), answer(str(number))]
    tree.ask(tree.plan([*START, *sent], TOOLS))
    assert [s.parent for s in tree.segments] == [None, 0, 1, 2, 3, 4]
    assert [s.message.role for s in tree.segments] == ["system", "user", "assistant", "tool", "tool", "tool"]


def test_calls_of_separate_replies_are_not_parts_of_an_equal_single_reply():
    tree, (first, second) = Tree(RENDERER), (calls("1"), replace(calls("2"), tool_calls=calls("1", "2").tool_calls[1:]))
    record(tree, START, calls("1", "2"))
    record(tree, START, first)
    sent = [*START, renumbered(first), answer("1")]
    place = record(tree, sent, second)
    assert planned(tree, [*sent, renumbered(second), answer("2")], TOOLS).parent == place
    again = [*START, renumbered(first), answer("other"), renumbered(second), answer("2")]
    assert planned(tree, again, TOOLS).parent == 1, "nothing else is known of it: the reply that had both"


def test_two_replies_with_the_formats_same_call_id_stay_separate():
    """Formats that write ids themselves begin to count anew."""
    tree = Tree(RENDERER)
    first, second = (replace(calls(c), tool_calls=(replace(calls(c).tool_calls[0], id="f:0"),)) for c in "12")
    record(tree, START, first)
    record(tree, [*START, first, answer("1")], second)
    assert leaves(tree, [*START, replace(first), answer("1"), replace(second), answer("2")]) is None


@on_virtual_clock
async def test_loading_a_tool_is_no_fork_and_the_tool_can_be_called():
    """The prompt has such a tool in the text of an answer; the list of tools stays."""
    session = Recorder(ScriptedEngine(lambda request: reply_tokens(RENDERER, calls("1", "2"), TOOLS)), RENDERER).open(
        toy_task(limits=Limits(max_turns=9, max_tool_calls=99, max_tokens=9999)), rollout_id="r", seed=1
    )
    messages = list(START)
    for text in ('{"name": "python", "parameters": {}}', "loaded"):
        reply = await session.complete(messages, TOOLS[1:])
        assert [(call.name, call.arguments["code"]) for call in reply.tool_calls] == [
            ("python", "1"),
            ("python", "2"),
        ]
        messages += [reply, answer(text), answer("2")]
    assert [s.parent for s in session.segments] == [None, 0, 1, 2]


def test_of_equal_replies_the_named_or_else_the_last_delivered_one_continues():
    tree = Tree(RENDERER)
    places = [record(tree, START, say("Yes.")) for _ in range(3)]
    assert len(set(places)) == 3

    def goes_on_at(evidence: Evidence = NO_EVIDENCE) -> int | None:
        return planned(tree, [*START, say("Yes."), user("So?")], TOOLS, evidence).parent

    assert [goes_on_at(Evidence(handle=f"msg_rl/1/2#{place}")) for place in places] == places
    assert goes_on_at() == places[2] == goes_on_at(Evidence(handle="of nobody"))
    assert tree.deliver(f"r#{places[2]}", False) is not None and goes_on_at() == places[1]


def test_call_ids_and_agents_distinguish_equal_replies():
    tree = Tree(RENDERER)
    twins = [replace(calls("1"), tool_calls=(replace(calls("1").tool_calls[0], id=f"call_{n}_0"),)) for n in range(3)]
    places = [record(tree, START, twin, evidence=Evidence(agent=f"agent {n}")) for n, twin in enumerate(twins)]
    for twin, place in zip(twins, places, strict=True):
        assert planned(tree, [*START, replace(twin), answer("1")], TOOLS).parent == place
        assert (
            planned(tree, [*START, twins[0], answer("1")], TOOLS, Evidence(handle=twin.tool_calls[0].id)).parent
            == place
        )
    for number, place in enumerate(places):
        sent = [*START, renumbered(twins[0]), answer("1")]
        assert planned(tree, sent, TOOLS, Evidence(agent=f"agent {number}")).parent == place


def test_thoughts_distinguish_equal_replies():
    tree = Tree(RENDERER)
    places = [record(tree, START, say("Yes.", reasoning=thought)) for thought in ("One.", "Two.")]
    for thought, place in (("One.", places[0]), ("Two.", places[1]), (None, places[1]), ("", places[1])):
        assert planned(tree, [*START, say("Yes.", reasoning=thought), user("So?")], TOOLS).parent == place
    assert planned(tree, [*START, say("Yes.", reasoning="Three."), user("So?")], TOOLS).parent is None, "an edit"


TALK = [*START, say("One."), user("Two?"), say("Three."), user("Four?"), say("Five.")]


@pytest.mark.parametrize(
    ("messages", "tools", "evidence", "expected"),
    [
        (
            [Message(role="system", content="Be terse."), *TALK[1:], user("?")],
            TOOLS,
            {},
            ("system", None, 0, 3, "brief.", "terse."),
        ),
        ([*TALK, user("?")], TOOLS[:1], {}, ("tools", 5, 7, 2, "python", "python")),
        ([*TALK[:3], user("Too?"), *TALK[4:], user("?")], TOOLS, {}, ("edited", 1, 3, 1, "wo?", "oo?")),
        ([*TALK[:4], say("Thre"), *TALK[5:], user("?")], TOOLS, {}, ("edited", 2, 4, 4, "e.", "")),
        ([*TALK[:2], *TALK[4:], user("?")], TOOLS, {}, ("deleted", 0, 2, 0, "One.", "Three.")),
        ([*TALK[:2], say("One.", reasoning="Hm."), *TALK[3:], user("?")], TOOLS, {}, ("edited", 0, 2, 0, "", "Hm.")),
        ([*TALK[:2], say("Mine."), user("!"), *TALK[2:], user("?")], TOOLS, {}, ("inserted", 0, 2, 0, "One.", "Mine.")),
        (
            [*START[:1], user("A title for: Hi")],
            (),
            {"label": "auxiliary"},
            ("auxiliary", 0, 1, 0, "Hi", "A title for: Hi"),
        ),
        ([*START[:1], user("Find the cause.")], TOOLS, {"agent": "sub"}, ("agent", 0, 1, 0, "Hi", "Find the cause.")),
        (
            [*START[:1], user("In short: all is well.")],
            TOOLS,
            {"label": "compaction"},
            ("compaction", 0, 1, 0, "Hi", "In short: all is well."),
        ),
    ],
)
def test_a_fork_has_its_reason_and_the_first_difference(messages, tools, evidence, expected):
    tree = Tree(RENDERER)
    for end in (2, 4, 6):
        record(tree, TALK[:end], TALK[end])
    fork = leaves(tree, messages, tools, Evidence(**evidence))
    reason, of, message, byte, before, after = expected
    assert fork is not None and (fork.reason, fork.of, fork.message) == (reason, of, message)
    if reason != "tools":
        assert (fork.byte, fork.before, fork.after) == (byte, before, after)
    assert fork.agent == evidence.get("agent", "") and fork.before != fork.after


def test_a_second_continuation_has_the_difference_to_the_first():
    tree = Tree(RENDERER)
    record(tree, START, calls("1"))
    assert leaves(tree, [*START, calls("1"), answer("one")]) is None
    fork = leaves(tree, [*START, calls("1"), answer("öne")])
    assert fork == Fork(reason="edited", of=1, message=3, byte=0, before="one", after="öne")
    assert leaves(tree, [*START, calls("1"), answer("one"), user("Go on.")]) == Fork(
        reason="edited", of=1, message=4, byte=0, before="Then.", after="Go on."
    )


def test_sub_agents_and_summaries_are_linked_by_quotes():
    tree = Tree(RENDERER)
    prompt, found, summary = "Look for the cause of it.", "The cause is in line 12.", "We looked, and it is line 12."
    task = calls(prompt)
    record(tree, START, task)
    assert leaves(tree, [Message(role="system", content="You look."), user(prompt)], (TOOL,)).reason == "agent"
    root = tree.segments[2]
    assert root.quotes == (1,) and root.tools == (TOOL,)
    sub = [Message(role="system", content="You look."), user(prompt), say("Then.")]
    record(tree, [*sub, user("And?")], say(found), (TOOL,))
    main = [*START, task, answer(f"[{found}]")]
    assert leaves(tree, main) is None
    assert tree.segments[6].quotes == (5,) and tree.segments[6].parent == 1, "its answer"
    record(tree, [*main, say("Then."), user("Sum up.")], say(summary))
    fork = leaves(tree, [SYSTEM, user(f"So far: {summary}"), user("Go on.")])
    assert fork is not None and fork.reason == "compaction" and fork.of == 0
    last = tree.segments[-2]
    assert last.quotes == (9,) and tree.segments[9].label == "compaction" and tree.segments[9].message == say(summary)
    outcome = Outcome(kind="completed", reason="answered")
    recorded = Trajectory(id="t", task="t", role="policy", segments=tuple(tree.segments), outcome=outcome)
    order = succession(recorded)
    assert order.following == (3, 2, 3, 4, 5, None) and order.beside[0] == (1,), "credit follows these links"


def test_a_client_that_rewrites_calls_stays_the_same_agent():
    """smolagents does: each call is told as text, which quotes it as the task of a sub-agent would be."""
    tree, told = Tree(RENDERER), list(START)
    for command in ("echo 42 > answer.txt", "cat answer.txt && ls", "rm -r build/ && ls"):
        record(tree, told, calls(command))
        told = [*told, say(f"Calling tools: {command}"), user(f"Observation of {command}")]
        assert leaves(tree, told).reason == "edited"
    record(tree, told, say("The answer is there."))
    outcome = Outcome(kind="completed", reason="answered")
    recorded = Trajectory(id="t", task="t", role="policy", segments=tuple(tree.segments), outcome=outcome)
    assert recorded.answer is not None and recorded.answer.message == say("The answer is there.")


def test_short_texts_are_no_quotes():
    tree = Tree(RENDERER)
    record(tree, START, say("Yes."))
    record(tree, [SYSTEM, user("Ho")], say("No."))
    assert leaves(tree, [SYSTEM, user("Ho"), say("No."), user("You said: Yes. and No.")]) is None
    assert tree.segments[-2].quotes == ()


@pytest.mark.parametrize("name", ["qwen3", "template"])
def test_earlier_thoughts_stay_unless_the_template_drops_them(name: str):
    first, more = say("Then.", reasoning="Hm, let me see."), [answer("1"), user("<reminder>Go on.</reminder>")]
    for thoughts in ("kept", "template"):
        renderer = toy_renderer(name=name, thinking=True, thoughts=thoughts)
        session = Recorder(ScriptedEngine(lambda request: reply_tokens(renderer, first, TOOLS)), renderer).open(
            toy_task(limits=Limits(max_turns=9)), rollout_id="r", seed=1
        )

        async def talk() -> None:
            messages = list(START)
            for new in ([], more, [user("And?")]):
                messages += new
                reply = await session.complete(messages, TOOLS)
                assert reply == first
                messages.append(replace(reply, reasoning=None))

        run_virtual(talk())
        roots = [s for s in session.segments if s.parent is None]
        assert [s.fork and s.fork.reason for s in roots[1:]] == ([] if thoughts == "kept" else ["template"] * 2)


def test_a_summary_quoted_without_tags_before_kept_messages_is_a_compaction():
    """claude-code asks for it in the place of the last turn, and retains that turn behind what it quotes."""
    tree = Tree(RENDERER)
    record(tree, START, calls("1"))
    ask = user("Do not call tools. Sum up.")
    record(tree, [*START, ask], say("<analysis>Well.</analysis>\n<summary>\nWe looked at line 12 of it.\n</summary>"))
    kept = [calls("1"), answer("one"), user("Go on."), user("Now."), user("Here."), user("There.")]
    fork = leaves(tree, [SYSTEM, user("Summary:\nWe looked at line 12 of it."), *kept])
    assert fork is not None and fork.reason == "compaction"
    summary = next(segment for segment in tree.segments if segment.label == "compaction")
    assert "<summary>" in summary.message.content
    request = tree.segments[summary.parent]
    assert request.fork is None or request.fork.reason == "compaction"
