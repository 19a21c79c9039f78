"""One request while the engine works on it. Torch-free."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from itertools import groupby

from sparring.types import Completion, FinishReason, GenerateRequest, Runs


@dataclass(eq=False, slots=True)
class Sequence:
    """The tokens of a request so far, and which of them have keys and values in the cache.

    `computed` counts tokens whose KV is (or in the planned step will be) in `pages`; `oldest` is the oldest weight version
    among them, None where there are none. `slot` is the sequence's row in the runner's tables while it runs.
    """

    request: GenerateRequest
    arrival: int
    max_new: int
    future: asyncio.Future[Completion]
    tokens: list[int]
    num_prompt: int
    stop: frozenset[int]
    keep: bool
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    oldest: int | None = None
    cached_tokens: int = 0
    slot: int = -1
    table_length: int = 0
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kv_versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @staticmethod
    def of(request: GenerateRequest, future: asyncio.Future[Completion], *, arrival: int, max_new: int, keep: bool) -> Sequence:
        """A request that has just come in."""
        return Sequence(
            request=request,
            arrival=arrival,
            max_new=max_new,
            future=future,
            tokens=list(request.tokens),
            num_prompt=len(request.tokens),
            stop=frozenset(request.sampling.stop),
            keep=keep and request.conversation is not None,
        )

    @property
    def rank(self) -> tuple[int, int]:
        """Order of service: higher priority first, then who came first."""
        return (-self.request.priority, self.arrival)

    @property
    def pending(self) -> int:
        """Tokens that still need keys and values: one while generating, more while the prompt is read."""
        return len(self.tokens) - self.computed

    def append(self, token: int, logprob: float, version: int) -> None:
        """Take a sampled token; sets `finish_reason` when it is the last one."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        self.kv_versions.append(version if self.oldest is None else self.oldest)
        if token in self.stop:
            self.finish_reason = "stop"
        elif len(self.logprobs) >= self.max_new:
            self.finish_reason = "length"

    def completion(self) -> Completion:
        """What the caller gets."""
        return Completion(
            tokens=tuple(self.tokens[self.num_prompt :]),
            logprobs=tuple(self.logprobs),
            finish_reason=self.finish_reason or "abort",
            versions=_runs(self.versions),
            kv_versions=_runs(self.kv_versions),
            cached_tokens=self.cached_tokens,
        )


def _runs(values: list[int]) -> Runs:
    runs = [(sum(1 for _ in same), value) for value, same in groupby(values)]
    return Runs(lengths=tuple(length for length, _ in runs), values=tuple(value for _, value in runs))
