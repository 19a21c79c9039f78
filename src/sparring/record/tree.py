"""Tree of all messages and replies of one role.

Every reply is a node. A request whose messages begin with a node's conversation continues that node: its prompt is the
node's ids bridged by the new messages, never a re-encoding of text (law 1). Any other request is rendered whole and
begins a new branch, such as an edited history, a compaction or a sub-agent. The first segment of a branch stores the
reason (`Fork`).

A place is the number of a segment, which a turn gets when it is planned. So the record stands in the order of requests
even if replies end in another order. Only a turn that is repeated after an engine failure gets the same places again.

Ids are stored once, in the segments; conversations and prompts are digests, each of which continues the previous one.
So the memory of a session is proportional to its ids, and a late turn takes about as long as an early one.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

from sparring.generation import Completion, Sampling
from sparring.protocols import Renderer
from sparring.record.branches import Transcript, transcripts_of
from sparring.record.forks import Links, fork_of, quoted_in, sums_up, with_equal_thoughts
from sparring.record.forms import Forms
from sparring.record.identity import DIGEST_BYTES, chain_digests
from sparring.record.lines import START, Lane, Node, Request, Turn, place_named
from sparring.record.matching import Matching
from sparring.record.order import settled
from sparring.record.rendering import rendered, renders_long
from sparring.record.tool_lists import ToolLists
from sparring.reply import NO_EVIDENCE
from sparring.types import Evidence, Label, Message, Segment, Source, ToolSpec

MOST_QUOTED = 64
"""Maximum number of replies without a continuation in which quotes are searched; the oldest are dropped."""


@dataclass(slots=True)
class Tree:
    """All messages and replies of one role, as segments. `plan` assigns places, `append` writes.

    Attributes:
        tool_lists: cache of tool lists, shared by all sessions of a recorder.
    """

    renderer: Renderer
    tool_lists: ToolLists = field(default_factory=ToolLists)
    _written: dict[int, Segment] = field(default_factory=dict)
    _unwritten: dict[int, Segment] = field(default_factory=dict)
    _nodes: dict[bytes, Node] = field(default_factory=dict)
    _forms: Forms = field(default_factory=Forms)
    _requests: dict[bytes, int] = field(default_factory=dict)
    _abandoned: dict[bytes, list[tuple[int, int, int, int]]] = field(default_factory=dict)
    _inputs: dict[tuple[int | None, tuple[int, ...]], int] = field(default_factory=dict)
    _lanes: dict[int, Lane] = field(default_factory=dict)
    _lane_of_reply: dict[int, int] = field(default_factory=dict)
    _leaves: dict[int, Node] = field(default_factory=dict)
    _summaries: dict[int, list[int]] = field(default_factory=dict)
    _agents: set[str] = field(default_factory=set)
    _reserved: frozenset[int] = frozenset()
    _next: int = 0

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Record, in the order of requests."""
        return settled(self._written.values())

    def transcripts(self) -> tuple[Transcript, ...]:
        """Return the conversation of each branch, with the messages of its prompts."""
        segments = self.segments
        constraints = {
            s.index: s.sampling.constraint for s in segments if s.sampling and s.sampling.constraint is not None
        }
        ends = {place: (lane, count) for lane in self._lanes.values() for count, place in lane.spans}

        def messages(index: int) -> tuple[Message, ...]:
            place = segments[index].place
            lane, count = ends[index if place is None else place]
            return tuple(lane.history[:count])

        return transcripts_of(segments, constraints, messages)

    def reserve(self, inputs: Iterable[tuple[int | None, tuple[int, ...], int]], places: Iterable[int]) -> None:
        """Reserve the places of a record for its turns, which will be played again. `inputs`: input segments, each as
        the place of its parent, its ids and its own place."""
        self._inputs.update({(parent, added): place for parent, added, place in inputs})
        self._reserved = frozenset(places)

    async def plan(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        evidence: Evidence = NO_EVIDENCE,
        recorded: Callable[[bytes, int], int | None] = lambda prompt, repeat: None,
    ) -> Turn:
        """Return the turn of a request. Only one turn may be planned at a time.

        Args:
            messages: whole conversation.
            tools: tools that the prompt shows.
            recorded: `recorded(prompt_digest, n)` returns the reserved place of the n-th (0-based) reply to this
                prompt, or None if the reply was not recorded.

        Raises:
            ValueError: the request has no message.
        """
        tools_digest, specs, long = self.tool_lists.of(tools)
        messages, node, before, keys = self._match(messages, tools_digest, evidence)
        matched = node
        added = None if node is None else await self._bridge(node, messages[before:], tools, long)
        if node is None or added is None:
            # A first request is the prompt; any later whole render is the harness's own doing: it rewrote the history.
            source: Source = "harness" if any(message.role == "assistant" for message in messages) else "prompt"
            messages = self._forms.with_thoughts(messages)
            long = long or renders_long(messages)
            added = (await rendered(long, self.renderer.render, messages, tools)).tokens
            keys = keys if node is None else self._forms.keys(START, messages)
            node, before = None, 0
        else:
            source = "tool" if any(message.role == "tool" for message in messages[before:]) else "prompt"
        ids = hashlib.blake2b(digest_size=DIGEST_BYTES) if node is None else node.ids.copy()
        length, parent = (0, None) if node is None else (node.length, node.place)
        ids.update(_bytes(added))
        repeat, attempt, input_place, place = self._assign_places(parent, added, ids.digest(), recorded)
        request = Request(messages, before, keys, tools_digest, specs, evidence, node, matched)
        if input_place not in self._written and input_place not in self._unwritten:
            segment = partial(Segment, index=input_place, parent=parent, source=source, tokens=added)
            self._unwritten[input_place] = self._input_segment(segment, input_place, request)
        return Turn(
            ids=ids,
            length=length + len(added),
            parent=parent,
            added=added,
            source=source,
            input_place=input_place,
            place=place,
            lane=self._extend_lane(node, request, input_place),
            repeat=repeat,
            attempt=attempt,
            key=keys[-1],
            tools=tools_digest,
            node=node,
            before=before,
            count=len(messages),
            evidence=evidence,
        )

    def prompt(self, turn: Turn) -> tuple[int, ...]:
        """Return all ids of a turn's prompt [T]."""
        path: list[Sequence[int]] = [turn.added]
        at = turn.parent
        while at is not None:
            path.append(self._written[at].tokens)
            at = self._written[at].parent
        return tuple(chain.from_iterable(reversed(path)))

    def append(
        self,
        turn: Turn,
        completion: Completion,
        reply: Message,
        sampling: Sampling,
        model: str,
        recorded: Segment | None = None,
    ) -> list[Segment]:
        """Write a turn.

        Args:
            recorded: recorded segment of the reply, if it is played again.

        Returns:
            Segments to store, numbered by place: the input if it is new, the reply, and earlier segments that changed.
        """
        new = [] if turn.input_place not in self._unwritten else [self._unwritten.pop(turn.input_place)]
        versions, kv_versions = completion.versions, completion.kv_versions
        lost = completion.finish_reason == "abort"
        new.append(
            Segment(
                index=turn.place,
                parent=turn.input_place,
                source="policy",
                tokens=completion.tokens,
                message=reply,
                model=model,
                logprobs=completion.logprobs,
                versions=versions,
                kv_versions=versions if kv_versions == versions else kv_versions,  # one object if both are equal
                sampling=sampling,
                kept=completion.kept,
                finish_reason=completion.finish_reason,
                label=recorded.label if recorded is not None else "lost" if lost else turn.evidence.label or "agent",
                evidence=None if turn.evidence == NO_EVIDENCE else turn.evidence,
                delivered=recorded.delivered if recorded is not None else False if lost else None,
            )
        )
        self._written.update((segment.index, segment) for segment in new)
        new += chain.from_iterable(map(self._label_summary, self._summaries.pop(turn.input_place, ())))
        ids = turn.ids.copy()
        ids.update(_bytes(completion.tokens))
        self._add_reply(turn, reply, ids, turn.length + len(completion.tokens))
        return new

    def _label_summary(self, place: int) -> list[Segment]:
        """Label the reply in a place as a summary, and if its request began a branch, the branch as a compaction.
        Return the changed segments."""
        summary = self.label(place, "compaction")
        request = None if summary.parent is None else self._written[summary.parent]
        if request is None or request.fork is None or request.fork.reason == "compaction":
            return [summary]
        self._written[request.index] = replace(request, fork=replace(request.fork, reason="compaction"))
        return [self._written[request.index], summary]

    def label(self, place: int, label: Label, delivered: bool | None = None) -> Segment:
        """Change the label of the reply in a place. Return the changed segment, which must be stored again.
        `delivered`: whether the client received the reply; None: no change."""
        segment = self._written[place]
        delivered = segment.delivered if delivered is None else delivered
        self._written[place] = replace(segment, label=label, delivered=delivered)
        return self._written[place]

    def call_ids(self, turn: Turn) -> str:
        """Return the prefix of the call ids of a turn's reply, which is unique in the session, and equal when the turn
        is played again."""
        return f"call_{turn.place - 1}_"

    def deliver(self, reply: str, delivered: bool | None) -> Segment | None:
        """Record whether a client received a reply.

        Args:
            delivered: whether the client received the reply. None: unknown, which replaces an earlier True.

        Returns:
            Segment to store again, if the reply becomes lost or was lost before; otherwise None.
        """
        place = place_named(reply)
        segment = None if place is None else self._written.get(place)
        if place is None or segment is None or segment.sampling is None or segment.delivered == delivered:
            return None
        if delivered is None:
            if segment.delivered:
                self._written[place] = replace(segment, delivered=None)
            return None
        lost = segment.delivered is False
        evidence = segment.evidence or NO_EVIDENCE
        label = (evidence.label or "agent") if lost else segment.label if delivered else "lost"
        written = self.label(place, label, delivered)
        return written if lost or not delivered else None

    def is_lost(self, place: int) -> bool:
        """Return whether the reply in a place was sampled completely and counts as not delivered."""
        segment = self._written[place]
        return segment.delivered is False and segment.finish_reason != "abort"

    def abandon(self, turn: Turn) -> None:
        """Undo a planned turn that got no reply: the next request with the same prompt is the same turn."""
        entry = (turn.repeat, turn.attempt + 1, turn.input_place, turn.place)
        heapq.heappush(self._abandoned.setdefault(turn.prompt, []), entry)
        lane, node = self._lanes[turn.lane], turn.node
        if len(lane.history) == turn.count and lane.replied == turn.before:
            del lane.history[turn.before :]
            lane.spans.pop()
            if node is not None and node.lane == turn.lane:
                node.continued = False

    def _match(
        self, messages: Sequence[Message], tools: bytes, evidence: Evidence
    ) -> tuple[Sequence[Message], Node | None, int, list[bytes]]:
        """Match a request.

        Returns:
            Conversation with each reply as one message, the reply that it continues, the number of messages up to that
            reply, and the digest of the conversation up to each later message.
        """
        if not messages:
            raise ValueError("a request must have a message")
        matching = Matching(self._lanes, self._lane_of_reply, self._nodes, self._written)
        lane = matching.same_objects(messages, tools)
        if lane is not None:
            return messages, lane.node, lane.replied, chain_digests(lane.key, messages[lane.replied :])
        messages, keys = self._forms.read(messages)
        node, before = matching.deepest(messages, keys, tools, evidence)
        return messages, node, before, keys[before:]

    def _assign_places(
        self,
        parent: int | None,
        added: tuple[int, ...],
        prompt: bytes,
        recorded: Callable[[bytes, int], int | None],
    ) -> tuple[int, int, int, int]:
        """Return the number of earlier turns with this prompt, the number of earlier attempts at this turn, and the
        places of its input and its reply."""
        abandoned = self._abandoned.get(prompt)
        if abandoned:
            repeat, attempt, old_input, place = heapq.heappop(abandoned)
            if self._inputs.get((parent, added)) == old_input:
                return repeat, attempt, old_input, place
        else:
            repeat, attempt = self._requests.get(prompt, 0), 0
            self._requests[prompt] = repeat + 1
        reserved = recorded(prompt, repeat)
        input_place = self._inputs.get((parent, added))
        if input_place is None:
            input_place = self._inputs[(parent, added)] = self._next_place()
        if reserved is None:
            return repeat, attempt, input_place, self._next_place()
        self._next = max(self._next, reserved + 1)
        return repeat, attempt, input_place, reserved

    def _next_place(self) -> int:
        while self._next in self._reserved:
            self._next += 1
        self._next += 1
        return self._next - 1

    def _extend_lane(self, node: Node | None, request: Request, input_place: int) -> int:
        """Append the messages of a request to its node's lane, or to a new one. Return the lane's number."""
        if node is not None and not node.continued:
            number, lane = node.lane, self._lanes[node.lane]
        else:
            number = len(self._lanes)
            near, common = self._nearest(request) if self._lanes else (None, 0)
            opening = near.opening if near is not None and common >= near.opening else len(request.messages)
            lane = self._lanes[number] = Lane([], request.tools, request.specs, opening)
            if node is not None:
                before = self._lanes[node.lane]
                lane.history = before.history[: request.before]
                lane.spans = [span for span in before.spans if span[0] <= request.before]
                lane.replied = request.before
        if node is not None:
            node.continued = True
            self._leaves.pop(node.place, None)
        lane.history += request.messages[request.before :]
        lane.spans.append((len(lane.history), input_place))
        start = START if node is None else node.key
        self._forms.add_messages(start, request.messages[request.before :], request.keys, number)
        return number

    def _add_reply(self, turn: Turn, reply: Message, ids: hashlib.blake2b, length: int) -> None:
        key = self._forms.add_reply(turn.key, reply, turn.lane, turn.place)
        lane = self._lanes[turn.lane]
        if lane.replied:
            self._lane_of_reply.pop(id(lane.history[lane.replied - 1]), None)
        lane.history.append(reply)
        lane.spans.append((len(lane.history), turn.place))
        node = Node(
            place=turn.place,
            ids=ids,
            length=length,
            lane=turn.lane,
            count=len(lane.history),
            key=key,
            reply=reply,
            text=reply.content.strip(),
            agent=turn.evidence.agent,
            twin=self._nodes.get(key + turn.tools),
        )
        lane.replied, lane.key, lane.node = node.count, key, node
        self._nodes[key + turn.tools] = node
        self._lane_of_reply[id(reply)] = turn.lane
        self._leaves[turn.place] = node
        if len(self._leaves) > MOST_QUOTED:
            del self._leaves[next(iter(self._leaves))]

    def _input_segment(self, segment: Callable[..., Segment], place: int, request: Request) -> Segment:
        """Return the input segment of a request, with its messages, tools, quotes and fork. `segment`: constructor that
        takes these fields."""
        messages, evidence = request.messages, request.evidence
        known_agent = evidence.agent in self._agents
        self._agents.add(evidence.agent)
        if not self._lanes:
            return segment(message=messages[-1], earlier=tuple(messages[:-1]), tools=request.specs or None)
        quoted = quoted_in(request, self._leaves.values(), begins=request.node is None)
        lane, common = self._nearest(request)
        common = with_equal_thoughts(lane.history, request.messages, common)
        of, base, tools = None if request.node is None else request.node.place, request.before, None
        fork = None
        if request.node is None:
            of, base = lane.last_written(common, self._written)
            tools = None if of is not None and lane.tools == request.tools else request.specs
            tools = None if of is None and not tools else tools
        if request.node is None or request.node.continued:
            summed_up = any(self._written[node.place].label == "compaction" for node in quoted)
            new = [node for node in quoted if sums_up(node, self._lanes[node.lane], request, lane, common)]
            links = Links(quoted=quoted, new_agent=not known_agent, summed_up=summed_up, goes_on=bool(new))
            fork = fork_of(request, lane, common, of, links)
            if fork.reason == "compaction":
                self._summaries[place] = [n.place for n in new if self._written[n.place].label == "agent"]
        return segment(
            message=messages[-1],
            earlier=tuple(messages[min(base, len(messages) - 1) : -1]),
            tools=tools,
            fork=fork,
            quotes=tuple(sorted(node.place for node in quoted)),
        )

    def _nearest(self, request: Request) -> tuple[Lane, int]:
        """Return the lane with the longest common beginning, the latest of several, and the number of common
        messages."""
        for at in range(len(request.keys), 0, -1):
            number = self._forms.lines.get(request.keys[at - 1])
            if number is not None:
                lane = self._lanes[number]
                return lane, min(request.before + at, len(lane.history))
        node = request.node
        if node is None:
            return self._lanes[0], 0
        return self._lanes[self._forms.lines.get(node.key, node.lane)], node.count

    async def _bridge(
        self, node: Node, new: Sequence[Message], tools: Sequence[ToolSpec], long: bool
    ) -> tuple[int, ...] | None:
        """Return the ids that a bridge appends to the ids of a node, or None if the renderer has no bridge.

        A reply that the client wrote has no bridge, because its ids were not sampled here. A reply that directly
        follows a reply has none either. `long`: whether the tools take long to render.
        """
        if not new:
            return None
        reply = self._written[node.place]
        prompt = () if reply.parent is None else tuple(self._written[reply.parent].tokens)
        bridge, said = self.renderer.bridge, tuple(reply.tokens)
        bridged = await rendered(long or renders_long(new), bridge, prompt, said, new, tools)
        return None if bridged is None else bridged[len(prompt) + len(said) :]


def _bytes(tokens: Sequence[int]) -> bytes:
    return array("q", tokens).tobytes()
