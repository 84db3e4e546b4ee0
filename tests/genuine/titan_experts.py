"""Small models of torchtitan that have experts, and their configs for transformers: DeepSeek-V3, gpt-oss, Llama 4.

The older ones are those of torchtitan 0.2.2.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

VOCABULARY, WIDTH, EXPERTS = 64, 32, 4
CONFIG = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "num_experts_per_tok": 2,
}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
DEEPSEEK = {
    **CONFIG,
    **LATENT,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rope_theta": 10000.0,
    "rope_interleave": True,
    "num_nextn_predict_layers": 1,
}
OLDER_DEEPSEEK = {**DEEPSEEK, "q_lora_rank": None, "num_nextn_predict_layers": 0}
GPT_OSS = {
    **CONFIG,
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "num_local_experts": EXPERTS,
    "attention_bias": True,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}
LLAMA4 = {
    **CONFIG,
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 1,
    "intermediate_size": 24,
    "intermediate_size_mlp": 24,
    "num_local_experts": EXPERTS,
    "interleave_moe_layer_step": 2,
    "moe_layers": [1],
    "no_rope_layers": [0, 1],
    "attention_chunk_size": 8192,
    "use_qk_norm": False,
    "attn_temperature_tuning": False,
    "rope_theta": 10000.0,
}
"""torchtitan does not normalise queries and keys, nor scale queries at far positions."""


def ends(titan: ModuleType) -> dict[str, Any]:
    """The modules before and after the layers."""
    return {
        "dim": WIDTH,
        "vocab_size": VOCABULARY,
        "norm": titan.RMSNorm.Config(normalized_shape=WIDTH),
        "tok_embeddings": titan.Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=WIDTH),
        "lm_head": titan.Linear.Config(in_features=WIDTH, out_features=VOCABULARY),
    }


def deepseek() -> Any:
    """A dense layer, one with experts, and one for multi-token prediction; queries in two steps."""
    import torchtitan.models.deepseek_v3 as titan
    from torchtitan.models.common.attention import ScaledDotProductAttention

    titan.get_attention_config = lambda backend: ScaledDotProductAttention.Config()
    layers = titan._build_dsv3_layers(
        **LATENT,
        n_layers=2,
        n_dense_layers=1,
        dim=WIDTH,
        n_heads=4,
        q_lora_rank=12,
        mscale=1.0,
        dense_hidden_dim=48,
        moe_hidden_dim=24,
        num_experts=EXPERTS,
        num_shared_experts=2,
        router_top_k=2,
        router_score_func="sigmoid",
        router_num_expert_groups=2,
        router_num_limited_groups=1,
        router_route_scale=2.5,
        router_route_norm=True,
        attn_backend="plain",
        moe_comm_backend="standard",
        non_blocking_capacity_factor=None,
        rope=titan.ComplexRoPE.Config(dim=4, max_seq_len=64, theta=10000.0),
    )
    following = titan._build_mtp_layers(layers[-1], dim=WIDTH, num_mtp_layers=1)
    return titan.DeepSeekV3Model.Config(layers=layers, mtp_layers=following, **ends(titan))


def gpt_oss() -> Any:
    """Two layers, of which the first has a window. The sizes of its heads are fixed in torchtitan's builder."""
    import torchtitan.models.gpt_oss as titan

    titan._make_gptoss_attn_config = partial(
        titan._make_gptoss_attn_config, n_heads=4, n_kv_heads=2, head_dim=8
    )
    layers = titan._build_gptoss_layers(
        dim=WIDTH,
        n_layers=2,
        hidden_dim=24,
        num_experts=EXPERTS,
        top_k=2,
        load_balance_coeff=1e-3,
        attn_backend="flex",
        moe_comm_backend="standard",
        rope=titan.CosSinRoPE.Config(
            dim=8,
            max_seq_len=64,
            theta=150000.0,
            scaling="yarn",
            rope_factor=32,
            beta_fast=32.0,
            beta_slow=1.0,
            truncate=False,
            original_seq_len=4096,
        ),
    )
    return titan.GptOssModel.Config(layers=layers, **ends(titan))


