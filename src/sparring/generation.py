"""The nouns of generation: what is asked of an engine, and what it answers. Token ids in, token ids out.

All are frozen; standard library only.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

FinishReason = Literal["stop", "length", "abort"]

N = TypeVar("N", int, float)

COLDEST, HOTTEST = 1e-6, 1e6
TEMPERATURE = f"a temperature of 0 or more, if not 0 from {COLDEST:g} to {HOTTEST:g}"


def is_temperature(value: float) -> bool:
    """Return True if logits can be divided by `value` in float32. 0 is greedy."""
    return value == 0 or COLDEST <= value <= HOTTEST


@dataclass(frozen=True, kw_only=True, slots=True)
class Constraint:
    """Constraint on the whole text of a turn: JSON of a schema, what a regular expression matches, a text of a
    context-free grammar in Lark's notation, or calls of tools. `source` is the schema as JSON, the expression or the
    grammar.

    A turn of calls is a thought where the format has one, then one call or more, in the format of the model's renderer.
    `source` is then JSON: `{"tools": [{"name": ..., "parameters": ...}], "parallel": true}`, with the tools that may be
    called, the schemas of their arguments, and whether there may be several calls.
    """

    kind: Literal["json_schema", "regex", "lark", "tool_call"]
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Settings of sampling. `seed` and a token's absolute position in its branch decide its random number, nothing
    else.

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 truncate nothing. Where several are set, all at this
    temperature: the top_k likeliest tokens, of these the fewest that hold top_p of what they have together, of these
    the ones with at least min_p of the likeliest one's probability. `stop` are token ids that end the turn (the stop
    token itself is sampled, recorded and trained).

    `logit_bias` is (token, what is added to its logit), before everything else; a stop token is impossible before
    `min_tokens` tokens are sampled. Both change the distribution, and log-probabilities are of the changed one.
    `top_logprobs` asks for that many of the likeliest tokens of each draw, at most 20; it changes nothing.

    `stop_strings` and `constraint` are text. An engine knows ids only, so a request that has them says the same in ids,
    as `ends` and `allowed`: `Renderer.bind` makes those. Here they are what travels with the record.
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
    """Row of numbers that takes 4 bytes for a token and 8 for a log-probability, to the bit, where a tuple takes 36 and
    32. It never changes, equals the tuple of its numbers, has that one's hash, and is one where it is cut or added to.
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
        """Return how often a number stands in the row."""
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
    """Run lengths of a value per token: `Runs(lengths=(3, 2), values=(7, 8))` is 7 7 7 8 8."""

    lengths: tuple[int, ...] = ()
    values: tuple[int, ...] = ()

    @staticmethod
    def of(value: int, length: int) -> Runs:
        """Return one run of `length` tokens."""
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
    """Versions of a completion that is sampled again: `versions` and `kv_versions` as in `Completion`, not empty."""

    versions: Runs
    kv_versions: Runs

    def __post_init__(self) -> None:
        if not self.versions.values or not self.kv_versions.values:
            raise ValueError("expected the versions of at least one token, got none; leave `recorded` out")


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptSets:
    """Sampling supports: what truncated sampling left of the vocabulary (law 2): token i was drawn from the ids of
    `rows[i]`, ascending, 32 bits each, little-endian; from the whole vocabulary where the row is empty."""

    rows: tuple[bytes, ...]

    @staticmethod
    def of(ids: Iterable[Iterable[int]]) -> KeptSets:
        """Return one set of ids per token."""
        return KeptSets(rows=tuple(b"".join(id.to_bytes(4, "little") for id in sorted(row)) for row in ids))

    def __len__(self) -> int:
        return len(self.rows)

    def ids(self, token: int) -> tuple[int, ...]:
        """Return the ids that a token was drawn from; none where nothing was truncated."""
        row = self.rows[token]
        return tuple(int.from_bytes(row[at : at + 4], "little") for at in range(0, len(row), 4))


