"""Evaluation: every task once, honest intervals, infrastructure left out."""


from pathlib import Path

import pytest
from fates import Fates, make_stack

from sparring.errors import JudgeError, SandboxError, StoreError
from sparring.observe.statistics import wilson
from sparring.rollout.evaluate import EvalResult, evaluate, summarize
from sparring.store.sqlite import SqliteStore
from sparring.testing.clock import run_virtual
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import toy_renderer, toy_script, toy_task

TASKS = [toy_task(number, split="eval") for number in range(30)]


def run(stack, tasks=TASKS, concurrent: int = 8, **more: object) -> EvalResult:
    """The evaluation on a virtual clock."""
    return run_virtual(evaluate(stack.runner, tasks, run_seed=1, max_concurrent_rollouts=concurrent, **more))[0]


def erring() -> ScriptedEngine:
    """Wrong in four tenths of its answers."""
    return ScriptedEngine(toy_script(toy_renderer(), errors_in_ten=4), latency_s=1.0)


def test_rates_and_intervals(tmp_path: Path) -> None:
    stack = make_stack(engine=erring())
    result = run(stack)
    right = sum(result.successes.values())
    assert 5 < right < 28 and set(result.successes) == {t.id for t in TASKS}
    assert result.overall.success_rate == right / 30 == result.mean_reward
    assert result.overall.interval == wilson(right, 30) and result.by_tag["sums"] == result.overall
    assert result.mean_turns == result.mean_turns_successful == 2.0
    assert result.outcomes == {"completed/answered": 30} and result.infra_failed == 0 and result.versions == (0, 0)
    assert stack.engine.most_in_flight == 8
    assert all(r.priority == -1 for r in stack.engine.requests)


def test_the_result_does_not_depend_on_concurrency() -> None:
    assert run(make_stack(engine=erring()), concurrent=1) == run(make_stack(engine=erring()), concurrent=30)


def test_infrastructure_is_counted_and_left_out() -> None:
    stack = make_stack(Fates(score=lambda n: JudgeError("judge: 503") if n % 3 == 0 else None), retries=0)
    result = run(stack)
    assert result.infra_failed == 10 and result.overall.tasks == 20 and result.overall.success_rate == 1.0
    assert result.outcomes == {"completed/answered": 20, "judge_failed/failure": 10}


def test_nothing_scored_is_none_and_not_zero() -> None:
    result = run(make_stack(Fates(open=lambda n: SandboxError("gone")), retries=0), TASKS[:2])
    assert result.overall.success_rate is None and result.overall.interval == (0.0, 1.0)
    assert (result.mean_reward, result.mean_turns, result.versions, result.infra_failed) == (None, None, None, 2)


def test_the_record_holds_the_last_evaluation(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store.sqlite")
    seen: list[int] = []
    for _ in range(2):  # the second takes the place of the first
        stack = make_stack(engine=erring(), store=store)
        result = run(stack, store=store, stage="eval/rl", done=lambda number, finished: seen.append(number))
    groups = list(store.groups(stage="eval/rl"))
    assert [g.task.id for g in groups] == [t.id for t in TASKS] and summarize(groups) == result
    assert {r.purpose for g in groups for r in g.rollouts} == {"eval"}
    assert seen == [*range(1, 31)] * 2
    store.close()


def test_what_is_no_rollout_failure_stops_it() -> None:
    stack = make_stack(Fates(step=lambda n: StoreError("disk full") if n == 5 else None))
    with pytest.raises(StoreError, match="disk full"):
        run_virtual(evaluate(stack.runner, TASKS, run_seed=1, max_concurrent_rollouts=4))
    assert stack.fates.open_worlds == 0
