"""The number of tokens of a checkpoint, if the config, the tokenizer and a padded embedding differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from reshard.algebra.tensors import Tensor
from reshard.base.errors import Problem, ReshardError
from reshard.base.later_imports import imported_later
from reshard.families import Family
from reshard.families.sized_family import Model
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.options import VOCABULARY_UNIT
from reshard.formats.state_dict_names import prefix_problem

with imported_later(__name__):
    from reshard.base.suggest import closest
    from reshard.formats.megatron.mcore import padded_vocabulary
    from reshard.transfer.gather import Gatherer
    from reshard.transfer.thread_files import OpenFiles


SPARE_ROWS = 1024
"""The most rows that a config may count beyond the tokens, or that a table may have as zeros beyond its padding."""


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
    contents = [checkpoint.tensors, *(checkpoint.optimizer.states.values() if with_states else ())]
    width = sum(tensors[name].dtype.itemsize for tensors in contents for name in tables if name in tensors)
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
    outside_layers = [each for each in checkpoint.tensors if not any(map(str.isdigit, each))]
    raise ReshardError(
        "embedding-missing",
        "a tensor is missing",
        tensor=names[0],
        file=str(checkpoint.path),
        found=", ".join(closest(names[0], outside_layers)) or None,
        remedy="the checkpoint is incomplete: copy it again from where it was saved",
    )


def padded_rows(checkpoint: Checkpoint) -> int | None:
    """Rows of the embedding, if it may be padded; None for a checkpoint in another dialect."""
    return embedding_rows(checkpoint) if checkpoint.dialect.padded else None


def counted(checkpoint: Checkpoint, args: Mapping[str, Any]) -> int:
    """The number of tokens, not rows: from the arguments or the tokenizer next to the checkpoint, else all rows.

    The larger of the two: Megatron-LM's `--vocab-size` may leave out tokens that were added later. All rows, too, if
    those beyond are more than padding: a model may have trained rows that its tokenizer does not name.
    """
    rows = embedding_rows(checkpoint)
    counts = args.get("vocab_size"), checkpoint.companions().tokenizer.vocab_size
    tokens = min(max((int(count) for count in counts if count), default=rows), rows)
    return tokens if _is_padding(checkpoint, tokens) else rows


def corrected(checkpoint: Checkpoint, config: Mapping[str, Any], base: Path) -> tuple[int, str] | None:
    """The true `vocab_size` and the reason, if the rows of a padded embedding contradict the config."""
    declared = config.get("vocab_size")
    if not checkpoint.dialect.padded or not isinstance(declared, int) or declared < 1:
        return None
    rows = embedding_rows(checkpoint)
    if rows == declared:
        return None  # skip the tokenizer, which may take long to read
    tokenizers = (checkpoint.companions(base).tokenizer, checkpoint.companions().tokenizer)
    tokens = tokenizers[0].vocab_size
    # For example, Qwen2.5's config has 151,936 rows for 151,665 tokens.
    if tokens is not None and tokens <= rows < declared <= rows + SPARE_ROWS:
        return tokens, (
            f"vocab_size: {tokens} as the tokenizer has, not {declared}: Megatron-LM pads what the tokenizer "
            "has, and config.json counts spare rows that it never made"
        )
    # A tokenizer may have IDs without a trained row: more than there are rows, or rows of zeros, which are untrained
    # padding.
    counts = [
        (max(each.named_ids for each in tokenizers), "the tokenizer has"),
        (int(checkpoint.description.args.get("vocab_size") or 0), "the checkpoint's arguments have"),
    ]
    named, as_counted = max(count for count in [*counts, (declared, "")] if count[0] <= rows)
    if named > declared and _have_values(checkpoint, declared, named):
        return named, (
            f"vocab_size: {named} as {as_counted}, not {declared}: the rows beyond are not zeros, so they are kept"
        )
    return None


def _tables(checkpoint: Checkpoint) -> Iterator[Tensor]:
    """The tensors of a padded vocabulary, with one row per token."""
    for name in (*checkpoint.dialect.embeddings, checkpoint.dialect.head):
        if name in checkpoint.tensors:
            yield checkpoint.tensors[name]


def _have_values(checkpoint: Checkpoint, begin: int, end: int) -> bool:
    """Whether rows `begin` to `end` of a table contain anything but zeros. They are read: no header tells."""
    return any(_has_values(table, begin, end) for table in _tables(checkpoint))


def _has_values(table: Tensor, begin: int, end: int) -> bool:
    """Whether rows `begin` to `end` contain anything but zeros. They are read, because no header tells."""
    rows = max(table.shape[0], 1)
    width = table.view.numel // rows
    with closing(OpenFiles()) as files:
        elements = Gatherer(files, None).read(table, min(begin, rows) * width, min(end, rows) * width)
    return bool(elements.any())


def _is_padding(checkpoint: Checkpoint, vocab: int) -> bool:
    """Whether the rows beyond `vocab` are padding: no more than the engine adds, or zeros."""
    rows = embedding_rows(checkpoint)
    if rows <= _most_rows(checkpoint, vocab):
        return True
    return rows - vocab <= SPARE_ROWS and not _have_values(checkpoint, vocab, rows)


def _most_rows(checkpoint: Checkpoint, vocab: int) -> int:
    """The most rows of a padded embedding for `vocab` tokens.

    Where arguments do not record Megatron-LM's unit, its default counts, once for each rank that stored a piece.
    """
    args = checkpoint.description.args
    pieces = len(embedding(checkpoint)[1].view.pieces) if checkpoint.dialect.sharded else 1
    tp = checkpoint.layout.tp or pieces
    if unit := args.get("make_vocab_size_divisible_by"):
        return padded_vocabulary(vocab, int(unit), tp)
    # One unit in full, because MaxText has 256,128 rows for the 256,000 tokens of Gemma 2.
    return vocab + VOCABULARY_UNIT * tp


def disagreement(checkpoint: Checkpoint, vocab: int) -> Problem | None:
    """The problem with a padded embedding if it has too few rows for `vocab` tokens, or trained rows beyond padding."""
    name, table = embedding(checkpoint)
    rows = table.shape[0]
    if vocab <= rows and _is_padding(checkpoint, vocab):
        return None
    return Problem(
        "vocabulary-size-differs",
        "the config and the checkpoint disagree on the vocabulary",
        tensor=name,
        file=str(checkpoint.path),
        rule="the embedding has a row for each token, and fewer than one unit of padding",
        expected=f"{vocab} tokens (config.json), padded to at most {_most_rows(checkpoint, vocab)} rows",
        found=f"{rows} rows",
        remedy=f"pass the config that belongs to these weights: --base DIR, or set vocab_size to {rows} there to "
        "keep all rows",
        values={"tokens": vocab, "rows": rows, "most": _most_rows(checkpoint, vocab)},
    )
