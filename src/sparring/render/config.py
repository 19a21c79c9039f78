"""The `[render]` section of a recipe."""

from __future__ import annotations

from typing import Literal

import msgspec

Thoughts = Literal["kept", "template"]


class RenderConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rendering of messages as tokens."""

    control_tokens: tuple[Literal["system", "user"], ...] = ()
    """Roles whose messages before the first reply may write the tokenizer's added tokens (`<|im_end|>`, `<think>`) as
    these very tokens. Everywhere else such text is plain text; text of tools and environments can never be allowed to
    write control tokens."""

    thoughts: Thoughts = "kept"
    """Treatment of a reply's thought in later prompts, for a model that thinks. `kept`: the thought stays where it was
    sampled, so a conversation is one sequence of ids; when a conversation is rendered as a whole, thoughts are written
    too. `template`: the checkpoint's template decides, which mostly drops the thoughts before a user's message; the
    conversation continues there on a new branch whose fork reason is `template`."""
