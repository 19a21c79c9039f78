"""Chat format of an exported folder: its template writes the prompts of the run, and its generation settings sample
alike."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparring.protocols import Renderer, Store
from sparring.recipe.run_config import RunConfig
from sparring.record.order import conversation, tools_of
from sparring.render.chat_template import NAMED, read_chat_template
from sparring.render.exported_template import Prompt, TemplateComparison, settled
from sparring.render.tokenizer import load_tokenizer, read_json
from sparring.rollout.resample import prompt_of
from sparring.stages.context import ONLINE_STAGES, ORDER, POLICY, renderer_of
from sparring.types import Trajectory

TRIED = 400
"""Maximum number of recorded prompts that an exported template is compared with."""

TEMPLATE, TOKENIZER, GENERATION = "chat_template.jinja", "tokenizer_config.json", "generation_config.json"
KEPT = ("bos_token_id", "pad_token_id", "decoder_start_token_id", "transformers_version", "_from_model_config")
"""Settings of a generation_config.json that do not affect sampling."""


def write_format(out: Path, source: Path, config: RunConfig, store: Store) -> list[str]:
    """Write chat template and generation settings of a run into `out`, which has the files of `source`. Return
    sentences about the recorded prompts in `store`: how many the template writes, and which not."""
    renderer = renderer_of(config, source)
    _write_generation(out, config, renderer)
    tokenizer = load_tokenizer(source)
    own = read_chat_template(source, tokenizer.special)
    if own is None:
        return [f"no chat template is written: {source} has none, and the run's prompts are those of {renderer.name}"]
    prompts = list(recorded_prompts(store))
    text, comparison = settled(
        own.whole_source,
        tokenizer.special,
        prompts,
        renderer,
        tokenizer.encode,
        thinking=config.models[POLICY].thinking,
        tools=next((prompt.tools for prompt in prompts if prompt.tools), ()),
    )
    _write_template(out, text)
    return list(_findings(comparison, text, renderer))


def recorded_prompts(store: Store) -> Iterator[Prompt]:
    """Yield at most `TRIED` prompts of the policy from the newest online stage of a run, or else from its
    evaluations."""
    stages = [
        *(stage for stage in reversed(ORDER) if stage in ONLINE_STAGES),
        "eval",
        *(f"eval/{s}" for s in reversed(ORDER)),
    ]
    count = 0
    for stage in stages:
        for group in store.groups(stage=stage):
            for rollout in group.rollouts:
                for trajectory in rollout.trajectories:
                    for prompt in _prompts(trajectory):
                        yield prompt
                        count += 1
                        if count == TRIED:
                            return
        if count:
            return


def _prompts(trajectory: Trajectory) -> Iterator[Prompt]:
    segments = trajectory.segments
    for segment in segments:
        if segment.model == POLICY and segment.is_turn:
            yield Prompt(
                name=f"{trajectory.id}#{segment.index}",
                messages=conversation(segments, segment.index)[:-1],
                tools=tools_of(segments, segment.index),
                tokens=prompt_of(trajectory, segment),
            )


def _findings(comparison: TemplateComparison, text: str, renderer: Renderer) -> Iterator[str]:
    if not comparison.count:
        yield "the chat template has the run's settings; no recorded prompt was there to hold it against"
    else:
        yield f"the chat template writes {comparison.same} of {comparison.count} recorded prompts id by id"
    if comparison.spelt:
        fix = "sampled ids are not the tokenizer's own, or text looks like a control token"
        yield f"the chat template writes {comparison.spelt} prompts as the same text in other ids: {fix}"
    if comparison.replies:
        what = "an earlier reply was sampled in another way than its message is written (blanks, a malformed call)"
        yield f"the chat template writes {comparison.replies} prompts otherwise, because {what}"
    if comparison.other:
        left, right = comparison.shown
        where = f"the first is that of {comparison.other[0]}: the run wrote {left!r}, the template {right!r}"
        fix = f"serve the model with this project, or with a renderer that writes what {renderer.name} does"
        yield f"the chat template does not write {len(comparison.other)} recorded prompts; {where}; {fix}"
    if "strftime_now" in text:
        yield "the chat template writes the day on which it is used; the run wrote 1 January 2025 in every prompt"


def _write_template(out: Path, text: str) -> None:
    shutil.rmtree(out / NAMED, ignore_errors=True)
    (out / TEMPLATE).write_text(text, encoding="utf-8")
    settings = read_json(out / TOKENIZER)
    if settings and settings.get("chat_template") != text:
        _write(out / TOKENIZER, {**settings, "chat_template": text})


def _write_generation(out: Path, config: RunConfig, renderer: Renderer) -> None:
    before, rollout = read_json(out / GENERATION), config.rollout
    kept: dict[str, Any] = {key: before[key] for key in KEPT if key in before}
    greedy = rollout.sampling.temperature == 0
    drawn = {
        "temperature": rollout.sampling.temperature,
        "top_p": rollout.sampling.top_p,
        "top_k": rollout.sampling.top_k,
    }
    drawn |= {"min_p": rollout.sampling.min_p} if rollout.sampling.min_p else {}
    sampling = {"do_sample": False} if greedy else {"do_sample": True, **drawn}
    _write(out / GENERATION, {**kept, "eos_token_id": list(renderer.stop_ids), **sampling})


def _write(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
