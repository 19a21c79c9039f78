"""Workers by HTTP: rollouts that programs elsewhere claim, renew and finish; and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import httpx
import openai
import pytest
from sessions import RENDERER, opened, said, says
from tables import with_settings
from test_rewards import NoBoxes

from sparring.errors import BadInput
from sparring.gateway.server import gateway_here, open_door
from sparring.gateway.workers import RunKeys
from sparring.harness.load import load_harness
from sparring.record.recorder import Recorder
from sparring.rewards import RewardRefused, send
from sparring.rollout.config import RetriesConfig, RewardsConfig, RolloutConfig
from sparring.rollout.runner import Finished, RolloutRunner
from sparring.testing.toy import ToyWorld, toy_task
from sparring.workers import claim

KEYS = RunKeys(worker="wk-1", reward="rk-1")
Work = Callable[[httpx.AsyncClient, str], Awaitable[None]]


def play_with_worker(
    work: Work, *replies: str, lease_s: float = 60.0, **settings: Any
) -> tuple[list[Finished], dict[str, float], Any]:
    """Play a rollout whose worker is a coroutine with a client of the run's server."""
    engine = says(*map(said, replies or ("A", "B", "C", "D")))

    async def main() -> tuple[list[Finished], dict[str, float]]:
        gateway = gateway_here()
        async with gateway.open_outside(KEYS, "127.0.0.1:0", lease_s) as url:
            harness = load_harness("workers", ("policy",), open_door, leases=lambda: gateway.workers.leases)
            config = with_settings(RolloutConfig(group_size=1), delay_s=0.0, **settings)
            runner = RolloutRunner(ToyWorld(), NoBoxes(), Recorder(engine, RENDERER, max_context=3000), harness, config)
            headers = {"authorization": f"Bearer {KEYS.worker}"}
            async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as client:
                running = runner.run(toy_task(), rollout_id="rl/0/0", index=0, seed=7)
                finished, _ = await asyncio.gather(running, work(client, url))
        return [finished], runner.metrics()

    finished, metrics = asyncio.run(main())
    return finished, metrics, engine


async def claimed(client: httpx.AsyncClient) -> dict[str, Any]:
    answer = await client.post("/v1/rollouts/claim", json={"wait_s": 60, "worker": "w-1"})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def word(client: httpx.AsyncClient, path: str, body: Any, key: str = KEYS.worker) -> tuple[int, str]:
    """Return status and kind of error of a request."""
    content = {"content": body} if isinstance(body, bytes) else {"json": body}
    answer = await client.post(f"/v1/rollouts/{path}", headers={"authorization": f"Bearer {key}"}, **content)
    return answer.status_code, answer.json().get("error", {}).get("type", "") if answer.content else ""


async def ask(rollout: dict[str, Any]) -> str:
    async with openai.AsyncOpenAI(base_url=f"{rollout['url']}/v1", api_key=rollout["key"], max_retries=0) as client:
        answer = await client.chat.completions.create(model="policy", messages=rollout["messages"])
    return answer.choices[0].message.content or ""


def test_a_worker_plays_a_rollout_and_the_world_gets_its_answer() -> None:
    async def work(client: httpx.AsyncClient, url: str) -> None:
        rollout = await claimed(client)
        assert (rollout["rollout"], rollout["url"], rollout["messages"][-1]["role"]) == ("rl/0/0", url, "user")
        assert not {"answer", "seed"} & set(rollout) and rollout["data"] == {}
        assert await ask(rollout) == "A"
        assert await word(client, f"{rollout['id']}/renew", {}) == (200, "")
        assert await word(client, f"{rollout['id']}/finish", {"outcome": "completed"}) == (200, "")
        with pytest.raises(openai.AuthenticationError):
            while True:  # the key dies with the rollout, which is being scored
                await ask(rollout)

    (finished,), _, engine = play_with_worker(work, "A")
    assert (finished.rollout.outcome.kind, finished.score is not None) == ("completed", True)
    assert len(engine.requests) == 1


