"""Forks: why a conversation left another that its session had recorded, and where both differ first."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

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
        if after.reasoning and before is not after and thought_of(after) not in ("", thought_of(before)):
            return at
    return common


class Links(NamedTuple):
    """Links of a request to what was said in other branches.

    Attributes:
        quoted: replies of other branches that it quotes.
        new_agent: whether its client names an agent that has not asked before.
        summed_up: whether one of the quoted is a summary, as its client says.
        goes_on: whether it goes on from one of the quoted; see `sums_up`.
    """

    quoted: Sequence[Node]
    new_agent: bool
    summed_up: bool = False
    goes_on: bool = False


def fork_of(request: Request, lane: Lane, common: int, of: int | None, links: Links) -> Fork:
    """Return why a conversation leaves a recorded one, and where they differ first.

    Args:
        request: that begins a branch.
        lane: the recorded line that is nearest.
        common: number of messages that both have.
        of: place of the last segment that both have.
        links: to other branches.
    """
    before, after = lane.heard[common:], request.messages[common:]
    old, new = (text_of(messages[0]) if messages else "" for messages in (before, after))
    if old == new:
        old, new = (thought_of(messages[0]) if messages else "" for messages in (before, after))
    reason = _reason(request, lane, common, links)
    if reason == "tools":
        old, new = (tools_key(tools).decode("utf-8", "replace") for tools in (lane.specs, request.specs))
    place, left, right = first_difference(old, new)
    agent = request.evidence.agent
    message = min(common, len(request.messages) - 1)  # a segment tells its last message, also where both have all
    return Fork(reason=reason, of=of, message=message, byte=place, before=left, after=right, agent=agent)


def _reason(request: Request, lane: Lane, common: int, links: Links) -> ForkReason:
    label, matched = request.evidence.label, request.matched
    before, after = lane.heard[common:], request.messages[common:]
    if label == "auxiliary":
        return "auxiliary"
    begins = request.node is None
    if begins and links.summed_up:
        return "compaction"
    calls = any(node.reply.tool_calls and not _says(node, request) for node in links.quoted)
    is_another = common < lane.opening  # who tells all that an agent was first told is that agent, in other words
    if links.new_agent or begins and calls and is_another:
        return "agent"
    if begins and (label == "compaction" or links.goes_on):
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


def sums_up(node: Node, own: Lane, request: Request, lane: Lane, common: int) -> bool:
    """Return whether a request goes on from a quoted reply in the place of the conversation that this sums up.

    Its agent has the same tools and still says the beginning of what it said before, such as its system message: a
    judge or a critic who quotes a reply says other things. It quotes the reply where both differ first, or is shorter.
    And there was something to sum up: the reply was asked for behind it, by an agent with tools, of whom every other
    reply that calls nothing is the last; or it is another agent's (one that sums up, or is told everything anew), and
    the request has less than the conversation in whose place it stands. Of an agent without tools each reply is text,
    so nothing tells its summary from its acts but what its client says.

    Args:
        node: the reply.
        own: the line that it was said in.
        request: begins a branch and quotes it.
        lane: the recorded line that is nearest to the request.
        common: number of messages that both have.
    """
    if node.reply.tool_calls or not common or lane.tools != request.tools:
        return False
    inside = message_key(own.heard[0]) == message_key(request.messages[0])
    # a reply that is sent back in its agent's own history is no quote of itself
    new = [message for message in request.messages[common:] if not inside or message.role != "assistant"]
    first = [message for message in request.messages[common : common + 2] if message in new and message.role != "tool"]
    texts = _said(node)
    if not any(is_quoted(text, new) for text in texts):
        return False
    if len(request.messages) >= node.count and not any(is_quoted(text, first) for text in texts):
        return False
    if not inside:
        replies = [at for at, message in enumerate(lane.heard) if message.role == "assistant"]
        return bool(replies) and replies[0] + 1 < len(lane.heard) and len(request.messages) < len(lane.heard)
    before = own.heard[: node.count - 1]
    followed = node.count > own.opening + 1 or any(message.role == "assistant" for message in before)
    return bool(request.specs) and followed


def quoted_in(request: Request, leaves: Iterable[Node], *, begins: bool) -> list[Node]:
    """Return the replies of other branches that a request quotes.

    Args:
        request: as it was matched.
        leaves: replies that nothing continues.
        begins: whether it begins a branch; then a call's text may be what a sub-agent is told.
    """
    new = request.messages[request.before :]
    return [
        node
        for node in leaves
        if node is not request.node
        and (
            is_quoted(node.text, new)
            or begins
            and any(is_quoted(t, new) for t in (*texts_of_calls(node.reply), *summaries_in(node.text)))
        )
    ]


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
