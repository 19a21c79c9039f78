"""Where the policy has no turn there is nothing to score: neither a zero nor a baseline (law 6)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from fates import FatedBoxes, Fates, make_stack
from tables import with_settings

from sparring.algo.credit.members import members
from sparring.errors import BadInput, LimitReached, SpoiltFile
from sparring.gateway.server import open_door
from sparring.generation import Constraint, Sampling
from sparring.harness.chat import ChatHarness
from sparring.harness.load import CallableHarness
from sparring.observe.metrics import Metrics
from sparring.observe.survival import lost_rollouts
from sparring.protocols import Episode
from sparring.record.recorder import Recorder
from sparring.reply import ReplyRequest, whole_reply
from sparring.rollout.config import RolloutConfig
from sparring.rollout.evaluate import EvalPlan, Finding, evaluate, recorded, summarize
from sparring.rollout.metrics import measure
from sparring.rollout.runner import Finished, RolloutRunner
from sparring.store.sqlite import SqliteStore
from sparring.tasks.repetition import LostTasksAgain
from sparring.testing.scripted_engine import ScriptedEngine
from sparring.testing.toy import ToyEnv, ToyWorld, toy_renderer, toy_task
from sparring.types import Evidence, Group, Message, Observation, Outcome, Score, Task

RENDERER = toy_renderer()
LONG, SHORT = (Message(role="user", content=text) for text in ("word " * 3000, "Hi"))
FULL = Outcome(kind="truncated", reason="context_length")
CHAT = "/v1/chat/completions"
ANSWERED = Outcome(kind="completed", reason="answered")


def runner_of(agent: object, env: type = ToyEnv, **settings: object) -> RolloutRunner:
    """A runner of this harness, with a policy that says a long sentence."""
    stack = make_stack(rebuilds=0)
    engine = ScriptedEngine(lambda request: RENDERER.tokenizer.encode("I say this and that."))
    recorder = Recorder(engine, RENDERER, max_context=500, sampling=Sampling(max_tokens=settings.pop("most", 100)))

    class World(ToyWorld):
        def make(self) -> ToyEnv:
            return env()

    harness = agent if hasattr(agent, "run") else CallableHarness(agent)
    config = with_settings(RolloutConfig(), rebuilds=0, **settings)
    return RolloutRunner(World(), FatedBoxes(Fates()), recorder, harness, config, log=stack.runner.log)


def run_rollout(agent: object, env: type = ToyEnv, task: Task = toy_task(), **settings: object) -> Finished:
    return asyncio.run(runner_of(agent, env, **settings).run(task, rollout_id="rl/0/0", index=0, seed=1))


async def asks_nothing(episode: Episode) -> None:
    """The policy is not asked."""


async def cannot_start(episode: Episode) -> None:
    with suppress(ImportError):
        import no_module_here  # noqa: F401


async def is_refused(episode: Episode) -> None:
    with suppress(BadInput):
        await whole_reply(
            episode.session().reply(ReplyRequest([SHORT], constraint=Constraint(kind="regex", source="(")))
        )


async def gets_a_title(episode: Episode) -> None:
    await whole_reply(episode.session().reply(ReplyRequest([SHORT], evidence=Evidence(label="auxiliary"))))


async def gets_nothing(episode: Episode) -> None:
    reply = await whole_reply(episode.session().reply(ReplyRequest([SHORT])))
    episode.session().deliver(reply.id, False)


class OverEnv(ToyEnv):
    """It has ended before anybody says anything."""

    async def open(self, task: Task, box: object) -> Observation:
        return Observation(done=True)


class SpoiltEnv(ToyEnv):
    """Its opening fails as only a policy's doing can."""

    async def open(self, task: Task, box: object) -> Observation:
        raise SpoiltFile("notes.txt is a pipe")


