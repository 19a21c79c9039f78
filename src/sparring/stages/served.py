"""Preflight of an engine that another process serves: it answers, and it fits the run."""

from __future__ import annotations

from sparring.errors import refusal
from sparring.stages.context import POLICY, Context


def check_served(context: Context) -> list[str]:
    """Ask the server, if the run's engine is one.

    Returns:
        What was found, one sentence each.

    Raises:
        BadInput: no server answers, it does not compute as the run's model, or the run trains and it takes no weights.
    """
    from sparring.engine.adapters.client import read_api_key
    from sparring.engine.adapters.openai_compatible import OpenAiEngine
    from sparring.engine.adapters.remote import RemoteEngine
    from sparring.model.kernels import ops

    engine, spec = context.config.engine, context.config.models[POLICY]
    if engine.kind == "openai":
        if {"rl", "distill"} & set(context.config.run.stages):
            expected = "an engine that takes weights while the run trains"
            raise refusal(
                "engine.kind", expected, '"openai"', 'write "native" or "remote", or leave rl out of run.stages'
            )
        OpenAiEngine(engine.url, model=engine.served_model, api_key=read_api_key(engine.api_key_env))
        return [f"engine: {engine.url} takes and tells token ids"]
    if engine.kind == "remote":
        remote = RemoteEngine(engine.url, name=POLICY, api_key=read_api_key(engine.api_key_env))
        numerics = "fast" if spec.numerics == "fast" else ops.path_name(context.config.run.device)
        remote.check(spec.dtype, numerics, engine)
        return [
            f"engine: {engine.url} serves {remote.served.dtype} on {remote.served.numerics}, version {remote.version}"
        ]
    return []
