"""Plain words: variables are named by their matter, docstrings begin with it. Checked on the source's AST."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "sparring"

WORDS = {
    "found": "what was searched for: match, records, results",
    "known": "which set it is: names, allowed, available",
    "told": "what was passed on: warning, metrics, update",
    "asked": "a request, a prompt or a condition",
    "said": "a message, an answer, a text",
    "given": "settings, inputs, arguments, or where it is from",
    "whole": "the quantity: total, tokens, window",
    "ours": "the owner: local, own, candidates",
    "theirs": "the owner: remote, reference, tokenizer",
    "odd": "what is wrong: invalid, mismatched",
    "whatever": "its type",
    "one": "the element: task, row, tensor",
    "each": "the element, or the list: rows, parts",
}
"""Words that name no thing, each with what to write in its place. `kept` is not among them: the kept set of truncated
sampling is a term."""
IN_PASSING = {"one", "each"}
"""Words that a comprehension or a lambda of one line may bind: the element is in sight there."""
KEYS = {("envs/rubrics/config.py", "whole")}
"""Keys of recipes, which users have written down."""

OPENINGS = re.compile(
    r"\s*(What|Whatever|Who|Whoever|Whom|Whose|How|As|Where|Wherever|When|Whenever|Whether|Which|Why)\b"
)
"""First words that put a clause in the place of a subject. A function's docstring begins with a verb, a class's and a
field's with a noun."""

ARTICLES = re.compile(r"\s*(The|A|An|Every|One|Two|Nothing|No|Its|Of|By|From|In|On|At|Under|Against)\b")
"""First words of a noun phrase. A function is described by what it does, a property by what it is."""


def bound(tree: ast.Module) -> Iterator[tuple[str, int, bool]]:
    """Yield every variable, parameter and field that is bound: name, line, and whether it is bound in passing."""
    passing = {id(inner) for node in ast.walk(tree) for inner in _in_passing(node)}
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name, node.lineno, id(node) in passing
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name, node.lineno, False
            case ast.Attribute(attr=name, ctx=ast.Store(), value=ast.Name(id="self")):
                yield name.lstrip("_"), node.lineno, False


def _in_passing(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.comprehension):
        yield from ast.walk(node.target)
    elif isinstance(node, ast.Lambda):
        yield from ast.walk(node.args)


def vague_words(path: str, tree: ast.Module) -> Iterator[str]:
    """Yield the variables whose name says nothing."""
    for name, line, in_passing in bound(tree):
        if name in WORDS and (path, name) not in KEYS and not (in_passing and name in IN_PASSING):
            yield f"{path}:{line}: {name}; write {WORDS[name]}"


def clauses(path: str, tree: ast.Module) -> Iterator[str]:
    """Yield the docstrings of modules, classes, functions and fields that begin with a clause."""
    for node in ast.walk(tree):
        for statement in getattr(node, "body", []) if not isinstance(node, ast.Lambda | ast.IfExp) else []:
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))) if OPENINGS.match(text):
                    yield f"{path}:{statement.lineno}: {text.split(chr(10))[0]!r} begins with a clause"


def nouns(path: str, tree: ast.Module) -> Iterator[str]:
    """Yield the functions whose docstring does not begin with a verb."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if ARTICLES.match(text) and not any("property" in ast.unparse(mark) for mark in node.decorator_list):
                yield f"{path}:{node.lineno}: {text.split(chr(10))[0]!r} does not begin with a verb"


RULES = (vague_words, clauses, nouns)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_speaks_plainly(rule) -> None:
    files = {str(path.relative_to(SOURCE)): path.read_text() for path in sorted(SOURCE.rglob("*.py"))}
    findings = [finding for path, text in files.items() for finding in rule(path, ast.parse(text))]
    assert not findings, "\n".join(["", *findings])


@pytest.mark.parametrize(
    ("rule", "text", "finding"),
    [
        (vague_words, "found = 1", "a.py:1: found; write"),
        (vague_words, "def f(given): ...", "a.py:1: given"),
        (vague_words, "def f(*, whole=1): ...", "a.py:1: whole"),
        (vague_words, "for one in x:\n    pass", "a.py:1: one"),
        (vague_words, "for n, (each, _) in x:\n    pass", "a.py:1: each"),
        (vague_words, "with x as told: ...", "a.py:1: told"),
        (vague_words, "if (asked := 1): ...", "a.py:1: asked"),
        (vague_words, "try: ...\nexcept E as odd: ...", "a.py:2: odd"),
        (vague_words, "match x:\n    case [known]: ...", "a.py:2: known"),
        (vague_words, "class C:\n    said: int = 0", "a.py:2: said"),
        (vague_words, "class C:\n    def f(self):\n        self._ours = 1", "a.py:3: ours"),
        (vague_words, "x = [theirs for theirs in y]", "a.py:1: theirs"),
        (clauses, '"""What it is."""', "a.py:1: 'What it is.' begins"),
        (clauses, 'def f():\n    """Whether it is."""', "a.py:2: "),
        (clauses, 'async def f():\n    """\n    How it is."""', "a.py:2: "),
        (clauses, 'class C:\n    """Who it is."""', "a.py:2: "),
        (clauses, 'class C:\n    x: int\n    """Where it is."""', "a.py:3: "),
        (clauses, 'X = 1\n"""As it is."""', "a.py:2: "),
        (nouns, 'def f():\n    """The sum."""', "a.py:1: 'The sum.' does not begin with a verb"),
        (nouns, 'class C:\n    async def f(self):\n        """From it, a sum."""', "a.py:2: "),
    ],
)
def test_a_vague_sentence_is_seen(rule, text: str, finding: str) -> None:
    findings = list(rule("a.py", ast.parse(text)))
    assert len(findings) == 1 and findings[0].startswith(finding)


@pytest.mark.parametrize(
    "text",
    [
        "x = [f(one) for one in y]",
        "x = map(lambda each: each, y)",
        "kept = 1",
        "x.found = known",
        'def f():\n    """Return the whole, as it was found when asked."""',
        'f("""What is it?""")',
        'x = """Whether or not."""',
        '"""Whereabouts and Asia."""',
        'class C:\n    """A sum."""\n\n    @property\n    def f(self):\n        """The sum."""',
    ],
)
def test_a_plain_sentence_passes(text: str) -> None:
    assert not [finding for rule in RULES for finding in rule("a.py", ast.parse(text))]