def test_the_next_worker_resumes_the_rollout_of_a_failed_one() -> None:
    async def work(client: httpx.AsyncClient, url: str) -> None:
        first = await claimed(client)
        assert await ask(first) == "A"
        assert await word(client, f"{first['id']}/finish", {"outcome": "failed", "reason": "no disk"}) == (200, "")
        second = await claimed(client)
        assert second["rollout"] == first["rollout"] and second["key"] != first["key"] and second["id"] != first["id"]
        with pytest.raises(openai.AuthenticationError):
            await ask(first)
        assert await word(client, f"{first['id']}/renew", {}) == (410, "expired")
        assert await ask(second) == "A", "recorded, not sampled again"
        assert await word(client, f"{second['id']}/finish", {"outcome": "completed"}) == (200, "")

    (finished,), metrics, engine = play_with_worker(work)
    assert finished.rollout.outcome.kind == "completed" and len(engine.requests) == 1
    (broken,) = finished.broken
    assert broken.outcome.failure is not None and "no disk" in broken.outcome.failure.message
    assert "rollout/workers_lost" not in metrics


def test_a_silent_worker_loses_its_rollout() -> None:
    async def work(client: httpx.AsyncClient, url: str) -> None:
        first = await claimed(client)
        leases = gateway_here().workers.leases
        assert leases is not None
        leases._end(first["id"], None)  # what the timer does; its clock is tested beside the leases
        second = await claimed(client)
        assert await word(client, f"{first['id']}/finish", {"outcome": "completed"}) == (410, "expired")
        await ask(second)
        assert await word(client, f"{second['id']}/finish", {"outcome": "completed", "answer": "7"}) == (200, "")

    (finished,), metrics, _ = play_with_worker(work)
    assert finished.rollout.outcome.kind == "completed" and metrics["rollout/workers_lost"] == 1


def test_invalid_requests_of_workers_are_refused_without_effect() -> None:
    async def work(client: httpx.AsyncClient, url: str) -> None:
        for body in ({"wait_s": -1}, {"wait_s": "long"}, {"environments": "a"}, {"prize": 1}, b"[1]", b"{", b"\xff"):
            assert await word(client, "claim", body) == (400, "invalid_request"), body
        rollout = await claimed(client)
        finish = f"{rollout['id']}/finish"
        for body in (
            {},
            {"outcome": "won"},
            {"outcome": "failed"},
            {"outcome": "failed", "reason": "x", "reward": 1},
            {"outcome": "completed", "reward": True},
            b'{"outcome": "completed", "reward": NaN}',
            b'{"outcome": "completed", "reward": 1e999}',
            b'{"outcome": "completed", "answer": "\\ud800"}',
        ):
            assert await word(client, finish, body) == (400, "invalid_request"), body
        for key in ("sk-other", rollout["key"], KEYS.reward, "k\u00e9y"):
            for path in ("claim", f"{rollout['id']}/renew", finish):
                answer = await client.post(f"/v1/rollouts/{path}", headers={"x-api-key": key.encode()}, json={})
                assert answer.status_code == 401, "two keys that differ are none"
        for key in ("sk-other", rollout["key"], KEYS.reward):
            assert await word(client, finish, {"outcome": "completed"}, key) == (401, "wrong_key")
        assert await word(client, "lease-no/renew", {}) == (404, "unknown_lease")
        assert await word(client, "lease-no/finish", {"outcome": "completed"}) == (404, "unknown_lease")
        assert await word(client, finish, {"outcome": "completed", "reward": 1}) == (403, "no_rewards")
        assert (await client.post("/v1/rollouts/claim", json={})).status_code == 204
        await ask(rollout)
        assert await word(client, finish, {"outcome": "completed"}) == (200, "")
        assert await word(client, finish, {"outcome": "completed"}) == (200, "")
        assert await word(client, finish, {"outcome": "truncated"}) == (409, "conflict")

    (finished,), _, _ = play_with_worker(work)
    assert finished.rollout.outcome.kind == "completed" and not finished.broken


def test_the_sampling_key_gives_no_rewards_and_the_runs_key_gives_them_by_id() -> None:
    async def work(client: httpx.AsyncClient, url: str) -> None:
        rollout = await claimed(client)
        await ask(rollout)
        with pytest.raises(RewardRefused, match="none under the key that samples") as refused:
            await asyncio.to_thread(send, url, rollout["key"], 1.0)
        assert refused.value.status == 403
        await asyncio.to_thread(send, url, rollout["reward_key"], 0.25, "rl/0/0#1")
        post = {"reward": 0.5, "of": "chatcmpl-rl/0/0#1"}
        for body, status in (
            (post, 200),
            ({**post, "rollout": "rl/0/0"}, 200),
            ({"reward": 1.0}, 400),
            ({"reward": 1.0, "rollout": 3}, 400),
            ({"reward": 1.0, "rollout": "rl/0/9"}, 404),
        ):
            answer = await client.post("/v1/rewards", json=body, headers={"authorization": f"Bearer {KEYS.reward}"})
            assert answer.status_code == status, (body, answer.text)
        assert await word(client, f"{rollout['id']}/finish", {"outcome": "completed", "reward": 0.75}) == (200, "")

    (finished,), _, _ = play_with_worker(work, rewards_within_s=5.0)
    assert finished.score is not None and (finished.score.reward, finished.score.per_turn) == (0.75, (0.5,))


