"""One error class per boundary, and `boundary()`, the only place that classifies foreign exceptions.

Every message says where, what was expected, what came and what to do: use `refusal()` to build it.
This module knows nothing about the parts; parts raise these classes or plain exceptions, and the
part that owns a boundary wraps the foreign call in `boundary()`.
"""

from __future__ import annotations


class SparringError(Exception):
    """Base of every error that Sparring raises on purpose."""


class BadInput(SparringError):
    """The user's input (recipe, checkpoint, data, machine) is refused. The CLI exits with status 2.

    Attributes:
        where: the place of what is refused, as in `refusal`; empty where only the message says it.
    """

    def __init__(self, message: str, where: str = "") -> None:
        super().__init__(message)
        self.where = where


class PolicyFailure(SparringError):
    """The policy's own doing: it broke a limit or sent what the world cannot take. Never retried."""


class LimitReached(PolicyFailure):
    """A limit of the task was hit. `reason` is the `StopReason`; the record up to here is kept and the rollout is
    truncated. `too_long`: the ids of a prompt that leaves no room for a reply, at least, and the room; None of other
    limits."""

    def __init__(self, reason: str, message: str, too_long: tuple[int, int] | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.too_long = too_long


class UnsampledCall(PolicyFailure):
    """A program called a tool of the world that no reply of its model calls. The call does not run; the rollout goes
    on."""


class SpoiltFile(PolicyFailure, OSError):
    """Something that the policy left in its box and that cannot be read or written as a file: a pipe, a folder, one
    without the right to it."""


class InfraError(SparringError):
    """The machinery failed, not the policy. Retried within a budget; never becomes a reward.

    Attributes:
        limit_s: the limit of a phase that struck, in seconds; None where the failure has another cause.
    """

    limit_s: float | None = None


class SandboxError(InfraError):
    """A box could not be made or died for a reason that is not the program inside it."""


class ToolHostError(InfraError):
    """The host that runs a tool is unreachable or broken."""


class EngineError(InfraError):
    """The inference engine failed to answer."""


class TaskError(InfraError):
    """A task that can never be rolled out, such as one that asks for an unknown image. Not tried again."""


class RequestRefused(EngineError):
    """An engine will never serve this request: it asks for what cannot be. The others go on; neither the request nor
    its rollout is tried again."""


class PromptTooLong(RequestRefused):
    """A prompt is longer than the context of the engine that was asked. `too_long` are its ids and the room, as far as
    the engine says so, else None."""

    def __init__(self, message: str, too_long: tuple[int, int] | None = None) -> None:
        super().__init__(message)
        self.too_long = too_long


class JudgeError(InfraError):
    """A scorer or judge crashed or did not answer."""


class EnvError(InfraError):
    """Environment code raised."""


class HarnessError(EnvError):
    """Harness code raised. Where a limit or a failure had ended its conversation, that is what the rollout ended by."""


class Unanswered(HarnessError):
    """A harness ended and was answered nothing: it asked for nothing, or was refused all that it asked for. The policy
    has done nothing then, so there is nothing to score."""


class WorkerLost(InfraError):
    """A program elsewhere that played a rollout has shown no sign of life. That tells nothing about the environment,
    and whatever limit the rollout has hit, another worker goes on with it: only a worker's end has its answer."""


class NotRebuildable(InfraError):
    """A half-done rollout cannot be brought back by running it again: the world or the harness did something else than
    its record says, or a world refuses. The rollout starts over."""


class RequestEnded(SparringError):
    """A reply was ended before it was whole, by its client. Nothing broke."""


class Outage(SparringError):
    """An environment's infrastructure stays down, or nothing is left to train: the run ends and can be gone on with."""


class StoreError(SparringError):
    """The run's store cannot be read or written (disk full, locked, damaged)."""


class EvaluationFailed(SparringError):
    """Infrastructure or judge broke so many rollouts of an evaluation that what is left says too little."""


class NotFinite(SparringError):
    """Gradients stay infinite or not numbers, or weights became so: the run ends, and nothing of it is saved."""


class WeightsError(SparringError):
    """A weight update failed its verification; the engine still serves the old version."""


def refusal(where: str, expected: str, got: str, do: str) -> BadInput:
    """Build the one form of refusal (law 10): *where: expected X, got Y; do Z*.

    Args:
        where: a path the user can find: a config key, a file and line, a checkpoint folder.
        expected: what would have been accepted.
        got: what came, quoted by the caller where it is a value.
        do: the way out, an imperative.
    """
    return BadInput(f"{where}: expected {expected}, got {got}; {do}", where)


class boundary:
    """Turn whatever foreign code raises in the body of `with boundary(...)` into `error`, keeping the cause.

    An error that is already typed passes through, as do cancellation and interrupts; foreign code that would end the
    process (`sys.exit`) does not end it. Where memory ran out, that is said
    in the place of what was expected.

    Args:
        error: the class of this boundary.
        where: what was being called, for the message.
        expected: where the user's input is at stake: what would have been accepted, as in `refusal`.
        do: then also the way out.

    Raises:
        error: when the body raised anything that is not a `SparringError`.
    """

    __slots__ = ("_error", "_text")

    def __init__(self, error: type[SparringError], where: str, expected: str = "", do: str = "") -> None:
        self._error = error
        self._text = (where, expected, do)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, cause: BaseException | None, trace: object) -> None:
        if isinstance(cause, (Exception, SystemExit)) and not isinstance(cause, SparringError):
            where, expected, do = self._text
            got = f"{type(cause).__name__}: {cause}"
            if expected and isinstance(cause, Exception) and _is_short_of_memory(cause):
                expected, do = "memory for it", "free some, or use a machine with more"
            raise self._error(
                f"{where}: expected {expected}, got {got}; {do}" if expected else f"{where}: {got}"
            ) from cause


class naming_memory:
    """Context that repeats an earlier warning of memory if memory runs out in its body.

    Raises:
        InfraError: memory ran out; names the warning.
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
                got = f"{type(cause).__name__}: {cause}"
                problem = f"memory ran out: {got}; before it began, the run was told: {self._warning}"
                raise InfraError(problem) from cause
            error = error.__cause__ or error.__context__


def _is_short_of_memory(cause: Exception) -> bool:
    """Python's own error, the system's, or torch's, which has no class on a CPU."""
    return isinstance(cause, MemoryError) or any(text in str(cause) for text in ("allocate memory", "out of memory"))
