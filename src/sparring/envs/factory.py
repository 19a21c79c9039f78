"""`WorldFactory`: makes the tasks of an `Env`, generated or read from rows of a file, its demonstrations and its
instances."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any, cast

import msgspec

from sparring.envs.base import Env
from sparring.envs.config import EnvConfig
from sparring.envs.executor import is_cooperative
from sparring.envs.rubrics.judges import together
from sparring.envs.splits import Splits, Stream, derived_seed, identity, listed, order, unknown_split
from sparring.errors import BadInput, EnvError, boundary, refusal, refusal_in
from sparring.observe.wait_reports import waiting
from sparring.protocols import Boxes, Expert
from sparring.types import BoxSpec, Message, Task

Rows = Sequence[Mapping[str, Any]]
ReadRows = Callable[[str, Mapping[str, str]], Rows]
"""Function (path, column mapping) -> rows with our column names, such as `tasks.files.read_rows`."""

DEFAULT_HELD_OUT = 512


class WorldFactory:
    """Factory of a class of worlds. Implements `protocols.EnvFactory`.

    Args:
        name: name of the world, written into its tasks.
        read_rows: reader of the files that `config` names.

    Raises:
        BadInput: the world has neither data nor `generate`, or its data cannot be split.
    """

    def __init__(self, name: str, make: Callable[[], Env], config: EnvConfig, read_rows: ReadRows | None) -> None:
        self.name = name
        self._make = make
        self._config = config
        self._user = config.name or config.reward or name
        expected, remedy = "a world that can be made from its settings", "correct its __init__"
        with waiting(f"{self._user} to be made"), boundary(BadInput, f"env {name}", expected, remedy):
            self._probe = make()
        self.scorer = self._probe.scorer
        if config.box != BoxSpec() and not self._probe.needs_box:
            remedy = "leave the table out, or set needs_box = True in the world"
            raise refusal("env.box", "a world that needs a box", f"{name}, which opens none", remedy)
        self._splits: dict[int, Splits] = {}
        if config.data:
            if read_rows is None:
                raise TypeError("an environment with data needs read_rows (tasks.files.read_rows)")
            with waiting(f"the rows of {config.data}"):
                self._train, self._eval = self._from_files(read_rows)
        elif type(self._probe).generate is Env.generate:
            raise refusal(
                f"env {name}",
                "tasks",
                "neither data nor a method generate(self, random)",
                "set env.data or write generate",
            )

    @property
    def shared_thread(self) -> bool:
        """True if the environments of all rollouts run on one thread."""
        return self._probe.shared_thread

    @property
    def makes_at_once(self) -> bool:
        """True if constructing an environment runs no user code."""
        return is_cooperative(type(self._probe).__init__)

    def make(self) -> Env:
        return self._make()

    def tasks(self, split: str, seed: int) -> Stream:
        """Return the tasks of a split: `train` (endless), `eval` or `demonstration` (finite). They are a function of
        the seed. No task of `eval` occurs in another split.

        Raises:
            BadInput: the split is unknown, or there are too few distinct tasks.
        """
        if not self._config.data:
            if seed not in self._splits:
                self._splits[seed] = self._generate_splits(seed)
            return self._splits[seed].stream(split)
        if split == "train":
            return Stream(lambda index: self._shuffled_task(seed, index))
        if split == "eval":
            return listed(self._eval)
        if split == "demonstration":
            return listed(self._train[: self._config.demonstrations])
        raise unknown_split(self.name, split)

    def expert(self, task: Task) -> Expert | Mapping[str, Expert] | None:
        """Return the world's demonstration of a task.

        Raises:
            EnvError: user code raised.
        """
        with boundary(EnvError, f"{self.name}.expert"):
            return self._probe.expert(task)

    async def prove(self, boxes: Boxes) -> tuple[int, int]:
        """Check each row of the files: its right answer can be read, its tests can judge, and its own right program
        passes them. Runs one check per CPU at a time.

        Returns:
            number of rows with a right program; number of all rows if the world needs a box, else 0.

        Raises:
            BadInput: a row failed its check.
        """
        if not self._config.data or type(self._probe).prove is Env.prove:
            return 0, 0
        rows = [*self._train, *self._eval]
        waiting, proven = iter(rows), 0

        async def worker() -> None:
            nonlocal proven
            for task in waiting:
                box = None if task.box is None else await boxes.take(task.box)
                try:
                    with self._in_file(task.id):
                        right = await self._probe.prove(task, box)
                    proven += right  # not `proven += await ...`: it would lose what other workers add meanwhile
                finally:
                    if box is not None:
                        await box.close()

        await together([worker() for _ in os.sched_getaffinity(0)])
        return proven, len(rows) if self._probe.needs_box else 0

    @contextmanager
    def _in_file(self, id: str) -> Iterator[None]:
        """Add the file and the row to the refusal of a task."""
        _, split, row = id.split("/", 2)
        place = f"{self._config.eval_data if split == 'eval' else self._config.data}, row {row}"
        try:
            with waiting(self._user, lambda: f"({place})"):
                yield
        except BadInput as error:
            raise refusal_in(place, error) from error

    def _generate_splits(self, seed: int) -> Splits:
        def draw(split: str, index: int, attempt: int) -> Task:
            item_seed, id = derived_seed(seed, self.name, split, index, attempt), f"{self.name}/{split}/{index}"
            with waiting(f"{self._user}.generate", lambda: f"(task {id})"):
                with boundary(BadInput, f"{self.name}.generate", "a task", "correct it"):
                    data = self._probe.generate(Random(item_seed))
                return self._task(id, self._checked_data(data), (), item_seed)

        config = self._config
        held_out = config.held_out or DEFAULT_HELD_OUT
        return Splits(
            self.name,
            draw,
            held_out=held_out,
            demonstrations=config.demonstrations,
            share=config.held_out_share,
        )

    def _checked_data(self, data: Any) -> Mapping[str, Any]:
        """Return the data that `generate` drew for a task, or empty data if the world needs none."""
        if isinstance(data, Mapping):
            return data
        if inspect.iscoroutine(data):
            data.close()
        if data is None and type(self._probe).prompt is not Env.prompt:
            return {}
        actual = "a coroutine" if inspect.iscoroutine(data) else repr(data)[:80]
        remedy = "return {'prompt': ...} and what else the task needs, from a plain function"
        raise refusal(f"{self.name}.generate", "a dict, the data of a task", actual, remedy)

    def _prompt(self, task: Task) -> Sequence[Message]:
        where, remedy = f"task {task.id}", "correct it, or give the data of the task a 'prompt'"
        with boundary(BadInput, where, f"a prompt from {self.name}.prompt", remedy):
            prompt = self._probe.prompt(task)
        if isinstance(prompt, str):
            return (Message(role="user", content=prompt),)
        if isinstance(prompt, Sequence) and all(isinstance(message, Message) for message in prompt):
            return cast("Sequence[Message]", prompt)
        remedy = "return a text, or messages: Message(role='user', content=...)"
        raise refusal(where, f"a text or messages from {self.name}.prompt", repr(prompt)[:80], remedy)

    def _task(self, id: str, data: Mapping[str, Any], messages: Sequence[Message], seed: int) -> Task:
        config = self._config
        box = config.box if self._probe.needs_box else None
        task = Task(id=id, env=self.name, messages=(), data=data, limits=config.limits, box=box, seed=seed)
        with boundary(BadInput, f"task {id}", "a task that can be scored", "correct the environment or its data"):
            self._probe.check(task)
        messages = messages or self._prompt(task)
        with boundary(BadInput, f"task {id}", "data that can be written down, with texts as keys", "correct it"):
            msgspec.json.encode((data, [message.content for message in messages]), order="sorted")
        if config.system:
            messages = (Message(role="system", content=config.system), *messages)
        return Task(
            id=id,
            env=self.name,
            messages=tuple(messages),
            data=data,
            limits=task.limits,
            box=box,
            seed=seed,
            tag=str(data.get("tag", data.get("domain", ""))),
            key=self._key(task),
        )

    def _key(self, task: Task) -> str:
        """Return the task's deduplication key, from the world or a column of its file; "" if the prompt is the key."""
        if self._config.columns.key:
            return str(task.data["key"])
        with boundary(
            BadInput, f"task {task.id}", f"a key from {self.name}.key", "correct the environment or its data"
        ):
            key = self._probe.key(task)
        return "" if key is None else str(key)

    def _from_files(self, read_rows: ReadRows) -> tuple[list[Task], list[Task]]:
        config = self._config
        tasks = self._from_rows(read_rows(config.data, config.columns.mapping()), "train", config.data)
        if config.eval_data:
            held_out = self._from_rows(read_rows(config.eval_data, config.columns.mapping()), "eval", config.eval_data)
        else:
            held_out = self._hold_out(tasks)
        held_out_keys = {identity(task) for task in held_out}
        train = [task for task in tasks if identity(task) not in held_out_keys]
        if not train or not held_out:
            raise refusal(
                "env.data",
                "prompts for training and others for evaluation",
                f"{len(train)} and {len(held_out)}",
                "add rows",
            )
        return train, held_out

    def _from_rows(self, rows: Rows, split: str, path: str) -> list[Task]:
        tasks: dict[str, Task] = {}
        for row in rows:
            data = {key: value for key, value in row.items() if key != "messages"}
            column = self._config.columns.key
            if column and data.get("key") in (None, ""):
                remedy = "add it, or unset columns.key"
                raise refusal(f"{path}, row {row['id']}", f"a key in column {column!r}", "none", remedy)
            id = f"{self.name}/{split}/{row['id']}"
            if id in tasks:
                raise refusal(path, "rows with ids of their own", f"{row['id']!r} twice", "correct the id column")
            with self._in_file(id):
                tasks[id] = self._task(id, data, row.get("messages") or (), derived_seed(id))
        return list(tasks.values())

    def _hold_out(self, tasks: Sequence[Task]) -> list[Task]:
        """Choose distinct tasks by their hash, so that the choice depends neither on the order of the file nor on the
        seed."""
        distinct = list({identity(task): task for task in reversed(tasks)}.values())
        if not distinct:
            raise refusal(self._config.data, "prompts for training and others for evaluation", "none", "add rows")
        count = self._config.held_out or min(DEFAULT_HELD_OUT, max(1, len(distinct) // 5))
        if count >= len(distinct):
            what = "keys" if self._config.columns.key else "prompts"
            way = "lower it" if self._config.held_out else "add rows, or give eval_data: one prompt cannot be both"
            raise refusal(
                "env.held_out", f"fewer than the {len(distinct)} different {what} of env.data", str(count), way
            )
        return sorted(distinct, key=lambda task: derived_seed("held out", identity(task)))[:count]

    def _shuffled_task(self, seed: int, index: int) -> Task:
        epoch, place = divmod(index, len(self._train))
        return self._train[order(seed, epoch, len(self._train))[place]]
