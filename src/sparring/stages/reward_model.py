"""The reward_model stage: a scalar head learns the reward of a reply from comparisons, or labels of solution steps or
conversation turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparring.annotations import Annotation
from sparring.batch.preference import labelled_steps, preference_batch, whole_text
from sparring.errors import refusal
from sparring.protocols import Loss, Renderer, Trainer, TrainPlan
from sparring.recipe.sections.preference import BradleyTerryConfig, RewardModelConfig, StepsConfig, TurnsConfig
from sparring.render.steps import step_ends
from sparring.stages.context import POLICY, Context, renderer_of
from sparring.stages.data.preferences import in_words, rate, render_reply, render_sides, reward_rows, split_held_out
from sparring.stages.models.context_length import outline_of
from sparring.stages.runtime.offline import supervise
from sparring.tasks.preferences import JudgedTurns, Preference, Solution
from sparring.types import Message, Sample, ToolSpec

Unit = list[Sample]
"""Rows of one pair, one solution or one conversation."""


async def run(context: Context) -> dict[str, Any]:
    """Train the stage's input with a new scalar head and write a Hugging Face folder with one label.

    Returns:
        `rows`: number of trained rows. `tokens_trained`. `loss`, `accuracy`: values of the last step. `held_out`:
        accuracy on held-out rows with its interval, or None. `model`: the folder.
    """

    section, seed = context.config.reward_model, context.config.run.seed
    source = context.input("reward_model")
    trained, held_out = split_held_out(reward_rows(context.config), section.held_out, seed, "reward_model")
    renderer, longest = renderer_of(context.config, source), outline_of(source).max_positions
    tools, loss = context.factory.make().tools, _loss(section.loss)
    units, others = ([_unit(section, tools, renderer, row, longest) for row in rows] for rows in (trained, held_out))
    plan = TrainPlan(losses=[loss], total_steps=section.steps, overrides=section.train, head="new scalar")
    trainer = context.cluster.trainer(POLICY, path=str(source), plan=plan)
    headlines = {"loss": f"loss_{loss.term}", "accuracy": "accuracy"}
    totals = await supervise(context, "reward_model", trainer, source, units, preference_batch, headlines)
    judged = await _held_out_accuracy(trainer, others) if others else None
    if judged is not None:
        context.sink.event("reward_model", in_words(judged, "pairs, steps or turns are judged right"))
    return {"rows": len(trained), "held_out": judged, **totals}


def _loss(config: BradleyTerryConfig | StepsConfig | TurnsConfig) -> Loss:
    from sparring.algo.loss.preference.bradley_terry import BradleyTerry
    from sparring.algo.loss.step_labels import StepLabels

    return BradleyTerry(centre=config.centre) if isinstance(config, BradleyTerryConfig) else StepLabels()


def _unit(
    section: RewardModelConfig,
    tools: Sequence[ToolSpec],
    renderer: Renderer,
    row: Preference | Solution | JudgedTurns,
    longest: int,
) -> Unit:
    if isinstance(row, Solution):
        return [_solution(section, tools, renderer, row, longest)]
    if isinstance(row, JudgedTurns):
        tokens, sampled = render_reply(renderer, tools, row.where, row.prompt, row.reply, longest)
        return [labelled_steps(tokens, turn_labels(sampled, row), id=row.where)]
    return [
        whole_text(tokens, id=id, group=row.where, label=label, margin=row.margin)
        for id, label, tokens, _ in render_sides(renderer, tools, row, longest)
    ]


def _solution(
    section: RewardModelConfig, tools: Sequence[ToolSpec], renderer: Renderer, row: Solution, longest: int
) -> Sample:
    loss = section.loss
    assert isinstance(loss, StepsConfig), "solutions are read with this loss alone"
    prefixes = [loss.separator.join(row.steps[: count + 1]) for count in range(len(row.steps))]
    replied = (Message(role="assistant", content=prefixes[-1]),)
    tokens, sampled = render_reply(renderer, tools, row.where, row.prompt, replied, longest)
    ends = step_ends(renderer, tokens, sampled.index(True), prefixes)
    labels: Mapping[int, float] = dict(zip(ends, row.labels, strict=True))
    if len(labels) != len(row.steps):
        raise refusal(
            f"{row.where}, steps", "steps that end in different tokens", "two that end in the same token", "join them"
        )
    return labelled_steps(tokens, labels, id=row.where)


def turn_labels(sampled: Sequence[bool], row: JudgedTurns) -> dict[int, float]:
    """Return the label of each judged turn, by the number of tokens up to the end of the turn. `sampled` marks the
    assistant's tokens.

    Raises:
        BadInput: one turn contains two assistant messages.
    """
    ends = [
        place + 1
        for place, (mark, after) in enumerate(zip(sampled, [*sampled[1:], False], strict=True))
        if mark and not after
    ]
    if len(ends) != len(row.labels):
        expected, actual = f"{len(row.labels)} turns, one for each message of the assistant", str(len(ends))
        raise refusal(f"{row.where}, messages", expected, actual, "join consecutive messages of the assistant")
    return {end: label for end, label in zip(ends, row.labels, strict=True) if label is not None}


async def _held_out_accuracy(trainer: Trainer, units: Sequence[Unit]) -> dict[str, float]:
    """Return the share of pairs in the right order; for solutions and conversations the share of labels on the right
    side of one half."""
    outputs = iter(await trainer.forward([row for unit in units for row in unit], frozenset({"value"})))
    right = []
    for unit in units:
        values = [next(outputs)["value"] for _ in unit]
        if len(unit) == 2:
            right.append(values[0][-1] > values[1][-1])
            continue
        weights, labels = unit[0].weights["value"], unit[0].annotations[Annotation.STEP_LABEL]
        right += [
            (value > 0) == (label > 0.5)
            for value, label, weight in zip(values[0], labels, weights, strict=True)
            if weight
        ]
    return rate(sum(right), len(right))
