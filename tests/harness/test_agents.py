"""Every client of the matrix, as it is published, its tools run for real, on a scripted policy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from agents import RENDERER, play
from clients import CLIENTS, NAMED, SUMMARY, Client, broken_stream, compacted, malformed, plain

from sparring.engine.config import BatchConfig, EngineConfig
from sparring.engine.native import NativeEngine
from sparring.model.load import load
from sparring.render.demonstrate import demonstration_tokens
from sparring.testing.tiny_models import tiny_model
from sparring.types import Limits

pytestmark = pytest.mark.harness
every = pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.preset)


@every
def test_a_conversation_with_tools_is_one_branch_of_sampled_ids(client: Client) -> None:
    """Parallel calls, of which the second is done first."""
    played = plain(client)
    assert (played.ending, played.reward) == ("answered", 1.0), played.note
    assert (played.turns, played.exact) == (3, 1.0)
    if not client.edits:
        assert (played.roots, played.branches) == (1, 1)
        last = played.prompt(-1)
        assert last.rindex("uno") < last.rindex("dos"), "answers stand in the order of the calls"


@pytest.mark.parametrize("preset", ["claude-code", "pi", "opencode"])
def test_a_float_that_javascript_writes_as_an_integer_is_no_edit(preset: str) -> None:
    client = NAMED[preset]
    played = play(preset, [client.runs("echo 42 > answer.txt", timeout=10000.0), client.ends("All done.")])
    assert "10000.0" in RENDERER.decode(played.segments[1].tokens)
    assert (played.reward, played.turns, played.roots, played.branches, played.exact) == (1.0, 2, 1, 1, 1.0)


@every
def test_a_malformed_call_and_a_tool_that_is_not_there_are_the_policys_to_see(client: Client) -> None:
    played = malformed(client)
    assert played.exact == 1.0
    assert played.finished.rollout.outcome.kind == "completed", played.note


ANSWER_MALFORMED = ("claude-code", "pi", "codex", "gemini-cli", "qwen-code", "pydantic-ai")


@pytest.mark.parametrize("preset", ANSWER_MALFORMED)
def test_a_malformed_call_is_answered_and_the_conversation_stays_one_branch(preset: str) -> None:
    """Its client knows the tool by its name, whatever it makes of the arguments."""
    played = malformed(NAMED[preset])
    assert (played.ending, played.reward, played.exact) == ("answered", 1.0, 1.0), played.note
    assert (played.turns, played.roots, played.branches) == (4, 1, 1)
    (first, *_) = [segment.message for segment in played.segments if segment.source == "tool"]
    assert first is not None and re.search("invalid|required|arguments|InputValidation", first.content), first.content


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


STREAMED = ("claude-code", "codex", "pi", "opencode")
WHOLE = (
    "mini-swe-agent",
    "openai-agents",
    "openai-agents-responses",
    "langgraph",
    "langgraph-anthropic",
    "pydantic-ai",
)


@pytest.mark.parametrize(
    ("preset", "size"),
    [*((name, size) for name in STREAMED for size in (900, 20_000)), *((name, 900) for name in WHOLE)],
)
def test_a_stream_that_breaks_is_sent_again_and_nothing_is_sampled_twice(preset: str, size: int) -> None:
    """The connection is closed before the door could hand over the reply: the client's own retry is that turn."""
    played, cuts = broken_stream(NAMED[preset], size)
    assert cuts.left == [], "it was cut"
    assert (played.ending, played.reward) == ("answered", 1.0), played.note
    assert len(played.engine.requests) == 2, "the engine was asked once for each turn"
    assert (played.turns, played.roots, played.branches, played.exact) == (2, 1, 1, 1.0)
    assert all(segment.label == "agent" and segment.delivered for segment in played.segments if segment.model)


