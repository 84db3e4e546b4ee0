"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3 with sparse attention over the tokens that an indexer selects (DSA)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from reshard.families.architectures.deepseek_v3 import DEEPSEEK_V3, layers
from reshard.families.config_entries import Args, Config, ConfigEntry, Const, Key, Values, first
from reshard.families.config_map import DEEPSEEK_EXPERTS, LATENT_ATTENTION, MTP, SIGMOID_ROUTER
from reshard.families.dims import Dims, indexed_layers
from reshard.families.family import MCORE_BRIDGE, MEGATRON_BRIDGE, Family
from reshard.families.rules import Block, Rule, latent_attention, same, under
from reshard.families.transformers_5 import MemoryNames


def indexer(dims: Dims) -> Block:
    """The heads that score tokens; their input is the low-rank query."""
    if not dims.index_heads:
        raise ValueError("the family has an indexer, and the sizes have none")
    hf, mcore = "self_attn.indexer", "self_attention.core_attention.indexer"
    return [
        same(
            f"{hf}.wq_b.weight", f"{mcore}.linear_wq_b.weight", dims.index_heads * dims.index_dim, dims.q_lora
        ),
        same(f"{hf}.wk.weight", f"{mcore}.linear_wk.weight", dims.index_dim, dims.hidden),
        same(f"{hf}.k_norm.weight", f"{mcore}.k_norm.weight", dims.index_dim),
        same(f"{hf}.k_norm.bias", f"{mcore}.k_norm.bias", dims.index_dim),
        same(
            f"{hf}.weights_proj.weight", f"{mcore}.linear_weights_proj.weight", dims.index_heads, dims.hidden
        ),
    ]


def sparse_attention(dims: Dims, *, copies: bool = True) -> Iterator[Rule]:
    """DeepSeek-V3, with an indexer in some or all layers and in every MTP layer."""
    yield from layers(dims, latent_attention(dims), copies=copies)
    yield from under("model.layers.{layer}", "decoder.layers.{layer}", indexer(dims), dims.indexed)
    for index in range(dims.mtp):
        yield from under(
            f"model.layers.{dims.layers + index}", f"mtp.layers.{index}.transformer_layer", indexer(dims)
        )


class SharedIndexers(ConfigEntry):
    """Which layers have an indexer: `indexer_types` in transformers 5; a frequency and an offset on the Hub.

    Source: `GlmMoeDsaConfig` of transformers 5.23; megatron-core accepts the two numbers in versions after 0.16.1.
    """

    def to_args(self, config: Config) -> Values:
        freq, offset = max(first(config, ("index_topk_freq",), 1), 1), config.get("index_skip_topk_offset", 2)
        if types := config.get("indexer_types"):
            full = tuple(i for i, kind in enumerate(types) if kind == "full")
            shared = [i for i in range(len(types)) if i not in full]
            offset = shared[0] if shared else offset
            freq = next((i - offset + 1 for i in full if i >= offset), len(types)) if shared else 1
            if indexed_layers(freq, offset, len(types)) != full:
                raise ValueError(f"indexer_types {types!r} follow no interval")
        return {"dsa_indexer_topk_freq": freq, "dsa_indexer_skip_topk_offset": offset}

    def to_config(self, args: Args) -> Values:
        freq, layers = first(args, ("dsa_indexer_topk_freq",), 1), args.get("num_layers", 0)
        offset = first(args, ("dsa_indexer_skip_topk_offset",), 0)
        full = indexed_layers(freq, offset, layers)
        types = ["full" if i in full else "shared" for i in range(layers)]
        return {"index_topk_freq": freq, "index_skip_topk_offset": offset, "indexer_types": types}

    def notices(self, config: Config) -> Iterator[str]:
        if self.to_args(config)["dsa_indexer_topk_freq"] > 1:
            yield "layers that share an indexer; they take a megatron-core after 0.16.1"


INDEXER: tuple[ConfigEntry, ...] = (
    Const(args={"experimental_attention_variant": "dsa"}),
    Key("index_n_heads", "dsa_indexer_n_heads"),
    Key("index_head_dim", "dsa_indexer_head_dim"),
    Key("index_topk", "dsa_indexer_topk"),
)
DEEPSEEK_V32 = Family(
    "deepseek_v32",
    "DeepseekV32ForCausalLM",
    sparse_attention,
    (*DEEPSEEK_V3.entries, *INDEXER),
    live=MemoryNames(),
    computed_by=MCORE_BRIDGE,
    judged=(MCORE_BRIDGE,),
)
GLM_MOE_DSA = Family(
    "glm_moe_dsa",
    "GlmMoeDsaForCausalLM",
    partial(sparse_attention, copies=False),  # the MTP layer has no copy of embedding and head
    (
        *LATENT_ATTENTION,
        *DEEPSEEK_EXPERTS,
        *SIGMOID_ROUTER,
        *INDEXER,
        SharedIndexers(),
        MTP,
    ),
    live=MemoryNames(),
    computed_by=MCORE_BRIDGE,
    judged=(MCORE_BRIDGE, MEGATRON_BRIDGE),
)
