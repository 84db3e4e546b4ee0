"""Megatron's indexed datasets, alone and blended, as megatron-core reads, shuffles and blends them.

Samples are those of `GPTDataset`: documents concatenated and cut every `seq_length` tokens; attention and positions
continue from one document to the next, and the loss covers all tokens. The order depends on the datasets, the weights,
the seed, and the number of samples in the run; a resumed run continues with the next samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from reshard.base.errors import Problem, ReshardError
from reshard.families.outer_model import language_config
from reshard.folders.companions import CONFIG, read_object
from reshard.training.data.mix import INDEX, TOKENS, DataMix, are_indexed, prefix_of
from reshard.training.data.tokens import RecordLengths
from reshard.training.megatron.options import MegatronOptions
from reshard.training.megatron.packed_rows import ROWS_FOLDER, RowArray, RowOrder
from reshard.training.run import Run
from reshard.transfer.source_files import Sources

CACHE_FOLDER = "megatron-core"
"""Folder among the rows for megatron-core's indices, which it would otherwise write next to the data."""
CHECKED_TOKENS = 1 << 24
"""Tokens that are checked before a run: all of small datasets, an even selection of this size from larger ones."""


class IndexedRows:
    """A dataset of megatron-core in the form of `rows.Rows`: an epoch has `epoch` rows, and row n is sample n."""

    def __init__(self, dataset: Any, epoch: int, length: int, vocab: int, name: str) -> None:
        self._dataset, self._epoch, self._vocab, self._name = dataset, epoch, vocab, name
        self.shape, self.dtype = (epoch, 3, length), np.dtype(np.int32)

    def __len__(self) -> int:
        return self._epoch

    def __getitem__(self, key: int | slice | Sequence[int]) -> RowArray:
        """Rows [n, 3, length], or one [3, length]. Raises ReshardError for tokens without a row in the embedding."""
        if isinstance(key, (int, np.integer)):
            return self._row(int(key))
        numbers = range(self._epoch)[key] if isinstance(key, slice) else key
        rows = [self._row(int(number)) for number in numbers]
        return np.stack(rows) if rows else np.empty((0, *self.shape[1:]), self.dtype)

    def _row(self, number: int) -> RowArray:
        found = self._dataset[number]
        row = np.stack([found["tokens"].numpy(), found["labels"].numpy(), np.zeros(self.shape[2], np.int64)])
        if (highest := int(row.max())) >= self._vocab or row.min() < 0:
            raise ReshardError(_foreign(self._name, highest, self._vocab))
        return row.astype(np.int32)


class SequentialOrder(RowOrder):
    """Steps take samples in order: megatron-core has shuffled them."""

    def at(self, position: int) -> int:
        """The row at a position."""
        return position


@cache
def _opened(prefix: Path) -> Any:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    return IndexedDataset(str(prefix))


def prefixes_of(mix: DataMix) -> list[Path]:
    """The prefixes of the indexed datasets of a mix. Raises ReshardError if it also has records."""
    others = [str(path) for path in mix.paths if not are_indexed([path])]
    if others:
        raise ReshardError(
            "indexed-data-mixed",
            "indexed datasets and records cannot be blended",
            found=f"no .idx file next to: {', '.join(others)}",
            remedy="train on one kind; Megatron-LM's tools/preprocess_data.py makes indexed datasets of records",
        )
    return [prefix_of(path) for path in mix.paths]


def look(run: Run, options: MegatronOptions) -> RecordLengths:
    """Check the datasets of a run and count the sequences of an epoch. Raises ReshardError for all problems."""
    problems = [*unreadable_here(), *problems_of(run.data, _vocabulary(run.model))]
    if problems:
        raise ReshardError(problems)
    length = options.seq_length or 0
    found = sequences_of(run.data, length)
    return RecordLengths(found, found, found * length, length, 0, 0)


def _vocabulary(model: Path) -> int | None:
    """The number of token ids that a model's embedding has, by its config."""
    found = language_config(read_object(model / CONFIG, Sources())).get("vocab_size")
    return found if isinstance(found, int) else None


