"""Metrics that a run reports, each declared once: its name, its reduction and a sentence.

`observe.metrics.merged` reads the reductions; the check of `train.best_metric` and `stop.metric` reads the names; the
tables of docs/path/observe.md show everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from typing import Literal, NamedTuple


class Metric(NamedTuple):
    """Declaration of a metric.

    Attributes:
        name: name; a star stands for any text.
        over_steps: reduction over the optimiser steps of an update.
    """

    name: str
    meaning: str
    over_steps: Literal["mean", "sum", "max"] = "mean"


TRAINED = (
    Metric("loss_*", "value of a loss term"),
    Metric("learning_rate", "learning rate of the optimiser"),
    Metric("grad_norm", "norm of the gradient, before it is clipped"),
    Metric("updated", "1 if the optimiser stepped, 0 without a gradient or with a non-finite one"),
    Metric("tokens_trained", "trained tokens", "sum"),
    Metric("tokens_forward", "tokens that the forward pass computed", "sum"),
    Metric("tokens_shared", "tokens that several rows share and that were computed once", "sum"),
    Metric("tokens_dropped", "tokens whose gradient was not finite", "sum"),
    Metric("micro_batches", "micro-batches", "sum"),
    Metric("forward_backward_s", "seconds of the gradients", "sum"),
    Metric("step_s", "seconds of the optimiser", "sum"),
    Metric("optimiser_steps", "optimiser steps of an update that has several"),
    Metric("accuracy", "share of pairs or steps that the model judges right"),
    Metric("margin", "mean margin of the pairs"),
    Metric("reward_*", "of preferences: mean implicit reward, or margin of rewards"),
    Metric("chosen_*", "the same of chosen rows"),
    Metric("rejected_*", "the same of rejected rows"),
    Metric("kto_shift", "mean log ratio of KTO's mismatched rows"),
    Metric("logprob_max_abs_diff", "largest difference of trainer and engine, over tokens of equal versions", "max"),
    Metric("logprob_stale_max_abs_diff", "the same over all other sampled tokens", "max"),
    Metric("logprob_*", "mean of that difference; share of tokens of other versions; mean log-probabilities"),
    Metric("rank/*", "seconds that a trainer's rank waited for the sum of gradients", "sum"),
)
"""Metrics of every stage that trains."""

SAMPLED = (
    Metric("rollout/reward", "mean over the rollouts of a step that stayed in their groups"),
    Metric("rollout/reward/*", "the same of a role"),
    Metric("rollout/success", "share of successes among them"),
    Metric("rollout/success/*", "the same of tasks with a tag"),
    Metric("rollout/part/*", "mean of a score's named part"),
    Metric("rollout/completed", "share of these rollouts that ended by themselves"),
    Metric("rollout/truncated", "share that a limit ended"),
    Metric("rollout/policy_failed", "share that the policy broke"),
    Metric("rollout/turns", "turns of a rollout (mean)"),
    Metric("rollout/tool_calls", "tool calls of a rollout (mean)"),
    Metric("rollout/tokens", "sampled tokens (sum of a step)"),
    Metric("rollout/tokens_mean", "sampled tokens of a rollout (mean)"),
    Metric("rollout/auxiliary_tokens", "sampled tokens in auxiliary replies, which are not trained (sum of a step)"),
    Metric("rollout/lost_tokens", "sampled tokens in lost replies, which are not trained (sum of a step)"),
    Metric("rollout/branches", "branches of a rollout (mean); 1 without forks"),
    Metric(
        "rollout/branches_of_other_tools",
        "branches with other tools than what they leave (mean): sub-agents and titles, trained",
    ),
    Metric("rollout/lag_mean", "lag of trained groups, in steps"),
    Metric("rollout/lag_max", "largest lag of a trained group, in steps"),
    Metric("rollout/groups", "groups of a step"),
    Metric("rollout/left_rate", "share of rollouts that broke for good and left their group"),
    Metric("rollout/infra_failure_rate", "share of attempts that infrastructure or judge broke"),
    Metric(
        "rollout/silent_rate",
        "share of rollouts that a limit ended before the policy's first turn: no reward, no group",
    ),
    Metric(
        "rollout/admitted_tokens_mean",
        "mean length of admitted rollouts, estimated per turn and environment (Kaplan-Meier)",
    ),
    Metric("rollout/length_bias", "mean length of what can be trained over it: 1 if no rollout is lost for its length"),
    Metric("rollout/admitted_success", "share of admitted rollouts that would have succeeded, estimated likewise"),
    Metric("rollout/success_bias", "success of what can be trained over it: above 1 if difficult tasks are lost"),
    Metric("rollout/domain_bias/*", "a domain's share of what can be trained over its share of what was admitted"),
    Metric("rollout/places", "fewest places for rollouts in flight during a step: [load](group.md#load)"),
    Metric("rollout/outages", "outages of an environment's infrastructure"),
    Metric("rollout/outage_s", "seconds of the outages that ended"),
    Metric("rollout/tasks_left_out", "tasks that cannot be rolled out"),
    Metric("rollout/rebuilt", "attempts that were brought back to where the one before broke or was stopped"),
    Metric("rollout/from_snapshot", "attempts whose box was a [fork](rollout.md#rebuilding) of the world's snapshot"),
    Metric("rollout/started_over", "rollouts that began from nothing because they could not be brought back"),
    Metric(
        "rollout/harness_failed", "rollouts whose harness raised behind a limit, or whose program's status was not 0"
    ),
    Metric("rollout/workers_lost", "attempts whose [worker](workers.md) was silent for `rollout.gateway.lease_s`"),
    Metric(
        "rollout/rewards_missing", "rollouts without [reward from outside](gateway.md#rewards-from-outside) in time"
    ),
    Metric("rollout/rewards_expired", "rewards from outside that came too late"),
    Metric("rollout/rewards_of_no_turn", "rewards from outside for lost or auxiliary replies"),
    Metric(
        "rollout/unsampled_calls", "calls of tools from outside that stand in no reply of the model and did not run"
    ),
    Metric("rollout/wall_s_mean", "wall clock of a rollout"),
    Metric("rollout/wall_s_max", "longest wall clock of a rollout"),
    Metric("rollout/world_share", "share of that time that is spent in the world"),
    Metric(
        "rollout/nothing_to_train", "share of rollouts without a trained token: they broke, or the policy has no turn"
    ),
    Metric(
        "rollout/unread_calls", "share of replies to requests with tools that hold a call's tag and no readable call"
    ),
    Metric("rollout/cut_by_context", "share of replies truncated by a full context"),
    Metric("rollout/cut_by_limit", "share of replies that another limit on tokens cut: a cut answer counts as empty"),
    Metric(
        "rollout/equal_rewards", "share of groups of equal rewards: rules that compare answers train nothing on them"
    ),
    Metric("rollout/*/reward", "with several environments: mean reward of its rollouts"),
    Metric("rollout/*/success", "the same of success"),
    Metric("rollout/*/share", "its share of what is trained"),
    Metric("rollout/*/trained_part", "the part of its own rollouts that is trained"),
    Metric("entropy", "mean entropy of the policy at trained tokens"),
    Metric("approx_kl", "estimate of the KL divergence of the update"),
    Metric("clip_fraction", "share of trained tokens that the gate stops"),
    Metric("ratio", "mean ratio of the policy to its anchor"),
    Metric("mismatch_*", "mismatch of trainer and engine: [loss](loss.md)"),
    Metric("correction_*", "weights of the correction, and what it truncates or rejects"),
    Metric("version_lag_max", "most versions between the trainer and what sampled a trained token", "max"),
    Metric("pools/*", "tasks of each pool of difficulty"),
    Metric("time/*", "shares of a step's wall clock, its seconds, tokens per second"),
    Metric("engine/*", "figures of the [engines](../cluster.md#what-a-run-says-of-its-cluster)"),
)
"""Further metrics of online stages; the metrics of models other than the policy are declared with their uses."""

HELD_OUT = (
    *("success", "success_low", "success_high", "success_error", "success/*", "turns", "tasks", "lost"),
    *("reward", "reward_low", "reward_high", "reward_error", "reward/*"),
    *("nothing_to_train", "unread_calls", "cut_by_context", "cut_by_limit"),
)
"""Figures of the evaluation during a stage, each after the prefix `<stage>/eval/`."""


@cache
def over_steps(name: str) -> Literal["mean", "sum", "max"]:
    """Return the reduction of a metric over the optimiser steps of an update. The name may have the use of a model
    other than the policy as its prefix, such as "critic/grad_norm"."""
    of_use = name.partition("/")[2]
    found = (metric for metric in (*TRAINED, *SAMPLED) if any(fnmatchcase(n, metric.name) for n in (name, of_use)))
    return next((metric.over_steps for metric in found), "mean")


def tables() -> Iterator[str]:
    """Yield the tables of docs/path/observe.md: metrics of online stages, then of all stages that train."""
    for metrics in (SAMPLED, TRAINED):
        yield "\n".join(["| metric | meaning |", "| --- | --- |", *(f"| `{m.name}` | {m.meaning} |" for m in metrics)])
