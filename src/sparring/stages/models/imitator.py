"""The policy as the one who is to imitate: what an expert's or a teacher's rollouts are held to."""

from __future__ import annotations

from functools import partial

from sparring.protocols import Renderer
from sparring.record.imitated import Imitator
from sparring.render.demonstrate import reply_tokens
from sparring.stages.context import RunFiles, given_checkpoint, renderer_of
from sparring.stages.models.context_length import policy_context


def imitator_of(files: RunFiles, renderer: Renderer | None = None) -> Imitator | None:
    """Return the policy that the sft stage starts from, with the context and the replies that `rl` gives it, so that a
    program that an expert or a teacher speaks for is told what the policy's is.

    Args:
        renderer: of the policy; None: it is loaded.

    Returns:
        The policy; None while a fresh one has no tokenizer.

    Raises:
        BadInput: its checkpoint is gone, or no model.
    """
    if given_checkpoint(files.config) is None and files.done("init") is None:
        return None
    source = files.input("sft")
    room = policy_context(files.config, source)
    renderer = renderer or renderer_of(files.config, source)
    return Imitator(
        renderer=renderer,
        reply_ids=partial(reply_tokens, renderer),
        max_context=room,
        max_reply=min(files.config.rollout.sampling().max_tokens, room),
    )
