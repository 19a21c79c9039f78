"""Writes docs/reference/: signature and docstring of every name of `sparring`, a page a name. Run it after changing one.

python docs/write_reference.py
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import runpy
import textwrap
from collections.abc import Iterator
from pathlib import Path

import sparring

DOCS = Path(__file__).parent
WRAP = runpy.run_path(str(DOCS / "wrap.py"))
FOLDER = DOCS / "reference"

HEAD = """# Python

A file of your own imports everything from `sparring`; nothing heavy is imported before it is used.

| name | |
| --- | --- |
"""

FOOT = "*These pages are written by `docs/write_reference.py` from the docstrings.*\n"
SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises):")
LIST = re.compile(r"^(- |\d+\. )", flags=re.MULTILINE)
ITEM = re.compile(r"(\w+): (.+)", flags=re.DOTALL)

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def pages() -> dict[str, str]:
    """Return every page's text by its file name, `index.md` first."""
    rows = "".join(f"| [`{name}`]({name}.md) | {_summary(name)} |\n" for name in sparring.__all__)
    written = {"index.md": f"{HEAD}{rows}\n{FOOT}"}
    for name in sparring.__all__:
        written[f"{name}.md"] = "\n".join(_page(name))
    return {file: WRAP["wrapped"](text) for file, text in written.items()}


def _summary(name: str) -> str:
    """Return the first sentence of a docstring."""
    return " ".join(re.split(r"(?<=\.)\s", inspect.getdoc(getattr(sparring, name)) or "")[0].split())


def _page(name: str) -> Iterator[str]:
    """Yield the page of a name: its import, its signature and docstring, and those of a class's public methods."""
    source = textwrap.dedent(inspect.getsource(getattr(sparring, name)))
    (node,) = ast.parse(source).body
    assert isinstance(node, Definition)
    yield f"# `{name}`\n\n```python\nfrom sparring import {name}\n```\n"
    yield from _described(node, source.replace(f"class {node.name}", f"class {name}", 1))
    for method in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and _is_public(method):
            yield f"## `{method.name}`\n"
            yield from _described(method, source)


def _is_public(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    setter = any(ast.unparse(decorator).endswith(".setter") for decorator in method.decorator_list)
    return not method.name.startswith("_") and not setter


def _described(node: Definition, source: str) -> Iterator[str]:
    yield f"```py\n{textwrap.dedent(_signature(node, source.splitlines()))}\n```\n"
    yield from _markdown(ast.get_docstring(node) or "")


def _signature(node: Definition, lines: list[str]) -> str:
    """Return a definition as it is written, without its body; of a class with its fields and `__init__`."""
    kept = (each for each in node.decorator_list if ast.unparse(each).startswith(("dataclass", "property")))
    head = [line for each in kept for line in lines[each.lineno - 1 : each.end_lineno]]
    if not isinstance(node, ast.ClassDef):
        return "\n".join([*head, *lines[node.lineno - 1 : node.body[0].lineno - 1]]) + " ..."
    fields = [
        line
        for each in node.body
        if isinstance(each, ast.AnnAssign) and not ast.unparse(each.target).startswith("_")
        for line in lines[each.lineno - 1 : each.end_lineno]
    ]
    made = [_signature(each, lines) for each in node.body if getattr(each, "name", "") == "__init__"]
    made = ["", *made] if fields and made else made
    return "\n".join([*head, lines[node.lineno - 1], *(fields + made or ["    ..."])])


def _markdown(docstring: str) -> Iterator[str]:
    """Yield a docstring's paragraphs, its examples between fences, and its sections as lists."""
    blocks = itertools.groupby(re.split(r"\n\n+", docstring), key=lambda block: block.startswith("    "))
    for is_example, group in blocks:
        if is_example:
            yield f"```py\n{textwrap.dedent((2 * chr(10)).join(group))}\n```\n"
            continue
        for block in group:
            head, _, rest = block.partition("\n")
            if SECTION.fullmatch(head):
                yield f"**{head.removesuffix(':')}**\n"
                yield from _items(textwrap.dedent(rest))
            else:
                yield f"{block if LIST.search(block) else ' '.join(block.split())}\n"


def _items(text: str) -> Iterator[str]:
    """Yield the items of a section, or its text where it has no names."""
    items = [" ".join(item.split()) for item in re.split(r"\n(?!\s)", text)]
    named = [ITEM.fullmatch(item) for item in items]
    if all(named):
        yield "\n".join(f"- `{item[1]}`: {item[2]}" for item in named if item) + "\n"
    else:
        yield f"{' '.join(items)}\n"


if __name__ == "__main__":
    WRAP["write"](FOLDER, pages())
