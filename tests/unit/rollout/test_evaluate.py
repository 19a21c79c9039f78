"""Evaluation: every sample of every task once, honest intervals, infrastructure left out, nothing run twice."""

import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from fates import Fates, make_stack
from refusals import refused_at

from sparring.errors import JudgeError, SandboxError, StoreError
from sparring.observe.evaluation import Evaluation
from sparring.observe.metrics import Metrics
from sparring.observe.statistics import wilson
from sparring.rollout.evaluate import EvalPlan, ScoredRunner, evaluate, recorded, summarize
from sparring.rollout.metrics import measure
from sparring.rollout.seeds import rollout_seed
from sparring.store.sqlite import SqliteStore
from sparring.testing.clock import run_virtual
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import toy_renderer, toy_script, toy_task
from sparring.types import Rollout, Score, Task

TASKS = [toy_task(number, split="eval") for number in range(30)]


def run(
    stack, tasks=TASKS, concurrent: int = 8, samples: int = 1, ks=(), stage: str = "eval", **more: object
) -> Evaluation:
    """The evaluation on a virtual clock."""
    plan = EvalPlan(tasks=tasks, run_seed=1, samples=samples, stage=stage, max_context=512)
    return summarize(plan, run_virtual(evaluate(stack.runner, plan, max_concurrent_rollouts=concurrent, **more))[0], ks)


def erring() -> ScriptedEngine:
    """Wrong in four tenths of its answers."""
    return ScriptedEngine(toy_script(toy_renderer(), errors_in_ten=4), latency_s=1.0)


def test_rates_and_intervals() -> None:
    stack = make_stack(engine=erring())
    result = run(stack)
    right = sum(task.solved[0] for task in result.tasks.values())
    assert 5 < right < 28 and list(result.tasks) == [t.id for t in TASKS]
    assert result.success.value == pytest.approx(right / 30) and result.reward.value == result.success.value
    assert result.success.interval == pytest.approx(wilson(right, 30)) and result.by_tag["sums"] == result.success
    assert result.mean_turns == result.mean_turns_successful == 2.0
    assert result.outcomes == {"completed/answered": 30} and result.lost == () and result.versions == (0, 0)
    assert stack.engine.most_in_flight == 8
    assert {(r.priority, r.admission) for r in stack.engine.requests} == {(0, 0)}


def test_samples_of_a_task_have_seeds_of_their_own_and_more_samples_contain_fewer() -> None:
    one, four = run(make_stack(engine=erring())), run(make_stack(engine=erring()), samples=4, ks=(1, 4))
    assert [t.solved[:1] for t in four.tasks.values()] == [t.solved for t in one.tasks.values()]
    assert four.rollouts == 120 and {len(t.solved) for t in four.tasks.values()} == {4}
    assert any(0 < sum(t.solved) < 4 for t in four.tasks.values())
    assert four.pass_at["1"] == four.pass_hat["1"] == four.success
    counts = [sum(t.solved) for t in four.tasks.values()]
    assert four.pass_at["4"].value == pytest.approx(sum(c > 0 for c in counts) / 30)
    assert four.pass_hat["4"].value == pytest.approx(sum(c == 4 for c in counts) / 30)


def test_the_result_does_not_depend_on_concurrency() -> None:
    assert run(make_stack(engine=erring()), concurrent=1) == run(make_stack(engine=erring()), concurrent=30)


def test_infrastructure_is_counted_named_and_left_out() -> None:
    stack = make_stack(Fates(score=lambda n: JudgeError("judge: 503") if n % 3 == 0 else None), rebuilds=0)
    result = run(stack)
    assert len(result.lost) == 10 and result.success.tasks == 20 and result.success.value == 1.0
    assert {lost.failure for lost in result.lost} == {"JudgeError: judge: 503"} and result.lost_share == pytest.approx(
        1 / 3
    )
    assert result.outcomes == {"completed/answered": 20, "judge_failed/failure": 10}
    assert result.shortfalls == {
        "nothing_to_train": 1 / 3,
        "unread_calls": 0.0,
        "cut_by_limit": 0.0,
        "cut_by_context": 0.0,
    }


def test_an_evaluation_has_the_shares_that_training_has_from_its_record_too(tmp_path: Path) -> None:
    """Of replies that are half a call and end with the context: what `measure` says of the same groups."""
    renderer = toy_renderer()
    half = ScriptedEngine(lambda request: renderer.tokenizer.encode("I look. <tool_call>{" * 500))
    with closing(SqliteStore(tmp_path / "store.sqlite")) as store:
        plan = EvalPlan(tasks=TASKS[:4], run_seed=1, max_context=10)
        found = run_virtual(evaluate(make_stack(engine=half).runner, plan, max_concurrent_rollouts=2, store=store))[0]
        assert recorded(plan, store) == found
        metrics = Metrics()
        for group in store.groups(stage="eval"):
            measure(metrics, group, lag=0, max_context=10)
    values = metrics.take()
    shares = summarize(plan, found).shortfalls
    assert shares == {name: values[f"rollout/{name}"] for name in shares}
    assert shares == {"nothing_to_train": 0.0, "unread_calls": 1.0, "cut_by_limit": 0.0, "cut_by_context": 1.0}


