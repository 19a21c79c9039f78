"""Annotations are declared in one place, and the declaration is true: checked on the source."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from sparring.annotations import DECLARED, Annotation

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "sparring"
DECLARATION = "annotations.py"

WRITING = {"annotated": 0, "with_steps": 1, "TrainerQuantity": 1}
"""Calls that put an annotation on rows, and the argument that names it."""
READING = {"get": 0, "read": 0, "reads": 0}
"""Likewise calls that take one from rows, or ask whether somebody does."""
OTHER_MEANINGS = {
    "chosen": "a side of a pair, a choice of the user",
    "correction_rejected": "a metric",
    "correction_truncated": "a metric",
    "correction_weight": "a metric",
    "implicit": "the use of a model beside the policy",
    "kl_coefficient": "a metric",
    "kto_shift": "a metric",
    "margin": "a key of a preference row, a metric",
    "probability_squares": "a quantity of the model's head",
    "proximal": "a value of [algo] anchor",
    "ratio": "a key of the configuration, a metric",
    "reference": "the use of a model",
    "return": "a metric of the critic",
    "reward": "a metric, a key of a record",
    "teacher": "the use of a model, a source of tokens, a quantity of the trainer",
    "value": "a loss term, a quantity of the model's head",
}
"""Names of annotations that are words of something else too."""


def trees(*, testing: bool = True) -> dict[str, ast.Module]:
    """Every module but the declaration, by its path below src/sparring, with `parent` set on each node."""
    parsed = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = str(path.relative_to(SOURCE))
        if name != DECLARATION and (testing or not name.startswith("testing/")):
            parsed[name] = with_parents(path.read_text())
    return parsed


def with_parents(text: str) -> ast.Module:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            child.parent = node
    return tree


def called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def role(node: ast.expr) -> str:
    """What is done with an annotation that `node` names: "read", "write", "list" or a description of something that
    the test does not know."""
    parent = node.parent
    match parent:
        case ast.Subscript(ctx=ast.Store()) | ast.Assign():
            return "write"
        case ast.Subscript() | ast.Compare() | ast.Tuple():
            return "read"
        case ast.Dict() if node in parent.keys:
            return "write"
        case ast.Set() | ast.FormattedValue():
            return "list"
        case ast.Call() if called(parent) in WRITING:
            return "write"
        case ast.Call() if called(parent) in READING:
            return "read"
    return f"unknown use in {ast.unparse(parent)}"


def uses(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Every annotation that a module names, with its role there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Annotation":
            yield Annotation[node.attr].value, role(node)


def is_annotations(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "annotations"


def literal_keys(tree: ast.Module) -> Iterator[str]:
    """Strings that stand where an annotation is named."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        parent = node.parent
        match parent:
            case ast.Subscript() if is_annotations(parent.value):
                yield node.value
            case ast.Compare() if any(is_annotations(other) for other in parent.comparators):
                yield node.value
            case ast.Dict(parent=ast.keyword(arg="annotations")) if node in parent.keys:
                yield node.value
            case ast.Call(func=ast.Attribute(attr="get", value=value)) if is_annotations(value):
                yield node.value
            case ast.Call(args=args) if (place := (WRITING | READING).get(called(parent))) is not None and called(
                parent
            ) != "get":
                if len(args) > place and args[place] is node:
                    yield node.value


def table() -> str:
    """The table of docs/path/batch.md."""
    lines = ["| annotation | value at each token | unit | written by | read by |", "| --- | --- | --- | --- | --- |"]
    for annotation in sorted(Annotation):
        declared = annotation.declaration
        writers, readers = (", ".join(f"`{path}`" for path in paths) for paths in (declared.writers, declared.readers))
        lines.append(f"| `{annotation}` | {declared.meaning} | {declared.unit} | {writers} | {readers} |")
    return "\n".join(lines)


def findings() -> Iterator[str]:
    """Yield where the declaration, the source and the page differ."""
    modules = trees()
    yield from _undeclared_uses(modules)
    for path, tree in modules.items():
        yield from (f"{path}: {key!r}: name a member of Annotation" for key in literal_keys(tree))
    words = {
        (node.value, path)
        for path, tree in modules.items()
        if not path.startswith("testing/")
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in DECLARED
    }
    yield from (f"{path}: {word!r} is an annotation" for word, path in sorted(words) if word not in OTHER_MEANINGS)
    for word in OTHER_MEANINGS.keys() - {word for word, _ in words}:
        yield f"tests/house/annotations.py: {word!r} has no other meaning any more: take it off the list"
    page = (ROOT / "docs" / "path" / "batch.md").read_text(encoding="utf-8")
    written = re.search(r"^\| annotation \|.*?(?=\n\n)", page, re.DOTALL | re.MULTILINE)
    if written is None or written[0] != table():
        yield f"docs/path/batch.md: put this table there\n{table()}"


def _undeclared_uses(modules: dict[str, ast.Module]) -> Iterator[str]:
    """Yield the annotations whose writers and readers in the source are not those that are declared."""
    seen: dict[tuple[str, str], set[str]] = {}
    for path, tree in modules.items():
        for name, use in uses(tree):
            if use not in ("read", "write", "list"):
                yield f"{path}: {name}: {use}"
            seen.setdefault((name, use), set()).add(path)
    for annotation in Annotation:
        declared = annotation.declaration
        if set(declared.writers) != (writers := seen.get((annotation.value, "write"), set())):
            yield f"annotations.py: writers of {annotation} are {sorted(writers)}"
        if set(declared.readers) != (readers := seen.get((annotation.value, "read"), set())):
            yield f"annotations.py: readers of {annotation} are {sorted(readers)}"
        if not (declared.writers and declared.readers and declared.meaning and declared.unit):
            yield f"annotations.py: {annotation} lacks writers, readers, a meaning or a unit"
