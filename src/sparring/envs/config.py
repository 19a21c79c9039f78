"""The `[env]` section of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from sparring.envs.rubrics.config import Part
from sparring.types import BoxSpec, Limits


class LimitsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[env.limits]`: limits of one rollout."""

    max_turns: int = 8
    """Maximum number of assistant messages."""

    max_tokens: int = 1024
    """Maximum number of sampled tokens over all turns."""

    max_tool_calls: int = 8
    """Maximum number of tool calls over all turns."""

    timeout_s: float = 120.0
    """Maximum wall-clock time of the rollout, in seconds."""

    def __post_init__(self) -> None:
        if min(self.max_turns, self.max_tokens) < 1 or self.max_tool_calls < 0 or self.timeout_s <= 0:
            raise ValueError(
                "max_turns and max_tokens must be at least 1, max_tool_calls at least 0, timeout_s above 0"
            )

    def limits(self) -> Limits:
        """Return the limits in the form that a `Task` carries."""
        return Limits(**msgspec.structs.asdict(self))


class BoxConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[env.box]`: the box in which the policy's commands run. Times and sizes are per command."""

    image: str = "python"
    """What is installed: `python`, the host's programs, of which nothing can be written; `host`, the same with a root
    that can be written; or the name of an image that `sparring image pull` unpacked."""

    user: int = 1000
    """Id that the box's one user has inside, 0 to 65535. As 0, calls that give files or processes to other users answer
    success and do nothing."""

    timeout_s: float = 2.0
    """Maximum wall-clock time of a command, in seconds."""

    memory_bytes: int = 256 << 20
    """Maximum memory of a command."""

    disk_bytes: int = 16 << 20
    """Maximum size of all files in the box."""

    output_bytes: int = 4096
    """Bytes of a command's output that are kept."""

    processes: int = 16
    """Maximum number of processes and threads at one time."""

    network: bool = False
    """Allow access to the network from inside the box."""

    def __post_init__(self) -> None:
        if not 0 <= self.user <= 65535:
            raise ValueError(f"user must be a number from 0 to 65535, not {self.user}")
        if self.timeout_s <= 0 or min(self.memory_bytes, self.output_bytes, self.processes) < 1 or self.disk_bytes < 0:
            raise ValueError(
                "timeout_s, memory_bytes, output_bytes and processes must be above 0, disk_bytes 0 or more"
            )
        sizes = max(self.memory_bytes, self.disk_bytes, self.output_bytes)
        if self.timeout_s > 1e6 or sizes > 1 << 50 or self.processes > 1 << 22:
            raise ValueError(
                "timeout_s can be at most a million, sizes a pebibyte, processes 4194304: no machine limits more"
            )

    def spec(self) -> BoxSpec:
        """Return the box in the form that a `Task` carries."""
        return BoxSpec(**msgspec.structs.asdict(self))


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

    limits: LimitsConfig = LimitsConfig()
    """Limits of one rollout."""

    box: BoxConfig = BoxConfig()
    """Box for the policy's code, if the world needs one."""

    def __post_init__(self) -> None:
        if sum(map(bool, (self.name, self.reward, self.rubric))) != 1:
            raise ValueError("exactly one of name, reward and rubric must be given")
        if not self.name and not self.data:
            raise ValueError(f"{'reward' if self.reward else 'rubric'} needs data, a file of tasks")
        if self.tools and self.name:
            raise ValueError("tools belongs to reward and rubric; a named world brings its own tools")
        if self.eval_data and not self.data:
            raise ValueError("eval_data needs data")
        if self.held_out < 0 or self.demonstrations < 0:
            raise ValueError("held_out and demonstrations must be 0 or more")
        if not 0 <= self.held_out_share < 1:
            raise ValueError(f"held_out_share must be a share from 0 to below 1, got {self.held_out_share}")
        if self.held_out_share and self.data:
            raise ValueError("held_out_share belongs to generated worlds; data has held_out or eval_data")
