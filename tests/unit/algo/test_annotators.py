"""What annotators make of recorded conversations: observations, a shown solution, and a teacher of another tongue."""

import asyncio
import math
from dataclasses import replace

import pytest
from worlds import TASK, group, rollout, segment, watched

from sparring.algo.annotate.cross_tokenizer import AcrossTokenizers, TeacherTokenizer, aligned, ends
from sparring.algo.annotate.feedback import sibling_feedback
from sparring.algo.annotate.observations import ObservationTargets
from sparring.algo.annotate.teacher import ScoreClient
from sparring.errors import BadInput
from sparring.generation import Scores
from sparring.render.demonstrate import reply_tokens
from sparring.render.tokenizer import load_tokenizer
from sparring.types import Message, ToolCall, ToolSpec


def said(renderer, text, calls=()):
    reply = Message(role="assistant", content=text, tool_calls=calls)
    return reply_tokens(renderer, reply), reply


def answering(renderer, index, text):
    """A rollout of one turn."""
    prompt = renderer.render(TASK.messages, ()).tokens
    tokens, reply = said(renderer, text)
    return rollout(
        index, [segment(0, None, "prompt", prompt, TASK.messages[-1]), segment(1, 0, "policy", tokens, reply)]
    )


def forked():
    """Two branches: a tool's answer both have, and one that only the second has."""
    return [
        segment(0, None, "prompt", (1, 2)),
        segment(1, 0, "policy", (3,)),
        segment(2, 1, "tool", (4, 5)),
        segment(3, 2, "policy", (6,)),
        segment(4, 2, "tool", (7,)),
        segment(5, 4, "policy", (8,)),
    ]


def test_each_observed_token_is_imitated_once():
    watch, rows = watched([group([rollout(0, forked())], [True])])
    first, second = asyncio.run(ObservationTargets(watch).annotate(rows))
    assert first.tokens == (1, 2, 3, 4, 5, 6) and first.weights["imitate"] == (0, 0, 0, 1, 1, 0)
    assert second.tokens == (1, 2, 3, 4, 5, 7, 8) and second.weights["imitate"] == (0, 0, 0, 0, 0, 1, 0)
    assert first.weights["policy"] == (0, 0, 1, 0, 0, 1), "the policy term is as it was"
    lost = [*forked()[:5], replace(segment(5, 4, "policy", (8,)), label="lost"), segment(6, 4, "policy", (9,))]
    watch, rows = watched([group([rollout(0, lost)], [True])])
    *_, last = asyncio.run(ObservationTargets(watch).annotate(rows))
    assert last.weights["imitate"] == (0, 0, 0, 0, 0, 1, 0), "the branch of a lost reply has no row"
    silent = [segment(0, None, "prompt", (1, 2)), segment(1, 0, "policy", (3,))]
    watch, rows = watched([group([rollout(0, silent)], [True])])
    assert asyncio.run(ObservationTargets(watch).annotate(rows)) == rows


def test_the_teacher_is_shown_a_success_and_reads_the_same_tokens(renderers):
    renderer = renderers[0]
    texts = ("the answer is not five", "the answer is five", "five")
    watch, rows = watched([group([answering(renderer, i, text) for i, text in enumerate(texts)], [False, True, False])])
    reading = sibling_feedback(watch, renderer)
    found = reading(rows[0])
    prompt = renderer.render(TASK.messages, ()).tokens
    told = renderer.decode(found.tokens[: len(prompt) + found.shift])
    assert "the answer is five" in told and "What is 2 + 3?" in told
    assert found.tokens[len(prompt) + found.shift :] == rows[0].tokens[len(prompt) :]
    assert reading(rows[1]) is None, "the only success has nobody to learn from"
    assert "the answer is five" in renderer.decode(reading(rows[2]).tokens)


def with_a_tool_of_its_own(renderer, text):
    """A rollout of one turn of a task that brings a tool along."""
    tools = (ToolSpec(name="look", description="Looks.", parameters={"type": "object", "properties": {}}),)
    tokens, reply = said(renderer, text)
    begin = segment(0, None, "prompt", renderer.render(TASK.messages, tools).tokens, TASK.messages[-1])
    return tools, lambda index: rollout(index, [replace(begin, tools=tools), segment(1, 0, "policy", tokens, reply)])


def test_a_teacher_reads_the_tools_of_the_task(folders, renderers):
    tools, played = with_a_tool_of_its_own(renderers[0], "the answer is five")
    watch, rows = watched([group([played(0), played(1)], [False, True])])
    found = sibling_feedback(watch, renderers[0])(rows[0])
    assert "look" in renderers[0].decode(found.tokens)
    engine = Uniform()
    across(folders, renderers, [played(0)], engine)
    [request] = engine.asked
    assert request.tokens[: request.first] == renderers[1].render(TASK.messages, tools).tokens


def test_a_world_that_opens_otherwise_cannot_be_told(renderers):
    changed = [segment(0, None, "prompt", (1, 2)), segment(1, 0, "policy", (3,))]
    watch, rows = watched([group([rollout(0, changed), answering(renderers[0], 1, "five")], [False, True])])
    with pytest.raises(BadInput, match="distill.feedback"):
        sibling_feedback(watch, renderers[0])(rows[0])


class Uniform:
    """An engine that gives every token -1 and remembers what it was asked."""

    def __init__(self):
        self.asked = []

    async def score(self, request):
        self.asked.append(request)
        count = len(request.tokens) - request.first
        return Scores(logprobs=(-1.0,) * count, entropies=(0.0,) * count, top_ids=(), top_logprobs=(), version=0)


