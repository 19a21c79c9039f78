"""Teachers are chosen by domain, asked for the tokens that were sampled, and asked again when they fail."""

import asyncio
from dataclasses import dataclass, field

import pytest

from sparring.algo.annotate.provenance import SampleProvenance
from sparring.algo.annotate.teacher import ScoreClient, TeacherInput, TeacherRows
from sparring.errors import BadInput, EngineError, RequestRefused
from sparring.generation import ScoreRequest, Scores
from sparring.types import Group, Sample, Task


@dataclass
class Judge:
    """An engine that can only judge: a token's log-probability is minus its place, after so many failures."""

    failures: int = 0
    error: type[Exception] = EngineError
    asked: list[ScoreRequest] = field(default_factory=list)
    under_way: int = 0
    most: int = 0

    async def score(self, request):
        self.asked.append(request)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0)
        self.under_way -= 1
        if len(self.asked) <= self.failures:
            raise self.error("gone")
        places = range(request.first, len(request.tokens))
        tops = tuple(tuple(range(request.top_k)) for _ in places)
        return Scores(
            logprobs=tuple(-float(place) for place in places),
            entropies=(0.0,) * len(places),
            top_ids=tops,
            top_logprobs=tuple(tuple(-1.0 - id for id in ids) for ids in tops),
            version=0,
        )


def group(name, *, tag="", env="world"):
    return Group(id=name, index=0, task=Task(id=f"task-{name}", env=env, messages=(), tag=tag), rollouts=(), scores=())


def row(name, weights=(0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0)):
    logprobs = tuple(-0.5 * weight for weight in weights)
    return Sample(
        id=f"{name}/0#0",
        group=name,
        source="policy",
        tokens=tuple(range(10, 10 + len(weights))),
        weights={"policy": weights},
        logprobs=logprobs,
        temperature=0.7,
    )


def annotated(rows, groups, teachers, engines, *, asker=None, **options):
    async def source():
        for each in groups:
            yield each

    async def run():
        watch = SampleProvenance()
        assert [each async for each in watch.groups(source())] == groups
        found = await TeacherRows(watch, teachers, engines, asker or ScoreClient(), **options).annotate(rows)
        assert await watch.annotate(found) == found
        return found

    return asyncio.run(run())


def test_sampled_tokens_and_no_others_are_judged():
    judge = Judge()
    [found] = annotated([row("g")], [group("g")], {"*": "t"}, {"t": judge}, top_k=2)
    [request] = judge.asked
    assert (request.tokens, request.first, request.temperature, request.top_k) == ((10, 11, 12, 13, 14, 15), 2, 0.7, 2)
    assert found.annotations["teacher"] == (0.0, 0.0, -2.0, -3.0, 0.0, -5.0, 0.0)
    assert found.tops.pairs(3) == ((0, -1.0), (1, -2.0)) and found.tops.pairs(4) == ()
    assert found.teacher == "t" and found.weights == row("g").weights


def test_a_teacher_is_chosen_by_tag_then_environment_then_default():
    routes = {"sums": "a", "world": "b", "*": "c"}
    groups = [group("1", tag="sums"), group("2", tag="other"), group("3", env="else")]
    found = annotated([row("1"), row("2"), row("3")], groups, routes, {})
    assert [each.teacher for each in found] == ["a", "b", "c"]
    assert all(not each.annotations for each in found), "a teacher without an engine is only named"
    with pytest.raises(BadInput, match="sums"):
        annotated([row("1")], [group("1", tag="other", env="else")], {"sums": "a"}, {})


def test_a_failed_request_is_retried_and_a_refused_one_is_not():
    judge = Judge(failures=2)
    [found] = annotated(
        [row("g")], [group("g")], {"*": "t"}, {"t": judge}, asker=ScoreClient(retries=2, retry_delay_s=0.0)
    )
    assert len(judge.asked) == 3 and found.annotations["teacher"][2] == -2.0
    for judge, asked in ((Judge(failures=3), 3), (Judge(failures=3, error=RequestRefused), 1)):
        with pytest.raises(judge.error, match="gone"):
            annotated(
                [row("g")], [group("g")], {"*": "t"}, {"t": judge}, asker=ScoreClient(retries=2, retry_delay_s=0.0)
            )
        assert len(judge.asked) == asked


def test_concurrent_requests_are_bounded():
    judge = Judge()
    annotated([row("g") for _ in range(9)], [group("g")], {"*": "t"}, {"t": judge}, asker=ScoreClient(max_concurrent=3))
    assert judge.most == 3 and len(judge.asked) == 9


def test_a_teacher_may_read_another_input():
    judge = Judge()
    longer = TeacherInput(tokens=(1, 2, 3, *row("g").tokens[2:]), shift=1)
    [found] = annotated([row("g")], [group("g")], {"*": "t"}, {"t": judge}, reading=lambda row: longer)
    assert judge.asked[0].first == 3
    assert found.annotations["teacher"] == (0.0, 0.0, -3.0, -4.0, 0.0, -6.0, 0.0)
    for room, asked in ((8, 2), (7, 2)):
        annotated([row("g")], [group("g")], {"*": "t"}, {"t": judge}, reading=lambda row: longer, max_tokens=room)
        assert len(judge.asked) == asked
    [silent] = annotated([row("g")], [group("g")], {"*": "t"}, {"t": judge}, top_k=1, reading=lambda row: None)
    assert silent.annotations["teacher"] == silent.logprobs and not any(silent.tops.rows)
