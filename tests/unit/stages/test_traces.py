"""Rows of traces: written, read again, and refused where they say nothing that can be imitated."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conversations import SYSTEM, TOOL, answer, call, say, user

from sparring.errors import BadInput
from sparring.record.branches import Transcript
from sparring.render.dialect import message_dicts
from sparring.stages.data.demonstrations import conversation_of, rendered
from sparring.stages.data.traces import trace_row, transcript_of
from sparring.tasks.files import messages_of
from sparring.testing.toy import ADD, toy_renderer

MESSAGES = (SYSTEM, user("Hi"), call("1"), answer("1"), say("One."), user("Sure?"), say("Yes."))
PLAIN = Transcript(messages=MESSAGES, tools=(ADD,))


def read(row: dict[str, Any]) -> Transcript:
    """The branch of a row that went through a file."""
    row = json.loads(json.dumps(row))
    return transcript_of(row, messages_of(row["messages"], "row 1"), (ADD,), "row 1")


def test_a_plain_conversation_is_its_messages_and_no_more() -> None:
    assert trace_row(PLAIN, (ADD,)) == {"messages": message_dicts(MESSAGES)}


@pytest.mark.parametrize(
    ("transcript", "keys"),
    [
        (PLAIN, []),
        (Transcript(messages=MESSAGES, tools=(TOOL,)), ["tools"]),
        (Transcript(messages=MESSAGES, tools=()), ["tools"]),
        (Transcript(messages=MESSAGES, tools=(ADD,), imitated=(6,)), []),
        (Transcript(messages=MESSAGES, tools=(ADD,), imitated=(4, 6), prompt=4), ["prompt_messages"]),
    ],
)
def test_a_row_is_read_as_it_was_written(transcript: Transcript, keys: list[str]) -> None:
    row = trace_row(transcript, (ADD,))
    assert list(row) == ["messages", *keys] and read(row) == transcript


def test_what_is_not_imitated_is_context() -> None:
    renderer = toy_renderer(thoughts="kept")
    whole = rendered(conversation_of("plain", PLAIN), renderer, 4096)
    last = rendered(
        conversation_of("last", read(trace_row(Transcript(messages=MESSAGES, tools=(ADD,), imitated=(6,)), (ADD,)))),
        renderer,
        4096,
    )
    assert last.tokens == whole.tokens and 0 < sum(last.sampled) < sum(whole.sampled)
    assert renderer.decode([t for t, mark in zip(last.tokens, last.sampled, strict=True) if mark]).startswith("Yes.")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tools": "python"}, "row 1, tools: expected {type: function"),
        ({"tools": [{"name": "python"}]}, r"row 1, tools\[0\]: expected {type: function"),
        ({"prompt_messages": 7}, "row 1, prompt_messages: expected a number"),
        ({"prompt_messages": "4"}, "row 1, prompt_messages: expected a number of messages below 7"),
        ({"weight": 0.5}, r"row 1, messages\[6\].weight: expected 0"),
        ({"weight": 0, "prompt_messages": 6}, "row 1: expected an assistant"),
    ],
)
def test_a_row_that_does_not_parse_is_refused(change: dict[str, Any], message: str) -> None:
    row = trace_row(PLAIN, (ADD,))
    if "weight" in change:
        row["messages"][-1]["weight"] = change.pop("weight")
    with pytest.raises(BadInput, match=message):
        read({**row, **change})
