"""Calls of reward functions, either with a row's columns by parameter name or with the signature that TRL's trainers
use."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sparring.errors import BadInput, boundary, refusal
from sparring.types import Task

OF_TRAINER = ("trainer_state", "log_extra", "log_metric", "environments")
"""Parameters of TRL's reward functions that only its trainers can pass."""


class ByName:
    """Reward function called by parameter name. It may take `completion` (the final text), `task`, and any column of
    the row, such as `answer`. A parameter with a default needs no column; `**` takes the remaining columns.

    A function with a parameter `completions` or `prompts` is called as TRL's trainers call it: with lists of length
    one, and returns a list of one reward. For a row with `messages`, both lists hold conversations.

    Args:
        function: user's function, partial or callable object.
        where: key that names the function, for refusals of its parameters.
        name: name of the function in errors of its calls, as the recipe writes it; `where` if empty.

    Attributes:
        is_async: whether it is a coroutine function.
        batched: whether it is called as TRL's trainers call it.

    Raises:
        BadInput: the parameters cannot be read, or only TRL's trainers can pass them.
    """

    def __init__(self, function: Callable[..., Any], where: str, name: str = "") -> None:
        self.function, self.name = function, name or where
        with boundary(BadInput, where, "a function whose parameters can be read", "name one that is written in Python"):
            parameters = inspect.signature(function).parameters.values()
        underlying = _underlying(function)
        self.is_async = inspect.iscoroutinefunction(underlying)
        bound = set(function.keywords) if isinstance(function, functools.partial) else set()
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        self._takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        self._wants = [each for each in parameters if each.kind not in variadic and each.name not in bound]
        self._bound = bound
        names = {parameter.name for parameter in self._wants}
        self.batched = bool(names & {"completions", "prompts"})
        self._texts = (
            set() if self.batched else {name for name, hint in _hints(underlying).items() if hint in (str, "str")}
        )
        for parameter in self._wants:
            if self.batched and parameter.name in OF_TRAINER and parameter.default is parameter.empty:
                actual = f"{parameter.name!r}, which is the trainer's"
                raise refusal(where, "a reward of an answer and its row", actual, "leave it out, or give it a default")

    def check(self, task: Task) -> None:
        """Refuse a row without a column that the function needs (`BadInput`)."""
        own = ("completions", "prompts", "completion_ids") if self.batched else ("completion", "task")
        for parameter in self._wants:
            if parameter.default is parameter.empty and parameter.name not in task.data and parameter.name not in own:
                columns = ", ".join(sorted(task.data))
                expected = f"a column {parameter.name!r} for the reward function"
                remedy = (
                    "name it as the columns are called here, behind env.columns; map it there; or give it a default"
                )
                raise refusal(f"task {task.id}", expected, columns, remedy)

    def arguments(self, completion: str, task: Task, ids: Sequence[int] = ()) -> tuple[list[Any], dict[str, Any]]:
        """Return the positional and the named arguments for one answer. Columns for parameters hinted as `str` are
        passed as text even if the file has a number. `ids` are the answer's tokens."""
        values = _batch(completion, task, ids) if self.batched else _single(completion, task)
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
            own = set() if self.batched else {"completion", "task"}
            named = {k: v for k, v in values.items() if k not in own | self._bound} | named
            for parameter in self._wants:
                if parameter.kind is parameter.POSITIONAL_ONLY:
                    named.pop(parameter.name, None)
        return positional, named

    def value(self, result: Any) -> Any:
        """Return the reward in the result of a call. With TRL's signature the result is a list of one reward.

        Raises:
            TypeError: a function with TRL's signature returned anything else.
        """
        if not self.batched:
            return result
        try:
            (reward,) = result
        except (TypeError, ValueError):
            raise TypeError(f"expected a list of one reward, for one completion, got {result!r:.80}") from None
        return reward


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function, or of the class of a callable object."""
    named = function.func if isinstance(function, functools.partial) else function
    return getattr(named, "__name__", type(named).__name__)


def _single(completion: str, task: Task) -> dict[str, Any]:
    return {**task.data, "completion": completion, "task": task}


def _batch(completion: str, task: Task, ids: Sequence[int]) -> dict[str, Any]:
    """Return lists of length one, as TRL passes them: texts, or conversations if the row has messages."""
    columns: Mapping[str, Any] = {name: [value] for name, value in task.data.items()}
    last = task.messages[-1].content if task.messages else None
    if task.data.get("prompt") == last:
        prompt: Any = last
        reply: Any = completion
    else:
        prompt = [{"role": message.role, "content": message.content} for message in task.messages]
        reply = [{"role": "assistant", "content": completion}]
    return {**columns, "prompts": [prompt], "completions": [reply], "completion_ids": [list(ids)]}


def _underlying(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, functools.partial):
        function = function.func
    return function if inspect.isroutine(function) else type(function).__call__


def _hints(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the type hints of a function's parameters; unevaluated if they name imports for type checkers only."""
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError, AttributeError, SyntaxError):
        return getattr(function, "__annotations__", {})
