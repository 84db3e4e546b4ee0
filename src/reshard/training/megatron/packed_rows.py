"""Samples packed into sequences of one length, and the order in which steps use them.

A row has `seq_length` inputs, and for each the next token (-100 without loss) and the number of its sample. Rows depend
on the data, the tokenizer and a few options, never on the layout; step s uses the same rows on any ranks, so a run that
continues in another layout sees the same data.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reshard.base.errors import ReshardError
from reshard.folders.companions import find_companions
from reshard.training.data import digest_of, read_records
from reshard.training.data.pretokenized import IGNORED_LABEL
from reshard.training.data.token_files import folder_of, open_tokens, tokenize
from reshard.training.data.tokens import LossCoverage, Sample, load_tokenizer, samples
from reshard.training.megatron.options import MegatronOptions
from reshard.training.run import Run
from reshard.transfer.source_files import Sources

RowArray = npt.NDArray[np.int32]
"""[rows, 3, length]: inputs, labels, samples."""
INPUTS, LABELS, SAMPLES = range(3)
FORECAST_RECORDS = 2000
"""Number of records from which the number of rows is extrapolated."""
ROWS_FOLDER = ".rows"


TokenArray = npt.NDArray[np.int32]


class TokenPiece(NamedTuple):
    """A sample or a part of a long text: inputs, and the token after each."""

    inputs: TokenArray
    labels: TokenArray


@dataclass
class SampleCounts:
    """Counts of samples that were cut or skipped."""

    samples: int = 0
    cut: int = 0
    without: int = 0
    """Samples without any loss."""

    def notes(self, length: int) -> Iterator[str]:
        """Notes for the user."""
        if self.cut:
            yield f"{self.cut} of {self.samples} samples are longer than seq_length {length} and were cut"
        if self.without:
            yield f"{self.without} of {self.samples} samples were skipped: the loss covers none of their tokens"


def pieces_of(found: Iterable[Sample], length: int, unit: int, counts: SampleCounts) -> Iterator[TokenPiece]:
    """Inputs and labels, at most `length`, padded to a multiple of `unit`.

    A text whose loss covers all tokens continues in the next piece; other samples are cut.
    """
    for sample in found:
        counts.samples += 1
        tokens, learned = np.array(sample.ids, np.int32), np.array(sample.learned, bool)
        labels = np.where(learned[1:], tokens[1:], np.int32(IGNORED_LABEL))
        count = len(labels)
        starts = range(0, count, length) if learned.all() else range(0, length, length)
        counts.cut += count > length and len(starts) == 1
        parts = [slice(at, min(at + length, count)) for at in starts]
        taken = [
            TokenPiece(tokens[part], labels[part]) for part in parts if (labels[part] != IGNORED_LABEL).any()
        ]
        counts.without += not taken
        for inputs, follows in taken:
            room = -len(inputs) % unit
            yield TokenPiece(
                np.pad(inputs, (0, room)), np.pad(follows, (0, room), constant_values=IGNORED_LABEL)
            )


def packed(lengths: list[int], length: int) -> list[list[int]]:
    """The pieces of each row: the longest pieces first, each placed into the fullest row with enough room."""
    rows: list[list[int]] = []
    rooms: list[int] = []  # sorted; the amounts of room that rows have
    with_room: dict[int, list[int]] = {}
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect_left(rooms, lengths[index])
        if place == len(rooms):
            row, room = len(rows), length
            rows.append([])
        else:
            room = rooms[place]
            row = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[place]
        rows[row].append(index)
        left = room - lengths[index]
        if left not in with_room:
            insort(rooms, left)
        with_room.setdefault(left, []).append(row)
    return rows


class EpochPieces(Sequence[TokenPiece]):
    """The pieces of an epoch, made on access: `picks` of samples, in order."""

    def __init__(
        self, found: Sequence[Sample], picks: Iterable[int], length: int, unit: int, counts: SampleCounts
    ) -> None:
        self._found, self._length, self._unit = found, length, unit
        sizes = [
            [len(piece.inputs) for piece in pieces_of([found[index]], length, unit, counts)]
            for index in range(len(found))
        ]
        self._places: list[tuple[int, int]] = []
        self.sizes: list[int] = []
        """Tokens of each piece."""
        self.samples = 0
        """Of the epoch; a sample that is used twice counts twice."""
        for index in picks:
            self.samples += 1
            self._places += ((index, part) for part in range(len(sizes[index])))
            self.sizes += sizes[index]

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, number: Any) -> Any:
        index, part = self._places[number]
        again = pieces_of([self._found[index]], self._length, self._unit, SampleCounts())
        return next(islice(again, part, None))


def put_together(
    pieces: Sequence[TokenPiece],
    length: int,
    *,
    pack: bool,
    sizes: Sequence[int] | None = None,
    empty: Callable[[tuple[int, int, int]], RowArray] = lambda shape: np.zeros(shape, np.int32),
) -> RowArray:
    """The rows of pieces, written into the zeros that `empty` returns for a shape; `sizes` of the pieces if known.

    The rest of a row is filled with a separate sample without loss.
    """
    sizes = [len(piece.inputs) for piece in pieces] if sizes is None else sizes
    groups = _groups(sizes, length, pack=pack)
    rows = empty((len(groups), 3, length))
    for row, group in zip(rows, groups, strict=True):
        row[LABELS] = IGNORED_LABEL
        at = 0
        for number, index in enumerate(group):
            end = at + sizes[index]
            row[INPUTS, at:end], row[LABELS, at:end] = pieces[index]
            row[SAMPLES, at:end] = number
            at = end
        row[SAMPLES, at:] = len(group)
    return rows


def _groups(sizes: Sequence[int], length: int, *, pack: bool) -> list[list[int]]:
    return packed(list(sizes), length) if pack else [[index] for index in range(len(sizes))]


def _pieces(
    run: Run, options: MegatronOptions, counts: SampleCounts, found: Sequence[Sample], sizes: Sequence[int]
) -> EpochPieces:
    """The pieces of the samples that an epoch uses, from sources of these sizes."""
    picks = run.data.picks(sizes)
    unit = 2 * run.layout.cp if run.layout.cp > 1 else 1
    return EpochPieces(
        found, range(len(found)) if picks is None else picks, options.seq_length or 0, unit, counts
    )


def make_rows(run: Run, options: MegatronOptions, **more: Any) -> tuple[RowArray, SampleCounts, str]:
    """The rows of an epoch (`more` as for `put_together`), their counts, and a message about the token cache.

    Raises ReshardError for faulty records, and if no tokens with loss remain.
    """
    counts, kept = SampleCounts(), folder_of(run, run.output / ROWS_FOLDER)
    files = tokenize(run, load_tokenizer(run.model), LossCoverage(options.assistant_only_loss), kept)
    sizes = [len(open_tokens(file)) for file in files.files]
    pieces = _pieces(run, options, counts, open_tokens(*files.files), sizes)
    if not len(pieces):
        raise ReshardError(
            "data-teach-nothing",
            "no token of the data is trained on",
            file=str(run.data),
            found=f"{counts.samples} samples, without a token to be learned in the first {options.seq_length}",
            remedy="raise --seq_length, or check the roles of the messages",
        )
    rows = put_together(pieces, options.seq_length or 0, pack=options.pack, sizes=pieces.sizes, **more)
    return rows, counts, files.in_words(kept)


def forecast(run: Run, options: MegatronOptions, samples: int) -> int:
    """The number of rows that `samples` records give; exact unless there are many records."""
    key = (
        str(run.model),
        run.data,
        run.system,
        options.assistant_only_loss,
        options.seq_length,
        run.layout.cp > 1,
    )
    if key not in _FORETOLD:
        _FORETOLD[key] = _counted(run, options)
    found, counted = _FORETOLD[key]
    return found if counted >= samples else round(found * samples / counted)


def _counted(run: Run, options: MegatronOptions) -> tuple[int, int]:
    """Rows and samples of an epoch of the first records of each source."""
    tokenizer, learning = load_tokenizer(run.model), LossCoverage(options.assistant_only_loss)
    found: list[Sample] = []
    sizes = []
    for path in run.data.paths:
        rows = islice(read_records(path, run.method, **run.reading), FORECAST_RECORDS)
        new = [sample for row in rows for sample in samples(row, tokenizer, learning)]
        found += new
        sizes.append(len(new))
    pieces = _pieces(run, options, SampleCounts(), found, sizes)
    return len(_groups(pieces.sizes, options.seq_length or 0, pack=options.pack)), pieces.samples


_FORETOLD: dict[Any, tuple[int, int]] = {}
"""Counted rows and samples, by what they depend on: preflight asks for each plan that it tries."""


def key_of(run: Run, options: MegatronOptions) -> str:
    """A digest of everything on which the rows depend."""
    tokenizer = hashlib.sha256()
    for name, file in sorted(find_companions(Sources(), run.model).files.items()):
        if name not in ("config.json", "generation_config.json"):
            tokenizer.update(name.encode() + file.read_bytes())
    facts = [
        digest_of(run.data),
        run.reading,
        tokenizer.hexdigest(),
        options.seq_length,
        options.pack,
        options.assistant_only_loss,
        run.layout.cp,
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def store_rows(run: Run, options: MegatronOptions, key: str, vocab: int) -> list[str]:
    """Write the rows to the run's output for all ranks. Returns notes for the user.

    Raises ReshardError for tokens beyond `vocab`.
    """
    folder = run.output / ROWS_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{key}.{os.getpid()}.npy"

    def mapped(shape: tuple[int, int, int]) -> RowArray:
        return np.lib.format.open_memmap(part, "w+", np.int32, shape)

    rows, counts, kept = make_rows(run, options, empty=mapped)
    if (highest := max(int(row[INPUTS : LABELS + 1].max()) for row in rows)) >= vocab:
        part.unlink()
        raise ReshardError(
            "megatron-tokenizer-exceeds-embedding",
            "the tokenizer has tokens outside of the model's vocabulary",
            file=str(run.model),
            expected=f"ids below {vocab}, the rows of the embedding",
            found=f"id {highest} in the data",
            remedy="pass the tokenizer that belongs to the model, or enlarge the embedding (resize_token_embeddings)",
        )
    part.replace(folder / f"{key}.npy")
    return [*counts.notes(options.seq_length or 0), *([kept] if run.token_cache else [])]


def open_rows(run: Run, key: str) -> RowArray:
    """The stored rows, memory-mapped. Raises ReshardError on a node that does not see the file."""
    path = run.output / ROWS_FOLDER / f"{key}.npy"
    try:
        rows: RowArray = np.load(path, mmap_mode="r")
    except FileNotFoundError:
        raise ReshardError(
            "rank-sees-other-folder",
            "a rank cannot see the files of the first rank",
            file=str(path),
            rule="all ranks write checkpoints to one folder",
            remedy="put the output (-o) on a file system that all nodes share",
        ) from None
    return rows


def remove_rows(run: Run) -> None:
    """Delete the files of `store_rows`."""
    shutil.rmtree(run.output / ROWS_FOLDER, ignore_errors=True)


class RowOrder:
    """The order in which steps use rows: epoch after epoch, each shuffled by seed and epoch number."""

    def __init__(self, rows: int, seed: int) -> None:
        self._rows, self._seed = rows, seed
        self._epoch = -1
        self._order: npt.NDArray[Any] = np.empty(0, np.int64)

    def at(self, position: int) -> int:
        """The row at a position in the endless sequence."""
        epoch, index = divmod(position, self._rows)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng([self._seed, epoch]).permutation(self._rows)
        return int(self._order[index])

    def of_step(self, step: int, sequences: int, rank: int, replicas: int) -> list[int]:
        """The rows of step `step` (from 0) for one of `replicas`; all replicas together use `sequences`."""
        share = sequences // replicas
        first = step * sequences + rank * share
        return [self.at(first + index) for index in range(share)]


def rank_tokens(samples: npt.NDArray[np.int32], rank: int, size: int) -> npt.NDArray[np.int64]:
    """The positions in a row that context-parallel rank `rank` of `size` computes.

    Each sample is cut into 2·size parts, and the rank gets part `rank` and its mirror image from the end: so causal
    attention costs all ranks the same. Samples are padded to a multiple of 2·size. Megatron's
    `get_batch_on_this_cp_rank` and TransformerEngine's `thd_get_partitioned_indices` cut in the same way.
    """
    bounds = sample_bounds(samples)
    places = []
    for low, high in pairwise(bounds):
        part = (high - low) // (2 * size)
        for index in (rank, 2 * size - 1 - rank):
            places.append(np.arange(low + index * part, low + (index + 1) * part))
    return np.concatenate(places)


def sample_bounds(samples: npt.NDArray[np.int32]) -> list[int]:
    """The start of each sample in a row, and the end of the last one."""
    changes = np.flatnonzero(np.diff(samples)) + 1
    return [0, *map(int, changes), len(samples)]
