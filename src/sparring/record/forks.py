"""Forks: why a conversation left another that its session had recorded, and where both differ first."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from sparring.record.identity import message_key, text_of, thought_of, tools_key
from sparring.record.lines import Lane, Node, Request
from sparring.types import Fork, ForkReason, Message

SHOWN = 64
"""Characters of each side of a difference that are recorded."""

QUOTED = 16
"""Characters that a text has at least where it counts as quoted; shorter ones are written by chance."""


_MARKED = re.compile(r"<(\w+)>\s*(.*?)\s*</\1>", re.DOTALL)


def first_difference(before: str, after: str) -> tuple[int, str, str]:
    """Return the place of the first byte that differs, in UTF-8, and what both texts have from there on, cut short."""
    if before == after:
        return len(before.encode("utf-8", "surrogatepass")), "", ""
    low, high = 0, min(len(before), len(after))
    while low < high:  # the longest common beginning, by halves: comparing texts is fast, characters is not
        middle = (low + high + 1) // 2
        low, high = (middle, high) if before[:middle] == after[:middle] else (low, middle - 1)
    place = len(before[:low].encode("utf-8", "surrogatepass"))
    return place, before[low : low + SHOWN], after[low : low + SHOWN]


def with_equal_thoughts(heard: Sequence[Message], sent: Sequence[Message], common: int) -> int:
    """Return how many of the first messages of two conversations, `common` but for thoughts, are common with these: a
    thought that is left out differs from none."""
    for at, (before, after) in enumerate(zip(heard[:common], sent, strict=False)):
        if before is not after and thought_of(after) not in ("", thought_of(before)):
            return at
    return common


def fork_of(
    request: Request,
    lane: Lane,
    common: int,
    of: int | None,
    *,
    new_agent: bool,
    quoted: Sequence[Node],
    summed_up: bool = False,
) -> Fork:
    """Return why a conversation leaves a recorded one, and where they differ first.

    Args:
        request: that begins a branch.
        lane: the recorded line that is nearest.
        common: number of messages that both have.
        of: place of the last segment that both have.
        new_agent: whether its client names an agent that has not asked before.
        quoted: replies of other branches that it quotes.
        summed_up: whether one of these is a summary, as its client says.
    """
    before, after = lane.heard[common:], request.messages[common:]
    old, new = (text_of(messages[0]) if messages else "" for messages in (before, after))
    if old == new:
        old, new = (thought_of(messages[0]) if messages else "" for messages in (before, after))
    reason = _reason(request, lane, common, new_agent, quoted, summed_up)
    if reason == "tools":
        old, new = (tools_key(tools).decode("utf-8", "replace") for tools in (lane.specs, request.specs))
    place, left, right = first_difference(old, new)
    agent = request.evidence.agent
    message = min(common, len(request.messages) - 1)  # a segment tells its last message, also where both have all
    return Fork(reason=reason, of=of, message=message, byte=place, before=left, after=right, agent=agent)


def _reason(
    request: Request,
    lane: Lane,
    common: int,
    new_agent: bool,
    quoted: Sequence[Node],
    summed_up: bool,
) -> ForkReason:
    label, matched = request.evidence.label, request.matched
    before, after = lane.heard[common:], request.messages[common:]
    if label == "auxiliary":
        return "auxiliary"
    begins = request.node is None
    if begins and summed_up:
        return "compaction"
    calls = any(node.reply.tool_calls and not _says(node, request) for node in quoted)
    is_another = common < lane.opening  # who tells all that an agent was first told is that agent, in other words
    if new_agent or begins and calls and is_another:
        return "agent"
    if begins and (label == "compaction" or any(_sums_up(node, request, lane, after) for node in quoted)):
        return "compaction"
    if begins and matched is not None and all(m.role != "assistant" for m in request.messages[matched.count :]):
        return "template"
    if begins and lane.tools != request.tools and all(message.role != "assistant" for message in after):
        return "tools"
    return _edit(before, after)


def _says(node: Node, request: Request) -> bool:
    """Return whether a request quotes what a reply says, not what it calls."""
    new = request.messages[request.before :]
    return any(is_quoted(text, new) for text in _said(node))


def _said(node: Node) -> list[str]:
    """Return what a reply says, whole and between tags of its own."""
    return [node.text, *summaries_in(node.text)]


def _sums_up(node: Node, request: Request, lane: Lane, after: Sequence[Message]) -> bool:
    """Return whether a request with a quoted reply goes on from it in the place of the conversation that it sums up:
    with the same tools, and fewer messages, or the quote where both differ first. `after`: messages from there on."""
    if node.reply.tool_calls or lane.tools != request.tools:
        return False
    first = [message for message in after[:2] if message.role != "tool"]
    return len(request.messages) < node.count or any(is_quoted(text, first) for text in _said(node))


def is_quoted(text: str, messages: Iterable[Message]) -> bool:
    """Return whether messages that were told quote a text."""
    return len(text) >= QUOTED and any(text in message.content for message in messages)


def summaries_in(text: str) -> list[str]:
    """Return what a reply says between tags of its own: clients that ask for a summary quote it without them."""
    return [inner for _, inner in _MARKED.findall(text)] if "</" in text else []


def texts_of_calls(reply: Message) -> list[str]:
    """Return the texts among a reply's arguments: one of them may be what a sub-agent is told."""
    values = (value for call in reply.tool_calls for value in (call.arguments or {}).values())
    return [value.strip() for value in values if isinstance(value, str)]


def _edit(before: Sequence[Message], after: Sequence[Message]) -> ForkReason:
    """Return what was done to messages, of which the first differ."""
    if not before:
        return "inserted"
    if not after:
        return "deleted"
    if before[0].role == "system" or after[0].role == "system":
        return "system"
    old, new = message_key(before[0]), message_key(after[0])
    if any(message_key(message) == new for message in before[1:]):
        return "deleted"
    if any(message_key(message) == old for message in after[1:]):
        return "inserted"
    return "edited"
