"""Reward models that score the rollouts of a run."""

from __future__ import annotations

import json
from pathlib import Path

from sparring.algo.base import name_of
from sparring.algo.rules import credits_with
from sparring.envs.roles import roles_of
from sparring.errors import refusal
from sparring.model.hub import base_folder, model_folder
from sparring.model.peft import is_adapter
from sparring.protocols import Scorer
from sparring.recipe.sections.preference import StepsConfig
from sparring.render.steps import StepSplitter
from sparring.rollout.scorers.reward_scorer import RewardScorer
from sparring.rollout.scorers.turn_scorer import TurnScorer
from sparring.stages.context import POLICY, Context
from sparring.stages.models.context_length import outline_of

OWN = "reward_model"
"""The stage whose output `rl.reward_model` may name."""


def scorers(context: Context) -> list[Scorer]:
    """Return the scorers of groups: the environment's, then the reward model."""
    return [scorer for scorer in (context.factory.scorer, reward_scorer(context)) if scorer is not None]


def reward_scorer(context: Context) -> Scorer | None:
    """Open the scorer on `[rl] reward_model`; None where it names nothing."""
    section = context.config.rl
    if section.reward_model is None:
        return None
    own = section.reward_model == OWN
    model = context.cluster.value_model(POLICY if own else section.reward_model, path=str(_folder(context)))
    if section.reward_by == "reply":
        return RewardScorer(model, weight=section.reward_weight)
    steps = _steps(context) if section.reward_by == "step" else None
    return TurnScorer(model, weight=section.reward_weight, steps=steps)


def _steps(context: Context) -> StepSplitter:
    """Return what splits turns into steps, as the reward model's data was split."""
    loss, separator = context.config.reward_model.loss, context.config.rl.reward_separator
    learned = loss.separator if isinstance(loss, StepsConfig) else "\n"
    return StepSplitter(context.renderer(context.input("rl")), separator or learned)


def check_reward_model(context: Context, tokenizer: Path | None) -> list[str]:
    """Refuse `[rl] reward_model` if it cannot score the policy's tokens.

    Args:
        tokenizer: the folder of the policy, None where the run makes one.
    """
    config, name = context.config, context.config.rl.reward_model
    if name is None or not {"rl", "distill", "eval"} & set(config.run.stages):
        return []
    roles = roles_of(context.factory.make())
    if len(roles) > 1:
        do = "leave it out; the environment's score_all gives each role its reward"
        raise refusal(
            "rl.reward_model", "none in an environment of several roles", f"{name!r}, and {', '.join(roles)}", do
        )
    if config.rl.reward_by != "reply":
        _check_turns(context)
    if name == OWN:
        if OWN not in config.run.stages and context.done(OWN) is None:
            raise refusal(
                "rl.reward_model", f"a stage {OWN} before rl", str(list(config.run.stages)), "add it, or name a model"
            )
        return [f"rl: the stage reward_model scores {_judged(context)}"]
    if name not in config.models or name == POLICY or config.models[name].path is None:
        others = ", ".join(n for n, spec in config.models.items() if n != POLICY and spec.path) or "none"
        raise refusal(
            "rl.reward_model", f"{OWN} or a model with a path ({others})", repr(name), f"add [models.{name}] path"
        )
    check_reads_policy(name, _folder(context), tokenizer)
    kinds = json.loads((_folder(context) / "config.json").read_text(encoding="utf-8")).get("architectures") or []
    if not any("ForSequenceClassification" in kind for kind in kinds):
        got, do = ", ".join(kinds) or "none", "train one: the stage reward_model writes such a folder"
        raise refusal(f"models.{name}.path", "a checkpoint with a scalar head (ForSequenceClassification)", got, do)
    return [f"rl: {_folder(context)} scores {_judged(context)}"]


def _check_turns(context: Context) -> None:
    """Refuse a reward model that was not trained on turns or steps, and a credit that does not read their rewards."""
    config, by = context.config, context.config.rl.reward_by
    learned = str(config.reward_model.loss.__struct_config__.tag)
    if config.rl.reward_model == OWN and learned != f"{by}s":
        do = f'set reward_model.loss = "{by}s", or another rl.reward_by'
        raise refusal("rl.reward_by", f'a reward model trained on {by}s with "{by}"', repr(learned), do)
    if config.rl.reward_model == OWN and config.rl.reward_separator:
        got, do = repr(config.rl.reward_separator), "leave it out: reward_model.loss has it"
        raise refusal("rl.reward_separator", "none with the run's own reward model", got, do)
    if "rl" not in config.run.stages:
        return
    got = "rl.preference" if config.rl.preference is not None else repr(name_of(config.algo.credit))
    if config.rl.preference is not None or not config.algo.credit.tells_turns_apart:
        rules = ", ".join(credits_with(lambda rule: rule.tells_turns_apart))
        raise refusal(
            "rl.reward_by", f'a credit that reads turn rewards with "{by}" ({rules})', got, "choose one of these"
        )


def _judged(context: Context) -> str:
    by = context.config.rl.reward_by
    return "rollouts" if by == "reply" else f"every {by}"


def check_reads_policy(name: str, folder: Path, policy: Path | None) -> None:
    """Refuse a model other than whole weights that read the policy's tokens, and as many of them.

    Args:
        name: of the model in `[models]`.
        policy: the policy's, None where the run makes one.

    Raises:
        BadInput: they do not.
    """
    where = f"models.{name}.path"
    if is_adapter(folder):
        raise refusal(where, "whole weights, to add a scalar head to", "an adapter", "export it first")
    tokenizer = base_folder(folder) / "tokenizer.json"
    mine = None if policy is None else base_folder(policy) / "tokenizer.json"
    if policy is None or mine is None or not tokenizer.is_file() or tokenizer.read_bytes() != mine.read_bytes():
        raise refusal(
            where, "the policy's tokenizer.json", "a different one or none", "train a reward model from the policy"
        )
    if (most := outline_of(folder).max_positions) < (longest := outline_of(policy).max_positions):
        raise refusal(where, f"a model that reads the policy's {longest} tokens", str(most), "take another")


def _folder(context: Context) -> Path:
    name = context.config.rl.reward_model
    return context.output(OWN) if name == OWN else model_folder(context.config.models[str(name)])
