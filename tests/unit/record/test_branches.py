"""What is collected of a rollout: one conversation for each branch of an agent, each reply once, as it was prompted."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import pytest
from conversations import SYSTEM, TOOL, answer, call, say, user

from sparring.generation import Sampling
from sparring.protocols import Renderer
from sparring.record.branches import Transcript
from sparring.record.recorder import RecordedSession, Recorder
from sparring.record.transcript import TextRecorder, TextRequest, TextSession
from sparring.render.demonstrate import demonstration_tokens, reply_tokens
from sparring.reply import ReplyRequest, whole_reply
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import toy_renderer, toy_task
from sparring.types import Evidence, Limits, Message, Outcome, Trajectory

TOOLS = (TOOL,)
SEARCH = (replace(TOOL, name="search"),)
LIMITS = Limits(max_turns=100, max_tokens=100_000, max_tool_calls=100)
OVER = Outcome(kind="completed", reason="answered")
QUESTION = user("Which colour has the whale?")
DELEGATES = call("search for the colour of whales")
FINDING = "The book says that whales are blue."
SUMMARY = "Summary: whales are blue, says the book."
REPLIES = {
    "delegates": DELEGATES,
    "finding": say(FINDING),
    "blue": say("Blue."),
    "sure": say("Quite sure."),
    "small": say("Small ones too."),
    "summary": say(SUMMARY),
    "resumed": say("It goes on from there."),
    "edited": say("Another answer."),
    "lost": say("Nobody gets this."),
    "title": say("Whales"),
    "shortened": say("Blue, then."),
}
Ask = Callable[..., Awaitable[Message]]


def bare(message: Message) -> Message:
    """The message as a client sends it that drops thoughts."""
    return replace(message, reasoning=None)


async def program(ask: Ask, session: RecordedSession | TextSession, sent: Callable[[Message], Message]) -> None:
    """An agent program: a sub-agent, two continuations, a compaction, an edit, a reply that gets lost, a title."""
    talk = [SYSTEM, QUESTION]
    talk += [sent(await ask("delegates", talk)), answer(FINDING)]
    sub = Evidence(agent="sub")
    await ask("finding", [user("You are asked to search for the colour of whales.")], SEARCH, sub)
    talk.append(sent(await ask("blue", talk)))
    small = [*talk, user("And the small ones?")]
    small.append(sent(await ask("small", small)))
    talk.append(user("Sure?"))
    talk.append(sent(await ask("sure", talk)))
    await ask("summary", [*talk, user("Sum it all up.")], TOOLS, Evidence(label="compaction"))
    await ask("resumed", [SYSTEM, QUESTION, user(f"It was: {SUMMARY}")])
    await ask("edited", [*talk[:5], user("Say it again."), sent(say("Again.")), user("Say more.")])
    await ask("shortened", [*talk[:4], call("2"), answer("whales: blue")])
    await ask("lost", [*small, user("And?")], TOOLS, Evidence(), delivered=False)
    await ask("title", [user("A title for this talk?")], (), Evidence(label="auxiliary"))


def said(name: str, thinking: bool) -> Message:
    """A reply of the program's model."""
    return replace(REPLIES[name], reasoning=f"About {name}.") if thinking else REPLIES[name]


def asking(session: RecordedSession | TextSession, planned: list[str]) -> Ask:
    """What the program calls; `planned` takes the name of the reply that comes next."""

    async def ask(
        name: str,
        messages: Sequence[Message],
        tools: Sequence[object] = TOOLS,
        evidence: Evidence = Evidence(),
        delivered: bool = True,
    ) -> Message:
        planned.append(name)
        reply = await whole_reply(session.reply(ReplyRequest(messages, tools, evidence=evidence)))  # type: ignore[arg-type]
        session.deliver(reply.id, delivered)
        return reply.message

    return ask


def recorded(
    renderer: Renderer, *, thinking: bool = False, sent: Callable[[Message], Message] = replace
) -> RecordedSession:
    """The session of the program with a model that samples."""
    planned: list[str] = []
    engine = ScriptedEngine(lambda request: reply_tokens(renderer, said(planned[-1], thinking), TOOLS))
    recorder = Recorder(engine, renderer, sampling=Sampling(max_tokens=512), max_context=20_000)
    session = recorder.open(toy_task(limits=LIMITS), rollout_id="r", seed=7)
    asyncio.run(program(asking(session, planned), session, sent))
    return session


def told(*, thinking: bool = False) -> TextSession:
    """The session of the program with a model that is asked for text."""
    planned: list[str] = []

    async def reply(request: TextRequest) -> Message:
        return said(planned[-1], thinking)

    session = TextRecorder(reply, "teacher").open(toy_task(limits=LIMITS), rollout_id="r", seed=7, role="policy")
    asyncio.run(program(asking(session, planned), session, replace))
    return session