@dataclass(frozen=True, kw_only=True, slots=True)
class TopRows:
    """The likeliest tokens where each token stands, with their log-probabilities: `rows[i]` is pairs of an id of 32
    bits and a float32, little-endian; empty where nobody was asked."""

    rows: tuple[bytes, ...]

    @staticmethod
    def of(rows: Iterable[Iterable[tuple[int, float]]]) -> TopRows:
        """Return one row of (id, log-probability) per token."""
        return TopRows(rows=tuple(b"".join(struct.pack("<If", *pair) for pair in row) for row in rows))

    def __len__(self) -> int:
        return len(self.rows)

    def pairs(self, token: int) -> tuple[tuple[int, float], ...]:
        """Return (id, log-probability) of the likeliest tokens at the place of a token."""
        return tuple(struct.iter_unpack("<If", self.rows[token]))


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """One turn to sample: token ids in, token ids out.

    `conversation` names the rollout branch whose KV may be kept between turns (None: keep nothing). A higher
    `priority` is served first; evaluation runs at a lower one than training. Among equal priorities the lowest
    `admission` is served first and gives way last, whenever its request comes: it counts the rollouts as they were
    admitted, so that the oldest one's late turn does not wait behind the first turns of younger ones. Equal admissions
    are served as they arrive.

    `ends(tokens, new)` is told the tokens sampled so far, `new` of which it was not told before, and says how many of
    them belong to the turn if it ends among the new ones: whoever has the tokenizer watches for strings there. Asked
    from `min_tokens` on; stop tokens hold beside it.

    `allowed(tokens)` says which tokens may follow those sampled so far: a bit for each of the vocabulary, lowest first,
    at least one of them set. Whoever has the tokenizer makes it of a grammar. For calls of tools that is `grammar`, in
    Lark's notation over ids: only a renderer can write it, and an engine in another process has none.
    `prompt_logprobs` asks for those of tokens[1:] at the temperature, without bias or truncation, under the weights
    served when the request came.

    `adapter` names the one that samples it; None: the model as it was loaded or trained. Versions are then of the
    adapter.

    `recorded` is for a turn that is sampled again: each token waits until its weights are served, and the keys and
    values are computed again where they were. The native engine alone does so. What is pulled meanwhile must be each
    of these versions in turn.
    """

    id: str
    tokens: tuple[int, ...]
    sampling: Sampling
    conversation: str | None = None
    priority: int = 0
    admission: int = 0
    ends: Callable[[Sequence[int], int], int | None] | None = None
    allowed: Callable[[Sequence[int]], bytes] | None = None
    grammar: str | None = None
    prompt_logprobs: bool = False
    adapter: str | None = None
    recorded: Recorded | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """Completion that the engine sampled. `logprobs[i]` is of the distribution that tokens[i] was drawn from (law 2).

    `versions` is the weight version that sampled each token, `kv_versions` the oldest version among the KV entries
    it attended to; `cached_tokens` counts prompt tokens whose KV was already there. `kept` is None where nothing was
    truncated, `top_logprobs` where they were not asked for: the likeliest tokens of each draw, best first, with their
    log-probabilities; none that could not be drawn.
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
    """Given tokens to be judged: `tokens[first:]`, each by the distribution softmax(logits / temperature) behind all
    before it.

    `top_k` of the likeliest tokens are named at each place. A higher `priority` is served first, together with those of
    `GenerateRequest`, whose `adapter` this one's is too.
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
    """Scores of given tokens, all under the weights of one version: row i is about tokens[first + i] of the
    request.

    `logprobs` and `entropies` are in nats. `top_ids` and `top_logprobs` hold top_k values a row, the likeliest first,
    equal ones by id. `cached_tokens` counts tokens whose KV was already there.
    """

    logprobs: tuple[float, ...]
    entropies: tuple[float, ...]
    top_ids: tuple[tuple[int, ...], ...]
    top_logprobs: tuple[tuple[float, ...], ...]
    version: int
    cached_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """Tokens that a streamed request sampled since the delta before: at least one token. The `Completion` that ends the
    stream holds all of it again, with versions."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """Tokens with, for each, whether the model would have sampled it (assistant body and its end token)."""

    tokens: tuple[int, ...]
    sampled: tuple[bool, ...]
