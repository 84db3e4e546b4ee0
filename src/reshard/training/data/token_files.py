"""Tokenized data on disk: written record by record, mapped by all ranks, and kept for the next run.

A token file is an Arrow stream with one record per row: `input_ids`, and `labels`, which are -100 for tokens without
loss. Its name is a digest of everything that determines its bytes. It is renamed into place when complete: if two runs
write it at the same time, the last one's stays, which is the same.
"""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from reshard.base.errors import ReshardError
from reshard.folders.companions import find_companions
from reshard.training.data import digest, files_of, read_records
from reshard.training.data.pretokenized import IGNORED_LABEL
from reshard.training.data.tokens import LossCoverage, Sample, samples
from reshard.training.run import Run
from reshard.transfer.source_files import Sources
from reshard.version import __version__

BATCH_RECORDS = 256
"""Records per batch, which is also how many are in memory at once."""
TOKENS_SUFFIX = ".tokens"


@dataclass(frozen=True)
class Tokenized:
    """The token files of a run's sources, in order, and how many of them existed already."""

    files: tuple[Path, ...]
    found: int

    def in_words(self, folder: Path) -> str:
        """The message for the user."""
        if self.found == len(self.files):
            return f"tokenized data: found in {folder}"
        return f"tokenized data: cached in {folder} for the next run (--no-token-cache turns this off)"


def folder_of(run: Run, own: Path) -> Path:
    """The folder for a run's tokens: in the user's cache, or without a cache its `own` folder."""
    if not run.token_cache:
        return own
    home = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    folder = Path(home) / "reshard" / "tokens"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return own
    return folder if os.access(folder, os.W_OK) else own


def tokenize(run: Run, tokenizer: Any, learning: LossCoverage, folder: Path) -> Tokenized:
    """Tokenize each source of a run, unless it is cached. Raises ReshardError for faulty records."""
    folder.mkdir(parents=True, exist_ok=True)
    state = _state_of(run, tokenizer, learning)
    files, found = [], 0
    for path in run.data.paths:
        before = _versions(path)
        name = hashlib.sha256(f"{digest(path)} {state}".encode()).hexdigest()[:32]
        file = folder / f"{name}{TOKENS_SUFFIX}"
        if _is_whole(file):
            found += 1
        else:
            _write(file, _samples(run, path, tokenizer, learning))
            if _versions(path) != before:
                file.unlink(missing_ok=True)
                raise ReshardError(
                    "data-changed-while-read",
                    "the data changed while they were read",
                    file=str(path),
                    rule="tokens are cached under the digest of their data",
                    remedy="wait until nothing writes to the data, and run the command again",
                )
        files.append(file)
    return Tokenized(tuple(files), found)


def _versions(path: Path) -> list[tuple[Path, int, int, int]]:
    """Facts that show whether data changed while it was read."""
    stats = [(file, file.stat()) for file in files_of(path)]
    return [(file, stat.st_size, stat.st_mtime_ns, stat.st_ino) for file, stat in stats]


def _state_of(run: Run, tokenizer: Any, learning: LossCoverage) -> str:
    """Everything besides the data that determines the tokens: tokenizer, template, options, and software versions."""
    import tokenizers
    import transformers

    files = find_companions(Sources(), run.model).files
    facts: list[Any] = [
        [name, hashlib.sha256(file.read_bytes()).hexdigest()]
        for name, file in sorted(files.items())
        if name not in ("config.json", "generation_config.json")
    ]
    facts += [tokenizer.chat_template, tokenizer.eos_token, len(tokenizer), run.reading, astuple(learning)]
    facts += [__version__, transformers.__version__, tokenizers.__version__]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _samples(run: Run, path: Path, tokenizer: Any, learning: LossCoverage) -> Iterator[Sample]:
    for row in read_records(path, run.method, **run.reading):
        yield from samples(row, tokenizer, learning)


def _is_whole(file: Path) -> bool:
    """Whether a token file exists and can be read to its end."""
    try:
        open_tokens(file)
    except (OSError, ValueError):  # Arrow's errors are ValueErrors
        return False
    return True


def _write(file: Path, found: Iterator[Sample]) -> None:
    import pyarrow as arrow

    kind = arrow.list_(arrow.int32())
    rows = (
        {
            "input_ids": ids,
            "labels": [each if kept else IGNORED_LABEL for each, kept in zip(ids, learned, strict=True)],
        }
        for ids, learned in found
    )
    write_stream(file, {"input_ids": kind, "labels": kind}, rows)


def write_stream(
    file: Path, known: Mapping[str, Any], rows: Iterator[Mapping[str, Any]], other: Any = None
) -> None:
    """Write rows to an Arrow stream, which is renamed into place. Columns have a `known` type, or `other`."""
    import pyarrow as arrow

    first = next(rows, {})
    schema = arrow.schema({**dict.fromkeys(first, other), **known})
    rows = chain([first] if first else [], rows)
    partial = file.with_name(f".{file.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        with partial.open("wb") as sink:
            with arrow.ipc.new_stream(sink, schema) as writer:
                while batch := list(islice(rows, BATCH_RECORDS)):
                    arrays = [arrow.array([row[each.name] for row in batch], each.type) for each in schema]
                    writer.write_batch(arrow.record_batch(arrays, schema=schema))
            sink.flush()
            os.fsync(sink.fileno())
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


class TokenFiles(Sequence[Sample]):
    """The samples in token files, memory-mapped: reading a sample touches only its pages."""

    def __init__(self, table: Any) -> None:
        self._chunks = [
            [(_mapped(each.offsets), _mapped(each.values)) for each in column.chunks]
            for column in table.columns
        ]
        self._starts = np.cumsum([0, *(len(each) for each in table.column(0).chunks)]).tolist()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: Any) -> Any:
        chunk = bisect_right(self._starts, index) - 1
        place = index - self._starts[chunk]
        parts = []
        for column in self._chunks:
            offsets, values = column[chunk]
            parts.append(values[offsets[place] : offsets[place + 1]])
        ids, labels = parts
        return Sample(ids, labels != IGNORED_LABEL)


def _mapped(array: Any) -> Any:
    """An Arrow array of int32 as numpy's, in the same memory. Its own `to_numpy` imports pandas, for a second."""
    if not len(array):
        return np.zeros(0, np.int32)
    return np.frombuffer(array.buffers()[1], np.int32, len(array), array.offset * 4)


def open_tokens(*files: Path) -> TokenFiles:
    """The samples of several files, concatenated. Raises OSError, ValueError."""
    import pyarrow as arrow

    return TokenFiles(
        arrow.concat_tables([arrow.ipc.open_stream(arrow.memory_map(str(file))).read_all() for file in files])
    )