def older_deepseek() -> Any:
    """DeepSeek-V3 of 0.2, with queries in one step."""
    from torchtitan.models.deepseek_v3.model.args import DeepSeekV3ModelArgs
    from torchtitan.models.deepseek_v3.model.model import DeepSeekV3Model
    from torchtitan.models.moe import MoEArgs

    experts = MoEArgs(
        num_experts=EXPERTS,
        num_shared_experts=2,
        top_k=2,
        num_expert_groups=2,
        num_limited_groups=1,
        route_scale=2.5,
        route_norm=True,
        score_before_experts=False,
        use_grouped_mm=False,
    )
    sizes = DeepSeekV3ModelArgs(
        **LATENT,
        dim=WIDTH,
        vocab_size=VOCABULARY,
        n_layers=2,
        n_heads=4,
        inter_dim=48,
        moe_inter_dim=24,
        max_seq_len=64,
        moe_args=experts,
        rope_factor=1.0,
    )
    sizes.moe_impl = "standard"  # as its trainer sets it
    count_on_cpu()
    return DeepSeekV3Model(sizes)


def older_gpt_oss() -> Any:
    """gpt-oss of 0.2, whose layers are in bfloat16."""
    from torchtitan.models.gpt_oss.model.args import GptOssModelArgs
    from torchtitan.models.gpt_oss.model.model import GptOssModel
    from torchtitan.models.moe import MoEArgs

    experts = MoEArgs(
        num_experts=EXPERTS,
        num_shared_experts=0,
        top_k=2,
        score_func="softmax",
        route_norm=True,
        gate_bias=True,
        score_before_experts=False,
        use_grouped_mm=False,
    )
    sizes = GptOssModelArgs(
        dim=WIDTH,
        vocab_size=VOCABULARY,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=8,
        moe_inter_dim=24,
        max_seq_len=64,
        moe_args=experts,
    )
    count_on_cpu()
    return GptOssModel(sizes)


def older_llama4() -> Any:
    """Llama 4 of 0.2: experts in every second layer, and no rotation in the first."""
    from torchtitan.models.llama4.model.args import TransformerModelArgs
    from torchtitan.models.llama4.model.model import Transformer
    from torchtitan.models.moe import MoEArgs

    sizes = TransformerModelArgs(
        dim=WIDTH,
        vocab_size=VOCABULARY,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        max_seq_len=64,
        multiple_of=8,
        ffn_dim_multiplier=0.25,
        every_n_layers_nope=2,
        auto_scale_hidden_dim=False,
        moe_args=MoEArgs(num_experts=EXPERTS, use_grouped_mm=False),
    )
    count_on_cpu()
    return Transformer(sizes)


def count_on_cpu() -> None:
    """Let torch count integers on a CPU, as routers of 0.2 do."""
    count = torch.histc
    torch.histc = lambda found, **bins: count(found.float(), **bins).long()


def computed_in(model: Any) -> torch.dtype | None:
    """The dtype that torchtitan's gpt-oss needs, as its trainer has it; None for other models."""
    return torch.bfloat16 if "GptOss" in str(type(model).__mro__) else None


def flex_masks(model: Any, tokens: torch.Tensor) -> Any:
    """The masks that the attention of gpt-oss takes, which has no plain kind; None for other models."""
    if not computed_in(model):
        return None
    torch.compiler.set_stance("force_eager")
    if hasattr(model, "model_args"):
        return model.get_attention_masks(tokens, None)
    return model.get_attention_masks(torch.arange(tokens.shape[1]).expand(tokens.shape))


def adapter(model: Any) -> Any:
    """torchtitan's own adapter for Hugging Face, of the models here; None for others."""
    sizes = getattr(model, "model_args", None) or getattr(model, "config", None)
    of = next(
        base.__module__ for base in type(model).__mro__ if base.__module__.startswith("torchtitan.models")
    )
    package = ".".join(of.split(".")[:-1])
    name = {"deepseek_v3": "DeepSeekV3", "gpt_oss": "GptOss", "llama4": "Llama4"}.get(of.split(".")[2])
    return name and getattr(import_module(f"{package}.state_dict_adapter"), f"{name}StateDictAdapter")(
        sizes, None
    )


Variant = tuple[Callable[[], Any], dict[str, Any], bool]
VARIANTS: dict[str, Variant] = {
    "deepseek_v3": (deepseek, DEEPSEEK, False),
    "gpt_oss": (gpt_oss, GPT_OSS, False),
    "deepseek_v3-older": (older_deepseek, OLDER_DEEPSEEK, False),
    "gpt_oss-older": (older_gpt_oss, GPT_OSS, False),
    "llama4-older": (older_llama4, LLAMA4, False),
}
"""As in `make_torchtitan`."""
