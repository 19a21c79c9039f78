"""What is wrong with how a request wants its tokens drawn."""

from __future__ import annotations

import math

from sparring.generation import GenerateRequest
from sparring.model.kernels.decoder_step import BIASES, TOPS

LARGEST_ID, LARGEST_BIAS = 1 << 31, 1e30


def problem_of(request: GenerateRequest, vocab_size: int) -> str | None:
    """What is expected of how tokens are drawn and what was got, if that is something else. NaN and infinity are."""
    sampling = request.sampling
    if not 0 <= sampling.temperature < math.inf:
        return f"a temperature of 0 or more, got {sampling.temperature}; correct it"
    if not 0 < sampling.top_p <= 1:
        return f"a top_p above 0 and at most 1, got {sampling.top_p}; 1 truncates nothing"
    if not 0 <= sampling.min_p <= 1:
        return f"a min_p from 0 to 1, got {sampling.min_p}; 0 truncates nothing"
    if not 0 <= sampling.top_k < LARGEST_ID:
        return f"a top_k of 0 or more, got {sampling.top_k}; 0 truncates nothing"
    if not 0 <= sampling.top_logprobs <= TOPS:
        return f"0 to {TOPS} top_logprobs, got {sampling.top_logprobs}; ask for fewer"
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        return f"min_tokens from 0 to max_tokens, got {sampling.min_tokens} and {sampling.max_tokens}; correct one"
    biased = [token for token, _ in sampling.logit_bias]
    if any(not 0 <= token < vocab_size for token in biased) or len(set(biased)) < len(biased):
        return f"each biased token once and below {vocab_size}, got {sorted(biased)}; correct logit_bias"
    if not all(abs(value) <= LARGEST_BIAS for _, value in sampling.logit_bias):
        return f"a bias from -{LARGEST_BIAS:g} to {LARGEST_BIAS:g}, got {sampling.logit_bias}; correct logit_bias"
    banned = {token for token in sampling.stop if 0 <= token < vocab_size} if sampling.min_tokens else ()
    if len(banned) + len(biased) > BIASES or len(banned) == vocab_size:
        most = f"at most {BIASES} tokens in logit_bias and, with min_tokens, in stop, and one outside of stop"
        return f"{most}, got {len(biased)} and {len(banned)}; leave some out"
    if any(not -LARGEST_ID <= token < LARGEST_ID for token in sampling.stop):
        return f"stop tokens of 32 bits, got {sampling.stop}; use the model's tokenizer"
    if (sampling.stop_strings and not request.ends) or (sampling.constraint and not request.allowed):
        return "`ends` and `allowed` beside stop_strings and constraint, got the text alone; bind the request (Renderer.bind)"
    if request.allowed and sampling.min_tokens:
        return "min_tokens 0 where a grammar says what may come, got both; let the grammar say it"
    return None
