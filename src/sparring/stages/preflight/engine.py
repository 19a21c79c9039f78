"""Check of the engine: settings that only the native engine has, an installed vLLM, and servers that answer."""

from __future__ import annotations

from sparring.engine.config import EngineConfig, check_settings
from sparring.errors import WeightsError, refusal
from sparring.model.outline import Outline
from sparring.recipe.run_config import RunConfig
from sparring.stages.context import POLICY, given_checkpoint


def check_engine(config: RunConfig, shape: Outline) -> list[str]:
    """Refuse settings that the engine does not have, a missing vLLM, and a server that does not answer or does not
    fit."""
    engine, rollout = config.engine, config.rollout
    if engine.kind == "native":
        return []
    check_settings(engine)
    if rollout.sampling.constraint is not None and engine.kind != "remote":
        expected = f'none with engine.kind = "{engine.kind}", which takes no token masks from its client'
        actual, fix = f"a {rollout.sampling.constraint.kind}", 'leave it out, or set engine.kind = "native"'
        raise refusal("rollout.sampling.constraint", expected, actual, fix)
    if engine.kind == "vllm":
        _check_truncation(config, shape)
    return _answers(config) if engine.urls else _vllm(engine)


def _check_truncation(config: RunConfig, shape: Outline) -> None:
    from sparring.engine.adapters.vllm_wire import WHOLE_VOCABULARY, truncates

    sampling = config.rollout.sampling
    if truncates(sampling.build()) and not sampling.top_k and shape.vocab_size > WHOLE_VOCABULARY:
        expected = (
            f"a number with top_p or min_p on vLLM, which returns the kept tokens as the top_k of {shape.vocab_size}"
        )
        raise refusal("rollout.sampling.top_k", expected, "0", "set it, or leave top_p and min_p out")


def _vllm(engine: EngineConfig) -> list[str]:
    from sparring.engine.adapters.vllm_server import find_vllm

    return [f"engine: {find_vllm(engine)} has vLLM"]


def _answers(config: RunConfig) -> list[str]:
    """Refuse a server that does not answer, computes with another dtype or other numerics than the run's model, or
    takes no weights from a run that trains."""
    from sparring.engine.adapters.client import read_api_key
    from sparring.engine.adapters.openai_compatible import OpenAiEngine
    from sparring.engine.adapters.remote import RemoteEngine
    from sparring.engine.adapters.remote_client import check_distinct
    from sparring.kernels import ops

    engine, spec = config.engine, config.models[POLICY]
    if engine.kind == "openai":
        if {"rl", "distill"} & set(config.run.stages):
            expected = "an engine that takes weights while the run trains"
            raise refusal(
                "engine.kind", expected, '"openai"', 'write "native" or "remote", or leave rl out of run.stages'
            )
        OpenAiEngine(engine.urls[0], model=engine.served_model, api_key=read_api_key(engine.api_key_env))
        return [f"engine: {engine.urls[0]} takes and tells token ids"]
    numerics = "fast" if spec.numerics == "fast" else ops.path_name(config.run.device)
    remotes = [RemoteEngine(url, name=POLICY, api_key=read_api_key(engine.api_key_env)) for url in engine.urls]
    for remote in remotes:
        if remote.served.files is None:
            remote.check(spec.dtype, numerics, engine)
    check_distinct(remotes)
    return [
        f"{remote.place} takes the run's model"
        if remote.served.files is not None
        else f"{remote.place} serves {remote.served.dtype} on {remote.served.numerics}, version {remote.version}"
        for remote in remotes
    ]


def check_updates(config: RunConfig) -> list[str]:
    """Send the run's first weights to the engine's servers, as the run will. A server without a model first gets the
    checkpoint's other files. A fresh model has no weights yet, so only the transport is tried.

    Raises:
        BadInput: a server refuses the weights, or cannot use `engine.shared_folder`.
    """
    if not config.engine.elsewhere:
        return []
    from sparring.engine.adapters.client import read_api_key
    from sparring.engine.adapters.remote import RemoteEngine
    from sparring.model.hub import base_folder
    from sparring.model.load import load
    from sparring.weights.fetch import links

    engine, spec, start = config.engine, config.models[POLICY], given_checkpoint(config)
    ways, key, facts, where = links(engine.shared_folder), read_api_key(engine.api_key_env), [], ""
    model = None if start is None else load(start, dtype=spec.dtype, device=config.run.device, numerics=spec.numerics)
    try:
        for url in engine.urls:
            where = f"engine at {url}"
            remote = RemoteEngine(url, name=POLICY, api_key=key, links=ways, timeout_s=engine.update.timeout_s)
            way = remote.choose_link()
            if model is not None and start is not None:
                if sent := remote.send_files(base_folder(start), spec.dtype, spec.numerics):
                    facts.append(f"model: {', '.join(sent)} travelled to {url} by {way}")
                remote.check(spec.dtype, model.path_name, engine)
                own = model.adapters.everywhere
                remote.begin(model.state(), None if own is None else own.state())
            facts.append(f"weights: {'travel' if model is None else 'travelled'} to {url} by {way}")
    except WeightsError as error:
        raise refusal(where, "a server that takes the policy's weights", str(error), "serve that model") from error
    finally:
        ways.close()
    return facts
