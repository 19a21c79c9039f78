"""Seeds depend on every part, and on nothing else."""

from dataclasses import replace

from sparring.rollout.seeds import rollout_seed
from sparring.testing.toy import toy_task


def test_every_part_counts() -> None:
    task = toy_task()
    seeds = {
        rollout_seed(0, "train", task, 0),
        rollout_seed(1, "train", task, 0),
        rollout_seed(0, "eval", task, 0),
        rollout_seed(0, "train", replace(task, id="other"), 0),
        rollout_seed(0, "train", replace(task, seed=9), 0),
        rollout_seed(0, "train", task, 1),
        rollout_seed(0, "train", task, 0, "rl/0"),
        rollout_seed(0, "train", task, 0, "rl/1"),
        rollout_seed(0, "train", task, 0, "distill/1"),
    }
    assert len(seeds) == 9 and all(0 <= s < 2**64 for s in seeds)


def test_a_seed_is_the_same_in_every_process() -> None:
    task = replace(toy_task(), id="task-0", seed=7)
    assert rollout_seed(3, "train", task, 2) == rollout_seed(3, "train", replace(task, data={"x": 1}), 2)
    assert rollout_seed(3, "train", task, 2) == FROZEN
    assert rollout_seed(3, "train", task, 2, "rl/12") == FROZEN_IN_A_GROUP


FROZEN, FROZEN_IN_A_GROUP = 18237418498098754507, 11396021452465962426
"""Written down once: a change would make runs impossible to resume."""
