"""Megatron-Core's names: how a tensor is named in each kind of checkpoint, and how ranks share it.

Inside reshard a Megatron tensor has one name: that of the local layer spec, with global layer and expert indices
(`decoder.layers.7.mlp.experts.3.linear_fc1.weight`). On disk, Transformer Engine fuses a norm into the linear layer
after it, torch_dist stacks layers and experts, and legacy files number both from zero on each rank. This module maps
between them. Source: the `sharded_state_dict` methods of megatron-core 0.12 to 0.16.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from reshard.algebra.layout import Layout, SavedLayout
from reshard.base.errors import Problem, raise_all
from reshard.containers.torchfiles.pickles import Opaque
from reshard.families.dims import LAYER_PATTERN, MOST_MODULES, windowed_layers
from reshard.formats.sharding import Split

FUSED_NORMS = {
    f"{linear}.layer_norm_{kind}": f"{norm}.{kind}"
    for linear, norm in (
        ("self_attention.linear_qkv", "input_layernorm"),
        ("self_attention.in_proj", "input_layernorm"),
        ("mlp.linear_fc1", "pre_mlp_layernorm"),
        ("self_attention.linear_q_up_proj", "self_attention.q_layernorm"),
        ("self_attention.linear_kv_up_proj", "self_attention.kv_layernorm"),
    )
    for kind in ("weight", "bias")
}
"""Names below a layer that differ under Transformer Engine. Of the linears with one norm, a layer has only one."""


SPLITS = {
    "word_embeddings.weight": Split(0),
    "output_layer.weight": Split(0),
    "linear_qkv.weight": Split(0),
    "linear_qkv.bias": Split(0),
    "linear_q_proj.weight": Split(0),
    "linear_q_up_proj.weight": Split(0),
    "linear_kv_up_proj.weight": Split(0),
    "linear_proj.weight": Split(1),
    "linear_fc1.weight": Split(0, parts=2),
    "linear_fc1.bias": Split(0, parts=2),
    "linear_fc2.weight": Split(1),
    "eh_proj.weight": Split(0),
    "core_attention.softmax_offset": Split(0),
    "in_proj.weight": Split(0),
    "conv1d.weight": Split(0),
    "out_proj.weight": Split(1),
    "self_attention.A_log": Split(0),
    "self_attention.dt_bias": Split(0),
    "per_layer_embedding.weight": Split(0),
    "per_layer_model_proj.weight": Split(0),
    **{f"weight.{part}": Split(0) for part in ("query", "key", "value", "z", "beta", "alpha")},
    "gate_proj.weight": Split(0),
    "g_proj.weight": Split(0),
    "ngram_embedding.weight": Split(0),
    "e_proj.weight": Split(0),
    "h_proj.weight": Split(0),
}
"""By the last two components of a name: what tensor parallelism cuts. A weight must be here or in `WHOLE`."""

HYPER_CONNECTION = ("alpha_pre", "alpha_post", "alpha_res", "bias")
WHOLE = {
    *(f"{norm}.{kind}" for norm in ("input_layernorm", "pre_mlp_layernorm") for kind in ("weight", "bias")),
    *(f"{norm}.{kind}" for norm in ("final_layernorm", "k_norm") for kind in ("weight", "bias")),
    *(f"{each}_layernorm.weight" for each in ("q", "k", "kv", "post_attention", "post_feedforward")),
    *("post_layernorm.weight", "post_mlp_layernorm.weight", "post_self_attn_layernorm.weight"),
    # Gemma 4
    *(f"post_{each}.weight" for each in ("moe_layernorm", "shared_expert_layernorm", "ffn_layernorm")),
    *("linear_qkv.layer_norm_weight", "pre_shared_expert_layernorm.weight", "layer_scalar"),
    *("router.scale", "router.per_expert_scale", "per_layer_input_gate.weight"),
    *(
        f"{each}.weight"
        for each in ("per_layer_projection", "per_layer_proj_norm", "post_per_layer_input_norm")
    ),
    *("q_norm.weight", "g_norm.weight", "out_norm.weight", "enorm.weight", "hnorm.weight"),
    *("linear_proj.bias", "linear_fc2.bias", "router.weight", "router.bias", "router.expert_bias"),
    *("shared_experts.gate_weight", "linear_q_down_proj.weight", "linear_kv_down_proj.weight"),
    *("linear_wq_b.weight", "linear_wk.weight", "linear_weights_proj.weight"),
    # Compressed attention has one tensor-parallel rank.
    *("self_attention.linear_o_group_proj", "linear_kv_proj.weight", "core_attention.attn_sink"),
    *("linear_wkv.weight", "linear_wgate.weight", "compressor.ape", "router.tid2eid"),
    "mapping_proj.weight",
    *(f"{name}_hyper_connection.{part}" for name in ("self_attention", "mlp") for part in HYPER_CONNECTION),
    *(f"{stack}hc_head_{part}" for stack in ("decoder.", "") for part in ("fn", "base", "scale")),
    # Qwen3.8-Flash-Next
    *("hc_norm.weight", "input_mix_weight_down.weight", "input_mix_weight_up.weight"),
    *("block_inject_weight.weight", "index_qk_proj.weight", "key_proj.weight", "value_proj.weight"),
    *(f"norm_{each}.weight" for each in ("key", "query", "conv")),
    *(
        f"ple_embedding.{each}"
        for each in ("layer_multipliers", "ngram_heads_offsets", "ngram_heads_vocab_sizes")
    ),
    # Mamba's are cut, but written only as torch_dist, which ranks load from whatever chunks there are.
    *(
        "final_norm.weight",
        "in_proj.layer_norm_weight",
        "norm.weight",
        "mixer.A_log",
        "mixer.D",
        "mixer.dt_bias",
    ),
    *(f"{kind}.{part}" for kind in ("weight", "bias") for part in ("x", "B", "C")),
    "weight.dt",
}
"""By the last two components of a name: what every rank has complete."""

WHOLE_CONVOLUTION = "ple.conv1d.weight"
"""The convolution over embedded n-grams, which every rank has complete, unlike those of delta nets."""

ADAPTER_SPLITS = {
    "linear_qkv.adapter.linear_in.weight": Split(0),
    "linear_qkv.adapter.linear_out.weight": Split(0),
    "linear_proj.adapter.linear_in.weight": Split(1),
    "linear_proj.adapter.linear_out.weight": Split(0),
    "linear_fc1.adapter.linear_in.weight": Split(0),
    "linear_fc1.adapter.linear_out.weight": Split(0, parts=2),
    "linear_fc2.adapter.linear_in.weight": Split(1),
    "linear_fc2.adapter.linear_out.weight": Split(0),
}
"""The same by the last four, for adapters of Megatron-Bridge 0.3.1: `ParallelLinearAdapter` in its `peft/utils.py`."""


PARALLEL_LINEARS = (
    "linear_qkv",
    "linear_proj",
    "linear_fc1",
    "linear_fc2",
    "linear_q_proj",
    "linear_q_down_proj",
    "linear_q_up_proj",
    "linear_kv_down_proj",
    "linear_kv_up_proj",
    "linear_wq_b",
    "linear_wk",
    "linear_weights_proj",
    "linear_kv_proj",
    "linear_wkv",
    "linear_wgate",
    "e_proj",
    "h_proj",
    "gate_proj",
    "g_proj",
    "input_mix_weight_down",
    "input_mix_weight_up",
    "block_inject_weight",
    "index_qk_proj",
    "key_proj",
    "value_proj",
    "eh_proj",
    "in_proj",
    "out_proj",
    "linear_in",
    "linear_out",
    "per_layer_model_proj",
)
"""Modules that save an `_extra_state` with their weight."""

WRAPPED_BY = "self_attention.indexer.index_qk_proj"
"""The indexer of mcore-bridge's Qwen3.8-Flash-Next, whose sparse attention is around that of Transformer Engine."""
LINEARS_BESIDE = re.compile(r"multi_modal_projector\.proj|vision_model\.(decoder|merger)\..*linear_\w+")
"""Such modules outside the language model: Megatron-Bridge's projector of Gemma 3, and its tower of Qwen3-VL."""
STACKED_BESIDE = "vision_model.decoder."
"""The beginning of those whose weights stack layers."""


