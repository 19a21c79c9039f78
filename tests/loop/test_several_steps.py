"""Updates of several optimiser steps, with a ratio of sequences, a penalty for leaving the start and an entropy
bonus."""

from __future__ import annotations

SETTINGS = ["observe.progress=off", "rl.minibatches=2", "rl.passes=2"]
SETTINGS += ["algo.correction=tis", "algo.ratio=sequence", "algo.kl.coefficient=0.1", "algo.entropy_bonus=0.001"]


def test_they_end_with_the_same_bits_after_a_resume(whole_and_resumed) -> None:
    (whole, resumed), metrics = whole_and_resumed(SETTINGS, ("model",), steps=3)
    assert whole == resumed
    assert len(metrics) == 3 and all(values["optimiser_steps"] == 4 for values in metrics)
    for values in metrics:
        # only the first of the four steps has the weights that sampled; there the two agree to the bit, and the others
        # do not
        assert (values["logprob_max_abs_diff"], values["logprob_stale_share"]) == (0.0, 0.75)
        assert values["logprob_stale_max_abs_diff"] > 0 and values["ratio"] != 1.0
        assert values["correction_weight"] == 1.0, "to the proximal log-probabilities, which are those of the engine"
    assert metrics[0]["reference_kl"] < metrics[-1]["reference_kl"]
    account = whole[0]["account"]
    assert sum(values["tokens_trained"] for values in metrics) == 2 * (account["trained"] + account["zero_advantage"])
