"""How the token-level server and its clients write requests, answers and errors: JSON, the same on both ends.
Torch-free.

A log-probability is written with the digits that bring back the same 64 bits; kept sets are base64 of their 32-bit ids.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from sparring.errors import BadInput, EngineError, RequestRefused, SparringError, WeightsError, boundary, refusal
from sparring.generation import GenerateRequest, Sampling, ScoreRequest
from sparring.types import WeightRef

INSTANCE, VERSION = "x-sparring-instance", "x-sparring-version"
"""Headers of every answer: which start of the server this is, and the weights it serves."""

EVENTS = "text/event-stream"
STATUS: Mapping[type[SparringError], int] = {
    BadInput: 400,
    WeightsError: 409,
    RequestRefused: 422,
    EngineError: 503,
    SparringError: 500,
}
"""What an error is to HTTP; the first class that fits."""

T = TypeVar("T")


def _form(noun: type, without: tuple[str, ...] = (), **replaced: tuple[Any, Any]) -> type[msgspec.Struct]:
    """The fields of a noun, where none may be unknown: a misspelt one must not pass for a default. `replaced` have
    another type and default, fields `without` are left out."""
    hints = typing.get_type_hints(noun)
    fields: list[Any] = []
    for field in dataclasses.fields(noun):
        if field.name in without:
            continue
        kind, default = replaced.get(field.name, (hints[field.name], field.default))
        fields.append((field.name, kind) if default is dataclasses.MISSING else (field.name, kind, default))
    return msgspec.defstruct(f"{noun.__name__}Form", fields, frozen=True, kw_only=True, forbid_unknown_fields=True)


SamplingForm = _form(Sampling)
ScoreForm = _form(ScoreRequest, id=(str, ""))
WeightForm = _form(WeightRef, transport=(str, "shared_memory"))
_Generate = _form(GenerateRequest, ("ends", "allowed"), id=(str, ""), sampling=(SamplingForm, SamplingForm()))


class GenerateForm(_Generate, frozen=True, kw_only=True, forbid_unknown_fields=True):  # type: ignore[misc, valid-type]
    """A request to generate. Without `stream` the answer is a Completion; with it server-sent events: "delta" while
    tokens are made, unless `deltas` is false, at last "completion" or "error"."""

    stream: bool = False
    deltas: bool = True


class AbortForm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requests of this id end with what they have."""

    id: str


class ForkForm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Branch a request: a seed by the name of each branch."""

    id: str
    seeds: dict[str, int]


class ReleaseForm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Forget the KV of a conversation."""

    conversation: str


class DropForm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Serve no further request by this adapter."""

    adapter: str


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """What a server says of itself: the name of its model, the version served now, how it computes, how much it takes.

    `context` is the most tokens of one conversation, `token_bytes` the size of one's keys and values; `instance` is
    another for every start of the server.
    """

    model: str
    version: int
    dtype: str
    numerics: str
    vocab_size: int
    max_positions: int
    context: int
    token_bytes: int
    instance: str


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """An error: the class it has in `errors.py`, and what it says."""

    type: str
    message: str


class Failed(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every answer that is an error."""

    error: Problem


def encode(value: Any) -> bytes:
    """JSON of a noun or a form."""
    return msgspec.json.encode(value)


def decode(data: bytes, kind: type[T], where: str) -> T:
    """What `encode` was given, strictly: no other types, no unknown fields of a form.

    Raises:
        BadInput: the bytes say something else.
    """
    with boundary(BadInput, where, "a valid JSON body", "correct it"):
        return msgspec.json.decode(data, type=kind)


def generate_form(request: GenerateRequest, *, stream: bool, deltas: bool) -> GenerateForm:
    """A request as it is sent: text rules go as text, for the server to make them again.

    Raises:
        RequestRefused: it hangs on a function of this process that is not said in text.
    """
    texts = {"ends": request.sampling.stop_strings, "allowed": request.sampling.constraint}
    functions = [name for name, text in texts.items() if getattr(request, name) is not None and not text]
    if functions:
        got = f"Python functions ({' and '.join(functions)}), which cannot be sent"
        expected = "stop strings and constraint as text"
        raise RequestRefused(f"request {request.id}: expected {expected}, got {got}; set them in its sampling")
    values = {name: getattr(request, name) for name in _Generate.__struct_fields__ if name != "sampling"}
    return GenerateForm(**values, sampling=SamplingForm(**_fields(request.sampling)), stream=stream, deltas=deltas)


def generate_request(form: GenerateForm) -> GenerateRequest:
    """The noun again."""
    values = {name: getattr(form, name) for name in _Generate.__struct_fields__ if name != "sampling"}
    return GenerateRequest(**values, sampling=Sampling(**_values(form.sampling)))


def noun(form: msgspec.Struct, kind: type[T]) -> T:
    """A form of the same fields as the noun it stands for."""
    return kind(**_values(form))


def problem(error: SparringError) -> Failed:
    """An error as it is sent."""
    return Failed(error=Problem(type=type(error).__name__, message=str(error)))


def status(error: SparringError) -> int:
    """Its HTTP status."""
    return next(code for kind, code in STATUS.items() if isinstance(error, kind))


def raised(problem: Problem, where: str) -> SparringError:
    """The error that a server sent, of the class it had there; a body that is bad input to the server is a refused
    request here, and what this client does not know is the engine's."""
    kinds = {kind.__name__: kind for kind in (WeightsError, RequestRefused)} | {BadInput.__name__: RequestRefused}
    return kinds.get(problem.type, EngineError)(f"{where}: {problem.message}")


def event(name: str, value: Any) -> bytes:
    """One server-sent event."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), encode(value))


def unreachable(url: str, got: str) -> BadInput:
    """No server where one was named."""
    return refusal(f"engine at {url}", "a running `sparring serve`", got, "start it, or correct engine.url")


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _values(form: msgspec.Struct) -> dict[str, Any]:
    return {name: getattr(form, name) for name in form.__struct_fields__}
