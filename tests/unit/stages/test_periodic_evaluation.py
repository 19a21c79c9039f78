"""The metrics of an evaluation beside training."""

from sparring.observe.evaluation import Evaluation, Lost, TaskResult, mean_reward, success_rate
from sparring.stages.runtime.periodic_evaluation import figures


def test_what_is_known_becomes_a_metric() -> None:
    tasks = {
        f"t{n}": TaskResult(digest="", tag="sums", rewards=(float(n % 2),), solved=(n % 2 == 1,)) for n in range(8)
    }
    results = list(tasks.values())
    found = figures(
        Evaluation(
            success=success_rate(results),
            reward=mean_reward(results),
            by_tag={"sums": success_rate(results)},
            lost=(Lost(rollout="rl/eval/4/8", task="t8", failure="SandboxError: gone"),),
            mean_turns=2.5,
            versions=(4, 7),
            shortfalls={"unread_calls": 0.25},
            tasks=tasks,
        )
    )
    assert found["success"] == found["reward"] == found["success/sums"] == 0.5
    assert 0.2 < found["success_low"] < 0.5 < found["success_high"] < 0.8
    assert (found["turns"], found["tasks"], found["lost"], found["unread_calls"]) == (2.5, 8.0, 1.0, 0.25)
    assert (found["version_low"], found["version_high"]) == (4.0, 7.0)


def test_what_is_not_known_is_left_out() -> None:
    found = figures(Evaluation(success=success_rate([]), reward=mean_reward([])))
    assert found == {"tasks": 0.0, "lost": 0.0}
