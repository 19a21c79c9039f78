"""What the viewer says about a token is what was recorded and what was trained."""

from pathlib import Path

from stored import groups_of

from sparring.algo.config import AlgoConfig
from sparring.algo.credit.grpo import Grpo
from sparring.algo.pipeline import load_credit
from sparring.dashboard.rollouts import group_advantages, group_entries


def test_advantages_stand_on_sampled_tokens_only(sample_run: Path) -> None:
    mixed = next(g for g in groups_of(sample_run) if len({s.reward for s in g.scores}) == 2)
    advantages = group_advantages(mixed, load_credit(AlgoConfig(credit=Grpo(normalise=False)), seed=0))
    mean = sum(s.reward for s in mixed.scores) / 4
    for rollout, score in zip(mixed.rollouts, mixed.scores, strict=True):
        [trajectory] = rollout.trajectories
        for segment in trajectory.segments:
            values = advantages.get((trajectory.id, segment.index))
            assert values == ([score.reward - mean] * len(segment.tokens) if segment.is_turn else None)


def test_a_group_without_variance_has_none(sample_run: Path) -> None:
    same = next(g for g in groups_of(sample_run) if len({s.reward for s in g.scores}) == 1)
    assert group_advantages(same, load_credit(AlgoConfig(zero_variance_filter=True), seed=0)) == {}
    unfiltered = group_advantages(same, load_credit(AlgoConfig(), seed=0))
    assert unfiltered and not any(any(of) for of in unfiltered.values())


def test_entries_are_the_best_the_worst_and_the_failed(sample_run: Path) -> None:
    group = next(g for g in groups_of(sample_run) if g.failed and len({s.reward for s in g.scores}) == 2)
    worst, best, failed = group_entries(group, ["first"], "rl", {})
    assert (worst["reward"], best["reward"], failed["reward"]) == (0.0, 1.0, None)
    assert failed["failure"]["error"] == "SandboxError" and failed["outcome"] == "infra_failed"
    assert best["of"] == 5 and best["picks"] == ["first"]
    recorded = {r.id: r for r in group.rollouts}[best["id"]].trajectories[0].segments
    for shown, segment in zip(best["segments"], recorded, strict=True):
        assert shown["tokens"] == list(segment.tokens)
        assert shown["label"] == (segment.label if segment.model else None)
        assert (shown["logprobs"] is None) == (segment.logprobs is None)
        if segment.versions:
            assert [v for n, v in shown["versions"] for _ in range(n)] == segment.versions.expand()
    told, title = best["segments"][-2:]
    assert (told["fork"], told["quotes"]) == ({"reason": "auxiliary", "of": None, "agent": "titles"}, [4])
    assert (title["label"], title["fork"], title["parent"]) == ("auxiliary", None, told["index"])
