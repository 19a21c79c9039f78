"""Rows that compare replies, label them, or say which steps are right."""

import json

import pytest

from sparring.errors import BadInput
from sparring.tasks.preferences import read_preferences, read_solutions, read_turns
from sparring.types import Message


def write_rows(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def said(text):
    return {"role": "assistant", "content": text}


def asked(text):
    return {"role": "user", "content": text}


YES, NO, ASKED = (
    Message(role=role, content=text) for role, text in (("assistant", "yes"), ("assistant", "no"), ("user", "ok?"))
)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "ok?", "chosen": "yes", "rejected": "no"},
        {"prompt": [asked("ok?")], "chosen": [said("yes")], "rejected": [said("no")]},
        {"messages": [asked("ok?")], "chosen": "yes", "rejected": [said("no")]},
        {"chosen": [asked("ok?"), said("yes")], "rejected": [asked("ok?"), said("no")]},
        {"prompt": "ok?", "chosen": [asked("ok?"), said("yes")], "rejected": [asked("ok?"), said("no")]},
        {"prompt": [asked("ok?")], "chosen": [asked("ok?"), said("yes")], "rejected": [asked("ok?"), said("no")]},
    ],
    ids=["texts", "messages", "both", "conversations", "beside a prompt", "beside messages"],
)
def test_every_form_of_a_preference_row_reads_the_same(tmp_path, row):
    (found,) = read_preferences(write_rows(tmp_path, {**row, "margin": 2}))
    assert (found.prompt, found.chosen, found.rejected, found.margin) == ((ASKED,), (YES,), (NO,), 2.0)
    assert found.where.endswith("rows.jsonl:1")


def test_single_replies_are_desirable_or_not(tmp_path):
    path = write_rows(
        tmp_path,
        {"prompt": "ok?", "completion": "yes", "label": True},
        {"prompt": "ok?", "completion": "no", "label": False},
        {"prompt": "ok?", "chosen": "yes", "rejected": "no"},
    )
    assert [(row.chosen, row.rejected) for row in read_preferences(path, single=True)] == [
        ((YES,), None),
        (None, (NO,)),
        ((YES,), (NO,)),
    ]
    with pytest.raises(BadInput, match="rows.jsonl:1: expected a column 'chosen'"):
        read_preferences(path)


def test_steps_have_labels(tmp_path):
    (found,) = read_solutions(
        write_rows(tmp_path, {"prompt": "ok?", "steps": ["a", "b", "c"], "labels": [True, 0.25, 0]})
    )
    assert (found.prompt, found.steps, found.labels) == ((ASKED,), ("a", "b", "c"), (1.0, 0.25, 0.0))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "p", "steps": [], "labels": []}, "steps: expected a list of texts"),
        ({"prompt": "p", "steps": ["a", " "], "labels": [1, 1]}, "steps: expected a list of texts"),
        ({"prompt": "p", "steps": ["a"], "labels": [1, 0]}, "labels: expected 1 of them, one a step"),
        ({"prompt": "p", "steps": ["a"], "labels": [-1]}, "labels: expected true, false or numbers from 0 to 1"),
        ({"prompt": "p", "steps": ["a"], "labels": ["good"]}, "labels: expected true, false or numbers from 0 to 1"),
        ({"steps": ["a"], "labels": [1]}, "expected a column 'prompt' or 'messages'"),
    ],
    ids=["none", "blank", "count", "range", "text", "prompt"],
)
def test_a_solution_that_does_not_parse_is_refused(tmp_path, row, message):
    with pytest.raises(BadInput, match=message):
        read_solutions(write_rows(tmp_path, row))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": [asked("a"), said("b")], "chosen": "c", "rejected": "d"},
            "a prompt that waits for the assistant, got one that",
        ),
        (
            {"prompt": "a", "chosen": [asked("c")], "rejected": "d"},
            "chosen: expected a reply that begins and ends with the assistant",
        ),
        (
            {"chosen": [asked("a"), said("b")], "rejected": [asked("z"), said("b")]},
            "a prompt that waits for the assistant, got none",
        ),
        ({"prompt": "a", "completion": "b", "label": 1}, "label: expected true"),
        ({"prompt": "a", "completion": [asked("b")], "label": True}, "completion: expected a reply that begins"),
        (
            {"prompt": "z", "chosen": [asked("a"), said("b")], "rejected": [asked("a"), said("c")]},
            "prompt: expected the beginning of chosen and rejected, or its last message",
        ),
        ({"prompt": "a", "chosen": "c", "rejected": "d", "margin": -0.5}, "margin: expected a number of 0 or more"),
        ({"prompt": " ", "chosen": "c", "rejected": "d"}, "expected a prompt that says something"),
        ({"prompt": "a", "chosen": "\n", "rejected": "d"}, "chosen: expected a reply with a text or a call"),
        ({"prompt": "a", "chosen": [said(None)], "rejected": "d"}, "chosen: expected a reply with a text or a call"),
        ({"prompt": "a", "completion": "", "label": True}, "completion: expected a reply with a text or a call"),
        ({"prompt": "a", "chosen": None, "rejected": "d"}, "chosen, messages: expected a list"),
        ({"prompt": "a", "chosen": [], "rejected": "d"}, "chosen, messages: expected a list"),
    ],
)
def test_a_comparison_that_does_not_parse_is_refused(tmp_path, row, message):
    with pytest.raises(BadInput, match=message):
        read_preferences(write_rows(tmp_path, row), single=True)


def test_an_unwanted_reply_may_be_empty(tmp_path):
    rows = [{"prompt": "a", "chosen": "c", "rejected": ""}, {"prompt": "a", "completion": "", "label": False}]
    assert [row.rejected[0].content for row in read_preferences(write_rows(tmp_path, *rows), single=True)] == ["", ""]


def test_a_file_without_rows_is_refused(tmp_path):
    for read in (read_preferences, read_solutions):
        with pytest.raises(BadInput, match="expected at least one"):
            read(write_rows(tmp_path))


def turns_of(*roles):
    return [{"role": role, "content": f"{role} {number}"} for number, role in enumerate(roles)]


def test_turns_have_labels(tmp_path):
    messages = turns_of("system", "user", "assistant", "user", "assistant", "user", "assistant")
    (found,) = read_turns(write_rows(tmp_path, {"messages": messages, "labels": [True, None, 0.25]}))
    assert [message.content for message in found.prompt] == ["system 0", "user 1"]
    assert [message.content for message in found.reply][::4] == ["assistant 2", "assistant 6"] and len(found.reply) == 5
    assert found.labels == (1.0, None, 0.25)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"labels": [1]}, "expected a column"),
        (
            {"messages": turns_of("user"), "labels": []},
            "messages: expected a question, and a conversation that ends with the assistant",
        ),
        (
            {"messages": turns_of("assistant"), "labels": [1]},
            "got one that begins with the assistant",
        ),
        (
            {"messages": turns_of("user", "assistant", "user"), "labels": [1]},
            "got one that begins with the assistant",
        ),
        (
            {"messages": turns_of("user", "assistant"), "labels": [1, 0]},
            "labels: expected 1 of them, one for each message of the assist",
        ),
        ({"messages": turns_of("user", "assistant"), "labels": [None]}, "not all null, got"),
        (
            {"messages": turns_of("user", "assistant"), "labels": [2]},
            "labels: expected true, false, null or numbers from 0 to 1",
        ),
    ],
)
def test_turns_that_do_not_parse_are_refused(tmp_path, row, message):
    with pytest.raises(BadInput, match=message):
        read_turns(write_rows(tmp_path, row))
