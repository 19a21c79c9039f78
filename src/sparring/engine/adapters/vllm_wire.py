"""Wire format of vLLM's token-level interface (`/inference/v1/generate`). Torch-free.

A choice holds the log-probabilities of each sampled token and of the top tokens; -9999 stands for minus infinity.
Versions are sent at the end of a request, as spans over its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from sparring.generation import Completion, FinishReason, GenerateRequest, KeptSets, Runs, Sampling

GENERATE = "/inference/v1/generate"
"""Address of the interface."""
WHOLE_VOCABULARY = 4096
"""Largest vocabulary for which all log-probabilities of a token are requested: they are sent as text, about 60 bytes
each."""
PROBE = "sparring-verifies"
"""Prefix of the ids of requests that are served while vLLM is paused: see `vllm_process/sparring_vllm.py`."""
NO_ADAPTER = "no adapter, got {}; vLLM serves the model alone here: use a native engine"
_IMPOSSIBLE = -9000.0
_SEED_BITS = (1 << 63) - 1
_LEVEL = 1 << 32
"""Distance between neighbouring priorities on vLLM's scale; larger than any difference of two admission numbers."""


def truncates(sampling: Sampling) -> bool:
    """Return True if these settings sample from a part of the vocabulary, whose ids are recorded per token (law 2)."""
    return sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0)


def problem_for_vllm(request: GenerateRequest, vocab_size: int) -> str | None:
    """Describe the setting of a request that vLLM does not support, and why; None if vLLM supports them all."""
    sampling = request.sampling
    if request.adapter is not None:
        return NO_ADAPTER.format(request.adapter)
    if request.recorded is not None:
        return "no recorded versions, got some; vLLM samples under the version it serves: use a native engine"
    if request.allowed is not None:
        kind = "a function" if sampling.constraint is None else f"a {sampling.constraint.kind}"
        remedy = 'leave it to the policy (a tool choice, a format), or set engine.kind to "native" or "remote"'
        return f"no constraint (`allowed`), got {kind}; vLLM takes no token masks from its caller: {remedy}"
    if truncates(sampling) and not sampling.top_k and vocab_size > WHOLE_VOCABULARY:
        most = f"top_k beside top_p and min_p where the vocabulary has more than {WHOLE_VOCABULARY} tokens"
        return f"{most}, got none and {vocab_size}; vLLM names the tokens it kept only as the likeliest ones: set top_k"
    return None


def generate_body(
    request: GenerateRequest, name: str, max_new: int, *, vocab_size: int, version: int
) -> dict[str, Any]:
    """Write a request for one turn, with the unique id `name`. `version` is the version served now; only requests with
    the same version share cached prefixes (law 4)."""
    sampling = request.sampling
    # one more: vLLM also lists the sampled token
    named = min(sampling.top_logprobs + 1, vocab_size) if sampling.top_logprobs else 0
    if truncates(sampling):
        named = max(named, min(sampling.top_k, vocab_size)) if sampling.top_k else -1
    return {
        "request_id": name,
        "token_ids": request.tokens,
        "cache_salt": f"version {version}",
        "priority": request.admission - request.priority * _LEVEL,
        "sampling_params": {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "seed": sampling.seed & _SEED_BITS,
            "max_tokens": max_new,
            "min_tokens": min(sampling.min_tokens, max_new),
            "stop_token_ids": [token for token in sampling.stop if 0 <= token < vocab_size],
            "logit_bias": {str(token): value for token, value in sampling.logit_bias} or None,
            "logprobs": named,
            "ignore_eos": True,  # only `stop` ends a turn
            "detokenize": False,
        },
    }


def judge_body(name: str, tokens: Sequence[int], named: int, priority: int) -> dict[str, Any]:
    """Write a request for log-probabilities at temperature 1: of given tokens, and of the `named` top tokens at each
    position (-1: the whole vocabulary). The request also samples one token, whose version is that of the weights."""
    sampling = {"max_tokens": 1, "prompt_logprobs": named, "ignore_eos": True, "detokenize": False}
    return {"request_id": name, "token_ids": list(tokens), "sampling_params": sampling, "priority": -priority * _LEVEL}


