"""Wire format of the token-level server and its clients: requests, answers and errors as JSON. Torch-free.

A log-probability is written with the digits that restore the same 64 bits; kept sets are base64 of their 32-bit ids.
"""

from __future__ import annotations

import dataclasses
import socket
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import msgspec

from sparring.errors import BadInput, EngineError, RequestRefused, SparringError, WeightsError, boundary, refusal
from sparring.generation import Completion, GenerateRequest, Sampling, ScoreRequest, Scores
from sparring.types import WeightRef

INSTANCE, VERSION, BASE = "x-sparring-instance", "x-sparring-version", "x-sparring-base"
"""Headers of every answer: name of this start of the server, version of the served weights, and the version that the
run counts as 0."""

BUCKET = "x-sparring-bucket"
"""Header of `POST /v1/bucket`: a `weights.upload.Bucket` as JSON; the body is the bucket's bytes."""

EVENTS = "text/event-stream"


class UnknownPrefix(EngineError):
    """Error: the server does not have the ids of a request's `prefix`. The client then sends the whole prompt."""


STATUS: Mapping[type[SparringError], int] = {
    BadInput: 400,
    WeightsError: 409,
    RequestRefused: 422,
    UnknownPrefix: 412,
    EngineError: 503,
    SparringError: 500,
}
"""HTTP status of each error class; the first class that fits counts."""

FAILING = tuple(sorted(STATUS.values()))

T = TypeVar("T")


def _form(noun: type, without: tuple[str, ...] = (), **replaced: tuple[Any, Any]) -> type[msgspec.Struct]:
    """Make a struct class with the fields of a dataclass `noun`. The struct refuses unknown fields, so that a misspelt
    field is not silently replaced by its default. `replaced` has other types and defaults by field; fields in `without`
    are left out."""
    hints = typing.get_type_hints(noun)
    fields: list[Any] = []
    for field in dataclasses.fields(noun):
        if field.name in without:
            continue
        own: Any = field.default
        if field.default_factory is not dataclasses.MISSING:
            own = msgspec.field(default_factory=field.default_factory)
        kind, default = replaced.get(field.name, (hints[field.name], own))
        fields.append((field.name, kind) if default is dataclasses.MISSING else (field.name, kind, default))
    return msgspec.defstruct(f"{noun.__name__}Form", fields, frozen=True, kw_only=True, forbid_unknown_fields=True)


SamplingForm = _form(Sampling)
ScoreForm = _form(ScoreRequest, id=(str, ""))
# bases of the forms below, which mypy cannot follow because they are made when this module loads
SeesForm: Any = _form(WeightRef, transport=(str, "shared_memory"))
_Generate: Any = _form(GenerateRequest, ("ends", "allowed"), id=(str, ""), sampling=(SamplingForm, SamplingForm()))


