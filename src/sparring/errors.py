"""Error classes, one per boundary, and `boundary()`, the only place that classifies foreign exceptions.

Every message names the place, the expected and the actual input, and the way out: `refusal()` builds it. This module
knows nothing about the parts: they raise these classes or plain exceptions, and the owner of a boundary wraps foreign
calls in `boundary()`.
"""

from __future__ import annotations

import os
import sysconfig
from traceback import walk_tb
from typing import Literal

StopReason = Literal[
    "answered",  # the agent ended its turn without a tool call, or the world said done
    "max_turns",
    "max_tokens",
    "max_tool_calls",
    "context_length",
    "timeout",
    "malformed",  # the reply could not be interpreted
    "resources",  # the policy's own commands hit memory, disk, process or time limits fatally
    "failure",  # see Outcome.failure
    "cancelled",
    "stale",
]
"""Why a conversation ended."""

NOT_OF_USERS = (os.path.dirname(__file__), os.path.dirname(os.__file__), sysconfig.get_path("purelib"), "<")
"""Beginnings of the file names of code that no user wrote: of Sparring, Python, installed packages, and generated."""


class SparringError(Exception):
    """Base of all errors that Sparring raises on purpose."""


class BadInput(SparringError):
    """The user's input (recipe, checkpoint, data, machine) is refused. The CLI exits with status 2.

    Attributes:
        where: place of the refused input, as in `refusal`; empty if only the message names it.
    """

    def __init__(self, message: str, where: str = "") -> None:
        super().__init__(message)
        self.where = where


class PolicyFailure(SparringError):
    """The policy broke a limit, or did something that the world does not accept. Never retried."""


