"""The sizes of a language model, from Megatron-LM's arguments, and which of its layers are of which kind."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_NUMBER = 1 << 31
MOST_MODULES = 1 << 18
"""Limit on the experts of all layers: more than ten times those of the largest models."""


LAYER_PATTERN = "hybrid_layer_pattern"
"""The argument that makes the model a HybridModel, whose layers are of several kinds."""


N_GRAMS = (
    *("ple_embed_dim", "ple_conv_kernel_size", "ngram_size", "heads_per_ngram"),
    *("ngram_vocab_size_base", "make_ngram_vocab_size_divisible_by", "split_ngram_parts"),
)
"""Arguments of mcore-bridge from which the sizes of n-gram embeddings follow."""


def layer_pattern(args: Mapping[str, Any]) -> str:
    """The kinds of layers of a HybridModel, until 0.16 called MambaModel; empty for GPTModel."""
    return str(args.get(LAYER_PATTERN) or args.get("hybrid_override_pattern") or "")


@dataclass(frozen=True, slots=True)
class Dims:
    """The sizes of a model, from Megatron-LM's argument names (see `from_args`)."""

    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    ffn: int
    vocab: int
    padded_vocab: int
    tied: bool
    qkv_bias: bool
    output_bias: bool
    bias: bool
    qk_norm: bool
    experts: int
    expert_ffn: int
    shared_ffn: int
    shared_gate: bool
    router_bias: bool
    sparse: tuple[int, ...]
    q_lora: int
    kv_lora: int
    qk_nope: int
    qk_rope: int
    v_head: int
    index_heads: int
    index_dim: int
    indexed: tuple[int, ...]
    pattern: tuple[int, ...]
    mamba: tuple[int, ...]
    mtp: int
    output_gate: bool
    delta: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    rope_scaled: bool
    windowed: tuple[int, ...]
    global_head_dim: int
    global_groups: int
    keys_are_values: bool
    sharing: int
    wide_sharing: bool
    layer_dim: int
    layer_vocab: int
    topk: int
    hashed: int
    ratios: tuple[int, ...]
    streams: int
    output_groups: int
    output_lora: int
    window_groups: int
    window_heads: int
    value_head: int
    lightning: tuple[int, ...]
    stream_rank: int
    ngrams: tuple[int, ...]
    ngram_layers: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raise ValueError for impossible sizes: rules loop over some sizes, and multiply others."""
        for name in self.__slots__:
            value = getattr(self, name)
            if not all(
                isinstance(n, int) and 0 <= n < MAX_NUMBER
                for n in (value if isinstance(value, tuple) else [value])
            ):
                raise ValueError(f"{name} is {reprlib.repr(value)}")
        for name in ("heads", "groups"):  # both are divisors
            if not getattr(self, name):
                raise ValueError(f"{name} is 0")
        if (self.layers + self.mtp) * max(1, self.experts) > MOST_MODULES:
            raise ValueError(f"{self.layers} layers, {self.mtp} MTP layers and {self.experts} experts")

    @property
    def qkv_rows(self) -> int:
        """The rows of linear_qkv: queries, each with its optional gate, keys and values."""
        queries = self.heads * (1 + self.output_gate) * self.head_dim
        return queries + self.groups * (self.head_dim + (self.value_head or self.head_dim))

    @staticmethod
    def from_args(args: Mapping[str, Any], vocab: int, padded_vocab: int | None = None) -> Dims:
        """Read sizes from Megatron-LM `args`; `vocab` counts real tokens, `padded_vocab` embedding rows."""

        def get(name: str, default: Any = 0) -> Any:
            value = args.get(name)
            return default if value is None else value

        def latent(name: str) -> int:
            """A size of latent attention. Megatron-LM stores its defaults in every model's arguments."""
            return int(get(name)) if get("multi_latent_attention") else 0

        def linear(name: str) -> int:
            """A size of linear attention. Megatron-LM stores its defaults in every model's arguments."""
            return int(get(name)) if get("experimental_attention_variant") == "gated_delta_net" else 0

        heads, hidden, layers = args["num_attention_heads"], args["hidden_size"], args["num_layers"]
        grouped = get("group_query_attention", True)
        experts = get("num_experts")
        ffn = args["ffn_hidden_size"]
        global_head_dim = get("global_kv_channels", get("global_head_dim"))
        return Dims(
            layers=layers,
            hidden=hidden,
            heads=heads,
            groups=get("num_query_groups", heads) if grouped else heads,
            head_dim=get("kv_channels", hidden // heads),
            ffn=ffn,
            vocab=vocab,
            padded_vocab=padded_vocab or vocab,
            tied=not get("untie_embeddings_and_output_weights", False),
            qkv_bias=bool(
                get("linear_qkv_bias", get("add_qkv_bias", False) or get("add_bias_linear", False))
            ),
            output_bias=bool(get("linear_proj_bias", get("add_bias_linear", False))),
            bias=bool(get("add_bias_linear", False)),
            qk_norm=bool(get("qk_layernorm", False)),
            experts=experts,
            expert_ffn=get("moe_ffn_hidden_size", ffn),
            shared_ffn=get("moe_shared_expert_intermediate_size"),
            shared_gate=bool(get("moe_shared_expert_gate", False)),
            router_bias=bool(get("moe_router_enable_expert_bias", False)),
            sparse=sparse_layers(get("moe_layer_freq", 1), layers) if experts else (),
            q_lora=latent("q_lora_rank"),
            kv_lora=latent("kv_lora_rank"),
            qk_nope=latent("qk_head_dim"),
            qk_rope=latent("qk_pos_emb_head_dim"),
            v_head=latent("v_head_dim"),
            index_heads=get("index_n_heads", get("dsa_indexer_n_heads", get("indexer_n_heads"))),
            index_dim=get("index_head_dim", get("dsa_indexer_head_dim", get("indexer_head_dim"))),
            indexed=indexed_layers(
                get("dsa_indexer_topk_freq", 1), get("dsa_indexer_skip_topk_offset"), layers
            )
            if args.get("lightning_indexer_layers") is None
            else tuple(args["lightning_indexer_layers"]),
            pattern=tuple(map(ord, layer_pattern(args).replace("|", ""))),
            mamba=tuple(
                get(f"mamba_{size}") for size in ("num_heads", "head_dim", "num_groups", "state_dim")
            ),
            mtp=get("mtp_num_layers"),
            output_gate=bool(get("attention_output_gate", False)),
            delta=delta_layers(args, layers),
            key_heads=linear("linear_num_key_heads"),
            value_heads=linear("linear_num_value_heads"),
            key_dim=linear("linear_key_head_dim"),
            value_dim=linear("linear_value_head_dim"),
            kernel=linear("linear_conv_kernel_dim"),
            rope_scaled=bool(get("use_rope_scaling", False)),
            windowed=windowed_layers(args, layers) if global_head_dim else window_pattern(args),
            global_head_dim=global_head_dim,
            global_groups=get("num_global_query_groups", get("num_global_key_value_heads")),
            keys_are_values=bool(get("attention_k_eq_v", False)),
            sharing=get("num_kv_shared_layers"),
            wide_sharing=bool(get("use_double_wide_mlp", False)),
            layer_dim=get("per_layer_embed_dim"),
            layer_vocab=get("per_layer_embed_vocab_size"),
            topk=get("moe_router_topk"),
            hashed=get("moe_n_hash_layers"),
            ratios=tuple(get("csa_compress_ratios", ())),
            streams=get("num_residual_streams", get("hc_count")),
            output_groups=get("o_groups"),
            output_lora=get("o_lora_rank"),
            window_groups=get("swa_num_query_groups"),
            window_heads=get("swa_num_attention_heads"),
            lightning=lightning_layers(get("layer_group_size"), layers),
            value_head=get("v_head_dim") if get("hybrid_attention_pattern") else 0,
            stream_rank=get("hc_lowrank"),
            ngrams=tuple(map(get, N_GRAMS)),
            ngram_layers=tuple(get("ple_layer_ids", ())),
        )


def sparse_layers(freq: int | Sequence[int], layers: int) -> tuple[int, ...]:
    """Which layers are mixtures of experts, by Megatron-LM's `--moe-layer-freq`."""
    if isinstance(freq, int):
        return tuple(layer for layer in range(min(layers, MOST_MODULES)) if layer % freq == 0)
    return tuple(layer for layer, is_sparse in enumerate(freq) if is_sparse)


def indexed_layers(freq: int, offset: int, layers: int) -> tuple[int, ...]:
    """Which layers have their own indexer for sparse attention; the others reuse the selection of a layer before."""
    return tuple(i for i in range(min(layers, MOST_MODULES)) if max(i - offset + 1, 0) % freq == 0)


def lightning_layers(group: int, layers: int) -> tuple[int, ...]:
    """Which layers have linear attention if the last of each complete `group`, and those after the groups, have not."""
    grouped = min(layers, MOST_MODULES) // group * group if group else 0
    return tuple(layer for layer in range(grouped) if (layer + 1) % group)


def window_pattern(args: Mapping[str, Any]) -> tuple[int, ...]:
    """Which layers have a window in Megatron-Bridge's list of numbers for MiMo-V2-Flash."""
    return tuple(layer for layer, each in enumerate(args.get("hybrid_attention_pattern") or ()) if each)


def delta_layers(args: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Which layers are gated delta nets, by Megatron-LM's `--linear-attention-freq`; the others have full attention."""
    freq = args.get("linear_attention_freq")
    if args.get("experimental_attention_variant") != "gated_delta_net" or freq is None:
        return ()
    if isinstance(freq, int):
        return tuple(layer for layer in range(min(layers, MOST_MODULES)) if (layer + 1) % freq)
    return tuple(layer for layer, is_linear in enumerate(freq) if is_linear)


def windowed_layers(args: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Which layers attend to a window, by `--window-attn-skip-freq` or Megatron-Bridge's `interleaved_attn_pattern`."""
    skip, pattern = args.get("window_attn_skip_freq"), args.get("interleaved_attn_pattern")
    if isinstance(pattern, list | tuple):
        skip = sum(each for each in pattern if isinstance(each, int))
    if isinstance(skip, list | tuple):
        return tuple(layer for layer, is_windowed in enumerate(skip) if is_windowed)
    every = skip if isinstance(skip, int) and skip > 0 else MAX_NUMBER
    return tuple(layer for layer in range(min(layers, MOST_MODULES)) if (layer + 1) % every)
