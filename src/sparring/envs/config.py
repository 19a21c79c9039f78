"""The `[env]` section of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from sparring.envs.guests.pool import GuestConfig
from sparring.envs.rubrics.config import Part
from sparring.types import BoxSpec, Limits


class Columns(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[env.columns]`: names of the data's columns. All columns reach the environment as `task.data`."""

    prompt: str = "prompt"
    """Text of the question."""

    answer: str = "answer"
    """Right answer, which the reward compares with."""

    messages: str = "messages"
    """Conversation `[{role, content}, ...]`; where a row has one, it replaces the prompt."""

    id: str = "id"
    """Stable id of the row; its line number if the column is absent."""

    domain: str = "domain"
    """Subject of the row. It selects the parts of a rubric, and reports are split by it."""

    key: str = ""
    """Deduplication key for rows with identical prompts. Rows with equal keys count as one task and are held out
    together. Empty: the prompt is the key."""

    def mapping(self) -> Mapping[str, str]:
        """Return a mapping from our name of a column to its name in the file, for every column that is set."""
        return {name: column for name, column in msgspec.structs.asdict(self).items() if column}


class EnvConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[env]`: the world that the agent spars with."""

    name: str = ""
    """Built-in world, `package.module:Name`, or `path/to/file.py:Name`. Empty with `reward` or `rubric`."""

    args: dict[str, Any] = {}
    """Settings of the world, as its `Args` declares them."""

    reward: str = ""
    """Reward function instead of a name: `path/to/file.py:function` with `def function(completion: str, answer: str) ->
    float`, or TRL's `def function(completions, answer, **kwargs)`, which returns a list; or `outside`: every reward
    arrives by HTTP (`rollout.rewards.within_s`)."""

    guest: GuestConfig | None = None
    """World of other people instead of a name, in an interpreter of its own; see docs/guests.md."""

    rubric: dict[str, Part] = {}
    """Rubric instead of a name: its parts by name, each with a `kind`; see docs/rewards.md."""

    data: str = ""
    """Data set of tasks: a file of JSON Lines, a JSON array or CSV, each also `.gz`, or Parquet; a Hugging Face
    datasets folder; or a data set of the hub, `owner/name:split` (extra `datasets`)."""

    eval_data: str = ""
    """Data set of held-out tasks; empty: `held_out` prompts are taken out of `data`."""

    columns: Columns = Columns()
    """Names of the columns of both files."""

    held_out: int = 0
    """Number of tasks kept for evaluation; their prompts never occur in training. 0: 512, but at most a fifth of a
    file's distinct prompts."""

    held_out_share: float = 0.0
    """Share of a generated world's prompts that may be held out, chosen by a hash of the prompt. Of two runs with equal
    shares, neither trains on a prompt that the other holds out, whatever their seeds and `args`; use it for runs that
    build on each other. 0: a run only leaves out the prompts that it holds out itself."""

    demonstrations: int = 1024
    """Number of tasks that the world's expert demonstrates for supervised fine-tuning, unless the world's own settings
    give the number."""

    system: str = ""
    """System message before every prompt."""

    tools: tuple[Literal["python"], ...] = ()
    """Built-in tools for a `reward` function or a rubric; a named world brings its own tools."""

    limits: Limits = Limits()
    """Limits of one rollout."""

    box: BoxSpec = BoxSpec()
    """Box for the policy's code, if the world needs one."""

    def __post_init__(self) -> None:
        if sum(map(bool, (self.name, self.reward, self.rubric, self.guest))) != 1:
            raise ValueError("exactly one of name, reward, rubric and guest must be given")
        if (self.reward or self.rubric) and not self.data:
            raise ValueError(f"{'reward' if self.reward else 'rubric'} needs data, a file of tasks")
        if self.tools and not (self.reward or self.rubric):
            raise ValueError("tools belongs to reward and rubric; a named world brings its own tools")
        if self.eval_data and not self.data:
            raise ValueError("eval_data needs data")
        if self.held_out < 0 or self.demonstrations < 0:
            raise ValueError("held_out and demonstrations must be 0 or more")
        if not 0 <= self.held_out_share < 1:
            raise ValueError(f"held_out_share must be a share from 0 to below 1, got {self.held_out_share}")
        if self.held_out_share and self.data:
            raise ValueError("held_out_share belongs to generated worlds; data has held_out or eval_data")
