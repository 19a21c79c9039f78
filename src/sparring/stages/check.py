"""Preflight: everything that can be wrong is found here, not half an hour in. Trains nothing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from sparring.errors import refusal
from sparring.rollout.window import check_window
from sparring.sandbox.check import check_sandbox
from sparring.stages.context import POLICY, Context
from sparring.stages.demonstrate import converse, demonstrate
from sparring.types import Message, Task

GIB = 1 << 30


async def check(context: Context) -> list[str]:
    """Prove that the run can work, cheapest first.

    Returns:
        What was found, one sentence each.

    Raises:
        BadInput: the run would fail, and why.
    """
    config = context.config
    check_sandbox(config.sandbox)
    facts = [f"sandbox: {config.sandbox.bwrap} isolates a command on this machine"]
    facts += _stages(context)
    facts += _memory(context)
    shape = _shape(context)
    check_window(
        config.rollout,
        groups_per_step=config.rl.groups_per_step,
        engine_tokens=config.engine.kv_tokens or None,
        rollout_tokens=shape["max_position_embeddings"],
    )
    facts.append("rollouts: the window cannot deadlock")
    facts += await _world(context)
    facts += _rendering(context)
    return facts


def _stages(context: Context) -> list[str]:
    """The order of stages makes sense: each finds weights to start from."""
    config = context.config
    if "init" not in config.run.stages:
        raise refusal("run.stages", "`init` first", str(list(config.run.stages)), "add it: it also takes a given checkpoint")
    return [f"stages: {' -> '.join(config.run.stages)}"]


def _memory(context: Context) -> list[str]:
    """A bound on memory: weights, gradients and AdamW in float32, the engine's copy, its cache, a micro-batch's activations."""
    config = context.config
    shape = _shape(context)
    width, layers = shape["hidden_size"], shape["num_hidden_layers"]
    per_layer = width * (2 * shape["num_attention_heads"] + 2 * shape["num_key_value_heads"]) * shape["head_dim"]
    parameters = layers * (per_layer + 3 * width * shape["intermediate_size"]) + 2 * shape["vocab_size"] * width
    trainer = parameters * (4 + 4 + 8)
    per_token = layers * (12 * width + 4 * shape["intermediate_size"]) + 2 * shape["vocab_size"]
    activations = config.train.token_budget * per_token * 4
    needed = trainer + 3 * parameters * 4 + config.engine.kv_bytes + activations
    here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if config.run.device == "cpu" and needed > here:
        raise refusal(
            "memory",
            f"{needed / GIB:.1f} GiB (weights and optimiser {trainer / GIB:.1f}, activations {activations / GIB:.1f})",
            f"{here / GIB:.1f} GiB on this machine",
            "lower train.token_budget or engine.kv_bytes, or take a smaller model",
        )
    free = shutil.disk_usage(context.folder).free
    disk = parameters * 12 * (config.train.keep_last + 1) * 2
    if disk > free:
        raise refusal(
            str(context.folder), f"{disk / GIB:.1f} GiB of disk for checkpoints", f"{free / GIB:.1f} GiB", "free disk space"
        )
    return [f"memory: about {needed / GIB:.2f} GiB of {here / GIB:.0f} GiB for {parameters / 1e6:.2f} million parameters"]


def _shape(context: Context) -> dict[str, int]:
    """The sizes of the policy, from its checkpoint or from `[models.policy.init]`."""
    spec, given = context.config.models[POLICY], context.given()
    if spec.init is not None:
        return {
            "hidden_size": spec.init.hidden_size,
            "num_hidden_layers": spec.init.num_layers,
            "num_attention_heads": spec.init.num_heads,
            "num_key_value_heads": spec.init.num_kv_heads,
            "head_dim": spec.init.head_dim,
            "intermediate_size": spec.init.intermediate_size,
            "vocab_size": spec.init.vocab_size,
            "max_position_embeddings": spec.init.max_positions,
        }
    found = json.loads((given / "config.json").read_text(encoding="utf-8")) if given is not None else {}
    found.setdefault("num_key_value_heads", found["num_attention_heads"])
    found.setdefault("head_dim", found["hidden_size"] // found["num_attention_heads"])
    found.setdefault("intermediate_size", 4 * found["hidden_size"])
    return found


async def _world(context: Context) -> list[str]:
    """Open one world of each kind of task; its expert must be rewarded and an empty answer must not."""
    if "sft" not in context.config.run.stages:
        task = context.factory.tasks("train", context.config.run.seed).next()
        if task is None:
            raise refusal("env", "at least one training task", "none", "add data")
        await _empty(context, task)
        return [f"env: {context.factory.name} opens and does not reward an empty answer"]
    facts = []
    for task in _one_of_each(context):
        shown = await demonstrate(context, task)
        if shown.score is None or not shown.score.reward:
            raise refusal(f"task {task.id}", "an expert that is rewarded", f"reward {shown.score}", "correct expert or scorer")
        await _empty(context, task)
        facts.append(f"env: {task.tag or task.env}: expert {shown.score.reward:g}, empty answer 0")
    return facts


def _one_of_each(context: Context) -> Sequence[Task]:
    """The first demonstrated task of every tag."""
    source = context.factory.tasks("demonstration", context.config.run.seed)
    first: dict[str, Task] = {}
    while (task := source.next()) is not None:
        first.setdefault(task.tag, task)
    return list(first.values())


async def _empty(context: Context, task: Task) -> None:
    silent = await converse(context, task, lambda messages: Message(role="assistant", content=""))
    if silent.score is not None and silent.score.reward:
        raise refusal(
            f"task {task.id}", "no reward for an empty answer", f"{silent.score.reward:g}", "correct the scorer: it can be gamed"
        )


def _rendering(context: Context) -> list[str]:
    """A given checkpoint's template round-trips. A fresh tokenizer is proven on one without merges: same template."""
    import tempfile

    from sparring.render.load import load_renderer
    from sparring.render.prove import prove

    tools = context.factory.make().tools
    given = context.given()
    if given is not None:
        return [f"render: {fact}" for fact in prove(context.renderer(given), tools)]
    from sparring.render.train_tokenizer import MIN_VOCAB_SIZE, train_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        train_tokenizer([], MIN_VOCAB_SIZE, Path(folder))
        return [f"render: {fact}" for fact in prove(load_renderer(folder), tools)]