class LimitReached(PolicyFailure):
    """A limit of the task was hit: the rollout is truncated, and everything before the limit stays recorded.

    Attributes:
        too_long: lower bound on the tokens of a prompt without room for a reply, and the number allowed; else None.
    """

    def __init__(self, reason: StopReason, message: str, too_long: tuple[int, int] | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.too_long = too_long


class UnsampledCall(PolicyFailure):
    """A program called a tool of the world, but no reply of its model makes this call. The call does not run; the
    rollout continues."""


class SpoiltFile(PolicyFailure, OSError):
    """A path in the policy's box cannot be used as a file, or a port as a service: a pipe, a file that is missing or
    without permission, a full disk, a refused connection."""


class InfraError(SparringError):
    """The infrastructure failed, not the policy. Retried within a budget; never a reward.

    Attributes:
        limit_s: time limit of the phase that was hit, in seconds; None for other causes.
    """

    limit_s: float | None = None


class SandboxError(InfraError):
    """A box could not be opened, or died for a reason other than the program inside it."""


class ToolHostError(InfraError):
    """The host that runs a tool is unreachable or broken."""


class EngineError(InfraError):
    """The inference engine failed to answer."""


class TaskError(InfraError):
    """A task can never be rolled out, for example because its image is unknown. Not retried."""


class TrainerError(InfraError):
    """A rank of the trainer ended, stood still, or could not be started."""


class OtherRankFailed(TrainerError):
    """Another rank of the trainer could not do its part. That rank raises the cause."""


class RequestRefused(EngineError):
    """An engine can never serve this request. Other requests continue; neither the request nor its rollout is
    retried."""


class PromptTooLong(RequestRefused):
    """A prompt is longer than the engine's context.

    Attributes:
        too_long: number of tokens in the prompt, and the number allowed; None if the engine does not report them.
    """

    def __init__(self, message: str, too_long: tuple[int, int] | None = None) -> None:
        super().__init__(message)
        self.too_long = too_long


class JudgeError(InfraError):
    """A scorer or judge crashed or did not answer."""


class EnvError(InfraError):
    """Environment code raised."""


class HarnessError(EnvError):
    """Harness code raised. If a limit or a failure ended the harness's conversation, the rollout ends with that limit
    or failure instead."""


class Unanswered(HarnessError):
    """A harness ended without any reply: it made no request, or all were refused. There is no policy action to
    score."""


class WorkerLost(InfraError):
    """An external program that played a rollout stopped renewing its lease. This says nothing about the environment.
    Another worker continues the rollout, even after a limit: the final answer comes only when a worker reports the
    end."""


class NotRebuildable(InfraError):
    """An interrupted rollout cannot be rebuilt: the world or the harness did not behave as recorded. The rollout starts
    over."""


class RequestEnded(SparringError):
    """A client ended its reply early, or its attempt has ended. Nothing failed."""


class Outage(SparringError):
    """An environment's infrastructure stays down, or nothing is left to train: the run ends and can be resumed."""


class StoreError(SparringError):
    """The run's store cannot be read or written (disk full, locked, damaged)."""


class EvaluationFailed(SparringError):
    """Infrastructure or judge broke so many rollouts of an evaluation that the rest is not meaningful."""


class NotFinite(SparringError):
    """Gradients were infinite or NaN in several steps in a row, or weights became so. The run ends, and the broken
    weights are not saved."""


class WeightsError(SparringError):
    """A weight update failed its verification; the engine still serves the old version."""


def refusal(where: str, expected: str, got: str, do: str) -> BadInput:
    """Build a refusal (law 10): *where: expected X, got Y; do Z*.

    Args:
        where: place that the user can find: a config key, a file and line, a checkpoint folder.
        expected: description of accepted input.
        got: actual input, quoted by the caller if it is a value.
        do: way out, in the imperative.
    """
    return BadInput(f"{where}: expected {expected}, got {got}; {do}", where)


def refusal_in(place: str, error: BadInput) -> BadInput:
    """Return a refusal with the place of a larger part, such as a row of a file, in front of its own."""
    return BadInput(f"{place}: {error}", f"{place}: {error.where}" if error.where else place)


class boundary:
    """Context that turns any exception of foreign code in its body into `error`, keeping the cause.

    A `SparringError` passes through, as do cancellation and interrupts. `SystemExit` is turned into `error`, so foreign
    code cannot end the process by `sys.exit`. If memory ran out, the message says so instead of `expected`.

    Args:
        error: class of this boundary.
        where: description of the call, for the message.
        expected: description of accepted input, as in `refusal`, if the user's input is at stake.
        do: way out, with `expected`.

    Raises:
        error: the body raised anything that is not a `SparringError`.
    """

    __slots__ = ("_error", "_text")

    def __init__(self, error: type[SparringError], where: str, expected: str = "", do: str = "") -> None:
        self._error = error
        self._text = (where, expected, do)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, cause: BaseException | None, trace: object) -> None:
        if isinstance(cause, (Exception, SystemExit)) and not isinstance(cause, SparringError):
            where, expected, remedy = self._text
            problem = f"{type(cause).__name__}: {cause}{_place(cause)}"
            if expected and isinstance(cause, Exception) and _is_short_of_memory(cause):
                expected, remedy = "memory for it", "free some, or use a machine with more"
            message = f"{where}: expected {expected}, got {problem}; {remedy}" if expected else f"{where}: {problem}"
            raise (BadInput(message, where) if self._error is BadInput else self._error(message)) from cause


class naming_memory:
    """Context that repeats an earlier memory warning if memory runs out in its body.

    Raises:
        InfraError: memory ran out; the message contains the warning.
    """

    __slots__ = ("_warning",)

    def __init__(self, warning: str) -> None:
        self._warning = warning

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, cause: BaseException | None, trace: object) -> None:
        error = cause
        while error is not None:
            if isinstance(error, Exception) and _is_short_of_memory(error):
                problem = f"memory ran out: {type(cause).__name__}: {cause}"
                raise InfraError(f"{problem}; before it began, the run was told: {self._warning}") from cause
            error = error.__cause__ or error.__context__


def _place(cause: BaseException) -> str:
    """Return the innermost line of a user's file that an exception has passed, with its function, in brackets; empty if
    no line is a user's."""
    lines = [(frame.f_code, line) for frame, line in walk_tb(cause.__traceback__)]
    own = [(code, line) for code, line in lines if not code.co_filename.startswith(NOT_OF_USERS)]
    return "".join(f" ({os.path.basename(code.co_filename)}:{line}, in {code.co_name})" for code, line in own[-1:])


def _is_short_of_memory(cause: Exception) -> bool:
    """Return whether an error means lack of memory: Python's, the system's, or torch's, which has no class on a CPU."""
    return isinstance(cause, MemoryError) or any(text in str(cause) for text in ("allocate memory", "out of memory"))
