"""Formats of the short suite: one for each way of writing calls, with thoughts or without."""

from __future__ import annotations

import pytest
from formats import FORMATS

SHORT = {
    "template": True,
    "qwen3": False,
    "qwen3.5": True,
    "qwen3.6": False,
    "minimax-m2": True,
    "glm-4.5": False,
    "hy3": True,
    "laguna-s-2.1": False,
    "deepseek-v3": True,
    "deepseek-v4": False,
    "kimi-k2.5": True,
    "inkling": False,
    "gemma4": True,
    "llama-3": False,
}
"""Format -> whether it thinks where a test tries both."""


def is_full(item: pytest.Function) -> bool:
    """Return whether a case of a test of every format is one that the short suite leaves out."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    name = params.get("name")
    if name not in FORMATS and name != "template":
        return False
    return name not in SHORT or params.get("thinking", SHORT[name]) != SHORT[name]
