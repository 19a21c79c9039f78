"""`sparring check` says which harness has played a task."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sparring.cli.main import main

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("harness", "world", "said"),
    [
        (
            "workers",
            "tiny_world.py:Sums",
            ["harness: workers will play; a worker of this check played task Sums/train/0 through their door"],
        ),
        (
            f"{HERE / 'clerk.toml'}",
            "clerk_world.py:Errands",
            [f"harness: {HERE / 'clerk.toml'} played task Errands/train/0, whose replies were empty, to its end"],
        ),
        (
            f"{HERE / 'client_world.py'}:agent",
            "tiny_world.py:Sums",
            [
                f"harness: {HERE / 'client_world.py'}:agent played task Sums/train/0, whose replies were empty, "
                "to its end"
            ],
        ),
        ("chat", "tiny_world.py:Sums", []),
    ],
)
def test_check_says_who_played_a_task_before_the_run(
    given: Path, capsys: pytest.CaptureFixture[str], harness: str, world: str, said: list[str]
) -> None:
    words = [f"rollout.harness={harness}", f"env.name={HERE / world}", "env.limits.max_turns=3"]
    words.append('run.stages=["init", "rl"]')  # one of these agents never gets a sum right, which sft would refuse
    assert main(["check", str(given), *(word for each in words for word in ("--set", each))]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("harness: ")] == said


def test_each_of_several_environments_has_a_line(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of their harnesses each played a task of its own environment."""
    head, _, rest = given.read_text().partition("[env]")
    sums = f'name = "{HERE / "tiny_world.py"}:Sums"\nheld_out = 6\ndemonstrations = 4\n'
    places = f'[envs.near]\n{sums}\n[envs.far]\n{sums}harness = "workers"\n'
    given.write_text(f"{head}{places}[sft]{rest.partition('[sft]')[2]}")
    client = f"{HERE / 'client_world.py'}:agent"
    assert main(["check", str(given), "--set", f"rollout.harness={client}", "--set", 'run.stages=["rl"]']) == 0
    near, far = [line for line in capsys.readouterr().out.splitlines() if line.startswith("harness: ")]
    assert near.startswith(f"harness: {client} played task near/")
    assert far.startswith("harness: workers will play; a worker of this check played task far/")


AGENT = """
import httpx

from sparring.gateway.server import open_door


async def agent(episode):
    await episode.env.open(episode.task, episode.box)
    messages = [{"role": role, "content": "Be brief."} for role in ("system", "system", "user")]
    async with open_door(episode.session()) as door, httpx.AsyncClient(base_url=door.url) as http:
        headers = {"authorization": f"Bearer {door.key}"}
        await http.post("/v1/chat/completions", json={"model": "policy", "messages": messages}, headers=headers)
"""

NO_SYSTEM_ROLE = """{%- for message in messages if message.role == 'system' -%}
    {{- raise_exception('System role not supported') -}}
{%- endfor -%}
"""


def test_a_program_whose_every_request_the_chat_format_refuses_is_not_ready_to_run(
    given: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it is played with is rendered as the run will: else each of its rollouts would be a request and a refusal."""
    folder = shutil.copytree(checkpoint, tmp_path / "strict")
    template = folder / "chat_template.jinja"
    template.write_text(NO_SYSTEM_ROLE + template.read_text())
    (tmp_path / "agent.py").write_text(AGENT)
    words = [f"rollout.harness={tmp_path / 'agent.py'}:agent", f"models.policy.path={folder}"]
    words += ["models.policy.renderer=template", 'run.stages=["rl"]']
    assert main(["check", str(given), *(word for each in words for word in ("--set", each))]) == 2
    error = capsys.readouterr().err
    assert "rollout.harness: expected a harness that requests its replies from the session" in error
    assert "refused every request" in error and "System role not supported" in error


def test_tools_that_an_agent_brings_are_proven(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"rollout.harness={HERE / 'client_world.py'}:bringing", f"env.name={HERE / 'tiny_world.py'}:Sums"]
    words.append('run.stages=["rl"]')
    assert main(["check", str(given), *(word for each in words for word in ("--set", each))]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "of a task or an agent" in line]
    assert said == [
        "render: calls of the tool peek, with values of their own schemas, parse to the same names and arguments (of "
        "a task or an agent)"
    ]
