"""Chat format of a teacher or another model that scores the policy's prompts, compared with the policy's format."""

from __future__ import annotations

from pathlib import Path

from sparring.errors import BadInput, refusal
from sparring.model.hub import base_folder, local_folder, model_folder
from sparring.protocols import EnvFactory
from sparring.recipe.run_config import RunConfig
from sparring.render.exported_template import parting, tried_prompts
from sparring.render.load import load_renderer
from sparring.stages.context import POLICY, given_checkpoint, renderer_of
from sparring.stages.models.reference import AVERAGE


def student_folder(config: RunConfig) -> Path | None:
    """Return the folder of the student's tokenizer before the run, or None for a run that trains a tokenizer."""
    init = config.models[POLICY].init
    if init is None:
        return given_checkpoint(config)
    return None if init.tokenizer is None else local_folder(init.tokenizer)


def check_format(config: RunConfig, factory: EnvFactory, name: str) -> list[str]:
    """Refuse unused chat format settings of a teacher, and compare the teacher's own prompts with the policy's.

    A teacher with the student's tokenizer scores the ids that the student read and sampled, so its own chat template
    and `thinking` are unused, except with `distill.tokenizers` = "any". Return a warning if its own format writes other
    prompts."""
    student = student_folder(config)
    if name in (POLICY, AVERAGE) or config.distill.tokenizers == "any" or student is None:
        return []
    spec, policy = config.models[name], config.models[POLICY]
    check_unused(config, name)
    render, tools = config.render, factory.make().tools
    try:
        student_format = renderer_of(config, student)
        folder = base_folder(model_folder(spec))
        own_format = load_renderer(folder, spec.renderer, policy.thinking, render.control_tokens, render.thoughts)
    except BadInput:  # without a template it has no prompts to compare
        return []
    tried = list(tried_prompts(own_format, tools, thinking=policy.thinking))
    offered = tools if tried else ()  # a template without a place for tools refuses prompts with tools
    own = {repr(prompt.messages): prompt for prompt in tried or tried_prompts(own_format, (), thinking=policy.thinking)}
    for prompt in tried_prompts(student_format, offered, thinking=policy.thinking):
        other = own.get(repr(prompt.messages))
        if other is not None and other.tokens != prompt.tokens:
            left, right = parting(student_format.decode(prompt.tokens), own_format.decode(other.tokens))
            place = f"{right!r} in place of {left!r}; it judges replies to prompts that it has not learned on"
            return [f"distill: warning: the chat template of {name} writes another prompt than the student's, {place}"]
    if tools and not offered:
        return [f"distill: warning: the chat template of {name} has no place for tools; what it judges has some"]
    return []


def check_unused(config: RunConfig, name: str) -> None:
    """Refuse chat format settings that differ from the policy's, for a model that writes no prompts of its own."""
    spec, policy = config.models[name], config.models[POLICY]
    if _writes_prompts(config, name):
        return
    taught = name in config.distill.teachers.values()
    fix = "leave it out" + (', or let it write its own prompts: distill.tokenizers = "any"' if taught else "")
    if spec.thinking and not policy.thinking:
        expected = "false, as of models.policy, whose prompts this model judges"
        raise refusal(f"models.{name}.thinking", expected, "true", fix)
    if spec.renderer not in ("auto", policy.renderer):
        expected = f"{policy.renderer!r}, as of models.policy, whose prompts this model judges"
        raise refusal(f"models.{name}.renderer", expected, repr(spec.renderer), fix)


def _writes_prompts(config: RunConfig, name: str) -> bool:
    """Return whether a model reads prompts in its own format somewhere in the run."""
    collects = config.collect.by_domain.values() if "collect" in config.run.stages else ()
    return config.eval.teachers or name in {*config.rollout.roles.values(), *config.judging, *collects}
