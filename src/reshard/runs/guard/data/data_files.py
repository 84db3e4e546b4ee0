"""Data files: JSONL, JSON and Parquet, read record by record, without torch or datasets."""

from __future__ import annotations

import gzip
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from reshard.base.errors import Problem, ReshardError, listed, raise_all
from reshard.base.plain_json import json_of
from reshard.runs.guard.data.record_faults import faults
from reshard.runs.guard.data.records import is_rewritten, record_kind, shape_of, standard

DATA_SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet")
IMAGES = "images"
"""The name under which records with images are counted."""
REWRITTEN = "rewritten"
"""The name under which records are counted that TRL reads otherwise than `standard` does."""
MAX_FAULTY_RECORDS = 12
"""Maximum number of faulty records that are reported; the others are only counted."""
PARQUET_BATCH_ROWS = 256
"""Rows of a Parquet file in memory: they may contain images."""


def not_found(path: Path) -> Problem:
    """The problem of a path without data."""
    return Problem(
        "data-not-found", "the data does not exist", file=str(path), remedy="check the path: --data PATH"
    )


def files_of(path: Path) -> list[Path]:
    """The data files at a path, sorted by name. Raises ReshardError if there are none."""
    if not path.exists():
        raise ReshardError(not_found(path))
    inside = [path] if path.is_file() else _inside(path)
    files = [file for file in inside if file.name.lower().endswith(DATA_SUFFIXES)]
    if not files:
        names = [file.name for file in inside]
        raise ReshardError(
            "data-files-missing",
            "there are no data files",
            file=str(path),
            expected=f"files that end in {', '.join(DATA_SUFFIXES)}",
            found=", ".join(names[:8]) + " …" * (len(names) > 8) if names else "an empty folder",
            remedy=_AS_LINES,
        )
    return files


def _inside(folder: Path) -> list[Path]:
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return [path for path in paths if not any(p.startswith(".") for p in path.relative_to(folder).parts)]


def check_records(path: Path, method: str) -> Counter[str]:
    """The number of records of each shape in a file or folder, of those with `IMAGES`, and of those to be `REWRITTEN`.

    Without a `method`, records may have any columns.

    Raises ReshardError with all faulty records, by file and line; of many that are alike, the first ones are named.
    """
    faulty, checker, count = _Faulty(), _RecordChecker(method), 0
    for where, row in _rows(path):
        count += 1
        faulty.add(where, [row] if isinstance(row, Problem) else checker.problems(row, where))
    if not count:
        raise ReshardError(
            "data-empty", "the data is empty", file=str(path), found="no records", remedy="check the path"
        )
    faulty.end()
    return +checker.shapes


@dataclass
class _RecordChecker:
    """Checks records for a method, and that all are of one kind; `first` is the kind and the place of the first one."""

    method: str
    shapes: Counter[str] = field(default_factory=Counter)
    first: tuple[str, str] | None = None

    def problems(self, row: Any, where: str) -> list[Problem]:
        """The problems of a record."""
        if not self.method:
            return []
        if problems := list(faults(row, self.method)):
            return problems
        shape = shape_of(row, self.method)
        assert shape, "faults has found it"
        self.shapes[shape] += 1
        clean = standard(row, shape)
        self.shapes[IMAGES] += "images" in clean
        self.shapes[REWRITTEN] += is_rewritten(row, clean)
        kind = record_kind(clean)
        self.first = self.first or (kind, where)
        return [] if kind == self.first[0] else [_mixed(kind, *self.first)]


@dataclass
class _Faulty:
    """The problems of faulty records. Those that differ only in place are merged; beyond a limit they are counted."""

    places: dict[Problem, list[str]] = field(default_factory=dict)
    count: int = 0

    def add(self, where: str, problems: list[Problem]) -> None:
        self.count += bool(problems)
        for problem in problems:
            if problem in self.places or len(self.places) < MAX_FAULTY_RECORDS:
                self.places.setdefault(problem, []).append(where)

    def end(self) -> None:
        problems = [replace(alike, file=listed(places, 3)) for alike, places in self.places.items()]
        named = len({place for places in self.places.values() for place in places})
        if self.count > named:
            problems.append(
                Problem(
                    "records-wrong",
                    f"{self.count - named} more records are wrong",
                    found=f"{self.count} wrong records in all",
                )
            )
        raise_all(problems)


