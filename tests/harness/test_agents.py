"""Every client of the matrix, as it is published, its tools run for real, on a scripted policy."""

from __future__ import annotations

from pathlib import Path

import pytest
from agents import RENDERER, Cuts, Played, play, says
from clients import CLIENTS, Client

from sparring.engine.config import EngineConfig
from sparring.engine.native import NativeEngine
from sparring.model.load import load
from sparring.testing.tiny_models import tiny_model
from sparring.types import Limits, Message, ToolSpec

pytestmark = pytest.mark.harness
every = pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.preset)


@every
def test_a_conversation_with_tools_is_one_branch_of_sampled_ids(client: Client) -> None:
    """Parallel calls, of which the second is done first; a float that JavaScript writes as an integer."""
    played = play(
        client.preset,
        [
            client.runs("cat question.txt", content="I look."),
            client.runs("sleep 0.5; echo 42 > answer.txt; echo uno", "echo dos"),
            client.ends("All done."),
        ],
    )
    assert (played.ending, played.reward) == ("answered", 1.0), played.note
    assert (played.turns, played.exact) == (3, 1.0)
    if not client.edits:
        assert (played.roots, played.branches) == (1, 1)
        last = played.prompt(-1)
        assert last.rindex("uno") < last.rindex("dos"), "answers stand in the order of the calls"


@every
def test_a_malformed_call_and_a_tool_that_is_not_there_are_the_policys_to_see(client: Client) -> None:
    broken = RENDERER.tokenizer.encode(f'<tool_call>\n{{"name": "{client.shell}", "arguments": {{"comm\n</tool_call>')
    played = play(
        client.preset,
        [
            (*broken, *RENDERER.stop_ids[:1]),
            says("", ("wish", {"for": "more"})),
            client.runs("echo 42 > answer.txt"),
            client.ends("I give up."),
            client.ends("I give up."),
        ],
    )
    assert played.exact == 1.0
    assert played.finished.rollout.outcome.kind == "completed", played.note


@every
def test_a_limit_ends_the_rollout_whatever_the_client_makes_of_it(client: Client) -> None:
    played = play(
        client.preset,
        [client.runs(f"echo {number}") for number in range(4)],
        limits=Limits(max_turns=2, max_tokens=100_000, max_tool_calls=50),
    )
    assert (played.finished.rollout.outcome.kind, played.ending) == ("truncated", "max_turns"), played.note
    assert (played.turns, played.exact) == (2, 1.0)


@pytest.mark.parametrize("client", CLIENTS[:3], ids=lambda client: client.preset)
def test_a_client_that_is_answered_503_asks_again_and_no_turn_is_doubled(client: Client) -> None:
    """The engine fails once: the client's own retry is the turn, and the failed request leaves nothing."""
    replies = [client.runs("cat question.txt"), client.runs("echo 42 > answer.txt"), client.ends("All done.")]
    played = play(client.preset, replies, fail_on=[2])
    assert len(played.engine.requests) == 4, "one request failed and was sent again"
    assert (played.ending, played.reward) == ("answered", 1.0), played.note
    assert (played.turns, played.roots, played.branches, played.exact) == (3, 1, 1, 1.0), played.note


LONG = " ".join(f"thought {number} of many," for number in range(200))


@pytest.mark.parametrize("size", [900, 20_000], ids=["early", "in the middle"])
@pytest.mark.parametrize(
    "client", [c for c in CLIENTS if c.preset in ("claude-code", "codex", "pi", "opencode")], ids=lambda c: c.preset
)
def test_a_stream_that_breaks_is_sent_again_and_nothing_is_sampled_twice(client: Client, size: int) -> None:
    """The connection is closed before the door could hand over the reply: the client's own retry is that turn."""
    cuts = Cuts([size])
    replies = [client.runs("echo 42 > answer.txt", content=LONG), client.ends("All done.")]
    played = play(client.preset, replies, cuts=cuts)
    assert cuts.left == [], "it was cut"
    assert (played.ending, played.reward) == ("answered", 1.0), played.note
    assert len(played.engine.requests) == 2, "the engine was asked once for each turn"
    assert (played.turns, played.roots, played.branches, played.exact) == (2, 1, 1, 1.0)
    assert all(segment.label == "agent" and segment.delivered for segment in played.segments if segment.model)


SUMMARY = "The question was read, and the answer 42 is to be written into the file."
SUMS_UP = {
    "claude-code": "Respond with TEXT ONLY",
    "codex": "CONTEXT CHECKPOINT COMPACTION",
    "opencode": "a context summarization agent",
    "pi": "a context summarization assistant",
}
"""What each client asks its summary with."""


