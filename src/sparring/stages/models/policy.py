"""The policy: the model that the stages train and serve."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from sparring.errors import refusal
from sparring.model.hub import base_folder
from sparring.recipe.run_config import RunConfig
from sparring.scratch import scratch
from sparring.stages.context import POLICY, SERVING_STAGES, TRAINING_STAGES, Context, RunFiles, given_checkpoint
from sparring.stages.models.adapters import check_lora
from sparring.stages.models.model_use import ModelUse, UsedModel
from sparring.train.config import TrainConfig

if TYPE_CHECKING:
    from sparring.model.outline import Outline

LAYERS = 2
"""Number of layers of the fresh model that is made for the check; all layers of a fresh model are alike."""


class PolicyUse(ModelUse):
    """Use of the model that samples, and that every training stage trains."""

    name = POLICY

    def models(self, config: RunConfig, stage: str) -> list[UsedModel]:
        used = []
        if stage in TRAINING_STAGES:
            train, scalar = train_of(config, stage), stage == "reward_model"
            one = UsedModel(use=POLICY, model=POLICY, kind="trained", scalar=scalar, train=train, rank="trainer rank")
            used.append(one)
        if stage in SERVING_STAGES and config.engine.kind != "openai":
            used.append(UsedModel(use=POLICY, model=POLICY, kind="engine"))
        return used

    def check(self, context: Context) -> list[str]:
        """Refuse adapters that cannot be served or continued."""
        return check_lora(context.config)


def train_of(config: RunConfig, stage: str) -> TrainConfig:
    """Return `[train]` with the stage's own keys."""
    return config.train.replaced(getattr(config, stage).train)


def check_model(files: RunFiles, shape: Outline) -> list[str]:
    """Load the policy as every stage will, or make a fresh one of the configured shape with fewer layers."""
    from sparring.model.create import create
    from sparring.model.lora import Adapter, fresh_state
    from sparring.model.servable import check_servable
    from sparring.model.targets import targeted

    spec, start = files.config.models[POLICY], given_checkpoint(files.config)
    with scratch(files.folder) as folder:
        if start is not None:
            _check_ids(base_folder(start), shape)
        else:
            assert spec.init is not None, "a model has a path or an init"
            create(
                msgspec.structs.replace(spec.init, num_layers=min(spec.init.num_layers, LAYERS)),
                shape.vocab_size,
                folder,
                0,
            )
        model = check_servable(
            start or folder, dtype=spec.dtype, device=files.config.run.device, numerics=spec.numerics
        )
    if spec.lora is not None:
        names = targeted(model.module, spec.lora.target_modules, spec.lora.target_parameters)
        model.adapters.fit(Adapter(fresh_state(model.module, names, 1, 1.0, 0), model.dtype, model.device))
    return [f"model: {type(model.module).__name__} in {spec.dtype} runs on {model.path_name}"]


def _check_ids(folder: Path, shape: Outline) -> None:
    from tokenizers import Tokenizer

    token, largest = max(
        Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab().items(), key=lambda item: item[1]
    )
    if largest >= shape.vocab_size:
        ids = f"ids below {shape.vocab_size}, the rows of the embedding"
        fix = "take the tokenizer that belongs to the model"
        raise refusal(str(folder / "tokenizer.json"), ids, f"{largest} for {token!r}", fix)