class KnownPrefix(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ids that the server remembers for a conversation: their number, and their digest as in `prompts`, in
    hexadecimal."""

    tokens: int
    digest: str


class GenerateForm(_Generate, frozen=True, kw_only=True, forbid_unknown_fields=True):  # type: ignore[call-arg,misc]
    """Request to generate. Without `stream` the answer is a Completion. With it, the answer is server-sent events:
    "delta" while tokens are sampled, unless `deltas` is false, and finally "completion" or "error". With `prefix`,
    `tokens` are the ids after the prefix."""

    stream: bool = False
    deltas: bool | None = None
    prefix: KnownPrefix | None = None


class WeightForm(SeesForm, frozen=True, kw_only=True, forbid_unknown_fields=True):  # type: ignore[call-arg,misc]
    """Request to serve other weights. `base` is the version that the sending run counts as 0; None leaves the server's
    base unchanged."""

    base: int | None = None


class FilesForm(SeesForm, frozen=True, kw_only=True, forbid_unknown_fields=True):  # type: ignore[call-arg,misc]
    """Request to serve the model of a checkpoint's files, which are published like weights. `numerics` is "exact" or
    "fast"."""

    dtype: Literal["float32", "bfloat16"]
    numerics: Literal["exact", "fast"]


class AbortForm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request to end the requests with this id, keeping the tokens sampled so far."""

    id: str


class ReleaseForm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request to drop the keys and values of a conversation."""

    conversation: str


class SleepForm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request to free the memory of weights and cache. Other requests then wait until the server wakes."""


class DropForm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request to serve no new request with this adapter."""

    adapter: str


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a server: name of its model, version served now, dtype, numerics and limits.

    Attributes:
        context: maximum number of tokens of one conversation.
        token_bytes: bytes of one token's keys and values.
        instance: random name of this start of the server.
        base: version that the run counts as 0.
        state_bytes: maximum number of bytes of an upload: the model's weights in float32, or files of a model.
        kind: `[engine] kind` of the engine: "native", or "vllm", whose numerics are "vllm" too.
        files: digest of the files that a client sent; "" before that; None for a server that was started with a model.
        node: name of the server's machine.
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
    base: int = 0
    state_bytes: int = 0
    kind: str = "native"
    files: str | None = None
    node: str = msgspec.field(default_factory=socket.gethostname)


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Error: the name of its class in `errors.py`, and its message."""

    type: str
    message: str


class Failed(msgspec.Struct, frozen=True, kw_only=True):
    """Body of every answer that is an error."""

    error: Problem


POSTS: Mapping[str, tuple[type, Any]] = {
    "generate": (GenerateForm, Completion),
    "abort": (AbortForm, None),
    "score": (ScoreForm, Scores),
    "release": (ReleaseForm, None),
    "weights": (WeightForm, None),
    "sleep": (SleepForm, None),
    "wake": (WeightForm, None),
    "sees": (SeesForm, None),
    "files": (FilesForm, ServedModel),
    "drop": (DropForm, None),
}
"""Types of the body and of the answer of `POST /v1/<name>`, by name; None is an empty object."""


def document() -> dict[str, Any]:
    """Return the OpenAPI document of the server: the contents of each request and answer."""
    kinds = [kind for pair in (*POSTS.values(), (ServedModel, Failed)) for kind in pair if kind is not None]
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    of = dict(zip(map(str, kinds), schemas, strict=True))

    def answers(kind: Any, *errors: int) -> dict[str, Any]:
        right = {"type": "object"} if kind is None else of[str(kind)]
        bodies = {200: right, **dict.fromkeys((401, *errors), of[str(Failed)])}
        return {str(code): _described(body) for code, body in sorted(bodies.items())}

    paths: dict[str, Any] = {
        f"/v1/{name}": {"post": {"requestBody": _described(of[str(form)]), "responses": answers(kind, *FAILING)}}
        for name, (form, kind) in POSTS.items()
    }
    header = {"name": BUCKET, "in": "header", "required": True, "schema": {"type": "string"}}
    octets = {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
    paths["/v1/bucket"] = {
        "post": {"parameters": [header], "requestBody": octets, "responses": answers(None, *FAILING)}
    }
    paths["/v1/model"] = {"get": {"responses": answers(ServedModel)}}
    key = {"key": {"type": "http", "scheme": "bearer"}}
    info = {"title": "Sparring's token server", "version": "1"}
    parts = {"schemas": components, "securitySchemes": key}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": parts, "security": [{"key": []}]}


def _described(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"description": "JSON", "content": {"application/json": {"schema": schema}}}


def encode(value: Any) -> bytes:
    """Encode a dataclass of the framework or a form as JSON."""
    return msgspec.json.encode(value)


def passed_over(form: msgspec.Struct) -> str | None:
    """Describe a field of a form that has no effect with the form's other fields, as "expected ..., got ..." without
    its first word. Return None if all fields have an effect."""
    needed: dict[str, tuple[str, bool]] = {}
    if isinstance(form, GenerateForm):
        constraint = form.sampling.constraint
        calls = constraint is not None and constraint.kind == "tool_call"
        needed = {"deltas": ("stream true", form.stream), "grammar": ("a constraint of kind tool_call", calls)}
        needed |= {"prefix": ("a conversation", bool(form.conversation))}
    elif isinstance(form, FilesForm):
        needed = {"adapter": ("weights", False), "probe": ("weights", False)}
    wrong = [name for name, (_, there) in needed.items() if not there and getattr(form, name) is not None]
    return f"{needed[wrong[0]][0]} with `{wrong[0]}`, got none" if wrong else None


def decode(data: bytes, kind: type[T], where: str) -> T:
    """Read JSON of type `kind` strictly: wrong types and unknown fields of a form are errors. Raises BadInput if the
    bytes are not such JSON."""
    with boundary(BadInput, where, "a valid JSON body", "correct it"):
        return msgspec.json.decode(data, type=kind)


def generate_form(request: GenerateRequest, *, deltas: bool) -> GenerateForm:
    """Convert a request to the form of a streamed request. Stop strings and constraint are sent as text, which the
    server binds to token ids. Raises RequestRefused if the request has Python functions without such a text in its
    sampling."""
    texts = {"ends": request.sampling.stop_strings, "allowed": request.sampling.constraint}
    functions = [name for name, text in texts.items() if getattr(request, name) is not None and not text]
    if functions:
        constraint = f"Python functions ({' and '.join(functions)}), which cannot be sent"
        expected = "stop strings and constraint as text"
        raise RequestRefused(f"request {request.id}: expected {expected}, got {constraint}; set them in its sampling")
    values = {name: getattr(request, name) for name in _Generate.__struct_fields__ if name != "sampling"}
    return GenerateForm(**values, sampling=SamplingForm(**_fields(request.sampling)), stream=True, deltas=deltas)


def generate_request(form: GenerateForm) -> GenerateRequest:
    """Convert a form back to the request."""
    values = {name: getattr(form, name) for name in _Generate.__struct_fields__ if name != "sampling"}
    return GenerateRequest(**values, sampling=Sampling(**_values(form.sampling)))


def weight_form(ref: WeightRef, base: int | None) -> WeightForm:
    """Convert a weight reference to its form, for a run that counts version `base` as 0; None leaves the server's base
    unchanged."""
    return WeightForm(**_fields(ref), base=base)


def files_form(ref: WeightRef, dtype: str, numerics: str) -> FilesForm:
    """Convert a reference to files to the form that asks to serve their model."""
    return FilesForm(**_fields(ref), dtype=dtype, numerics=numerics)


def weight_ref(form: WeightForm | SeesForm | FilesForm) -> WeightRef:
    """Convert a form back to a weight reference."""
    return WeightRef(**{name: getattr(form, name) for name in SeesForm.__struct_fields__})


def noun(form: msgspec.Struct, kind: type[T]) -> T:
    """Convert a form to an object of class `kind` with the same fields."""
    return kind(**_values(form))


def problem(error: SparringError) -> Failed:
    """Convert an error to the body of an answer."""
    return Failed(error=Problem(type=type(error).__name__, message=str(error)))


def status(error: SparringError) -> int:
    """Return the HTTP status of an error."""
    return next(code for kind, code in STATUS.items() if isinstance(error, kind))


def raised(problem: Problem, where: str) -> SparringError:
    """Return the error that a server sent, of the same class. Bad input to the server becomes a refused request; an
    unknown class becomes an EngineError."""
    kinds = {kind.__name__: kind for kind in (WeightsError, RequestRefused)} | {BadInput.__name__: RequestRefused}
    return kinds.get(problem.type, EngineError)(f"{where}: {problem.message}")


def error_of(status: int, body: bytes, where: str) -> SparringError:
    """Return the error in the body of an answer whose status is not 200."""
    try:
        return raised(msgspec.json.decode(body, type=Failed).error, where)
    except msgspec.MsgspecError:
        return EngineError(f"{where}: status {status}: {body[:200]!r}")


def event(name: str, value: Any) -> bytes:
    """Write one server-sent event."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), encode(value))


def unreachable(url: str, answer: str) -> BadInput:
    """Return the error for an address without a `sparring serve`; `answer` describes its answer."""
    return refusal(f"engine at {url}", "a running `sparring serve`", answer, "start it, or correct engine.urls")


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _values(form: msgspec.Struct) -> dict[str, Any]:
    return {name: getattr(form, name) for name in form.__struct_fields__}