def across(folders, renderers, rollouts, engine, student=0, room=999):
    teacher = 1 - student
    tongue = TeacherTokenizer(
        renderer=renderers[teacher],
        encode=load_tokenizer(folders[teacher]).encode,
        end=reply_tokens(renderers[teacher], Message(role="assistant", content="."))[-1],
        max_tokens=room,
    )
    watch, rows = watched([group(rollouts, [True] * len(rollouts))])
    annotator = AcrossTokenizers(
        watch, {"*": "t"}, {"t": engine}, ScoreClient(), student=renderers[student], tokenizers={"t": tongue}
    )
    return rows, asyncio.run(annotator.annotate(rows))


def test_spans_end_where_tokens_of_both_end():
    assert aligned([2, 5, 9], [1, 2, 9]) == [(range(1), range(2)), (range(1, 3), range(2, 3))]
    assert aligned([1, 2, 3], [1, 2, 3]) == [(range(i, i + 1), range(i, i + 1)) for i in range(3)]
    assert aligned([3, 3, 4], [4]) == [(range(3), range(1))]
    assert aligned([None, 2], [1, 2]) == [(range(2), range(2))], "not inside of a character"
    assert aligned([], []) == []


def test_a_character_of_several_tokens_ends_at_its_last_token(renderers):
    tokens = renderers[1].render([Message(role="user", content="é")], ()).tokens
    places = ends(tokens, renderers[1].decode)
    assert places.count(None) == 1


@pytest.mark.parametrize("student", [0, 1])
def test_the_gap_of_a_span_is_the_gap_of_each_of_its_tokens(folders, renderers, student):
    engine = Uniform()
    text = "the answer is five"
    [row], [found] = across(folders, renderers, [answering(renderers[student], 0, text)], engine, student)
    start = len(renderers[student].render(TASK.messages, ()).tokens)
    [request] = engine.asked
    own = row.tokens[start:]
    assert (
        renderers[1 - student].decode(request.tokens[request.first : -1]) == renderers[student].decode(own[:-1]) == text
    )
    decode = (renderers[student].decode, renderers[1 - student].decode)
    spans = aligned(ends(own[:-1], decode[0]), ends(request.tokens[request.first : -1], decode[1]))
    assert len(spans) > 1 and len(own) != len(request.tokens) - request.first
    for ours, theirs in spans:
        gap = -float(len(theirs)) - math.fsum(row.logprobs[start + place] for place in ours)
        for place in ours:
            assert found.annotations["teacher"][start + place] - row.logprobs[start + place] == pytest.approx(gap)
    assert found.annotations["teacher"][-1] == pytest.approx(-1.0), "the end of the turn is a span of one token each"
    total = sum(-1.0 for _ in range(len(request.tokens) - request.first))
    told = math.fsum(found.annotations["teacher"][start + ours[0]] - row.logprobs[start + ours[0]] for ours, _ in spans)
    assert told + found.annotations["teacher"][-1] + math.fsum(row.logprobs[start:-1]) == pytest.approx(total), (
        "nothing is lost"
    )


def test_a_turn_too_long_for_the_teacher_keeps_its_log_probabilities(folders, renderers):
    engine = Uniform()
    rows = [answering(renderers[0], 0, "the answer is five")]
    [row], [found] = across(folders, renderers, rows, engine)
    longest = len(engine.asked[0].tokens)
    assert across(folders, renderers, rows, engine, room=longest)[1] == [found]
    [row], [silent] = across(folders, renderers, rows, engine, room=longest - 1)
    assert silent.annotations["teacher"] == row.logprobs and len(engine.asked) == 2


def test_the_same_tokenizer_gives_the_teachers_own_numbers(folders, renderers):
    engine = Uniform()
    [row], [found] = across(
        (folders[0],) * 2, (renderers[0],) * 2, [answering(renderers[0], 0, "the answer is five")], engine
    )
    start = len(renderers[0].render(TASK.messages, ()).tokens)
    assert engine.asked[0].tokens == row.tokens
    assert found.annotations["teacher"][start:] == pytest.approx([-1.0] * (len(row.tokens) - start))


def test_a_turn_after_several_tool_calls_keeps_its_log_probabilities(folders, renderers):
    renderer = renderers[0]
    calls = tuple(ToolCall(id=f"call_{n}", name="look", arguments={"at": n}) for n in range(2))
    prompt = renderer.render(TASK.messages, ()).tokens
    tokens, reply = said(renderer, "", calls)
    answer = Message(role="tool", content="3", tool_call_id="call_1")
    last, closing = said(renderer, "five")
    turns = [segment(0, None, "prompt", prompt, TASK.messages[-1]), segment(1, 0, "policy", tokens, reply)]
    turns += [segment(2, 1, "tool", (7, 8), answer), segment(3, 2, "policy", last, closing)]
    engine = Uniform()
    [row], [found] = across(folders, renderers, [rollout(0, turns)], engine)
    assert len(engine.asked) == 1
    assert found.annotations["teacher"][-len(last) :] == row.logprobs[-len(last) :]
    [row], [found] = across(
        folders,
        renderers,
        [rollout(0, [turns[0], replace(turns[1], message=replace(reply, tool_calls=calls[:1])), *turns[2:]])],
        engine,
    )
    assert len(engine.asked) == 3
