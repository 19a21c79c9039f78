"""Constrained replies in every format: the thought first, then the constraint on the content; whole, in pieces, and to
the bit in engine, record and trainer."""

from __future__ import annotations

import asyncio
import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from common.served import ServerThread
from formats import FORMATS, format_folder, format_renderer
from test_call_grammar import HARMONY, QUESTION, ids, renderer_of

from sparring.engine.adapters.remote import RemoteEngine
from sparring.engine.config import EngineConfig
from sparring.engine.native import NativeEngine
from sparring.errors import BadInput
from sparring.generation import Completion, Constraint, GenerateRequest, Sampling
from sparring.model.load import load
from sparring.record.recorder import Recorder
from sparring.render.load import load_renderer
from sparring.reply import ReplyRequest, SampledReply
from sparring.rollout.resample import resample, turns_of
from sparring.store.codec import decode, encode
from sparring.testing.tiny_models import tiny_model
from sparring.testing.toy import toy_task
from sparring.types import Message, Outcome, ReplyPiece, Rollout, Segment

SCHEMA = {"type": "object", "properties": {"n": {"enum": [4, "</think>", "<|im_end|>"]}}, "required": ["n"]}
ODD = "(yes|no|a</think>b|<think>c|<tool_call>)"
HELD = {
    "regex": Constraint(kind="regex", source=ODD),
    "json_schema": Constraint(kind="json_schema", source=json.dumps(SCHEMA | {"additionalProperties": False})),
    "lark": Constraint(kind="lark", source='start: "go" " " WORD\nWORD: /[a-z]{1,3}/'),
}
OPENED = {
    *("deepseek-r1", "deepseek-v4", "glm-4.5", "glm-5", "glm-5.1", "glm-5.3", "hy3", "kimi-k2.5", "minimax-m2"),
    *("laguna-m.1", "laguna-s-2.1", "laguna-xs-2.1", "laguna-xs.2", "nemotron-3", "nemotron-3-ultra", "nemotron-3.5"),
    *("qwen3.5", "qwen3.6", "qwen3.8", "gpt-oss"),
}
"""Formats whose prompt opens a thought; some do so whatever `thinking` says."""

ALWAYS = {"deepseek-r1", "glm-5.3", "kimi-k2.5", "minimax-m2", "gpt-oss"}
MAY = {"template", "qwen3", "prime-qwen3", "gemma4", "inkling"}
"""Formats whose replies may open a thought themselves; some also where they should not think."""

MAY_ALWAYS = {"prime-qwen3", "gemma4", "inkling"}


def bound(renderer: Any, held: Constraint, prompt: tuple[int, ...]) -> GenerateRequest:
    sampling = Sampling(constraint=held, stop=renderer.stop_ids)
    return renderer.bind(GenerateRequest(id="r", tokens=prompt, sampling=sampling))


def fits(kind: str, content: str) -> bool:
    if kind == "json_schema":
        return json.loads(content)["n"] in SCHEMA["properties"]["n"]["enum"]
    return re.fullmatch(ODD if kind == "regex" else "go [a-z]{1,3}", content) is not None


def walk(request: GenerateRequest, stops: tuple[int, ...], draw: random.Random, thought: int) -> list[int]:
    """Sample a reply as an engine does: any allowed token, the end of its thought after `thought` tokens."""
    turn: list[int] = []
    while not turn or turn[-1] not in stops:
        following = ids(request.allowed(turn))
        assert following
        if request.preface is not None and request.preface.before(tuple(turn)) is None:
            assert not {*stops} & {*following}, "a turn ends behind its thought"
            ends = len(turn) - len(request.preface.begin) >= thought
            turn.append(request.preface.end if ends else draw.choice(following))
        else:
            turn.append(draw.choice(following))
        assert len(turn) < 500
    return turn


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("name", [*FORMATS, "template", HARMONY])
def test_the_content_of_a_constrained_reply_fits_behind_its_thought(name: str, thinking: bool) -> None:
    renderer, draw = renderer_of(name, thinking), random.Random(3)
    prompt = renderer.render([QUESTION], ()).tokens
    seen = set()
    for kind, held in HELD.items():
        request = bound(renderer, held, prompt)
        opened = request.preface is not None and not request.preface.begin
        assert opened == (name in OPENED and (thinking or name in ALWAYS))
        assert opened or (request.preface is not None) == (name in MAY and (thinking or name in MAY_ALWAYS))
        for number in range(8):
            turn = walk(request, renderer.stop_ids, draw, number % 4)
            reply = renderer.parse(turn, (), prompt=prompt)
            text = renderer.decode(turn)
            if name == "template" and request.preface is None and "<think>" in text:
                continue  # a template's parser reads tags in text
            assert fits(kind, reply.content), (kind, text, reply)
            seen.add(bool(reply.reasoning))
            reader = renderer.reader((), prompt=prompt)
            pieces = [piece for token in turn for piece in reader.read([token])]
            for part, whole in (("reasoning", reply.reasoning or ""), ("text", reply.content)):
                assert whole.startswith("".join(piece.text for piece in pieces if piece.kind == part))
            shown = [piece.kind for piece in pieces]
            assert shown == sorted(shown), "thoughts are told before the text"
    assert True not in seen or request.preface is not None
    assert not opened or seen == {True, False}, "a thought may be empty"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder with the tokenizer of Qwen3.5's format."""
    made = tmp_path_factory.mktemp("model")
    size = max(format_renderer("qwen3.5", True).tokenizer.added_tokens.values()) + 9
    tiny_model("qwen3", made / "tiny", seed=2, vocab_size=size)
    format_folder("qwen3.5", made / "tiny")
    return made / "tiny"


