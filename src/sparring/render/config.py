"""The `[render]` section of a recipe."""

from __future__ import annotations

from typing import Literal

import msgspec

Thoughts = Literal["kept", "template"]


class RenderConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rendering of messages as tokens."""

    control_tokens: tuple[Literal["system", "user"], ...] = ()
    """Roles whose messages before the first reply may write the tokenizer's added tokens (`<|im_end|>`, `<think>`) as
    these very tokens. Everywhere else such a text is plain text, and what tools and worlds say can never be allowed
    to."""

    thoughts: Thoughts = "kept"
    """Treatment of a reply's thought in later prompts, of a model that thinks: `kept` leaves it where it was
    sampled, so that a conversation is one sequence of ids, and puts it there where one begins anew; `template` does
    what the checkpoint's template does, which mostly drops the thoughts before a user's message: the conversation
    begins anew there, as a fork whose reason is `template`."""
