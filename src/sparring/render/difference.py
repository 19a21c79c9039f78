"""Rendering by difference, for a template of unknown format.

The text that a template adds between a reply and the next one is found by rendering a dummy conversation:

    template([user, assistant PLACEHOLDER, new messages], generation prompt)
      = ... PLACEHOLDER <end of turn> <bridge>

The text after the end of turn that follows PLACEHOLDER is the bridge, for any text of the assistant. `round_trip.py`
checks this for the template at hand before a run starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparring.errors import BadInput, refusal
from sparring.generation import Rendered
from sparring.render.capabilities import TemplatePlaces
from sparring.render.chat_template import ChatTemplate
from sparring.render.escaping import TextEscaper
from sparring.render.hermes import TextReader
from sparring.render.reply_reader import HoldingReader, message_of
from sparring.render.tags import THINK, THINK_END
from sparring.render.text_rules import TextRules, TokenizedFormat
from sparring.render.thoughts import drops_thoughts, has_dropped, with_thoughts
from sparring.render.tokenizer import FileTokenizer
from sparring.types import Message, ToolSpec

PLACEHOLDER = "sparring-mark-7f3a"
_TAIL = 64
"""Number of ids at the end of a prompt that are searched for the beginning of a thought."""


class TemplateRenderer(TokenizedFormat):
    """Renderer of a checkpoint through its own chat template. Implements `Renderer`.

    Args:
        thinking: value of the template's thinking switch.
        keeps_thoughts: whether thoughts of earlier replies stay in the prompt even if the template drops them.
        stop_ids: further ids that end a turn.

    Raises:
        BadInput: the template does not end an assistant's turn with an added token, so no reply has an end.
    """

    name = "template"

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: FileTokenizer,
        escaper: TextEscaper,
        *,
        thinking: bool = False,
        keeps_thoughts: bool = True,
        stop_ids: Sequence[int] = (),
    ) -> None:
        self._escaper = escaper
        self._template = template
        self.tokenizer = tokenizer
        self._thinking = thinking
        self._added = tokenizer.added_tokens
        self._places = TemplatePlaces(self._write)
        self._end = self._end_of_turn()
        ends = (self._added[self._end], *stop_ids)
        self.stop_ids = tuple(dict.fromkeys(ends))
        self._text_rules = TextRules(tokenizer, self.stop_ids, self)
        drops = drops_thoughts(self)
        self._drops_thoughts, self._mends_thoughts = drops and not keeps_thoughts, drops and keeps_thoughts

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, generation: bool = True) -> Rendered:
        """Render a conversation as ids [T]. Replies are encoded separately from the prompt before them, as in sampling.

        Raises:
            BadInput: the template refuses the conversation, or does not write tools.
        """
        rendered = None
        if self._mends_thoughts and has_dropped(messages):
            rendered = with_thoughts(self, messages, tools, generation)
        return rendered or self.plain(messages, tools, generation)

    def plain(self, messages: Sequence[Message], tools: Sequence[ToolSpec], generation: bool) -> Rendered:
        """Render a conversation as the template does, without keeping thoughts. Raises the errors of `render`."""
        self._places.check(tools)
        messages = self._places.arranged(messages, tools)
        text = self._text(self._escaper.messages(messages), tools, generation)
        tokens: list[int] = []
        sampled: list[bool] = []
        for start, end, mark in self._pieces(messages, tools, text):
            ids = self._encode(text[start:end])
            tokens += ids
            sampled += [mark] * len(ids)
        return Rendered(tokens=tuple(tokens), sampled=tuple(sampled))

    def bridge(
        self,
        prompt: Sequence[int],
        completion: Sequence[int],
        new: Sequence[Message],
        tools: Sequence[ToolSpec],
    ) -> tuple[int, ...] | None:
        """Return the next prompt: prompt + completion, the template's end of turn if the completion lacks it, and the
        new messages. None without a completion or new messages, for a reply in `new`, and if no difference is found.
        None also if the end of turn was sampled inside a thought, or if the renderer follows a template that drops the
        reply's thought."""
        if not completion or not new or any(message.role == "assistant" for message in new):
            return None
        ended = completion[-1] == self._added[self._end]
        thinks = self._ends_in_thought(prompt, completion)
        if ended and thinks:
            return None
        if self._drops_thoughts and THINK_END in self.decode(completion) and any(m.role == "user" for m in new):
            return None
        added = self._bridge_text(self._escaper.answers(self._places.following(new, tools)), tools)
        if added is None:
            return None
        close = "" if ended else (THINK_END if thinks else "") + self._end
        return (*prompt, *completion, *self._encode(close), *self._encode(added))

    def parse(self, completion: Sequence[int], tools: Sequence[ToolSpec], *, prompt: Sequence[int] = ()) -> Message:
        """Parse sampled ids as a reply; every sequence parses. Without tools, nothing is a call."""
        reader = self._reader(tools, prompt)
        return message_of((*reader.read(completion), *reader.rest()))

    def reader(self, tools: Sequence[ToolSpec], *, prompt: Sequence[int] = ()) -> TextReader | HoldingReader:
        """Open the reader of one reply that is sampled now. For a tokenizer that is not byte-level, the reader emits
        nothing before the end."""
        return self._reader(tools, prompt) if self.tokenizer.decodes_bytes else HoldingReader()

    def _reader(self, tools: Sequence[ToolSpec], prompt: Sequence[int]) -> TextReader:
        return TextReader(self.decode, self.stop_ids, thinking=self._opens_thought(prompt), calls=bool(tools))

    def thought_length(self, completion: Sequence[int]) -> int:
        """Count the tokens of a reply's thought, up to and including the token that completes the closing tag."""
        written, end = b"", THINK_END.encode()
        for at, token in enumerate(completion):
            if token in self.stop_ids:
                return at
            written = written[1 - len(end) :] + self.bytes_of(token)
            if end in written:
                return at + 1
        return len(completion)

    def _ends_in_thought(self, prompt: Sequence[int], completion: Sequence[int]) -> bool:
        reply = self.decode(completion)
        return (self._opens_thought(prompt) or reply.lstrip().startswith(THINK)) and THINK_END not in reply

    def _opens_thought(self, prompt: Sequence[int]) -> bool:
        """Return whether a prompt ends inside a thought that the template opened. The text of a message cannot open
        one."""
        tail = list(prompt[-_TAIL:])
        tail = tail[max((at + 1 for at, token in enumerate(tail) if token in self.stop_ids), default=0) :]
        if THINK in self._added and THINK_END in self._added:
            markers = [token for token in tail if token in (self._added[THINK], self._added[THINK_END])]
            return markers[-1:] == [self._added[THINK]]
        text = self.decode(tail)
        return text.rfind(THINK) > text.rfind(THINK_END)

    def _text(self, messages: Sequence[dict[str, Any]], tools: Sequence[ToolSpec], generation: bool) -> str:
        return self._template.text(messages, self._escaper.tools(tools), generation=generation, thinking=self._thinking)

    def _write(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], generation: bool) -> str:
        return self._template.text(messages, tools, generation=generation, thinking=self._thinking)

    def _encode(self, text: str) -> list[int]:
        """Encode a text that continues another. An added token is put before the text, because some tokenizers add a
        space at the very beginning of a text."""
        anchor = self._added[self._end]
        ids = self.tokenizer.encode(self._end + text)
        return ids[1:] if ids and ids[0] == anchor else self.tokenizer.encode(text)

    def _end_of_turn(self) -> str:
        text = self._text([_user("hi"), {"role": "assistant", "content": PLACEHOLDER}], (), False)
        end = self._first_added(text, text.find(PLACEHOLDER) + len(PLACEHOLDER)) if PLACEHOLDER in text else None
        if end is None:
            raise refusal(
                self._template.where,
                "a chat template that ends an assistant message with a special token",
                repr(text.partition(PLACEHOLDER)[2]),
                "name a renderer that knows this model, or repair the template",
            )
        return end[1]

    def _first_added(self, text: str, start: int) -> tuple[int, str] | None:
        """Return the index and the text of the first added token at or after `start`; the longest if several begin
        there."""
        places = [(at, -len(token), token) for token in self._added if (at := text.find(token, start)) >= 0]
        return (min(places)[0], min(places)[2]) if places else None

    def _bridge_text(self, new: Sequence[dict[str, Any]], tools: Sequence[ToolSpec]) -> str | None:
        plain: dict[str, Any] = {"role": "assistant", "content": PLACEHOLDER}
        calls = [_call(message) for message in new if message["role"] == "tool"]
        calling: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": calls}
        for dummy in [calling, plain] if calling["tool_calls"] else [plain]:
            try:
                text = self._text([_user("hi"), dummy, *new], tools, True)
            except BadInput:  # some templates require a call before a tool's answer, some refuse a call without text
                continue
            at = text.find(PLACEHOLDER)
            end = text.find(self._end, at + len(PLACEHOLDER)) if at >= 0 else -1
            if end >= 0:
                return text[end + len(self._end) :]
        return None

    def _pieces(self, messages: Sequence[Message], tools: Sequence[ToolSpec], text: str) -> list[tuple[int, int, bool]]:
        """Cut `text` into (start, end, sampled): a reply spans from the end of its generation prompt to its end of
        turn."""
        pieces: list[tuple[int, int, bool]] = []
        position = 0
        for number, message in enumerate(messages):
            if message.role != "assistant" or number == 0:
                continue
            prompt = self._text(self._escaper.messages(messages[:number]), tools, True)
            reply = self._text(self._escaper.messages(messages[: number + 1]), tools, False)
            reply = reply[: reply.rfind(self._end) + len(self._end)]  # some templates write more after the last message
            if text.startswith(reply) and reply.startswith(prompt) and position < len(prompt) < len(reply):
                pieces += [(position, len(prompt), False), (len(prompt), len(reply), True)]
                position = len(reply)
        return [*pieces, (position, len(text), False)] if position < len(text) else pieces


def _user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _call(answer: dict[str, Any]) -> dict[str, Any]:
    """Return a call that this tool's answer could belong to. The call's id has nine characters, which the strictest
    templates require."""
    function = {"name": answer.get("name") or "tool", "arguments": {"x": PLACEHOLDER}}
    return {"type": "function", "id": answer.get("tool_call_id") or "call00000", "function": function}
