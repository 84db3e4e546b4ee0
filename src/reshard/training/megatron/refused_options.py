"""Fields of megatron-core's configs that are not passed through: reshard sets them, or they break a promise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from reshard.base.errors import Problem
from reshard.training.dataclass_fields import can_be_typed
from reshard.training.megatron.core_fields import all_fields
from reshard.training.option_checks import not_passed_on


@dataclass(frozen=True)
class Refusal:
    """Why fields are refused, and what to do instead. A name with a star matches all names that begin with it."""

    why: str
    cure: str
    names: tuple[str, ...]

    def takes(self, name: str) -> bool:
        """Whether this refusal covers a field."""
        return any(name == each or (each.endswith("*") and name.startswith(each[:-1])) for each in self.names)


SIZES_OF_MODEL = {
    "tensor_model_parallel_size": "--tp",
    "pipeline_model_parallel_size": "--pp",
    "virtual_pipeline_model_parallel_size": "--vpp",
    "context_parallel_size": "--cp",
    "expert_model_parallel_size": "--ep",
    "moe_extended_tp": "--expert_tensor_parallel_size",
    "grad_reduce_in_fp32": "--grad_reduce_in_bf16",
    "check_for_nan_in_grad": "--nan-steps",
}
"""Fields for which reshard has flags of its own."""

OF_MODEL = Refusal(
    "it is part of the model, and comes from config.json",
    "leave it out; to train another model, start from its folder",
    (
        *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size"),
        *("kv_channels", "normalization", "layernorm_epsilon", "layernorm_zero_centered_gamma"),
        *("qk_layernorm", "qk_l2_norm", "apply_residual_connection_post_layernorm", "add_bias_linear"),
        *("add_qkv_bias", "gated_linear_unit", "activation_func", "glu_linear_offset"),
        *("activation_func_clamp_value", "softmax_scale", "softmax_type", "rotary_*", "rope_type"),
        *("window_size", "window_attn_skip_freq", "no_rope_freq", "mrope_section", "attention_output_gate"),
        *("multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim"),
        *("v_head_dim", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale*"),
        *("experimental_attention_variant", "dsa_*", "linear_*", "mamba_*", "is_hybrid_model"),
        *("use_mamba_mem_eff_path", "heterogeneous_block_specs", "hetereogenous_dist_checkpoint"),
        *("mtp_num_layers", "num_moe_experts", "moe_layer_freq", "moe_ffn_hidden_size", "moe_latent_size"),
        *("moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "moe_router_topk*"),
        *("moe_router_num_groups", "moe_router_group_topk", "moe_router_pre_softmax"),
        *("moe_router_score_function", "moe_router_enable_expert_bias", "moe_apply_probs_on_input"),
    ),
)
OF_WEIGHTS = Refusal(
    "weights are not initialized: all are read from the model",
    "leave it out",
    (
        *("init_method*", "output_layer_init_method", "embedding_init_method*", "perform_initialization"),
        *("use_cpu_initialization", "init_model_with_meta_device"),
    ),
)
OF_STAGES = Refusal(
    "reshard distributes the layers and loads each rank's weights itself",
    "leave it out; the layout is set with --tp, --pp, --vpp, --ep and --cp",
    (
        *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
        *("pipeline_model_parallel_layout", "account_for_*", "mtp_standalone"),
        *("hierarchical_context_parallel_sizes", "hybrid_context_parallel", "max_seqlen_per_dp_cp_rank"),
        *("pipeline_model_parallel_comm_backend", "num_distributed_optimizer_instances"),
        *("overlap_p2p_comm", "batch_p2p_comm", "use_ring_exchange_p2p", "variable_seq_lengths"),
    ),
)
OF_PRECISION = Refusal(
    "a run has one precision",
    "use --bf16, --fp16 or --fp32 instead",
    ("params_dtype", "pipeline_dtype", "enable_autocast", "autocast_dtype"),
)
OF_LOSS = Refusal(
    "the loss is the mean over all tokens that it covers, in any layout",
    "leave it out",
    ("calculate_per_token_loss", "average_in_collective"),
)
OF_STORAGE = Refusal(
    "weights would be in 8 bits or fewer in memory, and the final folder is compared with them bit by bit",
    "leave it out; --fp8 computes in 8 bits, and keeps weights in bfloat16",
    (
        *("fp8_param", "fp4_param", "fp8_param_gather", "reuse_grad_buf_for_mxfp8_param_ag"),
        "keep_fp8_transpose_cache",
    ),
)
OF_OPTIMIZER = Refusal(
    "checkpoints and memory estimates support Adam's states only",
    "leave it out; Adam's coefficients are --adam_beta1, --adam_beta2 and --adam_eps",
    ("optimizer", "sgd_momentum", "muon_*", "qk_clip*"),
)
OF_FSDP = Refusal(
    "Megatron's FSDP shards weights differently from the ranks that reshard loads",
    "use --engine trl --parallel fsdp2 instead, or --use_distributed_optimizer, which shards the optimizer's states",
    (
        *("use_megatron_fsdp", "use_custom_fsdp", "data_parallel_sharding_strategy"),
        *("outer_dp_sharding_strategy", "suggested_communication_unit_size", "preserve_fp32_weights"),
        *("nccl_ub", "fsdp_*", "disable_symmetric_registration", "gradient_reduce_div_fusion"),
    ),
)
OF_ROUTING = Refusal(
    "tokens would be routed to the wrong experts",
    "leave it out",
    ("moe_router_force_load_balancing", "moe_token_dropping", "moe_enable_routing_replay"),
)
OF_STACKING = Refusal(
    "experts would be in a different tensor from the one that is loaded",
    "use --moe_grouped_gemm instead",
    ("moe_use_legacy_grouped_gemm",),
)
OF_LOOP = Refusal(
    "only Megatron-LM's own training loop or inference uses it",
    "leave it out",
    (
        *("overlap_param_gather_with_optimizer_step", "enable_cuda_graph", "external_cuda_graph"),
        *("cuda_graph_*", "tp_comm_*", "barrier_with_L1_time", "log_num_zeros_in_grad", "test_mode"),
        *("log_max_attention_logit", "moe_per_layer_logging", "config_logger_dir", "flash_decode"),
        *("inference_*", "use_inference_optimized_layers", "mlp_chunks_for_prefill", "cache_mla_latents"),
        *("batch_invariant_mode", "symmetric_ar_type"),
    ),
)
REFUSED = (
    OF_MODEL,
    OF_WEIGHTS,
    OF_STAGES,
    OF_PRECISION,
    OF_LOSS,
    OF_STORAGE,
    OF_OPTIMIZER,
    OF_FSDP,
    OF_ROUTING,
    OF_STACKING,
    OF_LOOP,
)

TRANSFORMER_ENGINE_FIELDS = (
    *("fp8*", "fp4*", "first_last_layers_bf16", "num_layers_at_*", "tp_only_amax_red"),
    *("activation_func_fp8_input_store", "moe_router_padding_for_*", "use_kitchen*", "kitchen_*"),
    *("use_te_rng_tracker", "use_te_activation_func", "fused_single_qkv_rope", "memory_efficient_layer_norm"),
    *("moe_permute_fusion", "moe_router_fusion", "moe_enable_deepep", "moe_deepep_num_sms"),
    *("moe_hybridep_num_sms", "moe_flex_dispatcher_backend", "overlap_moe_expert_parallel_comm"),
    *("ep_overlap_early_attn_memory_release", "delay_wgrad_compute", "cp_comm_type", "cpu_offloading*"),
    *("fine_grained_activation_offloading", "offload_modules", "min_offloaded_tensor_size"),
    *("use_precision_aware_optimizer", "store_param_remainders", "main_grads_dtype", "main_params_dtype"),
    *("exp_avg_dtype", "exp_avg_sq_dtype", "disable_parameter_transpose_cache"),
)
"""Fields that only TransformerEngine's layers and optimizer use."""
GPU_FIELDS = (
    *("gradient_accumulation_fusion", "masked_softmax_fusion", "persist_layer_norm", "apply_rope_fusion"),
    *("moe_shared_expert_overlap", "defer_embedding_wgrad_compute", "wgrad_deferral_limit"),
    *("optimizer_cpu_offload", "optimizer_offload_fraction", "use_torch_optimizer_for_cpu_offload"),
    *("overlap_cpu_optimizer_d2h_h2d", "pin_cpu_*"),
)
"""Fields whose kernels and copies exist only on GPUs."""
TRANSFORMER_ENGINE_VALUES = {"moe_token_dispatcher_type": "flex", "cross_entropy_fusion_impl": "te"}
"""Values that need TransformerEngine, of fields that do not."""
SINKHORN = ("moe_router_load_balancing_type", "sinkhorn")
"""A value that selects another router than the model's."""
NEEDS_TRANSFORMER_ENGINE = Refusal("it needs TransformerEngine", "", TRANSFORMER_ENGINE_FIELDS)
NEEDS_GPU = Refusal("it needs a GPU", "leave it out", GPU_FIELDS)


