"""Rows of JSON Lines, Parquet and datasets folders."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from refusals import refused_at

from sparring.errors import BadInput
from sparring.tasks.files import read_conversations, read_rows
from sparring.types import Message, ToolCall

ROWS = [{"question": f"q{i}", "answer": f"a{i}", "level": i} for i in range(5)]
COLUMNS = {"prompt": "question"}


def json_lines(folder: Path, rows: list[Any]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("\n\n".join(json.dumps(row) for row in rows))
    return str(path)


def parquet(folder: Path, rows: list[Any]) -> str:
    path = folder / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
    return str(path)


def datasets_folder(folder: Path, rows: list[Any]) -> str:
    """As `datasets.save_to_disk` writes it: Arrow stream files, listed in order by state.json."""
    path = folder / "saved"
    path.mkdir()
    names = [f"data-0000{i}-of-00002.arrow" for i in range(2)]
    for name, part in zip(names, (rows[:2], rows[2:]), strict=True):
        table = pyarrow.Table.from_pylist(part)
        with pyarrow.OSFile(str(path / name), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    (path / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": name} for name in names], "_split": "train"})
    )
    (path / "dataset_info.json").write_text("{}")
    return str(path)


def array(folder: Path, rows: list[Any]) -> str:
    path = folder / "rows.json"
    path.write_bytes(b"\xef\xbb\xbf\n" + json.dumps(rows, indent=1).encode())
    return str(path)


def compressed(folder: Path, rows: list[Any]) -> str:
    path = folder / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b"".join(json.dumps(row).encode() + b"\n" for row in rows)))
    return str(path)


WRITERS = {
    "json lines": json_lines,
    "parquet": parquet,
    "datasets folder": datasets_folder,
    "array": array,
    "gz": compressed,
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_every_format_gives_the_same_rows(write: Any, tmp_path: Path) -> None:
    rows = read_rows(write(tmp_path, ROWS), COLUMNS)
    assert [(r["prompt"], r["answer"], r["level"]) for r in rows] == [(f"q{i}", f"a{i}", i) for i in range(5)]
    numbers = ["1", "3", "5", "7", "9"] if write is json_lines else ["1", "2", "3", "4", "5"]
    assert [r["id"] for r in rows] == numbers, "the line of the file, blank ones counted"


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_every_format_gives_the_same_conversations(write: Any, tmp_path: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "python", "arguments": '{"code": "1"}'}}
    row = {
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "1", "tool_call_id": "c"},
            {"role": "assistant", "content": "one"},
        ]
    }
    shown = read_conversations(write(tmp_path, [row] * 3))
    assert (
        shown
        == [
            (
                Message(role="user", content="hi"),
                Message(role="assistant", tool_calls=(ToolCall(id="c", name="python", arguments={"code": "1"}),)),
                Message(role="tool", content="1", tool_call_id="c"),
                Message(role="assistant", content="one"),
            )
        ]
        * 3
    )


def test_prompt_and_answer_make_a_conversation(tmp_path: Path) -> None:
    (first, *_) = read_conversations(json_lines(tmp_path, ROWS), COLUMNS)
    assert first == (Message(role="user", content="q0"), Message(role="assistant", content="a0"))


def test_a_conversation_may_be_the_prompt(tmp_path: Path) -> None:
    row = {"chat": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "name": "x"}
    (found,) = read_rows(json_lines(tmp_path, [row]), {"messages": "chat", "id": "name"})
    assert found == {"id": "x", "messages": (Message(role="system", content="s"), Message(role="user", content="u"))}


def test_a_mapped_column_takes_precedence_over_its_namesake(tmp_path: Path) -> None:
    (row,) = read_rows(json_lines(tmp_path, [{"prompt": "template", "question": "q"}]), COLUMNS)
    assert row["prompt"] == "q"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{oops", "rows.jsonl:2: expected one JSON object on the line"),
        ("[1]", "rows.jsonl:2: expected a JSON object"),
        (
            '{"prompt": "a", "prompt": "b"}',
            "rows.jsonl:2: expected one JSON object",
        ),
        ('{"prompt": "a", "x": {"y": 1, "y": 2}}', "rows.jsonl:2: .* got the key 'y' twice"),
        ('{"prompt": "a", "x": NaN}', "rows.jsonl:2: .* got NaN, which is not JSON"),
        ('{"prompt": "a", "x": 1e999}', "rows.jsonl:2, column 'x': expected a number"),
        ('{"prompt": "a\\ud800"}', "rows.jsonl:2, column 'prompt': expected a text of whole characters"),
        ('{"prompt": "a", "x": [{"\\udfff": 1}]}', "rows.jsonl:2, column 'x': expected a text of whole characters"),
        ('{"prompt": "a", "\\ud800": 1}', "rows.jsonl:2, the name of a column: expected a text of whole"),
        ("[" * 100_000, "rows.jsonl:2: expected one JSON object on the line"),
        ('{"prompt": " \\n"}', "rows.jsonl:2, column 'prompt': expected a text that says something"),
        (
            '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": null}]}',
            "2: expected a prompt that says",
        ),
        ('{"answer": "a"}', "rows.jsonl:2: expected a column"),
        ('{"prompt": 3}', "rows.jsonl:2, column 'prompt': expected a text"),
        ('{"messages": "hi"}', r"rows.jsonl:2, messages: expected a list"),
        ('{"messages": []}', "rows.jsonl:2, messages: expected a list"),
        ('{"messages": [{"role": "bot"}]}', r"messages\[0\]: expected an object with role, one of system, user"),
        ('{"messages": [{"role": "user", "content": 1}]}', r"messages\[0\].content: expected a text"),
        (
            '{"messages": [{"role": "assistant", "content": "x"}]}',
            "expected a conversation that waits for the assistant",
        ),
        (
            '{"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}]}',
            r"tool_calls\[0\].arguments: expected JSON",
        ),
        ('{"messages": [{"role": "assistant", "tool_calls": [{"name": "f"}]}]}', "expected a name and arguments"),
    ],
)
def test_a_row_that_does_not_parse_is_refused_with_its_place(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "p"}\n' + line + "\n")
    with pytest.raises(BadInput, match=said):
        read_rows(str(path))


def test_a_conversation_with_nothing_to_learn_is_refused(tmp_path: Path) -> None:
    path = json_lines(tmp_path, [{"messages": [{"role": "user", "content": "hi"}]}])
    with pytest.raises(BadInput, match="rows.jsonl:1: expected an assistant message to learn"):
        read_conversations(path)


@pytest.mark.parametrize("content", [None, "", " \n"])
def test_an_empty_reply_is_no_reply_to_imitate(tmp_path: Path, content: str | None) -> None:
    """Unless it is context, or a run has recorded it."""
    empty: dict[str, Any] = {"role": "assistant", "content": content}
    talk = [
        {"role": "user", "content": "q"},
        empty,
        {"role": "user", "content": "r"},
        {"role": "assistant", "content": "a"},
    ]
    path = json_lines(tmp_path, [{"messages": talk}])
    with pytest.raises(BadInput, match=r"rows.jsonl:1, messages\[1\]: expected a reply"):
        read_conversations(path)
    assert len(read_conversations(path, recorded=True)) == 1
    assert (
        len(read_conversations(json_lines(tmp_path, [{"messages": [talk[0], empty | {"weight": 0}, *talk[2:]]}]))) == 1
    )
    with pytest.raises(BadInput, match="rows.jsonl:1, column 'answer': expected a text"):
        read_conversations(json_lines(tmp_path, [{"prompt": "q", "answer": content}]))


def test_a_table_has_texts_in_its_cells(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text('\ufeffquestion,answer\r\n"a, ""b""\nc",7\r\n\r\nd,\r\n', newline="")
    (tmp_path / "rows.tsv").write_text("question\tanswer\nd\t\n")
    expected = [{"id": "2", "prompt": 'a, "b"\nc', "answer": "7"}, {"id": "5", "prompt": "d", "answer": ""}]
    assert read_rows(str(tmp_path / "rows.csv"), COLUMNS) == expected
    assert read_rows(str(tmp_path / "rows.tsv"), COLUMNS) == [{**expected[1], "id": "2"}]


def test_a_prompt_may_be_a_conversation(tmp_path: Path) -> None:
    (row,) = read_rows(json_lines(tmp_path, [{"prompt": [{"role": "user", "content": "u"}]}]))
    assert row == {"id": "1", "messages": (Message(role="user", content="u"),)}


def test_a_hub_name_says_what_it_needs() -> None:
    with pytest.raises(BadInput, match="openai/gsm8k:main:train: expected .*(datasets package|a data set on the hub)"):
        read_rows("openai/gsm8k:main:train")
    for path in ("openai/gsm8k.jsonl", "tests/none", "/nowhere/rows"):
        with refused_at(path, "a data file"):
            read_rows(path)


def test_a_bad_row_of_parquet_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="rows.parquet, row 1: expected a column"):
        read_rows(parquet(tmp_path, ROWS))


def test_files_of_another_format_than_their_suffix_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("no")
    (tmp_path / "a.xlsx").write_text("a,b")
    (tmp_path / "b.jsonl.gz").write_text("{}")
    (tmp_path / "c.csv").write_bytes(b"question\n\xff")
    (tmp_path / "d.csv").write_text("question,b\n1,2\n3")
    (tmp_path / "e.csv").write_text("a,a\n1,2")
    (tmp_path / "dict").mkdir()
    (tmp_path / "dict" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    folder = datasets_folder(tmp_path, ROWS)
    (Path(folder) / "data-00001-of-00002.arrow").write_bytes(b"no")
    for path, said in [
        ("a.parquet", "expected a Parquet file"),
        ("a.xlsx", "a .jsonl, .json, .* a datasets folder or a hub name, got a .xlsx file"),
        ("b.jsonl.gz", "b.jsonl.gz: expected a .gz file"),
        ("c.csv", "c.csv: expected text in UTF-8"),
        ("d.csv", "d.csv:3: expected 2 cells"),
        ("e.csv", "e.csv:1: expected columns of different names"),
        ("dict", "dict: expected one split"),
        ("missing.jsonl", "missing.jsonl: expected a data file"),
        ("", "expected a folder with state.json"),
        ("saved", "data-00001-of-00002.arrow: expected an Arrow stream file"),
    ]:
        with pytest.raises(BadInput, match=said):
            read_rows(str(tmp_path / path), COLUMNS)


def test_what_is_there_but_cannot_be_read_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    with refused_at(str(tmp_path / "rows.jsonl"), "a pipe or device, which cannot be read twice"):
        read_rows(str(tmp_path / "rows.jsonl"), {})
    with refused_at("https://example.org/rows.jsonl", "an address, which is not read"):
        read_rows("https://example.org/rows.jsonl", {})
