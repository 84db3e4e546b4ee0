"""The embedding and the head of a merged model: untied if an adapter changes either, and of equal length.

New tokens resize both, but PEFT 0.21 may save only one: if `target_modules` has the embedding or the head, just those
that have an adapter. The other one's new rows, which no training changed, are then in no file. transformers starts them
as the mean of the old rows, with noise of 3e-5 standard deviations, and so does a model that is resized to load the
adapter; here they are the mean. Sources: `get_peft_model_state_dict` in `utils/save_and_load.py` of PEFT 0.21,
`_init_added_embeddings_weights_with_mean` in `modeling_utils.py` of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from typing import Any

import numpy as np

from reshard.adapters.adapter import Adapter
from reshard.algebra.dtypes import dtype
from reshard.algebra.tensors import Computed, InputReader, Tensor
from reshard.algebra.views import View, concat
from reshard.families.dialect import HUB
from reshard.transfer.elements import as_float

HEAD = "lm_head.weight"
TOKEN_WEIGHTS = {*HUB.embeddings, HEAD}
"""Weights with one row for each token; a model has two, or one if they are tied."""

READ_ELEMENTS = 1 << 20
"""Elements converted to float32 at a time."""

READ_BYTES_EACH = 16
"""Maximum bytes per element while it is read, converted to float32 and added."""


class MeanRows(Computed):
    """Rows [count, columns] that are all the mean of the rows of `table`, as float32."""

    dtype = dtype("float32")

    def __init__(self, table: Tensor) -> None:
        self.inputs = (table,)
        self._row: np.ndarray[Any, Any] | None = None
        self._lock = Lock()

    def memory_for(self, count: int) -> int:
        columns = self.inputs[0].shape[1]
        return count * 4 + columns * 4 * READ_BYTES_EACH + max(READ_ELEMENTS, columns) * READ_BYTES_EACH

    def values(self, begin: int, end: int, read: InputReader) -> np.ndarray[Any, Any]:
        row = self._mean(read).view(np.uint32)
        return row[np.arange(begin, end) % len(row)]

    def _mean(self, read: InputReader) -> np.ndarray[Any, Any]:
        """The mean, for which the complete table is read once."""
        (table,) = self.inputs
        rows, columns = table.shape
        step = max(READ_ELEMENTS // columns, 1)
        with self._lock:
            if self._row is None:
                sums = np.zeros(columns)
                for first in range(0, rows, step):
                    raw = read(table, first * columns, min(first + step, rows) * columns)
                    part = as_float(raw, table.dtype).reshape(-1, columns)
                    sums += np.add.reduce(part, 0, dtype=np.float64)
                self._row = (sums / rows).astype(np.float32)
            return self._row


def _tables(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: tensor for name, tensor in weights.items() if name in TOKEN_WEIGHTS and len(tensor.shape) == 2
    }


def unties(adapter: Adapter) -> bool:
    """Whether the adapter changes the embedding or the head, so that they are no longer tied."""
    return not TOKEN_WEIGHTS.isdisjoint([*adapter.whole, *(f"{module}.weight" for module in adapter.pairs)])


def untie(adapter: Adapter, weights: dict[str, Tensor]) -> None:
    """Give a tied head its own weight. PEFT would add both changes to the one weight, which is another model."""
    embedding = embedding_of(weights)
    if embedding and unties(adapter):
        weights.setdefault(HEAD, weights[embedding])


def embedding_of(weights: Mapping[str, Tensor]) -> str | None:
    """The name of the embedding among `weights`."""
    return next((name for name in HUB.embeddings if name in weights), None)


def resize(adapter: Adapter, base: Mapping[str, Tensor], weights: dict[str, Tensor], *, tied: bool) -> None:
    """Give each table of `weights` that the adapter lacks as many rows as the one that it has.

    `base` are the weights before anything was changed; `tied` says that its tables are one weight, so a copy of the one
    is also the other. Tables that the adapter did not resize stay as they are.
    """
    own, embedding = _tables({**adapter.base, **adapter.whole}), embedding_of(weights)
    before = {name: tensor.shape[0] for name, tensor in _tables(base).items()}
    was = before.get(embedding or "", 0)
    sizes = {tensor.shape[0] for name, tensor in own.items() if tensor.shape[0] != before.get(name, was)}
    if len(sizes) != 1 or not embedding:
        return
    (rows,) = sizes
    for name, table in _tables(weights).items():
        if name not in own and table.shape[0] != rows:
            other = embedding if name == HEAD else HEAD
            copy = adapter.base.get(other) if tied else None
            weights[name] = Tensor(table.dtype, copy.view if copy else _resized(table, rows))


def _resized(table: Tensor, rows: int) -> View:
    """A table with as many rows: the first ones, or further ones that are the mean."""
    more, columns = rows - table.shape[0], table.shape[1]
    if more <= 0:
        return table.view[:rows]
    return concat([table.view, View.of(MeanRows(table), more, columns)])


def mean_row_counts(weights: Mapping[str, Tensor]) -> dict[str, int]:
    """The number of rows in each table that are in no file."""
    rows = {}
    for name, table in _tables(weights).items():
        means = sum(piece.numel for piece in table.view.pieces if isinstance(piece.source, MeanRows))
        if means:
            rows[name] = means // table.shape[1]
    return rows
