"""Conversion of messages and tools to the form that chat templates take, such that none of their text becomes a control
token.

The tags around thoughts and calls are written by the template; the text inside a thought or a call is plain text.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sparring.errors import refusal
from sparring.render.control import MARK, ControlTokens
from sparring.render.dialect import message_dicts, tool_dicts
from sparring.render.hermes import plain_parts
from sparring.types import Message, ToolCall, ToolSpec

_BRACKETS = "<>/|[]"
_SCHEMA = ("type", "function", "name", "description", "parameters", "properties", "required", "items", "enum")
TRUSTED = ("system", "user")


class TextEscaper:
    """Escaper of control tokens in the text of messages: a mark is put into each such token, and `ControlTokens.encode`
    encodes marked tokens as plain text.

    Args:
        tokens: control tokens of the tokenizer that encodes the rendered text.
        allowed: roles whose messages may write control tokens before the first reply. Messages after a reply and
            schemas of tools may never write control tokens.

    Raises:
        BadInput: a role other than system and user is allowed.
    """

    def __init__(self, tokens: ControlTokens, allowed: Sequence[str] = ()) -> None:
        for role in allowed:
            if role not in TRUSTED:
                do = "leave it out: text of tools and environments must not begin or end a turn"
                raise refusal("render.control_tokens", "system, user or both", repr(role), do)
        self._tokens = tokens
        self._marked: Callable[[str], str] = tokens.marked
        self._allowed = frozenset(allowed)
        self._around = ("<tool_call>\n", "\n</tool_call>")
        self._latest: tuple[tuple[ToolSpec, ...], list[dict[str, Any]]] = ((), [])
        self._bare = {bare for text in tokens.ids if (bare := text.strip(_BRACKETS)) != text} - {"", *_SCHEMA}

    def without_marks(self) -> TextEscaper:
        """Return an escaper that sets no marks, for a renderer whose own tokenizer would encode marks as text."""
        other = TextEscaper(self._tokens, tuple(self._allowed))
        other._marked, other._bare = str, set()
        return other

    def between(self, around: tuple[str, str]) -> TextEscaper:
        """Return an escaper for a format with its own tags around a malformed call."""
        other = copy.copy(self)
        other._around = around
        return other

    def messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return all messages of a conversation, escaped, as dicts."""
        opening = list(itertools.takewhile(lambda message: message.role != "assistant", messages))
        escaped = [message if message.role in self._allowed else self._message(message) for message in opening]
        return message_dicts(escaped, self._around) + self.answers(messages[len(opening) :])

    def answers(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Convert the messages that follow a reply."""
        return message_dicts([self._message(message) for message in messages], self._around)

    def tools(self, tools: Sequence[ToolSpec]) -> list[dict[str, Any]]:
        """Convert tool schemas. The result is cached: an environment passes the same objects in all its rollouts."""
        before, converted = self._latest
        if len(before) != len(tools) or not all(map(operator.is_, before, tools)):
            marked = [
                dataclasses.replace(
                    tool,
                    name=self._marked(tool.name),
                    description=self._marked(tool.description),
                    parameters=self._value(tool.parameters),
                )
                for tool in tools
            ]
            converted = tool_dicts(marked)
            self._latest = tuple(tools), converted
        return [*converted]

    def _message(self, message: Message) -> Message:
        own = message.role == "assistant"
        parts = plain_parts(message.content) if own else [(message.content, True)]
        marked = {
            "content": "".join(self._marked(text) if plain else text for text, plain in parts),
            "reasoning": message.reasoning and self._marked(message.reasoning),
            "tool_calls": tuple(map(self._call, message.tool_calls)),
            "name": message.name and self._marked(message.name),
            "tool_call_id": message.tool_call_id and self._marked(message.tool_call_id),
        }
        if all(value == getattr(message, key) for key, value in marked.items()):
            return message  # most messages write no control token
        changed: dict[str, Any] = dict(marked)
        return dataclasses.replace(message, **changed)

    def _call(self, call: ToolCall) -> ToolCall:
        return dataclasses.replace(
            call,
            id=self._marked(call.id),
            name=self._marked(call.name),
            arguments=call.arguments and self._argument(call.arguments),
            raw=self._marked(call.raw),
        )

    def _argument(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._marked(value)
        if isinstance(value, Mapping):
            return {self._argument(key): self._argument(inner) for key, inner in value.items()}
        return [self._argument(inner) for inner in value] if isinstance(value, list | tuple) else value

    def _value(self, value: Any, key: Any = None) -> Any:
        if isinstance(value, str):
            return self._marked(value)
        if isinstance(value, Mapping):
            named = self._marked if key == "properties" else self._key
            return {named(k) if isinstance(k, str) else k: self._value(inner, k) for k, inner in value.items()}
        return [self._value(inner) for inner in value] if isinstance(value, list | tuple) else value

    def _key(self, key: str) -> str:
        """Mark a key of a schema. Some formats write an unknown key in brackets, which makes a control token of
        `think`."""
        return key[:1] + MARK + key[1:] if key.strip(_BRACKETS) in self._bare else self._marked(key)
