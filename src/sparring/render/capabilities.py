"""Capabilities of a chat template: tools, several system messages, a system message in mid-conversation.

Agent programs send several system messages at the beginning (instructions, then a developer's), and some in
mid-conversation. Many templates take only one system message, at the beginning, and refuse or silently drop the others.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from sparring.errors import BadInput, refusal
from sparring.types import Message, ToolSpec

_USER = {"role": "user", "content": "sparring asks 7f3a"}
_REPLY = {"role": "assistant", "content": "sparring says 7f3a"}
_FIRST, _SECOND = ({"role": "system", "content": f"sparring {name} 7f3a"} for name in ("begins", "goes on"))
_NAME = "sparring_tool_7f3a"
_TOOL = {
    "type": "function",
    "function": {"name": _NAME, "description": "x", "parameters": {"type": "object", "properties": {}}},
}
_REMINDER = "<system-reminder>\n{text}\n</system-reminder>"
"""A system message inside a user's message, in the form that claude-code uses."""


Written = Callable[[list[dict[str, Any]], list[dict[str, Any]], bool], str]
"""Function that writes messages, with tools and, if asked, a generation prompt, as text. It raises BadInput if the
template refuses the conversation."""


class TemplatePlaces:
    """Capabilities of one template. Each capability is tried at its first use.

    Args:
        written: function that writes a conversation as text.
    """

    def __init__(self, written: Written) -> None:
        self._written = written
        self._systems = _SystemPlaces(written, []), _SystemPlaces(written, [_TOOL])

    def check(self, tools: Sequence[ToolSpec]) -> None:
        """Refuse tools that the template would silently drop.

        Raises:
            BadInput: `tools` is not empty, and the template does not write tools.
        """
        if tools and not self._takes_tools:
            do = (
                "leave the tools out; or set models.policy.template to a template that has a place for them, or "
                "models.policy.renderer to a format that has"
            )
            raise refusal("tools", "a chat template that writes them", f"one that has no place for {tools[0].name}", do)

    def arranged(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Sequence[Message]:
        """Return a whole conversation in a form that the template takes.

        Several system messages at the beginning are joined by blank lines if the template does not write several. A
        system message in mid-conversation that the template does not write in its place becomes a reminder at the end
        of the preceding user message, or else at the beginning of the following one, or else a user message of its own.
        """
        leading = list(itertools.takewhile(lambda message: message.role == "system", messages))
        rest = messages[len(leading) :]
        if len(leading) > 1 and not self._systems[bool(tools)].several:
            text = "\n\n".join(message.content for message in leading)
            leading = [dataclasses.replace(leading[0], content=text)]
        return [*leading, *self.following(rest, tools)]

    def following(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Sequence[Message]:
        """Return later messages of a conversation in a form that the template takes."""
        if all(message.role != "system" for message in messages) or self._systems[bool(tools)].later:
            return messages
        arranged: list[Message] = []
        waiting: list[str] = []
        for message in messages:
            if message.role == "system":
                reminder = _REMINDER.format(text=message.content)
                if arranged and arranged[-1].role == "user" and not waiting:
                    content = f"{arranged[-1].content}\n\n{reminder}"
                    arranged[-1] = dataclasses.replace(arranged[-1], content=content)
                else:
                    waiting.append(reminder)
                continue
            if waiting and message.role == "user":
                message = dataclasses.replace(message, content="\n\n".join((*waiting, message.content)))
            elif waiting:
                arranged.append(Message(role="user", content="\n\n".join(waiting)))
            waiting = []
            arranged.append(message)
        return [*arranged, Message(role="user", content="\n\n".join(waiting))] if waiting else arranged

    @functools.cached_property
    def _takes_tools(self) -> bool:
        # some templates write tools only into a system message
        conversations = [_USER], [_FIRST, _USER]
        return any(_holds(self._written, messages, [_NAME], [_TOOL]) for messages in conversations)


class _SystemPlaces:
    """Capabilities of a template for system messages, with or without tools: Llama 3 writes tools into the first
    message after its single system message, which must be a user's."""

    def __init__(self, written: Written, tools: list[dict[str, Any]]) -> None:
        self._written, self._tools = written, tools

    @functools.cached_property
    def several(self) -> bool:
        """Return whether the template writes several system messages at the beginning."""
        leading = [_FIRST, _SECOND, _USER]
        return _holds(self._written, leading, [message["content"] for message in leading], self._tools)

    @functools.cached_property
    def later(self) -> bool:
        """Return whether the template writes a system message after a reply in its place, and then a generation
        prompt."""
        later = [_USER, _REPLY, _USER, _SECOND]
        expected = [message["content"] for message in later[1:]]
        if not all(_holds(self._written, [*first, *later], expected, self._tools) for first in ([], [_FIRST])):
            return False
        return self._written(later, self._tools, True) != self._written(later, self._tools, False)


def _holds(written: Written, messages: list[dict[str, Any]], texts: Sequence[str], tools: list[dict[str, Any]]) -> bool:
    """Return whether a conversation is written with these texts, in this order."""
    try:
        conversation = written(messages, tools, True)
    except BadInput:
        return False
    at = 0
    for text in texts:
        at = conversation.find(text, at)
        if at < 0:
            return False
        at += len(text)
    return True