def refusal_of(name: str) -> Refusal | None:
    """Why a field of megatron-core is never passed through; None if it is, or could be."""
    if name in SIZES_OF_MODEL:
        return Refusal("it has another name here", f"use {SIZES_OF_MODEL[name]} instead", (name,))
    found = next((each for each in REFUSED if each.takes(name)), None)
    field = all_fields().get(name)
    if found is None and field and not can_be_typed(field.hint):
        return Refusal("its value is a function or an object, which nobody can type", "leave it out", (name,))
    return found


def passes(name: str) -> bool:
    """Whether a field of megatron-core is passed through if TransformerEngine and GPUs are available."""
    return name in all_fields() and refusal_of(name) is None


def refused(name: str, value: Any) -> Problem | None:
    """The problem of a field that is refused regardless of other options."""
    found = refusal_of(name)
    if name == SINKHORN[0] and SINKHORN[1] in (value if isinstance(value, list) else [value]):
        found = OF_ROUTING
    return _problem(name, value, found) if found else None


def missing(given: Mapping[str, Any], *, local: bool) -> Iterator[Problem]:
    """Problems of fields that need something unavailable. `local` means that the layers are those of the local spec."""
    for name, value in given.items():
        engine = NEEDS_TRANSFORMER_ENGINE.takes(name) or TRANSFORMER_ENGINE_VALUES.get(name) == value
        if engine and find_spec("transformer_engine") is None:
            cure = "leave it out, or install TransformerEngine on a machine with GPUs"
            yield _problem(
                name, value, Refusal("it needs TransformerEngine, which is not installed", cure, ())
            )
        elif engine and local:
            cure = "leave out --transformer_impl local"
            yield _problem(name, value, Refusal("it needs TransformerEngine's layers", cure, ()))
        elif (engine or NEEDS_GPU.takes(name)) and not _has_gpu():
            yield _problem(name, value, NEEDS_GPU)


def _has_gpu() -> bool:
    from reshard.training.planning.gpu_models import has_gpu

    return has_gpu()


def _problem(name: str, value: Any, refusal: Refusal) -> Problem:
    return not_passed_on(name, value, refusal.why, refusal.cure)
