"""A golden case of the policy loss, computed by ours."""

from dataclasses import replace

import msgspec
import torch

from sparring.algo.aggregation import aggregated, denominator
from sparring.algo.config import AlgoConfig, named
from sparring.algo.loss.policy import PolicyLoss
from sparring.batch.denominators import denominators
from sparring.batch.tensors import micro_batch
from sparring.train.survey import needs_survey
from sparring.types import Sample


def config_of(case):
    return msgspec.convert(named(case["algo"]), AlgoConfig)


def samples_of(case):
    """Each row behind two tokens of context, with one between its turns."""
    found = []
    for number, row in enumerate(case["rows"]):
        ours = [False, False, *(one for length in row["turns"] for one in (*[True] * length, False))]

        def spread(values, ours=ours):
            return spread_over(ours, values)

        found.append(
            Sample(
                id=f"{row['trajectory']}#{number}",
                group="g",
                source="policy",
                tokens=tuple(range(100 * number, 100 * number + len(ours))),
                weights={"policy": tuple(map(float, ours))},
                logprobs=spread(row["behaviour"]),
                advantages=spread(row["advantage"]),
                annotations={
                    name: spread(row[of])
                    for name, of in (
                        ("proximal", "before"),
                        ("proximal_share", "share"),
                        ("reference", "reference"),
                    )
                },
            )
        )
    return aggregated(found, config_of(case).aggregation, case["max_tokens"])


def spread_over(mask, values):
    """The next of the values where the mask is set, 0.0 elsewhere."""
    column = iter(values)
    return tuple(next(column) if one else 0.0 for one in mask)


def computed(case, dtype=torch.float64, parts=None):
    """Loss, gradients per row, and metrics; `parts`: which rows make one micro-batch, all where none are said."""
    config = config_of(case)
    loss = PolicyLoss(config)
    samples = samples_of(case)
    over = denominators(samples, policy=denominator(samples, config.aggregation))
    whole, quantities = _tensors(case, samples, over, dtype)
    told = loss.survey(quantities, whole) if needs_survey(loss, samples) else {}
    total, gradients, entropies, metrics = 0.0, {}, {}, {}
    for part in parts or [range(len(samples))]:
        micro, quantities = _tensors(case, [samples[row] for row in part], over, dtype)
        there = torch.isin(whole.rows, torch.tensor(list(part)))
        micro = replace(
            micro, annotations={**micro.annotations, **{name: values[there] for name, values in told.items()}}
        )
        result = loss(quantities, micro)
        result.loss.backward()
        total += result.loss.item()
        for place, row in enumerate(part):
            for of, name in ((gradients, "logprob"), (entropies, "entropy")):
                grad = quantities[name].grad
                of[row] = (
                    [0.0] * int((micro.rows == place).sum()) if grad is None else grad[micro.rows == place].tolist()
                )
        for name, (value, count) in result.metrics.items():
            before = metrics.get(name, (0.0, 0.0))
            metrics[name] = (before[0] + value, before[1] + count)
    return total, [gradients[row] for row in sorted(gradients)], [entropies[row] for row in sorted(entropies)], metrics


def _tensors(case, samples, over, dtype):
    micro = micro_batch(samples, over, idle_tokens=True)

    def column(values):
        return torch.tensor(
            [x for row in samples for x, w in zip(values(row), row.weights["policy"], strict=True) if w], dtype=dtype
        )

    micro = replace(
        micro,
        weights={"policy": column(lambda row: row.weights["policy"])},
        behaviour_logprobs=column(lambda row: row.logprobs),
        advantages=column(lambda row: row.advantages),
        annotations={
            name: column(lambda row, name=name: row.annotations[name])
            for name in ("proximal", "proximal_share", "reference")
        },
    )
    quantities = {
        name: column(
            lambda row, name=name: spread_over(row.weights["policy"], case["rows"][row.branch][name])
        ).requires_grad_(True)
        for name in ("logprob", "entropy")
    }
    return micro, quantities
