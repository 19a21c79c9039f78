"""Small tokenizer for each format of the `renderers` library, with the family's own tokens."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from conversations import ODD
from tokenizers import AddedToken, Tokenizer

from sparring.render.config import Thoughts
from sparring.render.library import LibraryRenderer
from sparring.render.load import load_renderer
from sparring.render.train_tokenizer import train_tokenizer

_DEEPSEEK = tuple(f"<｜{name}｜>" for name in ("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant"))
_DEEPSEEK_TOOLS = (
    *(
        f"<｜{name}▁{edge}｜>"
        for name in ("tool▁calls", "tool▁call", "tool▁outputs", "tool▁output")
        for edge in ("begin", "end")
    ),
    "<｜tool▁sep｜>",
)
_DEEPSEEK_TASKS = (
    *(f"<｜{name}｜>" for name in ("latest_reminder", "action", "query", "authority", "domain", "title", "read_url")),
    "｜DSML｜",
)
_GLM = (
    *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
_KIMI = (
    *("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)
_GEMMA = (
    *("<bos>", "<eos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>", "<|tool>", "<tool|>"),
    *(
        "<|tool_call>",
        "<tool_call|>",
        "<|tool_response>",
        "<tool_response|>",
        "<|image>",
        "<|image|>",
        "<image|>",
        '<|"|>',
    ),
)
_HY3 = (
    *(
        f"<｜{name}:opensource｜>"
        for name in ("hy_begin_of_sentence", "hy_eos", "hy_User", "hy_Assistant", "reasoning_mode")
    ),
    *(f"<{name}:opensource>" for name in ("think", "/think", "tool_calls", "/tool_calls")),
    *(f"<{name}:opensource>" for name in ("tool_call", "/tool_call", "tool_sep")),
    *(f"<{name}:opensource>" for name in ("arg_key", "/arg_key", "arg_value", "/arg_value")),
    *(f"<{name}:opensource>" for name in ("tool_responses", "/tool_responses", "tool_response", "/tool_response")),
)
_INKLING = (
    *(f"<|message_{name}|>" for name in ("user", "model", "system", "tool")),
    *(f"<|content_{name}|>" for name in ("text", "thinking", "image", "audio_input", "xml", "invoke_tool_json")),
    *("<|content_invoke_tool_text|>", "<|content_model_end_sampling|>"),
    *("<|end_message|>", "<|audio_end|>", "<|unused_200054|>", "<|unused_200053|>"),
)
_LAGUNA = ("〈|EOS|〉", "<assistant>", "</assistant>")
_LLAMA = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
)

FORMATS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("deepseek-r1", "deepseek-v3"), (*_DEEPSEEK, *_DEEPSEEK_TOOLS)),
    "deepseek-v4": (*_DEEPSEEK, *_DEEPSEEK_TASKS),
    "gemma4": _GEMMA,
    **dict.fromkeys(("glm-4.5", "glm-5", "glm-5.1", "glm-5.3"), _GLM),
    "hy3": _HY3,
    "inkling": _INKLING,
    "kimi-k2": _KIMI,
    "kimi-k2.5": (*_KIMI, "<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>"),
    **dict.fromkeys(("laguna-m.1", "laguna-s-2.1", "laguna-xs-2.1", "laguna-xs.2"), _LAGUNA),
    "llama-3": _LLAMA,
    "minimax-m2": ("]~!b[", "]~b]", "[e~[", "<minimax:tool_call>", "</minimax:tool_call>"),
    **dict.fromkeys(("nemotron-3", "nemotron-3-ultra", "nemotron-3.5"), ()),
    **dict.fromkeys(("prime-qwen3", "qwen3", "qwen3-vl", "qwen3.5", "qwen3.6", "qwen3.8"), ()),
}
"""Tokens that a format needs in addition to the tokens of the Qwen3 family, by the library's name of the format."""

NO_TOOLS = ("deepseek-r1", "deepseek-v3")
"""Formats without a place for tools."""

NOT_HERE = {
    "default": "asks the tokenizer for its chat template, which `template` serves",
    "gpt-oss": "downloads a vocabulary of its own",
}


def format_folder(name: str, folder: Path) -> Path:
    """Write the tokenizer of a format into `folder`."""
    backend = Tokenizer.from_file(str(train_tokenizer([ODD], 300, folder) / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in FORMATS[name]])
    backend.save(str(folder / "tokenizer.json"))
    return folder


@functools.cache
def format_renderer(name: str, thinking: bool = False, thoughts: Thoughts = "template") -> LibraryRenderer:
    """Return the library's renderer of a format, cached per process."""
    with tempfile.TemporaryDirectory() as folder:
        renderer = load_renderer(format_folder(name, Path(folder)), name, thinking, thoughts=thoughts)
    assert isinstance(renderer, LibraryRenderer)
    return renderer
