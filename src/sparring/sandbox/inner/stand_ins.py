"""Calls of functions that run in another, untrusted process. `lend` runs in the process that has the functions,
`borrow` in the one that calls them.

    borrower    runs code with stand-ins for the lender's functions; sends a call, waits for the answer
    lender      runs a program; answers calls to the functions that the program defines

Both run inside boxes (`boxes` starts them), so this uses the standard library only, for Python >= 3.9. Only plain data
crosses: None, bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset; an exception crosses as the
name of a built-in class. A value of a subclass arrives as its base class, so nothing that arrives can run code of the
lender: not by `==`, not by a method.

Wire form, both ways: a little-endian uint32 (bytes), then JSON in UTF-8. JSON's own types, except objects, stand for
themselves; any other value is a list that starts with its type (`_write`). A call has a random word, which its answer
repeats.
"""

from __future__ import annotations

import builtins
import json
import os
import struct
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

ASKED, ANSWERED = 200, 201  # as in `boxes`
LARGEST = 1 << 23
"""Maximum number of bytes of a message."""
DEEPEST = 100
"""Maximum nesting of a value."""
CONSTANT = 1 << 16
"""Maximum number of bytes of a program's constant as JSON; larger ones do not cross."""
PLAIN_INT = 1 << 63
"""Bound from which an int is written in hexadecimal, because Python limits decimal digits."""
PASSED = "passed\n"
"""Line that a borrower writes to stdout when its code has run to its end."""

NOT_RAISED_AS_THEMSELVES = {"StopIteration", "StopAsyncIteration", "GeneratorExit"}
"""Exceptions that would end a loop in the borrower's code (`all(map(f, cases))`) rather than the code. They arrive as
RuntimeError, as from a generator (PEP 479)."""
ERRORS: dict[str, type[BaseException]] = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, BaseException) and name not in NOT_RAISED_AS_THEMSELVES
}
MODULES = (
    "bisect cmath collections copy datetime decimal fractions functools heapq itertools json math operator re string"
).split()
"""Modules that the borrower's code may use without importing them, as many tests do."""
SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


class Uncrossable(Exception):
    """Error of a value that cannot cross, because it is too large, nested too deeply, or no plain data. The text names
    its type."""


class Broken(Exception):
    """The other process has ended, or violates the wire form."""


# ---- values ----


def _write(value: object, depth: int = 0) -> object:
    """Return the value in a form that JSON can hold. Its base class's methods read it, and it arrives as its base
    class."""
    kind = type(value)
    if value is None or kind is bool:
        return value
    if depth > DEEPEST:
        raise Uncrossable("a value more than %d levels deep" % DEEPEST)
    if isinstance(value, int):
        integer = int.__pos__(value)
        return integer if -PLAIN_INT < integer < PLAIN_INT else ["int", hex(integer)]
    if isinstance(value, float):
        return float.__pos__(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bytes):
        return ["bytes", bytes.hex(value)]
    if isinstance(value, complex):
        number = complex.__pos__(value)
        return ["complex", number.real, number.imag]
    for name, base in SEQUENCES.items():
        if isinstance(value, base):
            return [name, *[_write(item, depth + 1) for item in base.__iter__(value)]]
    if isinstance(value, dict):
        return ["dict", *[_write(part, depth + 1) for pair in dict.items(value) for part in pair]]
    raise Uncrossable("a value of type %s" % kind.__name__)


def _read(value: object) -> Any:
    """Return the value that `_write` encoded; raise on any other input."""
    if not isinstance(value, list):
        if isinstance(value, dict):
            raise Broken("an object of JSON, which no value is written as")
        return value
    name, items = value[0], value[1:]
    if name in SEQUENCES:
        return SEQUENCES[name](map(_read, items))
    if name == "dict":
        parts = list(map(_read, items))
        if len(parts) % 2:
            raise Broken("a dict without its last value")
        return dict(zip(parts[::2], parts[1::2], strict=False))
    (text, *more) = items
    if name == "int" and not more:
        return int(text, 16)
    if name == "bytes" and not more:
        return bytes.fromhex(text)
    if name == "complex" and len(more) == 1 and type(text) is type(more[0]) is float:
        return complex(text, more[0])
    raise Broken("no kind of value")


def _send(file: int, message: list[Any]) -> None:
    try:
        text = json.dumps(message, ensure_ascii=False, check_circular=False).encode("utf-8", "surrogatepass")
    except RecursionError:
        raise Uncrossable("a value that is too deep") from None
    if len(text) > LARGEST:
        raise Uncrossable("a value of more than %d bytes" % LARGEST)
    rest = memoryview(struct.pack("<I", len(text)) + text)
    try:
        while rest:
            rest = rest[os.write(file, rest) :]
    except OSError as error:
        raise Broken("the other end has ended") from error


def _receive(file: int) -> list[Any]:
    (size,) = struct.unpack("<I", _exactly(file, 4))
    if size > LARGEST:
        raise Broken("a message of more than %d bytes" % LARGEST)
    try:
        message = json.loads(_exactly(file, size).decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        raise Broken("a message that is no JSON") from None
    if not isinstance(message, list) or not message:
        raise Broken("a message that is no list")
    return message


def _exactly(file: int, count: int) -> bytes:
    pieces = []
    while count:
        piece = os.read(file, min(count, 1 << 20))
        if not piece:
            raise Broken("the other end has ended")
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)


# ---- the lender ----