@pytest.mark.parametrize(
    ("agent", "env", "told"),
    [
        (asks_nothing, ToyEnv, "requested no reply"),
        (cannot_start, ToyEnv, "requested no reply"),
        (is_refused, ToyEnv, "was refused every request, the last for: "),
        (gets_a_title, ToyEnv, "got no reply to train, of 1 that are auxiliary"),
        (gets_nothing, ToyEnv, "got no reply to train, of 1 that are lost"),
        (ChatHarness(), OverEnv, "requested no reply"),
        (ChatHarness(), SpoiltEnv, "notes.txt is a pipe"),
    ],
)
def test_a_harness_without_a_reply_fails_with_the_last_refusal(agent: object, env: type, told: str) -> None:
    done = run_rollout(agent, env)
    outcome = done.rollout.outcome
    assert (outcome.kind, done.score) == ("infra_failed", None)
    assert outcome.failure is not None and outcome.failure.error == "Unanswered" and told in outcome.failure.message


@pytest.mark.parametrize(
    ("key", "fields", "paths", "told"),
    [
        ("another", {}, (CHAT,), "meanwhile the gateway turned a client away: "),
        ("another", {}, ("/chat/completions",), "meanwhile the gateway turned a client away: "),
        ("", {"n": 0}, (CHAT,), "refused every request, the last for: n: expected"),
        ("", {"model": "gpt-9"}, (CHAT,), "refused every request, the last for: model: expected"),
        ("", {"messages": 7}, (CHAT,), "refused every request, the last for: messages: expected"),
        ("", {}, ("/chat/completions",), "end the client's base URL with /v1"),
        ("", {}, ("/k/{key}/v1/v1/messages",), "leave /v1 out"),
        ("", {}, ("/v1/models",), "refused every request, the last for: method: expected GET"),
        (
            "",
            {"model": "gpt-9"},
            ("/v1/messages/count_tokens",),
            "refused every request, the last for: model: expected",
        ),
        ("", {"n": 0}, ("/v1/telemetry", CHAT, "/v1/telemetry"), "refused every request, the last for: n: expected"),
    ],
)
def test_the_failure_of_a_harness_names_the_gateways_refusal(
    key: str, fields: dict[str, object], paths: tuple[str, ...], told: str
) -> None:
    """A wrong path or method too, where no request for a reply was refused: agents ask for more than replies."""

    async def client(episode: Episode) -> None:
        async with open_door(episode.session()) as door, httpx.AsyncClient(base_url=door.url) as http:
            body = {"model": "policy", "messages": [{"role": "user", "content": "Hi"}], **fields}
            for path in paths:
                shown = {} if "{key}" in path else {"authorization": f"Bearer {key or door.key}"}
                answer = await http.post(path.format(key=door.key), json=body, headers=shown)
                assert answer.status_code >= 400

    runner = runner_of(client)
    failure = asyncio.run(runner.run(toy_task(), rollout_id="rl/0/0", index=0, seed=1)).rollout.outcome.failure
    assert failure is not None and told in failure.message


def asking(*prompts: Message, raises: bool = False) -> Callable[[Episode], Awaitable[None]]:
    """A harness that makes these requests, and goes on whatever becomes of them."""

    async def agent(episode: Episode) -> None:
        for prompt in prompts:
            try:
                await episode.session().complete([prompt])
            except LimitReached:
                if raises:
                    raise

    return agent


def test_a_first_prompt_that_does_not_fit_truncates_its_rollout_and_is_not_scored() -> None:
    for agent in (asking(LONG), asking(LONG, LONG), asking(LONG, raises=True)):
        done = run_rollout(agent)
        assert (done.rollout.outcome, done.score, done.broken) == (FULL, None, ())
    assert run_rollout(ChatHarness(), task=replace(toy_task(), messages=(LONG,))).score is None
    later = run_rollout(asking(SHORT, LONG))
    assert later.rollout.outcome == FULL and later.score is not None, "the policy had a turn"