BY_WINDOW = ("self_attention_sliding", "self_attention_global")
"""The attention of layers with a window and without one, if they differ in shape: Megatron-Bridge's Gemma 4.

Keys stack the layers of each kind. Norms have the names that they have in the model.
"""


def layers_by_window(args: Mapping[str, Any], part: str) -> Sequence[int]:
    """The numbers of the layers that keys below one of `BY_WINDOW` stack, by the arguments."""
    layers = args.get("num_layers")
    if part not in BY_WINDOW or not isinstance(layers, int):
        return ()
    windowed = windowed_layers(args, layers)
    others = [layer for layer in range(min(layers, MOST_MODULES)) if layer not in windowed]
    return windowed if part == BY_WINDOW[0] else others


BELOW = "language_model."
"""Prefix of a multimodal model's language model, in mcore-bridge and Megatron-Bridge."""

_LANGUAGE_MODEL = ("embedding.", "decoder.", "mtp.", "output_layer.", "per_layer_")


def is_carried(name: str) -> bool:
    """Whether a tensor is outside the language model, such as a vision tower: unsharded, in the first stage."""
    return not name.startswith(_LANGUAGE_MODEL)


def split_of(name: str, gated: bool = True) -> Split | None:
    """How tensor parallelism cuts the tensor called `name`; None if every rank has it complete.

    If the MLP is not `gated`, linear_fc1 is the up projection alone.
    """
    if is_carried(name) or tail(name, 3) == WHOLE_CONVOLUTION:
        return None
    split = SPLITS.get(tail(name, 2)) or ADAPTER_SPLITS.get(tail(name, 4))
    return split._replace(parts=1) if split and not gated else split


