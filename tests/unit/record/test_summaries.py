"""Why conversations leave others: which quote is a summary that an agent goes on from, and which is none."""

from __future__ import annotations

import pytest
from common.planned import planned
from conversations import SYSTEM, TOOL, answer, say, user

from sparring.generation import Completion, Runs, Sampling
from sparring.record.tree import Tree
from sparring.render.demonstrate import reply_tokens
from sparring.reply import NO_EVIDENCE
from sparring.testing.toy import toy_renderer
from sparring.types import Evidence, Message, ToolCall, ToolSpec

RENDERER = toy_renderer()
Turn = tuple[list[Message], Message]
"""A request and its reply."""


def system(content: str) -> Message:
    return Message(role="system", content=content)


def runs(code: str) -> Message:
    return Message(role="assistant", tool_calls=(ToolCall(id="call_0_0", name="python", arguments={"code": code}),))


def reasons(*turns: Turn, tools: tuple[ToolSpec, ...] = (), label: Evidence = NO_EVIDENCE) -> list[str]:
    """Why each request left the others, empty where it goes on or is the first; behind it what its reply is in the end,
    where that is no agent's turn. `label`: of the last but one."""
    tree, forks = Tree(RENDERER), []
    for number, (messages, reply) in enumerate(turns, 2):
        turn = planned(tree, messages, tools, label if number == len(turns) else NO_EVIDENCE)
        tokens = reply_tokens(RENDERER, reply, tools)
        version = Runs.of(0, len(tokens))
        logprobs = (-1.0,) * len(tokens)
        completion = Completion(
            tokens=tokens, logprobs=logprobs, finish_reason="stop", versions=version, kv_versions=version
        )
        tree.append(turn, completion, reply, Sampling(), "policy")
        forks.append((turn.input_place, turn.place))
    by_place = {segment.index: segment for segment in tree.segments}
    found = []
    for asked, place in forks:
        fork, kind = by_place[asked].fork, by_place[place].label
        found.append(" ".join(["" if fork is None else fork.reason, *([kind] if kind != "agent" else [])]).strip())
    return found


TASK = user("You are in a house. What do you do?")
ACTS = [say("I walk to the north door."), say("I open the north door now."), say("I take the golden key here.")]
SEEN = [user(f"Observation {n}: you see a long corridor.") for n in range(3)]


def test_an_edited_history_is_an_edit_even_if_it_quotes_replies() -> None:
    told = user("Do the task, please. <reminder>one</reminder>")
    forty_two = say("The answer is forty-two.")
    edited = [user("Do the task, please."), forty_two, user("Go on.")]
    assert reasons(([told], forty_two), (edited, say("Done."))) == ["", "edited"]
    for before in ([], [SYSTEM]):
        turns, history = [], [*before, TASK]
        for act, seen in zip(ACTS, SEEN, strict=True):
            turns.append((history, act))
            short = [user("(old)") if message.role == "user" else message for message in history]
            history = [*short, act, seen]
        assert reasons(*turns) == ["", "edited", "edited"]
        assert reasons(*turns, tools=(TOOL,)) == ["", "edited", "edited"]
        dropped = [*before, user("(old)"), ACTS[1], SEEN[1]]
        assert "compaction" not in "".join(reasons(*turns[:2], (dropped, ACTS[2]), tools=(TOOL,)))


@pytest.mark.parametrize("judge", [[], [SYSTEM], [system("You judge.")]], ids=["none", "the same", "its own"])
@pytest.mark.parametrize("tools", [(), (TOOL,)], ids=["no tools", "tools"])
def test_a_judge_that_quotes_a_reply_is_no_compaction(judge: list[Message], tools: tuple[ToolSpec, ...]) -> None:
    question = [SYSTEM, TASK]
    asks = [*judge, user(f"One said: {ACTS[0].content} The other: {ACTS[1].content} Which is better?")]
    found = reasons((question, ACTS[0]), (question, ACTS[1]), (asks, say("The first.")), tools=tools)
    assert "compaction" not in " ".join(found)


