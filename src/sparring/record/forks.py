"""Forks: the reason why a conversation branches off a recorded one, and the first difference between them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sparring.record.identity import message_key, text_of, thought_of, tools_key
from sparring.record.lines import Lane, Node, Request
from sparring.types import Fork, ForkReason, Message

SHOWN = 64
"""Number of characters of each side of a difference that are recorded."""

QUOTED = 16
"""Minimum number of characters of a quote; shorter texts may be equal by chance."""


_MARKED = re.compile(r"<(\w+)>\s*(.*?)\s*</\1>", re.DOTALL)


def first_difference(before: str, after: str) -> tuple[int, str, str]:
    """Return the index in UTF-8 bytes of the first different character, and an excerpt of both texts from it on."""
    if before == after:
        return len(before.encode("utf-8", "surrogatepass")), "", ""
    low, high = 0, min(len(before), len(after))
    while low < high:  # bisection of the common prefix: comparing slices is fast, single characters are not
        middle = (low + high + 1) // 2
        low, high = (middle, high) if before[:middle] == after[:middle] else (low, middle - 1)
    place = len(before[:low].encode("utf-8", "surrogatepass"))
    return place, before[low : low + SHOWN], after[low : low + SHOWN]


def with_equal_thoughts(recorded: Sequence[Message], sent: Sequence[Message], common: int) -> int:
    """Return the number of common messages of two conversations, with thoughts compared as well. A thought that the
    client left out is not a difference. `common`: number of common messages if thoughts are not compared."""
    for at, (before, after) in enumerate(zip(recorded[:common], sent, strict=False)):
        if after.reasoning and before is not after and thought_of(after) not in ("", thought_of(before)):
            return at
    return common


class Links(NamedTuple):
    """Links of a request to replies in other branches.

    Attributes:
        quoted: replies of other branches that the request quotes.
        new_agent: whether the client names an agent that made no request before.
        summed_up: whether a quoted reply is labelled as a summary.
        goes_on: whether the request continues from a quoted reply; see `sums_up`.
    """

    quoted: Sequence[Node]
    new_agent: bool
    summed_up: bool = False
    goes_on: bool = False


def fork_of(request: Request, lane: Lane, common: int, of: int | None, links: Links) -> Fork:
    """Return the reason why a conversation branches off a recorded one, and their first difference.

    Args:
        lane: lane that is nearest to the request.
        common: number of messages that the request has in common with `lane`.
        of: place (segment number) of the last segment that the request has in common with `lane`.
    """
    before, after = lane.history[common:], request.messages[common:]
    old, new = (text_of(messages[0]) if messages else "" for messages in (before, after))
    if old == new:
        old, new = (thought_of(messages[0]) if messages else "" for messages in (before, after))
    reason = _reason(request, lane, common, links)
    if reason == "tools":
        old, new = (tools_key(tools).decode("utf-8", "replace") for tools in (lane.specs, request.specs))
    place, left, right = first_difference(old, new)
    agent = request.evidence.agent
    message = min(common, len(request.messages) - 1)  # a segment has at least one message, even if both have all
    return Fork(reason=reason, of=of, message=message, byte=place, before=left, after=right, agent=agent)


def _reason(request: Request, lane: Lane, common: int, links: Links) -> ForkReason:
    label, matched = request.evidence.label, request.matched
    before, after = lane.history[common:], request.messages[common:]
    if label == "auxiliary":
        return "auxiliary"
    begins = request.node is None
    if begins and links.summed_up:
        return "compaction"
    calls = any(node.reply.tool_calls and not _quotes_text(node, request) for node in links.quoted)
    is_another = common < lane.opening  # a request with all first messages of an agent comes from that agent
    if links.new_agent or begins and calls and is_another:
        return "agent"
    if begins and (label == "compaction" or links.goes_on):
        return "compaction"
    if begins and matched is not None and all(m.role != "assistant" for m in request.messages[matched.count :]):
        return "template"
    if begins and lane.tools != request.tools and all(message.role != "assistant" for message in after):
        return "tools"
    return _edit(before, after)


def _quotes_text(node: Node, request: Request) -> bool:
    """Return whether a request quotes the text of a reply; texts of the reply's calls do not count."""
    new = request.messages[request.before :]
    return any(is_quoted(text, new) for text in _texts_of_reply(node))


def _texts_of_reply(node: Node) -> list[str]:
    """Return the text of a reply, whole and as the parts between tags in it."""
    return [node.text, *summaries_in(node.text)]


def sums_up(node: Node, own: Lane, request: Request, lane: Lane, common: int) -> bool:
    """Return whether a request replaces a conversation by a quoted reply that summarises it.

    The agent must have the same tools and the same first messages, such as its system message; a judge or a critic who
    quotes a reply differs in these. The quote must stand at the first difference, or the request must be shorter than
    the quoted conversation. There must be a conversation to summarise. Either the agent has tools and the reply follows
    other turns of the same agent, or the reply is another agent's and the request is shorter than the recorded
    conversation. A summary by an agent without tools cannot be distinguished from the agent's other replies, which are
    text as well, unless the client labels the summary.

    Args:
        node: quoted reply.
        request: first request of a branch, which quotes the reply.
        lane: lane that is nearest to the request.
        common: number of messages that the request has in common with `lane`.
    """
    if node.reply.tool_calls or not common or lane.tools != request.tools:
        return False
    inside = message_key(own.history[0]) == message_key(request.messages[0])
    # a reply in its own agent's history is not a quote
    new = [message for message in request.messages[common:] if not inside or message.role != "assistant"]
    first = [message for message in request.messages[common : common + 2] if message in new and message.role != "tool"]
    texts = _texts_of_reply(node)
    if not any(is_quoted(text, new) for text in texts):
        return False
    if len(request.messages) >= node.count and not any(is_quoted(text, first) for text in texts):
        return False
    if not inside:
        replies = [at for at, message in enumerate(lane.history) if message.role == "assistant"]
        return bool(replies) and replies[0] + 1 < len(lane.history) and len(request.messages) < len(lane.history)
    before = own.history[: node.count - 1]
    followed = node.count > own.opening + 1 or any(message.role == "assistant" for message in before)
    return bool(request.specs) and followed


def quoted_in(request: Request, leaves: Iterable[Node], *, begins: bool) -> list[Node]:
    """Return the replies of other branches that a request quotes.

    Args:
        leaves: replies without a continuation.
        begins: whether the request begins a branch; then a call's argument may be the prompt of a sub-agent.
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
    """Return whether a text is quoted in messages."""
    return len(text) >= QUOTED and any(text in message.content for message in messages)


def summaries_in(text: str) -> list[str]:
    """Return the texts between tags in a reply: clients that ask for a summary quote the summary without its tags."""
    return [inner for _, inner in _MARKED.findall(text)] if "</" in text else []


def texts_of_calls(reply: Message) -> list[str]:
    """Return the texts among the arguments of a reply's calls; such a text may be the prompt of a sub-agent."""
    values = (value for call in reply.tool_calls for value in (call.arguments or {}).values())
    return [value.strip() for value in values if isinstance(value, str)]


def _edit(before: Sequence[Message], after: Sequence[Message]) -> ForkReason:
    """Return the kind of edit between two lists of messages whose first messages differ."""
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
