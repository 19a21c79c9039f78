"""Matching: which recorded reply a client's conversation goes on from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sparring.record.identity import thought_of
from sparring.record.lines import Lane, Node, begins, place_named
from sparring.types import Evidence, Message, Segment


class Matching(NamedTuple):
    """Record of one role, as far as it is needed to find a conversation again.

    Attributes:
        lanes: lines of turns, by their numbers.
        lane_of_reply: numbers of lines, by the object of their last reply.
        nodes: replies, by the digest of their conversation and that of the tools.
        written: segments, by their places.
    """

    lanes: Mapping[int, Lane]
    lane_of_reply: Mapping[int, int]
    nodes: Mapping[bytes, Node]
    written: Mapping[int, Segment]

    def same_objects(self, messages: Sequence[Message], tools: bytes) -> Lane | None:
        """Return the lane whose messages these begin with, up to the very object of its last reply; None where none is.

        A loop that only adds messages sends such objects. Every other request is matched by its keys.
        """
        count = next((at for at in range(len(messages), 0, -1) if messages[at - 1].role == "assistant"), 0)
        number = self.lane_of_reply.get(id(messages[count - 1])) if count else None
        if number is None:
            return None
        lane = self.lanes[number]
        same = len(lane.heard) == lane.replied == count and lane.tools == tools and begins(messages, lane.heard)
        return lane if same else None

    def deepest(
        self, messages: Sequence[Message], keys: Sequence[bytes], tools: bytes, evidence: Evidence
    ) -> tuple[Node | None, int]:
        """Return the longest recorded conversation that one with these keys begins with, and its number of messages."""
        for count in range(len(messages), 0, -1):
            if messages[count - 1].role == "assistant":
                node = self.nodes.get(keys[count - 1] + tools)
                node = None if node is None else self._chosen(node, messages[:count], evidence)
                if node is not None:
                    return node, count
        return None, 0

    def _chosen(self, node: Node | None, messages: Sequence[Message], evidence: Evidence) -> Node | None:
        """Return which of the replies with an equal conversation is meant: the one that the client names, by its id or
        by those of its calls; else one of the same agent; else the last that was delivered. A thought that the client
        sends back has to be the recorded one; None where it is no reply's."""
        equal = []
        while node is not None:
            if self._thinks_alike(node, messages):
                equal.append(node)
            node = node.twin
        if len(equal) < 2:
            return equal[0] if equal else None
        calls = [call.id for call in messages[-1].tool_calls]

        def rank(node: Node) -> tuple[bool, bool, bool, bool, int]:
            ids = [call.id for call in node.reply.tool_calls]
            named = evidence.handle in ids or place_named(evidence.handle) == node.place
            delivered = self.written[node.place].delivered is not False
            return named, bool(ids) and ids == calls, node.agent == evidence.agent, delivered, node.place

        return max(equal, key=rank)

    def _thinks_alike(self, node: Node, messages: Sequence[Message]) -> bool:
        """Return whether each thought in a conversation is the recorded one."""
        if not any(sent.reasoning for sent in messages):
            return True
        heard = self.lanes[node.lane].heard
        return all(
            thought_of(sent) == thought_of(recorded)
            for sent, recorded in zip(messages, heard, strict=False)
            if sent.reasoning and sent is not recorded and sent.role == "assistant" and thought_of(sent)
        )
