"""The live page: whom it lets in, what it finds, and what a real browser makes of it."""

import asyncio
import csv
import dataclasses
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from starlette.types import ASGIApp
from stored import groups_of

from sparring.cli.main import main
from sparring.dashboard.live import ROWS, LivePage
from sparring.store.sqlite import SqliteStore

HERE = "http://127.0.0.1:8080"


def reader_of(application: ASGIApp) -> TestClient:
    """A reader with the key, which the address brought and a cookie keeps."""
    client = TestClient(application, base_url=HERE)
    assert client.get("/", params={"key": "secret"}).status_code == 200
    return client


@pytest.fixture
def application(sample_run: Path) -> ASGIApp:
    return LivePage(sample_run, "127.0.0.1", "secret").application()


@pytest.fixture
def reader(application: ASGIApp) -> TestClient:
    return reader_of(application)


def test_only_who_has_the_key_is_let_in_and_only_under_the_servers_name(application: ASGIApp) -> None:
    for path in ("/", "/figures", "/rollouts", "/rollout?id=rl/0/0"):
        assert TestClient(application, base_url=HERE).get(path).status_code == 401
        assert TestClient(application, base_url=HERE).get(path, params={"key": "guess"}).status_code == 401
        elsewhere = TestClient(application, base_url="http://evil.example:8080").get(path, params={"key": "secret"})
        assert elsewhere.status_code == 421 and "reward" not in elsewhere.text


def test_the_key_does_not_stay_in_the_address(application: ASGIApp) -> None:
    client = TestClient(application, base_url=HERE)
    welcome = client.get("/", params={"key": "secret"}, follow_redirects=False)
    assert (welcome.status_code, welcome.headers["location"]) == (303, "/")
    assert "HttpOnly" in welcome.headers["set-cookie"] and "SameSite=strict" in welcome.headers["set-cookie"]


