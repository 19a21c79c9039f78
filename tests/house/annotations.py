"""Annotations are named by their declaration, and the page says which modules write and read each: read off the source."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from sparring.annotations import Annotation

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "sparring"

WRITING = {"annotated", "with_steps", "TrainerQuantity"}
"""Calls that put an annotation on rows."""
READING = {"get", "read", "reads"}
"""Likewise calls that take one from rows, or ask whether somebody does."""
LITERAL = re.compile(r"""annotations(\[|\.get\()["']""")


def uses(text: str) -> Iterator[tuple[Annotation, str]]:
    """Every annotation that a module names, with its role there: "read", "write", "list" or a description of a use
    that is not known."""
    for parent in ast.walk(ast.parse(text)):
        for node in ast.iter_child_nodes(parent):
            match node:
                case ast.Attribute(value=ast.Name(id="Annotation"), attr=name):
                    yield Annotation[name], _role(node, parent)


def _role(node: ast.expr, parent: ast.AST) -> str:
    match parent:
        case ast.Subscript(ctx=ast.Store()) | ast.Assign():
            return "write"
        case ast.Dict() if node in parent.keys:
            return "write"
        case ast.Subscript() | ast.Compare() | ast.Tuple():
            return "read"
        case ast.Set() | ast.FormattedValue():
            return "list"
        case ast.Call(func=ast.Attribute(attr=called) | ast.Name(id=called)) if called in WRITING | READING:
            return "write" if called in WRITING else "read"
    return f"unknown use in {ast.unparse(parent)}"


def findings() -> Iterator[str]:
    """Yield uses that are not known, literals for names, annotations nobody writes or reads, and a page that differs."""
    seen: dict[tuple[Annotation, str], set[str]] = defaultdict(set)
    for file in sorted(SOURCE.rglob("*.py")):
        path, text = str(file.relative_to(SOURCE)), file.read_text(encoding="utf-8")
        if LITERAL.search(text):
            yield f"{path}: name a member of Annotation"
        for annotation, role in uses(text):
            if role not in ("read", "write", "list"):
                yield f"{path}: {annotation}: {role}"
            seen[annotation, role].add(f"`{path}`")
    lines = ["| annotation | value at each token | unit | written by | read by |", "| --- | --- | --- | --- | --- |"]
    for annotation in sorted(Annotation):
        writers, readers = (", ".join(sorted(seen[annotation, role])) for role in ("write", "read"))
        if not (writers and readers):
            yield f"annotations.py: {annotation} is written or read nowhere"
        lines.append(f"| `{annotation}` | {annotation.meaning} | {annotation.unit} | {writers} | {readers} |")
    table = "\n".join(lines)
    if f"\n\n{table}\n\n" not in (ROOT / "docs" / "path" / "batch.md").read_text(encoding="utf-8"):
        yield f"docs/path/batch.md: put this table there\n{table}"
