"""The number of tokens of a checkpoint, if the config, the tokenizer and a padded embedding differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from reshard.algebra.tensors import Tensor
from reshard.base.errors import Problem, ReshardError
from reshard.families import Family
from reshard.families.sized_family import Model
from reshard.folders.companions import find_companions
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.megatron.mcore import padded_vocabulary
from reshard.formats.options import VOCABULARY_UNIT
from reshard.formats.state_dict_names import prefix_problem
from reshard.transfer.gather import Gatherer
from reshard.transfer.thread_files import OpenFiles

SPARE_ROWS = 1024
"""The most rows beyond the tokens that count as padding and not as another model's vocabulary."""


PADDING = "vocabulary padding"
"""The rule for dropping rows beyond the vocabulary."""


def lost_padding(
    checkpoint: Checkpoint, model: Model, rows: int, *, with_states: bool = False
) -> Counter[str]:
    """Bytes of the last `rows` of a padded embedding and head, which the output lacks, and of their states."""
    dialect = checkpoint.dialect
    if not dialect.padded or rows <= 0:
        return Counter()
    tables = dialect.embeddings if model.dims.tied else (*dialect.embeddings, dialect.head)
    held = [checkpoint.tensors, *(checkpoint.states.values() if with_states else ())]
    width = sum(tensors[name].dtype.itemsize for tensors in held for name in tables if name in tensors)
    return Counter({PADDING: rows * width * model.dims.hidden})


def embedding_rows(checkpoint: Checkpoint) -> int:
    """Rows of the embedding. Raises ReshardError if there is none."""
    return embedding(checkpoint)[1].shape[0]


def embedding(checkpoint: Checkpoint, family: Family | None = None) -> tuple[str, Tensor]:
    """The embedding and its name. Raises ReshardError if there is none."""
    names: Sequence[str] = checkpoint.dialect.embeddings
    if family and checkpoint.has_hub_names:
        names = [family.hub_name(name) for name in names]
    for name in names:
        if name in checkpoint.tensors:
            return name, checkpoint.tensors[name]
    if checkpoint.has_hub_names:
        wrapped = (prefix_problem(name, checkpoint.tensors, str(checkpoint.path)) for name in names)
        if problem := next(filter(None, wrapped), None):
            raise ReshardError(problem)
    raise ReshardError(
        "embedding-missing",
        "a tensor is missing",
        tensor=names[0],
        file=str(checkpoint.path),
        remedy="the checkpoint is incomplete: copy it again from where it was saved",
    )


def padded_rows(checkpoint: Checkpoint) -> int | None:
    """Rows of the embedding, if it may be padded; None for a checkpoint in another dialect."""
    return embedding_rows(checkpoint) if checkpoint.dialect.padded else None


def counted(checkpoint: Checkpoint, args: Mapping[str, Any]) -> int:
    """The number of tokens, not rows: from the arguments or the tokenizer next to the checkpoint, else all rows.

    The larger of the two: Megatron-LM's `--vocab-size` may leave out tokens that were added later.
    """
    rows = embedding_rows(checkpoint)
    counts = args.get("vocab_size"), find_companions(checkpoint.sources, *checkpoint.folders).vocab_size
    return min(max((int(count) for count in counts if count), default=rows), rows)


def corrected(checkpoint: Checkpoint, config: Mapping[str, Any], base: Path) -> tuple[int, str] | None:
    """The true `vocab_size` and the reason, if the rows of a padded embedding contradict the config."""
    declared = config.get("vocab_size")
    if not checkpoint.dialect.padded or not isinstance(declared, int) or declared < 1:
        return None
    rows = embedding_rows(checkpoint)
    if rows == declared:
        return None  # skip the tokenizer, which may take long to read
    folders = (
        find_companions(checkpoint.sources, base, *checkpoint.folders),
        find_companions(checkpoint.sources, *checkpoint.folders),
    )
    tokens = folders[0].vocab_size
    # For example, Qwen2.5's config has 151,936 rows for 151,665 tokens.
    if tokens is not None and tokens <= rows < declared <= rows + SPARE_ROWS:
        return tokens, (
            f"vocab_size: {tokens} as the tokenizer has, not {declared}: Megatron-LM pads what the tokenizer "
            "has, and config.json counts spare rows that it never made"
        )
    # A tokenizer may have IDs without a trained row: more than there are rows, or rows of zeros, which are untrained
    # padding.
    named = max(folder.named_ids for folder in folders)
    if declared < named <= rows and any(_has_values(table, declared, named) for table in _tables(checkpoint)):
        return named, (
            f"vocab_size: {named} as the tokenizer has, not {declared}: the rows beyond are not zeros, so they are "
            "kept"
        )
    return None


def _tables(checkpoint: Checkpoint) -> Iterator[Tensor]:
    """The tensors of a padded vocabulary, with one row per token."""
    for name in (*checkpoint.dialect.embeddings, checkpoint.dialect.head):
        if name in checkpoint.tensors:
            yield checkpoint.tensors[name]


def _has_values(table: Tensor, begin: int, end: int) -> bool:
    """Whether rows `begin` to `end` contain anything but zeros. They are read, because no header tells."""
    rows = max(table.shape[0], 1)
    width = table.view.numel // rows
    with closing(OpenFiles()) as files:
        found = Gatherer(files, None).read(table, min(begin, rows) * width, min(end, rows) * width)
    return bool(np.any(found))


def disagreement(checkpoint: Checkpoint, vocab: int) -> Problem | None:
    """The problem with a padded embedding if it is too small for `vocab` tokens, or much too large."""
    name, table = embedding(checkpoint)
    rows = table.shape[0]
    args = checkpoint.args or {}
    unit = int(args.get("make_vocab_size_divisible_by") or VOCABULARY_UNIT)
    exact = padded_vocabulary(vocab, unit, int(args.get("tensor_model_parallel_size") or 1))
    if vocab <= rows and rows - vocab <= max(exact - vocab, SPARE_ROWS):
        return None
    return Problem(
        "vocabulary-size-differs",
        "the config and the checkpoint disagree on the vocabulary",
        tensor=name,
        file=str(checkpoint.path),
        rule="the embedding has a row for each token, and fewer than one unit of padding",
        expected=f"{vocab} tokens (config.json), padded",
        found=f"{rows} rows",
        remedy="pass the config that belongs to these weights: --base DIR",
        values={"tokens": vocab, "rows": rows},
    )
