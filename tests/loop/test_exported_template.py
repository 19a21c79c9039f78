"""The exported folder in the hands of the transformers library: its template writes the prompts that the run recorded."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from sparring.cli.main import main
from sparring.render.dialect import message_dicts, tool_dicts
from sparring.render.load import load_renderer
from sparring.stages.models.exported_format import recorded_prompts
from sparring.store.sqlite import SqliteStore

TINY = Path(__file__).parent / "tiny.toml"
WORLD = """
from sparring.envs.base import Env, tool
from sparring.types import Message, Observation, Score, ToolCall


class Thrice(Env):
    def generate(self, random):
        return {"prompt": f"{random.randrange(10**4)}?"}

    TOOL

    async def score(self, trajectory):
        return Score(reward=float(trajectory.answer is not None and trajectory.answer.message.content == "7"))

    def expert(self, task):
        return reply
"""
TALKS = """async def step(self, reply):
        self.turn = getattr(self, "turn", 0) + 1
        said = (Message(role="user", content=f"{self.turn} go"),)
        return Observation(done=True) if self.turn >= 3 else Observation(messages=said)"""
CALLS = '''@tool
    def look(self, at: str) -> str:
        """Look.

        Args:
            at: what.
        """
        return "7"'''
SAYS = """

def reply(messages):
    return Message(role="assistant", content="7", reasoning=THOUGHT)
"""
ASKS = """

def reply(messages):
    if messages[-1].role == "tool":
        return Message(role="assistant", content="7", reasoning=THOUGHT)
    calls = tuple(ToolCall(id=f"call_{n}", name="look", arguments={"at": str(n)}) for n in range(2))
    return Message(role="assistant", reasoning=THOUGHT, tool_calls=calls)
"""


@pytest.mark.slow
@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize(("acts", "expert"), [(TALKS, SAYS), (CALLS, ASKS)], ids=["talks", "calls"])
def test_it_writes_every_prompt_that_messages_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], acts: str, expert: str, thinking: bool
) -> None:
    from transformers import AutoTokenizer

    world = WORLD.replace("TOOL", acts) + expert.replace("THOUGHT", '"so"' if thinking else "None")
    (tmp_path / "thrice.py").write_text(world)
    settings = (
        f"run.directory={tmp_path}",
        f"env.name={tmp_path / 'thrice.py'}:Thrice",
        f"models.policy.thinking={str(thinking).lower()}",
        'run.stages=["init", "sft", "rl", "export"]',
        "sft={ steps = 200, rows_per_step = 8, train = { learning_rate = 6e-3, save_every = 0 } }",
        "rl={ steps = 2, groups_per_step = 3, train = { learning_rate = 1e-5 } }",
        "rollout.sampling.max_turn_tokens=60",
        "env.limits={ max_turns = 3, max_tokens = 180 }",
    )
    assert main(["run", str(TINY), *(word for setting in settings for word in ("--set", setting))]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("export: the chat template")]
    theirs = AutoTokenizer.from_pretrained(tmp_path / "tiny/export")
    ours = load_renderer(tmp_path / "tiny/init/model", thinking=thinking, thoughts="kept")
    with closing(SqliteStore(tmp_path / "tiny/store.sqlite", read_only=True)) as store:
        prompts = list(recorded_prompts(store))
    same = []
    for prompt in prompts:
        messages, tools = message_dicts(prompt.messages), tool_dicts(prompt.tools) or None
        ids = theirs.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
        if tuple(ids) == tuple(prompt.tokens):
            same.append(prompt)
        else:  # a reply was sampled as no message says it: broken JSON, other blanks
            assert ours.render(prompt.messages, prompt.tools).tokens != tuple(prompt.tokens), theirs.decode(ids)
    assert len(same) >= len(prompts) / 2 and max(len(prompt.messages) for prompt in same) >= 3
    assert said[0] == f"export: the chat template writes {len(same)} of {len(prompts)} recorded prompts id by id"
    assert not any("does not write" in line for line in said)
