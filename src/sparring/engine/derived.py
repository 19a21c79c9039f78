"""Requests that an engine derives from others: branches of a running one, the scoring of a prompt. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sparring.generation import GenerateRequest, ScoreRequest
from sparring.protocols import Engine


def branch_of(request: GenerateRequest, sampled: Sequence[int], max_new: int, name: str, seed: int) -> GenerateRequest:
    """Return a request that continues another after the tokens sampled so far.

    Args:
        max_new: maximum number of tokens of the turn, those of `sampled` included.
        name: id and conversation of the branch.
    """
    before, allowed, ends = [*sampled], request.allowed, request.ends
    sampling = replace(
        request.sampling,
        seed=seed,
        max_tokens=max_new - len(before),
        min_tokens=max(0, request.sampling.min_tokens - len(before)),
    )
    return replace(
        request,
        id=name,
        tokens=(*request.tokens, *before),
        sampling=sampling,
        conversation=name,
        # `allowed` and `ends` also see the tokens sampled before the branch
        allowed=None if allowed is None else lambda tokens: allowed([*before, *tokens]),
        ends=None if ends is None else lambda tokens, new: _less(ends([*before, *tokens], new), len(before)),
    )


async def prompt_logprobs(engine: Engine, request: GenerateRequest) -> tuple[float, ...] | None:
    """Return the log-probabilities of a request's prompt if the request asks for them; otherwise None.

    Raises:
        EngineError: as for `Engine.score`.
    """
    if not request.prompt_logprobs:
        return None
    if len(request.tokens) < 2:
        return ()
    score = ScoreRequest(
        id=f"{request.id}/prompt",
        tokens=request.tokens,
        temperature=request.sampling.temperature,
        priority=request.priority,
        adapter=request.adapter,
    )
    return (await engine.score(score)).logprobs


def _less(count: int | None, by: int) -> int | None:
    return None if count is None else count - by
