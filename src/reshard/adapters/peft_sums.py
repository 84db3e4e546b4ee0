"""The sums of `merge_and_unload` of PEFT 0.21 on a CPU, in its order, so that a merge here has the same bytes.

A float32 sum depends on the order of its terms. Those who compare a merged model with PEFT's, or continue from one of
them, need not ask which tool merged it, and tests compare bytes instead of tolerating differences. Three sums have an
order that numpy does not have by itself:

- the dot products of lora_B times lora_A, which MKL sums in parts if the rank is high;
- the norms of rows in DoRA, which torch sums in the eight lanes of a vector, then over the lanes, then the rest;
- the norms of columns in DoRA, which torch sums row after row.

What is rounded when: PEFT loads an adapter in float32, whatever the dtype of the model, so the product is float32, and
the sum with the weight is rounded once to the model's dtype. For embeddings and for parameters (experts) it rounds the
product to that dtype first. Sources: `get_delta_weight` in `tuners/lora/layer.py` and `tuners/lora/dora.py` of PEFT
0.21; `norm_kernel_cpu_impl` in `ATen/native/cpu/ReduceOpsKernel.cpp` of torch; for MKL, which is closed, measurements
with torch 2.13 on x86 (`tests/test_peft.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from reshard.adapters.blas import multiplied

MIN_ROWS = 32
"""Minimum number of rows of a product. With fewer, and at its edges, BLAS may sum in another order."""

MAX_RANK_AT_ONCE = 192
"""Up to this rank MKL sums a dot product at once; up to twice this rank in two halves; above, in parts of this size."""

NORM_LANES = 8
"""Number of parallel sums in the norm of torch."""

Floats = np.ndarray[Any, Any]


def product(left: Floats, right: Floats) -> Floats:
    """`left` [rows, rank] times `right` [rank, columns]."""
    rank = len(right)
    size = rank if rank <= MAX_RANK_AT_ONCE else min(MAX_RANK_AT_ONCE, rank // 2)
    total = multiplied(left[:, :size], right[:size])
    for k in range(size, rank, size):
        total += multiplied(left[:, k : k + size], right[k : k + size])
    return total


def row_norms(values: Floats) -> Floats:
    """Euclidean norms [rows] of `values` [rows, columns]."""
    rows, columns = values.shape
    squares = np.square(values)
    whole = columns - columns % NORM_LANES
    lanes = np.add.reduce(squares[:, :whole].reshape(rows, -1, NORM_LANES), 1)
    sums = np.add.accumulate(np.concatenate([lanes, squares[:, whole:]], 1), 1)
    return np.sqrt(sums[:, -1])
