"""Rows of traces: conversations in the form that vendors take for fine-tuning, one row for each branch.

A row has `messages`. Other keys are present only with values other than the default: `tools`, if the requests had other
tools than the environment; `prompt_messages`, the length of the first prompt, if that contains replies; and in a
message `weight` 0, if the reply is context only and is not imitated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparring.errors import BadInput, refusal
from sparring.record.branches import Transcript
from sparring.record.identity import tools_key
from sparring.render.dialect import message_dicts, tool_dicts
from sparring.types import Message, ToolSpec


def trace_row(transcript: Transcript, world_tools: Sequence[ToolSpec]) -> dict[str, Any]:
    """Return the row of one branch."""
    messages = message_dicts(transcript.messages)
    if transcript.imitated is not None:
        for place, message in enumerate(messages):
            if message["role"] == "assistant" and place not in transcript.imitated:
                message["weight"] = 0
    row: dict[str, Any] = {"messages": messages}
    if tools_key(transcript.tools) != tools_key(world_tools):
        row["tools"] = tool_dicts(transcript.tools)
    if transcript.prompt is not None:
        row["prompt_messages"] = transcript.prompt
    return row


def transcript_of(
    row: Mapping[str, Any],
    messages: tuple[Message, ...],
    world_tools: tuple[ToolSpec, ...],
    where: str,
    column: str = "messages",
) -> Transcript:
    """Return the branch of a row.

    Args:
        world_tools: tools of a row without `tools`.

    Raises:
        BadInput: tools, weights or `prompt_messages` do not parse, or the row has nothing to imitate.
    """
    tools, prompt = row.get("tools"), row.get("prompt_messages")
    if prompt is not None and not (type(prompt) is int and 0 < prompt < len(messages)):
        actual, expected = repr(prompt)[:80], f"a number of messages below {len(messages)}"
        raise refusal(f"{where}, prompt_messages", expected, actual, "correct the row, or leave it out")
    imitated = _imitated(row.get(column), messages, prompt or 0, where)
    return Transcript(
        messages=messages,
        tools=world_tools if tools is None else _tools(tools, where),
        imitated=imitated,
        prompt=prompt,
    )


def _imitated(entries: Any, messages: Sequence[Message], prompt: int, where: str) -> tuple[int, ...] | None:
    replies = [at for at, message in enumerate(messages) if message.role == "assistant"]
    weights = {at: entries[at].get("weight") for at in replies} if isinstance(entries, list) else {}
    for at, weight in weights.items():
        if weight not in (None, 0, 1):
            place, fix = f"{where}, messages[{at}].weight", "write one of them, or leave it out"
            raise refusal(place, "0 or 1", repr(weight)[:80], fix)
    imitated = tuple(at for at in replies if at >= prompt and weights.get(at) != 0)
    if not imitated:
        raise refusal(where, "an assistant message to learn", "none with a weight", "add one or remove the row")
    return None if list(imitated) == replies else imitated


def _tools(value: Any, where: str) -> tuple[ToolSpec, ...]:
    if not isinstance(value, list):
        raise _no_tool(f"{where}, tools", value)
    return tuple(_tool(entry, f"{where}, tools[{at}]") for at, entry in enumerate(value))


def _tool(entry: Any, where: str) -> ToolSpec:
    function = entry.get("function") if isinstance(entry, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _no_tool(where, entry)
    parameters, description = function.get("parameters") or {}, function.get("description") or ""
    if not isinstance(parameters, dict) or not isinstance(description, str):
        raise _no_tool(where, entry)
    return ToolSpec(name=function["name"], description=description, parameters=parameters)


def _no_tool(where: str, value: Any) -> BadInput:
    expected = "{type: function, function: {name, description, parameters}}"
    return refusal(where, expected, repr(value)[:80], "correct the row, or leave the column out for the world's tools")
