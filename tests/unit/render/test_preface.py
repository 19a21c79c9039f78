"""Constrained replies in every format: the thought first, then the constraint on the content; whole, in pieces, and to
the bit in engine, record and trainer."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from short_formats import SHORT
from test_call_grammar import HARMONY, QUESTION, ids, renderer_of

from sparring.errors import BadInput
from sparring.generation import Constraint, GenerateRequest, Preface, Sampling
from sparring.testing.formats import FORMATS
from sparring.testing.toy import toy_renderer
from sparring.types import Message

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
        if request.preface is not None and request.preface.thinks(turn):
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
        opened = request.preface is not None and request.preface.plain is None
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
