"""Clocks that jump: nothing is measured, and nothing decided, by the time of day."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "sparring"
JUMPING = {"time": {"time", "time_ns", "localtime", "gmtime", "ctime"}, "datetime": {"now", "utcnow", "today"}}
"""Functions of modules and classes that tell the time of day, which a user or a time server may set."""

SHOWN = {
    "dashboard/page_data.py": "when the page was written",
    "gateway/dialects/chat_completions.py": "when an answer was made, which the vendor's clients expect",
    "gateway/dialects/response_events.py": "the same",
    "observe/sinks/jsonl.py": "when a line was written",
    "observe/sinks/tensorboard.py": "when a point was written",
    "rollout/play.py": "when a rollout began; how long it took is measured by the loop's clock",
    "store/sqlite.py": "when an event was recorded; their order is that of their rows",
}
"""Files that may ask for it, and what they show; each asks once."""


def asks(path: str, tree: ast.Module) -> Iterator[str]:
    """Where a file asks for the time of day."""
    names = {name for module in JUMPING for name in JUMPING[module]}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=module), attr=name) if name in JUMPING.get(module, ()):
                yield path
            case ast.Attribute(value=ast.Attribute(attr="datetime"), attr=name) if name in JUMPING["datetime"]:
                yield path
            case ast.ImportFrom(module="time", names=imported) if {each.name for each in imported} & names:
                yield path


def findings() -> Iterator[str]:
    """Yield the files that ask for the time of day and are not on the list, or are on it and do not."""
    files = {str(path.relative_to(SOURCE)): path.read_text(encoding="utf-8") for path in sorted(SOURCE.rglob("*.py"))}
    asking = Counter(path for name, text in files.items() for path in asks(name, ast.parse(text)))
    for path in sorted(asking.keys() | SHOWN.keys()):
        if asking[path] != (path in SHOWN):
            yield (
                f"{path}: asks {asking[path]} times for the time of day, expected {int(path in SHOWN)};"
                " measure with time.monotonic, time.perf_counter or the event loop's clock"
            )
