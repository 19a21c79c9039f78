"""Expert conversations as tokens: the ids that the engine would have read and sampled if it had been the expert."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from sparring.errors import refusal
from sparring.generation import Rendered
from sparring.protocols import Renderer
from sparring.render.thoughts import followers, last_stop
from sparring.types import Message, ToolSpec

_QUESTION = Message(role="user", content="?")


def reply_tokens(renderer: Renderer, reply: Message, tools: Sequence[ToolSpec] = ()) -> tuple[int, ...]:
    """Return the ids that a model would sample for `reply`, its end of turn included.

    Raises:
        BadInput: the format does not continue a generation prompt with this reply (for example a thought, with thinking
            off).
    """
    # Surrounding blanks would merge with the prompt's last token, and parsing drops them anyway.
    reply = dataclasses.replace(reply, content=reply.content.strip())
    prompt = renderer.render([_QUESTION], tools).tokens
    conversation = renderer.render([_QUESTION, reply], tools, generation=False)
    marked = [at for at, sampled in enumerate(conversation.sampled) if sampled and at >= len(prompt)]
    if conversation.tokens[: len(prompt)] != prompt or not marked:
        raise refusal(
            "demonstration",
            "a reply that continues the generation prompt",
            repr(renderer.decode(conversation.tokens)[-120:]),
            "leave out the reasoning, switch thinking, or name a renderer that knows this model",
        )
    ends = [at for at in marked if conversation.tokens[at] in renderer.stop_ids]  # a newline may follow the turn's end
    tokens = conversation.tokens[len(prompt) : (ends or marked)[-1] + 1]
    if ends:
        return tokens
    followed = renderer.render([_QUESTION, reply, *followers(reply)], tools, generation=False).tokens
    return (*tokens, *last_stop(followed, renderer.stop_ids))


def demonstration_tokens(
    renderer: Renderer,
    messages: Sequence[Message],
    tools: Sequence[ToolSpec] = (),
    *,
    imitated: Sequence[int] | None = None,
    prompt: int | None = None,
) -> Rendered:
    """Render a conversation for supervised fine-tuning; `sampled` marks the ids of the replies, the only ones to train
    on.

    The conversation is built turn by turn as a recorded session builds it: the first prompt is rendered, every later
    prompt is a bridge over the ids so far. Messages after the last reply are left out.

    Args:
        imitated: indices of the replies to train on; None for all after the first prompt.
        prompt: number of messages in the first prompt, which may contain replies of earlier conversations; None for all
            messages before the first reply.

    Raises:
        BadInput: the conversation has no reply, begins with one, has two in a row that the format cannot join, or the
            template rewrites history between turns.
    """
    replies = [at for at, message in enumerate(messages) if message.role == "assistant" and at >= (prompt or 0)]
    if not replies or replies[0] == 0:
        raise refusal("demonstration", "a question and a reply", f"{len(messages)} messages", "leave this row out")
    tokens = renderer.render(messages[: replies[0]], tools).tokens
    sampled, start = [False] * len(tokens), 0
    for previous, at in zip([None, *replies], replies, strict=False):
        if previous is not None:
            tokens = _bridge(renderer, tokens, start, messages[previous + 1 : at], tools)
            sampled += [False] * (len(tokens) - len(sampled))
        start = len(tokens)
        reply = reply_tokens(renderer, messages[at], tools)
        tokens += reply
        sampled += [imitated is None or at in imitated] * len(reply)
    return Rendered(tokens=tokens, sampled=tuple(sampled))


def _bridge(
    renderer: Renderer, tokens: tuple[int, ...], start: int, new: Sequence[Message], tools: Sequence[ToolSpec]
) -> tuple[int, ...]:
    bridged = renderer.bridge(tokens[:start], tokens[start:], new, tools)
    if bridged is None and not new:
        got, do = "two of the assistant in a row", "join them into one message"
        raise refusal("demonstration", "a message of another between two replies", got, do)
    if bridged is None:
        raise refusal(
            "demonstration",
            "a chat template that keeps earlier messages unchanged",
            f"a rewrite before {new[-1].role!r}",
            "split the conversation there",
        )
    return bridged
