"""Renderer that only appends, to measure the cost of a session alone: messages are numbers, and numbers are token
ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sparring.generation import GenerateRequest, Rendered
from sparring.render.reply_reader import HoldingReader
from sparring.types import Message, ToolSpec

_END = 0


class AppendingRenderer:
    """Renderer of messages whose content is ids, separated by blanks. Every turn ends with id 0. Implements `Renderer`.

    Attributes:
        bridged: total number of ids in the prompts and completions that `bridge` was called with.
    """

    name = "appending"

    def __init__(self) -> None:
        self.bridged = 0

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The end of a turn."""
        return (_END,)

    @property
    def control_ids(self) -> Mapping[str, int]:
        """No control tokens: only ids can be written."""
        return {}

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, generation: bool = True) -> Rendered:
        parts = [(_ids(message), message.role == "assistant") for message in messages]
        tokens = tuple(token for ids, _ in parts for token in ids)
        return Rendered(tokens=tokens, sampled=tuple(own for ids, own in parts for _ in ids))

    def bridge(
        self, prompt: Sequence[int], completion: Sequence[int], new: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> tuple[int, ...] | None:
        self.bridged += len(prompt) + len(completion)
        return (*prompt, *completion, *(token for message in new for token in _ids(message)))

    def parse(self, completion: Sequence[int], tools: Sequence[ToolSpec], *, prompt: Sequence[int] = ()) -> Message:
        return Message(role="assistant", content=self.decode([token for token in completion if token != _END]))

    def reader(self, tools: Sequence[ToolSpec], *, prompt: Sequence[int] = ()) -> HoldingReader:
        """Return a reader that yields nothing before the end."""
        return HoldingReader()

    def thought_length(self, completion: Sequence[int]) -> None:
        """Return None: no reply has a thought."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the ids, written out."""
        return " ".join(map(str, tokens))

    @property
    def longest_token(self) -> int:
        return 128

    def bytes_of(self, token: int) -> bytes:
        """Return the id, written out."""
        return b"%d" % token

    def bind(self, request: GenerateRequest) -> GenerateRequest:
        return request


def _ids(message: Message) -> tuple[int, ...]:
    return (*map(int, message.content.split()), _END)