def test_constrained_thoughts_are_streamed_recorded_and_sampled_again_to_the_bit(folder: Path) -> None:
    """Replies whose thought ends, of which some are cut behind it or inside it: those have no text, and are truncated."""
    renderer = format_renderer("qwen3.5", True)
    end = renderer.tokenizer.added_tokens["</think>"]
    sampling = Sampling(max_tokens=14, logit_bias=((end, 3.0),), top_logprobs=3, constraint=HELD["regex"])

    async def main() -> list[tuple[SampledReply, list[ReplyPiece], Segment]]:
        engine, said = NativeEngine(load(folder), EngineConfig(), threads=1), []
        recorder = Recorder(engine, renderer, sampling=sampling, max_context=800)
        session = recorder.open(toy_task(0), rollout_id="r", seed=5)
        for number in range(8):
            messages = [Message(role="user", content=f"Say{number * ' so'}.")]
            told = [piece async for piece in session.reply(ReplyRequest(messages, in_pieces=True))]
            pieces = [piece for piece in told if isinstance(piece, ReplyPiece)]
            said.append((told[-1], pieces, session.segments[-1]))
        await engine.close()
        done = session.trajectory(Outcome(kind="completed", reason="answered"))
        rollout = Rollout(id="r", task=toy_task(0), index=0, attempt=0, purpose="train", trajectories=(done,))
        again = NativeEngine(load(folder), EngineConfig(), threads=1)
        report = await resample(turns_of([decode(encode(rollout), Rollout)], "policy"), again, renderer)
        await again.close()
        assert report.identical, report.difference
        return said

    cut = 0
    said = asyncio.run(main())
    for reply, pieces, segment in said:
        message, tokens = segment.message, list(segment.tokens)
        assert "".join(piece.text for piece in pieces if piece.kind == "text") == message.content
        assert "".join(piece.text for piece in pieces if piece.kind == "reasoning") == (message.reasoning or "")
        assert (reply.finish_reason == "stop") == (tokens[-1] in renderer.stop_ids)
        assert reply.finish_reason != "stop" or fits("regex", message.content)
        ended = tokens.index(end) + 1 if end in tokens else len(tokens)
        rows = segment.kept.rows if segment.kept else [b""] * len(tokens)
        assert [bool(row) for row in rows] == [place >= ended for place in range(len(tokens))]
        cut += end not in tokens
        assert end in tokens or (reply.finish_reason == "length" and not message.content)
    assert 0 < cut < 8


def test_a_server_and_a_fork_know_where_the_text_begins(folder: Path) -> None:
    """A server has ids alone: the request says what stands before the text."""
    renderer = format_renderer("qwen3.5", True)
    end = renderer.tokenizer.added_tokens["</think>"]
    sampling = Sampling(max_tokens=60, logit_bias=((end, 2.0),), constraint=HELD["regex"], stop=renderer.stop_ids)
    prompt = renderer.render([QUESTION], ()).tokens
    asked = [
        renderer.bind(GenerateRequest(id=f"r{seed}", tokens=prompt, sampling=replace(sampling, seed=seed)))
        for seed in range(6)
    ]

    def engine() -> NativeEngine:
        return NativeEngine(load(folder), EngineConfig(), threads=1)

    async def here() -> tuple[list[Completion], list[Completion]]:
        native = engine()
        whole = list(await asyncio.gather(*map(native.generate, asked)))
        rest = []
        for request, answer in zip(asked, whole, strict=True):
            for told in (1, len(answer.tokens) // 2, len(answer.tokens) - 1):
                if told:
                    rest.append((answer, told, await native.generate(request.after(answer.tokens[:told]))))
        await native.close()
        for answer, told, completion in rest:
            assert answer.tokens[told:] == completion.tokens and answer.logprobs[told:] == completion.logprobs
        return whole

    async def there() -> list[Completion]:
        remote = RemoteEngine(server.url)
        try:
            return list(await asyncio.gather(*map(remote.generate, asked)))
        finally:
            await remote.close()

    whole = asyncio.run(here())
    server = ServerThread(engine(), folder)
    try:
        for ours, theirs in zip(whole, asyncio.run(there()), strict=True):
            assert replace(theirs, cached_tokens=ours.cached_tokens) == ours
    finally:
        server.stop()
    ended = [answer for answer in whole if answer.finish_reason == "stop"]
    assert len(ended) > 3
    assert all(fits("regex", renderer.parse(answer.tokens, (), prompt=prompt).content) for answer in ended)


def test_a_thought_that_no_token_ends_is_refused_by_name(tmp_path: Path) -> None:
    """A tokenizer to which the tags of a thought are plain text."""
    file = format_folder("deepseek-r1", tmp_path) / "tokenizer.json"
    file.write_text(file.read_text().replace("think>", "thunk>"))
    renderer = load_renderer(tmp_path, "deepseek-r1")
    prompt = renderer.render([QUESTION], ()).tokens
    assert renderer.decode(prompt).endswith("<think>\n")
    with pytest.raises(BadInput, match="constraint: expected a format that ends a thought with a token"):
        bound(renderer, HELD["regex"], prompt)