def judged_rows(answer: Mapping[str, Any], first: int = 1) -> list[dict[int, float]]:
    """Return the log-probabilities by token id at each position from `first` on."""
    rows = answer["prompt_logprobs"][first:]
    return [{int(token): value["logprob"] for token, value in row.items()} for row in rows]


def judging_version(answer: Mapping[str, Any]) -> int:
    """Return the version of the weights that answered a request of `judge_body`."""
    return int(answer["choices"][0]["weight_versions"][-1]["version"])


class SampledTurn:
    """Tokens that a request has sampled so far, collected from vLLM's pieces.

    Args:
        version: version served when the request was sent, the oldest version of keys and values that the request may
            attend to.
        recomputes: whether an update makes running requests recompute their keys and values.
    """

    def __init__(self, request: GenerateRequest, version: int, *, vocab_size: int, recomputes: bool) -> None:
        self._request, self._version = request, version
        self._vocab_size, self._recomputes = vocab_size, recomputes
        self._kept: list[tuple[int, ...]] | None = [] if truncates(request.sampling) else None
        self._tops: list[tuple[tuple[int, float], ...]] | None = [] if request.sampling.top_logprobs else None
        self._spans: list[tuple[int, int]] = []
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.cached_tokens = 0
        self.finish_reason: FinishReason | None = None

    def take(self, answer: Mapping[str, Any]) -> None:
        """Add one piece, or the complete answer."""
        for choice in answer["choices"]:
            for token in (choice["logprobs"] or {}).get("content") or ():
                self._token(token)
            for span in choice["weight_versions"] or ():
                self._spans.append((span["end"], int(span["version"])))
            if choice["finish_reason"] is not None:
                self.finish_reason = choice["finish_reason"]
        if usage := answer.get("usage"):
            self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    def cut(self, count: int) -> None:
        """End the turn after `count` tokens and drop later ones."""
        for column in (self.tokens, self.logprobs, self._kept, self._tops):
            if column is not None:
                del column[count:]
        self.finish_reason = "stop"

    def completion(self, prompt_logprobs: tuple[float, ...] | None) -> Completion:
        """Return the sampled turn as a `Completion`."""
        versions = [self._version] * len(self.tokens)
        begin = 0
        for end, version in self._spans:
            versions[begin:end] = [version] * (min(end, len(versions)) - min(begin, len(versions)))
            begin = end
        oldest = versions if self._recomputes else [min(self._version, version) for version in versions]
        return Completion(
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            finish_reason=self.finish_reason or "abort",
            versions=_runs(versions),
            kv_versions=_runs(oldest),
            kept=KeptSets.of(self._kept) if self._kept and any(self._kept) else None,
            top_logprobs=None if self._tops is None else tuple(self._tops),
            prompt_logprobs=prompt_logprobs,
            cached_tokens=self.cached_tokens,
        )

    def _token(self, content: Mapping[str, Any]) -> None:
        self.tokens.append(content["token_id"])
        self.logprobs.append(content["logprob"])
        if self._kept is None and self._tops is None:
            return
        logprobs = {top["token_id"]: top["logprob"] for top in content["top_logprobs"]}
        possible = sorted(((-value, token) for token, value in logprobs.items() if value > _IMPOSSIBLE))
        if self._kept is not None:
            unlimited = len(possible) == self._vocab_size
            self._kept.append(() if unlimited else tuple(token for _, token in possible))
        if self._tops is not None:
            self._tops.append(
                tuple((token, -value) for value, token in possible[: self._request.sampling.top_logprobs])
            )


def _runs(values: list[int]) -> Runs:
    runs = [(value, len(list(same))) for value, same in groupby(values)]
    return Runs(lengths=tuple(length for _, length in runs), values=tuple(value for value, _ in runs))
