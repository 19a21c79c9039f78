"""Models with recurrent state under fast numerics: as close to float64 as the library, in the engine and in the
trainer.

Whatever the engine does to a request (chunks, neighbours, preemption, turns, updates), the log-probabilities
that it returns are those of a forward of the whole sequence, up to rounding: a state that is lost, stale or another
sequence's is not.
"""

import asyncio
from dataclasses import replace

import pytest
import torch
from common.tiny_adapters import tiny_adapter
from suite import short_of
from tables import with_settings
from test_families import LENGTHS, error, library, packed, rows, typical_error

from sparring.engine.config import EngineConfig
from sparring.engine.native import NativeEngine
from sparring.generation import GenerateRequest, Sampling, ScoreRequest
from sparring.kernels import ops
from sparring.model.attention import Packed, Paged
from sparring.model.head import score_tokens
from sparring.model.load import load
from sparring.model.peft import read
from sparring.model.states import MixerCache, RecurrentStates, state_bytes
from sparring.testing.tiny_models import VOCABULARY, tiny_model
from sparring.weights.inline import publish

FAMILIES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "nemotron_h")
SHORT = ("qwen3_5_text", "nemotron_h")
"""One with each kind of recurrent layer; what depends on the engine alone has the first in the short suite."""
families = pytest.mark.parametrize("family", short_of(FAMILIES, SHORT))
one_family = pytest.mark.parametrize("family", short_of(FAMILIES, SHORT[:1]))
ROUNDING = 2e-4
"""Largest difference of a log-probability in float32 between the engine and a forward of the whole sequence; 3e-5 are
found."""
DTYPES = ("float32", "bfloat16")
TYPICAL = 0.05
"""That of the median token in bfloat16, where a row near the border between two experts may take the other one."""


@pytest.fixture(scope="module")
def path_of(tmp_path_factory):
    """Folder of a family's model; made once."""
    folder = tmp_path_factory.mktemp("recurrent")

    def find(family):
        return folder / family if (folder / family).exists() else tiny_model(family, folder / family, seed=7)

    return find


def fast(path, dtype="float32", **options):
    return load(path, dtype=dtype, numerics="fast", **options)


