"""Judges: how they are asked, how they are read, and what their failures are."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from segments import answer, finished

from sparring.envs.rubrics.config import Judge, Part, Ranking
from sparring.envs.rubrics.judge import order_constraint, order_reader, reader, verdict_constraint
from sparring.envs.rubrics.judges import EngineReplies, Judges, Replies
from sparring.envs.rubrics.relative import RelativeScorer
from sparring.envs.rubrics.rubric import Rubric
from sparring.errors import BadInput, JudgeError
from sparring.generation import GenerateRequest
from sparring.protocols import Engine
from sparring.testing.clock import run_virtual
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import toy_renderer
from sparring.types import Message, Rollout, Score, Task

TASK = Task(id="t", env="e", messages=(Message(role="user", content="Say {it}."),), data={"answer": "4"})


def scripted(says: Callable[[str], str], **settings: Any) -> ScriptedEngine:
    """An engine that answers the last user's message."""
    renderer = toy_renderer()

    def script(request: GenerateRequest) -> Sequence[int]:
        asked = renderer.decode(request.tokens).rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
        return renderer.tokenizer.encode(says(asked))

    return ScriptedEngine(script, **settings)


def judges(engine: Engine) -> Judges:
    async def opened(name: str) -> Replies:
        assert name == "m"
        return EngineReplies(engine, toy_renderer(), name)

    return Judges(opened)


def part(kind: str = "judge", **given: Any) -> Any:
    defaults: dict[str, Any] = {"judge": {"prompt": "{completion}", "range": [0, 10]}}.get(kind, {})
    return msgspec.convert({"kind": kind, "model": "m", **defaults, **given}, Part)


async def score_of(asked: Judges, completion: str, **given: Any) -> Score:
    return await Rubric({"j": part(**given)}, judges=asked).score(completion, TASK)


@pytest.mark.parametrize(
    ("given", "reply", "value"),
    [
        ({"choices": {"A": 1.0, "B": 0.25}}, "B", 0.25),
        ({"choices": {"A": 1.0}}, "a", None),
        ({"choices": {"A": 1.0}}, "A.", None),
        ({"choices": {"A": 1.0}, "find": r"\[\[(\w)\]\]"}, "Not [[B]] but [[A]].", 1.0),
        ({"choices": {"A": 1.0}, "find": r"\[\[(\w)\]\]"}, "A", None),
        ({"range": [1, 5]}, "4", 0.75),
        ({"range": [1, 5]}, "4.5", 0.875),
        ({"range": [1, 5]}, "6", None),
        ({"range": [1, 5]}, "4 of 5", None),
        ({"range": [0, 1]}, "true", None),
        ({"range": [0, 1]}, "NaN", None),
        ({"range": [1, 5], "field": "score"}, '{"why": "good", "score": 5}', 1.0),
        ({"range": [1, 5], "field": "score"}, '{"score": "5"}', None),
        ({"range": [1, 5], "field": "score"}, "[5]", None),
        ({"choices": {"yes": 1.0}, "field": "ok"}, '{"ok": "yes"}', 1.0),
        ({"choices": {"yes": 1.0}, "field": "ok"}, '{"ok": {}}', None),
    ],
)
def test_a_reply_parses_as_a_verdict_or_as_none(given: dict[str, Any], reply: str, value: float | None) -> None:
    judge = msgspec.convert({"kind": "judge", "model": "m", "prompt": "{completion}", **given}, Part)
    assert isinstance(judge, Judge)
    assert reader(judge)(reply) == value


@pytest.mark.parametrize(
    ("reply", "order"),
    [("[2, 1, 3]", (1, 0, 2)), ("[1, 2]", None), ("[1, 1, 3]", None), ("[true, 2, 3]", None), ("1 2 3", None)],
)
def test_a_ranking_names_each_once(reply: str, order: tuple[int, ...] | None) -> None:
    ranking = msgspec.convert({"kind": "ranking", "model": "m", "prompt": "{answers}"}, Part)
    assert isinstance(ranking, Ranking)
    assert order_reader(ranking, 3)(reply) == order