def imitated(transcript: Transcript) -> list[str]:
    """The texts of the replies that are imitated, or of their calls."""
    replies = [at for at, message in enumerate(transcript.messages) if message.role == "assistant"]
    chosen = replies if transcript.imitated is None else transcript.imitated
    messages = [transcript.messages[at] for at in chosen]
    return [m.content or str(m.tool_calls[0].arguments["code"]) for m in messages]  # type: ignore[index]


CALL = "search for the colour of whales"


@pytest.mark.parametrize("make", [lambda: recorded(toy_renderer(thoughts="kept")), told], ids=["sampled", "text"])
def test_each_branch_is_a_conversation_and_each_reply_is_imitated_once(make) -> None:
    transcripts = make().transcripts()
    by_end = {transcript.messages[-1].content: transcript for transcript in transcripts}
    assert [(t.messages[-1].content, imitated(t), t.prompt) for t in transcripts] == [
        (FINDING, [FINDING], None),
        ("Small ones too.", [CALL, "Blue.", "Small ones too."], None),
        (SUMMARY, ["Quite sure.", SUMMARY], None),
        ("It goes on from there.", ["It goes on from there."], None),
        ("Another answer.", ["Another answer."], 8),
        ("Blue, then.", ["Blue, then."], 6),
    ]
    assert by_end[FINDING].tools == SEARCH and by_end[SUMMARY].tools == TOOLS
    assert [m.content for m in by_end["Another answer."].messages] == [
        SYSTEM.content, QUESTION.content, "", FINDING, "Blue.", "Say it again.", "Again.", "Say more.", "Another answer.",
    ]  # fmt: skip


SETTINGS = [
    (name, thinking, thoughts)
    for name in ("auto", "template")
    for thinking, thoughts in ((False, "kept"), (True, "kept"), (True, "template"))
]


@pytest.mark.parametrize("sent", [replace, bare], ids=["whole", "dropped"])
@pytest.mark.parametrize(("name", "thinking", "thoughts"), SETTINGS)
def test_a_trace_renders_as_the_ids_of_its_branch(name, thinking, thoughts, sent) -> None:
    renderer = toy_renderer(name=name, thinking=thinking, thoughts=thoughts)
    session = recorded(renderer, thinking=thinking, sent=sent)
    trajectory = session.trajectory(OVER)
    count: Counter[str] = Counter()
    for transcript in session.transcripts():
        (end,) = [s for s in trajectory.segments if s.model and s.message == transcript.messages[-1]]
        path = trajectory.path(end.index)
        rendered = demonstration_tokens(
            renderer, transcript.messages, transcript.tools, imitated=transcript.imitated, prompt=transcript.prompt
        )
        assert rendered.tokens == sum((tuple(segment.tokens) for segment in path), ())
        count.update(imitated(transcript))
    assert count == dict.fromkeys(count, 1) and len(count) == 9, "all but the lost one and the title"


def test_a_plain_chat_is_one_conversation_without_marks() -> None:
    renderer = toy_renderer(thoughts="kept")
    planned: list[str] = []
    engine = ScriptedEngine(lambda request: reply_tokens(renderer, REPLIES[planned[-1]], TOOLS))
    session = Recorder(engine, renderer, sampling=Sampling(max_tokens=512)).open(
        toy_task(limits=LIMITS), rollout_id="r", seed=7
    )

    async def chat() -> list[Message]:
        ask, talk = asking(session, planned), [SYSTEM, QUESTION]
        talk += [await ask("delegates", talk), answer(FINDING)]
        return [*talk, await ask("blue", talk)]

    messages = tuple(asyncio.run(chat()))
    assert session.transcripts() == (Transcript(messages=messages, tools=TOOLS),)


@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
def test_the_last_reply_of_a_sub_agent_is_not_the_answer(named: bool) -> None:
    renderer = toy_renderer(thoughts="kept")

    async def background(ask: Ask) -> None:
        talk = [SYSTEM, QUESTION]
        talk += [await ask("delegates", talk), answer("It is running, wait.")]
        search = [user("You are asked to search for the colour of whales.")]
        sub = Evidence(agent="sub") if named else Evidence()
        search += [await ask("finding", search, SEARCH, sub), user("And?")]
        await ask("blue", talk)
        await ask("resumed", search, SEARCH, sub)

    def trajectories() -> list[Trajectory]:
        planned: list[str] = []
        engine = ScriptedEngine(lambda request: reply_tokens(renderer, REPLIES[planned[-1]], TOOLS))
        sampled = Recorder(engine, renderer, sampling=Sampling(max_tokens=512)).open(
            toy_task(limits=LIMITS), rollout_id="r", seed=7
        )

        async def reply(request: TextRequest) -> Message:
            return REPLIES[planned[-1]]

        text = TextRecorder(reply, "expert").open(toy_task(limits=LIMITS), rollout_id="r", seed=7, role="policy")
        for session in (sampled, text):
            asyncio.run(background(asking(session, planned)))
        return [sampled.trajectory(OVER), text.trajectory(OVER)]

    for trajectory in trajectories():
        assert trajectory.answer is not None and trajectory.answer.message == REPLIES["blue"]
