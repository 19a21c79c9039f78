"""Private reaches of tests: how often they use what a part of the source keeps to itself."""

import ast
import sys
from collections import Counter
from collections.abc import Iterator

from structure import ROOT, Module, read, sources

MOST = 60
PUBLIC = {"_asdict", "_fields", "_field_defaults", "_make", "_replace", "_request_id"}
"""Public in spite of their underscore: what `collections.namedtuple` documents, and the OpenAI client."""


def private(name: str) -> bool:
    """Tell a private name from a public and a special one."""
    return name.startswith("_") and not name.endswith("__") and name != "_" and name not in PUBLIC


def reaches(module: Module) -> Iterator[int]:
    """Yield the line of each reach of a test file into the source.

    One is each private name imported from `sparring`, and each private attribute, so that `engine._worker._runner`
    counts twice. What the file itself declares is its own, as is a private name on `self`, and what a library imported
    as a module keeps private is no part of the source.
    """
    own, libraries = set(), set()
    for node in ast.walk(module.tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                own.add(node.name)
            case ast.Attribute(value=ast.Name(id="self"), ctx=ast.Store()):
                own.add(node.attr)
            case ast.Import():
                libraries |= {(alias.asname or alias.name).split(".")[0] for alias in node.names} - {"sparring"}
    for node in ast.walk(module.tree):
        match node:
            case ast.ImportFrom(module=str(home)) if home.split(".")[0] == "sparring":
                yield from (node.lineno for alias in node.names if private(alias.name))
            case ast.Attribute(value=value, attr=name) if private(name) and name not in own:
                root = value
                while isinstance(root, ast.Attribute):
                    root = root.value
                of_self = isinstance(value, ast.Name) and value.id in ("self", "cls")
                if not of_self and not (isinstance(root, ast.Name) and root.id in libraries):
                    yield node.lineno


def counted() -> Counter[str]:
    """Count the reaches of each test file."""
    return Counter({m.path: len(list(reaches(m))) for m in read(sources(ROOT / "tests"))})


def findings() -> Iterator[str]:
    """Print how many there are; yield the files with the most where all together are more than MOST."""
    files = counted()
    print(f"{files.total()} private reaches of tests, at most {MOST}", file=sys.stderr)
    if files.total() > MOST:
        most = ", ".join(f"{path} {count}" for path, count in files.most_common(5))
        yield f"tests: {files.total()} private reaches, more than {MOST} ({most}); go through a public door"
