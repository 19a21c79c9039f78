"""Common functions of the clients of engines on other servers: API keys and counts of answers. Torch-free."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import aclosing

from sparring.errors import refusal
from sparring.generation import Completion, Delta, ScoreRequest, Scores

LATER = frozenset((408, 409, 429))
"""HTTP statuses below 500 that refuse a request only temporarily."""


def is_refusal(status: int) -> bool:
    """Return whether an HTTP status means that the request will never be served."""
    return 400 <= status < 500 and status not in LATER


class ClientCounts:
    """Counts of a client since its start, in `values` by name: completions, generated_tokens, cached_tokens,
    updates."""

    def __init__(self) -> None:
        self.values: dict[str, float] = defaultdict(float)

    def completed(self, completion: Completion) -> Completion:
        """Count a completion and return it."""
        self.values["completions"] += 1
        self.values["generated_tokens"] += len(completion.tokens)
        self.values["cached_tokens"] += completion.cached_tokens
        return completion

    def updated(self) -> None:
        """Count an update of the weights that the server acknowledged."""
        self.values["updates"] += 1


async def completion_of(stream: AsyncIterator[Delta | Completion]) -> Completion:
    """Read an engine's stream to its Completion."""
    async with aclosing(stream) as pieces:  # type: ignore[type-var]
        async for piece in pieces:
            if isinstance(piece, Completion):
                return piece
    raise AssertionError("a stream ends with a completion or an error")


def likeliest(logprobs: Mapping[int, float], count: int) -> tuple[tuple[int, float], ...]:
    """Return the `count` most likely tokens, best first, ties by id."""
    return tuple(sorted(logprobs.items(), key=lambda item: (-item[1], item[0]))[:count])


def scores_of(
    request: ScoreRequest, rows: Sequence[Mapping[int, float]], entropies: Iterable[float], version: int
) -> Scores:
    """Make the scores of a request from the log-probabilities by token id at each position."""
    targets, tops = request.tokens[request.first :], [likeliest(row, request.top_k) for row in rows]
    return Scores(
        logprobs=tuple(row[token] for row, token in zip(rows, targets, strict=True)),
        entropies=tuple(entropies),
        top_ids=tuple(tuple(id for id, _ in top) for top in tops),
        top_logprobs=tuple(tuple(value for _, value in top) for top in tops),
        version=version,
    )


def read_api_key(variable: str) -> str:
    """Read a server's API key from an environment variable: keys are never written in a recipe or on a command line.
    Without a variable ("") the key is "". Raises BadInput if the variable is not set, is empty, or has characters
    outside ASCII."""
    key = os.environ.get(variable, "") if variable else ""
    if variable and not key:
        raise refusal(f"environment variable {variable}", "an API key", "nothing", "set it")
    if not key.isascii():
        raise refusal(f"environment variable {variable}", "an API key in ASCII", "other characters", "correct it")
    return key


def authorization(api_key: str) -> dict[str, str]:
    """Return the request headers for a server's key from `read_api_key`. The key is sent as a bearer token, or
    unchanged if it is a user and a password (`Basic dXNlcjpwYXNzd29yZA==`)."""
    if not api_key:
        return {}
    return {"authorization": api_key if api_key.startswith("Basic ") else f"Bearer {api_key}"}
