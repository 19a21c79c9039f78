"""A function of a row, called by the names of its parameters: of one answer, or as TRL calls its reward functions."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sparring.errors import BadInput, boundary, refusal
from sparring.types import Task

OF_TRAINER = ("trainer_state", "log_extra", "log_metric", "environments")
"""Parameters of TRL's reward functions that are the trainer's own: what an answer is worth does not hang on it here."""


class ByName:
    """A function that may ask for `completion` (the final text), `task`, and any column of the row: `answer`, ... A
    parameter with a default may lack its column; `**` takes all columns that are left.

    One with a parameter `completions` or `prompts` is called as TRL's trainers call it: with lists of one,
    and returns a list of one reward. A row of `messages` then has conversations in both.

    Args:
        function: of the user: a function, a partial one, or an object that is called.
        where: it is named, for errors.

    Attributes:
        function: the same.
        is_async: whether it is a coroutine function.

    Raises:
        BadInput: its parameters cannot be read, or are the trainer's.
    """

    def __init__(self, function: Callable[..., Any], where: str) -> None:
        self.function = function
        with boundary(BadInput, where, "a function whose parameters can be read", "name one that is written in Python"):
            parameters = inspect.signature(function).parameters.values()
        written = _written(function)
        self.is_async = inspect.iscoroutinefunction(written)
        bound = set(function.keywords) if isinstance(function, functools.partial) else set()
        self._parameters = [
            parameter
            for parameter in parameters
            if parameter.kind is not parameter.VAR_POSITIONAL and parameter.name not in bound
        ]
        self._takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in self._parameters)
        self._wants = [parameter for parameter in self._parameters if parameter.kind is not parameter.VAR_KEYWORD]
        self._bound = bound
        names = {parameter.name for parameter in self._wants}
        self._batched = bool(names & {"completions", "prompts"})
        self._texts = (
            set() if self._batched else {name for name, hint in _hints(written).items() if hint in (str, "str")}
        )
        for parameter in self._wants:
            if self._batched and parameter.name in OF_TRAINER and parameter.default is parameter.empty:
                got = f"{parameter.name!r}, which is the trainer's"
                raise refusal(where, "a reward of an answer and its row", got, "leave it out, or give it a default")

    def check(self, task: Task) -> None:
        """Refuse a row without the columns that the function takes.

        Raises:
            BadInput: it lacks one.
        """
        own = ("completions", "prompts", "completion_ids") if self._batched else ("completion", "task")
        for parameter in self._wants:
            if parameter.default is parameter.empty and parameter.name not in task.data and parameter.name not in own:
                there = ", ".join(sorted(task.data))
                expected = f"a column {parameter.name!r} for the reward function"
                raise refusal(f"task {task.id}", expected, there, "map it in env.columns, or give it a default")

    def arguments(self, completion: str, task: Task, ids: Sequence[int] = ()) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments of its call, by position and by name. A column that it hints as `str` arrives as text
        even where the file has a number.

        Args:
            completion: the answer.
            task: that it answers.
            ids: of the answer's tokens.
        """
        values = _batch(completion, task, ids) if self._batched else _single(completion, task)
        positional, named = [], {}
        for parameter in self._wants:
            if parameter.name not in values:
                continue
            value = str(values[parameter.name]) if parameter.name in self._texts else values[parameter.name]
            if parameter.kind is parameter.POSITIONAL_ONLY:
                positional.append(value)
            else:
                named[parameter.name] = value
        if self._takes_all:
            own = set() if self._batched else {"completion", "task"}
            named = {k: v for k, v in values.items() if k not in own | self._bound} | named
            for parameter in self._wants:
                if parameter.kind is parameter.POSITIONAL_ONLY:
                    named.pop(parameter.name, None)
        return positional, named

    def value(self, result: Any) -> Any:
        """Return the reward in what a call returned: of a list its only one.

        Raises:
            TypeError: it has to be a list of one, and is none.
        """
        if not self._batched:
            return result
        try:
            (reward,) = result
        except (TypeError, ValueError):
            raise TypeError(f"expected a list of one reward, for one completion, got {result!r:.80}") from None
        return reward


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function; of an object that is called, that of its class."""
    named = function.func if isinstance(function, functools.partial) else function
    return getattr(named, "__name__", type(named).__name__)


def _single(completion: str, task: Task) -> dict[str, Any]:
    return {**task.data, "completion": completion, "task": task}


def _batch(completion: str, task: Task, ids: Sequence[int]) -> dict[str, Any]:
    """Return lists of one, as TRL hands them: texts, or conversations where the row has messages."""
    columns: Mapping[str, Any] = {name: [value] for name, value in task.data.items()}
    last = task.messages[-1].content if task.messages else None
    if task.data.get("prompt") == last:
        prompt: Any = last
        reply: Any = completion
    else:
        prompt = [{"role": message.role, "content": message.content} for message in task.messages]
        reply = [{"role": "assistant", "content": completion}]
    return {**columns, "prompts": [prompt], "completions": [reply], "completion_ids": [list(ids)]}


def _written(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function or method that a callable object is written as."""
    while isinstance(function, functools.partial):
        function = function.func
    return function if inspect.isroutine(function) else type(function).__call__


def _hints(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the hints of a function's parameters; as they are written where they name what exists for a checker of
    types alone."""
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError, AttributeError, SyntaxError):
        return getattr(function, "__annotations__", {})
