"""A chat template without a bridge: the check says so, and so does each sample."""

from __future__ import annotations

from pathlib import Path

import pytest
from conversations import SYSTEM, TOOL, answer, call, say, user

from sparring.batch.flatten import flatten
from sparring.generation import Sampling
from sparring.record.recorder import RecordedSession, Recorder
from sparring.render.demonstrate import reply_tokens
from sparring.render.load import load_renderer
from sparring.render.round_trip import check_round_trip
from sparring.render.train_tokenizer import train_tokenizer
from sparring.testing.clock import run_virtual
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import toy_renderer, toy_task
from sparring.types import Group, Limits, Message, Outcome, Rollout, Sample, Score

FORGETS = (
    "{% for m in messages %}{% if m.role != 'assistant' or loop.last %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LINE = "no bridge over a user's message"


def said(renderer, replies: list[Message], told: list[list[Message]], tools=()) -> RecordedSession:
    """A session in which a client sends the whole conversation each turn."""
    engine = ScriptedEngine(lambda request: reply_tokens(renderer, replies[len(engine.requests) - 1], tools))
    session = Recorder(engine, renderer, sampling=Sampling(max_tokens=64), max_context=4096).open(
        toy_task(limits=Limits(max_turns=9)), rollout_id="r", seed=1
    )

    async def talk() -> None:
        messages: list[Message] = []
        for new in told:
            messages += new
            messages.append(await session.complete(messages, tools))

    run_virtual(talk())
    return session


def samples(session: RecordedSession) -> list[Sample]:
    """What is trained of a session."""
    trajectory = session.trajectory(Outcome(kind="completed", reason="answered"))
    rollout = Rollout(id="r", task=toy_task(), index=0, attempt=0, purpose="train", trajectories=(trajectory,))
    group = Group(id="rl/0", index=0, task=toy_task(), rollouts=(rollout,), scores=(Score(reward=1.0),))
    return list(flatten(group, "policy"))


def test_a_template_without_a_bridge_makes_each_turn_a_sample_with_that_reason(
    tmp_path: Path,
):
    train_tokenizer(["Be brief. Who? It is 42. Are you sure?"], 400, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(FORGETS, encoding="utf-8")
    renderer = load_renderer(tmp_path)
    assert any(fact.startswith(LINE) for fact in check_round_trip(renderer))
    told = [[SYSTEM, user("Who?")], [user("Sure?")], [user("Yes?")]]
    session = said(renderer, [say("One."), say("Two."), say("Three.")], told)
    assert [s.parent for s in session.segments] == [None, 0, None, 2, None, 4]
    rows = samples(session)
    assert [row.fork for row in rows] == [None, "template", "template"]
    assert [sum(row.weights["policy"]) for row in rows] == [len(s.tokens) for s in session.segments if s.model]


@pytest.mark.parametrize("name", ["auto", "template"])
def test_a_thought_that_the_template_drops_has_no_bridge_unless_thoughts_are_kept(name: str):
    replies = [call("1", reasoning="Hm."), say("Two.", reasoning="So.")]
    told = [[user("Who?")], [answer("1"), user("Sure?")]]
    for thoughts, fork in (("kept", []), ("template", ["template"])):
        renderer = toy_renderer(name=name, thinking=True, thoughts=thoughts)
        lines = [fact for fact in check_round_trip(renderer, (TOOL,)) if fact.startswith("no bridge")]
        assert ["beside a tool's answer" in line for line in lines] == [True] * len(fork)
        rows = samples(said(renderer, replies, told, (TOOL,)))
        assert [row.fork for row in rows if row.fork] == fork
