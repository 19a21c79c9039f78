"""Engine whose replies come from a script instead of a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import xxhash

from sparring.engine.turn_pieces import joined_runs
from sparring.errors import EngineError, WeightsError
from sparring.generation import Completion, Delta, FinishReason, GenerateRequest, Runs, ScoreRequest, Scores
from sparring.types import WeightRef

Script = Callable[[GenerateRequest], Sequence[int]]


@dataclass(eq=False, slots=True)
class _Turn:
    """Request in flight, its tokens sampled so far, and the version of each token."""

    request: GenerateRequest
    sampled: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    aborted: bool = False


class ScriptedEngine:
    """Engine that returns scripted ids. Implements `Engine`. Log-probabilities are a function of version, position and
    token.

    A script's ids are cut at the first stop id or stop string and at `max_tokens`; if a script ends without a stop id,
    the request's first stop id is appended, so that scripts need not know the format. A request yields nothing before
    the engine's latency is over, then a token whenever its reader asks for one.

    Args:
        version: weight version served at first.
        latency_s: seconds before the first token of a request, by the event loop's clock.
        fail_on: numbers of the requests, counted from 1, that raise `EngineError`.
        refuse_on: numbers of the weight updates, counted from 1, that raise `WeightsError`.

    Attributes:
        requests: every request, in order of arrival, failed ones included.
        held: ids whose KV is stored, by conversation.
    """

    def __init__(
        self,
        script: Script,
        *,
        version: int = 0,
        latency_s: float = 0.0,
        fail_on: Collection[int] = (),
        refuse_on: Collection[int] = (),
    ) -> None:
        self._script = script
        self._version = version
        self._latency_s = latency_s
        self._fail_on, self._refuse_on = frozenset(fail_on), refuse_on
        self._updates = 0
        self._live: list[_Turn] = []
        self._closed = False
        self.asleep = False
        self._news = asyncio.Event()
        self._num_sampled = 0
        self.requests: list[GenerateRequest] = []
        self.pulled: list[WeightRef] = []
        self.held: dict[str, tuple[int, ...]] = {}
        self.most_in_flight = 0

    @property
    def version(self) -> int:
        return self._version

    @property
    def metrics(self) -> dict[str, float]:
        return {"generated_tokens": float(self._num_sampled)}

    async def generate(self, request: GenerateRequest) -> Completion:
        *_, completion = [piece async for piece in self.stream(request)]
        assert isinstance(completion, Completion)
        return completion

    async def stream(self, request: GenerateRequest) -> AsyncIterator[Delta | Completion]:
        self._check_open()
        self.requests.append(request)
        number, turn = len(self.requests), _Turn(request)
        self._live.append(turn)
        self.most_in_flight = max(self.most_in_flight, len(self._live))
        try:
            await asyncio.sleep(self._latency_s)
            if number in self._fail_on:
                raise EngineError(f"request {number} was chosen to fail")
            tokens, finished = _ended(self._turn(request), request)
            for number, token in enumerate(tokens, 1):
                await self._until_awake(turn)
                if turn.aborted:
                    break
                turn.sampled.append(token)
                turn.versions.append(self._version)
                self._num_sampled += 1
                position = len(request.tokens) + len(turn.sampled) - 1
                version = Runs.of(self._version, 1)
                logprob = self._logprob(position, token, request)
                end: FinishReason | None = ("stop" if finished else "length") if number == len(tokens) else None
                yield Delta(
                    tokens=(token,), logprobs=(logprob,), versions=version, kv_versions=version, finish_reason=end
                )
        finally:
            self._live.remove(turn)
        yield self._answer(turn, "abort" if len(turn.sampled) < len(tokens) else "stop" if finished else "length")

    async def abort(self, request: str) -> None:
        for turn in self._live:
            turn.aborted |= turn.request.id == request
        self._changed()

    async def score(self, request: ScoreRequest) -> Scores:
        """Refuse: a script has no distribution over tokens."""
        raise EngineError(
            f"score {request.id}: expected a model's distribution, got a scripted engine; ask a native one"
        )

    async def release(self, conversation: str) -> None:
        self.held.pop(conversation, None)

    async def pull(self, ref: WeightRef) -> None:
        """Serve another version, unless `refuse_on` has this update; KV of the old one is dropped (law 4)."""
        if self.asleep:
            raise WeightsError(f"weights of version {ref.version}: expected an engine that is awake, got one asleep")
        self._take(ref)

    async def sleep(self) -> None:
        self._check_open()
        self.asleep = True
        self.held.clear()

    async def wake(self, ref: WeightRef) -> None:
        if not self.asleep:
            return await self.pull(ref)
        self._check_open()
        self._take(ref)
        self.asleep = False
        self._changed()

    def _take(self, ref: WeightRef) -> None:
        self._updates += 1
        if self._updates in self._refuse_on:
            raise WeightsError(f"update {self._updates} was chosen to be refused")
        self.pulled.append(ref)
        self._version = ref.version
        self.held.clear()

    async def close(self) -> None:
        self._closed = True
        self.held.clear()
        self._changed()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the scripted engine is closed")

    async def _until_awake(self, turn: _Turn) -> None:
        while self.asleep and not turn.aborted:
            self._check_open()
            await self._news.wait()

    def _changed(self) -> None:
        """Wake waiting turns, so that they check their state again."""
        self._news.set()
        self._news = asyncio.Event()

    def _turn(self, request: GenerateRequest) -> Sequence[int]:
        """Return the script's ids for a request. If the prompt ends with `told` tokens of the turn, return only the ids
        after them."""
        prompt = request.tokens[: len(request.tokens) - request.told]
        return self._script(replace(request, tokens=prompt, told=0) if request.told else request)[request.told :]

    def _answer(self, turn: _Turn, finish_reason: FinishReason) -> Completion:
        request, tokens = turn.request, tuple(turn.sampled)
        start = len(request.tokens)
        cached = 0
        if request.conversation is not None:
            cached = _common(self.held.get(request.conversation, ()), request.tokens[:-1])
            self.held[request.conversation] = (*request.tokens, *tokens)
        versions = joined_runs([1] * len(tokens), turn.versions)
        return Completion(
            tokens=tokens,
            logprobs=tuple(self._logprob(start + at, token, request) for at, token in enumerate(tokens)),
            finish_reason=finish_reason,
            versions=versions,
            kv_versions=versions,
            cached_tokens=cached,
        )

    def _logprob(self, position: int, token: int, request: GenerateRequest) -> float:
        if request.sampling.temperature == 0:
            return 0.0
        drawn = xxhash.xxh3_64_intdigest(f"{self._version}/{position}/{token}".encode())
        return -(drawn % 4096 + 1) / 1024.0


def replies(texts: Iterable[str], encode: Callable[[str], Sequence[int]]) -> Script:
    """Return a script that gives these texts, one per request, and then repeats the last.

    Args:
        texts: replies, without the end of the turn.
        encode: text -> ids, for example `renderer.tokenizer.encode`.
    """
    planned = [tuple(encode(text)) for text in texts]
    if not planned:
        raise ValueError("a script needs at least one reply")
    rest = iter(planned)
    return lambda request: next(rest, planned[-1])


def _ended(script: Sequence[int], request: GenerateRequest) -> tuple[tuple[int, ...], bool]:
    stop = request.sampling.stop
    end = next((at + 1 for at, token in enumerate(script) if token in stop), None)
    tokens = tuple(script[:end]) if end is not None else (*script, *stop[:1])
    most = request.sampling.max_tokens
    at_string = None if request.ends is None else request.ends((*request.turn, *tokens[:most]), len(tokens[:most]))
    if at_string is not None:
        return tokens[: at_string - request.told], True
    return tokens[:most], len(tokens) <= most and bool(stop)


def _common(held: Sequence[int], tokens: Sequence[int]) -> int:
    return next(
        (at for at, (a, b) in enumerate(zip(held, tokens, strict=False)) if a != b), min(len(held), len(tokens))
    )
