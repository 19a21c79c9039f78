"""Writes the fields of each dialect into docs/harnesses.md, from the forms that the gateway reads a request by. What
stands on the page behind them stays. Run it after changing one.

python docs/write_harnesses.py
"""

from __future__ import annotations

import runpy
from collections.abc import Iterable
from pathlib import Path

from sparring.gateway.dialects import evidence
from sparring.gateway.dialects.forms import ChatForm, ConfigForm, GeminiForm, MessagesForm, ResponsesForm, names_in

PAGE = Path(__file__).with_name("harnesses.md")
WRAP = runpy.run_path(str(PAGE.with_name("wrap.py")))
END = "<!-- fields end here -->\n"

HEAD = """# Agent programs: what they may ask for

An agent program trains through [the gateway](path/gateway.md). Every field of its requests is *obeyed*, *noted* or
*refused*. Noted fields have no effect on sampling, which is the trainer's; the answer's header `x-sparring-noted` names
them, and the record of the turn has them. A refused field is a 400 in the vendor's shape that names it, before anything
is sampled; so is any field that is not on this page, and an obeyed one of a wrong type. A field that is `null` is not there. `anthropic-beta` and
`openai-beta` are noted; other headers that are not below are passed over.

*The tables are written by `docs/write_harnesses.py` from the forms in `src/sparring/gateway/dialects`.*
"""

REFUSED = {
    "chat": "audio function_call functions logit_bias modalities moderation prediction web_search_options",
    "responses": "access_programs background_options conversation image moderation prompt",
    "messages": "mcp_servers fallbacks inference_profile",
    "gemini": "cachedContent",
    "gemini.generationConfig": "audioTimestamp imageConfig modelSelectionConfig routingConfig speechConfig",
}
"""Fields that the vendors have and that cannot be obeyed."""

REMARKS = {
    "chat": {
        "n": "up to 128 samples",
        "logprobs": "of every sampled token",
        "top_logprobs": "0 alone",
        "messages": "one that ends with a reply gets another behind it",
        "response_format": "`json_schema` and `json_object` hold by a grammar",
        "stop": "ends the reply, and is left out of it",
        "tool_choice": "`auto`, `none`; `required`, a tool, and `allowed_tools` of both modes hold by a grammar, and with"
        " them `parallel_tool_calls`",
        "tools": "functions and freeform tools: functions to the model, answered in their own form",
        "max_tokens": "a smaller one holds, and ends no rollout",
        "stream_options": "`include_usage`: a last chunk has the usage, which is `null` in the others",
    },
    "responses": {
        "background": "`false` alone",
        "generate": "`false`: the input is told and nothing is sampled",
        "include": "`reasoning.encrypted_content`: a handle that names the reply; `message.output_text.logprobs`: of every sampled token,"
        " those of calls in the message too, which is then there without a text as well; the vendor's other names add nothing",
        "input": "messages, reasoning, calls and outputs of functions and freeform tools, and an `item_reference` to an item of"
        " a reply; `compaction_trigger` is refused",
        "previous_response_id": "of a response under the same key, stored or not; new instructions stand in the place of its own",
        "text": "`format`: `json_schema` and `json_object` hold by a grammar; `verbosity` has no effect",
        "tool_choice": "`auto`, `none`; `required`, a tool, and `allowed_tools` of both modes hold by a grammar, and with"
        " them `parallel_tool_calls`",
        "tools": "functions, freeform tools and namespaces of them: functions to the model, answered in their own form",
        "max_output_tokens": "a smaller one holds, and ends no rollout",
    },
    "messages": {
        "messages": "a `tool_reference` in an answer shows the tool that it loads; a call of the model's that does not parse"
        " has what was written as its one argument, `INVALID_JSON`",
        "output_config": "`format`: `json_schema` holds by a grammar; `effort` has no effect",
        "stop_sequences": "end the reply, and are left out of it",
        "tool_choice": "`auto`, `none`; `any` and `tool` hold by a grammar, and with them `disable_parallel_tool_use`",
        "tools": "tools that the client runs; with `defer_loading` in no prompt until an answer loads them",
        "max_tokens": "a smaller one holds, and ends no rollout",
    },
    "gemini": {
        "contents": "every field in both spellings, at every depth; text, `functionCall` and `functionResponse`, with ids or without; thoughts; a `thoughtSignature`, which"
        " the last part of a reply and each call have, names the reply; a call that does not parse has the argument"
        " `INVALID_JSON`",
        "model": "the path's counts",
        "toolConfig": "`AUTO`, `NONE`; `ANY`, `VALIDATED` and their `allowedFunctionNames` hold by a grammar",
        "tools": "`functionDeclarations`, with `parametersJsonSchema` or `parameters`",
    },
    "gemini.generationConfig": {
        "candidateCount": "up to 8, in a stream 1",
        "maxOutputTokens": "a smaller one holds, and ends no rollout",
        "responseJsonSchema": "holds by a grammar",
        "responseLogprobs": "of every sampled token",
        "responseMimeType": "`text/plain`, `application/json`",
        "responseModalities": '`["TEXT"]` alone',
        "stopSequences": "end the reply, and are left out of it",
    },
}