@pytest.mark.parametrize(
    "given",
    [
        {"choices": {"A|B": 1.0, "(c)": 0.0}},
        {"choices": {"y": 1.0}, "field": "s"},
        {"range": [2, 5]},
        {"range": [2, 5], "field": "s"},
        {"range": [-0.5, 1]},
    ],
)
def test_every_reply_under_the_constraint_is_a_verdict(given: dict[str, Any]) -> None:
    """The constraint compiles for a tokenizer, and its first words lead somewhere."""
    judge = msgspec.convert({"kind": "judge", "model": "m", "prompt": "{completion}", **given}, Part)
    assert isinstance(judge, Judge)
    assert shortest_walk_is_read(verdict_constraint(judge), reader(judge))


def test_every_reply_under_a_rankings_constraint_is_a_list_of_numbers() -> None:
    ranking = msgspec.convert({"kind": "ranking", "model": "m", "prompt": "{answers}"}, Part)
    assert isinstance(ranking, Ranking)
    assert shortest_walk_is_read(order_constraint(1), order_reader(ranking, 1))


def shortest_walk_is_read(constraint: Any, read: Callable[[str], Any]) -> bool:
    """Whether the shortest walk of tokens that the constraint allows is read as a verdict."""
    from sparring.generation import Sampling

    renderer = toy_renderer()
    sampling = Sampling(stop=renderer.stop_ids, constraint=constraint)
    allowed = renderer.bind(GenerateRequest(id="r", tokens=(1,), sampling=sampling)).allowed
    assert allowed is not None
    said: list[int] = []
    for _ in range(60):
        bits = int.from_bytes(allowed(said), "little")
        if any(bits >> stop & 1 for stop in renderer.stop_ids):
            return read(renderer.decode(said)) is not None
        # a way to the end: what closes before digits, digits before blanks, of which JSON lets any number stand
        ids = [i for i in range(bits.bit_length()) if bits >> i & 1]
        said.append(min(ids, key=lambda i: (renderer.decode([i]) not in ("}", "]"), not renderer.decode([i]).strip())))
    return False


def test_the_question_is_the_prompt_filled_in_once() -> None:
    engine = scripted(lambda asked: "7")
    prompt = "Q: {prompt} A: {completion} Right: {answer}"
    score = asyncio.run(score_of(judges(engine), "{answer} is it", prompt=prompt, system="Be just."))
    assert score == Score(reward=0.7, parts={"j": 0.7}, success=False)
    text = toy_renderer().decode(engine.requests[0].tokens)
    assert "Be just." in text and "Q: Say {it}. A: {answer} is it Right: 4" in text


def test_a_prompt_with_a_name_that_no_row_has_is_refused() -> None:
    rubric = Rubric({"j": part(prompt="{completion} {solution}")}, judges=judges(scripted(str)))
    with pytest.raises(BadInput, match="env.rubric.j: prompt: expected names"):
        rubric.check(TASK)


def test_samples_differ_in_their_seeds_and_their_mean_counts() -> None:
    said = iter(["1", "2", "6"])
    engine = scripted(lambda asked: next(said))
    score = asyncio.run(score_of(judges(engine), "x", samples=3, temperature=1.0))
    assert score.reward == pytest.approx(0.3)
    assert len({request.sampling.seed for request in engine.requests}) == 3


def test_a_question_is_asked_once() -> None:
    """Also by many at once; and the seed is the question's own, so that another run asks the same."""
    engine = scripted(lambda asked: str(len(asked)), latency_s=1.0)
    asked = judges(engine)

    async def twice() -> list[Score]:
        first = await asyncio.gather(*(score_of(asked, text) for text in ("ab", "ab", "abc")))
        return [*first, await score_of(asked, "abc")]

    assert [score.reward for score in run_virtual(twice())[0]] == [0.2, 0.2, 0.3, 0.3]
    assert len(engine.requests) == 2
    metrics = asked.metrics()
    assert metrics["judge/questions"] == 4 and metrics["judge/cache_hits"] == 0.5 and metrics["judge/reply_s"] == 1.0
    assert asked.metrics() == {}
    again = scripted(lambda asked: str(len(asked)))
    asyncio.run(score_of(judges(again), "ab"))
    assert again.requests[0].sampling.seed == engine.requests[0].sampling.seed


