"""Matching: the recorded reply that a client's conversation continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sparring.record.identity import thought_of
from sparring.record.lines import Lane, Node, begins, place_named
from sparring.types import Evidence, Message, Segment


class Matching(NamedTuple):
    """Parts of a role's record that matching needs.

    Attributes:
        lane_of_reply: lane number by `id()` of the lane's last reply.
        nodes: replies by the digest of their conversation and of the tools.
        written: segments by place.
    """

    lanes: Mapping[int, Lane]
    lane_of_reply: Mapping[int, int]
    nodes: Mapping[bytes, Node]
    written: Mapping[int, Segment]

    def same_objects(self, messages: Sequence[Message], tools: bytes) -> Lane | None:
        """Return the lane whose messages are the beginning of `messages`, with the same object as last reply; None if
        no lane matches.

        This is the fast path for a loop that only appends messages. Other requests are matched by digests.
        """
        count = next((at for at in range(len(messages), 0, -1) if messages[at - 1].role == "assistant"), 0)
        number = self.lane_of_reply.get(id(messages[count - 1])) if count else None
        if number is None:
            return None
        lane = self.lanes[number]
        same = len(lane.history) == lane.replied == count and lane.tools == tools and begins(messages, lane.history)
        return lane if same else None

    def deepest(
        self, messages: Sequence[Message], keys: Sequence[bytes], tools: bytes, evidence: Evidence
    ) -> tuple[Node | None, int]:
        """Return the last reply of the longest recorded conversation that is a prefix of `messages`, and the length of
        that conversation."""
        for count in range(len(messages), 0, -1):
            if messages[count - 1].role == "assistant":
                node = self.nodes.get(keys[count - 1] + tools)
                node = None if node is None else self._choose(node, messages[:count], evidence)
                if node is not None:
                    return node, count
        return None, 0

    def _choose(self, node: Node | None, messages: Sequence[Message], evidence: Evidence) -> Node | None:
        """Choose among the replies with an equal history; None if the client's thoughts match no candidate.

        The preference is: the reply that the client names by its id or by the ids of its calls, then a reply of the
        same agent, then a delivered one, then the latest.
        """
        equal = []
        while node is not None:
            if self._thoughts_match(node, messages):
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

    def _thoughts_match(self, node: Node, messages: Sequence[Message]) -> bool:
        """Return whether every thought that the client sends equals the recorded thought."""
        if not any(sent.reasoning for sent in messages):
            return True
        history = self.lanes[node.lane].history
        return all(
            thought_of(sent) == thought_of(recorded)
            for sent, recorded in zip(messages, history, strict=False)
            if sent.reasoning and sent is not recorded and sent.role == "assistant" and thought_of(sent)
        )
