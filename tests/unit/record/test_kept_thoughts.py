"""A conversation that begins anew keeps the thoughts that were kept before: its prompt is of the same kind."""

from __future__ import annotations

from dataclasses import replace

import pytest
from conversations import SYSTEM, TOOL, answer, call, say, user
from formats import format_renderer
from virtual import on_virtual_clock

from sparring.generation import Sampling
from sparring.record.order import conversation
from sparring.record.recorder import Recorder
from sparring.render.demonstrate import demonstration_tokens, reply_tokens
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import toy_renderer, toy_task
from sparring.types import Limits, Message

TOOLS = (TOOL,)
REPLIES = (call("1", reasoning="First of all."), say("One.", reasoning="Then that."), say("Two.", reasoning="At last."))
TOLD = ([SYSTEM, user("Who?")], [answer("1")], [user("Sure?")])
FORMATS = ("qwen3.5", "qwen3.6", "glm-4.5", "glm-5", "glm-5.1", "minimax-m2", "nemotron-3", "kimi-k2.5", "deepseek-v4")


def whole() -> list[Message]:
    """The conversation up to the last user's message."""
    return [*TOLD[0], REPLIES[0], *TOLD[1], REPLIES[1], *TOLD[2]]


@pytest.mark.parametrize("dropped", [False, True], ids=["sent back", "left out"])
@pytest.mark.parametrize("name", ["auto", "template"])
@on_virtual_clock
async def test_an_edited_system_message_keeps_earlier_thoughts(name: str, dropped: bool):
    renderer = toy_renderer(name=name, thinking=True, thoughts="kept")
    engine = ScriptedEngine(lambda request: reply_tokens(renderer, REPLIES[(len(engine.requests) - 1) % 3], TOOLS))
    session = Recorder(engine, renderer, sampling=Sampling(max_tokens=64), max_context=4096).open(
        toy_task(limits=Limits(max_turns=9)), rollout_id="r", seed=1
    )
    edited = replace(SYSTEM, content="Be terse.")
    messages: list[Message] = []
    for told in TOLD:
        messages += told
        messages.append(await session.complete(messages, TOOLS))
    sent = [replace(m, reasoning=None) if dropped else m for m in messages[:-1]]
    await session.complete([edited, *sent[1:]], TOOLS)
    segments = session.segments
    assert [s.parent for s in segments] == [None, 0, 1, 2, 3, 4, None, 6]
    text = "".join(renderer.decode(s.tokens) for s in segments[:5])
    assert renderer.decode(segments[6].tokens) == text.replace("Be brief.", "Be terse.")
    assert "First of all." in text and "Then that." in text
    thoughts = [message.reasoning for message in conversation(segments, 6)]
    assert thoughts == [message.reasoning for message in whole()], "the record has what the prompt was made of"
    *_, transcript = session.transcripts()
    rendered = demonstration_tokens(
        renderer, transcript.messages, TOOLS, imitated=transcript.imitated, prompt=transcript.prompt
    )
    assert rendered.tokens == (*segments[6].tokens, *segments[7].tokens)


@pytest.mark.parametrize("name", FORMATS)
def test_a_whole_render_with_thoughts_equals_the_bridged_ids(name: str):
    renderer = format_renderer(name, True, thoughts="kept")
    tokens = renderer.render(TOLD[0], TOOLS).tokens
    for reply, told in zip(REPLIES, TOLD[1:], strict=False):
        said = reply_tokens(renderer, reply, TOOLS)
        tokens = renderer.bridge(tokens, said, told, TOOLS)
    assert renderer.render(whole(), TOOLS).tokens == tokens
    kept = renderer.render([*whole(), REPLIES[2]], TOOLS, generation=False)
    assert kept.tokens[: len(tokens)] == tokens and kept.sampled[len(tokens)]


def test_a_followed_template_drops_thoughts():
    renderer = toy_renderer(thinking=True, thoughts="template")
    assert "Then that." not in renderer.decode(renderer.render(whole(), TOOLS).tokens)