TITLES = {
    "chat": "Chat completions: `POST /v1/chat/completions`",
    "responses": "Responses: `POST /v1/responses`",
    "messages": "Messages: `POST /v1/messages`, `POST /v1/messages/count_tokens`",
    "gemini": "Gemini: `POST /v1beta/models/{model}:generateContent`, `:streamGenerateContent`, `:countTokens`",
    "gemini.generationConfig": "Gemini: `generationConfig`",
}

FORMS = {
    "chat": ChatForm,
    "responses": ResponsesForm,
    "messages": MessagesForm,
    "gemini": GeminiForm,
    "gemini.generationConfig": ConfigForm,
}
SETS = {name: (names_in(form), form.NOTED) for name, form in FORMS.items()}
"""Fields that are obeyed and that are noted, by dialect."""

TAIL = """## Headers and paths

| | |
| --- | --- |
| key | `Authorization: Bearer`, `x-api-key`, `x-goog-api-key`, `?key=`, or a path that begins with `/k/<key>`; two that differ are refused |
| agent | {agents}: whose turn a request is |
| its parent | {parents} |
| what for | `x-codex-turn-metadata`, `x-openai-subagent`, `x-claude-code-request-class`: a compaction is labelled so, and a small call `auxiliary` |
| again | `x-stainless-retry-count`: a request that is sent again gets the reply that it missed |
| events | `?alt=sse` of `:streamGenerateContent`; without it the answer is one JSON array, an element at a time |
| the answer | `x-request-id`, Anthropic's `request-id`: the id of the request, of a refused one too |

These name agents and link them; whose rollout a request belongs to is the key's to say.

## Models and tools of the vendor's servers

`open_door(session, models={{"claude-*": "policy", "helper": other}}, leave_out=("web_search",))`: a name leads to the
policy, to another entry, or to another session; `*` stands for any letters. An unknown name is the vendor's 404, with
the names that there are. Tools that the vendor's servers would run are refused, unless the door leaves their types out.
Images are refused. A WebSocket at `/v1/responses` is a 426, after which a client goes on by HTTP.

"""


def page() -> str:
    """Return the part of the page that is written here."""
    sections = [HEAD]
    for name, (obeyed, noted) in SETS.items():
        sections.append(f"## {TITLES[name]}\n\n{_table(name, obeyed, noted)}\n")
    tail = TAIL.format(agents=_listed(evidence.AGENTS), parents=_listed(evidence.PARENTS))
    return WRAP["wrapped"]("\n".join([*sections, tail]).replace("{{", "{").replace("}}", "}")) + END


def _table(name: str, obeyed: Iterable[str], noted: Iterable[str]) -> str:
    remarks = REMARKS[name]
    rows = ["| field | |", "| --- | --- |"]
    rows += [f"| `{field}` | {remarks.get(field, 'obeyed')} |" for field in sorted(obeyed)]
    rows.append(f"| noted | {_listed(sorted(noted))} |")
    rows.append(f"| refused | {_listed(REFUSED[name].split())} |")
    return "\n".join(rows)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    behind = PAGE.read_text().partition(END)[2] if PAGE.exists() else ""
    PAGE.write_text(page() + behind)