def refuse_undeclared(names: Iterable[str]) -> None:
    """Raise ReshardError for weights that are about to be written and are neither in `SPLITS` nor in `WHOLE`."""
    undeclared = (
        place_of(name).module
        for name in names
        if not is_carried(name) and not split_of(name) and not _is_whole(place_of(name).module)
    )
    raise_all(
        Problem(
            "megatron-split-undeclared",
            "it is not declared whether ranks share this tensor or each have all of it",
            tensor=module,
            rule="SPLITS or WHOLE in formats/megatron/mcore.py has the end of each name that a family declares",
            remedy="declare it there: see docs/add-a-family.md",
        )
        for module in dict.fromkeys(undeclared)
    )


def _is_whole(module: str) -> bool:
    return tail(module, 2) in WHOLE or tail(module, 3) == WHOLE_CONVOLUTION


def tail(name: str, components: int) -> str:
    """The last components of a name."""
    return ".".join(name.rsplit(".", components)[-components:])


def is_gated(args: Mapping[str, Any]) -> bool:
    """Whether the MLP of a model with these Megatron-LM arguments has a gate; true if none of them is there."""
    flags = [args[name] for name in ("swiglu", "quick_geglu", "gated_linear_unit") if name in args]
    return any(flags) or not flags


class MegatronPosition(NamedTuple):
    """The position of a tensor according to its name."""

    module: str
    """The name below the layer, or the full name outside of layers."""
    stack: str = ""
    """"decoder" or "mtp"; empty outside of layers."""
    layer: int | None = None
    expert: int | None = None

    @property
    def part(self) -> str:
        """The part of the layer that the module is, or is in."""
        return self.module.partition(".")[0]


_LAYER = re.compile(r"(decoder|mtp)\.layers\.(?:(\d+)\.)?(.*)")
_EXPERT = re.compile(r"(.*mlp\.experts)\.(\d+)\.(.*)")


def place_of(name: str) -> MegatronPosition:
    """Parse one of reshard's own names."""
    match = _LAYER.fullmatch(name)
    if not match:
        return MegatronPosition(name)
    stack, layer, module = match[1], int(match[2]), match[3]
    expert = _EXPERT.fullmatch(module)
    if expert:
        return MegatronPosition(f"{expert[1]}.{expert[3]}", stack, layer, int(expert[2]))
    return MegatronPosition(module, stack, layer)


def name_of(place: MegatronPosition) -> str:
    """Build a name: the inverse of `place_of`."""
    module = place.module
    if place.expert is not None:
        module = module.replace("mlp.experts.", f"mlp.experts.{place.expert}.", 1)
    return module if place.layer is None else f"{place.stack}.layers.{place.layer}.{module}"


