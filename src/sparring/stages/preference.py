"""The preference stage: the policy learns from compared or labelled replies (DPO and its relatives)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import xxhash

from sparring.algo.loss.preference.config import KtoConfig
from sparring.annotations import Annotation
from sparring.batch.preference import CHOSEN, mismatched, preference_batch, reply
from sparring.errors import refusal
from sparring.protocols import Renderer, Trainer, TrainPlan
from sparring.recipe.sections.preference import PreferenceConfig
from sparring.stages.context import POLICY, Context, renderer_of
from sparring.stages.data.preferences import in_words, preference_rows, rate, render_sides, split_held_out
from sparring.stages.models.adapters import trained_folder
from sparring.stages.models.context_length import outline_of
from sparring.stages.runtime.offline import supervise
from sparring.tasks.preferences import Preference
from sparring.types import PAIR_SHARE, Sample, ToolSpec

if TYPE_CHECKING:
    from sparring.algo.loss.preference.kto import Kto
    from sparring.algo.loss.preference.pairs import PairLoss

Unit = list[Sample]
"""A pair of replies; with KTO one labelled reply and its mismatched copy."""

HEADLINES = {"loss": "loss_preference", "accuracy": "accuracy", "reward_margin": "reward_margin"}


async def run(context: Context) -> dict[str, Any]:
    """Train the stage's input on preferences and write a Hugging Face or adapter folder.

    The reference is the input itself. The trainer computes its log-probabilities once, before the first step.

    Returns:
        `rows`: number of trained rows. `tokens_trained`. `loss`, `accuracy`, `reward_margin`: values of the last
        step. `held_out`: accuracy on held-out rows with its interval, or None. `model`: the folder.
    """
    from sparring.algo.loss.imitate import ImitateLoss
    from sparring.algo.preference import load_preference

    section, seed = context.config.preference, context.config.run.seed
    source = trained_folder(context, context.input("preference"))
    trained, held_out = split_held_out(preference_rows(context.config), section.held_out, seed, "preference")
    renderer, longest = renderer_of(context.config, source), outline_of(source).max_positions
    loss = load_preference(section.loss)
    losses = [loss, ImitateLoss(scale=section.imitates)] if section.imitates else [loss]
    plan = TrainPlan(losses=losses, total_steps=section.steps, overrides=section.train)
    trainer = context.cluster.trainer(POLICY, path=str(source), plan=plan)
    tools = context.factory.make().tools
    units, others = (list(_units(section, tools, renderer, rows, longest)) for rows in (trained, held_out))
    if isinstance(section.loss, KtoConfig):
        units = _with_mismatched(units, longest, seed)
    if section.loss.has_reference:
        units, others = await _with_reference(trainer, units), await _with_reference(trainer, others)
    totals = await supervise(context, "preference", trainer, source, units, preference_batch, HEADLINES)
    judged = await _held_out_accuracy(trainer, loss, others) if others else None
    if judged is not None:
        context.sink.event("preference", in_words(judged, "replies are on the right side"))
    return {"rows": len(trained), "held_out": judged, **totals}


def _units(
    section: PreferenceConfig, tools: Sequence[ToolSpec], renderer: Renderer, rows: Sequence[Preference], longest: int
) -> Iterator[Unit]:
    single = isinstance(section.loss, KtoConfig)
    for row in rows:
        unit = []
        for id, label, tokens, sampled in render_sides(renderer, tools, row, longest):
            imitate = label == CHOSEN and section.imitates > 0
            share = 1.0 if single else PAIR_SHARE
            unit.append(reply(tokens, sampled, id=id, group=row.where, label=label, share=share, imitate=imitate))
        yield from ([one] for one in unit) if single else [unit]


def _with_mismatched(units: Sequence[Unit], longest: int, seed: int) -> list[Unit]:
    """Pair each reply with a mismatched row: the same prompt with the next reply to another prompt, in an order that
    depends on the seed."""
    rows = [row for unit in units for row in unit]
    order = sorted(rows, key=lambda row: xxhash.xxh3_64_intdigest(f"kto/{seed}/{row.id}".encode()))
    place = {row.id: number for number, row in enumerate(order)}
    pairs = []
    for row in rows:
        following = (order[(place[row.id] + step) % len(order)] for step in range(1, len(order)))
        other = next((candidate for candidate in following if _prompt(candidate) != _prompt(row)), None)
        if other is None:
            raise refusal("preference.data", "replies to at least two prompts with kto", "one to train on", "add rows")
        pairs.append([row, mismatched(row, other, longest)])
    return pairs


def _prompt(row: Sample) -> tuple[int, ...]:
    return row.tokens[: next(place for place, weight in enumerate(row.weights["preference"]) if weight)]


async def _with_reference(trainer: Trainer, units: Sequence[Unit]) -> list[Unit]:
    rows = [row for unit in units for row in unit]
    outputs = iter(await trainer.forward(rows, frozenset({"logprob"})))
    return [
        [replace(row, annotations={Annotation.REFERENCE: next(outputs)["logprob"]}) for row in unit] for unit in units
    ]


async def _held_out_accuracy(trainer: Trainer, loss: PairLoss | Kto, units: Sequence[Unit]) -> dict[str, float]:
    """Return the share of pairs whose chosen reply has the larger reward. With KTO, a wanted reply counts if its reward
    is above 0, an unwanted reply if its reward is below 0."""
    from sparring.algo.loss.preference.dpo import Dpo
    from sparring.algo.loss.preference.pairs import PairForm, PairLoss, rewards_of

    form: PairForm = loss.form if isinstance(loss, PairLoss) else Dpo(beta=loss.beta)
    rows = [row for unit in units for row in unit]
    logprobs = [values["logprob"] for values in await trainer.forward(rows, frozenset({"logprob"}))]
    rewards = iter(rewards_of(form, rows, logprobs))
    margins = [sum(next(rewards) * (row.label or 0.0) for row in unit) for unit in units]
    return {**rate(sum(margin > 0 for margin in margins), len(margins)), "reward_margin": sum(margins) / len(margins)}