def test_every_rollout_is_listed_once_and_can_be_opened(sample_run: Path, reader: TestClient) -> None:
    recorded = [r.id for g in groups_of(sample_run) for r in (*g.rollouts, *g.failed)]
    listed: list[str] = []
    while True:
        answer = reader.get("/rollouts", params={"after": len(listed)}).json()
        listed += [line["id"] for line in answer["lines"]]
        if len(answer["lines"]) < ROWS:
            break
    assert listed == recorded[::-1] and answer["all"] == len(recorded)
    for id in (recorded[0], recorded[len(recorded) // 2], recorded[-1]):
        opened = reader.get("/rollout", params={"id": id}).json()
        assert opened["rollout"]["id"] == id
        tokens = {str(token) for segment in opened["rollout"]["segments"] for token in segment["tokens"]}
        assert tokens == set(opened["pieces"])
    assert reader.get("/rollout", params={"id": "rl/9999/0"}).status_code == 404


def test_a_search_looks_at_tasks_questions_and_answers(sample_run: Path, reader: TestClient) -> None:
    groups = groups_of(sample_run)

    def found(**query: str) -> int:
        return reader.get("/rollouts", params=query).json()["found"]

    assert found(words="GCD:1") == sum(len(g.rollouts) + len(g.failed) for g in groups if "gcd:1" in g.task.id)
    assert found(success="not solved") == sum(not s.success for g in groups for s in g.scores)
    assert found(outcome="infra_failed") == found(reward="not scored") == sum(len(g.failed) for g in groups)
    assert found(words="café gcd", success="not solved") == 0, "the answer to the last question is the title"
    assert found(words="a sum", dataset="gcd") == sum(len(g.rollouts) for g in groups if g.task.tag == "gcd")
    assert found(no_axis="x") == found(after="no number") == found()


def test_a_search_for_more_than_could_be_found_is_refused(reader: TestClient) -> None:
    long = reader.get("/rollouts", params={"words": "a b " * 50 + "a"})
    assert long.status_code == 400 and "at most 200 characters of several words, got 201" in long.text
    assert reader.get("/rollouts", params={"words": "g c " * 50}).json()["found"]


def test_a_search_holds_up_no_other_request(sample_run: Path) -> None:
    """The search stands still at its first line until another request has been answered."""
    page, answered = LivePage(sample_run, "127.0.0.1", "secret"), threading.Event()
    application = page.application()

    class Searched(str):
        def __contains__(self, word: object) -> bool:
            searching.set()
            return answered.wait(30) and super().__contains__(word)  # type: ignore[operator]

    def ask(path: str) -> int:
        return reader_of(application).get(path).status_code

    searching = threading.Event()
    assert ask("/rollouts") == 200
    index = page._index
    line = index.lines()[0]
    index._lines[line.stage][line.facts["id"]] = dataclasses.replace(line, text=Searched(line.text))
    with ThreadPoolExecutor() as pool:
        search = pool.submit(ask, "/rollouts?words=gcd")
        assert searching.wait(30) and ask("/figures") == ask("/rollouts") == 200
        answered.set()
        assert search.result() == 200


def test_what_is_recorded_while_somebody_looks_is_shown(sample_run: Path, tmp_path: Path) -> None:
    group, *others = groups_of(sample_run)
    store = SqliteStore(tmp_path / "store.sqlite")
    store.append(group, stage="rl")
    reader = reader_of(LivePage(tmp_path, "127.0.0.1", "secret").application())
    seen = reader.get("/figures").json()
    assert reader.get("/figures", params={"seen": seen["stamp"]}).status_code == 204
    store.append(others[0], stage="rl")
    store.metric("rl", 1, {"rollout/reward": 0.5})
    more = reader.get("/figures", params={"seen": seen["stamp"]}).json()
    assert more["rollouts_seen"] == len(group.rollouts) + len(others[0].rollouts)
    assert more["metrics"]["rl"]["values"]["rollout/reward"] == [0.5]
    store.truncate("rl", 0, first_group=1)  # as a resume that does the second group again
    assert reader.get("/rollouts").json()["all"] == len(group.rollouts)
    store.close()


def test_a_browser_opens_the_rollout_of_a_link(sample_run: Path, browse: Callable[[str], str]) -> None:
    start = "import sys; from sparring.cli.main import main; sys.exit(main(['report', sys.argv[1], '--serve']))"
    serving = subprocess.Popen([sys.executable, "-c", start, sample_run], stdout=subprocess.PIPE, text=True)
    assert serving.stdout is not None
    document = browse(serving.stdout.readline().strip() + "#rl%2F7%2F4")
    serving.send_signal(signal.SIGINT)
    assert serving.wait() == 130
    assert 'data-ready="yes"' in document and "· live" in document
    assert document.count('role="option"') == ROWS
    assert "SandboxError" in document[document.index('class="talk"') :]
    assert "<title>sample · Sparring</title>" in document and "<img" not in document


def test_curves_are_written_as_tables(sample_run: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["report", str(sample_run), "--csv"]) == 0
    files = [Path(line) for line in capsys.readouterr().out.split()]
    assert [file.name for file in files] == ["sft.csv", "rl.csv"]
    with closing(SqliteStore(sample_run / "store.sqlite", read_only=True)) as store:
        rows = store.metrics("rl")
    with files[1].open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [(int(row.pop("step")), {k: float(v) for k, v in row.items()}) for row in table] == rows


@pytest.mark.parametrize("host", ["[", "[::1", "127.0.0.1:x", "127.0.0.1:99999999", "", "a@b", "\u00b2", "x" * 60_000])
def test_a_host_that_is_none_is_answered(application: ASGIApp, host: str) -> None:
    """No page elsewhere can ask by such a name: it may be taken for none."""
    client = TestClient(application, base_url=HERE)
    answer = client.get("/", params={"key": "secret"}, headers={"host": host.encode("latin-1")}, follow_redirects=False)
    assert answer.status_code in (303, 421)


def test_a_query_that_is_no_text_is_refused(application: ASGIApp) -> None:
    sent: list[object] = []

    async def receive() -> dict[str, object]:
        return {"type": "http.disconnect"}

    async def send(message: dict[str, object]) -> None:
        sent.append(message.get("status"))

    scope = {"type": "http", "method": "GET", "path": "/rollouts", "root_path": "", "scheme": "http", "headers": []}
    asked = {**scope, "server": ("127.0.0.1", 8080), "query_string": b"key=secret&words=\xff"}
    asyncio.run(application(asked, receive, send))
    assert sent[0] == 421


def test_parameters_of_any_kind_are_answered(reader: TestClient) -> None:
    for odd in ("", "\0", "%ED%A0%80", "9" * 5000, "-1", "\u0663", "x" * 50_000, "'\"; --"):
        for name in ("words", "after", "task", "outcome", "nowhere"):
            assert reader.get("/rollouts", params={name: odd}).status_code == 200, (name, odd)
        assert reader.get("/rollout", params={"id": odd}).status_code == 404
        assert reader.get("/figures", params={"seen": odd}).status_code == 200
        assert TestClient(reader.app, base_url=HERE).get("/", params={"key": odd}).status_code == 401