def _mixed(kind: str, expected: str, where: str) -> Problem:
    return Problem(
        "records-of-different-shapes",
        "the data has records of different shapes",
        expected=f"{expected}, as in {where}",
        found=kind,
        remedy="train on one shape, or convert the others to it",
    )


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Each record with its place; a Problem if it cannot be read."""
    for file in files_of(path):
        yield from _parquet(file) if file.suffix.lower() == ".parquet" else _json(file)


_AGAIN = "copy or download it again"
_AS_LINES = "write the data as JSONL: one JSON object on each line"


def _json(file: Path) -> Iterator[tuple[str, Any]]:
    """JSON Lines, or one JSON array, whatever the suffix is; an object over several lines is rejected."""
    opened = gzip.open if file.suffix.lower() == ".gz" else open
    try:
        with opened(file, "rb") as source:
            lines = ((number, line) for number, line in enumerate(_decoded(source), 1) if line.strip())
            begin, first = next(lines, (1, b""))
            if first.lstrip().startswith(b"[") or first.strip() == b"{":
                yield from _whole(file, first + source.read())
                return
            for number, line in chain([(begin, first)] if first else [], lines):
                yield f"{file}:{number}", _parse(line)
    except (OSError, EOFError, zlib.error) as error:
        message, cause = "the file cannot be read", str(error)
        yield str(file), Problem("data-file-unreadable", message, found=cause, remedy=_AGAIN)


def _decoded(lines: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of a file without a byte-order mark."""
    for number, line in enumerate(lines):
        yield line if number else line.removeprefix(b"\xef\xbb\xbf")


def _parse(text: bytes) -> Any:
    """The value of a line, or its problem."""
    try:
        return json_of(text)
    except UnicodeDecodeError as error:
        message, cure = "a line is not UTF-8", "save the file as UTF-8"
        return Problem("line-not-utf8", message, found=str(error), remedy=cure)
    except ValueError as error:
        if not text.endswith(b"\n"):
            end = "… " + text.decode("utf-8", "replace")[-40:]
            return Problem("last-line-truncated", "the last line is cut off", found=end, remedy=_AGAIN)
        return Problem(
            "line-not-json",
            "a line is not JSON",
            expected="one JSON object on each line",
            found=str(error),
            remedy="fix it",
        )


def _whole(file: Path, text: bytes) -> Iterator[tuple[str, Any]]:
    """The records of a file that is one JSON value."""
    try:
        content = json_of(text)
    except ValueError as error:
        yield str(file), Problem("data-not-json", "not a JSON file", found=str(error), remedy=_AS_LINES)
        return
    if isinstance(content, list):
        yield from ((f"{file}: record {number}", row) for number, row in enumerate(content, 1))
        return
    problem = Problem(
        "data-one-json-object",
        "the file is one JSON object",
        expected="an array of records, or one record on each line",
        remedy="keep the list of records that is inside, or move the file out of the folder",
    )
    yield str(file), problem


def _parquet(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise ReshardError(
            "pyarrow-not-installed",
            "reading Parquet needs pyarrow",
            file=str(file),
            remedy="pip install pyarrow, or write the data as JSONL",
        ) from None
    try:
        batches = parquet.ParquetFile(file).iter_batches(PARQUET_BATCH_ROWS)
        for number, row in enumerate((row for batch in batches for row in batch.to_pylist()), 1):
            yield f"{file}: row {number}", row
    except (arrow.ArrowException, ArithmeticError, ValueError, OSError) as error:
        cause = str(error).split("\n")[0]
        yield str(file), Problem("data-not-parquet", "not a Parquet file", found=cause, remedy=_AGAIN)
