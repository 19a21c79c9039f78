"""The implicit process reward model of the rl stage (PRIME): `[rl.implicit]`."""

from __future__ import annotations

from sparring.annotations import Annotation
from sparring.batch.implicit import implicit_rows
from sparring.protocols import Loss
from sparring.recipe.run_config import RunConfig
from sparring.stages.context import POLICY, RunFiles, given_checkpoint
from sparring.stages.models.learner import Learner
from sparring.stages.models.reward_model import checkpoint_of


class ImplicitUse(Learner):
    """Use of a language model whose log-probabilities are process rewards, for credit prime."""

    name, title, metrics, rank = "implicit", "an implicit reward model", ("implicit/*",), "reward rank"
    annotation = Annotation.IMPLICIT
    preset = "prime"
    rows = staticmethod(implicit_rows)

    def loss(self, config: RunConfig) -> Loss:
        from sparring.algo.loss.implicit import ImplicitReward

        assert config.algo.credit.implicit_scale is not None, "check has seen the run"
        return ImplicitReward(beta=config.algo.credit.implicit_scale)

    def check_model(self, files: RunFiles, name: str) -> None:
        config = files.config
        if name != POLICY:
            checkpoint_of(config, "rl.implicit.model", name, (POLICY,), given_checkpoint(config), head="tokens")
