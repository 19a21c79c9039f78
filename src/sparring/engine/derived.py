"""Requests that an engine derives from others: branches of a running one, the scoring of a prompt. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sparring.generation import GenerateRequest, ScoreRequest
from sparring.protocols import Engine


def branch_of(request: GenerateRequest, sampled: Sequence[int], name: str, seed: int) -> GenerateRequest:
    """Return a request that continues another after the tokens sampled so far, with another seed.

    Args:
        name: id and conversation of the branch.
    """
    rest = request.after(sampled)
    return replace(rest, id=name, conversation=name, sampling=replace(rest.sampling, seed=seed))


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
