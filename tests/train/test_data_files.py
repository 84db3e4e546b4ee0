"""Data files: JSON, lines, Parquet and compressed ones; folders, and damage."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from reshard.base.errors import ReshardError
from reshard.runs.guard.data.data_files import check_records, files_of
from tests.train.conftest import chats
from tests.train.test_data import lines, problems_of


def test_a_byte_order_mark_windows_line_ends_and_blank_lines_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n  \n{"text": "b"}')
    assert check_records(path, "sft") == {"plain text": 2}


def test_a_last_line_that_is_cut_off_is_told_from_a_wrong_one(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{"text": "b')
    (problem,) = problems_of(path)
    assert problem.message == "the last line is cut off"
    assert problem.file == f"{path}:2" and '{"text": "b' in str(problem.found)


def test_a_line_in_another_encoding_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "caf\xe9"}\n')
    assert [problem.message for problem in problems_of(path)] == ["a line is not UTF-8"]


def test_a_json_file_may_be_an_array_or_lines_and_says_the_record(tmp_path: Path) -> None:
    rows = [{"text": "a"}, {"text": ""}]
    for name, content in {
        "array.json": json.dumps(rows),
        "pretty.json": "\n" + json.dumps(rows, indent=2),
        "array.jsonl": json.dumps(rows),
    }.items():
        path = tmp_path / name
        path.write_text(content)
        assert problems_of(path)[0].file == f"{path}: record 2"
    assert problems_of(lines(tmp_path / "lines.json", *rows))[0].file == f"{tmp_path}/lines.json:2"
    (tmp_path / "object.json").write_text(json.dumps({"data": rows}, indent=1))
    assert problems_of(tmp_path / "object.json")[0].message == "the file is one JSON object"


def test_compressed_lines_and_parquet_hold_the_same_records(tmp_path: Path) -> None:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    rows = chats()
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert check_records(tmp_path / "a.jsonl.gz", "sft") == {"chat": 64}
    assert check_records(tmp_path / "a.parquet", "sft") == {"chat": 64}
    parquet.write_table(arrow.Table.from_pylist([*rows, {"messages": []}]), tmp_path / "b.parquet")
    assert problems_of(tmp_path / "b.parquet")[0].file == f"{tmp_path}/b.parquet: row 65"


@pytest.mark.parametrize("content", ["\n-3", '\n"text"', "\nnull"])
def test_a_json_file_without_records_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    (problem,) = problems_of(tmp_path)
    assert (problem.code, problem.found) == ("record-not-an-object", repr(json.loads(content)))


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.gz"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"PAR1 nothing that can be read")
    assert problems_of(tmp_path)[0].file == str(tmp_path / name)


@pytest.mark.parametrize("at", [1, 12, -6, None])
def test_a_compressed_file_with_a_wrong_byte_or_cut_short_is_named(tmp_path: Path, at: int | None) -> None:
    content = bytearray(gzip.compress(b"".join(b'{"text": "%d"}\n' % number for number in range(99))))
    if at is None:
        del content[-20:]
    else:
        content[at] ^= 0xFF
    (tmp_path / "a.jsonl.gz").write_bytes(content)
    assert problems_of(tmp_path)[0].message == "the file cannot be read"


def test_parquet_without_pyarrow_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install pyarrow" in str(problems_of(tmp_path)[0].remedy)


def test_a_folder_is_all_its_data_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    lines(tmp_path / "b.jsonl", {"text": "2"})
    lines(tmp_path / "a.jsonl", {"text": "1"})
    lines(tmp_path / "part/c.json", {"text": "3"})
    (tmp_path / "README.md").write_text("about")
    (tmp_path / ".hidden.jsonl").write_text("nothing")
    assert [file.name for file in files_of(tmp_path)] == ["a.jsonl", "b.jsonl", "c.json"]
    assert check_records(tmp_path, "sft") == {"plain text": 3}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "the data does not exist"),
        (lambda path: path.mkdir(), "there are no data files"),
        (lambda path: path.write_text("a,b"), "there are no data files"),
    ],
)
def test_no_data_is_said(tmp_path: Path, make: Callable[[Path], object], message: str) -> None:
    path = tmp_path / "a.csv"
    make(path)
    with pytest.raises(ReshardError, match=message):
        files_of(path)


def test_a_file_of_blank_lines_is_empty(tmp_path: Path) -> None:
    assert problems_of(lines(tmp_path / "a.jsonl", "", ""))[0].message == "the data is empty"
