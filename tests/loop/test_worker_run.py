"""A run whose rollouts are played by workers, which are processes of their own, without Sparring; some are killed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
from forked import Forked
from test_gateway_run import Gateway

import sparring.workers
from sparring.cli.main import main
from sparring.store.sqlite import SqliteStore

WORKER = """
import http.client, json, sys, time

sys.path.insert(0, sys.argv[1])
from sparring.workers import claim

file, name = sys.argv[2:]
keys = json.load(open(file))


def ask(rollout, messages):
    body = {"model": "policy", "messages": messages}
    headers = {"Authorization": "Bearer " + rollout.key}
    while True:  # as the vendors' clients do
        try:
            connection = http.client.HTTPConnection(rollout.url.removeprefix("http://"))
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 503:
                return response.status, json.loads(response.read())
        except (OSError, http.client.HTTPException):
            pass
        time.sleep(0.05)


for rollout in claim(keys["url"], keys["worker_key"], worker=name):
    status, answer = ask(rollout, rollout.messages)
    assert status in (200, 401), answer
    print("has", rollout.rollout, flush=True)
    if name == "dies":
        sys.stdin.read()
    if status == 200:
        rollout.finish(reward=len(answer["choices"][0]["message"]["content"]) % 7 / 8)
"""
SETTINGS = (
    'run.stages=["rl"]',
    "env.name=",
    "env.reward=outside",
    "rollout.harness=workers",
    "rollout.rewards.within_s=60",
    "rollout.gateway.lease_s=1",
    "env.limits.max_turns=2",
    "env.limits.max_tokens=60",
    "observe.lines_every_s=0",
)


@contextmanager
def worker(folder: Path, keys: Path, name: str) -> Iterator[subprocess.Popen[str]]:
    """A worker with a copy of the client, and nothing else of Sparring."""
    copy = folder / "sparring"
    copy.mkdir(exist_ok=True)
    for file in ("workers.py", "rewards.py"):
        (copy / file).write_text((Path(sparring.workers.__file__).with_name(file)).read_text())
    words = [sys.executable, "-I", "-S", "-c", WORKER, str(folder), str(keys), name]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def command(recipe: Path, folder: Path, *more: str) -> list[str]:
    """The words of a run of four steps, of 24 rollouts, whose tasks lie in a folder."""
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n} + 1 = ?"}) + "\n" for n in range(20)))
    settings = (*SETTINGS, f"env.data={rows}", "rl.steps=4", *more)
    return ["run", str(recipe), *(word for setting in settings for word in ("--set", setting))]


def check_played(folder: Path, lost: int) -> None:
    """Check that each rollout of a run was played and rewarded once, and how often its worker was lost."""
    with closing(SqliteStore(folder / "store.sqlite", read_only=True)) as store:
        groups = list(store.groups(stage="rl"))
        notes = [dict(entry.data) for _, entry in store.entries("rl", kinds=("program",))]
    ids = [rollout.id.partition("/retry")[0] for group in groups for rollout in group.rollouts]
    assert sorted(ids) == sorted({f"rl/{group}/{place}" for group in range(8) for place in range(3)})
    for group in groups:
        assert all("/broken-" in rollout.id for rollout in group.failed), "attempts whose worker was lost"
        for rollout, score in zip(group.rollouts, group.scores, strict=True):
            (turn,) = rollout.trajectories[0].turns
            assert score.reward == len(turn.message.content if turn.message else "") % 7 / 8
    assert [note["worker"] for note in notes if note["outcome"] == "lost"].count("dies") == lost


def test_a_field_that_no_task_has_is_refused_and_one_that_some_have_is_not(
    given: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def checked(fields: str) -> tuple[int, str]:
        words = command(given, tmp_path, f"rollout.gateway.shown_to_workers={fields}")
        rows = [{"prompt": f"{n} + 1 = ?", "page": n} for n in range(20)]
        rows[7]["hint"] = "x"
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return main(["check", *words[1:]]), capsys.readouterr().err

    code, error = checked('["page", "pages"]')
    assert code == 2 and error.startswith(
        "rollout.gateway.shown_to_workers: expected fields of a task's data: hint, id, page"
    )
    assert checked('["page", "hint"]')[0] == 0


@pytest.mark.slow
def test_workers_that_are_killed_and_a_run_that_is_killed_lose_and_double_nothing(
    given: Path, tmp_path: Path, wait_for: Callable[[subprocess.Popen[str], str], None]
) -> None:
    """Two workers die in mid-rollout and one goes on; then the run is killed, and another process ends it."""
    words = command(given, tmp_path)
    folder = given.parent / "runs/tiny"

    keys = folder / "keys.json"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with ExitStack() as stack:
        run = stack.enter_context(Forked(words, **pipes))
        wait_for(run, "run: programs elsewhere: http://127.0.0.1:")
        assert keys.stat().st_mode & 0o777 == 0o600
        first = keys.read_text()
        for _ in range(2):
            dying = stack.enter_context(worker(tmp_path, keys, "dies"))
            assert dying.stdout is not None and dying.stdout.readline().startswith("has rl/0/")
            dying.kill()
        stack.enter_context(worker(tmp_path, keys, "lives"))
        wait_for(run, "rl 2/4")
        run.kill()
        run.communicate()
    with ExitStack() as stack:
        run = stack.enter_context(Forked(words, **pipes))
        wait_for(run, "run: programs elsewhere: http://127.0.0.1:")
        assert json.loads(keys.read_text())["worker_key"] == json.loads(first)["worker_key"]
        living = stack.enter_context(worker(tmp_path, keys, "lives"))
        output, _ = run.communicate(timeout=300)
        assert run.returncode == 0, output
        assert living.wait(timeout=90) == 0, "the worker ends with the run"
    check_played(folder, lost=2)


@pytest.mark.slow
def test_a_gateway_that_is_killed_three_times_and_a_run_that_is_killed_lose_and_double_nothing(
    given: Path, tmp_path: Path, wait_for: Callable[[subprocess.Popen[str], str], None]
) -> None:
    """Workers reach the run by a gateway's process alone, which is there when the run is killed and goes on."""
    folder = given.parent / "runs/tiny"
    gateway = Gateway(folder, tmp_path / "process")
    address = f"http://127.0.0.1:{gateway.port}"
    words = command(given, tmp_path, f"rollout.gateway.url={address}")
    keys = folder / "keys.json"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with ExitStack() as stack:
        run = stack.enter_context(Forked(words, **pipes))
        wait_for(run, "gateway: programs reach this run at")
        assert json.loads(keys.read_text())["url"] == address
        process = gateway.start()
        dying = stack.enter_context(worker(tmp_path, keys, "dies"))
        assert dying.stdout is not None and dying.stdout.readline().startswith("has rl/0/")
        dying.kill()
        living = stack.enter_context(worker(tmp_path, keys, "lives"))
        assert living.stdout is not None
        for _ in range(3):
            for _ in range(2):
                assert living.stdout.readline().startswith("has rl/")
            process.kill()
            process.wait()
            process = gateway.start()
        wait_for(run, "rl 2/4")
        run.kill()
        run.communicate()
        again = stack.enter_context(Forked(words, **pipes))
        output, _ = again.communicate(timeout=300)
        assert again.returncode == 0, output
        assert process.wait(timeout=30) == 0, "the gateway ends with the run"
        assert living.wait(timeout=90) == 0, "and so does the worker"
    check_played(folder, lost=1)
