"""Readers of rows. They read JSON Lines, a JSON array and CSV, each also compressed; Parquet; folders of the library
`datasets`; and data sets of the hub.

A row that does not parse is refused with its file and line.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

from sparring.errors import BadInput, boundary, refusal
from sparring.validation import not_json, unique_keys

Located = Iterator[tuple[int, str, dict[str, Any]]]
"""Iterator of (1-based number, place in words, row)."""

JSON, TABLES = (".jsonl", ".ndjson", ".json"), {".csv": ",", ".tsv": "\t"}
HUB = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w.-]+))?((?::[\w.-]+){0,2})")
"""Pattern of `owner/name`, with an optional `@revision` and `:split` or `:configuration:split`."""

LONGEST_CELL = 1 << 30
"""Maximum number of characters of a table's cell."""


def located(path: str) -> Located:
    """Yield every row of a file or a data set, unchanged.

    Raises:
        BadInput: the file does not exist, its format is unknown, or a row does not parse.
    """
    source = Path(path)
    if source.is_dir():
        rows = _datasets_folder(source)
    elif not source.is_file():
        rows = _hub(path)
    elif source.suffix.lower() == ".parquet":
        rows = _parquet(source)
    else:
        rows = _text_file(source)
    return _checked_rows(rows)


def _checked_rows(rows: Located) -> Located:
    for number, where, row in rows:
        for name, value in row.items():
            check_plain(value, f"{where}, column {name!a}")
            check_plain(name, f"{where}, the name of a column")
        yield number, where, row


def check_plain(value: Any, where: str) -> None:
    """Refuse text that UTF-8 cannot encode and NaN or infinite numbers, in a value and everything nested in it
    (`BadInput`)."""
    if isinstance(value, str):
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                actual = f"half of a surrogate pair at place {error.start}"
                raise refusal(where, "a text of whole characters", actual, "correct the row") from error
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise refusal(where, "a number, or null for none", str(value), "correct the row")
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            check_plain(key, where)
            check_plain(inner, where)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            check_plain(inner, where)


# ---- text ----


def _text_file(path: Path) -> Located:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    inner = suffixes[-2] if suffixes[-1:] == [".gz"] and len(suffixes) > 1 else path.suffix.lower()
    if inner in JSON:
        return _readable(path, _json_rows(path))
    if inner in TABLES:
        return _readable(path, _table(path, TABLES[inner]))
    raise refusal(
        str(path),
        "a .jsonl, .json, .csv, .tsv (also .gz) or .parquet file, a datasets folder or a hub name",
        f"a {path.suffix or 'nameless'} file",
        "convert it",
    )


def _readable(path: Path, rows: Located) -> Located:
    try:
        yield from rows
    except (OSError, EOFError, zlib.error) as error:
        actual = str(getattr(error, "strerror", None) or error)
        raise refusal(str(path), f"a {path.suffix} file that can be read", actual, "write it again") from error
    except UnicodeDecodeError as error:
        raise refusal(str(path), "text in UTF-8", str(error), "save it as UTF-8") from error


def _open(path: Path) -> IO[bytes]:
    if path.suffix.lower() == ".gz":
        return cast("IO[bytes]", gzip.open(path, "rb"))
    return path.open("rb")


def _json_rows(path: Path) -> Located:
    with _open(path) as file:
        beginning = file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")
    yield from _array(path) if beginning.startswith(b"[") else _json_lines(path)


def _array(path: Path) -> Located:
    with _open(path) as file:
        rows = parsed(file.read(), str(path), "one array of JSON objects", "correct it there")
    for number, row in enumerate(rows, 1):
        yield number, f"{path}, row {number}", _object(row, f"{path}, row {number}")


def _json_lines(path: Path) -> Located:
    with _open(path) as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                where = f"{path}:{number}"
                fix = "correct or remove the line; a file may also be one array of objects"
                yield number, where, _object(parsed(line, where, "one JSON object on the line", fix), where)


def parsed(text: str | bytes, where: str, expected: str, fix: str) -> Any:
    """Parse JSON; refuse text that is not JSON, repeats a key, or has NaN or an infinity (`BadInput`)."""
    try:
        return json.loads(text, object_pairs_hook=unique_keys, parse_constant=not_json)
    except (ValueError, RecursionError) as error:
        raise refusal(where, expected, str(error), fix) from error


