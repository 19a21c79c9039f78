"""Rendering with a template that nobody has studied: everything by difference.

What a template adds around a message is found by rendering a dummy conversation with and without it:

    template([user, assistant MARK, new messages], generation prompt)
      = ... MARK <end of turn> <what the next prompt adds>

The text after the end of turn that follows MARK is the bridge, whatever the assistant really said. `prove` checks at
start, on the template at hand, that this holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparring.errors import BadInput, refusal
from sparring.generation import GenerateRequest
from sparring.protocols import Rendered
from sparring.render.chat_template import ChatTemplate
from sparring.render.hermes import THINK, THINK_END, parse_reply
from sparring.render.said import Said
from sparring.render.text_rules import TextRules
from sparring.render.tokenizer import FileTokenizer
from sparring.types import Message, ToolSpec

MARK = "sparring-mark-7f3a"
_TAIL = 64
"""Ids at the end of a prompt that hold what a template writes before a reply."""


class TemplateRenderer:
    """Serves a checkpoint through its own chat template.

    Raises:
        BadInput: the template does not end an assistant's turn with a token of its own, so no reply has an end.
    """

    name = "template"

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: FileTokenizer,
        said: Said,
        *,
        thinking: bool = False,
        stop_ids: Sequence[int] = (),
    ) -> None:
        self._said = said
        self._template = template
        self.tokenizer = tokenizer
        self._thinking = thinking
        self._added = tokenizer.added_tokens
        self._end = self._end_of_turn()
        ends = (self._added[self._end], *stop_ids)
        self._stop_ids = tuple(dict.fromkeys(ends))
        self._text_rules = TextRules(tokenizer, self._stop_ids)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a turn; the first is the one this template writes."""
        return self._stop_ids

    @property
    def control_ids(self) -> Mapping[str, int]:
        """Added tokens of the tokenizer, text -> id: what messages and tools say never becomes one of them."""
        return self.tokenizer.control.ids

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, generation: bool = True) -> Rendered:
        """A whole conversation as ids [T]; replies are encoded apart from the prompt before them, as they are sampled.

        Raises:
            BadInput: the template refuses the conversation.
        """
        text = self._text(self._said.messages(messages), tools, generation)
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
        """The next prompt: prompt + completion to the id, its end where it lacks the template's own, then the new
        messages. None where no difference is found, and where the turn ended inside a thought, which nothing can close
        any more."""
        if not completion or not new or any(message.role == "assistant" for message in new):
            return None
        ended = completion[-1] == self._added[self._end]
        thinks = self._thinks(prompt, completion)
        if ended and thinks:
            return None
        added = self._added_text(self._said.answers(new), tools)
        if added is None:
            return None
        close = "" if ended else (THINK_END if thinks else "") + self._end
        return (*prompt, *completion, *self._encode(close), *self._encode(added))

    def parse(self, completion: Sequence[int], tools: Sequence[ToolSpec], *, prompt: Sequence[int] = ()) -> Message:
        """The reply that sampled ids stand for; every sequence parses."""
        end = next((at for at, token in enumerate(completion) if token in self._stop_ids), len(completion))
        return parse_reply(self.decode(completion[:end]), thinking=self._opens_thought(prompt))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some ids, special tokens included."""
        return self.tokenizer.decode(tokens)

    def bind(self, request: GenerateRequest) -> GenerateRequest:
        """The request with what its sampling says in text also said in ids."""
        return self._text_rules.bind(request)

    def _thinks(self, prompt: Sequence[int], completion: Sequence[int]) -> bool:
        """Whether a reply ends inside its thought."""
        said = self.decode(completion)
        return (self._opens_thought(prompt) or said.lstrip().startswith(THINK)) and THINK_END not in said

    def _opens_thought(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends inside a thought that the template opened; what a message says opens none."""
        tail = list(prompt[-_TAIL:])
        tail = tail[max((at + 1 for at, token in enumerate(tail) if token in self._stop_ids), default=0) :]
        if THINK in self._added and THINK_END in self._added:
            markers = [token for token in tail if token in (self._added[THINK], self._added[THINK_END])]
            return markers[-1:] == [self._added[THINK]]
        text = self.decode(tail)
        return text.rfind(THINK) > text.rfind(THINK_END)

    def _text(self, messages: Sequence[dict[str, Any]], tools: Sequence[ToolSpec], generation: bool) -> str:
        return self._template.text(messages, self._said.tools(tools), generation=generation, thinking=self._thinking)

    def _encode(self, text: str) -> list[int]:
        """Ids of a text that continues another: some tokenizers add a space at the very start, so one is put before
        it."""
        anchor = self._added[self._end]
        ids = self.tokenizer.encode(self._end + text)
        return ids[1:] if ids and ids[0] == anchor else self.tokenizer.encode(text)

    def _end_of_turn(self) -> str:
        text = self._text([_user("hi"), {"role": "assistant", "content": MARK}], (), False)
        found = self._first_added(text, text.find(MARK) + len(MARK)) if MARK in text else None
        if found is None:
            raise refusal(
                self._template.where,
                "a chat template that ends an assistant message with a special token",
                repr(text.partition(MARK)[2]),
                "name a renderer that knows this model, or repair the template",
            )
        return found[1]

    def _first_added(self, text: str, start: int) -> tuple[int, str] | None:
        """The first added token at or after `start`: its place and its text (the longest where several begin there)."""
        found = [(at, -len(token), token) for token in self._added if (at := text.find(token, start)) >= 0]
        return (min(found)[0], min(found)[2]) if found else None

    def _added_text(self, new: Sequence[dict[str, Any]], tools: Sequence[ToolSpec]) -> str | None:
        plain = {"role": "assistant", "content": MARK}
        calling = {"role": "assistant", "content": "", "tool_calls": [_call(m) for m in new if m["role"] == "tool"]}
        for dummy in [calling, plain] if calling["tool_calls"] else [plain]:
            try:
                text = self._text([_user("hi"), dummy, *new], tools, True)
            except BadInput:  # some templates take a tool's answer only after a call, some no call without content
                continue
            at = text.find(MARK)
            end = text.find(self._end, at + len(MARK)) if at >= 0 else -1
            if end >= 0:
                return text[end + len(self._end) :]
        return None

    def _pieces(self, messages: Sequence[Message], tools: Sequence[ToolSpec], text: str) -> list[tuple[int, int, bool]]:
        """Cuts `text` into (start, end, sampled): a reply spans from its generation prompt to its end of turn."""
        pieces: list[tuple[int, int, bool]] = []
        done = 0
        for number, message in enumerate(messages):
            if message.role != "assistant" or number == 0:
                continue
            prompt = self._text(self._said.messages(messages[:number]), tools, True)
            said = self._text(self._said.messages(messages[: number + 1]), tools, False)
            said = said[
                : said.rfind(self._end) + len(self._end)
            ]  # some templates end what they take for the last message
            if text.startswith(said) and said.startswith(prompt) and done < len(prompt) < len(said):
                pieces += [(done, len(prompt), False), (len(prompt), len(said), True)]
                done = len(said)
        return [*pieces, (done, len(text), False)] if done < len(text) else pieces


def _user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _call(answer: dict[str, Any]) -> dict[str, Any]:
    """A call that this tool answer could belong to; nine characters are what the strictest templates want of an id."""
    function = {"name": answer.get("name") or "tool", "arguments": {"x": MARK}}
    return {"type": "function", "id": answer.get("tool_call_id") or "call00000", "function": function}
