"""Functions that join the pieces of a streamed turn. Torch-free."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import replace
from itertools import chain, groupby
from operator import itemgetter

from sparring.generation import Completion, Delta, FinishReason, GenerateRequest, KeptSets, Runs
from sparring.protocols import Engine


async def completion_alone(engine: Engine, request: GenerateRequest) -> AsyncGenerator[Delta | Completion]:
    """Yield only the completion of a request, as a stream without deltas."""
    yield await engine.generate(request)


def joined(deltas: Sequence[Delta]) -> Delta:
    """Join consecutive deltas, at least one, to one delta."""
    if len(deltas) == 1:
        return deltas[0]
    tops = [delta.top_logprobs for delta in deltas]
    return Delta(
        tokens=tuple(chain.from_iterable(delta.tokens for delta in deltas)),
        logprobs=tuple(chain.from_iterable(delta.logprobs for delta in deltas)),
        versions=_runs(delta.versions for delta in deltas),
        kv_versions=_runs(delta.kv_versions for delta in deltas),
        kept=_kept(deltas),
        top_logprobs=None if tops[0] is None else tuple(chain.from_iterable(top or () for top in tops)),
        finish_reason=deltas[-1].finish_reason,
    )


def told_completion(told: Sequence[Delta], finish_reason: FinishReason) -> Completion:
    """Return the completion of a turn from all its deltas, which must have versions. Without deltas the completion is
    empty."""
    whole = joined(told or (Delta(tokens=(), logprobs=()),))
    return Completion(
        tokens=whole.tokens,
        logprobs=whole.logprobs,
        finish_reason=finish_reason,
        versions=whole.versions,
        kv_versions=whole.kv_versions,
        kept=whole.kept,
        top_logprobs=whole.top_logprobs,
    )


def completed(told: Sequence[Delta], rest: Completion) -> Completion:
    """Return the completion of a turn that consists of `told`, any number of deltas with versions, and then `rest`, the
    completion of another engine."""
    if not told:
        return rest
    last = Delta(
        tokens=rest.tokens,
        logprobs=rest.logprobs,
        versions=rest.versions,
        kv_versions=rest.kv_versions,
        kept=rest.kept,
        top_logprobs=rest.top_logprobs,
    )
    whole, prompt = joined((*told, last)), rest.prompt_logprobs
    before = sum(len(delta.tokens) for delta in told)
    return replace(
        rest,
        tokens=whole.tokens,
        logprobs=whole.logprobs,
        versions=whole.versions,
        kv_versions=whole.kv_versions,
        kept=whole.kept,
        top_logprobs=whole.top_logprobs,
        prompt_logprobs=None if prompt is None else prompt[: len(prompt) - before],
    )


def joined_runs(lengths: Sequence[int], values: Sequence[int]) -> Runs:
    """Return runs of these lengths and values; neighbours of equal value become one run."""
    pieces = groupby(zip(values, lengths, strict=True), itemgetter(0))
    runs = [(value, sum(length for _, length in same)) for value, same in pieces]
    return Runs(lengths=tuple(length for _, length in runs), values=tuple(value for value, _ in runs))


def _runs(parts: Iterable[Runs]) -> Runs:
    all_parts = list(parts)
    return joined_runs(
        [length for runs in all_parts for length in runs.lengths],
        [value for runs in all_parts for value in runs.values],
    )


def _kept(deltas: Sequence[Delta]) -> KeptSets | None:
    """Return the kept sets of all tokens, with empty sets for a delta without kept sets. Return None if no delta has
    kept sets."""
    if all(delta.kept is None for delta in deltas):
        return None
    rows = (delta.kept.rows if delta.kept is not None else (b"",) * len(delta.tokens) for delta in deltas)
    return KeptSets(rows=tuple(chain.from_iterable(rows)))