def failing(engine: Engine, **given: Any) -> tuple[str, dict[str, float]]:
    asked = judges(engine)
    with pytest.raises(JudgeError) as failed:
        run_virtual(score_of(asked, "x", **given))
    return str(failed.value), asked.metrics()


def test_an_engine_that_fails_is_asked_again_within_a_budget() -> None:
    engine = scripted(lambda asked: "5", fail_on=(1, 2))
    assert run_virtual(score_of(judges(engine), "x"))[0].reward == 0.5
    said, metrics = failing(scripted(lambda asked: "5", fail_on=(1, 2, 3)))
    assert said.startswith("env.rubric.j: expected a verdict") and "was chosen to fail" in said
    assert metrics["judge/failures"] == 3


def test_a_late_reply_is_a_failure() -> None:
    said, metrics = failing(scripted(lambda asked: "5", latency_s=9.0), timeout_s=3.0, retries=1)
    assert "no reply after 3 s" in said and metrics["judge/failures"] == 2


def test_a_sampled_reply_without_a_verdict_is_sampled_again() -> None:
    replies = iter(["good", "5"])
    engine = scripted(lambda asked: next(replies))
    assert run_virtual(score_of(judges(engine), "x", temperature=1.0))[0].reward == 0.5
    said, metrics = failing(scripted(lambda asked: "good"), temperature=1.0)
    assert "got the reply 'good'" in said and metrics["judge/unread"] == 3
    said, metrics = failing(scripted(lambda asked: "good"))
    assert metrics["judge/unread"] == 1, "a greedy judge says the same again"
    said, _ = failing(scripted(lambda asked: "5" * 40), max_tokens=2)
    assert "got a reply that was cut short" in said


def test_a_failed_request_is_not_cached() -> None:
    asked = judges(scripted(lambda asked: "5", fail_on=(1,)))

    async def twice() -> Score:
        with pytest.raises(JudgeError):
            await score_of(asked, "x", retries=0)
        return await score_of(asked, "x", retries=0)

    assert run_virtual(twice())[0].reward == 0.5


# ---- relative to the group ----

PAIR = {"kind": "pairwise", "prompt": "{first} or {second}?", "choices": {"first": 1.0, "second": 0.0, "tie": 0.5}}
RANK = {"kind": "ranking", "prompt": "Rank:\n{answers}"}


def rollout(index: int, text: str) -> Rollout:
    trajectory = finished(answer(text), id=f"r/{index}")
    return Rollout(id=f"r/{index}", task=TASK, index=index, attempt=0, purpose="train", trajectories=(trajectory,))


def group_scores(
    engine: Engine, parts: dict[str, Any], texts: Sequence[str], gated: Collection[int] = ()
) -> list[Score]:
    """The group's scores. Each has 0.5 by itself, and those of `gated` a closed gate."""
    gate = {"kind": "regex", "pattern": "x", "gate": 1.0, "weight": 0.0}
    rubric = Rubric(msgspec.convert({"g": gate} | parts, dict[str, Part]), judges=judges(engine))
    scorer = RelativeScorer.of(rubric)
    assert scorer is not None
    scores = [Score(reward=0.0 if i in gated else 0.5, parts={"g": float(i not in gated)}) for i in range(len(texts))]
    return list(run_virtual(scorer.score(TASK, [rollout(i, text) for i, text in enumerate(texts)], scores))[0])


def prefer_longer(asked: str) -> str:
    """Prefers the longer answer."""
    first, second = asked.removesuffix("?").split(" or ")
    return "first" if len(first) > len(second) else "second"


