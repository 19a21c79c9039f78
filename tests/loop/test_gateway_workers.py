"""Workers who reach their run through `sparring gateway`, which is killed while they wait, play and finish."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from test_gateway_process import RENDERER, Gated, Process

from sparring.gateway.handover import behind_gateway
from sparring.gateway.server import gateway_here, open_door
from sparring.gateway.workers import RunKeys
from sparring.harness.load import load_harness
from sparring.record.leases import Leases
from sparring.record.recorder import Recorder
from sparring.rollout.config import RetriesConfig, RewardsConfig, RolloutConfig
from sparring.rollout.runner import Finished, RolloutRunner
from sparring.testing.toy import ToyWorld, toy_task
from sparring.types import BoxSpec
from sparring.workers import ClaimedRollout, claim

KEYS = RunKeys(worker="wk-1", reward="rk-1")
ADDRESS = "http://gateway.example:9"
"""Address of the gateway, as the recipe has it."""


class NoBoxes:
    """The toy world needs none."""

    async def take(self, spec: BoxSpec) -> Any:
        raise AssertionError("asked for a box")

    async def close(self) -> None:
        """Nothing is open."""


Play = Callable[[], Awaitable[Finished]]
Scene = Callable[[Process, Leases, Play], Awaitable[Any]]


def through_a_gateway(folder: Path, scene: Scene) -> Any:
    """Have a scene played with a gateway's process in front of a run with workers."""

    async def main() -> Any:
        gateway, process = gateway_here(), Process(folder)
        async with gateway.open_outside(KEYS, "127.0.0.1:0", 60.0, ADDRESS) as url, behind_gateway(folder, url):
            assert url == ADDRESS and gateway.workers.leases is not None
            harness = load_harness("workers", ("policy",), open_door, leases=lambda: gateway.workers.leases)
            config = RolloutConfig(
                group_size=1, retries=RetriesConfig(delay_s=0.0), rewards=RewardsConfig(within_s=60.0)
            )
            recorder = Recorder(Gated(), RENDERER, max_context=3000)
            runner = RolloutRunner(ToyWorld(), NoBoxes(), recorder, harness, config)
            numbers = iter(range(100))

            async def play() -> Finished:
                return await runner.run(toy_task(), rollout_id=f"rl/0/{next(numbers)}", index=0, seed=7)

            await process.start()
            try:
                return await scene(process, gateway.workers.leases, play)
            finally:
                await process.kill()

    return asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop go on until a condition holds."""
    while not condition():
        await asyncio.sleep(0)


def worked(url: str, reached: list[ClaimedRollout], goes_on: threading.Event) -> list[tuple[str, bool]]:
    """Play rollouts as the client of workers does, until the run is over; each waits for a word behind its first reply.
    Return the ids, and whether the end counted."""
    ends = []
    for rollout in claim(url, KEYS.worker, worker="w-1", wait_s=60.0):
        with openai.OpenAI(base_url=rollout.base_url, api_key=rollout.key, max_retries=8) as client:
            messages = list(rollout.messages)
            for place in range(2):
                answer = client.chat.completions.create(model="policy", messages=messages)
                text = answer.choices[0].message.content or ""
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
                if place == 0:
                    reached.append(rollout)
                    goes_on.wait()
                    goes_on.clear()
            rollout.reward(0.25, of=answer.id)
            ends.append((rollout.rollout, rollout.finish(reward=0.5)))
    return ends


@pytest.mark.parametrize("rounds", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_a_gateway_that_is_killed_while_a_claim_waits_and_a_rollout_is_played_loses_and_doubles_nothing(
    tmp_path: Path, rounds: int
) -> None:
    async def scene(process: Process, leases: Leases, play: Play) -> tuple[list[Finished], list[tuple[str, bool]]]:
        reached: list[ClaimedRollout] = []
        goes_on = threading.Event()
        working = asyncio.create_task(asyncio.to_thread(worked, f"http://127.0.0.1:{process.port}", reached, goes_on))
        finished = []
        for _ in range(rounds):
            await until(lambda: bool(leases._claims))
            await process.kill()
            await until(lambda: not gateway_here().there.is_set())
            assert leases._claims, "its connection is the run's: it waits on"
            playing = asyncio.create_task(play())
            await process.start()
            await until(lambda: len(reached) == len(finished) + 1)
            await process.kill()
            await until(lambda: all(lease.timer is None for lease in leases._leases.values()))
            goes_on.set()  # it asks for a reply, rewards it and finishes; nobody is there
            await process.start()
            finished.append(await playing)
        leases.close()
        return finished, await working

    finished, ends = through_a_gateway(tmp_path, scene)
    assert ends == [(f"rl/0/{number}", True) for number in range(rounds)]
    for each in finished:
        assert (each.rollout.outcome.kind, each.broken) == ("completed", ())
        assert len(each.rollout.trajectories[0].turns) == 2, "each reply is sampled once"
        assert each.score is not None and (each.score.reward, each.score.per_turn) == (0.5, (0.0, 0.25))


def test_words_of_workers_and_rewards_under_the_runs_key_are_those_of_the_runs_own_server(tmp_path: Path) -> None:
    async def scene(process: Process, leases: Leases, play: Play) -> tuple[list[Any], Finished]:
        playing = asyncio.create_task(play())
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{process.port}", timeout=60) as client:

            async def word(path: str, body: Any, key: str = KEYS.worker) -> tuple[int, Any]:
                answer = await client.post(f"/v1/{path}", json=body, headers={"authorization": f"Bearer {key}"})
                return answer.status_code, answer.json() if answer.content else None

            status, rollout = await word("rollouts/claim", {"wait_s": 60, "id": "c-1"})
            assert (status, rollout["url"], rollout["mcp"]) == (200, ADDRESS, f"{ADDRESS}/mcp")
            assert await word("rollouts/claim", {"wait_s": 60, "id": "c-1"}) == (200, rollout), "its answer was lost"
            assert await word("rollouts/claim", {}) == (204, None)
            ask = {"model": "policy", "messages": rollout["messages"]}
            reply = (await word("chat/completions", ask, rollout["key"]))[1]["id"]
            lease = f"rollouts/{rollout['id']}"
            seen = [
                await word("rollouts/claim", {}, KEYS.reward),
                await word("rollouts/claim", {"wait_s": -1}),
                await word(f"{lease}/renew", {}),
                await word("rollouts/lease-no/renew", {}),
                await word(f"{lease}/finish", {"outcome": "won"}),
                await word("rewards", {"reward": 0.5, "of": reply}, KEYS.reward),
                await word("rewards", {"reward": 1.0, "rollout": "rl/0/7"}, KEYS.reward),
                await word(f"{lease}/finish", {"outcome": "completed", "reward": 0.75}),
                await word(f"{lease}/finish", {"outcome": "completed", "reward": 0.75}),
                await word(f"{lease}/finish", {"outcome": "truncated"}),
            ]
            waiting = asyncio.create_task(word("rollouts/claim", {"wait_s": 60}))
            await until(lambda: bool(leases._claims))
            waiting.cancel()
            await until(lambda: not leases._claims)  # a worker that left takes no rollout
            return [(status, body.get("error", {}).get("type", "")) for status, body in seen], await playing

    seen, finished = through_a_gateway(tmp_path, scene)
    assert seen == [
        (401, "wrong_key"),
        (400, "invalid_request"),
        (200, ""),
        (404, "unknown_lease"),
        (400, "invalid_request"),
        (200, ""),
        (404, "unknown_reply"),
        (200, ""),
        (200, ""),
        (409, "conflict"),
    ]
    assert finished.score is not None and (finished.score.reward, finished.score.per_turn) == (0.75, (0.5,))