def compacted(preset: str, context: int, lines: int, at_once: int = 1) -> Played:
    """Play a conversation that outgrows its context: long answers of tools until the client has asked for a summary."""
    client = next(client for client in CLIENTS if client.preset == preset)
    summed_up = False

    def script(prompt: str) -> Message:
        nonlocal summed_up
        if SUMS_UP[preset] in prompt and SUMMARY not in prompt:
            summed_up = True
            return says(f"<summary>{SUMMARY}</summary>")
        if "ANSWERED" in prompt:
            return client.ends("All done.")
        if summed_up:
            return client.runs("echo 42 > answer.txt; echo ANSWERED")
        return client.runs(*[f"seq {number}00000 {number}99999 | head -c {lines}" for number in range(1, 1 + at_once)])

    return play(preset, script, max_context=context)


@pytest.mark.parametrize(
    ("preset", "context", "lines"),
    [("claude-code", 120_000, 25_000), ("codex", 60_000, 8000), ("opencode", 60_000, 8000)],
)
def test_a_client_that_fills_its_context_compacts_and_goes_on(preset: str, context: int, lines: int) -> None:
    played = compacted(preset, context, lines)
    assert (played.ending, played.reward, played.exact) == ("answered", 1.0, 1.0), played.note
    summaries = [segment for segment in played.segments if segment.label == "compaction"]
    assert summaries and all(SUMMARY in (segment.message.content if segment.message else "") for segment in summaries)
    after = [s for s in played.segments if s.fork is not None and s.fork.reason == "compaction" and s.quotes]
    assert {place for segment in after for place in segment.quotes} >= {summaries[-1].index}, "linked by what it quotes"


def test_claude_code_that_is_told_that_its_prompt_is_too_long_compacts_and_goes_on() -> None:
    """Three long answers at once: neither the next request nor the first one for a summary fits."""
    played = compacted("claude-code", 120_000, 20_000, at_once=3)
    assert (played.ending, played.reward, played.exact) == ("answered", 1.0, 1.0), played.note
    assert played.note["requests"] > played.turns, "some were refused, and left nothing"
    assert [s.label for s in played.segments if s.model].count("compaction") == 1
    assert [s.fork.reason for s in played.segments if s.fork] == ["compaction", "compaction"]


@pytest.mark.parametrize("preset", ["pi", "langgraph-anthropic", "openai-agents-responses"])
def test_the_native_engine_serves_a_program_that_samples_noise(preset: str, tmp_path: Path) -> None:
    """Random weights, random replies: what they are is recorded, whatever the client makes of them."""
    sizes = {"vocab_size": RENDERER.tokenizer.vocab_size, "max_position_embeddings": 8192}
    engine = NativeEngine(load(tiny_model("qwen3", tmp_path, **sizes)), EngineConfig(max_running=4), threads=1)
    limits = Limits(max_turns=4, max_tokens=1000, max_tool_calls=9)
    played = play(preset, [], native=engine, max_context=8192, limits=limits)
    assert (played.turns >= 1, played.exact) == (True, 1.0), played.note
    assert played.finished.rollout.outcome.kind in ("completed", "truncated")


WEIGH = ToolSpec(
    name="weigh",
    description="Weigh a thing.",
    parameters={"type": "object", "properties": {"thing": {"type": "string"}}, "required": ["thing"]},
)


@pytest.mark.parametrize(
    ("preset", "name"),
    [
        ("claude-code", "mcp__world__weigh"),
        ("codex", "mcp__world__weigh"),
        ("gemini-cli", "mcp_world_weigh"),
        ("qwen-code", "mcp__world__weigh"),
        ("opencode", "world_weigh"),
    ],
)
def test_a_worlds_tools_are_an_mcp_server_under_the_same_key(preset: str, name: str) -> None:
    played = play(preset, [says("", (name, {"thing": "stone"})), says("All done.")], tools=(WEIGH,))
    assert (played.ending, played.turns, played.exact) == ("answered", 2, 1.0), played.note
    assert "weigh: {'thing': 'stone'}" in played.prompt(-1), "the world answered"


def test_two_subagents_that_send_equal_bytes_are_two_samples_beside_their_parent() -> None:
    """claude-code runs them beside the parent, which hears of each when it is done."""
    task = ("Agent", {"description": "sub", "prompt": "SUBTASK", "subagent_type": "general-purpose"})

    def script(prompt: str) -> Message:
        if '"prompt": "SUBTASK"' in prompt:
            return says("All done.")
        return says("Sub done.") if "SUBTASK" in prompt else says("", task, task)

    played = play("claude-code", script)
    assert (played.ending, played.exact) == ("answered", 1.0), played.note
    subagents = [s for s in played.segments if s.model is not None and "Sub done." in RENDERER.decode(s.tokens)]
    assert len(subagents) == 2 and len({segment.parent for segment in subagents}) == 1, "two samples of one prompt"
    assert played.roots == 2, "the parent's conversation and the sub-agents'"
