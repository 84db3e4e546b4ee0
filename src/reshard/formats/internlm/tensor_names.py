"""InternEvo's names: the tensor that a key refers to, and how ranks share it.

A rank numbers its layers from zero, in each of its chunks; `model.` precedes every name, and the number of the chunk
precedes that if there are several. Inside reshard a tensor has a global layer index, and the weight names that
InternEvo has used since 0.3.0. Sources: `model/modeling_*.py`, `model/modules/mlp.py`, `model/ops/linear.py` and
`checkpoint/components.py` of InternEvo 0.4.9, `model/modules/mha.py` of 0.5.2.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from reshard.algebra.tensors import Tensor
from reshard.algebra.views import concat
from reshard.formats.sharding import Split

EMBEDDINGS = ("embedding.weight", "tok_embeddings.weight")
HEAD_NAMES = ("head.weight", "output.weight")
OUTPUT_PROJECTIONS = ("mixer.out_proj.weight", "attention.wo.weight")
"""The output projections of attention: as many rows and columns as the model is wide."""

COLUMN_PARALLEL = ("wqkv", "wq", "wk", "wv", "w1", "w3")
ROW_PARALLEL = ("out_proj", "wo", "w2")


class InternEvoPosition(NamedTuple):
    """The position of a tensor according to its key; `layer` counts within the chunk of a stage."""

    module: str
    chunk: int = 0
    stack: str = ""
    layer: int | None = None

    def name(self, layer: int | None) -> str:
        """The tensor's name in the complete model, with the global index `layer`."""
        return self.module if layer is None else f"{self.stack}.{layer}.{self.module}"


_KEY = re.compile(r"(?:(\d+)\.)?(?:model\.)?(?:(layers|blocks)\.(\d+)\.)?(.*)")
_EXPERT = re.compile(r"(.*\.experts)\.(?:wrapped_experts|experts)\.(\d+\..*)")


def place_of(key: str) -> InternEvoPosition:
    """Parse a key. The wrappers around Flash attention's embedding and InternEvo's experts are removed from names."""
    match = _KEY.fullmatch(key)
    assert match
    chunk, stack, layer, module = match.groups()
    module = module.replace("word_embeddings.", "")
    if expert := _EXPERT.fullmatch(module):
        module = f"{expert[1]}.{expert[2]}"
    return InternEvoPosition(module, int(chunk or 0), stack or "", None if layer is None else int(layer))


def split_of(module: str, weight_parallel: bool) -> Split | None:
    """How ranks share a module of a layer; None if every rank has it complete.

    Tensor parallelism cuts the rows of a block's first linear and the columns of its last one, whose bias only the
    first rank has; weight parallelism (ISP) cuts the rows of every linear layer. InternLM's Wqkv is three stacked
    projections, and a tensor-parallel rank has a share of each.
    """
    linear = module.split(".")[-2] if "." in module else module
    if linear == "Wqkv":
        return Split(0) if weight_parallel else Split(0, parts=3)
    if linear in COLUMN_PARALLEL or (weight_parallel and linear in ROW_PARALLEL):
        return Split(0)
    if linear in ROW_PARALLEL and module.endswith("weight"):
        return Split(1)
    return None


def is_old_order(shapes: Mapping[str, tuple[int, ...]]) -> bool | None:
    """Whether w2 is the up and w3 the down projection, as before InternEvo 0.3.0; None if the shapes are ambiguous.

    `shapes` are those of `w1`, `w2` and `w3` in the file of one rank. The gate w1 and the up projection have equal
    shapes.
    """
    if shapes["w2"] == shapes["w3"]:
        return None
    return shapes["w2"] == shapes["w1"]


SWAPPED_PROJECTIONS = {"w2": "w3", "w3": "w2"}
_MLP = re.compile(r"(.*\.)(w[123])\.weight")


def mlp_shapes(names: Mapping[str, Tensor]) -> Iterable[dict[str, tuple[int, ...]]]:
    """The shapes of w1, w2 and w3 of each MLP and expert in a file."""
    groups: dict[str, dict[str, tuple[int, ...]]] = {}
    for key, tensor in names.items():
        if match := _MLP.fullmatch(key):
            groups.setdefault(match[1], {})[match[2]] = tensor.shape
    return [shapes for shapes in groups.values() if len(shapes) == 3]


def in_new_order(key: str) -> str:
    """The key since 0.3.0 of a weight in an older checkpoint."""
    match = _MLP.fullmatch(key)
    return f"{match[1]}{SWAPPED_PROJECTIONS.get(match[2], match[2])}.weight" if match else key


def with_fused_attention(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` of one rank's file, with the slices `wq`, `wk`, `wv` (InternLM2 since 0.5.3) joined to `wqkv`.

    They are not projections but slices of rows that are ordered by group: they are only meaningful when concatenated.
    """
    fused = {}
    for key, tensor in tensors.items():
        head, _, tail = key.rpartition("attention.w")
        names = [f"{head}attention.w{part}.weight" for part in "qkv"]
        if key not in names or not all(name in tensors for name in names):
            fused[key] = tensor
        elif tail == "q.weight":
            view = concat([tensors[name].view for name in names])
            fused[f"{head}attention.wqkv.weight"] = Tensor(tensor.dtype, view)
    return fused