def test_pairs_are_compared_in_both_orders() -> None:
    engine = scripted(prefer_longer)
    scores = group_scores(engine, {"p": {"model": "m", "weight": 2.0, **PAIR}}, ["a", "bbb", "cc"])
    assert [score.reward for score in scores] == [0.5, 2.5, 1.5]
    assert [score.parts for score in scores] == [{"g": 1, "p": 0}, {"g": 1, "p": 1}, {"g": 1, "p": 0.5}]
    assert len(engine.requests) == 6


def test_a_judge_that_prefers_a_position_has_no_effect() -> None:
    scores = group_scores(scripted(lambda asked: "first"), {"p": {"model": "m", **PAIR}}, ["a", "bbb", "cc"])
    assert [score.parts["p"] for score in scores] == [0.5, 0.5, 0.5]


def test_equal_answers_tie_without_a_request() -> None:
    engine = scripted(prefer_longer)
    scores = group_scores(engine, {"p": {"model": "m", **PAIR}}, ["a", "bbb", "a"])
    assert [score.parts["p"] for score in scores] == [0.25, 1.0, 0.25]
    assert len(engine.requests) == 2


def test_empty_and_gated_answers_lose_without_a_request() -> None:
    engine = scripted(prefer_longer)
    scores = group_scores(engine, {"p": {"model": "m", **PAIR}}, ["a", "", "ccc", "dddd"], gated=(3,))
    assert [score.parts["p"] for score in scores] == [pytest.approx(2 / 3), 0, 1, 0]
    assert [score.reward for score in scores] == [pytest.approx(0.5 + 2 / 3), 0.5, 1.5, 0]
    assert len(engine.requests) == 2


def test_the_number_of_opponents_is_limited() -> None:
    engine = scripted(prefer_longer)
    scores = group_scores(engine, {"p": {"model": "m", "opponents": 1, **PAIR}}, ["a", "bb", "ccc", "dddd"])
    assert [score.parts["p"] for score in scores] == [0, 0.5, 0.5, 1], "a ring: 4 pairs, 8 questions"
    assert len(engine.requests) == 8


def ranks(asked: str, key: Callable[[str], Any] = len) -> str:
    answers = re.findall(r"\[(\d+)\]\n(\w+)", asked)
    return json.dumps([int(number) for number, _ in sorted(answers, key=lambda each: key(each[1]), reverse=True)])


def test_a_ranking_is_asked_in_an_order_and_in_its_reverse() -> None:
    engine = scripted(ranks)
    scores = group_scores(engine, {"r": {"model": "m", **RANK}}, ["a", "bbb", "cc"])
    assert [score.parts["r"] for score in scores] == [0, 1, 0.5]
    assert len(engine.requests) == 2
    placed = group_scores(
        scripted(lambda asked: ranks(asked, key=lambda text: 0)), {"r": {"model": "m", **RANK}}, ["a", "bbb", "cc"]
    )
    assert [score.parts["r"] for score in placed] == [0.5, 0.5, 0.5], "the order in which they are shown tells nothing"


def test_a_group_of_one_is_unchanged() -> None:
    engine = scripted(prefer_longer)
    assert group_scores(engine, {"p": {"model": "m", **PAIR}}, ["a"]) == [Score(reward=0.5, parts={"g": 1.0})]
    assert not engine.requests


def test_a_rubric_of_relative_parts_gives_no_score_of_its_own() -> None:
    parts = {"p": part(**{"model": "m", **PAIR})}
    score = asyncio.run(Rubric(parts, judges=judges(scripted(prefer_longer))).score("a", TASK))
    assert score.reward is None and replace(score, reward=0.0) == Score(reward=0.0)


def test_a_comparison_without_verdict_is_the_judges_failure() -> None:
    with pytest.raises(JudgeError, match="env.rubric.p: expected a verdict .*'neither'"):
        group_scores(scripted(lambda asked: "neither"), {"p": {"model": "m", **PAIR}}, ["a", "bb"])
