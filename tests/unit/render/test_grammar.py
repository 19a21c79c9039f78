"""Grammars over a real tokenizer: what they allow, an engine that keeps to them, and training on what came of it."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from sparring.errors import BadInput
from sparring.generation import Constraint
from sparring.testing.toy import toy_renderer

VOCABULARY = 416
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yes"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def grammars() -> Any:
    from sparring.render.grammars.grammar import Grammars

    return Grammars(toy_renderer().tokenizer, toy_renderer().stop_ids)


def grammar_of(kind: Any, source: str) -> Any:
    return grammars().of(Constraint(kind=kind, source=source))


def ids(allowed: bytes) -> set[int]:
    number = int.from_bytes(allowed, "little")
    return {token for token in range(8 * len(allowed)) if number >> token & 1}


def test_allowed_tokens_match_the_grammar() -> None:
    tokenizer, stop = toy_renderer().tokenizer, set(toy_renderer().stop_ids)
    grammar = grammar_of("regex", "(12|46)")
    assert {tokenizer.decode([token]) for token in ids(grammar([]))} <= {"1", "12", "4", "46"}
    whole = tokenizer.encode("12")
    assert ids(grammar(whole)) == stop, "and again from the beginning, for another turn"
    assert ids(grammar(tokenizer.encode("46"))) == stop
    assert ids(grammar(whole[:0])) == ids(grammar_of("regex", "(12|46)")([]))
    with pytest.raises(ValueError, match="expected tokens that it allows"):
        grammar(tokenizer.encode("7"))
    assert ids(grammar(whole)) == stop, "a turn that did not fit leaves nothing behind"


@pytest.mark.parametrize(
    ("kind", "source"),
    [("regex", "(a|b"), ("json_schema", '{"type": "nothing"}'), ("json_schema", "{]"), ("lark", "start: nowhere")],
)
def test_invalid_constraints_are_refused(kind: str, source: Any) -> None:
    with pytest.raises(BadInput, match="compile"):
        grammar_of(kind, source)


def test_strings_of_a_schema_are_text_and_no_control_token() -> None:
    """A JSON string that says `<tool_call>` is spelled: its id would begin a call in the middle of the JSON."""
    tokenizer = toy_renderer().tokenizer
    grammar = grammar_of("json_schema", json.dumps({"enum": ["<tool_call>x</tool_call><|im_end|>"]}))
    tokens: list[int] = []
    while not ids(grammar(tokens)) & set(toy_renderer().stop_ids):
        following = ids(grammar(tokens))
        assert not following & set(tokenizer.control.ids.values())
        tokens.append(max(following, key=lambda token: len(tokenizer.decode([token]))))
    assert json.loads(tokenizer.decode(tokens)) == "<tool_call>x</tool_call><|im_end|>"
    assert not toy_renderer().parse(tokens, ()).tool_calls


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from sparring.testing.tiny_models import tiny_model

    return tiny_model("qwen3", tmp_path_factory.mktemp("model") / "tiny", seed=2, vocab_size=VOCABULARY)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_turn_is_in_the_grammar_and_is_trained_at_a_ratio_of_one(path: Any, dtype: str) -> None:
    from sparring.algo.config import AlgoConfig
    from sparring.algo.loss.policy import PolicyLoss
    from sparring.engine.config import EngineConfig
    from sparring.engine.native import NativeEngine
    from sparring.generation import GenerateRequest, KeptSets, Sampling
    from sparring.model.load import load
    from sparring.train.config import TrainConfig
    from sparring.train.trainer import LocalTrainer
    from sparring.types import Batch, Sample

    renderer, made, pattern = toy_renderer(), grammars(), "[0-9]{2,5}( is [a-z]+)?"
    asked = [Constraint(kind="json_schema", source=json.dumps(SCHEMA)), Constraint(kind="regex", source=pattern)]
    rules = [made.of(asked[number % 2 == 0]) for number in range(10)]
    sampling = [
        Sampling(max_tokens=60, stop=renderer.stop_ids, seed=n, top_p=(1.0, 0.9)[n % 3 // 2]) for n in range(10)
    ]
    prompt = tuple(renderer.tokenizer.encode("What is 12 + 34?"))

    async def main() -> tuple[Any, Any]:
        engine = NativeEngine(load(path, dtype=dtype), EngineConfig(), threads=1)
        requests = [
            GenerateRequest(id=str(n), tokens=prompt, sampling=sampling[n], allowed=rules[n]) for n in range(10)
        ]
        answers = await asyncio.gather(*map(engine.generate, requests))
        rows = [
            Sample(
                id=str(n),
                group="g",
                source="policy",
                tokens=(*prompt, *answer.tokens),
                weights={"policy": (0.0,) * len(prompt) + (1.0,) * len(answer.tokens)},
                logprobs=(0.0,) * len(prompt) + answer.logprobs,
                advantages=(0.0,) * len(prompt) + (1.0 - n % 2 * 2,) * len(answer.tokens),
                versions=(-1,) * len(prompt) + tuple(answer.versions.expand()),
                kv_versions=(-1,) * len(prompt) + tuple(answer.kv_versions.expand()),
                kept=KeptSets(rows=(b"",) * len(prompt) + answer.kept.rows),
            )
            for n, answer in enumerate(answers)
        ]
        losses = [PolicyLoss(AlgoConfig())]
        trainer = LocalTrainer(load(path, dtype=dtype), TrainConfig(), losses, name="policy", total_steps=1, threads=1)
        metrics = await trainer.forward_backward(
            Batch(step=1, model="policy", rows=tuple(rows), denominators={"policy": 100.0})
        )
        await engine.close()
        await trainer.close()
        return answers, metrics

    answers, metrics = asyncio.run(main())
    assert metrics["logprob_max_abs_diff"] == 0.0 and metrics["ratio"] == 1.0
    ended = 0
    for number, answer in enumerate(answers):
        if answer.finish_reason == "stop":
            ended += 1
            text = renderer.tokenizer.decode(answer.tokens[:-1])
            assert set(json.loads(text)) == {"a", "b"} if number % 2 else re.fullmatch(pattern, text)
    assert ended >= 5
