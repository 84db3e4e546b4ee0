"""Training data: JSONL, JSON and Parquet, read record by record. Faulty records are reported by file and line.

`read_records` needs neither torch nor datasets, and keeps one record in memory. `load_dataset` converts the records to
what TRL takes, as Arrow tables in memory: a cache on disk could be stale.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from reshard.base.errors import Problem, ReshardError, listed
from reshard.base.plain_json import json_of
from reshard.training.data.mix import INDEX, DataMix
from reshard.training.data.record_faults import TemplateLimits, faults
from reshard.training.data.record_images import located
from reshard.training.data.records import DataRow, kind_of, shapes_of, standard

DATA_SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".parquet")
SPLIT_NAMES = {"test", "valid", "validation", "val", "eval", "dev"}
"""Names of splits that are usually kept out of training."""
MAX_FAULTY_RECORDS = 12
"""Maximum number of faulty records that are reported; the others are only counted."""
ARROW_BATCH_ROWS = 4096
"""Rows of an Arrow batch."""
PARQUET_BATCH_ROWS = 256
"""Rows of a Parquet file in memory: they may contain images."""
ANY_TEMPLATE = TemplateLimits()


def not_found(path: Path, option: str = "--data") -> Problem:
    """The problem of a path without data, which may consist of a path, a colon and a wrong weight."""
    before, colon, weight = str(path).rpartition(":")
    return Problem(
        "data-not-found",
        "there is no data",
        file=str(path),
        remedy=f"{weight} is not a number: write a weight as in {before}:0.7"
        if colon and Path(before).exists()
        else f"pass a file or folder with {option}",
    )


def files_of(path: Path) -> list[Path]:
    """The data files at a path, sorted by name. Raises ReshardError if there are none."""
    if not path.exists():
        raise ReshardError(not_found(path))
    if path.suffix == INDEX:
        return [path]
    inside = [path] if path.is_file() else _inside(path)
    found = [file for file in inside if file.name.lower().endswith(DATA_SUFFIXES)]
    if not found:
        names = [file.name for file in inside]
        raise ReshardError(
            "data-files-missing",
            "there are no data files",
            file=str(path),
            expected=f"files that end in {', '.join(DATA_SUFFIXES)}",
            found=", ".join(names[:8]) + " …" * (len(names) > 8) if names else "an empty folder",
            remedy=_AS_LINES,
        )
    return found


def _inside(folder: Path) -> list[Path]:
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return [path for path in paths if not any(p.startswith(".") for p in path.relative_to(folder).parts)]


def held_out(path: Path) -> list[Path]:
    """Files named after an evaluation split that would be used for training with the others."""
    files = files_of(path)
    named = [file for file in files if SPLIT_NAMES & set(_words(file, path))]
    return named if len(named) < len(files) else []


def _words(file: Path, root: Path) -> list[str]:
    name = str(file.relative_to(root)) if root.is_dir() else file.name
    return name.lower().replace("-", ".").replace("_", ".").replace("/", ".").split(".")


def read_records(
    path: Path,
    method: str,
    template: TemplateLimits = ANY_TEMPLATE,
    *,
    chosen: str | None = None,
    system: str | None = None,
    shapes: Counter[str] | None = None,
    view: Callable[[DataRow], DataRow] = lambda row: row,
) -> Iterator[DataRow]:
    """The records of a file or folder, in TRL's standard shape.

    `chosen` is the shape for records that fit several, `system` the system message for chats without one; `shapes`
    counts the records of each shape, `view` looks at their images. Faulty records are skipped, and at the end raised
    together as a ReshardError, by file and line.
    """
    faulty, first = _Faulty(), None
    for folder, where, row in _rows(path):
        more = {"chosen": chosen, "system": system}
        problems = [row] if isinstance(row, Problem) else list(faults(row, method, template, **more))
        if not problems:
            (shape,) = shapes_of(row, method, chosen)
            if shapes is not None:
                shapes[shape] += 1
            clean, problems = _viewed(standard(row, shape, system), folder, view)
            kind = kind_of(clean)
            first = first or (kind, where)
            problems = problems if kind == first[0] else [*problems, _mixed(kind, *first)]
        if problems:
            faulty.add(where, problems)
        else:
            yield clean
    if first is None and not faulty.count:
        raise ReshardError(
            "data-empty", "the data is empty", file=str(path), found="no records", remedy="check the path"
        )
    faulty.end()


def _viewed(row: DataRow, folder: Path, view: Callable[[DataRow], DataRow]) -> tuple[DataRow, list[Problem]]:
    """A record with its images located and viewed, and their problems."""
    if "images" in row:
        row = {**row, "images": [located(image, folder) for image in row["images"]]}
    try:
        return view(row), []
    except ReshardError as error:
        return row, error.problems


@dataclass
class _Faulty:
    """The problems of faulty records. Those that differ only in place are merged; beyond a limit they are counted."""

    places: dict[Problem, list[str]] = field(default_factory=dict)
    count: int = 0

    def add(self, where: str, problems: list[Problem]) -> None:
        self.count += 1
        for problem in problems:
            if problem in self.places or len(self.places) < MAX_FAULTY_RECORDS:
                self.places.setdefault(problem, []).append(where)

    def end(self) -> None:
        problems = [replace(alike, file=listed(places, 3)) for alike, places in self.places.items()]
        named = len({place for places in self.places.values() for place in places})
        if self.count > named:
            message = f"{self.count - named} more records are wrong"
            problems.append(Problem("records-wrong", message, found=f"{self.count} wrong records in all"))
        if problems:
            raise ReshardError(problems)


def _mixed(kind: str, expected: str, where: str) -> Problem:
    return Problem(
        "records-of-different-shapes",
        "the data has records of different shapes",
        expected=f"{expected}, as in {where}",
        found=kind,
        remedy="train on one shape, or convert the others to it",
    )


def _rows(path: Path) -> Iterator[tuple[Path, str, Any]]:
    """Each record with the folder of its file and its place; a Problem if it cannot be read."""
    for file in files_of(path):
        rows = _parquet(file) if file.suffix.lower() == ".parquet" else _json(file)
        yield from ((file.parent, where, row) for where, row in rows)


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
        message, found = "the file cannot be read", str(error)
        yield str(file), Problem("data-file-unreadable", message, found=found, remedy=_AGAIN)


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
        found = str(error).split("\n")[0]
        yield str(file), Problem("data-not-parquet", "not a Parquet file", found=found, remedy=_AGAIN)


def load_dataset(mix: DataMix, method: str, **more: Any) -> Any:
    """The data as a `datasets.Dataset` in TRL's standard shape; for a mix, one epoch of it. Raises ReshardError."""
    import pyarrow as arrow
    from datasets import Dataset

    tables, sizes = [], []
    for path in mix.paths:
        records = read_records(path, method, **more)
        sizes.append(0)
        while rows := list(islice(records, ARROW_BATCH_ROWS)):
            sizes[-1] += len(rows)
            tables.append(arrow.table({key: _column(key, rows, path) for key in dict.fromkeys(chain(*rows))}))
    try:
        whole = Dataset(arrow.concat_tables(tables, promote_options="permissive"))
    except (arrow.ArrowInvalid, arrow.ArrowTypeError) as error:
        raise _of_several_types("a column", mix, error) from None
    picks = mix.picks(sizes)
    return whole if picks is None else whole.select(picks)