def unfused(module: str) -> str:
    """The local name of a module below a layer, whose norm Transformer Engine may have fused."""
    module = module.replace("mtp_model_layer.", "transformer_layer.")
    for fused, plain in FUSED_NORMS.items():
        if module.endswith(fused):
            return module[: -len(fused)] + plain
    return module


_PREDICTED_LAYER = re.compile(r"transformer_layer\.|mtp_model_layer\.layers\.\d+\.")
"""What is in front of a module of the layer in a multi-token prediction layer of GPTModel or HybridModel."""


class LayerSpelling:
    """How layers are named: by Transformer Engine or by the local spec, in torch_dist or legacy files.

    `places` are those of all tensors. torch_dist writes fused names under both specs, but only Transformer Engine keeps
    the norm before a mixture of experts separate, and only it fuses the norms of latent attention, unless an indexer
    reads their outputs.
    """

    def __init__(
        self, places: Iterable[MegatronPosition], *, transformer_engine: bool, torch_dist: bool
    ) -> None:
        self.transformer_engine, self._torch_dist = transformer_engine, torch_dist
        places = list(places)
        self._latent = any("linear_kv_up_proj" in place.module for place in places)
        sparse = ("core_attention.indexer", "core_attention.attn_sink", WRAPPED_BY)
        self.indexed = any(each in place.module for place in places for each in sparse)
        self._sparse = {place[1:3] for place in places if place.expert is not None}
        self._linears = {(place[1:3], place.module.rpartition(".weight")[0]) for place in places}
        self._by_window = any(place.module.startswith(BY_WINDOW) for place in places)

    def module(self, module: str, layer: tuple[str, int | None]) -> str:
        """The name of a module below a `layer`, which is in the stack "decoder" or "mtp"."""
        match = _PREDICTED_LAYER.match(module)
        prefix = match[0] if match else ""
        inner = module.removeprefix(prefix)
        fused = [prefix + each for each, plain in FUSED_NORMS.items() if plain == inner]
        there = [each for each in fused if (layer, each.rpartition(".")[0]) in self._linears]
        if not fused or not self._fuses(inner, layer, bool(there)):
            return module
        return (there or fused)[0]  # experts have none with this name, but local specs save the norm by it

    def _fuses(self, plain: str, layer: tuple[str, int | None], there: bool) -> bool:
        """Whether a norm is fused into a linear, which is `there` or not."""
        if self._by_window:
            return False
        norm = plain.rpartition(".")[0]
        if norm == "pre_mlp_layernorm":
            return layer not in self._sparse if self.transformer_engine else self._torch_dist
        if norm == "input_layernorm":
            return there and not self._latent and (self.transformer_engine or self._torch_dist)
        return there and self._latent and self.transformer_engine and not self.indexed


@dataclass(frozen=True, slots=True)
class StageFinder:
    """Finds the pipeline stage, and its virtual chunk, that has a tensor. Each has at least `least` layers."""

    layout: Layout
    layers: int
    least: int = 1

    def table(self) -> Mapping[int, tuple[int, int, int]]:
        """(stage, chunk, index in the chunk) of every decoder layer."""
        return {
            layer: (stage, chunk, index)
            for stage, chunk, layers in self.layout.chunks(self.layers, self.least)
            for index, layer in enumerate(layers)
        }

    @property
    def last(self) -> tuple[int, int]:
        return self.layout.pp - 1, self.layout.vpp - 1


def layout_of(args: Mapping[str, Any]) -> SavedLayout:
    """The layout in Megatron-LM's arguments; missing arguments leave sizes unknown.

    Without a separate expert-tensor size, the tensor-parallel size applies to experts too. For a dense model it is 1.
    """

    def size(name: str) -> int | None:
        value = args.get(name)
        return value if isinstance(value, int) and value > 0 else None

    tp, vpp = size("tensor_model_parallel_size"), "virtual_pipeline_model_parallel_size"
    is_dense = "num_experts" in args and not args["num_experts"]
    return SavedLayout(
        tp=tp,
        pp=size("pipeline_model_parallel_size"),
        vpp=1 if vpp in args and args[vpp] is None else size(vpp),
        ep=size("expert_model_parallel_size"),
        etp=1 if is_dense and tp else size("expert_tensor_parallel_size") or tp,
    )


