"""What the real vLLM says of its draws, judged by our own forward on the same weights: of the distribution sampled
from."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch
from served import PROMPT, turn

from sparring.engine.config import EngineConfig
from sparring.engine.native import NativeEngine
from sparring.errors import EngineError
from sparring.generation import ScoreRequest
from sparring.kernels.ops import token_logprobs

pytestmark = pytest.mark.vllm
CLOSE = 1e-4


def logits(weights, tokens):
    """[T, V] of our own forward, float32."""
    from sparring.model.attention import Packed

    model = weights[0].model()
    row = torch.tensor(tokens)
    with torch.no_grad():
        hidden = model.hidden(row, torch.arange(len(row)), Packed(torch.tensor([0, len(row)], dtype=torch.int32)))
        return model.logits(hidden)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7, 0.0])
def test_log_probabilities_are_at_the_temperature(run, weights, temperature):
    answer = run(lambda engine: engine.generate(turn(temperature=temperature, max_tokens=40)))
    rows = logits(weights, (*PROMPT, *answer.tokens))[len(PROMPT) - 1 : -1]
    ours, _ = token_logprobs(rows, torch.tensor(answer.tokens), torch.full((len(rows),), temperature))
    assert answer.logprobs == pytest.approx(ours.tolist(), abs=CLOSE) and answer.kept is None
    if not temperature:
        assert list(answer.tokens) == rows.argmax(-1).tolist()


@pytest.mark.parametrize(
    "limits",
    [{"top_k": 7}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 30, "top_p": 0.8, "min_p": 0.05, "temperature": 0.8}],
)
def test_truncated_draws_bring_what_was_kept_and_the_trainer_renormalises_over_it(run, weights, limits):
    answer = run(lambda engine: engine.generate(turn(max_tokens=30, **limits)))
    rows = logits(weights, (*PROMPT, *answer.tokens))[len(PROMPT) - 1 : -1]
    sets = [answer.kept.ids(at) for at in range(len(answer.tokens))]
    assert all(token in kept and 0 < len(kept) < rows.shape[1] for token, kept in zip(answer.tokens, sets, strict=True))
    offsets = torch.tensor([0, *(len(kept) for kept in sets)]).cumsum(0)
    ids = torch.tensor([id for kept in sets for id in kept], dtype=torch.int32)
    heat = torch.full((len(rows),), limits.get("temperature", 1.0))
    ours, _ = token_logprobs(rows, torch.tensor(answer.tokens), heat, (offsets, ids))
    assert answer.logprobs == pytest.approx(ours.tolist(), abs=CLOSE)


def test_a_bias_and_a_minimum_of_tokens_change_the_distribution(run, weights):
    async def scenario(engine):
        biased = await engine.generate(turn(logit_bias=((11, 3.0), (12, -50.0)), max_tokens=30))
        held = await engine.generate(turn("held", stop=tuple(range(79)), min_tokens=5, max_tokens=9))
        return biased, held

    biased, held = run(scenario)
    rows = logits(weights, (*PROMPT, *biased.tokens))[len(PROMPT) - 1 : -1]
    rows[:, 11] += 3.0
    rows[:, 12] -= 50.0
    assert biased.logprobs == pytest.approx(rows.log_softmax(-1)[range(30), list(biased.tokens)].tolist(), abs=CLOSE)
    assert 12 not in biased.tokens
    assert held.tokens[:4] == (79,) * 4 and 5 <= len(held.tokens) <= 9


def test_likeliest_tokens_and_prompts_and_scores_are_those_of_our_own_engine(run, weights):
    asked = turn(top_logprobs=3, max_tokens=20)
    judged = ScoreRequest(id="s", tokens=tuple(range(3, 40)), first=4, temperature=0.7, top_k=5)

    async def scenario(engine):
        own = NativeEngine(weights[0].model(), EngineConfig(), threads=1)
        try:
            answer = await engine.generate(asked)
            prompt = await engine.generate(replace(asked, id="p", prompt_logprobs=True))
            ours = await own.generate(replace(asked, prompt_logprobs=True))
            return answer, prompt, ours, await engine.score(judged), await own.score(judged)
        finally:
            await own.close()

    answer, prompt, ours, score, own = run(scenario)
    best = logits(weights, (*PROMPT, *answer.tokens))[len(PROMPT) - 1 : -1].log_softmax(-1).topk(3)
    assert [[token for token, _ in tops] for tops in answer.top_logprobs] == best.indices.tolist()
    assert [value for tops in answer.top_logprobs for _, value in tops] == pytest.approx(
        best.values.flatten().tolist(), abs=CLOSE
    )
    assert (
        prompt.prompt_logprobs == pytest.approx(ours.prompt_logprobs, abs=CLOSE)
        and len(prompt.prompt_logprobs) == len(PROMPT) - 1
    )
    assert score.logprobs == pytest.approx(own.logprobs, abs=CLOSE) and score.entropies == pytest.approx(
        own.entropies, abs=CLOSE
    )
    assert score.top_ids == own.top_ids


def test_whoever_watches_for_the_end_ends_the_turn(run, weights):
    async def scenario(engine):
        whole = await engine.generate(turn(max_tokens=40))
        end = whole.tokens[20:22]
        seen = []

        def ends(tokens, new):
            seen.append(new)
            found = (at + 2 for at in range(len(tokens) - 1) if tuple(tokens[at : at + 2]) == end)
            return next(found, None)

        cut = await engine.generate(replace(turn(max_tokens=3000), ends=ends))
        return whole, cut, seen

    whole, cut, seen = run(scenario)
    assert cut.tokens == whole.tokens[: len(cut.tokens)] and cut.tokens[-2:] == whole.tokens[20:22]
    assert cut.finish_reason == "stop" and len(cut.versions) == len(cut.kv_versions) == len(cut.logprobs) == len(
        cut.tokens
    )
    assert all(new > 0 for new in seen)


def test_priorities_are_vllms(run, weights):
    """Which refuses any but 0 unless it schedules by priority; the sign is tested with the wire."""
    answers = run(lambda engine: asyncio.gather(*(engine.generate(replace(turn(), priority=p)) for p in (-3, 0, 4))))
    assert len({answer.tokens for answer in answers}) == 1


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"tokens": ()}, "at least one token"),
        ({"tokens": (5, 80)}, "token ids below 80"),
        ({"tokens": (5,) * 4096}, "fewer than 4096 tokens"),
        ({"allowed": lambda tokens: b""}, "got a function"),
    ],
)
def test_what_cannot_be_served_is_refused_and_the_server_goes_on(run, change, why):
    async def scenario(engine):
        with pytest.raises(EngineError, match=why):
            await engine.generate(replace(turn(), **change))
        return await engine.generate(turn())

    assert run(scenario).tokens