def test_a_recipe_may_allow_rewards_under_the_sampling_key() -> None:
    async def work(client: httpx.AsyncClient, url: str) -> None:
        rollout = await claimed(client)
        await ask(rollout)
        await asyncio.to_thread(send, url, rollout["key"], 0.5)
        assert await word(client, f"{rollout['id']}/finish", {"outcome": "completed"}) == (200, "")

    (finished,), _, _ = play_with_worker(work, rewards_within_s=5.0, rewards_under="any_key")
    assert finished.score is not None and finished.score.reward == 0.5


def test_the_client_of_workers_plays_until_the_run_is_over() -> None:
    """It gives back what it leaves, and renews meanwhile."""
    seen: list[str] = []

    def work(url: str) -> None:
        for rollout in claim(url, KEYS.worker, worker="w-2", wait_s=5.0):
            seen.append(rollout.rollout)
            break  # given back
        for rollout in claim(url, KEYS.worker, worker="w-2", wait_s=30.0):
            with openai.OpenAI(base_url=rollout.base_url, api_key=rollout.key) as client:
                answer = client.chat.completions.create(model="policy", messages=rollout.messages)
            rollout.reward(0.25, of=answer.id)
            assert rollout.finish(reward=0.5)
            assert rollout.finish(reward=0.5), "the same end twice is one"
            seen.append(rollout.rollout)

    async def main() -> Finished:
        gateway = gateway_here()
        async with gateway.open_outside(KEYS, "127.0.0.1:0", 60.0) as url:
            harness = load_harness("workers", ("policy",), open_door, leases=lambda: gateway.workers.leases)
            config = RolloutConfig(
                group_size=1, retries=RetriesConfig(delay_s=0.0), rewards=RewardsConfig(within_s=5.0)
            )
            recorder = Recorder(says(said("A")), RENDERER, max_context=3000)
            runner = RolloutRunner(ToyWorld(), NoBoxes(), recorder, harness, config)
            working = asyncio.create_task(asyncio.to_thread(work, url))
            finished = await runner.run(toy_task(), rollout_id="rl/0/0", index=0, seed=7)
            assert gateway.workers.leases is not None
            gateway.workers.leases.close()
            await working
        return finished

    finished = asyncio.run(main())
    assert seen == ["rl/0/0"] * 2
    assert finished.score is not None and finished.score.reward == 0.5
    (broken,) = finished.broken
    assert broken.outcome.failure is not None and "its worker left" in broken.outcome.failure.message


def test_a_run_without_workers_refuses_them_and_a_world_of_two_roles_is_refused() -> None:
    async def main() -> int:
        async with open_door(opened(says())) as door:
            async with httpx.AsyncClient(base_url=door.url, headers={"x-api-key": KEYS.worker}) as client:
                return (await client.post("/v1/rollouts/claim", json={})).status_code

    assert asyncio.run(main()) == 403
    with pytest.raises(BadInput, match="which speaks for one role"):
        load_harness("workers", ("white", "black"), open_door)


def test_waiting_claims_are_told_to_retry_when_a_run_stops() -> None:
    async def main() -> list[tuple[int, str]]:
        gateway, waiting = gateway_here(), []
        for error in (None, ConnectionResetError()):
            with suppress(ConnectionResetError):
                async with gateway.open_outside(KEYS, "127.0.0.1:0", 60.0) as url:
                    client = httpx.AsyncClient(base_url=url, headers={"x-api-key": KEYS.worker}, timeout=60)
                    waiting.append(asyncio.create_task(client.post("/v1/rollouts/claim", json={"wait_s": 60})))
                    while gateway.workers.leases is None or not gateway.workers.leases._claims:
                        await asyncio.sleep(0)
                    if error is not None:
                        raise error
        answers = await asyncio.gather(*waiting)
        return [(answer.status_code, answer.json()["error"]["message"]) for answer in answers]

    over, stopped = asyncio.run(main())
    assert over[0] == 410 and "a run that is going on" in over[1]
    assert stopped == (503, "the run has stopped; claim again when it goes on")