def padded_vocabulary(vocab: int, divisible_by: int, tp: int) -> int:
    """The number of embedding rows: Megatron-LM pads them to a multiple of `divisible_by` times TP."""
    unit = divisible_by * tp
    return -(-vocab // unit) * unit


def stored_args(args: Mapping[str, Any], layout: Layout, ckpt_format: str) -> dict[str, Any]:
    """`args` as Megatron-LM stores them with a weights-only checkpoint in this layout.

    Previous arguments on pipeline stages are replaced. Without `no_save_optim` and `no_save_rng`, Megatron-LM's
    `load_checkpoint` would require states that are not there.
    """
    in_pattern = bool(args.get(LAYER_PATTERN))  # which has the stages
    uneven = {} if in_pattern else stage_arguments(layout, int(args.get("mtp_num_layers") or 0))
    chunks = layout.pp * layout.vpp if layout.vpp > 1 and not uneven and not in_pattern else None
    return {
        **args,
        "ckpt_format": ckpt_format,
        "no_save_optim": True,
        "no_save_rng": True,
        "num_layers_per_virtual_pipeline_stage": int(args["num_layers"]) // chunks if chunks else None,
        "num_virtual_stages_per_pipeline_rank": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        "pipeline_model_parallel_layout": None,
        **uneven,
    }


def stage_arguments(layout: Layout, mtp: int = 0) -> dict[str, Any]:
    """The arguments that describe uneven pipeline stages to Megatron-LM; MTP layers are in the last one."""
    stages = layout.stages
    if not stages or len(set(stages)) == 1:
        return {}
    if layout.vpp == 1 and len(set(stages[1:-1])) <= 1 and layout.pp > 2:
        return {
            "decoder_first_pipeline_num_layers": stages[0],
            "decoder_last_pipeline_num_layers": stages[-1],
        }
    if layout.vpp == 1 and layout.pp == 2:
        return {"decoder_first_pipeline_num_layers": stages[0]}
    marks = ["t" * count for count in stages]
    marks[0], marks[-1] = "E" + marks[0], marks[-1] + "m" * mtp + "L"
    return {"pipeline_model_parallel_layout": "|".join(marks)}


def stages_of(args: Mapping[str, Any], layout: Layout) -> tuple[int, ...]:
    """The decoder layers of each stage in these arguments, if they are uneven: the inverse of `stage_arguments`."""
    plan = args.get("pipeline_model_parallel_layout")
    plan = plan.state.get("input_data") if isinstance(plan, Opaque) and isinstance(plan.state, dict) else plan
    if isinstance(plan, str):
        return tuple(stage.count("t") for stage in _written_out(plan).split("|"))
    layers, ends = args.get("num_layers"), _end_layers(args)
    if layout.vpp > 1 or layout.pp == 1 or not any(ends) or not isinstance(layers, int):
        return ()
    if sum(bool(args.get(name)) for name in _ACCOUNTED):
        each = (layers + sum(ends)) // layout.pp
        return (each - ends[0], *[each] * (layout.pp - 2), each - ends[1])
    middle = layout.pp - sum(bool(end) for end in ends)
    each = (layers - sum(ends)) // middle if middle else 0
    return (ends[0] or each, *[each] * (layout.pp - 2), ends[1] or each)


_ACCOUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
_GIVEN = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")


def _end_layers(args: Mapping[str, Any]) -> tuple[int, int]:
    """The layers of the first and the last stage, or how many layers embedding and loss stand for; 0 if not set."""
    names = _ACCOUNTED if any(args.get(name) for name in _ACCOUNTED) else _GIVEN
    first, last = (int(value) if isinstance(value := args.get(name), int) else 0 for name in names)
    return first, last


_MOST_STAGES = 1000


def _written_out(plan: str) -> str:
    """A pipeline layout of Megatron-LM without its repetitions: "(tt|)*2" means "tt|tt|"."""

    def repeated(match: re.Match[str]) -> str:
        return match[1] * min(int(match[2]), _MOST_STAGES)

    plan = re.sub(r"[\s,]", "", plan)
    plan = re.sub(r"\(([^()]*)\)\*(\d{1,9})", repeated, plan)
    return re.sub(r"([A-Za-z|])\*(\d{1,9})", repeated, plan)
