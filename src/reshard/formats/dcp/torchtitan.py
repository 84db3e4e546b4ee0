"""Tensor names of torchtitan, from 0.1 to 0.3.0.

Inside reshard a tensor has its name in 0.3.0, but each expert has a tensor of its own
(`layers.7.moe.experts.3.w1.weight`), although torchtitan stacks those of a layer. Source: the state dict adapters of
torchtitan 0.2.2 and 0.3.0, and checkpoints that both wrote.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from reshard.algebra.tensors import Tensor
from reshard.families.torchtitan import EMBEDDING, TORCHTITAN
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.copies import same_bytes

HEAD = "lm_head.weight"
ROUTER_BIASES = "load-balancing biases of routers"
BALANCING = (
    f"the {ROUTER_BIASES} cannot be stored in the Hugging Face model: if they are not zero, it routes "
    "differently"
)
QUERY = "layers.0.attention.wq.weight"
EXPERT_BIAS = re.compile(r"(model\.)?layers\.\d+\.moe\.expert_bias(_E)?")
"""The bias that loss-free load balancing adds to router scores, if the model itself has none."""

_SPELLINGS = (
    (re.compile(r"(layers\.\d+\.attention\.)(w[qkv]\.\w+)"), r"\1qkv_linear.\2"),
    (re.compile(r"output\.weight"), HEAD),
)
_EXPERTS = re.compile(r"(layers\.\d+\.moe\.)(?:routed_experts\.inner_)?experts\.(w[123])(?:_EFD|_EDF)?")


def in_its_dialect(checkpoint: Checkpoint) -> Checkpoint | None:
    """The checkpoint in torchtitan's dialect, without optimizer states: only there does torchtitan fuse projections.

    None if its names are others'.
    """
    if EMBEDDING not in checkpoint.tensors:
        return None
    tensors, dropped = respelled(checkpoint.tensors), Counter(checkpoint.dropped)
    if HEAD in tensors and same_bytes(
        tensors[HEAD], tensors[EMBEDDING]
    ):  # torchtitan stores a tied head twice
        dropped["the tied head, stored twice"] += tensors.pop(HEAD).nbytes
    notes = [*checkpoint.notes, *([BALANCING] if dropped[ROUTER_BIASES] else [])]
    return replace(checkpoint, dialect=TORCHTITAN, tensors=tensors, states={}, dropped=dropped, notes=notes)


def unnested(names: Iterable[str]) -> str:
    """The prefix of the names if the nesting is not recorded: "model.", as until 2024, or ""."""
    return "model." if f"model.{QUERY}" in set(names) else ""


def respelled(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` under the names of 0.3.0, with experts unstacked."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = _EXPERTS.fullmatch(name)
        if match and len(tensor.shape) == 3:
            for expert, view in enumerate(tensor.view.unstacked()):
                result[f"{match[1]}experts.{expert}.{match[2]}.weight"] = Tensor(tensor.dtype, view)
        else:
            result[_spelled(name)] = tensor
    return result


def _spelled(name: str) -> str:
    for pattern, newer in _SPELLINGS:
        if pattern.fullmatch(name):
            return pattern.sub(newer, name)
    return name