def _object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise refusal(where, "a JSON object", type(row).__name__, "write {...} with the columns as keys")
    return row


def _table(path: Path, delimiter: str) -> Located:
    """Yield the rows of a table with column names in its first line; every cell is a text."""
    csv.field_size_limit(LONGEST_CELL)
    with io.TextIOWrapper(_open(path), encoding="utf-8-sig", newline="") as text:
        table = csv.reader(text, delimiter=delimiter, strict=True)
        try:
            names = next(table, [])
            if len(set(names)) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise refusal(f"{path}:1", "columns of different names", f"{twice!r} twice", "rename one")
            next_line = table.line_num + 1
            for cells in table:
                number, next_line = next_line, table.line_num + 1
                if cells and len(cells) != len(names):
                    expected, actual = f"{len(names)} cells, as many as names", f"{len(cells)} cells"
                    raise refusal(f"{path}:{number}", expected, actual, "correct the line")
                if cells:
                    yield number, f"{path}:{number}", dict(zip(names, cells, strict=True))
        except csv.Error as error:
            raise refusal(f"{path}:{table.line_num}", "a table", str(error), "correct the line") from error


# ---- tables of Arrow ----


def _parquet(path: Path) -> Located:
    import pyarrow
    import pyarrow.parquet

    try:
        batches = pyarrow.parquet.ParquetFile(path).iter_batches()
        rows = (row for batch in batches for row in batch.to_pylist())
        yield from _number_rows(path, rows)
    except pyarrow.ArrowException as error:
        raise refusal(str(path), "a Parquet file", str(error), "write it again") from error


def _datasets_folder(path: Path) -> Located:
    """Yield the rows of the Arrow stream files that `state.json` lists, in its order. Refuse a folder of splits, which
    has `dataset_dict.json` instead."""
    import pyarrow

    splits = path / "dataset_dict.json"
    if splits.is_file():
        splits_text = ", ".join(_read_key(splits, "splits"))
        raise refusal(str(path), "one split", f"a folder of splits ({splits_text})", f"name one: {path}/<split>")
    state = path / "state.json"
    if not state.is_file():
        raise refusal(str(path), "a folder with state.json, written by datasets.save_to_disk", "none", "check the path")
    number = 0
    for entry in _read_key(state, "_data_files"):
        file = path / entry["filename"]
        try:
            with pyarrow.OSFile(str(file), "rb") as handle, pyarrow.ipc.open_stream(handle) as batches:
                for batch in batches:
                    for row in batch.to_pylist():
                        number += 1
                        yield number, f"{path}, row {number}", row
        except (OSError, pyarrow.ArrowException) as error:
            raise refusal(str(file), "an Arrow stream file", str(error), "save the dataset again") from error


def _read_key(file: Path, key: str) -> Any:
    with boundary(BadInput, str(file), "the JSON of datasets.save_to_disk", "save the dataset again"):
        return json.loads(file.read_bytes())[key]


def _number_rows(where: object, rows: Iterable[dict[str, Any]]) -> Located:
    return ((number, f"{where}, row {number}", row) for number, row in enumerate(rows, 1))


# ---- the hub ----


def _hub(path: str) -> Located:
    if "://" in path or Path(path).exists():
        actual = "an address, which is not read" if "://" in path else "a pipe or device, which cannot be read twice"
        raise refusal(path, "a data file, a datasets folder or a hub name", actual, "save it as a file, and name that")
    named = HUB.fullmatch(path)
    if (
        named is None
        or named[1].lower().endswith((*JSON, *TABLES, ".gz", ".parquet"))
        or Path(named[1]).parent.is_dir()
    ):
        raise refusal(path, "a data file, a datasets folder or a hub name", "nothing there", "check the path")
    try:
        import datasets
    except ImportError as error:
        save = f"load_dataset({named[1]!r}, split=...).save_to_disk(folder)"
        fix = f"pip install 'sparring[datasets]', or save it: {save}"
        raise refusal(path, "a data file here, or the datasets package for a hub name", "neither", fix) from error

    *configuration, split = named[3].lstrip(":").split(":")
    fix = "write owner/name:configuration:split, or save it with save_to_disk(folder) and name the folder"
    with boundary(BadInput, path, "a data set on the hub", fix):
        rows = datasets.load_dataset(named[1], *configuration, split=split or "train", revision=named[2])
        return _number_rows(path, list(rows))
