"""`runs/<name>/report.html`: a self-contained page that makes no requests and runs only its own script."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from sparring.dashboard.page_data import gather
from sparring.errors import refusal
from sparring.observe.atomic_write import write_whole
from sparring.store.sqlite import SqliteStore

SCRIPTS = ("charts.js", "viewer.js", "live.js", "page.js")
"""Scripts in order of dependency."""


def write_report(run_dir: Path) -> Path:
    """Write the report of a run, finished or not, and return its path."""
    with closing(open_store(run_dir)) as store:
        data = gather(run_dir, store)
    target = run_dir / "report.html"
    write_whole(target, page(data).encode())  # a reader never sees a partial page
    return target


def open_store(run_dir: Path) -> SqliteStore:
    """Open the store of a run, finished or not, for reading.

    Raises:
        BadInput: the folder has no run.
    """
    database = run_dir / "store.sqlite"
    if not database.is_file():
        raise refusal(
            str(run_dir), "a run's folder with store.sqlite", "none", "give the folder of a run, like runs/quickstart"
        )
    return SqliteStore(database, read_only=True)


def page(data: Mapping[str, Any], *, live: bool = False) -> str:
    """Return the page with `page_data.gather`'s data; a live page asks its server for more.

    Rollout text is untrusted. It is embedded as JSON without characters that could end the script element, enters the
    document only through text nodes, and the page's policy allows only the script with the hash that it names.
    """
    style = _asset("page.css")
    script = "\n".join(_asset(name) for name in SCRIPTS)
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'"
        + ("; connect-src 'self'" if live else "")
    )
    parts = {"CSP": policy, "TITLE": html.escape(f"{data['name']} · Sparring"), "STYLE": style, "SCRIPT": script}
    text = _asset("page.html")
    for name, value in parts.items():
        text = text.replace(f"@{name}@", value)
    return text.replace("@DATA@", embedded_json(data))  # last, so that data which looks like a placeholder stays data


def embedded_json(data: Mapping[str, Any]) -> str:
    """Return JSON that is safe between script tags: plain ASCII without `<`, `>` or `&`, and null for non-finite
    numbers."""
    text = json.dumps(_finite(data), separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _asset(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8").strip("\n")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
