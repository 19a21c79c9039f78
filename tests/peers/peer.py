"""What verl makes of advantages, losses and penalties. Run with the peer's own Python.

    .venv-peers/bin/python tests/peers/peer.py

For each line of JSON on its standard input it answers with one on its standard output. {"ask": NAME, ...} calls the
function of that name below with what else the line says. Numbers are float64 both ways.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
import textwrap
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.workers.config import ActorConfig

MATRICES = (
    "token_level_rewards",
    "response_mask",
    "values",
    "old_log_probs",
    "sum_pi_squared",
    "reward_baselines",
)


def names() -> dict[str, list[str]]:
    """Everything that verl calls by a name, by kind."""
    return {
        "estimators": sorted(core_algos.ADV_ESTIMATOR_REGISTRY),
        "losses": sorted(core_algos.POLICY_LOSS_REGISTRY),
        "aggregations": sorted(_compared_with(core_algos.agg_loss, "loss_agg_mode")),
        "penalties": sorted(_compared_with(core_algos.kl_penalty_forward, "kl_penalty")),
        "weights": sorted(_compared_with(rollout_corr_helper.compute_rollout_correction_weights, "rollout_is")),
        "rejections": sorted(rollout_corr_helper.SUPPORTED_ROLLOUT_RS_OPTIONS),
    }


def estimator(
    name: str, given: dict[str, Any], config: dict[str, Any] | None = None, **settings: Any
) -> dict[str, Any]:
    """Advantages and returns [B, T] of an estimator."""
    arguments = {key: _matrix(value) if key in MATRICES else value for key, value in given.items()}
    if "index" in given:
        arguments["index"] = np.array(given["index"], dtype=object)
    if "parts" in given:
        arguments["non_tensor_batch"] = {key: np.array(values) for key, values in arguments.pop("parts").items()}
        mask = arguments["response_mask"]
        arguments["batch"] = {
            "prompts": torch.zeros(len(mask), 1),
            "attention_mask": torch.cat([mask[:, :1], mask], 1).long(),
        }
    if config is not None:
        arguments["config"] = AlgoConfig(**config)
    accepted = inspect.signature(core_algos.ADV_ESTIMATOR_REGISTRY[name]).parameters
    arguments = {key: value for key, value in arguments.items() if key in accepted}
    advantages, returns = core_algos.ADV_ESTIMATOR_REGISTRY[name](**arguments, **settings)
    return {"advantages": advantages.tolist(), "returns": returns.tolist()}


def loss(name: str, rows: dict[str, Any], mode: str, config: dict[str, Any]) -> dict[str, Any]:
    """A policy loss and its derivative by each log-probability [B, T]."""
    now = _matrix(rows["log_prob"]).requires_grad_(True)
    old, advantages, mask = (_matrix(rows[key]) for key in ("old_log_prob", "advantages", "response_mask"))
    actor = {"strategy": "fsdp", "rollout_n": 1, "use_dynamic_bsz": True}
    found, _ = core_algos.POLICY_LOSS_REGISTRY[name](
        old_log_prob=old,
        log_prob=now,
        advantages=advantages,
        response_mask=mask,
        loss_agg_mode=mode,
        config=ActorConfig(**actor, **{key: _part(key, value) for key, value in config.items()}),
    )
    found.backward()
    return {"loss": found.item(), "gradient": now.grad.tolist()}


def aggregation(name: str, values: list[list[float]], mask: list[list[float]], **settings: Any) -> dict[str, Any]:
    """What a matrix of losses is together, and its derivative by each."""
    matrix = _matrix(values).requires_grad_(True)
    found = core_algos.agg_loss(loss_mat=matrix, loss_mask=_matrix(mask), loss_agg_mode=name, **settings)
    found.backward()
    return {"loss": found.item(), "gradient": matrix.grad.tolist()}


def penalty(name: str, now: list[float], reference: list[float]) -> dict[str, Any]:
    """An estimate of the divergence per token, and its derivative by the log-probability."""
    own = torch.tensor(now, dtype=torch.float64, requires_grad=True)
    found = core_algos.kl_penalty(own, torch.tensor(reference, dtype=torch.float64), name)
    found.sum().backward()
    return {"values": found.tolist(), "gradient": own.grad.tolist()}


def reward(earned: list[float], now: list[float], reference: list[float], coefficient: float) -> dict[str, Any]:
    """Rewards per token less what leaving the reference costs."""
    columns = (torch.tensor(of, dtype=torch.float64) for of in (earned, now, reference))
    return {"values": core_algos.compute_rewards(*columns, coefficient).tolist()}


def controller(coefficient: float, target: float, horizon: int, divergences: list[float], steps: int) -> dict[str, Any]:
    """The coefficients of an adaptive penalty, one behind each divergence."""
    adaptive, found = core_algos.AdaptiveKLController(coefficient, target, horizon), []
    for divergence in divergences:
        adaptive.update(divergence, steps)
        found.append(float(adaptive.value))
    return {"coefficients": found}


def value(
    said: list[list[float]], target: list[list[float]], old: list[list[float]], mask: list[list[float]], clip: float
) -> Any:
    """A critic's loss and its derivative by each value."""
    now = _matrix(said).requires_grad_(True)
    found, clipped = core_algos.compute_value_loss(now, _matrix(target), _matrix(old), _matrix(mask), clip)
    found.backward()
    return {"loss": found.item(), "gradient": now.grad.tolist(), "clipped": float(clipped)}


def correction(
    old: list[list[float]], behaviour: list[list[float]], mask: list[list[float]], **settings: Any
) -> dict[str, Any]:
    """Importance weights and the mask that rejection leaves, each [B, T]."""
    weights, kept, _ = rollout_corr_helper.compute_rollout_correction_and_rejection_mask(
        old_log_prob=_matrix(old), rollout_log_prob=_matrix(behaviour), response_mask=_matrix(mask), **settings
    )
    return {"weights": weights.batch["rollout_is_weights"].tolist() if weights else None, "kept": kept.tolist()}


def _matrix(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _part(key: str, settings: Any) -> Any:
    """A setting of the actor; `policy_loss` is a structure of its own."""
    if key != "policy_loss":
        return settings
    kind = type(ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True).policy_loss)
    return kind(**settings)


def _compared_with(function: Callable[..., Any], argument: str) -> set[str]:
    """The texts that a function compares one of its arguments with: the names that it knows."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    compared = [node for node in ast.walk(tree) if isinstance(node, ast.Compare) and argument in ast.dump(node.left)]
    constants = (
        one for node in compared for side in node.comparators for one in ast.walk(side) if isinstance(one, ast.Constant)
    )
    return {one.value for one in constants if isinstance(one.value, str)}


ASKED: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (names, estimator, loss, aggregation, penalty, reward, controller, value, correction)
}


def main() -> None:
    """Answer until the input ends."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # what verl prints is no answer
    for line in sys.stdin:
        question = json.loads(line)
        try:
            answer = ASKED[question.pop("ask")](**question)
        except Exception:  # one question that verl cannot answer leaves the others
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
