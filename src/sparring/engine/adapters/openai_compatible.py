"""`OpenAiEngine`: client of any server with OpenAI's completions API and token ids, such as vLLM's, for teachers,
judges and evaluation.

It refuses weight updates and parks no conversations. The server does not report the kept set of truncated
sampling, so its samples cannot train a policy.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from sparring.engine.adapters.client import ClientCounts, authorization, completion_of, is_refusal, likeliest, scores_of
from sparring.engine.prompt_logprobs import prompt_logprobs
from sparring.errors import BadInput, EngineError, RequestRefused, WeightsError, boundary, refusal
from sparring.generation import Completion, Delta, FinishReason, GenerateRequest, Runs, Sampling, ScoreRequest, Scores
from sparring.types import WeightRef

CONNECT_S = 10.0
PROBE_S = 120.0
PREFIX = "token_id:"
RAW_AT = (0.0, 1.0)
"""Temperatures at which log-probabilities that ignore the temperature are right (greedy samples are recorded at 1)."""
SAME = 1e-6
MOST_SEED = (1 << 63) - 1
FINISHED: Mapping[str, FinishReason] = {"stop": "stop", "length": "length"}


class Logprobs(msgspec.Struct):
    """Log-probabilities of a choice. With `return_tokens_as_token_ids` the server writes token 7 as "token_id:7"."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None


class Choice(msgspec.Struct):
    """Choice in an answer: sampled tokens, complete or in part."""

    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: list[dict[str, dict[str, Any]] | None] | None = None


class Answer(msgspec.Struct):
    """Answer: a completion or an event of a stream. `error` is set if the request failed after the stream had begun."""

    choices: list[Choice] = []
    error: Any = None


class Models(msgspec.Struct):
    """List of a server's models."""

    data: list[dict[str, Any]]


@dataclass(slots=True)
class _PartialTurn:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    finish_reason: FinishReason = "abort"
    aborted: asyncio.Event = field(default_factory=asyncio.Event)


