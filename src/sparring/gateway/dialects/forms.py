"""Forms of requests: the fields that an API obeys, with their types, and the names of fields that are accepted without
effect (noted). The OpenAPI document is made from these forms."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, ClassVar, TypeVar, cast

import msgspec

from sparring.errors import refusal
from sparring.validation import InvalidValue, convert


class RequestForm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Form of a request: each attribute is a field that is obeyed.

    Attributes:
        NOTED: names of the fields that are accepted without effect.
    """

    NOTED: ClassVar[frozenset[str]]


_CONVERSATIONS = {"messages", "input", "contents"}
"""Required fields, which are checked elsewhere."""

Form = TypeVar("Form", bound=RequestForm)
Count = Annotated[int, msgspec.Meta(ge=1)]


def form_in(values: Mapping[str, Any], form: type[Form], before: str = "") -> tuple[Form, tuple[str, ...]]:
    """Read an object of a request; a null field counts as missing.

    Args:
        before: place of the object in the request, with a dot at the end.

    Returns:
        The obeyed fields, and the names of the noted fields, each with the prefix `before`.

    Raises:
        BadInput: a field has the wrong type, or is neither obeyed nor noted.
    """
    given = {name: value for name, value in values.items() if value is not None}
    noted = sorted(f"{before}{name}" for name in given.keys() & form.NOTED)
    obeyed = {name: value for name, value in given.items() if name not in form.NOTED}
    with suppress(msgspec.ValidationError, OverflowError):  # much faster, without the words of a refusal
        return msgspec.convert(obeyed, form), tuple(noted)
    try:
        return cast("Form", convert(obeyed, form)), tuple(noted)
    except InvalidValue as error:
        where = before + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in error.keys)[1:]
        if error.unknown:
            do = "leave it out; docs/harnesses.md says which fields have an effect"
            raise refusal(where, "a field that can be obeyed", "one that cannot", do) from None
        raise refusal(where, error.expected.replace("a table", "an object"), error.got, "correct the request") from None


def names_in(form: type[msgspec.Struct]) -> frozenset[str]:
    """Return the names of the fields that are obeyed, as clients write them."""
    return frozenset(form.__struct_encode_fields__)


