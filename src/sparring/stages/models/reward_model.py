"""The reward model that scores rollouts: `[rl] reward_model`; and all scorers of a run's groups."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sparring.algo.base import name_of
from sparring.algo.rules import credits_with
from sparring.envs.roles import roles_of
from sparring.errors import BadInput, refusal, refusal_in
from sparring.model.hub import base_folder, model_folder
from sparring.model.peft import is_adapter
from sparring.protocols import Scorer
from sparring.recipe.run_config import RunConfig
from sparring.recipe.sections.preference import StepsConfig
from sparring.render.steps import StepSplitter
from sparring.rollout.scorers.reward_scorer import RewardScorer
from sparring.rollout.scorers.turn_scorer import TurnScorer
from sparring.stages.context import POLICY, SERVING_STAGES, Context, RunFiles, given_checkpoint, renderer_of
from sparring.stages.models.context_length import outline_of
from sparring.stages.models.model_use import ModelUse, UsedModel

OWN = "reward_model"
"""Stage whose output `rl.reward_model` may name."""


def scorers(context: Context) -> list[Scorer]:
    """Open the scorers of groups: the environment's own, then the scorer with `[rl] reward_model`."""
    section = context.config.rl
    of_environment = [] if context.factory.scorer is None else [context.factory.scorer]
    if section.reward_model is None:
        return of_environment
    own = section.reward_model == OWN
    model = context.cluster.value_model(POLICY if own else section.reward_model, path=str(_folder(context)))
    if section.reward_by == "reply":
        return [*of_environment, RewardScorer(model, weight=section.reward_weight)]
    steps = _steps(context) if section.reward_by == "step" else None
    return [*of_environment, TurnScorer(model, weight=section.reward_weight, steps=steps)]


def _steps(files: RunFiles) -> StepSplitter:
    loss, separator = files.config.reward_model.loss, files.config.rl.reward_separator
    learned = loss.separator if isinstance(loss, StepsConfig) else "\n"
    return StepSplitter(renderer_of(files.config, files.input("rl")), separator or learned)


class RewardModelUse(ModelUse):
    """Use of a model with a scalar head, which scores what the policy says."""

    name = OWN

    def models(self, config: RunConfig, stage: str) -> list[UsedModel]:
        model = config.rl.reward_model if stage in SERVING_STAGES else None
        return [] if model is None else [UsedModel(use=self.name, model=model, kind="frozen", scalar=True)]

    def check(self, context: Context) -> list[str]:
        """Refuse a reward model that cannot score the policy's tokens."""
        config, name = context.config, context.config.rl.reward_model
        if name is None or not set(SERVING_STAGES) & set(config.run.stages):
            return []
        roles = roles_of(context.factory.make())
        if len(roles) > 1:
            fix = "leave it out; the environment's score_all gives each role its reward"
            raise refusal(
                "rl.reward_model", "none in an environment of several roles", f"{name!r}, and {', '.join(roles)}", fix
            )
        if config.rl.reward_by != "reply":
            _check_turns(config)
        if name == OWN:
            if OWN not in config.run.stages and context.done(OWN) is None:
                actual, fix = str(list(config.run.stages)), "add it, or name a model"
                raise refusal("rl.reward_model", f"a stage {OWN} before rl", actual, fix)
            return [f"rl: the stage reward_model scores {_scored_units(config)}"]
        policy = given_checkpoint(config)
        folder = checkpoint_of(config, "rl.reward_model", name, (OWN,), policy, head="scalar")
        return [f"rl: {folder} scores {_scored_units(config)}", *_padded_ends(config, folder, policy or folder)]


def _padded_ends(config: RunConfig, folder: Path, policy: Path) -> list[str]:
    """Return a warning about a reward model whose padding token ends replies, as TRL trains it with eos as padding."""
    from sparring.model.load import read_config

    pad = read_config(str(folder), "fast", "scalar").get_text_config().pad_token_id
    if pad not in (renderer := renderer_of(config, policy)).stop_ids:
        return []
    what = f"{renderer.decode([pad])!r}, which ends replies, is the padding of {folder}"
    fix = "if it was trained to be read there, give its config.json a pad_token_id that no text has"
    return [f"rl: {what}: its scores are read before it, as transformers reads them; {fix}"]


def _check_turns(config: RunConfig) -> None:
    """Refuse a reward model that was not trained on turns or steps, and a credit rule that does not read their
    rewards."""
    by = config.rl.reward_by
    learned = str(config.reward_model.loss.__struct_config__.tag)
    if config.rl.reward_model == OWN and learned != f"{by}s":
        fix = f'set reward_model.loss = "{by}s", or another rl.reward_by'
        raise refusal("rl.reward_by", f'a reward model trained on {by}s with "{by}"', repr(learned), fix)
    if config.rl.reward_model == OWN and config.rl.reward_separator:
        actual, fix = repr(config.rl.reward_separator), "leave it out: reward_model.loss has it"
        raise refusal("rl.reward_separator", "none with the run's own reward model", actual, fix)
    if "rl" not in config.run.stages:
        return
    actual = "rl.preference" if config.rl.preference is not None else repr(name_of(config.algo.credit))
    if config.rl.preference is not None or not config.algo.credit.tells_turns_apart:
        rules = ", ".join(credits_with(lambda rule: rule.tells_turns_apart))
        raise refusal(
            "rl.reward_by", f'a credit that reads turn rewards with "{by}" ({rules})', actual, "choose one of these"
        )


def _scored_units(config: RunConfig) -> str:
    by = config.rl.reward_by
    return "rollouts" if by == "reply" else f"every {by}"


def checkpoint_of(
    config: RunConfig, where: str, name: str, others: Sequence[str], policy: Path | None, *, head: str
) -> Path:
    """Return the checkpoint folder of a model that scores the policy's tokens.

    Refuse a model without a path. Refuse a checkpoint that is an adapter, has another head, another tokenizer than the
    policy, or fewer positions.

    Args:
        where: key of the recipe that names the model.
        others: names that the key may have in addition to models with a path.
        policy: checkpoint folder of the policy; None: the run makes one.
        head: head that the model must have, as in `model.load.load`.
    """
    models = config.models
    if name == POLICY or name not in models or models[name].path is None:
        names = ", ".join([*others, *(n for n, spec in models.items() if n != POLICY and spec.path)])
        raise refusal(where, f"one of {names}", repr(name), f"add [models.{name}] path")
    folder, where = model_folder(models[name]), f"models.{name}.path"
    if is_adapter(folder):
        raise refusal(where, "whole weights, to add a scalar head to", "an adapter", "export it first")
    tokenizers = [base_folder(each) / "tokenizer.json" for each in (folder, policy) if each is not None]
    if policy is None or not tokenizers[0].is_file() or len({file.read_bytes() for file in tokenizers}) > 1:
        fix = "train a reward model from the policy"
        raise refusal(where, "the policy's tokenizer.json", "a different one or none", fix)
    try:
        shape = outline_of(folder, head)
    except BadInput as error:
        raise refusal_in(where, error) from error
    if (most := shape.max_positions) < (longest := outline_of(policy).max_positions):
        raise refusal(where, f"a model that reads the policy's {longest} tokens", str(most), "take another")
    return folder


def _folder(files: RunFiles) -> Path:
    name = files.config.rl.reward_model
    return files.output(OWN) if name == OWN else model_folder(files.config.models[str(name)])