class OpenAiEngine:
    """Client of a server with OpenAI's completions API and token ids, on one event loop. Implements `Engine`, except
    updates.

    Args:
        url: URL of the API, ending in `/v1`.
        model: name of the model at the server; "" for the server's only model.
        api_key: key sent as a bearer token; "" for none.
        version: version recorded for the server's weights.

    Raises:
        BadInput: no server answers at `url`, it has no such model, or it returns no token ids and log-probabilities.
    """

    def __init__(self, url: str, *, model: str = "", api_key: str = "", version: int = 0) -> None:
        self._url, self._version, self._counts = url.rstrip("/"), version, ClientCounts()
        headers = authorization(api_key)
        with httpx.Client(headers=headers, timeout=httpx.Timeout(PROBE_S, connect=CONNECT_S)) as client:
            self._model = self._find(client, model)
            self._processed = self._probe(client)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx.AsyncClient(headers=headers, limits=limits, timeout=httpx.Timeout(None, connect=CONNECT_S))
        self._live: dict[str, list[_PartialTurn]] = defaultdict(list)

    @property
    def version(self) -> int:
        """Version recorded for the server's weights, which never change."""
        return self._version

    @property
    def metrics(self) -> dict[str, float]:
        """Counts of `ClientCounts` since the start."""
        return dict(self._counts.values)

    async def generate(self, request: GenerateRequest) -> Completion:
        return await completion_of(self.stream(request))

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Delta | Completion, None]:
        where, body = f"engine at {self._url}: request {request.id}", self._body(request)
        prompt = await prompt_logprobs(self, request)
        turn = _PartialTurn()
        self._live[request.id].append(turn)
        try:
            with boundary(EngineError, where):
                async with aclosing(self._choices(body, turn.aborted, where)) as choices:
                    async for choice in choices:
                        before = len(turn.tokens)
                        _take(turn, choice, request.sampling, where)
                        if len(turn.tokens) > before:
                            yield Delta(tokens=tuple(turn.tokens[before:]), logprobs=tuple(turn.logprobs[before:]))
                        if turn.finish_reason != "abort":
                            break
            if turn.finish_reason == "abort" and not turn.aborted.is_set():
                raise EngineError(
                    f"{where}: expected a finish reason, got the end of the answer; check that the server still runs"
                )
        finally:
            self._live[request.id].remove(turn)
            if not self._live[request.id]:
                del self._live[request.id]
        versions = Runs.of(self._version, len(turn.tokens))
        completion = Completion(
            tokens=tuple(turn.tokens),
            logprobs=tuple(turn.logprobs),
            finish_reason=turn.finish_reason,
            versions=versions,
            kv_versions=versions,
            top_logprobs=tuple(turn.tops) if request.sampling.top_logprobs else None,
            prompt_logprobs=prompt,
        )
        yield self._counts.completed(completion)

    async def abort(self, request: str) -> None:
        for turn in self._live.get(request, ()):
            turn.aborted.set()

    async def score(self, request: ScoreRequest) -> Scores:
        """Compute log-probabilities of given tokens. Refused are temperatures other than 1, and servers without
        prompt_logprobs. Entropies are unknown and returned as NaN."""
        where = f"score {request.id}"
        if request.temperature != 1:
            temperature = f"{request.temperature:g}; score with a native engine"
            raise RequestRefused(f"{where}: expected temperature 1 from an OpenAI-compatible server, got {temperature}")
        if not 1 <= request.first < len(request.tokens):
            position = f"{request.first} of {len(request.tokens)}; the first token has no log-probability"
            raise RequestRefused(f"{where}: expected 1 <= first < number of tokens, got {position}")
        rows = (await self._judged(request.tokens, request.top_k, where))[request.first :]
        return scores_of(request, rows, [math.nan] * len(rows), self._version)

    async def release(self, conversation: str) -> None:
        """Do nothing: nothing is parked."""

    async def pull(self, ref: WeightRef) -> None:
        """Refuse: such a server takes no weight updates."""
        where = f"weights of {ref.model} version {ref.version}"
        kind = "an OpenAI-compatible server; train with another"
        raise WeightsError(f"{where}: expected an engine that takes weight updates, got {kind}")

    async def sleep(self) -> None:
        """Refuse: such a server keeps its memory."""
        raise EngineError("sleep: expected an engine that can sleep, got an OpenAI-compatible server; leave it awake")

    async def wake(self, ref: WeightRef) -> None:
        await self.pull(ref)

    async def close(self) -> None:
        await self._client.aclose()

    def _find(self, client: httpx.Client, model: str) -> str:
        where = f"engine at {self._url}"
        try:
            answer = client.get(f"{self._url}/models")
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            cause = f"{type(error).__name__}: {error}"
            raise refusal(where, "an OpenAI-compatible server", cause, "start it, or correct engine.urls") from error
        if answer.status_code == 401:
            raise refusal(where, "the server's API key", "a wrong key or none", "set engine.api_key_env")
        with boundary(BadInput, where, "a list of models", "correct engine.urls; it ends with /v1"):
            names = [
                str(entry["id"]) for entry in msgspec.json.decode(answer.raise_for_status().content, type=Models).data
            ]
        if model not in names if model else len(names) != 1:
            remedy = "name one of its models in engine.served_model"
            raise refusal(where, model or "one model", ", ".join(names) or "none", remedy)
        return model or names[0]

    def _probe(self, client: httpx.Client) -> bool:
        """Return True if the server's log-probabilities are of the sampling distribution, and False if they ignore the
        temperature. Raises BadInput if the server does not take or return token ids."""
        where, likeliest = f"engine at {self._url}", []
        expected, remedy = "completions for prompts of token ids", "use a server that takes them, such as vLLM"
        for temperature in (1.0, 0.5):
            sampling = Sampling(temperature=temperature, max_tokens=1, top_logprobs=1)
            body = {**self._sampling(sampling), "model": self._model, "prompt": [0]}
            with boundary(BadInput, where, expected, remedy):
                answer = client.post(f"{self._url}/completions", json=body)
                if answer.status_code != 200:
                    raise ValueError(_message(answer.content, answer.status_code))
                turn, [choice] = _PartialTurn(), msgspec.json.decode(answer.content, type=Answer).choices
            try:
                _take(turn, choice, sampling, where)
            except EngineError as cause:
                raise BadInput(str(cause)) from cause
            likeliest.append(turn.tops[0][0][1])
        return abs(likeliest[0] - likeliest[1]) > SAME

    def _body(self, request: GenerateRequest) -> dict[str, Any]:
        """Write a request in the server's format. Raises RequestRefused if the server cannot serve it."""
        sampling, problem = request.sampling, None
        truncates = sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k or sampling.min_p)
        changed = sampling.temperature not in RAW_AT or truncates or sampling.logit_bias or sampling.min_tokens
        if not request.tokens or sampling.max_tokens < 1:
            answer = (
                f"{len(request.tokens)} tokens and max_tokens {sampling.max_tokens}; send a prompt and raise max_tokens"
            )
            problem = "a prompt and max_tokens of at least 1", answer
        elif request.adapter is not None:
            problem = (
                "no adapter",
                f"{request.adapter}; use a native engine, or name the adapter in engine.served_model",
            )
        elif sampling.constraint or request.allowed:
            kind = "a function" if sampling.constraint is None else f"a {sampling.constraint.kind}"
            remedy = 'leave it to the policy (a tool choice, a format), or use an engine of kind "native" or "remote"'
            problem = "no constraint", f"{kind}; {remedy}"
        elif request.ends and not sampling.stop_strings:
            problem = "stop strings as text", "a Python function (`ends`); set stop_strings in its sampling"
        elif request.told and request.ends:
            problem = "a whole turn", "the rest of one, in which the server looks for stop strings anew; leave them out"
        elif changed and not self._processed:
            expected = "log-probabilities of the distribution that is sampled from"
            problem = expected, "those before temperature; start the server with --logprobs-mode processed_logprobs"
        if problem:
            raise RequestRefused(f"request {request.id}: expected {problem[0]}, got {problem[1]}")
        return {**self._sampling(sampling), "model": self._model, "prompt": list(request.tokens), "stream": True}

    @staticmethod
    def _sampling(sampling: Sampling) -> dict[str, Any]:
        """Write sampling settings. Settings that not every server supports are written only if they are set."""
        optional = {
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "min_tokens": sampling.min_tokens,
            "logit_bias": {str(token): value for token, value in sampling.logit_bias},
            "stop": list(sampling.stop_strings),
            "include_stop_str_in_output": bool(sampling.stop_strings),
        }
        return {
            **{name: value for name, value in optional.items() if value},
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_tokens,
            "seed": sampling.seed & MOST_SEED,
            "logprobs": max(1, sampling.top_logprobs),
            "stop_token_ids": list(sampling.stop),
            "ignore_eos": True,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }

    async def _choices(self, body: Mapping[str, Any], ended: asyncio.Event, where: str) -> AsyncGenerator[Choice, None]:
        if ended.is_set():
            return
        async with self._client.stream("POST", f"{self._url}/completions", json=body) as response:
            if response.status_code != 200:
                kind = RequestRefused if is_refusal(response.status_code) else EngineError
                raise kind(f"{where}: {_message(await response.aread(), response.status_code)}")
            rest = b""
            async with aclosing(_until(response.aiter_bytes(), ended)) as chunks:
                async for chunk in chunks:
                    *events, rest = (rest + chunk).split(b"\n\n")
                    for text in events:
                        data = text.removeprefix(b"data: ").strip()
                        if data != b"[DONE]" and not data.startswith(b":"):
                            for choice in _decoded(data, where).choices:
                                yield choice

    async def _judged(self, tokens: tuple[int, ...], top_k: int, where: str) -> list[dict[int, float]]:
        body = {"model": self._model, "prompt": list(tokens), "max_tokens": 1, "prompt_logprobs": top_k}
        with boundary(EngineError, f"engine at {self._url}: {where}"):
            answer = await self._client.post(f"{self._url}/completions", json=body)
            if answer.status_code != 200:
                kind = RequestRefused if is_refusal(answer.status_code) else EngineError
                raise kind(f"{where}: {_message(answer.content, answer.status_code)}")
            [choice] = _decoded(answer.content, where).choices
            if choice.prompt_logprobs is None:
                silence = "an answer without prompt_logprobs; score with another engine"
                raise RequestRefused(f"{where}: expected log-probabilities of the prompt, got {silence}")
            return [{int(id): float(at["logprob"]) for id, at in (row or {}).items()} for row in choice.prompt_logprobs]


