"""Log-probabilities of a prompt, for requests with `prompt_logprobs`. Torch-free."""

from __future__ import annotations

from sparring.generation import GenerateRequest, ScoreRequest
from sparring.protocols import Engine


async def prompt_logprobs(engine: Engine, request: GenerateRequest) -> tuple[float, ...] | None:
    """Return the log-probabilities of a request's prompt if the request asks for them; otherwise None."""
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
