"""A reference with one sign turned round: whoever agrees with it too has proven nothing."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

_TURNED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.USub: ast.UAdd}


def mutants(function: Callable[..., Any]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """`function` once for every +, - and leading minus of its body, each time with that one turned round.

    Yields:
        the line that was changed, as it then reads, and the function; its names are looked up where the original's are.
    """
    source = textwrap.dedent(inspect.getsource(function))
    count = sum(1 for node in ast.walk(ast.parse(source)) if _sign(node) is not None)
    for turned in range(count):
        tree = ast.parse(source)
        node = [node for node in ast.walk(tree) if _sign(node) is not None][turned]
        node.op = _TURNED[type(node.op)]()  # type: ignore[attr-defined]
        names = dict(vars(sys.modules[function.__module__]))
        exec(compile(tree, f"<mutant of {function.__name__}>", "exec"), names)
        yield ast.unparse(node), names[function.__name__]


def _sign(node: ast.AST) -> ast.AST | None:
    operator = node.op if isinstance(node, (ast.BinOp, ast.UnaryOp)) else None
    return operator if type(operator) in _TURNED else None