def problems_of(mix: DataMix, vocab: int | None) -> list[Problem]:
    """Problems of indexed datasets: incomplete files, and tokens beyond a vocabulary of `vocab`."""
    found = []
    for prefix in prefixes_of(mix):
        try:
            dataset = _opened(prefix)
            lengths, size = dataset.sequence_lengths, dataset.index.dtype_size
        except (AssertionError, OSError, ValueError, KeyError, IndexError) as error:
            found.append(_unreadable(prefix, f"{type(error).__name__}: {error}"))
            continue
        index, tokens = (prefix.with_name(prefix.name + suffix) for suffix in (INDEX, TOKENS))
        needed = int(np.max(dataset.index.sequence_pointers + lengths.astype(np.int64) * size, initial=0))
        if (there := tokens.stat().st_size) < needed:
            found.append(_unreadable(prefix, f"{there:,} bytes in {tokens.name}, {needed:,} by {index.name}"))
        elif not len(lengths):
            found.append(_unreadable(prefix, "no documents"))
        elif vocab is not None and (highest := _highest(dataset)) >= vocab:
            found.append(_foreign(str(prefix), highest, vocab))
    return found


def _highest(dataset: Any) -> int:
    """The highest token of a dataset, or of some documents of a large one; negative tokens count as too high."""
    lengths = dataset.sequence_lengths
    every = max(1, int(lengths.sum(dtype=np.int64)) // CHECKED_TOKENS)
    highest = 0
    for number in range(0, len(lengths), every):
        tokens = dataset.get(number, length=min(int(lengths[number]), CHECKED_TOKENS))
        if len(tokens):
            highest = max(highest, int(tokens.max()), (1 << 31) * (int(tokens.min()) < 0))
    return highest


def _unreadable(prefix: Path, found: str) -> Problem:
    return Problem(
        "indexed-data-unreadable",
        "megatron-core cannot read the indexed dataset",
        file=str(prefix),
        expected="PREFIX.idx and PREFIX.bin, as Megatron-LM's tools/preprocess_data.py writes them",
        found=found,
        remedy="copy both files again, or create them again",
    )


def _foreign(name: str, highest: int, vocab: int) -> Problem:
    return Problem(
        "indexed-data-exceed-vocabulary",
        "the indexed dataset has tokens outside of the model's vocabulary",
        file=name,
        rule="token ids are meaningless to a model with another tokenizer",
        expected=f"ids below {vocab}, the rows of the embedding",
        found=f"id {highest}",
        remedy="create the dataset with the tokenizer of this model",
    )


def sequences_of(mix: DataMix, length: int) -> int:
    """Sequences of an epoch. Raises ReshardError if there are none."""
    found = sum(mix.seen(_sizes(mix, length)))
    if not found:
        raise ReshardError(
            "indexed-data-too-short",
            "the datasets are shorter than one sequence",
            file=str(mix),
            expected=f"more than {length} tokens",
            remedy="lower --seq_length",
        )
    return found


def _sizes(mix: DataMix, length: int) -> list[int]:
    """Sequences of each dataset. One token more than the inputs is needed, as the label of the last input."""
    totals = [int(_opened(prefix).sequence_lengths.sum(dtype=np.int64)) for prefix in prefixes_of(mix)]
    return [max(total - 1, 0) // length for total in totals]


def open_rows(run: Run, options: MegatronOptions, samples: int, vocab: int) -> IndexedRows:
    """The datasets of a run as rows, `samples` of which will be used. Called on all ranks."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    length = options.seq_length or 0
    prefixes, sizes = prefixes_of(run.data), _sizes(run.data, length)
    weights = [source.weight or float(size) for source, size in zip(run.data.sources, sizes, strict=True)]
    config = GPTDatasetConfig(
        random_seed=options.seed,
        sequence_length=length,
        blend=([str(each) for each in prefixes], weights if len(prefixes) > 1 else None),
        split="1,0,0",
        path_to_cache=str(run.output / ROWS_FOLDER / CACHE_FOLDER),
        tokenizer=_Tokenizer(run.model),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    dataset, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, [samples, 0, 0], lambda: True, config).build()
    return IndexedRows(dataset, sequences_of(run.data, length), length, vocab, str(run.data))


class _Tokenizer:
    """What megatron-core's datasets need of a tokenizer. It has no padding, so the loss covers all tokens."""

    vocab_size = None

    def __init__(self, model: Path) -> None:
        self.unique_identifiers = {"class": "HuggingFaceTokenizer", "tokenizer_path": str(model)}

    @property
    def eod(self) -> int:
        """The end-of-document token, at which nothing is reset."""
        return -1


def unreadable_here() -> Iterator[Problem]:
    """A problem if megatron-core's C++ functions, which build indices, are not compiled here."""
    try:
        from megatron.core.datasets import helpers  # noqa: F401
    except ImportError as error:
        yield Problem(
            "megatron-helpers-not-compiled",
            "megatron-core's functions that index datasets are not compiled",
            rule="its Linux wheels contain them, and it needs them",
            found=str(error),
            remedy="install megatron-core from a wheel that fits this Python and this machine",
        )
