"""GRPO from scored groups to gradients, against a reference in plain NumPy and float64.

The policy is a table of logits [V, V]: the distribution of a token given the one before it. That is all a causal model
is to credit and loss, and its gradient can be written by hand.
"""

import itertools

import numpy as np
import pytest
import torch

from sparring.algo.config import AlgoConfig
from sparring.algo.credit.grpo import Grpo
from sparring.algo.loss.policy import PolicyLoss
from sparring.algo.pipeline import load_credit
from sparring.batch.batches import assemble
from sparring.batch.flatten import flatten
from sparring.batch.packing import pack
from sparring.batch.tensors import micro_batch
from sparring.generation import Runs, Sampling
from sparring.types import Group, Outcome, Rollout, Score, Segment, Task, Trajectory

VOCABULARY = 7
TEMPERATURE = 0.8
TASK = Task(id="t", env="e", messages=())


def log_softmax(logits):
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def make_groups(generator, behaviour):
    """Three groups of four rollouts of two turns each, sampled by the table `behaviour`; the last group has no
    variance."""
    logprobs = log_softmax(behaviour / TEMPERATURE)
    groups = []
    for number in range(3):
        rollouts, scores = [], []
        for index in range(4):
            segments, last = [], None
            for turn in range(2):
                given = tuple(generator.integers(0, VOCABULARY, generator.integers(1, 4)).tolist())
                segments.append(
                    Segment(index=2 * turn, parent=2 * turn - 1 if turn else None, source="tool", tokens=given)
                )
                last, tokens = given[-1], []
                for _ in range(generator.integers(1, 7)):
                    tokens.append(int(generator.integers(0, VOCABULARY)))
                path = [last, *tokens]
                segments.append(
                    Segment(
                        index=2 * turn + 1,
                        parent=2 * turn,
                        source="policy",
                        tokens=tuple(tokens),
                        model="policy",
                        logprobs=tuple(float(logprobs[a, b]) for a, b in itertools.pairwise(path)),
                        versions=Runs.of(0, len(tokens)),
                        sampling=Sampling(temperature=TEMPERATURE),
                    )
                )
            outcome = Outcome(kind="completed", reason="answered")
            name = f"{number}-{index}"
            trajectory = Trajectory(id=name, task="t", role="policy", segments=tuple(segments), outcome=outcome)
            rollouts.append(
                Rollout(id=name, task=TASK, index=index, attempt=0, purpose="train", trajectories=(trajectory,))
            )
            scores.append(Score(reward=1.0 if number == 2 else float(generator.integers(0, 4)) + index))
        groups.append(Group(id=str(number), index=number, task=TASK, rollouts=tuple(rollouts), scores=tuple(scores)))
    return groups


def reference(groups, table, behaviour, *, advantage, aggregation, low, high, filtered):
    """Loss and gradient [V, V] written from the papers' equations, without any of our code."""
    new, old = log_softmax(table / TEMPERATURE), log_softmax(behaviour / TEMPERATURE)
    sequences = []
    for group in groups:
        rewards = np.array([score.reward for score in group.scores])
        if filtered and np.ptp(rewards) == 0:
            continue
        values = rewards - rewards.mean()
        if advantage == "standard":
            values = values / (rewards.std(ddof=1) + 1e-6)
        for rollout, value in zip(group.rollouts, values, strict=True):
            path, mask = [], []
            for segment in rollout.trajectories[0].segments:
                path += segment.tokens
                mask += [segment.model is not None] * len(segment.tokens)
            sequences.append(([(path[t - 1], path[t]) for t in range(1, len(path)) if mask[t]], value))
    num_tokens = sum(len(pairs) for pairs, _ in sequences)
    loss, gradient = 0.0, np.zeros_like(table)
    for pairs, value in sequences:
        share = 1 / num_tokens if aggregation == "token_mean" else 1 / (len(sequences) * len(pairs))
        for before, token in pairs:
            ratio = np.exp(new[before, token] - old[before, token])
            loss -= share * min(ratio * value, np.clip(ratio, 1 - low, 1 + high) * value)
            if (value > 0 and ratio > 1 + high) or (value < 0 and ratio < 1 - low):
                continue
            slope = -np.exp(new[before])
            slope[token] += 1
            gradient[before] -= share * value * ratio * slope / TEMPERATURE
    return loss, gradient


def ours(groups, table, config, token_budget):
    """The same through flatten, credit, batch, packing, micro-batches and loss."""
    samples = [row for group in groups for row in flatten(group, "policy")]
    [batch] = assemble(groups, samples, credit=load_credit(config, seed=0), model="policy", step=1)
    parameter = torch.tensor(table, requires_grad=True)
    loss = 0.0
    for rows in pack(batch.rows, token_budget):
        micro = micro_batch(rows, batch.denominators)
        logprobs = (parameter[micro.tokens][micro.predicting] / micro.temperature[:, None]).log_softmax(-1)
        chosen = logprobs.gather(1, micro.targets[:, None])[:, 0]
        result = PolicyLoss(config)({"logprob": chosen, "entropy": -(logprobs.exp() * logprobs).sum(-1)}, micro)
        result.loss.backward()
        loss += result.loss.item()
    return loss, parameter.grad.numpy()


@pytest.mark.parametrize("advantage", ["standard", "unnormalised"])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("filtered", [True, False])
@pytest.mark.parametrize("token_budget", [1, 40, 10_000])
def test_loss_and_gradient_equal_the_reference(advantage, aggregation, filtered, token_budget):
    generator = np.random.default_rng(3)
    behaviour = generator.normal(size=(VOCABULARY, VOCABULARY))
    table = behaviour + 0.3 * generator.normal(size=behaviour.shape)
    groups = make_groups(generator, behaviour)
    config = AlgoConfig(
        credit=Grpo(normalise=advantage == "standard"), aggregation=aggregation, zero_variance_filter=filtered
    )
    options = {"advantage": advantage, "aggregation": aggregation, "filtered": filtered, "low": 0.2, "high": 0.28}
    expected_loss, expected = reference(groups, table, behaviour, **options)
    loss, gradient = ours(groups, table, config, token_budget)
    assert loss == pytest.approx(expected_loss, abs=1e-6)
    np.testing.assert_allclose(gradient, expected, atol=1e-6)
    unclipped = reference(groups, table, behaviour, **{**options, "low": 1.0, "high": 1e9})[1]
    assert np.abs(unclipped - expected).max() > 1e-3, "the example must reach the clip range"


def test_the_reference_gradient_is_the_derivative_of_its_loss():
    generator = np.random.default_rng(4)
    behaviour = generator.normal(size=(VOCABULARY, VOCABULARY))
    table = behaviour + 0.3 * generator.normal(size=behaviour.shape)
    groups = make_groups(generator, behaviour)
    options = {"advantage": "standard", "aggregation": "token_mean", "filtered": True, "low": 0.2, "high": 0.28}
    gradient = reference(groups, table, behaviour, **options)[1]
    direction = generator.normal(size=table.shape)
    step = 1e-6 * direction
    rise = (
        reference(groups, table + step, behaviour, **options)[0]
        - reference(groups, table - step, behaviour, **options)[0]
    )
    assert rise / 2e-6 == pytest.approx((gradient * direction).sum(), abs=1e-6)