def lend(program: str) -> None:
    """Run a program with its output discarded, and answer calls to its functions until the borrower ends."""
    sys.setrecursionlimit(sys.getrecursionlimit() + 8)  # our frames do not count
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # open until the process ends
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(program, "answer.py", "exec"), scope)
    names, constants = [], []
    for name, value in scope.items():
        if callable(value):
            names.append(name)
        elif not name.startswith("__"):
            try:
                written = _write(value)
                if len(json.dumps(written)) <= CONSTANT:
                    constants.append([name, written])
            except (Uncrossable, ValueError, RecursionError):
                pass  # such a constant does not cross: the borrower's code lacks its name
    _send(ANSWERED, [names, constants])
    while True:
        try:
            word, name, positional, named = _receive(ASKED)
        except Broken:
            return  # the borrower has ended
        try:
            _send(ANSWERED, [word, *_answer(scope[name], _read(positional), _read(named))])
        except Uncrossable as error:
            _send(ANSWERED, [word, "uncrossable", str(error)])


class _Call:
    """Context of one call of a program's function. `answer` tells how the call ended: with a value, with an error, or
    with a value that cannot cross."""

    def __init__(self) -> None:
        self.answer: list[Any] = []

    def __enter__(self) -> _Call:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, Uncrossable):
            self.answer = ["uncrossable", str(error)]
        elif error is not None:
            name = next(base.__name__ for base in type(error).__mro__ if base.__module__ == "builtins")
            self.answer = ["error", name if name in ERRORS else "RuntimeError"]
        return True


def _answer(function: Callable[..., object], positional: list[Any], named: dict[str, Any]) -> list[Any]:
    with _Call() as call:
        call.answer = ["value", _write(function(*positional, **named))]
    return call.answer


# ---- the borrower ----


def borrow(code: str, defined: tuple[str, ...] = ()) -> None:
    """Run code, and then the tests that it has `defined` but not called, with stand-ins for the lender's functions and
    copies of its constants. Write `PASSED` and exit with status 0 at the end; a traceback goes to stderr, as usual.

    Builtins, names with two leading underscores, and definitions of `code` itself never come from the lender.
    """
    out, sys.stdout = os.dup(1), open(os.devnull, "w")  # noqa: SIM115  (until the process ends)
    scope: dict[str, Any] = {name: __import__(name) for name in MODULES}
    try:
        names, constants = _receive(ASKED)
        for name in names:
            scope.update(_stand_in(name) if _may_be_lent(name) else {})
        for name, value in constants:
            scope.update({name: _read(value)} if _may_be_lent(name) and name not in MODULES else {})
    except (Broken, ValueError, TypeError, LookupError, RecursionError) as error:
        _fail("the program did not run to its end: %s" % error)
    scope["__name__"] = "__main__"
    run_tests(code, scope, defined)
    os.write(out, PASSED.encode())
    os._exit(0)


def run_tests(code: str, scope: dict[str, Any], defined: tuple[str, ...]) -> None:
    """Run a test's code, then the test functions and classes named in `defined`, as pytest and unittest do. Raise the
    first failure."""
    if "unittest" in code:
        import unittest

        # the real one would look for cases in another module, and end the process
        unittest.main = lambda *_, **__: None  # type: ignore[assignment]  # a function in place of the class
    exec(compile(code, "test.py", "exec"), scope)
    for name in defined:
        test = scope[name]
        if not isinstance(test, type):
            _finish(test())
        elif "unittest" in sys.modules and issubclass(test, sys.modules["unittest"].TestCase):
            _run_case(test)
        else:
            for method in [method for method in dir(test) if method.startswith("test")]:
                instance = test()
                for part in ("setup_method", method, "teardown_method"):
                    _finish(getattr(instance, part, lambda: None)())


def _run_case(case: type) -> None:
    unittest = sys.modules["unittest"]
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    for _, trace in result.failures + result.errors:
        raise AssertionError(trace.strip().splitlines()[-1])
    if result.unexpectedSuccesses:
        raise AssertionError("a test that has to fail did not")


def _finish(result: Any) -> None:
    """Run a coroutine to its end; ignore any other result of a test."""
    if hasattr(result, "__await__"):
        import asyncio

        asyncio.run(result)


def _may_be_lent(name: object) -> bool:
    return type(name) is str and not name.startswith("__") and not hasattr(builtins, name)


def _stand_in(name: str) -> dict[str, Callable[..., object]]:
    def stand_in(*positional: object, **named: object) -> object:
        word = os.urandom(8).hex()
        try:
            _send(ANSWERED, [word, name, _write(list(positional)), _write(named)])
        except Uncrossable as error:
            _fail("an argument of %s cannot cross: %s" % (name, error))
        except Broken as error:
            _fail("%s has no process to run in: %s" % (name, error))
        try:
            answered, kind, value = _receive(ASKED)
            if answered != word:
                raise Broken("an answer to no question")
            if kind == "value":
                return _read(value)
            raised = ERRORS[value] if kind == "error" else None
        except (Broken, ValueError, TypeError, LookupError, RecursionError) as error:
            _fail("%s was not answered: %s" % (name, error))
        if raised is None:
            _fail("the result of %s cannot cross: %s" % (name, value))
        raise _exception_of(raised)

    stand_in.__name__ = stand_in.__qualname__ = name
    return {name: stand_in}


def _exception_of(kind: type[BaseException]) -> BaseException:
    try:
        return kind.__new__(kind)  # without the arguments that some classes require
    except TypeError:
        return Exception() if issubclass(kind, Exception) else BaseException()


def _fail(why: str) -> NoReturn:
    """End the process, because a test could catch an exception and go on."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != "test.py":
        frame = frame.f_back
    sys.stderr.write("%s%s\n" % ("" if frame is None else "line %d: " % frame.f_lineno, why))
    sys.stderr.flush()
    os._exit(1)