def schema_of(form: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the JSON schema of a form; a noted field may be anything."""
    _, schemas = msgspec.json.schema_components([form])
    schema: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(schemas[form.__name__]))  # a default () becomes []
    schema["required"] = sorted({*schema.get("required", ()), *(_CONVERSATIONS & schema["properties"].keys())})
    schema["properties"] |= {name: {} for name in sorted(getattr(form, "NOTED", ()))}
    return schema


def _described(schema: Mapping[str, Any]) -> msgspec.Meta:
    """Return an annotation with the JSON schema of a field that is read elsewhere."""
    return msgspec.Meta(extra_json_schema=dict(schema))


def _one_of(name: str, *values: str) -> dict[str, Any]:
    """Return the schema of an object whose field `name` has one of some values."""
    return {"type": "object", "required": [name], "properties": {name: {"enum": list(values)}}}


def _object_of(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties}


def _list_of(items: Mapping[str, Any], **limits: int) -> dict[str, Any]:
    return {"type": "array", "items": items, **limits}


_OBJECT: Mapping[str, Any] = {"type": "object"}
_TEXT: Mapping[str, Any] = {"type": "string"}
_FILLED: Mapping[str, Any] = {"type": "string", "minLength": 1}
_FORMAT = _one_of("type", "text", "json_object", "json_schema")
_CHOICE = {"anyOf": [{"enum": ["auto", "none", "required"]}, _one_of("type", "function", "custom", "allowed_tools")]}
_Choice = Annotated[Any, _described(_CHOICE)]
_Content = Annotated[Any, _described({"anyOf": [_TEXT, _list_of(_OBJECT)]})]
_Stops = Annotated[Any, _described(_list_of(_FILLED))]

CHAT_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Roles of chat completions, each with the role of `Message`."""

_SAID = {"anyOf": [_TEXT, _list_of(_OBJECT), {"type": "null"}]}
_CHAT_MESSAGE = _object_of({"role": {"enum": list(CHAT_ROLES)}, "content": _SAID})
_CHAT_FUNCTION = {"type": {"const": "function"}, "function": _object_of({"name": _FILLED, "parameters": _OBJECT})}
_CHAT_FREEFORM = {"type": {"const": "custom"}, "custom": _object_of({"name": _FILLED})}
_CHAT_TOOLS = _list_of({"anyOf": [_object_of(_CHAT_FUNCTION), _object_of(_CHAT_FREEFORM)]})


class ChatForm(RequestForm, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request of OpenAI's chat completions. The last two lines of noted fields are fields of servers such as vLLM."""

    NOTED = frozenset(
        "temperature top_p frequency_penalty presence_penalty seed user metadata store reasoning_effort verbosity"
        " parallel_tool_calls service_tier prompt_cache_key prompt_cache_retention safety_identifier"
        " top_k min_p repetition_penalty chat_template_kwargs enable_thinking thinking include_reasoning"
        " skip_special_tokens".split()
    )
    messages: Annotated[Any, _described(_list_of(_CHAT_MESSAGE, minItems=1))] = None
    model: str
    tools: Annotated[Any, _described(_CHAT_TOOLS)] = None
    tool_choice: _Choice = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stream: bool = False
    stream_options: dict[str, Any] = {}
    n: Annotated[int, msgspec.Meta(ge=1, le=128)] = 1
    logprobs: bool = False
    top_logprobs: int = 0
    response_format: Annotated[Any, _described(_FORMAT)] = None
    stop: Annotated[Any, _described({"anyOf": [_FILLED, _list_of(_FILLED)]})] = None


INCLUDED = frozenset(("reasoning.encrypted_content", "message.output_text.logprobs"))
"""Values of `include` that add something to an answer."""

NOT_MADE = frozenset(
    "web_search_call.results web_search_call.action.sources file_search_call.results code_interpreter_call.outputs"
    " computer_call_output.output.image_url message.input_image.image_url".split()
)
"""Values of `include` that are accepted without effect: they concern images and vendor-hosted tools."""


class ResponsesForm(RequestForm, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request of OpenAI's Responses."""

    NOTED = frozenset(
        "temperature top_p top_logprobs parallel_tool_calls reasoning metadata user safety_identifier service_tier"
        " prompt_cache_key prompt_cache_retention prompt_cache_options client_metadata truncation context_management"
        " stream_options max_tool_calls".split()
    )
    model: str
    input: _Content = None
    instructions: str = ""
    tools: Annotated[Any, _described(_list_of(_OBJECT))] = None
    tool_choice: _Choice = None
    max_output_tokens: Count | None = None
    stream: bool = False
    text: Annotated[dict[str, Any], _described({"properties": {"format": _FORMAT}})] = {}
    include: Annotated[tuple[str, ...], _described({"items": {"enum": sorted(INCLUDED | NOT_MADE)}})] = ()
    previous_response_id: str | None = None
    store: bool = False
    generate: bool = True
    background: Annotated[bool, _described({"const": False})] = False


MESSAGE_ROLES = ("user", "assistant", "system")
_MESSAGE = _object_of({"role": {"enum": list(MESSAGE_ROLES)}, "content": {"anyOf": [_TEXT, _list_of(_OBJECT)]}})
_MESSAGE_TOOLS = _list_of(_object_of({"name": _FILLED, "input_schema": _OBJECT}))


class MessagesForm(RequestForm, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request of Anthropic's Messages."""

    NOTED = frozenset(
        "temperature top_p top_k metadata thinking service_tier context_management betas container"
        " inference_geo speed cache_control".split()
    )
    messages: Annotated[Any, _described(_list_of(_MESSAGE, minItems=1))] = None
    model: str
    system: _Content = None
    tools: Annotated[Any, _described(_MESSAGE_TOOLS)] = None
    tool_choice: Annotated[Any, _described(_one_of("type", "auto", "none", "any", "tool"))] = None
    max_tokens: Count | None = None
    stream: bool = False
    stop_sequences: _Stops = None
    output_config: dict[str, Any] = {}
    output_format: Annotated[Any, _described(_OBJECT)] = None


class ConfigForm(RequestForm, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Generation settings of a request of Google's Gemini."""

    NOTED = frozenset(
        "temperature topP topK seed presencePenalty frequencyPenalty thinkingConfig logprobs mediaResolution"
        " enableEnhancedCivicAnswers".split()
    )
    max_output_tokens: Count | None = None
    stop_sequences: _Stops = None
    response_mime_type: Annotated[str, _described({"enum": ["", "text/plain", "application/json"]})] = ""
    response_schema: Annotated[Any, _described(_OBJECT)] = None
    response_json_schema: Annotated[Any, _described(_OBJECT)] = None
    candidate_count: Annotated[Count, _described({"maximum": 8})] = 1
    response_logprobs: bool = False
    response_modalities: Annotated[Any, _described(_list_of({"const": "TEXT"}, maxItems=1))] = []


_PARTS = _list_of(_object_of({"text": _TEXT}), minItems=1)
_CONTENTS = _list_of({"type": "object", "properties": {"parts": _PARTS}}, minItems=1)
_DECLARATIONS = _object_of({"functionDeclarations": _list_of(_object_of({"name": _FILLED}))})
_CALLING = {"properties": {"functionCallingConfig": _one_of("mode", "AUTO", "ANY", "VALIDATED", "NONE")}}


class GeminiForm(RequestForm, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """Request of Google's Gemini."""

    NOTED = frozenset("safetySettings labels serviceTier store".split())
    contents: Annotated[Any, _described(_CONTENTS)] = None
    system_instruction: Annotated[Any, _described(_object_of({"parts": _PARTS}))] = None
    tools: Annotated[Any, _described(_list_of(_DECLARATIONS))] = None
    tool_config: Annotated[dict[str, Any], _described(_CALLING)] = {}
    generation_config: Annotated[dict[str, Any], _described(schema_of(ConfigForm))] = {}
    model: str = ""