@pytest.mark.parametrize("own", [[], [SYSTEM]], ids=["no system message", "one for both"])
def test_a_critic_of_each_turn_is_no_compaction_of_a_text_agent(own: list[Message]) -> None:
    turns: list[Turn] = []
    history = [*own, TASK]
    for act, seen in zip(ACTS, SEEN, strict=True):
        turns.append((list(history), act))
        turns.append(
            ([*own, user(f"The player did this: {act.content} Was it good?")], say("It was a good step, I say."))
        )
        history += [act, user(f"{seen.content} (critic: It was a good step, I say.)")]
    assert "compaction" not in " ".join(reasons(*turns))


SUMMARY = "The folder was read, and the answer 42 goes into the file."
WORK = [SYSTEM, TASK, runs("1"), answer("one"), runs("2"), answer("two")]
GROWN: list[Turn] = [(WORK[:2], WORK[2]), (WORK[:4], WORK[4]), (WORK, runs("3"))]
"""An agent with tools whose context is filling up."""

RESUMED = user(f"The conversation so far was summed up: <summary>{SUMMARY}</summary>")
ELSEWHERE = [system("You sum up conversations."), user("[user] ... [assistant] ... [tool] one, two")]


@pytest.mark.parametrize(
    ("asks", "goes_on"),
    [
        pytest.param([*WORK, user("Sum it up.")], [SYSTEM, TASK, RESUMED], id="codex: behind the conversation"),
        pytest.param(
            [*WORK[:2], user("Sum it up.")], [SYSTEM, RESUMED, *WORK[4:]], id="claude-code: the last turn kept"
        ),
        pytest.param([SYSTEM, *WORK[2:4], user("Sum up.")], [SYSTEM, RESUMED], id="claude-code: the oldest left out"),
        pytest.param(ELSEWHERE, [SYSTEM, RESUMED, *WORK[4:]], id="pi: by an agent that sums up, the latest kept"),
        pytest.param(ELSEWHERE, [SYSTEM, TASK, RESUMED, say("Got it. Thanks!"), user("Go on.")], id="qwen-code"),
        pytest.param(
            ELSEWHERE, [SYSTEM, user("What did we do so far?"), say(SUMMARY), user("Go on.")], id="opencode: as a reply"
        ),
        pytest.param([user(f"Events: {WORK[3].content}")], [SYSTEM, TASK, RESUMED, *WORK[4:]], id="openhands"),
    ],
)
def test_compactions_of_known_clients_are_recognised(asks: list[Message], goes_on: list[Message]) -> None:
    found = reasons(*GROWN, (asks, say(f"<summary>{SUMMARY}</summary>")), (goes_on, runs("4")), tools=(TOOL,))
    assert found[-1] == "compaction" and found[-2].endswith("compaction")


def test_an_agent_without_tools_needs_another_agents_summary_or_the_clients_label() -> None:
    talk = [SYSTEM, TASK, ACTS[0], SEEN[0], ACTS[1], SEEN[1]]
    grown = [(talk[:2], talk[2]), (talk[:4], talk[4]), (talk, ACTS[2])]
    condensed = (ELSEWHERE, say(SUMMARY)), ([SYSTEM, TASK, RESUMED, SEEN[2]], say("Done."))
    assert reasons(*grown, *condensed)[-1] == "compaction"
    asks = ([*talk, ACTS[2], user("Sum it up.")], say(SUMMARY))
    resumed = ([SYSTEM, TASK, RESUMED], say("Done."))
    assert reasons(*grown, asks, resumed)[-2:] == ["", "edited"], "it may be an act that somebody quotes"
    assert reasons(*grown, asks, resumed, label=Evidence(label="compaction"))[-1] == "compaction"


def test_agents_that_quote_each_other_are_no_compaction() -> None:
    """A selector is told everything anew each time, its agents what the others said."""
    turns: list[Turn] = []
    for number, act in enumerate(ACTS):
        before = " ".join(act.content for act in ACTS[:number])
        for each in (system("You choose who speaks."), system(f"You are speaker {number}.")):
            turns.append(([each, user(f"Said so far: {before}")], act if "speaker" in each.content else say("speaker")))
    assert "compaction" not in " ".join(reasons(*turns))
