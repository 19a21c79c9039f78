"""Docstrings of src at random, for a reader, and a count of the signs of sentences that have to be read twice.

    python tests/house/sample.py --seed N                print 110 docstrings and the counts
    python tests/house/sample.py --list --room record    print every sign and every Args line without a noun of a room

A sign is no fault by itself: it marks a sentence to look at. The counts are of the sample and of the whole source.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import random
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "sparring"

SIGNS = {
    "of which": r"\bof (?:which|whom|whose)\b",
    "of these": r"\bof (?:these|those|it|them)\b",
    "nobody": r"\bnobody\b",
    "None where": r"\bnone\b[^.;]{0,12}\bwhere\b",
    "where there is none": r"\bwhere (?:there|it|they|nothing|none)\b[^.;]{0,20}\b(?:none|nothing|no)\b",
    "is none": r"\b(?:is|are|has|have|be) none\b",
    "take note of": r"\b(?:take|takes|taking) note\b",
    "beside": r"\bbeside\b",
    "behind": r"\bbehind\b",
    "in the place of": r"\bin (?:the|its|their) place(?: of)?\b",
    "return what": r"\b(?:return|returns|yield|give|gives|say|says|tell) (?:what|whatever|who|how)\b",
    "what is what": r"\bwhat (?:is|was|are|were|has|had) \w+ (?:of|from|by|at|behind|beside|for)\b",
    "those of": r"\b(?:the one who|so manieth|those of|that of|as it is|as they are|as it was|as far as)\b",
}
"""Turns of phrase that the second reading of the house names, with the words of the same kind."""
CLAUSE = re.compile(r"\b(?:that|which|who|whom|whose|what|whatever|where|whether)\b", re.IGNORECASE)
MOST_CLAUSES, MOST_WORDS = 3, 45
"""Clauses and words of a sentence from which a reader loses its subject."""

SECTION = re.compile(r"(?:Args|Attributes):\s*$")
ENTRY = re.compile(r"    (\*{0,2}[\w, `*]+): (\S.*)")
SHAPE = re.compile(r"^(?:`?\[[^\]]*\]`?[ ,.;]*(?:(?:u?int|float|bfloat|bool)\w*[ ,.;]*)?)+")
WITHOUT_NOUN = re.compile(
    r"(?:of|that|to|as|by|with|without|which|whose|who|whom|in|on|at|for|from|behind|beside|between|under|above|below"
    r"|per|what|whatever|where|when|how|why|those|these|it|them|likewise|the same|the one|the others?)\b",
    re.IGNORECASE,
)
"""First words of a line that names no noun: prepositions, pronouns and clauses. `whether ...` says a truth value."""
BARE = re.compile(
    r"(?:(?:is|are) \w+|\w+ed|samples|answers|ends|binds|reads|counts|makes)(?: (?:it|them|so far))?[.;]?$"
)
"""A line that is a verb and nothing else: `engine: samples.`"""

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Docstring:
    """One docstring of the source.

    Attributes:
        place: file and line.
        subject: signature of the function, head of the class, name of the module or field.
        text: the docstring without its indentation.
    """

    place: str
    subject: str
    text: str

    def sentences(self) -> Iterator[str]:
        """Yield the sentences, each on one line; an entry of Args begins one."""
        for paragraph in re.split(r"\n\s*\n|\n(?=    [\w*`]+: )", self.text):
            yield from re.split(r"(?<=[.:!?]) (?=[A-Z`])", " ".join(paragraph.split()))

    def signs(self) -> Iterator[tuple[str, str]]:
        """Yield every sign with its sentence."""
        for sentence in self.sentences():
            for name, pattern in SIGNS.items():
                if re.search(pattern, sentence, re.IGNORECASE):
                    yield name, sentence
            if len(CLAUSE.findall(sentence)) > MOST_CLAUSES:
                yield f"more than {MOST_CLAUSES} clauses", sentence
            if len(sentence.split()) > MOST_WORDS:
                yield f"more than {MOST_WORDS} words", sentence

    def entries(self) -> Iterator[tuple[str, str]]:
        """Yield name and first line of every entry under Args and Attributes."""
        inside = False
        for line in self.text.splitlines():
            if SECTION.match(line):
                inside = True
            elif line and not line.startswith(" "):
                inside = False
            elif inside and (entry := ENTRY.match(line)):
                yield entry[1], entry[2]

    def without_noun(self) -> Iterator[str]:
        """Yield the entries whose line names no noun."""
        yield from (f"{name}: {line}" for name, line in self.entries() if names_no_noun(line))


def names_no_noun(line: str) -> bool:
    """Whether a line under Args or Attributes begins without a noun; a shape before it counts for nothing."""
    rest = SHAPE.sub("", line)
    return bool(WITHOUT_NOUN.match(rest) or BARE.match(rest))


def docstrings(source: Path) -> Iterator[Docstring]:
    """Yield every docstring below a folder: of modules, classes, functions and fields."""
    for path in sorted(source.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        name = path.relative_to(source.parent.parent)
        for node in ast.walk(tree):
            for before, statement in _expressions(node):
                line, text = statement.lineno, inspect.cleandoc(statement.value.value)
                yield Docstring(f"{name}:{line}", _subject(node, before, name), text)


def _expressions(node: ast.AST) -> Iterator[tuple[ast.stmt | None, ast.Expr]]:
    """Yield the strings that stand as statements: a docstring comes first, a field's comes after its field."""
    body = getattr(node, "body", None)
    if not isinstance(node, Documented | ast.If) or not isinstance(body, list):
        return
    for before, statement in zip([None, *body], body, strict=False):
        if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Constant):
            continue
        if isinstance(statement.value.value, str) and isinstance(before, ast.Assign | ast.AnnAssign | None):
            yield before, statement