@pytest.mark.parametrize("preset", ["qwen-code", "gemini-cli"])
def test_a_client_that_does_not_ask_again_after_a_broken_stream_leaves_a_reply_that_is_lost(preset: str) -> None:
    """qwen-code goes on from the half that it has, in another conversation; gemini-cli ends."""
    played, cuts = broken_stream(NAMED[preset], 20_000)
    assert cuts.left == [] and played.exact == 1.0
    sampled = [(segment.label, segment.delivered) for segment in played.segments if segment.model]
    assert sampled[0] == ("lost", False)
    assert set(sampled[1:]) <= {("agent", True)} and (len(sampled) > 1) == (preset == "qwen-code")


COMPACTING = [client for client in CLIENTS if client.compaction is not None]


@pytest.mark.parametrize("client", COMPACTING, ids=lambda client: client.preset)
def test_a_client_that_fills_its_context_compacts_and_goes_on(client: Client) -> None:
    played = compacted(client)
    assert (played.ending, played.reward, played.exact) == ("answered", 1.0, 1.0), played.note
    summaries = [segment for segment in played.segments if segment.label == "compaction"]
    assert summaries and all(SUMMARY in (segment.message.content if segment.message else "") for segment in summaries)
    after = [s for s in played.segments if s.fork is not None and s.fork.reason == "compaction" and s.quotes]
    assert {place for segment in after for place in segment.quotes} >= {summaries[-1].index}, "linked by what it quotes"


AT_ONCE = [*((client.preset, 1, 0) for client in COMPACTING), ("claude-code", 3, 20_000)]


@pytest.mark.parametrize(("preset", "at_once", "characters"), AT_ONCE)
def test_a_program_that_an_expert_speaks_for_compacts_where_the_policys_does(
    preset: str, at_once: int, characters: int
) -> None:
    """It has the context of the policy that is to imitate the expert, and each of its branches fits that."""
    played, policy = (
        compacted(NAMED[preset], at_once=at_once, characters=characters, by_expert=by_expert)
        for by_expert in (True, False)
    )
    assert (played.ending, played.reward) == ("answered", 1.0), played.note
    branches, same = (each.finished.transcripts["policy"] for each in (played, policy))
    assert len(branches) == len(same) > 1
    full = NAMED[preset].compaction
    for branch in branches:
        shown = demonstration_tokens(
            RENDERER, branch.messages, branch.tools, imitated=branch.imitated, prompt=branch.prompt
        )
        assert full is not None and len(shown.tokens) <= full.context


def test_claude_code_that_is_told_that_its_prompt_is_too_long_compacts_and_goes_on() -> None:
    """Three long answers at once: neither the next request nor the first one for a summary fits."""
    played = compacted(NAMED["claude-code"], at_once=3, characters=20_000)
    assert (played.ending, played.reward, played.exact) == ("answered", 1.0, 1.0), played.note
    assert played.note["requests"] > played.turns, "some were refused, and left nothing"
    assert [s.label for s in played.segments if s.model].count("compaction") == 1
    assert [s.fork.reason for s in played.segments if s.fork] == ["compaction", "compaction"]


@pytest.mark.parametrize(
    ("preset", "context"),
    [("pi", 8192), ("langgraph-anthropic", 8192), ("openai-agents-responses", 8192), ("claude-code", 65_536)],
)
def test_the_native_engine_serves_a_program_that_samples_noise(preset: str, context: int, tmp_path: Path) -> None:
    """Random weights, random replies: what they are is recorded, whatever the client makes of them."""
    sizes = {"vocab_size": RENDERER.tokenizer.vocab_size, "max_position_embeddings": context}
    engine = NativeEngine(
        load(tiny_model("qwen3", tmp_path, **sizes)), EngineConfig(batch=BatchConfig(max_running=4)), threads=1
    )
    limits = Limits(max_turns=4, max_tokens=1000, max_tool_calls=9)
    played = play(preset, [], native=engine, max_context=context, limits=limits)
    assert (played.turns >= 1, played.exact) == (True, 1.0), played.note
    assert played.finished.rollout.outcome.kind in ("completed", "truncated")
