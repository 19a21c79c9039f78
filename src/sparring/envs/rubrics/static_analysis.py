"""Static analysis of a row's tests: whether they can fail, and which functions they need from the answer.
`idle_program` makes a program that has these functions but solves nothing."""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterator

from sparring.errors import refusal

Function = ast.FunctionDef | ast.AsyncFunctionDef

NOTHING = "def {name}(*values, **named): return None"
RAISES = "def {name}(*values, **named): raise NotImplementedError"


class ReadTest:
    """Parsed test in Python.

    Attributes:
        answer_names: names that the test reads, but neither defines nor imports, and that are no Python builtins: the
            answer must define them.
        defined: functions and classes that pytest or unittest would collect, and that the test does not call itself.

    Raises:
        BadInput: the text is not Python, or a test function has parameters without defaults.
    """

    def __init__(self, text: str, where: str) -> None:
        try:
            self._tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError) as error:
            raise refusal(where, "Python", f"{error} in {text[:80]!r}", "correct the row") from error
        read: set[str] = set()
        own = set(vars(builtins))
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Name):
                (read if isinstance(node.ctx, ast.Load) else own).add(node.id)
            elif isinstance(node, ast.arg):
                own.add(node.arg)
            elif isinstance(node, ast.alias):
                own.add((node.asname or node.name).split(".")[0])
            elif isinstance(node, (Function, ast.ClassDef)):
                own.add(node.name)
        self._read = read
        self.answer_names = frozenset(read - own)
        self.defined = tuple(self._test_definitions(where))

    @property
    def surely_judges(self) -> bool:
        """True if the test is certain to fail when the answer's functions return None or raise. This holds if a
        top-level assert compares the result of such a function with a constant other than None, and no import can be
        missing."""
        return not self.is_foreign and any(map(self._is_plain_assert, self._tree.body))

    @property
    def is_foreign(self) -> bool:
        """True if the test imports modules outside the standard library, which boxes may lack."""
        return not {name.split(".")[0] for name in _imported_modules(self._tree)} <= sys.stdlib_module_names

    @property
    def can_fail(self) -> bool:
        """False if the test's live code has no `raise`, uses no name or attribute that contains assert, exit, fail or
        raise, and asserts nothing but true constants and non-empty tuples."""
        return any(map(_checks, _live(self._tree)))

    def _is_plain_assert(self, statement: ast.stmt) -> bool:
        match statement:
            case ast.Assert(
                test=ast.Compare(left=ast.Call(func=ast.Name(id=name)), ops=[ast.Eq()], comparators=[right])
            ):
                return name in self.answer_names - sys.stdlib_module_names and _is_constant(right)
        return False

    def _test_definitions(self, where: str) -> Iterator[str]:
        cases: set[str] = set()
        for node in self._tree.body:
            if isinstance(node, Function):
                if node.name.startswith("test") and node.name not in self._read:
                    _check_arguments(node, 0, where)
                    yield node.name
            elif isinstance(node, ast.ClassDef):
                bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
                if any(base.endswith("TestCase") or base in cases for base in bases):
                    cases.add(node.name)
                    yield node.name
                elif node.name.startswith("Test") and node.name not in self._read:
                    for method in node.body:
                        if isinstance(method, Function) and method.name.startswith("test"):
                            _check_arguments(method, 1, where)
                    yield node.name


def idle_program(tests: list[ReadTest], body: str) -> str:
    """Return a program that defines every function the tests need, each with the body `NOTHING` or `RAISES`."""
    names = sorted(set().union(*(test.answer_names for test in tests)) - sys.stdlib_module_names)
    return "\n".join(body.format(name=name) for name in names)


def _live(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and its descendants, except the bodies of `if` and `while` with a false constant."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.If, ast.While)) and isinstance(child.test, ast.Constant) and not child.test.value:
            for other in child.orelse:
                yield from _live(other)
        else:
            yield from _live(child)


def _checks(node: ast.AST) -> bool:
    match node:
        case ast.Assert(test=ast.Constant(value=value)):
            return not value
        case ast.Assert(test=ast.Tuple(elts=elements)):
            return not elements
        case ast.Assert() | ast.Raise():
            return True
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return any(word in name.lower() for word in ("assert", "exit", "fail", "raise"))
    return False


def _check_arguments(function: Function, count: int, where: str) -> None:
    """Refuse a test function with more required parameters than `count`."""
    arguments = function.args
    required = len(arguments.posonlyargs) + len(arguments.args) - len(arguments.defaults)
    if required > count or None in arguments.kw_defaults:
        expected, remedy = "test functions without parameters", "call it, or write its cases out (no fixtures are made)"
        raise refusal(where, expected, f"{function.name}({ast.unparse(arguments)})", remedy)


def _is_constant(node: ast.expr) -> bool:
    try:
        return ast.literal_eval(node) is not None
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False


def _imported_modules(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
