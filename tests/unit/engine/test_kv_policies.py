"""Whatever a policy does with the KV of conversations between their turns, no token shows it and no page is lost."""

import asyncio
import random
from dataclasses import replace

import pytest
from suite import short_of

from sparring.generation import Completion, GenerateRequest, Sampling
from sparring.kernels.compiled.library import COMPILED
from sparring.testing.tiny_models import VOCABULARY, tiny_model

# in plain torch these take minutes
pytestmark = [pytest.mark.usefixtures("kernel_path"), pytest.mark.kernel_paths("best", *COMPILED, portable=False)]

PAGE_BYTES = 16 * 2 * 2 * 2 * 16 * 4
POLICIES = {
    "keep": {"kv_across_turns": "keep"},
    "keep, little idle": {"kv_across_turns": "keep", "kv_idle_bytes": 14 * PAGE_BYTES},
    "offload": {"kv_across_turns": "offload"},
    "offload, unshared": {"kv_across_turns": "offload", "share_prefixes": False},
    "offload, little idle": {"kv_across_turns": "offload", "kv_idle_bytes": 10 * PAGE_BYTES},
    "offload, little room": {"kv_across_turns": "offload", "offload_bytes": 20 * PAGE_BYTES},
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """Room for conversations of many turns."""
    return tiny_model(
        "qwen3", tmp_path_factory.mktemp("model") / "long", tied=True, seed=4, max_position_embeddings=2048
    )


@pytest.fixture(scope="module")
def windowed_path(tmp_path_factory):
    """No layer reads further back than 24 positions."""
    path = tmp_path_factory.mktemp("model") / "windowed"
    return tiny_model("mistral", path, seed=4, max_position_embeddings=2048)


@pytest.fixture(scope="module")
def trained(model_path, references):
    return references(model_path)


@pytest.fixture(scope="module")
def trained_windowed(windowed_path, references):
    return references(windowed_path)


class Workload:
    """Conversations of a few turns each, some of them aborted, forked or forgotten on the way. `done` holds every
    request with its answer."""

    def __init__(self, engine, seed):
        self.engine, self.seed, self.draw, self.done, self.names = engine, seed, random.Random(seed), [], []
        self.system = [self.draw.randrange(VOCABULARY) for _ in range(40)]

    async def talk(self, name, tokens, turns):
        draw = random.Random(f"{self.seed} {name}")
        for turn in range(turns):
            sampling = Sampling(
                max_tokens=draw.randrange(5, 40), seed=draw.randrange(1 << 40), temperature=draw.choice((0.7, 1.0))
            )
            item = GenerateRequest(id=f"{name}.{turn}", tokens=tuple(tokens), sampling=sampling, conversation=name)
            answer = await self.ask(item, draw.choice(("whole", "whole", "whole", "abort")))
            tokens = [*item.tokens, *answer.tokens, *(draw.randrange(VOCABULARY) for _ in range(draw.randrange(1, 40)))]
            if draw.random() < 0.2:  # something of it is forgotten, from the middle on
                tokens = [*tokens[: len(tokens) // 2], *(draw.randrange(VOCABULARY) for _ in range(9))]
            for _ in range(draw.randrange(40)):
                await asyncio.sleep(0)
        if draw.random() < 0.5:
            await self.engine.release(name)

    async def ask(self, item, how):
        self.names.append(item.conversation)
        async for piece in self.engine.stream(item):
            if isinstance(piece, Completion):
                break
            if how == "abort":
                await self.engine.abort(item.id)
        self.done.append((item, piece))
        return piece

    async def run(self, refs):
        for number in range(1 + len(refs)):
            if number:
                await self.engine.pull(refs[number - 1])
            starts = [[*self.system[: self.draw.randrange(41)], self.draw.randrange(VOCABULARY)] for _ in range(12)]
            await asyncio.gather(*(self.talk(f"{number}-{i}", start, 3) for i, start in enumerate(starts)))
        metrics = self.engine.metrics
        for name in self.names:
            await self.engine.release(name)
        await self.engine.generate(GenerateRequest(id="last", tokens=(1,), sampling=Sampling(max_tokens=1)))
        free = self.engine.metrics["kv_bytes_now"] == self.engine.metrics["kv_host_bytes_now"] == 0
        return self.done, metrics, free


def both_ways(serve, path, trained, seed, **settings):
    """Answers of a workload with those of every request alone, the number of requests, the metrics, whether all was
    given back."""

    async def scenario(engine):
        return await Workload(engine, seed).run(trained)

    async def plain(engine):
        """Every request alone, as far as it went, by the weights that answered it."""
        found = []
        for version, ref in enumerate((None, *trained)):
            if ref:
                await engine.pull(ref)
            mine = [(item, answer) for item, answer in done if answer.versions.values == (version,)]
            alone = [
                replace(item, sampling=replace(item.sampling, max_tokens=len(a.tokens)), conversation=None)
                for item, a in mine
            ]
            answers = await asyncio.gather(*map(engine.generate, alone))
            found += [((a.tokens, a.logprobs), (b.tokens, b.logprobs)) for (_, a), b in zip(mine, answers, strict=True)]
        return found

    done, metrics, free = serve(scenario, path=path, max_running=6, **settings)
    compared = serve(plain, path=path, kv_across_turns="drop", share_prefixes=False)
    return compared, len(done), metrics, free


@pytest.mark.parametrize("seed", short_of([0, 1], [0]))
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_gives_the_bits_of_full_prefill(serve, model_path, trained, policy, seed):
    compared, done, metrics, free = both_ways(serve, model_path, trained, seed, kv_tokens=640, **POLICIES[policy])
    assert len(compared) == done > 100 and all(got == expected for got, expected in compared)
    assert free and metrics["kv_bytes_now"] <= metrics["max_kv_bytes"] <= 40 * PAGE_BYTES
    assert metrics["kv_kept_tokens"] + metrics["kv_restored_tokens"] > 0 and metrics["kv_misses"] > 0
    assert (metrics["kv_restored_tokens"] > 0) is (metrics["kv_back_bytes"] > 0) is policy.startswith("offload")
    assert (metrics["kv_evictions"] > 0 and metrics["kv_lost_tokens"] > 0) or "offload" in policy


@pytest.mark.parametrize("policy", short_of(POLICIES, ["keep", "offload"]))
def test_pages_outside_the_window_are_not_needed(serve, windowed_path, trained_windowed, policy):
    compared, done, metrics, free = both_ways(
        serve, windowed_path, trained_windowed, 5, kv_tokens=400, **POLICIES[policy]
    )
    assert len(compared) == done > 100 and all(got == expected for got, expected in compared)
    assert free and metrics["kv_kept_tokens"] + metrics["kv_restored_tokens"] > 0


def test_a_window_leaves_room_for_more_requests(serve, model_path, windowed_path):
    async def scenario(engine):
        items = [
            GenerateRequest(id=str(i), tokens=(i, 5), sampling=Sampling(max_tokens=160, seed=i), conversation=str(i))
            for i in range(8)
        ]
        answers = await asyncio.gather(*map(engine.generate, items))
        longer = [replace(item, tokens=(*item.tokens, *a.tokens, 5)) for item, a in zip(items, answers, strict=True)]
        again = await asyncio.gather(*map(engine.generate, longer))
        return [a.cached_tokens for a in again], engine.metrics

    cached, metrics = serve(scenario, path=windowed_path, kv_tokens=640)
    assert cached == [161] * 8 and metrics["preemptions"] == 0
    assert metrics["kv_idle_bytes_now"] <= 8 * 3 * PAGE_BYTES
    cached, metrics = serve(scenario, path=model_path, kv_tokens=640)
    assert metrics["preemptions"] > 0


def test_tokens_restored_from_host_memory_are_counted(serve, model_path):
    """Two conversations, a cache for one of them."""

    async def scenario(engine):
        cached = []
        tokens = {name: tuple((name + 3 * j) % VOCABULARY for j in range(100)) for name in (1, 2)}
        for turn in range(4):
            for name in tokens:
                item = GenerateRequest(
                    id=str(turn),
                    tokens=tokens[name],
                    sampling=Sampling(max_tokens=10, seed=turn),
                    conversation=str(name),
                )
                answer = await engine.generate(item)
                cached.append(len(item.tokens) - answer.cached_tokens)
                tokens[name] = (*item.tokens, *answer.tokens, 5)
        return cached, engine.metrics

    for policy, expected in (("offload", 2), ("keep", None)):
        cached, metrics = serve(scenario, path=model_path, kv_tokens=176, kv_across_turns=policy, share_prefixes=False)
        assert cached[2:] == [2] * 6 if expected else min(cached) >= 100
        assert metrics["kv_restored_tokens"] == sum(100 + 11 * turn - 2 for turn in (1, 2, 3)) * 2 * bool(expected)
        assert (metrics["kv_hits"], metrics["kv_misses"]) == ((6, 2) if expected else (0, 8))
        assert (metrics["kv_out_bytes"] > 0) is (metrics["kv_host_bytes_now"] > 0) is bool(expected)


def test_idle_conversations_leave_the_rest_of_the_cache_to_others(serve, model_path):
    async def scenario(engine):
        for name in range(8):
            tokens = tuple((name + 3 * j) % VOCABULARY for j in range(64))
            await engine.generate(
                GenerateRequest(id="a", tokens=tokens, sampling=Sampling(max_tokens=5), conversation=str(name))
            )
        await engine.generate(GenerateRequest(id="b", tokens=(1,), sampling=Sampling(max_tokens=1)))
        return engine.metrics["kv_idle_bytes_now"]

    assert serve(scenario, path=model_path, kv_idle_bytes=12 * PAGE_BYTES) == 10 * PAGE_BYTES
    assert serve(scenario, path=model_path) == 40 * PAGE_BYTES
