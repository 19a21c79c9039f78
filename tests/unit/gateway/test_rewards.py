"""Rewards from outside: given by HTTP for a rollout, a turn or a branch; late, malformed and foreign ones."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy
import pytest
from refusals import refused_at
from sessions import RENDERER, opened, said, says

from sparring.errors import StoreError
from sparring.gateway.rewards import reply_id
from sparring.gateway.server import Door, open_door
from sparring.harness.load import CallableHarness
from sparring.protocols import Episode
from sparring.recipe.run_config import RunConfig
from sparring.record.recorder import Recorder
from sparring.record.rewards import OutsideReward, OutsideRewards
from sparring.rewards import RewardRefused, send
from sparring.rollout.config import RetriesConfig, RewardsConfig, RolloutConfig
from sparring.rollout.journal import Journals
from sparring.rollout.runner import Finished, RolloutRunner
from sparring.store.sqlite import SqliteStore
from sparring.testing.clock import run_virtual
from sparring.testing.toy import ToyEnv, ToyWorld, toy_task
from sparring.types import BoxSpec

Talk = Callable[[Door, httpx.AsyncClient], Awaitable[None]]
ASKED = [{"role": "user", "content": "Hi"}]


class NoBoxes:
    """The toy world needs none."""

    async def take(self, spec: BoxSpec) -> Any:
        raise AssertionError("asked for a box")

    async def close(self) -> None:
        """Nothing is open."""


class Outside:
    """A rollout of an agent program that is rewarded from outside.

    Attributes:
        runner: of the rollout.
    """

    def __init__(self, talk: Talk, *replies: str, store: Any = None, within_s: float | None = 5.0) -> None:
        async def agent(episode: Episode) -> None:
            await episode.env.open(episode.task, episode.box)
            async with open_door(episode.session()) as door, httpx.AsyncClient(base_url=door.url) as client:
                client.headers.update({"x-api-key": door.key, "x-reward-key": door.reward_key or door.key})
                await talk(door, client)

        engine = says(*map(said, replies or ("A", "B", "C")))
        config = RolloutConfig(
            group_size=1, retries=RetriesConfig(rebuilds=0), rewards=RewardsConfig(within_s=within_s)
        )
        recorder = Recorder(engine, RENDERER, store=store, max_context=3000)
        self.runner = RolloutRunner(
            ToyWorld(), NoBoxes(), recorder, CallableHarness(agent, "agent"), config, log=Journals(store)
        )

    async def run(self) -> Finished:
        """Run it to its score."""
        return await self.runner.run(toy_task(), rollout_id="rl/0/0", index=0, seed=7)


async def ask(client: httpx.AsyncClient, messages: list[dict[str, str]] = ASKED, path: str = "chat/completions") -> Any:
    """Return the answer to a conversation."""
    answer = await client.post(f"/v1/{path}", json={"model": "policy", "messages": messages, "max_tokens": 50})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def give(client: httpx.AsyncClient, body: Any) -> tuple[int, str]:
    """Return status and kind of error of a reward."""
    sent = {"content": body} if isinstance(body, (bytes, str)) else {"json": body}
    answer = await client.post("/v1/rewards", headers={"x-api-key": client.headers["x-reward-key"]}, **sent)
    return answer.status_code, answer.json().get("error", {}).get("type", "")


def run_to_score(talk: Talk, **settings: Any) -> Finished:
    """Run a rollout to its score."""
    return asyncio.run(Outside(talk, **settings).run())


def test_a_reward_for_the_rollout_replaces_the_worlds() -> None:
    async def talk(door: Door, client: httpx.AsyncClient) -> None:
        await ask(client)
        assert await give(client, {"reward": 0.25, "parts": {"style": 0.5}}) == (200, "")

    finished = run_to_score(talk)
    assert finished.score is not None
    assert (finished.score.reward, finished.score.per_turn) == (0.25, None)
    assert finished.score.parts["style"] == 0.5


def test_rewards_of_turns_are_summed_without_a_reward_for_the_rollout() -> None:
    async def talk(door: Door, client: httpx.AsyncClient) -> None:
        first, second = [(await ask(client, [{"role": "user", "content": text}]))["id"] for text in ("Hi", "Ho")]
        assert await give(client, {"reward": 1, "of": first}) == (200, "")
        assert await give(client, {"reward": -0.5, "of": second, "final": True}) == (200, "")

    score = run_to_score(talk).score
    assert score is not None and (score.reward, score.per_turn) == (0.5, (1.0, -0.5))


def test_a_reward_of_a_branch_counts_at_its_end() -> None:
    """Two conversations; the first goes on for one turn more."""

    async def talk(door: Door, client: httpx.AsyncClient) -> None:
        first = await ask(client)
        await ask(client, [{"role": "user", "content": "Ho"}])
        said = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
        await ask(client, [*ASKED, said, {"role": "user", "content": "More"}])
        assert await give(client, {"reward": 2.0, "of": first["id"], "branch": True}) == (200, "")
        assert await give(client, {"reward": 3.0}) == (200, "")

    score = run_to_score(talk).score
    assert score is not None and (score.reward, score.per_turn) == (3.0, (0.0, 0.0, 2.0))


def test_reply_ids_of_every_dialect_identify_rewards() -> None:
    async def talk(door: Door, client: httpx.AsyncClient) -> None:
        ids = [(await ask(client))["id"], (await ask(client, path="messages"))["id"]]
        answer = (await client.post("/v1/responses", json={"model": "policy", "input": "Hi"})).json()
        ids += [answer["id"], answer["output"][0]["id"]]
        contents = {"contents": [{"role": "user", "parts": [{"text": "Hi"}]}]}
        ids.append((await client.post("/v1beta/models/policy:generateContent", json=contents)).json()["responseId"])
        assert [reply_id(id).rpartition("#")[0] for id in ids] == ["rl/0/0"] * 5
        assert [await give(client, {"reward": 1.0, "of": id}) for id in ids] == [(200, "")] * 5
        await give(client, {"reward": 4.0})

    score = asyncio.run(Outside(talk, "A", "B", "C", "D").run()).score
    assert score is not None and score.per_turn is not None and len(score.per_turn) == 4


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        ({}, 400, "invalid_request"),
        ({"reward": "1"}, 400, "invalid_request"),
        ({"reward": True}, 400, "invalid_request"),
        (b'{"reward": NaN}', 400, "invalid_request"),
        (b'{"reward": 1e999}', 400, "invalid_request"),
        (b'{"reward": 1' + b"0" * 400 + b"}", 400, "invalid_request"),
        ({"reward": 1.0, "prize": 2}, 400, "invalid_request"),
        ({"reward": 1.0, "parts": {"style": "good"}}, 400, "invalid_request"),
        ({"reward": 1.0, "branch": True}, 400, "invalid_request"),
        (b"[1]", 400, "invalid_request"),
        (b"\xff", 400, "invalid_request"),
        (b'{"reward": 1, "id": "\\ud800"}', 400, "invalid_request"),
        (b" " * (1 << 21), 400, "invalid_request"),
        ({"reward": 1.0, "of": "rl/0/0#99"}, 404, "unknown_reply"),
        ({"reward": 1.0, "of": "rl/0/1#1"}, 404, "unknown_reply"),
        ({"reward": 1.0, "of": ""}, 404, "unknown_reply"),
    ],
)
def test_invalid_rewards_are_refused_without_effect(body: Any, status: int, kind: str) -> None:
    async def talk(door: Door, client: httpx.AsyncClient) -> None:
        await ask(client)
        assert await give(client, body) == (status, kind)
        assert await give(client, {"reward": 0.5}) == (200, "")

    score = run_to_score(talk).score
    assert score is not None and (score.reward, score.parts.get("style")) == (0.5, None)


def test_a_reply_needs_a_number_and_a_wrong_key_gives_no_reward() -> None:
    async def talk(door: Door, client: httpx.AsyncClient) -> None:
        id = (await ask(client))["id"]
        assert await give(client, {"reward": None, "of": id}) == (400, "invalid_request")
        with pytest.raises(RewardRefused, match="the key of a rollout") as refused:
            await asyncio.to_thread(send, door.url, "sk-other", 1.0)
        assert refused.value.status == 401 and not refused.value.expired
        await give(client, {"reward": 0.5})

    score = run_to_score(talk).score
    assert score is not None and score.reward == 0.5


def test_a_reward_of_none_leaves_the_rollout_unscored() -> None:
    async def talk(door: Door, client: httpx.AsyncClient) -> None:
        id = (await ask(client))["id"]
        await give(client, {"reward": 1.0, "of": id})
        await asyncio.to_thread(send, f"{door.url}/v1", door.reward_key, None)

    score = run_to_score(talk).score
    assert score is not None and (score.reward, score.per_turn) == (None, None)


def test_a_repeated_reward_counts_once_and_the_latest_of_a_target_counts() -> None:
    async def talk(door: Door, client: httpx.AsyncClient) -> None:
        await ask(client)
        first = {"reward": 0.5, "id": "r-1"}
        assert await give(client, first) == (200, "")
        assert await give(client, {"reward": 0.75}) == (200, "")
        assert await give(client, first) == (200, ""), "sent again: it came before the other"
        assert await give(client, {**first, "reward": 0.6}) == (409, "conflict")

    score = run_to_score(talk).score
    assert score is not None and score.reward == 0.75


def test_a_reward_may_come_after_the_program_and_late_rewards_are_counted() -> None:
    """The key outlives the door, for rewards alone. Another door holds the server."""

    async def main() -> None:
        doors: list[Door] = []

        async def talk(door: Door, client: httpx.AsyncClient) -> None:
            await ask(client)
            doors.append(door)

        outside = Outside(talk)
        async with open_door(opened(says())) as other:
            running = asyncio.create_task(outside.run())
            while not doors:
                await asyncio.sleep(0)
            door = doors[0]
            async with httpx.AsyncClient(base_url=door.url, headers={"x-api-key": door.key}) as client:
                while (await client.get("/v1/models")).status_code == 200:
                    pass
                await asyncio.to_thread(send, door.url, door.reward_key, numpy.float32(0.5))  # any library's number
                finished = await running
                assert finished.score is not None and finished.score.reward == 0.5
                with pytest.raises(RewardRefused, match="expired") as refused:
                    await asyncio.to_thread(send, door.url, door.reward_key, 1.0)
                assert refused.value.expired
                none = await client.post("/v1/rewards", json={"reward": 1}, headers={"x-api-key": other.key})
                assert none.status_code == 403
        metrics = outside.runner.metrics()
        assert (metrics["rollout/rewards_expired"], metrics["rollout/rewards_missing"]) == (1.0, 0.0)

    asyncio.run(main())


def test_a_rollout_without_its_final_reward_is_not_scored() -> None:
    """What turns earned is no score before the final reward."""

    async def talk(door: Door, client: httpx.AsyncClient) -> None:
        await give(client, {"reward": 1.0, "of": (await ask(client))["id"]})

    outside = Outside(talk, within_s=0.0)
    score = asyncio.run(outside.run()).score
    assert score is not None and score.reward is None
    assert outside.runner.metrics()["rollout/rewards_missing"] == 1.0


def test_a_run_that_takes_no_rewards_refuses_them() -> None:
    async def talk(door: Door, client: httpx.AsyncClient) -> None:
        await ask(client)
        assert await give(client, {"reward": 1.0}) == (403, "no_rewards")

    score = run_to_score(talk, within_s=None).score
    assert score is not None and score.reward == 0.0


def test_an_acknowledged_reward_survives_kill_9_and_counts_in_the_rebuilt_rollout(tmp_path: Path) -> None:
    """The first process is killed while the program goes on; in the second, the program gives none."""
    file = tmp_path / "store.sqlite"
    read, write = os.pipe()

    async def talk(door: Door, client: httpx.AsyncClient) -> None:
        id = (await ask(client))["id"]
        assert await give(client, {"reward": 0.5, "of": id}) == (200, "")
        assert await give(client, {"reward": 0.75}) == (200, "")
        os.write(write, b"given")
        await asyncio.Event().wait()

    async def again(door: Door, client: httpx.AsyncClient) -> None:
        await ask(client)

    process = os.fork()
    if process == 0:
        try:
            asyncio.run(Outside(talk, store=SqliteStore(file)).run())
        finally:
            os._exit(1)
    os.close(write)
    assert os.read(read, 5) == b"given"
    os.close(read)
    os.kill(process, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL
    with closing(SqliteStore(file)) as store:
        entries: list[Mapping[str, Any]] = [e.data for _, e in store.entries("rl", name="rl/0/0", kinds=("reward",))]
        assert [entry["reward"] for entry in entries] == [0.5, 0.75]
        score = asyncio.run(Outside(again, "not sampled", store=store).run()).score
        assert score is not None and (score.reward, score.per_turn) == (0.75, (0.5,))


def test_a_reward_that_cannot_be_stored_is_not_acknowledged_and_does_not_count() -> None:
    stored: list[Mapping[str, Any]] = []

    def record(data: Mapping[str, Any]) -> None:
        stored.append(data)
        if len(stored) == 1:
            raise StoreError("disk full")

    async def main() -> None:
        session: Any = opened(says(said("A")))
        session.rewards = OutsideRewards(session.id, 5.0, record=record)
        async with open_door(session) as door, httpx.AsyncClient(base_url=door.url) as client:
            client.headers["x-reward-key"] = door.reward_key
            assert await give(client, {"reward": 0.5}) == (503, "not_stored")
            assert not session.rewards.final
            assert await give(client, {"reward": 0.5}) == (200, "")
            assert session.rewards.final
            await session.rewards.close()

    asyncio.run(main())


def test_the_recipe_sets_the_wait_for_the_final_reward() -> None:
    async def main() -> bool:
        rewards = OutsideRewards("rl/0/0", 600.0)
        rewards.give(OutsideReward(reward=1.0, final=False))
        return await rewards.wait()

    assert run_virtual(main()) == (False, 600.0)


def test_a_world_of_several_roles_is_refused() -> None:
    class Two(ToyEnv):
        roles = ("white", "black")

    class TwoWorld(ToyWorld):
        def make(self) -> ToyEnv:
            return Two()

    async def agent(episode: Episode) -> None:
        episode.session("white")

    config = RolloutConfig(rewards=RewardsConfig(within_s=1.0), retries=RetriesConfig(rebuilds=0))
    recorder = Recorder(says(), RENDERER, max_context=3000)
    runner = RolloutRunner(TwoWorld(), NoBoxes(), recorder, CallableHarness(agent, "agent"), config)
    with refused_at("rollout.rewards.within_s", "an environment of one role"):
        asyncio.run(runner.run(toy_task(), rollout_id="rl/0/0", index=0, seed=7))


def test_a_recipe_with_external_rewards_needs_a_waiting_time() -> None:
    tables: dict[str, Any] = {
        "run": {"name": "outside"},
        "models": {"policy": {"path": "model"}},
        "env": {"reward": "outside", "data": "rows.jsonl"},
    }
    with pytest.raises(msgspec.ValidationError, match="rollout.rewards.within_s must be set where env.reward is outsi"):
        msgspec.convert(tables, RunConfig)
    tables["rollout"] = {"rewards": {"within_s": 60}}
    assert msgspec.convert(tables, RunConfig).rollout.rewards.within_s == 60