def test_a_task_that_lost_a_sample_counts_by_the_others() -> None:
    stack = make_stack(Fates(score=lambda n: JudgeError("judge: 503") if n == 0 else None), rebuilds=0)
    result = run(stack, TASKS[:3], concurrent=1, samples=2, ks=(2,))
    assert [len(t.solved) for t in result.tasks.values()] == [1, 2, 2]
    assert result.success.tasks == 3 and result.pass_at["2"].tasks == 2 and len(result.lost) == 1


def test_nothing_scored_is_none_and_not_zero() -> None:
    result = run(make_stack(Fates(open=lambda n: SandboxError("gone")), rebuilds=0), TASKS[:2])
    assert result.success.value is None and result.success.interval is None
    assert (result.reward.value, result.mean_turns, result.versions, result.lost_share) == (None, None, None, 1.0)


def test_what_is_recorded_is_not_run_again(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store.sqlite")
    whole = run(make_stack(engine=erring()), samples=3)
    dying = make_stack(Fates(step=lambda n: StoreError("disk full") if n == 41 else None), engine=erring(), store=store)
    with pytest.raises(StoreError, match="disk full"):
        run(dying, samples=3, store=store)
    plan = EvalPlan(tasks=TASKS, run_seed=1, samples=3)
    known = recorded(plan, store)
    assert 10 < len(known) < 30
    again = make_stack(engine=erring(), store=store)
    seen: list[int] = []
    result = run(again, samples=3, store=store, done=lambda number, finding: seen.append(number))
    assert result == whole and seen == list(range(len(known) + 1, 91))
    seeds = {r.sampling.seed for r in again.engine.requests}
    assert not seeds & {rollout_seed(1, "eval", TASKS[n % 30], n // 30) for n in known}
    third = make_stack(engine=erring(), store=store)
    assert run(third, samples=3, store=store) == whole and third.engine.requests == []
    assert {g.rollouts[0].purpose for g in store.groups(stage="eval")} == {"eval"}
    store.close()


def test_what_infrastructure_broke_is_run_again(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store.sqlite")
    broken = make_stack(
        Fates(score=lambda n: JudgeError("judge: 503") if n % 3 == 0 else None), store=store, rebuilds=0
    )
    assert len(run(broken, store=store).lost) == 10
    stack = make_stack(store=store)
    result = run(stack, store=store)
    assert result.lost == () and result.success.tasks == 30 and len(stack.engine.requests) == 2 * 10
    assert [g.index for g in store.groups(stage="eval")] == list(range(30))
    store.close()


def test_a_record_of_other_tasks_is_refused(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "store.sqlite")
    run(make_stack(store=store), TASKS[:3], store=store)
    with refused_at("recorded rollout eval/0", "eval-1"):
        run(make_stack(store=store), TASKS[1:4], store=store)
    store.close()


def test_what_is_no_rollout_failure_stops_it() -> None:
    stack = make_stack(Fates(step=lambda n: StoreError("disk full") if n == 5 else None))
    with pytest.raises(StoreError, match="disk full"):
        run(stack, concurrent=4)
    assert stack.fates.open_worlds == 0


class Longer:
    """A scorer of groups: half a point for each model turn. Some tasks it cannot score."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    async def score(self, task: Task, rollouts: Sequence[Rollout], scores: Sequence[Score]) -> Sequence[Score]:
        """More for more turns."""
        self.sizes.append(len(rollouts))
        if task.id == "eval-3":
            raise OSError("no answer")
        turns = [rollout.trajectories[0].usage.turns for rollout in rollouts]
        return [replace(score, reward=(score.reward or 0.0) + n / 2) for score, n in zip(scores, turns, strict=True)]


def test_what_scores_groups_in_training_scores_each_rollout_alone() -> None:
    stack, scorer = make_stack(), Longer()
    plan = EvalPlan(tasks=TASKS[:5], run_seed=1, samples=2)
    runner = ScoredRunner(stack.runner, [scorer, scorer])
    result = summarize(plan, run_virtual(evaluate(runner, plan, max_concurrent_rollouts=4))[0])
    assert set(scorer.sizes) == {1} and len(scorer.sizes) == 2 * 8 + 4 * 2  # and asked four times where it fails
    assert result.reward.value == 3.0 and result.success.value == 1.0 and result.reward.tasks == 4
    (lost,) = {(lost.task, lost.failure) for lost in result.lost}
    assert lost[0] == "eval-3"
    assert re.fullmatch(r"JudgeError: scorer Longer: OSError: no answer \(test_evaluate\.py:\d+, in score\)", lost[1])
