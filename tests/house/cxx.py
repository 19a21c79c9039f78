"""The house's limits for C++: files, lines, functions and macros that a reader can hold in the head."""

import re
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "sparring"
MAX_FILE, MAX_WIDTH, MAX_FUNCTION = 500, 120, 60

NOISE = (
    (re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL), ""),
    (re.compile(r'"(?:\\.|[^"\\\n])*"'), '""'),
    (re.compile(r"'(?:\\.|[^'\\\n])'"), "' '"),
)
"""Comments and literals, in which braces count for nothing, and what stands in their place."""
DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)
SIGNATURE = re.compile(r"([~\w]+)\s*\([^;]*\)\s*(?:const|noexcept|->[^;]*|:[^;]*)*\s*$", re.DOTALL)


def without(pattern: re.Pattern[str], text: str, replacement: str = "") -> str:
    """`text` without the matches of `pattern`, every line break of it kept."""
    return pattern.sub(lambda match: replacement + "\n" * match[0].count("\n"), text)


def functions(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield name, first and last line of every function, methods too; lambdas belong to the function around them."""
    for pattern, replacement in NOISE:
        text = without(pattern, text, replacement)
    text = without(DIRECTIVE, text)
    line, head, name, first, inside = 1, "", "", 0, 0
    for character in text:
        line += character == "\n"
        if inside:
            inside += (character == "{") - (character == "}")
            if not inside:
                yield name, first, line
                head = ""
        elif character in "{};":
            signature = SIGNATURE.search(head) if character == "{" else None
            if signature:
                name, inside = signature[1], 1
            else:
                head = ""
        else:
            first = line if not head and not character.isspace() else first
            head += character if head or not character.isspace() else ""


def macros(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield name, first and last line of every macro."""
    for match in DIRECTIVE.finditer(text):
        if named := re.match(r"\s*#\s*define\s+(\w+)", match[0]):
            first = text.count("\n", 0, match.start()) + 1
            yield named[1], first, first + match[0].count("\n")


def sizes(path: str, text: str) -> Iterator[str]:
    """Yield what is too long or too wide in a file."""
    lines = text.splitlines()
    if len(lines) > MAX_FILE:
        yield f"{path}: {len(lines)} lines, more than {MAX_FILE}"
    yield from (f"{path}:{n}: {len(s)} characters wide" for n, s in enumerate(lines, 1) if len(s) > MAX_WIDTH)
    for name, first, last in (*functions(text), *macros(text)):
        if last - first + 1 > MAX_FUNCTION:
            yield f"{path}:{first}: {name} has {last - first + 1} lines, more than {MAX_FUNCTION}"


VECTOR = re.compile(r"\b(?:_mm512|__m512|_mm256|__m256)")
GUARD = re.compile(r"SPARRING_AVX512|SPARRING_AMX|SPARRING_SOFTWARE_TILES|__AVX2__|__AVX512F__|__AMX_BF16__")


def unguarded(text: str, guards: tuple[bool, ...] = ()) -> Iterator[int]:
    """Yield the lines with an instruction of AVX2 or AVX-512 that a compiler for an older processor meets too."""
    for pattern, replacement in NOISE:
        text = without(pattern, text, replacement)
    inside = list(guards)
    for number, line in enumerate(text.splitlines(), 1):
        word = re.match(r"\s*#\s*(if|ifdef|ifndef|elif|else|endif)\b(.*)", line)
        if word is None:
            if VECTOR.search(line) and not any(inside):
                yield number
        elif word[1] == "endif":
            inside.pop()
        elif word[1] in ("elif", "else"):
            inside[-1] = word[1] == "elif" and bool(GUARD.search(word[2]))
        else:
            inside.append(word[1] != "ifndef" and bool(GUARD.search(word[2])))


def findings() -> Iterator[str]:
    """Yield what breaks a limit in the kernels; tiles_software.h, which guarded code alone includes, counts as guarded."""
    files = sorted(path for path in SOURCE.rglob("*") if path.suffix in (".cpp", ".h"))
    assert len(files) > 20, f"expected the kernels in {SOURCE}, got {len(files)} files"
    for path in files:
        name, text = str(path.relative_to(SOURCE)), path.read_text(encoding="utf-8")
        if not any(True for _ in functions(text)):
            yield f"{name}: no function was found; the reader of C++ does not understand it"
        yield from sizes(name, text)
        guards = (True,) * (path.name == "tiles_software.h")
        yield from (f"{name}:{line}: an older processor meets this instruction" for line in unguarded(text, guards))
