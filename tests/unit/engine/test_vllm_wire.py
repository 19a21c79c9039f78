"""vLLM's token interface, as it writes requests and answers: no vLLM is needed to read it."""

from dataclasses import replace

import pytest

from sparring.engine.adapters.vllm_wire import SampledTurn, generate_body, judge_body, judged_rows, problem_for_vllm
from sparring.generation import Constraint, GenerateRequest, Recorded, Runs, Sampling

VOCABULARY = 80


def request(**sampling):
    return GenerateRequest(id="r", tokens=(5, 6), sampling=Sampling(**sampling), priority=3)


def body(vocab_size=VOCABULARY, **sampling):
    return generate_body(request(**sampling), "name", 9, vocab_size=vocab_size, version=4)


def piece(tokens, *, spans=None, finish=None, tops=None):
    content = [
        {
            "token_id": token,
            "logprob": -1.0 - at,
            "top_logprobs": [{"token_id": t, "logprob": v} for t, v in (tops or {}).items()],
        }
        for at, token in enumerate(tokens)
    ]
    versions = None if spans is None else [{"start": a, "end": b, "version": v} for a, b, v in spans]
    return {"choices": [{"logprobs": {"content": content}, "weight_versions": versions, "finish_reason": finish}]}


def sampled_turn(*pieces, recomputes=False, version=4, **sampling):
    made = SampledTurn(request(**sampling), version, vocab_size=VOCABULARY, recomputes=recomputes)
    for one in pieces:
        made.take(one)
    return made


def test_a_request_names_version_priority_and_stops():
    found = body(stop=(3, 200), seed=2**64 - 1, logit_bias=((7, 1.5),), min_tokens=2)
    assert found["cache_salt"] == "version 4" and found["priority"] == -3 << 32, "lower means earlier there"
    settings = found["sampling_params"]
    assert (settings["stop_token_ids"], settings["logit_bias"], settings["max_tokens"]) == ([3], {"7": 1.5}, 9)
    assert settings["ignore_eos"] and 0 <= settings["seed"] < 2**63 and settings["logprobs"] == 0
    assert judge_body("n", (1, 2), -1, 7)["priority"] == -7 << 32


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        ({"top_k": 7}, 7),
        ({"top_k": 500}, VOCABULARY),
        ({"top_p": 0.9}, -1),
        ({"min_p": 0.1, "top_k": 5, "top_logprobs": 9}, 10),
        ({"top_logprobs": 3}, 4),
        ({"top_p": 0.9, "temperature": 0.0}, 0),
    ],
)
def test_as_many_log_probabilities_as_the_kept_set_takes(sampling, named):
    assert body(**sampling)["sampling_params"]["logprobs"] == named


def test_truncation_of_a_large_vocabulary_needs_top_k():
    assert "set top_k" in problem_for_vllm(request(top_p=0.9), 151_936)
    assert problem_for_vllm(request(top_p=0.9, top_k=50), 151_936) is None
    assert problem_for_vllm(request(top_p=0.9), VOCABULARY) is None and problem_for_vllm(request(), 151_936) is None


def test_a_constraint_is_refused_by_its_kind_with_what_to_do():
    call = Constraint(kind="tool_call", source="{}")
    bound = replace(request(constraint=call), allowed=lambda tokens: b"", grammar="start: /a/")
    said = problem_for_vllm(bound, VOCABULARY)
    assert said.startswith("no constraint (`allowed`), got a tool_call")
    assert 'set engine.kind to "native" or "remote"' in said
    assert "got a function" in problem_for_vllm(replace(request(), allowed=lambda tokens: b""), VOCABULARY)


@pytest.mark.parametrize(("recomputes", "oldest"), [(False, ((3,), (4,))), (True, ((2, 1), (4, 5)))])
def test_spans_become_versions_and_the_oldest_keys_are_those_of_the_sending(recomputes, oldest):
    made = sampled_turn(
        piece([10]), piece([11]), piece([12], spans=[(0, 2, "4"), (2, 3, "5")], finish="length"), recomputes=recomputes
    )
    answer = made.completion(None)
    assert (answer.tokens, answer.finish_reason, answer.kept) == ((10, 11, 12), "length", None)
    assert answer.versions == Runs(lengths=(2, 1), values=(4, 5))
    assert answer.kv_versions == Runs(lengths=oldest[0], values=oldest[1])


def test_a_cut_turn_is_shorter_in_every_column():
    made = sampled_turn(
        piece([10, 11, 12], tops={10: -0.5, 11: -1.0, 12: -9999.0}, spans=[(0, 1, "4"), (1, 3, "5")]),
        top_k=3,
        top_logprobs=1,
    )
    made.cut(2)
    answer = made.completion(None)
    assert (answer.tokens, len(answer.logprobs), answer.finish_reason) == ((10, 11), 2, "stop")
    assert answer.versions == Runs(lengths=(1, 1), values=(4, 5)) and len(answer.kept) == len(answer.top_logprobs) == 2
    assert answer.kept.ids(0) == (10, 11) and answer.top_logprobs[0] == ((10, -0.5),)


def test_no_kept_set_without_truncation():
    answer = sampled_turn(piece([3], tops={token: -4.0 for token in range(VOCABULARY)}), top_p=0.99).completion(None)
    assert answer.kept is None


def test_an_abort_before_the_first_token_is_empty():
    answer = sampled_turn(piece([], finish="abort")).completion(None)
    assert answer.finish_reason == "abort" and answer.tokens == () and answer.versions == answer.kv_versions == Runs()


def test_judged_rows_begin_where_asked():
    answer = {"prompt_logprobs": [None, {"6": {"logprob": -1.0}}, {"7": {"logprob": -2.0}, "9": {"logprob": -0.5}}]}
    assert judged_rows(answer, 2) == [{7: -2.0, 9: -0.5}]


def test_what_vllm_would_pass_over_is_refused():
    versions = Recorded(versions=Runs.of(1, 3), kv_versions=Runs.of(1, 3))
    assert "no recorded versions" in problem_for_vllm(replace(request(), recorded=versions), VOCABULARY)
    assert "no adapter, got a; " in problem_for_vllm(replace(request(), adapter="a"), VOCABULARY)