@torch.no_grad()
def paged(model, *, chunk, forget=()):
    """All sequences side by side, up to `chunk` tokens of each in a call; `forget`: states that are zero again in each
    call."""
    per_sequence = -(-max(LENGTHS) // 16)
    pages = ops.KvPages(model.kv_heads, num_pages=per_sequence * len(LENGTHS), dtype=model.dtype)
    tables = torch.arange(per_sequence * len(LENGTHS), dtype=torch.int32).view(len(LENGTHS), -1)
    states, slots, out = RecurrentStates(model.recurrent, 5), torch.tensor([3, 0, 4, 1]), [[] for _ in LENGTHS]
    for begin in range(0, max(LENGTHS), chunk):
        for layer in model.recurrent:
            kept = states.read(layer, slots).states
            zero = {kind: torch.zeros_like(state) for kind, state in kept.items() if kind[0] in forget}
            states.write(layer, slots, MixerCache({**kept, **zero}))
        pieces = [row[begin : begin + chunk] for row in rows()]
        counts = torch.tensor([len(piece) for piece in pieces], dtype=torch.int32)
        offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
        ends = torch.tensor([min(length, begin + chunk) for length in LENGTHS], dtype=torch.int32)
        positions = torch.cat([torch.arange(begin, begin + len(piece)) for piece in pieces])
        where = Paged(pages, ops.PagedRows(tables, offsets, ends), (states, slots))
        logits = model.logits(model.hidden(torch.cat(pieces), positions, where))
        for one, piece in zip(out, logits.split(counts.tolist()), strict=True):
            one.append(piece)
    return torch.cat([torch.cat(one) for one in out])


@pytest.mark.usefixtures("kernel_path")
@pytest.mark.kernel_paths(portable=False)
@pytest.mark.parametrize("chunk", short_of([1, 23, 40, 100], [23]))
@pytest.mark.parametrize(
    ("dtype", "error"), [("float32", error), ("bfloat16", typical_error)], ids=["float32", "bfloat16"]
)
@families
def test_logits_in_pieces_are_as_close_to_float64_as_the_librarys(family, dtype, error, chunk, path_of):
    path = path_of(family)
    exact, model = library(path, dtype, wide=True), fast(path, dtype)
    assert exact.dtype is torch.float64
    bound = 2 * error(library(path, dtype), exact)
    assert error(paged(model, chunk=chunk), exact) <= bound
    assert error(packed(model), exact) <= bound


@pytest.mark.parametrize("forget", ["conv", "recurrent"])
@pytest.mark.parametrize("chunk", short_of([1, 23], [23]))
@families
def test_without_its_state_it_is_another_model(family, chunk, forget, path_of):
    """The comparison above would not pass if either state were not carried."""
    path = path_of(family)
    exact = library(path, wide=True)
    assert error(paged(fast(path), chunk=chunk, forget=[forget]), exact) > 1000 * error(library(path), exact)


def request(number, tokens=None, conversation=None, **sampling):
    return GenerateRequest(
        id=str(number),
        tokens=tokens or tuple((5 * number + 7 * j) % VOCABULARY for j in range(1 + 13 * number)),
        sampling=Sampling(
            **{"max_tokens": 20 + number, "seed": number, "temperature": (1.0, 0.7)[number % 2], **sampling}
        ),
        conversation=conversation,
    )


def serve(scenario, path, dtype="float32", **settings):
    """What `scenario(engine)` returns, of a fresh engine with these `[engine]` settings."""

    async def run():
        config = with_settings(EngineConfig(), **{"max_running": 32, "max_tokens": 64, **settings})
        engine = NativeEngine(fast(path, dtype), config, threads=1)
        try:
            return await scenario(engine)
        finally:
            await engine.close()

    return asyncio.run(run())


def crowd(engine):
    return asyncio.gather(*(engine.generate(request(number)) for number in range(8)))


@torch.no_grad()
def differences(model, asked, tokens, logprobs):
    """Between what the engine says of `tokens` behind a request and a forward of all of it under the weights of
    `model`."""
    row = torch.tensor((*asked.tokens, *tokens))
    hidden = model.hidden(row, torch.arange(len(row)), Packed.of([len(row)]))[len(asked.tokens) - 1 : -1]
    heat = torch.full((len(tokens),), asked.sampling.temperature)
    return (score_tokens(model, hidden, row[len(asked.tokens) :], heat).logprob - torch.tensor(logprobs)).abs()


def agrees(model, asked, answer):
    """Whether a completion is what the weights of `model` say, up to rounding."""
    found = differences(model, asked, answer.tokens, answer.logprobs)
    return bool(found.max() <= ROUNDING if model.dtype is torch.float32 else found.median() <= TYPICAL)


@pytest.mark.parametrize(
    ("family", "dtype"),
    short_of([(family, dtype) for family in FAMILIES for dtype in DTYPES], [(SHORT[0], "float32")]),
)
def test_neighbours_and_chunks(family, dtype, path_of):
    model = fast(path_of(family), dtype)
    for settings in ({}, {"max_tokens": 7, "max_running": 3}, {"max_running": 1}):
        answers = serve(crowd, path_of(family), dtype, **settings)
        assert all(agrees(model, request(number), answer) for number, answer in enumerate(answers)), settings


@one_family
def test_another_weight_shows(family, path_of):
    """The bound is not so wide that it would let the wrong state through."""
    model = fast(path_of(family))
    with torch.no_grad():
        next(value for name, value in model.state().items() if name.endswith("A_log")).add_(0.02)
    answers = serve(crowd, path_of(family))
    assert not all(agrees(model, request(number), answer) for number, answer in enumerate(answers))


@pytest.mark.parametrize("family", short_of(["qwen3_next", "nemotron_h"], ["nemotron_h"]))
def test_neighbours_under_other_adapters(family, path_of, tmp_path):
    """Chunks, single tokens and whole prompts in one step, under two adapters and none."""
    targets = {None: None, "a": "all-linear", "b": ("q_proj", "v_proj")}
    folders = {name: tiny_adapter(path_of(family), tmp_path / name, target_modules=targets[name]) for name in "ab"}
    models = {name: fast(folders.get(name, path_of(family))) for name in targets}
    asked = [replace(request(number, max_tokens=6), adapter=(None, "a", "b")[number % 3]) for number in range(8)]

    async def scenario(engine):
        for name, folder in folders.items():
            await engine.pull(publish("policy", 1, read(folder), adapter=name))
        return await asyncio.gather(*map(engine.generate, asked))

    answers = serve(scenario, path_of(family), max_tokens=23, max_running=5)
    for one, answer in zip(asked, answers, strict=True):
        assert [agrees(models[name], one, answer) for name in targets] == [name == one.adapter for name in targets]


@one_family
def test_a_preempted_request_is_prefilled_again(family, path_of):
    async def scenario(engine):
        return await crowd(engine), engine.metrics

    answers, metrics = serve(scenario, path_of(family), kv_tokens=240)
    assert metrics["preemptions"] > 0
    model = fast(path_of(family))
    assert all(agrees(model, request(number), answer) for number, answer in enumerate(answers))


@one_family
def test_as_many_run_as_there_are_states(family, path_of):
    async def scenario(engine):
        return await crowd(engine), engine.metrics

    model = fast(path_of(family))
    answers, metrics = serve(scenario, path_of(family), kv_bytes=2 * state_bytes(model.recurrent) + 1, kv_tokens=4096)
    assert metrics["max_running"] == 2
    assert all(agrees(model, request(number), answer) for number, answer in enumerate(answers))


def next_turn(asked, answer, *said):
    return replace(asked, tokens=(*asked.tokens, *answer.tokens, *said))


@one_family
def test_turns_go_on_from_the_state_of_the_last(family, path_of):
    model = fast(path_of(family))

    async def scenario(engine):
        asked, talk = [request(number, conversation=str(number)) for number in range(3)], []
        for said in ((), (1, 2, 3), (4,)):
            asked = [next_turn(one, answer, *said) for one, answer in talk[-3:]] or asked
            talk += zip(asked, await asyncio.gather(*map(engine.generate, asked)), strict=True)
        return talk

    # idle pages that may hold nothing go to host memory at once; the states stay
    for settings in ({}, {"kv_across_turns": "offload", "kv_idle_bytes": 1}):
        talk = serve(scenario, path_of(family), **settings)
        assert all(agrees(model, asked, answer) for asked, answer in talk)
        # all but the token sampled last, which nobody has read yet
        kept = [len(asked.tokens) + len(answer.tokens) - 1 for asked, answer in talk]
        assert [answer.cached_tokens for _, answer in talk] == [0, 0, 0, *kept[:-3]]
    dropped = serve(scenario, path_of(family), kv_across_turns="drop", share_prefixes=False)
    assert all(answer.cached_tokens == 0 and agrees(model, asked, answer) for asked, answer in dropped)


@pytest.mark.full
@one_family
def test_requests_with_a_common_prefix_start_from_a_copy_of_its_state(family, path_of):
    """One after the other: the second learns what is shared, the third finds it; and a group that comes at once."""
    model, system = fast(path_of(family)), tuple((3 * j) % VOCABULARY for j in range(50))
    alone = [
        replace(request(number, tokens=(*system, *[number + 1] * 29)), id=f"alone {number}") for number in range(3)
    ]
    group = [
        replace(request(number, tokens=(*system, *[j % 7 for j in range(60)])), id=f"member {number}")
        for number in range(6)
    ]

    async def scenario(engine):
        one_by_one = [await engine.generate(asked) for asked in alone]
        return one_by_one + await asyncio.gather(*map(engine.generate, group))

    for settings in ({}, {"max_tokens": 7, "max_running": 3}, {"kv_tokens": 240}):
        answers = serve(scenario, path_of(family), **settings)
        assert all(agrees(model, asked, answer) for asked, answer in zip(alone + group, answers, strict=True))
        if not settings:
            assert [answer.cached_tokens for answer in answers[:3]] == [0, 0, 48]
            # whoever came before the others knew of them led, and so did the first that knew
            assert sorted(answer.cached_tokens for answer in answers[3:])[2:] == [109] * 4
    apart = serve(scenario, path_of(family), share_prefixes=False)
    assert all(
        answer.cached_tokens == 0 and agrees(model, asked, answer)
        for asked, answer in zip(alone + group, apart, strict=True)
    )


@one_family
def test_a_turn_that_leaves_the_last_one_begins_anew(family, path_of):
    model, first = fast(path_of(family)), request(3, conversation="c")

    async def scenario(engine):
        answer = await engine.generate(first)
        changed = replace(first, tokens=(*first.tokens, *answer.tokens[:-3], 1, 2, 3, 4))
        return changed, await engine.generate(changed)

    changed, answer = serve(scenario, path_of(family))
    assert answer.cached_tokens == 0 and agrees(model, changed, answer)


@one_family
def test_given_tokens_are_scored(family, path_of):
    model, asked = fast(path_of(family)), request(7, temperature=1.0)

    async def scenario(engine):
        whole = ScoreRequest(id="score", tokens=asked.tokens, first=1)
        return (await asyncio.gather(crowd(engine), engine.score(whole)))[1]

    found = serve(scenario, path_of(family), max_tokens=32)
    begun = replace(asked, tokens=asked.tokens[:1])
    assert (differences(model, begun, asked.tokens[1:], found.logprobs) <= ROUNDING).all()


@pytest.mark.full
@pytest.mark.parametrize("live_kv", ["keep", "recompute", "drain"])
@one_family
def test_an_update_in_flight(family, live_kv, path_of):
    old, new, asked = fast(path_of(family)), fast(path_of(family)), request(1, max_tokens=200)
    with torch.no_grad():
        for name, value in new.state().items():
            value.mul_(1.1 if "norm" in name or name.endswith("A_log") else 1.0)
    ref = publish("policy", 1, new.state())

    async def scenario(engine):
        stream, seen = engine.stream(asked), 0
        while seen < 20:
            seen += len((await anext(stream)).tokens)
        await engine.pull(ref)
        *_, answer = [piece async for piece in stream]
        return answer, await crowd(engine)

    answer, after = serve(scenario, path_of(family), live_kv=live_kv)
    assert all(agrees(new, request(number), found) for number, found in enumerate(after))
    before = len(answer.tokens) if live_kv == "drain" else answer.versions.lengths[0]
    assert (answer.versions.values, before >= 20) == ((0,) if live_kv == "drain" else (0, 1), True)
    by_old, by_new = (differences(model, asked, answer.tokens, answer.logprobs) <= ROUNDING for model in (old, new))
    assert by_old[:before].all() and not by_old[before:].all() or live_kv == "drain" and by_old.all()
    # states of both versions are neither's
    assert bool(by_new[before:].all()) == (live_kv != "keep")
