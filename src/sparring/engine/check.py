"""Checks of requests before they are scheduled."""

from __future__ import annotations

from typing import NamedTuple

from sparring.errors import RequestRefused
from sparring.generation import TEMPERATURE, GenerateRequest, ScoreRequest, is_temperature
from sparring.kernels.compiled.decoder_step import BIASES, TOPS

LARGEST_ID, LARGEST_BIAS = 1 << 31, 1e30


class EngineLimits(NamedTuple):
    """Limits of an engine: its vocabulary, the maximum number of tokens of a text, and the tokens in its cache
    (`capacity`)."""

    vocab_size: int
    max_positions: int
    capacity: int


def check_request(request: GenerateRequest, limits: EngineLimits) -> int:
    """Return how many tokens a request to generate may sample. Raises RequestRefused if it can never be served."""
    tokens, sampling = request.tokens, request.sampling
    max_new = min(sampling.max_tokens, limits.max_positions - len(tokens))
    problem = None
    if not tokens:
        problem = "a prompt of at least one token, got none; send one"
    elif min(tokens) < 0 or max(tokens) >= limits.vocab_size:
        problem = f"token ids below {limits.vocab_size}, got {min(tokens)} to {max(tokens)}; use the model's tokenizer"
    elif not 0 <= request.told < len(tokens):
        problem = (
            f"told tokens behind a prompt of at least one token, got {request.told} of {len(tokens)}; correct told"
        )
    elif sampling.max_tokens < 1:
        problem = f"max_tokens of at least 1, got {sampling.max_tokens}; raise it"
    elif max_new < 1:
        problem = f"a prompt of fewer than {limits.max_positions} tokens, got {len(tokens)}; shorten it"
    elif len(tokens) + max_new - 1 > limits.capacity:
        length = f"{len(tokens)} + {max_new}"
        problem = (
            f"prompt + max_tokens within the cache of {limits.capacity} tokens, got {length}; raise engine.kv.tokens"
        )
    else:
        problem = problem_of(request, limits.vocab_size)
    if problem:
        raise RequestRefused(f"request {request.id}: expected {problem}")
    return max_new


def check_score(request: ScoreRequest, limits: EngineLimits) -> None:
    """Check a request to score. Raises RequestRefused if the request can never be served."""
    tokens, most = request.tokens, min(limits.max_positions, limits.capacity) + 1
    problem = None
    if not 1 <= request.first < len(tokens):
        position = f"{request.first} of {len(tokens)}; the first token has no log-probability"
        problem = f"1 <= first < number of tokens, got {position}"
    elif min(tokens) < 0 or max(tokens) >= limits.vocab_size:
        problem = f"token ids below {limits.vocab_size}, got {min(tokens)} to {max(tokens)}; use the model's tokenizer"
    elif len(tokens) > most:
        problem = f"at most {most} tokens, got {len(tokens)}; shorten the text or raise engine.kv.tokens"
    elif not is_temperature(request.temperature):
        problem = f"{TEMPERATURE}, got {request.temperature}; correct it"
    elif not 0 <= request.top_k <= limits.vocab_size:
        problem = f"0 <= top_k <= {limits.vocab_size}, got {request.top_k}; correct it"
    if problem:
        raise RequestRefused(f"score {request.id}: expected {problem}")


def problem_of(request: GenerateRequest, vocab_size: int) -> str | None:
    """Describe the error in a request's sampling settings, as "expected ..., got ...; do ..." without its first word.
    Return None if the settings are valid. NaN and infinity are invalid."""
    sampling = request.sampling
    if not is_temperature(sampling.temperature):
        return f"{TEMPERATURE}, got {sampling.temperature}; correct it"
    if not 0 < sampling.top_p <= 1:
        return f"a top_p above 0 and at most 1, got {sampling.top_p}; use 1 for no truncation"
    if not 0 <= sampling.min_p <= 1:
        return f"a min_p from 0 to 1, got {sampling.min_p}; use 0 for no truncation"
    if not 0 <= sampling.top_k < LARGEST_ID:
        return f"a top_k of 0 or more, got {sampling.top_k}; use 0 for no truncation"
    if not 0 <= sampling.top_logprobs <= TOPS:
        return f"0 to {TOPS} top_logprobs, got {sampling.top_logprobs}; ask for fewer"
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        return f"min_tokens from 0 to max_tokens, got {sampling.min_tokens} and {sampling.max_tokens}; correct one"
    biased = [token for token, _ in sampling.logit_bias]
    if any(not 0 <= token < vocab_size for token in biased) or len(set(biased)) < len(biased):
        return f"each biased token once and below {vocab_size}, got {sorted(biased)}; correct logit_bias"
    if not all(abs(value) <= LARGEST_BIAS for _, value in sampling.logit_bias):
        return f"a bias from -{LARGEST_BIAS:g} to {LARGEST_BIAS:g}, got {sampling.logit_bias}; correct logit_bias"
    stops_banned = sampling.stop if sampling.min_tokens or request.preface else ()
    banned = {token for token in stops_banned if 0 <= token < vocab_size}
    if len(banned) + len(biased) > BIASES or len(banned) == vocab_size:
        most = f"at most {BIASES} tokens in logit_bias and, with min_tokens or a thought, in stop"
        return f"{most}, and one token that is not in stop, got {len(biased)} and {len(banned)}; remove some"
    if any(not -LARGEST_ID <= token < LARGEST_ID for token in sampling.stop):
        return f"stop tokens of 32 bits, got {sampling.stop}; use the model's tokenizer"
    if (sampling.stop_strings and not request.ends) or (sampling.constraint and not request.allowed):
        expected = "the functions `ends` and `allowed` for stop_strings and constraint"
        return f"{expected}, got the text alone; bind the request (Renderer.bind)"
    if request.allowed and sampling.min_tokens:
        return f"min_tokens 0 with a constraint, got {sampling.min_tokens}; require the length in the constraint"
    return None
