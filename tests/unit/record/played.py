"""What a session has recorded: replies of a tree, and the journal of a role."""

from collections.abc import Sequence
from dataclasses import replace

from common.planned import planned
from conversations import TOOL

from sparring.generation import Completion, Runs, Sampling
from sparring.record.tree import Tree
from sparring.render.demonstrate import reply_tokens
from sparring.reply import NO_EVIDENCE
from sparring.rollout.journal import Journal, Playback
from sparring.types import Evidence, Message, Segment, ToolSpec

SEARCH = ToolSpec(
    name="search",
    description="Looks.",
    parameters={"type": "object", "properties": {"q": {"type": "string"}, "n": {"type": "number"}}, "required": ["q"]},
)
TOOLS = (TOOL, SEARCH)


def playback(segments: Sequence[Segment], role: str = "policy") -> Playback:
    """Return the play of a journal that has these segments."""
    journal = Journal("r")
    journal.sampled(role, segments)
    return Playback(journal)


def record(
    tree: Tree,
    messages: list[Message],
    reply: Message,
    tools: tuple[ToolSpec, ...] = TOOLS,
    evidence: Evidence = NO_EVIDENCE,
) -> int:
    """Let a tree record a reply; returns the place of its segment."""
    turn = planned(tree, messages, tools, evidence)
    tokens = reply_tokens(tree.renderer, replace(reply, reasoning=None), tools)
    runs = Runs.of(0, len(tokens))
    completion = Completion(
        tokens=tokens, logprobs=(-1.0,) * len(tokens), finish_reason="stop", versions=runs, kv_versions=runs
    )
    tree.append(turn, completion, reply, Sampling(), "policy")
    return turn.place
