"""The `[env]` section of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from sparring.envs.rubrics.config import Part
from sparring.types import BoxSpec, Limits


class LimitsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[env.limits]`: what one rollout may use."""

    max_turns: int = 8
    """Assistant messages."""

    max_tokens: int = 1024
    """Sampled tokens over all turns."""

    max_tool_calls: int = 8
    """Tool calls over all turns."""

    timeout_s: float = 120.0
    """Wall clock of the whole rollout."""

    def __post_init__(self) -> None:
        if min(self.max_turns, self.max_tokens) < 1 or self.max_tool_calls < 0 or self.timeout_s <= 0:
            raise ValueError(
                "max_turns and max_tokens must be at least 1, max_tool_calls at least 0, timeout_s above 0"
            )

    def limits(self) -> Limits:
        """Return the limits as a `Task` carries them."""
        return Limits(**msgspec.structs.asdict(self))


class BoxConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[env.box]`: the box in which the policy's commands run; times and sizes are per command."""

    image: str = "python"
    """Image of the box, by name: the programs that are installed inside."""

    timeout_s: float = 2.0
    """Wall clock of one command."""

    memory_bytes: int = 256 << 20
    """Memory of one command."""

    disk_bytes: int = 16 << 20
    """Files that one box may hold."""

    output_bytes: int = 4096
    """Output kept of one command."""

    processes: int = 16
    """Processes and threads at one time."""

    network: bool = False
    """Access to the network from inside the box."""

    def __post_init__(self) -> None:
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
        """Return the box as a `Task` carries it."""
        return BoxSpec(**msgspec.structs.asdict(self))


class Columns(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[env.columns]`: which column of the data holds what. All columns reach the environment as `task.data`."""

    prompt: str = "prompt"
    """The question, a text."""

    answer: str = "answer"
    """The right answer, which the reward compares with."""

    messages: str = "messages"
    """A conversation `[{role, content}, ...]`; where a row has it, it stands in for the prompt."""

    id: str = "id"
    """A stable name of the row; its line number where the column is absent."""

    domain: str = "domain"
    """Subject of the row. It picks the parts of a rubric, and reports are split by it."""

    key: str = ""
    """Text that tells the row's task from others where its prompt does not. Rows of one key are the same task, and are
    held out together. Empty: the prompt tells it."""

    def mapping(self) -> Mapping[str, str]:
        """Return the file's column by our name, for every column that is set."""
        return {name: column for name, column in msgspec.structs.asdict(self).items() if column}


class EnvConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[env]`: the world that the agent spars with."""

    name: str = ""
    """A built-in world, `package.module:Name`, or `path/to/file.py:Name`. Empty with `reward` or `rubric`."""

    args: dict[str, Any] = {}
    """The world's own settings; `Args` of the world says which exist."""

    reward: str = ""
    """Instead of a name: `path/to/file.py:function` with `def function(completion: str, answer: str) -> float`, or with
    TRL's `def function(completions, answer, **kwargs)`, which returns a list; or `outside`, where every reward comes by
    HTTP (`rollout.rewards_within_s`)."""

    rubric: dict[str, Part] = {}
    """Or the parts of a rubric by name, each of a `kind`: see docs/rewards.md."""

    data: str = ""
    """A file of tasks: JSON Lines, a JSON array, CSV, each also `.gz`, Parquet, a Hugging Face datasets folder, or a
    data set of the hub: `owner/name:split` (extra `datasets`)."""

    eval_data: str = ""
    """A file of held-out tasks; empty takes `held_out` prompts out of `data`."""

    columns: Columns = Columns()
    """Column mapping of both files."""

    held_out: int = 0
    """Tasks kept for evaluation; no training stream ever shows one of their prompts. 0: 512, or a fifth of a smaller
    file."""

    held_out_share: float = 0.0
    """Of all prompts of a generated world, how many can be held out, told by their text alone: what one recipe holds
    out, no other with the same share trains on, whatever their seeds and `args`. For runs that follow each other. 0: a
    prompt is held out of its own run only."""

    demonstrations: int = 1024
    """Tasks that the world's expert demonstrates for supervised fine-tuning, where a world does not count them
    itself."""

    system: str = ""
    """A system message before every prompt."""

    tools: tuple[Literal["python"], ...] = ()
    """Built-in tools for a `reward` function or a rubric; a world of your own names its tools itself."""

    limits: LimitsConfig = LimitsConfig()
    """Limits of one rollout."""

    box: BoxConfig = BoxConfig()
    """Box of the policy's code, where the world has one."""

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
