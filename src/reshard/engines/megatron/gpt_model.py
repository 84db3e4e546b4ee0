"""Build megatron-core's GPTModel from Megatron-LM's arguments, as Megatron-LM's own builder does.

Follows `core_transformer_config_from_args` and `gpt_builder` of Megatron-LM core_v0.16.1, with all fused kernels and
dropout off: this leaves the plain definition of the model, which runs anywhere.
One deviation: `rope_scaling_factor` reaches the model. Megatron-LM parses it but ignores it, so there a Llama 3.2
model (factor 32) is computed with factor 8.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, Literal

from reshard.algebra.layout import Layout
from reshard.base.errors import ReshardError
from reshard.engines.megatron.gated_delta import delta_block_spec, delta_fields, has_delta_nets
from reshard.engines.megatron.process_groups import supported
from reshard.engines.megatron.stored_arguments import complete, config_fields, stage_sizes, yarn_attributes

LayerSpec = Literal["local", "te"]


def build_model(
    args: argparse.Namespace | Mapping[str, Any],
    layout: Layout,
    *,
    spec: LayerSpec = "local",
    dtype: Any = None,
    training: bool = False,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> list[Any]:
    """The GPTModel chunks of this rank, one per virtual pipeline stage.

    `args` uses Megatron-LM's names, as a checkpoint's `args` does; other names are ignored and missing ones have
    Megatron-LM's defaults. `spec="te"` needs TransformerEngine. `dtype` is a torch dtype, default float32.
    `settings` are fields of TransformerConfig for speed and training, by their own names.
    Megatron's process groups must exist (`parallel.initialize`).
    """
    full = complete(args)
    config = build_config(full, layout, spec=spec, dtype=dtype, training=training, settings=settings)
    chunks = [_build_chunk(full, config, spec, stage) for stage in _virtual_stages(layout)]
    for chunk in chunks:
        chunk.train(training)
    return chunks


def build_config(
    args: SimpleNamespace,
    layout: Layout,
    *,
    spec: LayerSpec,
    dtype: Any,
    training: bool,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """The TransformerConfig, or MLATransformerConfig for multi-latent attention."""
    import torch
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    config_class = MLATransformerConfig if args.multi_latent_attention else TransformerConfig
    dtype = dtype or torch.float32
    # Only training with experts and TP > 1 requires sequence parallelism; without it, any length works.
    sequence_parallel = training and layout.tp > 1 and args.num_experts is not None
    decisive = stage_sizes(args, layout)
    if getattr(args, "moe_shared_expert_gate", False):
        decisive["moe_shared_expert_gate"] = True  # from 0.16 on; before, a custom spec had it
    if getattr(args, "no_rope_freq", None):
        decisive["no_rope_freq"] = args.no_rope_freq  # from 0.13 on
    if has_delta_nets(args):
        decisive |= delta_fields(args)  # from 0.16 on
    _refuse_norm_of_inputs(args)
    if unknown := decisive.keys() - supported(config_class, **decisive):
        raise ReshardError(
            "megatron-core-cannot-build",
            "this version of megatron-core cannot build the model",
            found=f"no {', '.join(sorted(unknown))} in its {config_class.__name__}",
            remedy="pip install --no-deps -U megatron-core",
        )
    fields = {
        **config_fields(args, config_class),
        **decisive,
        **_parallel_fields(args, layout),
        **_plain_fields(),
        "sequence_parallel": sequence_parallel,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "transformer_impl": "transformer_engine" if spec == "te" else "local",
        **settings,
    }
    config = config_class(**supported(config_class, **fields))
    for name, value in yarn_attributes(args).items():
        setattr(config, name, value)
    return config


def _refuse_norm_of_inputs(args: SimpleNamespace) -> None:
    """Refuse latent attention without compressed queries, whose inputs megatron-core 0.19 normalizes once more."""
    normalizes = importlib.util.find_spec("megatron.core.transformer.mla_qk_norm_config")
    if args.multi_latent_attention and args.q_lora_rank is None and args.qk_layernorm and normalizes:
        raise ReshardError(
            "megatron-core-cannot-build",
            "this version of megatron-core cannot build the model",
            found="latent attention with a norm before linear_q_proj, which the model does not have",
            remedy="pip install --no-deps megatron-core==0.18.2",
        )


def _parallel_fields(args: SimpleNamespace, layout: Layout) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.virtual,
        "expert_model_parallel_size": layout.ep if args.num_experts else 1,
        "expert_tensor_parallel_size": layout.etp,
        "context_parallel_size": layout.cp,
        "moe_token_dispatcher_type": "alltoall",
        # With batched sends and receives, interleaved stages would mistake gradients for activations.
        "overlap_p2p_comm": layout.virtual is not None,
        "batch_p2p_comm": layout.virtual is None,
    }


def _plain_fields() -> dict[str, Any]:
    """No dropout, no fused kernels, parameters drawn on the CPU (so a seed gives the same model in any layout)."""
    off = (
        "apply_rope_fusion",
        "bias_activation_fusion",
        "bias_dropout_fusion",
        "gradient_accumulation_fusion",
        "masked_softmax_fusion",
        "moe_permute_fusion",
        "moe_router_fusion",
        "persist_layer_norm",
    )
    return {
        **dict.fromkeys(off, False),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
    }


def _virtual_stages(layout: Layout) -> list[int | None]:
    return list(range(layout.virtual)) if layout.virtual else [None]


def _build_chunk(args: SimpleNamespace, config: Any, spec: LayerSpec, stage: int | None) -> Any:
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt import GPTModel

    first, last = _select_stage(GPTModel, stage)
    block_spec = _block_spec(args, config, spec, stage)
    model = GPTModel(
        **supported(
            GPTModel.__init__,
            config=config,
            transformer_layer_spec=block_spec,
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pre_process=first,
            post_process=last,
            parallel_output=True,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            rotary_percent=args.rotary_percent,
            rotary_base=args.rotary_base,
            rope_scaling=args.use_rope_scaling,
            rope_scaling_factor=args.rope_scaling_factor,
            seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
            mtp_block_spec=_mtp_spec(args, config, spec, stage, block_spec),
            vp_stage=stage,
        )
    )
    model.model_type = ModelType.encoder_or_decoder
    return model


def _select_stage(gpt_model: type, stage: int | None) -> tuple[bool, bool]:
    """Whether this chunk has the embedding and whether it has the head.

    Until 0.12 the virtual stage is global state; from 0.13 on it is an argument.
    """
    from megatron.core import parallel_state

    if "vp_stage" not in supported(gpt_model.__init__, vp_stage=stage):  # type: ignore[misc]
        if stage is not None:
            parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
        return parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    first, last = parallel_state.is_pipeline_first_stage, parallel_state.is_pipeline_last_stage
    return (
        first(**supported(first, ignore_virtual=False, vp_stage=stage)),
        last(**supported(last, ignore_virtual=False, vp_stage=stage)),
    )


def _block_spec(args: SimpleNamespace, config: Any, spec: LayerSpec, stage: int | None) -> Any:
    """One spec per layer for mixtures of experts and delta nets, otherwise one spec for all layers."""
    if has_delta_nets(args):
        return delta_block_spec(
            config, stage, _layer_spec(args, spec, args.num_experts), local=spec == "local"
        )
    from megatron.core.models.gpt import gpt_layer_specs as specs

    if args.num_experts:
        build = specs.get_gpt_decoder_block_spec
        return build(
            config,
            **supported(
                build, use_transformer_engine=spec == "te", normalization=args.normalization, vp_stage=stage
            ),
        )
    return _layer_spec(args, spec, num_experts=None)


def _layer_spec(args: SimpleNamespace, spec: LayerSpec, num_experts: int | None) -> Any:
    from megatron.core.models.gpt import gpt_layer_specs as specs

    build = (
        specs.get_gpt_layer_with_transformer_engine_spec if spec == "te" else specs.get_gpt_layer_local_spec
    )
    return build(
        **supported(
            build,
            num_experts=num_experts,
            moe_grouped_gemm=args.moe_grouped_gemm,
            qk_layernorm=args.qk_layernorm,
            multi_latent_attention=args.multi_latent_attention,
            normalization=args.normalization,
        )
    )


def _mtp_spec(args: SimpleNamespace, config: Any, spec: LayerSpec, stage: int | None, block_spec: Any) -> Any:
    """The spec of multi-token prediction layers, which repeats that of the last decoder layer."""
    if not args.mtp_num_layers:
        return None
    from megatron.core.models.gpt import gpt_layer_specs as specs

    if layers := getattr(block_spec, "layer_specs", None):
        layer_spec = layers[-1]
    else:
        layer_spec = _layer_spec(args, spec, num_experts=args.num_experts)
    build = specs.get_gpt_mtp_block_spec
    return build(config, layer_spec, **supported(build, use_transformer_engine=spec == "te", vp_stage=stage))
