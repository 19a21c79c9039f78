"""Limits of the policy that imitates: experts and teachers are held to its context and reply length."""

from __future__ import annotations

from functools import partial

from sparring.protocols import Renderer
from sparring.record.token_counts import Imitator
from sparring.render.demonstrate import reply_tokens
from sparring.stages.context import RunFiles, given_checkpoint, renderer_of
from sparring.stages.models.context_length import policy_context


def imitator_of(files: RunFiles, renderer: Renderer | None = None) -> Imitator | None:
    """Return the policy that the sft stage starts from, with the context and reply length that it will have in the rl
    stage; None for a fresh policy without a tokenizer."""
    if given_checkpoint(files.config) is None and files.done("init") is None:
        return None
    source = files.input("sft")
    room = policy_context(files.config, source)
    renderer = renderer or renderer_of(files.config, source)
    return Imitator(
        renderer=renderer,
        reply_ids=partial(reply_tokens, renderer),
        max_context=room,
        max_reply=min(files.config.rollout.sampling.build().max_tokens, room),
    )
