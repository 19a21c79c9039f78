"""Requests to an engine and its results: token ids in, token ids out.

All types are frozen; standard library only.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

FinishReason = Literal["stop", "length", "abort"]

N = TypeVar("N", int, float)

COLDEST, HOTTEST = 1e-6, 1e6
TEMPERATURE = f"a temperature of 0 or more, if not 0 from {COLDEST:g} to {HOTTEST:g}"


def is_temperature(value: float) -> bool:
    """Return whether logits can be divided by `value` in float32; 0 means greedy."""
    return value == 0 or COLDEST <= value <= HOTTEST


@dataclass(frozen=True, kw_only=True, slots=True)
class Constraint:
    """Constraint on the text of a turn, after its thought: a JSON schema, a regular expression, a context-free grammar
    in Lark's notation, or tool calls. `source` is the schema as JSON, the expression or the grammar.

    A turn of tool calls is reasoning, if the format has any, followed by one or more calls in the format of the model's
    renderer. `source` is then JSON: `{"tools": [{"name": ..., "parameters": ...}], "parallel": true}`, with the allowed
    tools, the schemas of their arguments, and whether several calls are allowed.
    """

    kind: Literal["json_schema", "regex", "lark", "tool_call"]
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Sampling parameters. A token's random number depends only on `seed` and the token's position in its branch.

    Truncation is applied at the temperature, in this order: the top_k likeliest tokens; of these, the smallest set of
    likeliest tokens with a share of top_p of the remaining probability; of these, the tokens with at least min_p times
    the probability of the likeliest token. `logit_bias` and `min_tokens` also change the distribution, and
    log-probabilities belong to the changed distribution.

    Stop strings and constraints are text, which an engine cannot read: `Renderer.bind` translates them to the request's
    `ends` and `allowed`. They are kept here too, as part of the record.

    Attributes:
        temperature: divisor of logits; 0 is greedy.
        top_p: nucleus; 1 is off.
        top_k: number of likeliest tokens; 0 is off.
        min_p: minimum probability relative to the likeliest token's; 0 is off.
        stop: ids that end the turn; the stop token itself is sampled, recorded and trained.
        seed: seed of the rollout's random numbers.
        min_tokens: number of tokens before which no stop token can be sampled.
        logit_bias: pairs of an id and the value added to its logit, before anything else.
        top_logprobs: number of likeliest tokens to report per draw, at most 20; without effect on sampling.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 256
    stop: tuple[int, ...] = ()
    seed: int = 0
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int = 0
    stop_strings: tuple[str, ...] = ()
    constraint: Constraint | None = None


class NumberRow(Sequence[N]):
    """Compact sequence of numbers: 4 bytes per token and 8 per log-probability, without loss, where a tuple needs 36
    and 32.

    It is immutable, equals the tuple of its numbers and has the same hash; slices and sums are tuples.
    """

    __slots__ = ("_numbers",)

    def __init__(self, numbers: array[N]) -> None:
        self._numbers: Any = numbers

    @staticmethod
    def of_tokens(tokens: Sequence[int]) -> NumberRow[int]:
        """Return a row of ids [T]."""
        if type(tokens) is NumberRow:
            return tokens
        try:
            return NumberRow(array("i", tokens))
        except OverflowError:
            return NumberRow(array("q", tokens))

    @staticmethod
    def of_floats(values: Sequence[float]) -> NumberRow[float]:
        """Return a row of floats [T]."""
        return values if type(values) is NumberRow else NumberRow(array("d", values))

    def tolist(self) -> list[N]:
        """Return the numbers as a list."""
        numbers: list[N] = self._numbers.tolist()
        return numbers

    def count(self, value: Any) -> int:
        """Return the number of occurrences of a value."""
        number: int = self._numbers.count(value)
        return number

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[N]:
        return iter(self._numbers)

    def __contains__(self, value: object) -> bool:
        return value in self._numbers

    def __getitem__(self, at: Any) -> Any:
        return tuple(self._numbers[at]) if isinstance(at, slice) else self._numbers[at]

    def __add__(self, other: Any) -> tuple[N, ...]:
        return (*self._numbers, *other) if isinstance(other, (tuple, NumberRow)) else NotImplemented

    def __radd__(self, other: Any) -> tuple[N, ...]:
        return (*other, *self._numbers) if isinstance(other, tuple) else NotImplemented

    def __eq__(self, other: object) -> bool:
        if type(other) is NumberRow:
            return bool(self._numbers == other._numbers)
        return tuple(self._numbers) == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self._numbers))

    def __repr__(self) -> str:
        return repr(tuple(self._numbers))

    def __reduce__(self) -> tuple[type, tuple[array[N]]]:
        return NumberRow, (self._numbers,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    """Run-length encoding of one value per token: `Runs(lengths=(3, 2), values=(7, 8))` is 7 7 7 8 8."""

    lengths: tuple[int, ...] = ()
    values: tuple[int, ...] = ()

    @staticmethod
    def of(value: int, length: int) -> Runs:
        """Return a single run of `length` tokens."""
        return Runs(lengths=(length,), values=(value,)) if length else Runs()

    def __len__(self) -> int:
        return sum(self.lengths)

    def expand(self) -> list[int]:
        """Return the value of every token."""
        values: list[int] = []
        for length, value in zip(self.lengths, self.values, strict=True):
            values += [value] * length
        return values


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """Versions of a recorded completion that is sampled again: `versions` and `kv_versions` as in `Completion`, not
    empty."""

    versions: Runs
    kv_versions: Runs

    def __post_init__(self) -> None:
        if not self.versions.values or not self.kv_versions.values:
            raise ValueError("expected the versions of at least one token, got none; leave `recorded` out")


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptSets:
    """Kept sets of truncated sampling (law 2). Token i was drawn from the ids in `rows[i]`, ascending, as little-endian
    32-bit integers; an empty row is the whole vocabulary."""

    rows: tuple[bytes, ...]

    @staticmethod
    def of(ids: Iterable[Iterable[int]]) -> KeptSets:
        """Return one kept set per token."""
        return KeptSets(rows=tuple(b"".join(id.to_bytes(4, "little") for id in sorted(row)) for row in ids))

    def __len__(self) -> int:
        return len(self.rows)

    def ids(self, token: int) -> tuple[int, ...]:
        """Return the ids that a token was drawn from; empty if sampling was not truncated."""
        row = self.rows[token]
        return tuple(int.from_bytes(row[at : at + 4], "little") for at in range(0, len(row), 4))


@dataclass(frozen=True, kw_only=True, slots=True)
class TopRows:
    """Likeliest tokens at each position, with log-probabilities. `rows[i]` holds little-endian pairs of a 32-bit id and
    a float32; empty at positions without scores."""

    rows: tuple[bytes, ...]

    @staticmethod
    def of(rows: Iterable[Iterable[tuple[int, float]]]) -> TopRows:
        """Return one row of (id, log-probability) per token."""
        return TopRows(rows=tuple(b"".join(struct.pack("<If", *pair) for pair in row) for row in rows))

    def __len__(self) -> int:
        return len(self.rows)

    def pairs(self, token: int) -> tuple[tuple[int, float], ...]:
        """Return (id, log-probability) of the likeliest tokens at a position."""
        return tuple(struct.iter_unpack("<If", self.rows[token]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Preface:
    """Ids before the text that a constraint applies to: a thought, in which any token but a stop token may be sampled.

    Attributes:
        begin: ids that begin a thought, which is optional; empty if the prompt ends inside a thought.
        end: id that ends the thought.
        text: ids between `end` and the text.
    """

    begin: tuple[int, ...] = ()
    end: int
    text: tuple[int, ...] = ()

    def before(self, turn: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the ids of a turn before its text; None while the turn is inside its thought."""
        begin, rest = turn[: len(self.begin)], turn[len(self.begin) :]
        if begin != self.begin:
            return ()
        return (*begin, *rest[: rest.index(self.end) + 1], *self.text) if self.end in rest else None


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """Request for one turn: token ids in, token ids out.

    Attributes:
        tokens: ids of the prompt.
        told: number of the last ids of `tokens` that were sampled before as the beginning of this turn. `ends` and
            `allowed` see them; the limits of `sampling` count the tokens after them.
        conversation: name of the rollout branch, under which the KV cache may be kept between turns; None keeps
            nothing.
        priority: priority of the request; higher is served first.
        admission: admission number of the rollout. Among equal priorities the lowest is served first and preempted
            last, so that late turns of old rollouts do not wait for first turns of young ones; ties in order of
            arrival.
        ends: function for stop strings, which need a tokenizer. Given the turn's tokens so far and the number of new
            ones, it returns the number of tokens that belong to the turn if it ends among the new ones, else None.
            Called from `min_tokens` on; stop tokens apply as well.
        allowed: function for constraints, made from a grammar. Given the turn's tokens so far, it returns the allowed
            next tokens: one bit per id, lowest first, at least one set. Not called inside the thought of `preface`.
        preface: ids before the constrained text, which only a renderer knows; None: the text begins at once.
        grammar: constraint of tool calls in Lark's notation over ids, which only a renderer can write; None in an
            engine of another process.
        prompt_logprobs: also return log-probabilities of tokens[1:] at the temperature, without bias or truncation,
            under the weights at arrival.
        adapter: name of the adapter that samples, whose versions are then recorded; None: the model itself.
        recorded: versions of a turn that is sampled again. Each token waits until its version is served, and KV entries
            are recomputed at the recorded positions. Only the native engine supports it, and it must pull these
            versions in turn.
    """

    id: str
    tokens: tuple[int, ...]
    sampling: Sampling
    told: int = 0
    conversation: str | None = None
    priority: int = 0
    admission: int = 0
    ends: Callable[[Sequence[int], int], int | None] | None = None
    allowed: Callable[[Sequence[int]], bytes] | None = None
    preface: Preface | None = None
    grammar: str | None = None
    prompt_logprobs: bool = False
    adapter: str | None = None
    recorded: Recorded | None = None

    @property
    def turn(self) -> tuple[int, ...]:
        """Last `told` tokens of the prompt: the beginning of this turn."""
        return self.tokens[len(self.tokens) - self.told :]

    def after(self, sampled: Sequence[int]) -> GenerateRequest:
        """Return the request for the rest of this turn, after tokens that were sampled for it. With the same seed an
        engine whose random numbers depend on seed and position alone continues the turn as if it had not ended."""
        sampling = replace(
            self.sampling,
            max_tokens=self.sampling.max_tokens - len(sampled),
            min_tokens=max(0, self.sampling.min_tokens - len(sampled)),
        )
        return replace(self, tokens=(*self.tokens, *sampled), told=self.told + len(sampled), sampling=sampling)


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """Completion that an engine sampled.

    Attributes:
        logprobs: log-probability of each token in the distribution that it was drawn from (law 2).
        versions: weight version that sampled each token.
        kv_versions: oldest weight version of the KV entries that each token attended to.
        kept: kept sets; None if sampling was not truncated.
        top_logprobs: likeliest tokens of each draw with their log-probabilities, best first, without impossible ones;
            None if not requested.
        prompt_logprobs: log-probabilities of the prompt; None if not requested.
        cached_tokens: number of prompt tokens with a cached KV.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    versions: Runs
    kv_versions: Runs
    kept: KeptSets | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None
    prompt_logprobs: tuple[float, ...] | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreRequest:
    """Request for scores of `tokens[first:]`, each in the distribution softmax(logits / temperature) after the tokens
    before it.

    Attributes:
        first: index of the first token to score.
        top_k: number of likeliest tokens to return per position.
        priority: priority among all requests, as in `GenerateRequest`.
        adapter: name of the adapter, as in `GenerateRequest`.
    """

    id: str
    tokens: tuple[int, ...]
    first: int = 1
    temperature: float = 1.0
    top_k: int = 0
    priority: int = 0
    adapter: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Scores of given tokens under one weight version. Row i belongs to tokens[first + i] of the request.

    Attributes:
        logprobs: log-probabilities in nats.
        entropies: entropies in nats.
        top_ids: ids of the top_k likeliest tokens, best first, ties by id.
        top_logprobs: log-probabilities of `top_ids`.
        cached_tokens: number of tokens with a cached KV.
    """

    logprobs: tuple[float, ...]
    entropies: tuple[float, ...]
    top_ids: tuple[tuple[int, ...], ...]
    top_logprobs: tuple[tuple[float, ...], ...]
    version: int
    cached_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """Tokens that a streamed request sampled since the previous delta, at least one. The `Completion` at the end
    repeats them all. Attributes are those of `Completion`. An engine that knows `versions` only at the end sends only
    `tokens` and `logprobs`.

    Attributes:
        finish_reason: finish reason, if these are the last tokens.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: Runs = Runs()
    kv_versions: Runs = Runs()
    kept: KeptSets | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """Tokens with a mark for each: True if the model would have sampled it (assistant body and its end token)."""

    tokens: tuple[int, ...]
    sampled: tuple[bool, ...]