def _take(turn: _PartialTurn, choice: Choice, sampling: Sampling, where: str) -> None:
    """Add the tokens of a choice, up to the token that ends the turn."""
    logprobs = choice.logprobs
    if choice.token_ids is None and logprobs is not None and all(token.startswith(PREFIX) for token in logprobs.tokens):
        choice.token_ids = [int(token.removeprefix(PREFIX)) for token in logprobs.tokens]
    tokens = choice.token_ids or []
    if choice.finish_reason is not None and choice.finish_reason not in FINISHED:
        raise EngineError(f"{where}: expected finish reason stop or length, got {choice.finish_reason!r}")
    values = [] if logprobs is None else logprobs.token_logprobs
    if (choice.token_ids is None and values) or len(values) != len(tokens) or None in values:
        expected = "an answer with token ids and their log-probabilities"
        raise EngineError(f"{where}: expected {expected}, got text; use a server that returns them, such as vLLM")
    if choice.finish_reason is not None:
        turn.finish_reason = FINISHED[choice.finish_reason]
    for at, token in enumerate(tokens):
        assert logprobs is not None
        turn.tokens.append(token)
        turn.logprobs.append(logprobs.token_logprobs[at] or 0.0)
        if sampling.top_logprobs:
            row = (logprobs.top_logprobs or [])[at] or {}
            by_id = {int(id.removeprefix(PREFIX)): value for id, value in row.items()}
            turn.tops.append(likeliest(by_id, sampling.top_logprobs))
        if token in sampling.stop:
            turn.finish_reason = "stop"
            return


def _decoded(data: bytes, where: str) -> Answer:
    with boundary(EngineError, where, "an answer in the OpenAI completions format", "use a server that implements it"):
        answer = msgspec.json.decode(data, type=Answer)
    if answer.error is not None:
        raise EngineError(f"{where}: {answer.error}")
    return answer


def _message(body: bytes, status: int) -> str:
    return f"status {status}: {body[:300].decode(errors='replace')}"


async def _until(chunks: AsyncIterator[bytes], ended: asyncio.Event) -> AsyncGenerator[bytes, None]:
    """Yield the chunks that arrive before `ended`."""
    stop: asyncio.Future[Any] = asyncio.ensure_future(ended.wait())
    coming: asyncio.Future[Any] | None = None
    try:
        while True:
            coming = asyncio.ensure_future(anext(chunks, None))
            await asyncio.wait((coming, stop), return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                return
            chunk = coming.result()
            if chunk is None:
                return
            yield chunk
    finally:
        waiting = [stop] if coming is None else [stop, coming]
        for future in waiting:
            future.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
