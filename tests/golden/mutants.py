"""A reference with one sign turned round: whoever agrees with it too has proven nothing."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

SIGNS: Mapping[type[ast.AST], type[ast.AST]] = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.USub: ast.UAdd}
"""Exchanges of plus and minus."""

OPERATORS: Mapping[type[ast.AST], type[ast.AST]] = {
    **SIGNS,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.Lt: ast.Gt,
    ast.Gt: ast.Lt,
}
"""Beside them times and divided by, less and greater."""


def mutants(
    function: Callable[..., Any], turned: Mapping[type[ast.AST], type[ast.AST]] = SIGNS
) -> Iterator[tuple[str, Callable[..., Any]]]:
    """`function` once for every operator of its body that is among `turned`, each time with that one turned round.

    Yields:
        the expression that was changed, as it then reads, and the function; its names are looked up where the
        original's are.
    """
    source = textwrap.dedent(inspect.getsource(function))
    count = len(_places(ast.parse(source), turned))
    for number in range(count):
        tree = ast.parse(source)
        node, operator = _places(tree, turned)[number]
        other = turned[type(operator)]()
        if isinstance(node, ast.Compare):
            node.ops = [other if one is operator else one for one in node.ops]  # type: ignore[misc]
        else:
            node.op = other  # type: ignore[attr-defined]
        names = dict(vars(sys.modules[function.__module__]))
        exec(compile(tree, f"<mutant of {function.__name__}>", "exec"), names)
        yield ast.unparse(node), names[function.__name__]


def _places(tree: ast.AST, turned: Mapping[type[ast.AST], type[ast.AST]]) -> list[tuple[ast.AST, ast.AST]]:
    operators: list[tuple[ast.AST, ast.AST]] = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.BinOp, ast.UnaryOp)):
            operators.append((node, node.op))
        elif isinstance(node, ast.Compare):
            operators += [(node, operator) for operator in node.ops]
    return [(node, operator) for node, operator in operators if type(operator) in turned]


def with_rest(part: Callable[..., Any], rest: Callable[..., Any]) -> Callable[..., Any]:
    """The sum of both: a loss of which only one term was turned."""
    return lambda *arguments: part(*arguments) + rest(*arguments)
