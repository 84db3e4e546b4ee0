"""Tensor names of torchtitan, from 0.1 to 0.3.0.

Inside reshard a tensor has its name in 0.3.0, except those of experts: each has tensors of its own
(`layers.7.moe.experts.3.w1.weight`), although torchtitan stacks those of a layer; gpt-oss's stay stacked, under their
names in 0.2 (`layers.7.moe.experts.mlp1_weight`). Layers for multi-token prediction are numbered after the others, as
on the Hub. Source: the models and state dict adapters of torchtitan 0.2.2 and 0.3.0, and checkpoints that both wrote.
Llama 4 is in 0.2 only. The adapter of 0.3.0 for gpt-oss leaves out all experts, because it still has the names of 0.2;
that of 0.2 for Llama 4 leaves out layers without experts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from reshard.algebra.tensors import Tensor
from reshard.families.dialects.torchtitan import EMBEDDING, HEAD, TORCHTITAN
from reshard.formats.checkpoint import Checkpoint, FormatData
from reshard.formats.copied_files import same_bytes
from reshard.formats.unique_names import under_new_names

ROUTER_BIASES = "load-balancing biases of routers"
BALANCING = (
    f"the {ROUTER_BIASES} cannot be stored in the Hugging Face model: if they are not zero, it routes "
    "differently"
)
QUERY = "layers.0.attention.wq.weight"
_EXPERT_BIAS = re.compile(r"(layers\.\d+\.moe\.expert_bias)(_E)?")
"""The bias that loss-free load balancing adds to router scores. Only DeepSeek's model has one itself."""
_DEEPSEEK = re.compile(r"layers\.\d+\.attention\.wkv_a\.weight")

_SPELLINGS = (
    (re.compile(r"(layers\.\d+\.attention\.)(w[qkv]\.\w+)"), r"\1qkv_linear.\2"),
    (re.compile(r"output\.weight"), HEAD),
    (_EXPERT_BIAS, r"\1"),
    (re.compile(r"(layers\.\d+\.moe\.)routed_experts\.inner_(experts\.mlp\d_[a-z]+)_[A-Z]+"), r"\1\2"),
)
_EXPERTS = re.compile(r"(layers\.\d+\.moe\.)(?:routed_experts\.inner_)?experts\.(w[123])(?:_EFD|_EDF)?")
_LAYER, _MTP = re.compile(r"layers\.(\d+)\."), re.compile(r"^mtp_layers\.(\d+)\.")


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
    biases = frozenset(filter(_EXPERT_BIAS.fullmatch, tensors))
    spare = biases if any(map(_DEEPSEEK.fullmatch, tensors)) else frozenset()
    for name in biases - spare:
        dropped[ROUTER_BIASES] += tensors.pop(name).nbytes
    notes = [*checkpoint.notes, *([BALANCING] if biases - spare else [])]
    return replace(
        checkpoint,
        dialect=TORCHTITAN,
        tensors=tensors,
        optimizer=replace(checkpoint.optimizer, states={}),
        dropped=dropped,
        notes=notes,
        native=FormatData(is_part=True),
        spare=spare,
    )


def unnested(names: Iterable[str]) -> str:
    """The prefix of the names if the nesting is not recorded: "model.", as until 2024, or ""."""
    return "model." if f"model.{QUERY}" in set(names) else ""


def respelled(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` under the names of 0.3.0, with experts unstacked. Raises ReshardError if two get the same name."""
    return under_new_names(_respelled_tensors(tensors))


def _respelled_tensors(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str, Tensor]]:
    layers = max((int(match[1]) + 1 for name in tensors if (match := _LAYER.match(name))), default=0)
    for stored, tensor in tensors.items():
        name = _MTP.sub(lambda match: f"layers.{layers + int(match[1])}.", stored)
        match = _EXPERTS.fullmatch(name)
        if match and len(tensor.shape) == 3:
            for expert, view in enumerate(tensor.view.unstacked()):
                yield stored, f"{match[1]}experts.{expert}.{match[2]}.weight", Tensor(tensor.dtype, view)
        else:
            yield stored, _respelled_name(name), tensor


def _respelled_name(name: str) -> str:
    for pattern, newer in _SPELLINGS:
        if pattern.fullmatch(name):
            return pattern.sub(newer, name)
    return name