def _subject(node: ast.AST, before: ast.stmt | None, name: Path) -> str:
    if before is not None:
        return ast.unparse(before).split("\n")[0][:100]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        return f"def {node.name}({ast.unparse(node.args)}){returns}"
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(map(ast.unparse, node.bases))
        return f"class {node.name}({bases})" if bases else f"class {node.name}"
    return f"module {'.'.join(name.with_suffix('').parts[1:])}"


def counts(rows: Iterable[Docstring], title: str) -> str:
    """Return the figures of a set of docstrings as text."""
    rows = list(rows)
    signs = Counter(name for row in rows for name in {name for name, _ in row.signs()})
    marked = sum(any(True for _ in row.signs()) for row in rows)
    entries = sum(1 for row in rows for _ in row.entries())
    without = sum(1 for row in rows for _ in row.without_noun())
    lines = [
        f"{title}: {len(rows)} docstrings, {marked} with a sign ({marked / max(len(rows), 1):.1%}); "
        f"{entries} lines of Args and Attributes, {without} without a noun ({without / max(entries, 1):.1%})"
    ]
    return "\n".join([*lines, *(f"  {number:5} {name}" for name, number in signs.most_common())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="decides the sample")
    parser.add_argument("--count", type=int, default=110, help="docstrings of the sample")
    parser.add_argument("--room", default="", help="a folder below src/sparring; empty for all of it")
    parser.add_argument("--list", action="store_true", help="print the signs in place of a sample")
    chosen = parser.parse_args()
    rows = [row for row in docstrings(SOURCE) if row.place.startswith(f"src/sparring/{chosen.room}")]
    if chosen.list:
        for row in rows:
            for name, sentence in row.signs():
                print(f"{row.place}: {name}: {sentence}")
            for line in row.without_noun():
                print(f"{row.place}: no noun: {line}")
    else:
        sample = random.Random(chosen.seed).sample(rows, min(chosen.count, len(rows)))
        for number, row in enumerate(sample, 1):
            print(f"{number}. {row.place}\n   {row.subject}\n{textwrap.indent(row.text, '       ')}\n")
        print(counts(sample, f"sample of seed {chosen.seed}"))
    print(counts(rows, f"src/sparring/{chosen.room}"))


if __name__ == "__main__":
    main()
