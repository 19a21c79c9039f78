"""State of one request while the engine works on it. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import chain, pairwise

from sparring.engine.reply import Reply
from sparring.engine.turn_pieces import joined_runs
from sparring.engine.weight_names import ServedWeights
from sparring.generation import (
    Completion,
    Delta,
    FinishReason,
    GenerateRequest,
    KeptSets,
    Runs,
    Sampling,
    ScoreRequest,
    Scores,
)

ScoredRows = tuple[list[float], list[float], list[list[int]], list[list[float]]]
"""Scores of consecutive rows: log-probabilities, entropies, and ids and log-probabilities of the top tokens."""
Top = tuple[tuple[int, float], ...]


@dataclass(eq=False, slots=True)
class Sequence:
    """Tokens of a request so far, and their keys and values in the cache.

    A step touches as little of each request as it can, because the computation empties the processor's caches.

    A request to score is a prompt that samples nothing: all its tokens but the last, which predicts no token to score.

    Attributes:
        computed: number of tokens whose keys and values are in `pages`, or will be after the planned step.
        lost: value of `computed` when the request was preempted.
        oldest: oldest weight version of the computed keys and values; None without any.
        gone: number of first pages that were freed early, because no layer attends to them any more.
        state: slot of the recurrent state after the computed tokens; None in a model without recurrent layers.
        share_at: number of prompt tokens after which the state is copied for waiting requests; 0 for none.
        prompt_digests: digests by which prompts with a common prefix recognise each other.
        cached_tokens: tokens found in the cache when the request was first `admitted`.
        slot: row of the request in the runner's tables while the request runs, otherwise -1.
        table_length: number of pages in that row. `stale` is True if more pages were allocated since.
        read_at: number of sampled tokens when the request was last admitted; it is in prefill until it samples another
            token.
        served: weights that compute the request, set when it is added to the waiting requests.
        origins: (first token, sampling version, oldest version of keys and values) for each change of versions.
        scored_from: index of the first token that predicts a token to score; None for a request that generates.
    """

    request: GenerateRequest | ScoreRequest
    arrival: int
    reply: Reply
    tokens: list[int]
    num_prompt: int
    sampling: Sampling
    conversation: str | None = None
    max_new: int = 0
    stop: frozenset[int] = frozenset()
    keep: bool = False
    computed: int = 0
    lost: int = 0
    pages: list[int] = field(default_factory=list)
    gone: int = 0
    digests: list[bytes] = field(default_factory=list)
    oldest: int | None = None
    state: int | None = None
    share_at: int = 0
    prompt_digests: list[bytes] | None = None
    admitted: bool = False
    read_at: int = 0
    cached_tokens: int = 0
    slot: int = -1
    table_length: int = 0
    stale: bool = True
    logprobs: list[float] = field(default_factory=list)
    kept: list[bytes] | None = None
    tops: list[Top] | None = None
    allowed: bytes | None = None
    prompt_logprobs: tuple[float, ...] | None = None
    version: int | None = None
    kv_version: int | None = None
    origins: list[tuple[int, int, int]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    scored_from: int | None = None
    scores: list[ScoredRows] = field(default_factory=list)
    served: ServedWeights = field(init=False)

    @staticmethod
    def of(request: GenerateRequest, reply: Reply, *, arrival: int, max_new: int, keep: bool) -> Sequence:
        """Make the sequence of a request to generate that has just arrived."""
        return Sequence(
            request=request,
            sampling=request.sampling,
            conversation=request.conversation,
            arrival=arrival,
            max_new=max_new,
            reply=reply,
            tokens=list(request.tokens),
            num_prompt=len(request.tokens),
            stop=frozenset(request.sampling.stop),
            keep=keep and request.conversation is not None,
            tops=[] if request.sampling.top_logprobs else None,
            kept=[] if _truncates(request) else None,
        )

    @staticmethod
    def to_score(request: ScoreRequest, reply: Reply, *, arrival: int) -> Sequence:
        """Make the sequence of a request to score that has just arrived."""
        return Sequence(
            request=request,
            sampling=Sampling(),
            arrival=arrival,
            reply=reply,
            tokens=list(request.tokens[:-1]),
            num_prompt=len(request.tokens) - 1,
            scored_from=request.first - 1,
        )

    @property
    def reusable(self) -> list[int]:
        """Tokens to look up in the cache. The last of these tokens is always computed, and so are all tokens that
        predict a token to score."""
        return self.tokens if self.scored_from is None else self.tokens[: self.scored_from + 1]

    @property
    def generated(self) -> GenerateRequest:
        """Request to generate of this sequence; not for a request to score."""
        assert isinstance(self.request, GenerateRequest)
        return self.request

    @property
    def turn(self) -> list[int]:
        """Tokens of the turn so far, including the last `told` tokens of the prompt."""
        return self.tokens[self.num_prompt - self.generated.told :]

    @property
    def rank(self) -> tuple[int, int, int]:
        """Order of service: higher priority, then earlier admission of the rollout, then earlier arrival."""
        request = self.request
        return (-request.priority, request.admission if isinstance(request, GenerateRequest) else 0, self.arrival)

    @property
    def pending(self) -> int:
        """Number of tokens that still need keys and values: one while generating, more during prefill."""
        return len(self.tokens) - self.computed

    @property
    def readable(self) -> int:
        """Number of pending tokens that one step may compute: at most up to `share_at`, where the state is copied."""
        return self.share_at - self.computed if self.share_at else self.pending

    @property
    def reads(self) -> bool:
        """True while the request is in prefill: from its admission, or readmission after a preemption, until it samples
        a token."""
        return len(self.logprobs) == self.read_at

    def extend(
        self,
        tokens: list[int],
        logprobs: list[float],
        version: int,
        kept: list[bytes] | None = None,
        tops: list[Top] | None = None,
    ) -> None:
        """Append sampled tokens up to the token that ends the sequence, if any, and then set `finish_reason`. Arguments
        as in `SampledTokens`."""
        if version != self.version or self.oldest != self.kv_version:
            self.version, self.kv_version = version, self.oldest
            self.origins.append((len(self.logprobs), version, version if self.oldest is None else self.oldest))
        end = self._end(tokens)
        if end is not None:
            tokens, logprobs = tokens[:end], logprobs[:end]
            self.finish_reason = "stop"
        self.tokens += tokens
        self.logprobs += logprobs
        if self.kept is not None:
            self.kept += [b""] * len(tokens) if kept is None else kept[: len(tokens)]
        if tops is not None and self.tops is not None:
            # exclude tokens that cannot be sampled (a stop token before min_tokens)
            self.tops += [tuple(top for top in draw if top[1] > -math.inf) for draw in tops[: len(tokens)]]
        if self.finish_reason is None and len(self.logprobs) >= self.max_new:
            self.finish_reason = "length"

    def delta(self, begin: int) -> Delta:
        """Return the sampled tokens from index `begin` on, all of one version, as a delta."""
        kept = None if self.kept is None else self.kept[begin:]
        length, (_, version, kv_version) = len(self.logprobs) - begin, self.origins[-1]
        return Delta(
            tokens=tuple(self.tokens[self.num_prompt + begin :]),
            logprobs=tuple(self.logprobs[begin:]),
            versions=Runs.of(version, length),
            kv_versions=Runs.of(kv_version, length),
            kept=KeptSets(rows=tuple(kept)) if kept and any(kept) else None,
            top_logprobs=None if self.tops is None else tuple(self.tops[begin:]),
            finish_reason=self.finish_reason,
        )

    def scored(self, version: int) -> Scores:
        """Return the scores of a request to score; weights of `version` have computed them."""
        logprobs, entropies, ids, tops = zip(*self.scores, strict=True)
        return Scores(
            logprobs=tuple(chain.from_iterable(logprobs)),
            entropies=tuple(chain.from_iterable(entropies)),
            top_ids=tuple(map(tuple, chain.from_iterable(ids))),
            top_logprobs=tuple(map(tuple, chain.from_iterable(tops))),
            version=version,
            cached_tokens=self.cached_tokens,
        )

    def _end(self, new: list[int]) -> int | None:
        """Return the number of new tokens up to the end of the turn; None if the turn continues."""
        stop = None if self.stop.isdisjoint(new) else next(i for i, token in enumerate(new, 1) if token in self.stop)
        request, num_sampled = self.generated, len(self.logprobs)
        ends, least = request.ends, max(0, request.sampling.min_tokens - 1 - num_sampled)
        if ends is None or len(new) <= least:
            return stop
        before = request.told + num_sampled
        end = ends([*self.turn, *new], len(new) - least)
        if end is not None and not before + least < end <= before + len(new):
            expected = f"a count from {before + least + 1} to {before + len(new)}"
            raise ValueError(f"expected `ends` to return {expected}, got {end}")
        return stop if end is None or (stop is not None and stop <= end - before) else end - before

    def limit(self, vocab_size: int) -> None:
        """Ask the request's constraint for the tokens allowed next, and store their mask in `allowed`; the mask is b""
        in a thought. Raises ValueError if the mask has too many bits, or allows no token."""
        request = self.generated
        if request.preface is not None and request.preface.before(tuple(self.turn)) is None:
            self.allowed = b""
        elif request.allowed is not None:
            allowed = bytes(request.allowed(self.turn))
            if len(allowed) > -(-vocab_size // 64) * 8:
                raise ValueError(f"expected a mask of {vocab_size} bits, got {8 * len(allowed)}")
            if not int.from_bytes(allowed, "little") % (1 << vocab_size):
                raise ValueError("expected at least one allowed token, got none")
            self.allowed = allowed

    def completion(self) -> Completion:
        """Return the result of a request to generate."""
        versions, kv_versions = self._runs()
        return Completion(
            tokens=tuple(self.tokens[self.num_prompt :]),
            logprobs=tuple(self.logprobs),
            finish_reason=self.finish_reason or "abort",
            versions=versions,
            kv_versions=kv_versions,
            kept=KeptSets(rows=tuple(self.kept)) if self.kept and any(self.kept) else None,
            top_logprobs=None if self.tops is None else tuple(self.tops),
            prompt_logprobs=self.prompt_logprobs,
            cached_tokens=self.cached_tokens,
        )

    def _runs(self) -> tuple[Runs, Runs]:
        if len(self.origins) == 1:
            whole, ((_, version, kv_version),) = (len(self.logprobs),), self.origins
            return Runs(lengths=whole, values=(version,)), Runs(lengths=whole, values=(kv_version,))
        bounds = [*(begin for begin, _, _ in self.origins), len(self.logprobs)]
        lengths = [end - begin for begin, end in pairwise(bounds)]
        _, versions, kv_versions = zip(*self.origins, strict=True) if self.origins else ((), (), ())
        return joined_runs(lengths, versions), joined_runs(lengths, kv_versions)


def _truncates(request: GenerateRequest) -> bool:
    sampling = request.sampling
    truncated = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    return sampling.temperature > 0 and (truncated or request.allowed is not None)
