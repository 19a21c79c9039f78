"""Configuration of the trainer: `[train]` of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

MOST_TOKENS = 8192
"""Largest automatic `token_budget`; larger values are not faster."""


class TrainConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[train]`: AdamW, its learning-rate schedule, and when to write checkpoints."""

    learning_rate: float = 1e-5
    """Peak learning rate."""

    beta1: float = 0.9
    """Decay of AdamW's first moment."""

    beta2: float = 0.999
    """Decay of AdamW's second moment."""

    epsilon: float = 1e-8
    """AdamW's epsilon."""

    weight_decay: float = 0.0
    """Decoupled weight decay of matrices and embeddings; vectors (norms, biases) have none."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning-rate schedule after the warm-up."""

    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly to its peak."""

    min_ratio: float = 0.0
    """Learning rate of the last optimiser step under the schedules linear and cosine, as a share of the peak."""

    gradient_clip: float = 1.0
    """Largest global gradient norm; a longer gradient is scaled down to it. 0: no clipping."""

    token_budget: int = 0
    """Number of distinct tokens computed at once (a prefix that rows share counts once). The budget changes memory,
    speed and the last bits of a gradient, so a run keeps its first value. 0 chooses the largest, up to 8192, for which
    the run in one process takes at most half of the memory of the machine or container, so that the layout does not
    change it; in the `train` of a stage or a model, 0 is the value of `[train]`."""

    save_every: int = 20
    """Steps between checkpoints; 0 writes only the last checkpoint of a stage."""

    keep_last: int = 2
    """Number of newest checkpoints to keep, in addition to the best."""

    best_metric: str = "rollout/reward"
    """Metric that selects the best checkpoint: a metric of the training steps, or a metric of the evaluation during
    training, such as `rl/eval/success`. In the second case each evaluated version is also saved. The checkpoint's name
    is `<run>/rl/best`."""

    best_is_highest: bool = True
    """Treat a higher `best_metric` as better."""

    def __post_init__(self) -> None:
        if self.learning_rate <= 0:
            raise ValueError(f"learning_rate must be above 0, got {self.learning_rate}")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ValueError(f"beta1 and beta2 must lie in [0, 1), got {self.beta1} and {self.beta2}")
        if self.epsilon <= 0 or self.weight_decay < 0 or self.gradient_clip < 0:
            raise ValueError("epsilon must be above 0, weight_decay and gradient_clip not below 0")
        if self.warmup_steps < 0 or not 0 <= self.min_ratio <= 1:
            raise ValueError("warmup_steps must not be below 0, min_ratio must lie in [0, 1]")
        if self.token_budget < 0 or self.save_every < 0 or self.keep_last < 1:
            raise ValueError("keep_last must be at least 1, token_budget and save_every not below 0")

    def replaced(self, keys: Mapping[str, Any]) -> TrainConfig:
        """Return these settings, replaced where `keys`, of a stage or a model, has another value. A `token_budget` of 0
        in `keys` is ignored: the value of the run, which the machine's memory has decided, stays."""
        automatic = keys.get("token_budget") == 0
        changes = {key: value for key, value in keys.items() if not (automatic and key == "token_budget")}
        return msgspec.structs.replace(self, **changes)

    @property
    def tokens_at_once(self) -> int:
        """Return `token_budget`; if it is 0, the largest automatic budget (`MOST_TOKENS`)."""
        return self.token_budget or MOST_TOKENS