def test_the_latest_request_decides_the_outcome() -> None:
    """One reply that was cut short, or a prompt that was too long, is no end of a rollout that goes on."""
    assert run_rollout(asking(LONG, SHORT)).rollout.outcome == ANSWERED
    assert run_rollout(asking(SHORT, SHORT), most=3).rollout.outcome == Outcome(kind="truncated", reason="max_tokens")
    cut = run_rollout(asking(*[SHORT] * 5), most=3, max_turns=2).rollout.outcome
    assert cut == Outcome(kind="truncated", reason="max_turns")

    async def cut_by_itself(episode: Episode) -> None:
        await whole_reply(episode.session().reply(ReplyRequest([SHORT], max_tokens=2)))

    assert run_rollout(cut_by_itself).rollout.outcome == ANSWERED


class TwoRoles(ToyEnv):
    """A user whom another model speaks for, and the policy."""

    roles = ("user", "policy", "critic")

    async def score_all(self, trajectories: object) -> Score:
        return Score(reward=1.0)

    async def step_of(self, role: str, reply: Message) -> Observation:
        return Observation()


def saying(**prompts: Message) -> Callable[[Episode], Awaitable[None]]:
    async def agent(episode: Episode) -> None:
        for role, prompt in prompts.items():
            with suppress(LimitReached):
                await episode.session(role).complete([prompt])

    return agent


def test_of_several_roles_those_of_the_policy_count() -> None:
    """What another model says is no turn of the policy; a role that was cut before its first turn is no member."""
    others = {"roles": {"user": "simulator"}}
    done = run_rollout(saying(user=SHORT, policy=LONG), TwoRoles, **others)
    assert (done.rollout.outcome, done.score) == (FULL, None)
    failure = run_rollout(saying(user=SHORT), TwoRoles, **others).rollout.outcome.failure
    assert failure is not None and failure.message == "requested no reply"
    done = run_rollout(saying(user=SHORT, policy=SHORT, critic=LONG), TwoRoles, **others)
    ended = {trajectory.role: trajectory.outcome for trajectory in done.rollout.trajectories}
    assert ended == {"user": ANSWERED, "policy": ANSWERED, "critic": FULL} and done.score is not None
    group = Group(id="rl/0", index=0, task=toy_task(), rollouts=(done.rollout,), scores=(done.score,))
    assert [member.trajectory.role for member in members(group, ())] == ["user", "policy"]


def test_a_group_of_prompts_that_do_not_fit_is_no_failure_and_does_not_come_again() -> None:
    silent = run_rollout(asking(LONG)).rollout
    group = Group(id="rl/0", index=0, task=toy_task(), rollouts=(), scores=(), failed=(silent,))
    metrics = Metrics()
    measure(metrics, group, lag=0)
    values = metrics.take()
    shares = [values[f"rollout/{name}"] for name in ("silent_rate", "left_rate", "infra_failure_rate")]
    assert shares == [1.0, 0.0, 0.0] and lost_rollouts(group) == []

    class Nothing:
        def next(self) -> None:
            return None

        def observe(self, group: Group) -> None:
            pass

    again = LostTasksAgain(Nothing(), 3)  # type: ignore[arg-type]
    again.observe(group)
    assert again.next() is None


def test_an_evaluation_leaves_a_prompt_that_does_not_fit_out_of_its_figures_for_good(tmp_path: Path) -> None:
    """It is neither a failure of the policy, nor lost, nor run again. Long prompts are rendered in a thread, for which a
    virtual clock does not wait."""
    long = replace(toy_task(), id="long", messages=(LONG,))
    plan = EvalPlan(tasks=[toy_task(), long], run_seed=1)

    async def evaluated(store: SqliteStore) -> dict[int, Finding]:
        return await evaluate(runner_of(ChatHarness()), plan, max_concurrent_rollouts=1, store=store)

    with closing(SqliteStore(tmp_path / "store.sqlite")) as store:
        findings = asyncio.run(evaluated(store))
        assert asyncio.run(evaluated(store)) == findings == recorded(plan, store)
    result = summarize(plan, findings)
    assert (result.rollouts, result.lost, result.lost_share) == (2, (), 0.0)
    assert result.outcomes == {"completed/answered": 1, "truncated/context_length": 1}
    assert (findings[1].reward, findings[1].failure) == (None, "") and len(result.tasks["long"].rewards) == 0
