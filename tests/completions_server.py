"""Server of OpenAI's completions with token ids on an engine of ours, for tests of clients."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from common.serving import ServingThread, free_socket, quiet_server
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from sparring.errors import EngineError
from sparring.generation import Completion, Delta, GenerateRequest, Sampling, ScoreRequest
from sparring.protocols import Engine


class CompletionsServer(ServingThread):
    """Thread that serves one engine and closes it at the end.

    Args:
        engine: engine that samples.
        models: names in the list of models.
        tells_ids: whether answers have token ids; otherwise they have text.
        processed: whether log-probabilities are of the sampled distribution; otherwise they are of the distribution
            before the temperature.

    Attributes:
        url: base URL, including /v1.
    """

    def __init__(
        self, engine: Engine, *, models: tuple[str, ...] = ("tiny",), tells_ids: bool = True, processed: bool = True
    ) -> None:
        self._engine, self._models, self._tells_ids, self._processed = engine, models, tells_ids, processed
        self._count = 0
        listening, root = free_socket()
        self.url = f"{root}/v1"
        routes = [Route("/v1/models", self._list), Route("/v1/completions", self._complete, methods=["POST"])]
        handlers: dict[Any, Any] = {EngineError: self._refused}
        application = Starlette(routes=routes, exception_handlers=handlers)
        super().__init__(quiet_server(application), listening, engine.close)

    async def _refused(self, request: Request, error: EngineError) -> Response:
        return JSONResponse({"error": {"message": str(error)}}, 400)

    async def _list(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": name} for name in self._models]})

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        self._count += 1
        sampling = Sampling(
            **{
                name: body[name]
                for name in ("top_k", "min_p", "min_tokens", "top_p", "max_tokens", "seed")
                if name in body
            },
            temperature=body.get("temperature", 1.0),
            stop=tuple(body.get("stop_token_ids", ())),
            top_logprobs=body.get("logprobs", 0),
            logit_bias=tuple((int(token), value) for token, value in body.get("logit_bias", {}).items()),
        )
        generation = GenerateRequest(id=str(self._count), tokens=tuple(body["prompt"]), sampling=sampling)
        if body.get("stream"):
            pieces = self._engine.stream(generation)
            first = await anext(pieces)  # a refusal is raised here
            return StreamingResponse(self._events(pieces, first, sampling.top_logprobs), media_type="text/event-stream")
        answer = await self._engine.generate(generation)
        choice = self._choice(answer.tokens, answer.logprobs, answer.top_logprobs, answer.finish_reason)
        if not self._processed:
            await self._as_before_the_temperature(choice, generation, answer)
        if "prompt_logprobs" in body:
            choice["prompt_logprobs"] = await self._judged(generation.tokens, body["prompt_logprobs"])
        return JSONResponse({"choices": [choice]})

    async def _events(self, pieces: Any, piece: Delta | Completion, tops: int) -> AsyncIterator[str]:
        """Yield the events of a stream. The engine returns likeliest tokens at the end, so only the last event has
        them."""
        async with aclosing(pieces):
            while isinstance(piece, Delta):
                if tops <= 1:
                    yield _event(self._choice(piece.tokens, piece.logprobs, None, None))
                piece = await anext(pieces)
        delta = (piece.tokens, piece.logprobs, piece.top_logprobs) if tops > 1 else ((), (), None)
        yield _event(self._choice(*delta, piece.finish_reason))
        yield "data: [DONE]\n\n"

    def _choice(self, tokens: Any, logprobs: Any, tops: Any, finish_reason: str | None) -> dict[str, Any]:
        name = "token_id:{}" if self._tells_ids else "word{}"
        choice: dict[str, Any] = {
            "index": 0,
            "text": "",
            "finish_reason": finish_reason,
            "logprobs": {
                "tokens": [name.format(token) for token in tokens],
                "token_logprobs": list(logprobs),
                "top_logprobs": [{name.format(token): value for token, value in row} for row in tops or ()],
            },
        }
        return choice

    async def _as_before_the_temperature(
        self, choice: dict[str, Any], generation: GenerateRequest, answer: Completion
    ) -> None:
        scored = ScoreRequest(
            id="raw", tokens=(*generation.tokens, *answer.tokens), first=len(generation.tokens), top_k=1
        )
        scores = await self._engine.score(scored)
        choice["logprobs"]["token_logprobs"] = list(scores.logprobs)
        rows = zip(scores.top_ids, scores.top_logprobs, strict=True)
        choice["logprobs"]["top_logprobs"] = [{f"token_id:{ids[0]}": values[0]} for ids, values in rows]

    async def _judged(self, tokens: tuple[int, ...], count: int) -> list[dict[str, Any] | None]:
        scores = await self._engine.score(ScoreRequest(id="judged", tokens=tokens, top_k=count))
        rows = zip(tokens[1:], scores.logprobs, scores.top_ids, scores.top_logprobs, strict=True)
        return [
            None,
            *({str(i): {"logprob": v} for i, v in ((t, p), *zip(ids, tops, strict=True))} for t, p, ids, tops in rows),
        ]


def _event(choice: dict[str, Any]) -> str:
    return f"data: {json.dumps({'choices': [choice]})}\n\n"
