"""Readers of labelled data: preferred or desirable replies, and errors in the steps of a solution or the turns of a
conversation. Files are JSON Lines, Parquet or `datasets` folders.

A row that does not parse is refused with its file and line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from sparring.errors import refusal
from sparring.tasks.files import check_said, is_blank, messages_of
from sparring.tasks.formats import located
from sparring.types import Message

Messages = tuple[Message, ...]
Row = TypeVar("Row")


@dataclass(frozen=True, kw_only=True, slots=True)
class Preference:
    """Replies to one prompt: a chosen and a rejected one, or a single desirable (chosen) or undesirable (rejected) one.
    `margin` is how much better the chosen one is, 0 if unknown."""

    where: str
    prompt: Messages
    chosen: Messages | None
    rejected: Messages | None
    margin: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Solution:
    """Reply in steps, with the correctness of each step from 0 to 1."""

    where: str
    prompt: Messages
    steps: tuple[str, ...]
    labels: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgedTurns:
    """Messages after a prompt, from the assistant's first to its last, with the correctness of each assistant message
    from 0 to 1, or None if unknown."""

    where: str
    prompt: Messages
    reply: Messages
    labels: tuple[float | None, ...]


def read_preferences(path: str, *, single: bool = False) -> list[Preference]:
    """Read rows of {prompt | messages, chosen, rejected, margin?}; with `single` also {prompt | messages, completion,
    label}.

    `prompt` is a text or a list of messages, replies are texts or lists of messages. Chosen and rejected are whole
    conversations if there is no prompt, or if both begin with a message that is not the assistant's. The prompt is then
    their common beginning. A `prompt` in such a row must equal this beginning or its last message.

    Raises:
        BadInput: the file does not exist, has no row, or has a row that does not parse.
    """
    return _read(path, lambda row, where: _preference(row, where, single), "preference")


def read_solutions(path: str) -> list[Solution]:
    """Read rows of {prompt | messages, steps: [text], labels: [true | false | a number from 0 to 1]}. Refuses as
    `read_preferences`."""
    return _read(path, _solution, "solution in steps")


def read_turns(path: str) -> list[JudgedTurns]:
    """Read rows of {messages, labels: [true | false | a number from 0 to 1 | null]}, with one label per assistant
    message. Refuses as `read_preferences`."""
    return _read(path, _turns, "conversation with judged turns")


def _read(path: str, parsed: Callable[[Mapping[str, Any], str], Row], what: str) -> list[Row]:
    rows = [parsed(row, where) for _, where, row in located(path)]
    if not rows:
        raise refusal(path, f"at least one {what}", "none", "add rows")
    return rows


def _preference(row: Mapping[str, Any], where: str, single: bool) -> Preference:
    if single and "label" in row:
        if not isinstance(row["label"], bool):
            raise refusal(f"{where}, label", "true or false", repr(row["label"])[:80], "correct the row")
        answer = _reply(row, "completion", where)
        _check_reply(answer, where, "completion")
        is_chosen = row["label"]
        if is_chosen:
            _check_wanted(answer, where, "completion")
        return Preference(
            where=where,
            prompt=_prompt(row, where),
            chosen=answer if is_chosen else None,
            rejected=None if is_chosen else answer,
        )
    chosen, rejected = _reply(row, "chosen", where), _reply(row, "rejected", where)
    given = _prompt(row, where) if "prompt" in row or "messages" in row else None
    if given is not None and any(not reply or reply[0].role == "assistant" for reply in (chosen, rejected)):
        prompt = given
    else:
        pairs = list(zip(chosen, rejected, strict=False))
        shared = next((n for n, (a, b) in enumerate(pairs) if a != b), len(pairs))
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
        if given is not None and given not in (prompt, prompt[-1:]):
            actual = "another: the replies are whole conversations that begin differently"
            fix = "leave out the column 'prompt', or begin both replies with the assistant"
            raise refusal(f"{where}, prompt", "the beginning of chosen and rejected, or its last message", actual, fix)
        _check_prompt(prompt, where)
    _check_reply(chosen, where, "chosen")
    _check_reply(rejected, where, "rejected")
    _check_wanted(chosen, where, "chosen")
    if chosen == rejected:
        raise refusal(where, "two different replies", "the same one twice", "leave the row out")
    return Preference(where=where, prompt=prompt, chosen=chosen, rejected=rejected, margin=_margin(row, where))


def _solution(row: Mapping[str, Any], where: str) -> Solution:
    steps, labels = row.get("steps"), row.get("labels")
    if not isinstance(steps, list) or not steps or not all(isinstance(step, str) and step.strip() for step in steps):
        raise refusal(f"{where}, steps", "a list of texts", repr(steps)[:80], "correct the row")
    if not isinstance(labels, list) or len(labels) != len(steps):
        raise refusal(f"{where}, labels", f"{len(steps)} of them, one a step", repr(labels)[:80], "correct the row")
    if not all(isinstance(label, (bool, int, float)) and 0 <= label <= 1 for label in labels):
        raise refusal(f"{where}, labels", "true, false or numbers from 0 to 1", repr(labels)[:80], "correct the row")
    return Solution(where=where, prompt=_prompt(row, where), steps=tuple(steps), labels=tuple(map(float, labels)))


def _turns(row: Mapping[str, Any], where: str) -> JudgedTurns:
    if "messages" not in row:
        raise refusal(where, "a column 'messages'", ", ".join(map(repr, row)) or "none", "add it")
    messages, labels = messages_of(row["messages"], f"{where}, messages"), row.get("labels")
    places = [place for place, message in enumerate(messages) if message.role == "assistant"]
    if not places or not places[0] or places[-1] != len(messages) - 1:
        actual = "none of the assistant" if not places else "one that begins with the assistant or ends with another"
        raise refusal(
            f"{where}, messages",
            "a question, and a conversation that ends with the assistant",
            actual,
            "correct the row",
        )
    if not isinstance(labels, list) or len(labels) != len(places) or all(label is None for label in labels):
        expected = f"{len(places)} of them, one for each message of the assistant, not all null"
        raise refusal(f"{where}, labels", expected, repr(labels)[:80], "correct the row")
    if not all(label is None or isinstance(label, (bool, int, float)) and 0 <= label <= 1 for label in labels):
        raise refusal(
            f"{where}, labels", "true, false, null or numbers from 0 to 1", repr(labels)[:80], "correct the row"
        )
    numbers = tuple(None if label is None else float(label) for label in labels)
    return JudgedTurns(where=where, prompt=messages[: places[0]], reply=messages[places[0] :], labels=numbers)


def _prompt(row: Mapping[str, Any], where: str) -> Messages:
    value = row.get("messages") if row.get("prompt") is None else row["prompt"]
    if isinstance(value, str):
        prompt: Messages = (Message(role="user", content=value),)
        check_said(prompt, where)
        return prompt
    if value is None:
        raise refusal(where, "a column 'prompt' or 'messages'", ", ".join(map(repr, row)) or "none", "add one")
    prompt = messages_of(value, f"{where}, prompt")
    _check_prompt(prompt, where)
    return prompt


def _check_prompt(prompt: Messages, where: str) -> None:
    if not prompt or prompt[-1].role == "assistant" or prompt[0].role == "assistant":
        actual = "none" if not prompt else "one that begins or ends with the assistant"
        raise refusal(where, "a prompt that waits for the assistant", actual, "correct the row")
    check_said(prompt, where)


def _reply(row: Mapping[str, Any], name: str, where: str) -> Messages:
    if name not in row:
        raise refusal(where, f"a column {name!r}", ", ".join(map(repr, row)) or "none", "add it")
    if isinstance(row[name], str):
        return (Message(role="assistant", content=row[name]),)
    return messages_of(row[name], f"{where}, {name}")


def _check_reply(reply: Messages, where: str, name: str) -> None:
    if not reply or reply[0].role != "assistant" or reply[-1].role != "assistant":
        raise refusal(
            f"{where}, {name}", "a reply that begins and ends with the assistant", "another", "correct the row"
        )


def _check_wanted(reply: Messages, where: str, name: str) -> None:
    """Refuse an empty reply as a training target; a rejected one may be empty."""
    if any(message.role == "assistant" and is_blank(message) for message in reply):
        raise refusal(f"{where}, {name}", "a reply with a text or a call", "an empty one", "correct or remove the row")


def _margin(row: Mapping[str, Any], where: str) -> float:
    margin = row.get("margin")
    if margin is None:
        return 0.0
    if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not 0 <= margin < math.inf:
        raise refusal(f"{where}, margin", "a number of 0 or more", repr(margin)[:80], "correct the row")
    return float(margin)