def _column(key: str, rows: list[DataRow], path: Path) -> Any:
    import pyarrow as arrow

    try:
        return arrow.array([row.get(key) for row in rows])
    except (arrow.ArrowInvalid, arrow.ArrowTypeError) as error:
        raise _of_several_types(f'"{key}"', path, error) from None


def _of_several_types(what: str, path: Path | DataMix, error: Exception) -> ReshardError:
    return ReshardError(
        "column-of-several-types",
        f"{what} has values of several types",
        file=str(path),
        rule="a column has one type in all records",
        found=str(error).split("\n")[0],
        remedy="write them all as strings",
    )


def digest_of(mix: DataMix) -> str:
    """The digest of a mix: that of its data, or for several sources that of all their digests and weights."""
    if len(mix.sources) == 1:
        return digest(mix.sources[0].path)
    facts = [f"{digest(source.path)}  {source.weight}\n" for source in mix.sources]
    return hashlib.sha256("".join(facts).encode()).hexdigest()


def digest(path: Path) -> str:
    """The SHA-256 of a file; for a folder, that of the list that `sha256sum` prints for its data files."""
    files = digests(path)
    if path.is_file():
        return str(files[path.name]["sha256"])
    listing = "".join(f"{each['sha256']}  {name}\n" for name, each in files.items())
    return hashlib.sha256(listing.encode()).hexdigest()


def digests(path: Path) -> dict[str, dict[str, str | int]]:
    """SHA-256 and size in bytes of each data file, by name."""
    result: dict[str, dict[str, str | int]] = {}
    for file in files_of(path):
        whole = hashlib.sha256()
        with file.open("rb") as source:
            while block := source.read(1 << 20):
                whole.update(block)
        name = file.relative_to(path).as_posix() if path.is_dir() else file.name
        result[name] = {"sha256": whole.hexdigest(), "bytes": file.stat().st_size}
    return result
