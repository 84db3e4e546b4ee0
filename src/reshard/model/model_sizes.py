"""The sizes of a model, and where a config and the tensors disagree on them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from reshard.base.errors import UNUSABLE, Problem, ReshardError
from reshard.families import Family
from reshard.families.dims import Dims
from reshard.families.sized_family import Model
from reshard.formats.checkpoint import Checkpoint
from reshard.model import vocabulary
from reshard.model.unusual_configs import why

_ROUTER_BIASES = (".moe_statics.e_score_correction_bias", ".router.expert_bias")
MTP_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
SIZE_KEYS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def sizes(
    family: Family,
    config: Mapping[str, Any],
    args: Mapping[str, Any] | None,
    checkpoint: Checkpoint,
    folder: Path,
) -> tuple[Mapping[str, Any], Dims]:
    """Megatron-LM's arguments (`args`, or from the config) and sizes. Raises ReshardError naming unusable keys."""
    needed = [key for key in SIZE_KEYS if key != "intermediate_size" or "moe_intermediate_size" not in config]
    missing = [key for key in needed if not isinstance(config.get(key), int) or config[key] < 1]
    try:
        if missing:
            raise KeyError(", ".join(missing))
        args = args or family.config.to_args(config)
        dims = Dims.from_args(args, int(config["vocab_size"]), vocabulary.padded_rows(checkpoint))
        if family.drops_router_bias:
            has_bias = any(name.endswith(_ROUTER_BIASES) for name in checkpoint.tensors)
            dims = replace(dims, router_bias=has_bias)
        return args, dims
    except UNUSABLE as error:
        raise ReshardError(
            "config-incomplete-for-family",
            f"config.json does not describe a model of family {family.name}",
            file=str(folder / "config.json"),
            rule="the config must contain every size of the model",
            expected=f"numbers for {', '.join(SIZE_KEYS)}",
            found=f"no usable {', '.join(missing)}" if missing else why(error, config),
            remedy="pass the config that belongs to these weights: --base DIR",
            values={"family": family.name},
        ) from error


def plain_names(checkpoint: Checkpoint, family: Family) -> list[str]:
    """The names of its tensors in the language model on its own."""
    return family.plain_names(checkpoint.tensors, native=checkpoint.has_megatron_names)


def mtp_layers(checkpoint: Checkpoint, names: list[str], config: Mapping[str, Any]) -> int:
    """The number of multi-token prediction layers in the checkpoint: configs often count layers that were left out.

    The Hub numbers them after the last layer, so only the config tells them from excess layers; MiMo has a
    separate name for them.
    """
    if (named_layers := _count(names, _MTP_LAYER)) or checkpoint.has_megatron_names:
        return named_layers
    declared, layers = config.get("num_nextn_predict_layers") or 0, config.get("num_hidden_layers")
    if not isinstance(declared, int) or not isinstance(layers, int):
        return 0
    if not checkpoint.dialect.embeddings:
        return declared
    return min(declared, max(0, _count(names, _LAYER) - layers))


def is_mtp(name: str, model: Model | None) -> bool:
    """Whether a tensor belongs to a layer for multi-token prediction, by its Hub name or its name in memory."""
    numbered = _LAYER.match(name)
    return bool(_MTP_LAYER.match(name) or (model and numbered and int(numbered[1]) >= model.dims.layers))


def disagreements(checkpoint: Checkpoint, family: Family, dims: Dims) -> list[Problem]:
    """Sizes on which config and tensors differ: one problem per size, not per tensor.

    Names in a dialect from another package are known only to its rules, which find all differences.
    """
    if not checkpoint.dialect.embeddings:
        return []
    mcore = checkpoint.has_megatron_names
    rows, hidden = vocabulary.embedding(checkpoint, family)[1].shape
    names = plain_names(checkpoint, family)
    numbered_on = 0 if mcore or _count(names, _MTP_LAYER) else dims.mtp
    pairs = [
        ("layers", "num_hidden_layers", dims.layers, _count(names, _LAYER) - numbered_on),
        ("hidden size", "hidden_size", dims.hidden, hidden),
        ("experts", "num_experts", dims.experts, _experts(checkpoint, family, names)),
    ]
    if not checkpoint.dialect.padded:
        pairs.append(("vocabulary", "vocab_size", dims.vocab, rows))
        pairs += _heads(checkpoint, family, dims)
    problems = [
        Problem(
            "weights-fewer-than-config" if what in _COUNTED and counted < wanted else "config-size-differs",
            f"the config and the checkpoint disagree on {what}",
            file=str(checkpoint.path),
            rule=f"{key} in config.json must match the weights",
            expected=f"{wanted} (config.json)",
            found=f"{counted} (checkpoint)",
            remedy="pass the config that belongs to these weights (--base DIR), or copy the missing weights"
            if what in _COUNTED and counted < wanted
            else "pass the config that belongs to these weights: --base DIR",
            values={"key": key},
        )
        for what, key, wanted, counted in pairs
        if wanted != counted
    ]
    if checkpoint.dialect.padded and (wrong := vocabulary.disagreement(checkpoint, dims.vocab)):
        problems.append(wrong)
    return problems


_COUNTED = ("layers", "experts")
"""What is stored one by one, so that some may be missing."""


def _heads(checkpoint: Checkpoint, family: Family, dims: Dims) -> Iterator[tuple[str, str, int, int]]:
    """The numbers of heads implied by the rows of the first query and key projection, except for latent attention."""
    for what, key, wanted, projection in (
        ("attention heads", "num_attention_heads", dims.heads, "q_proj"),
        ("key-value heads", "num_key_value_heads", dims.groups, "k_proj"),
    ):
        first = checkpoint.shape(family.hub_name(f"model.layers.0.self_attn.{projection}.weight"))
        size = dims.head_dim * (1 + (dims.output_gate and projection == "q_proj"))
        if first and not dims.kv_lora and not first[0] % size:
            yield what, key, wanted, first[0] // size


_LAYER = re.compile(r"^(?:(?:model\.|decoder\.)?(?:layers|blocks|blk)|model\.decoder)\.(\d+)\.", re.MULTILINE)
_MTP_LAYER = re.compile(r"^(?:mtp\.(?:layers\.)?|model\.mtp[_.]layers\.)(\d+)\.", re.MULTILINE)
_STACKED = (
    *(".experts.down_proj", ".ffn_down_exps.weight"),  # gpt-oss; llama.cpp
    *(".moe_block.wo", "MoeBlock_0.wo"),  # MaxText
    *(".experts.merged_down_proj", ".experts.mlp2_weight"),  # nanotron; torchtitan
    ".moe.down_proj.weight",  # Step-3.5
)
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def _experts(checkpoint: Checkpoint, family: Family, names: list[str]) -> int:
    """The number of experts per layer, from tensor names, or from the shape of stacked experts."""
    quantized = checkpoint.quantization.weights if checkpoint.quantization else {}
    stacked = (name for name in (*names, *quantized) if name.endswith(_STACKED))
    name = next(stacked, "")
    shape = checkpoint.shape(name) or checkpoint.shape(family.hub_name(name))
    return _count(names, _EXPERT) or (shape[0] if shape else 0)


def _count(names: list[str], pattern: re.Pattern[str]) -> int:
    """The highest index in the tensor names, plus one."""
    numbers = set(
        pattern.findall("\n".join(names))
    )  # one search is several times faster than one for each name
    return max(map(int, numbers), default=-1) + 1
