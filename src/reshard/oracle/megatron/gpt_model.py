"""Build megatron-core's GPTModel from Megatron-LM's arguments, as Megatron-LM's own builder does.

Follows `core_transformer_config_from_args` and `gpt_builder` of Megatron-LM core_v0.16.1, without fused kernels: this
leaves the plain definition of the model, which runs anywhere.
One deviation: `rope_scaling_factor` reaches the model. Megatron-LM parses it but ignores it, so there a Llama 3.2
model (factor 32) is computed with factor 8.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

from reshard.algebra.layout import Layout
from reshard.base.errors import ReshardError
from reshard.oracle.megatron.gated_delta import delta_block_spec
from reshard.oracle.megatron.process_groups import supported
from reshard.oracle.megatron.stored_arguments import (
    complete,
    config_fields,
    decisive_fields,
    has_delta_nets,
    stage_sizes,
    yarn_attributes,
)

PLAIN = {
    "layernorm_zero_centered_gamma": False,  # which local norms do not have: see `centre_norms`
    "moe_grouped_gemm": False,  # its kernels need a GPU; the same weights compute the same one expert at a time
    "perform_initialization": False,  # the weights are loaded
    "transformer_impl": "local",
}
"""Fields of TransformerConfig for the plain definition of a model."""


def build_model(args: argparse.Namespace | Mapping[str, Any], layout: Layout, **settings: Any) -> list[Any]:
    """The GPTModel chunks of this rank, one per virtual pipeline stage, to be evaluated in float32.

    `args` uses Megatron-LM's names, as a checkpoint's `args` does; other names are ignored and missing ones have
    Megatron-LM's defaults. `settings` are fields of TransformerConfig that differ from `PLAIN` and from the arguments.
    Megatron's process groups must exist. Raises ReshardError if this megatron-core cannot build the model.
    """
    full = complete(args)
    config = build_config(full, layout, **settings)
    stages = range(layout.virtual) if layout.virtual else [None]
    return [_build_chunk(full, config, stage).eval() for stage in stages]


def build_config(args: SimpleNamespace, layout: Layout, **settings: Any) -> Any:
    """The TransformerConfig, or MLATransformerConfig for multi-latent attention."""
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    config_class = MLATransformerConfig if args.multi_latent_attention else TransformerConfig
    decisive = {**stage_sizes(args, layout), **decisive_fields(args)}
    _refuse_norm_of_inputs(args)
    if unknown := decisive.keys() - {field.name for field in fields(config_class)}:
        raise ReshardError(
            "megatron-core-cannot-build",
            "this version of megatron-core cannot build the model",
            found=f"no {', '.join(sorted(unknown))} in its {config_class.__name__}",
            remedy="pip install --no-deps -U megatron-core",
        )
    is_deterministic = has_delta_nets(args)  # megatron-core then computes them in plain torch
    if is_deterministic:  # the attention of Transformer Engine insists on it
        os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    chosen = {
        **config_fields(args, config_class),
        **decisive,
        **_parallel_fields(args, layout),
        **PLAIN,
        "deterministic_mode": is_deterministic,
        **settings,
    }
    config = config_class(**supported(config_class, **chosen))
    undeclared = {
        **yarn_attributes(args),
        "transformer_impl": chosen["transformer_impl"],
    }  # a field since 0.14
    for name, value in undeclared.items():
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
    import torch

    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.virtual,
        "expert_model_parallel_size": layout.ep if args.num_experts else 1,
        "expert_tensor_parallel_size": layout.etp,
        "context_parallel_size": layout.cp,
        "pipeline_dtype": torch.float32,
    }


def _build_chunk(args: SimpleNamespace, config: Any, stage: int | None) -> Any:
    from megatron.core import parallel_state
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt import GPTModel

    first, last = parallel_state.is_pipeline_first_stage, parallel_state.is_pipeline_last_stage
    block_spec = _block_spec(args, config, stage)
    model = GPTModel(
        **supported(
            GPTModel.__init__,
            config=config,
            transformer_layer_spec=block_spec,
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pre_process=first(**supported(first, ignore_virtual=False, vp_stage=stage)),
            post_process=last(**supported(last, ignore_virtual=False, vp_stage=stage)),
            parallel_output=True,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            rotary_percent=args.rotary_percent,
            rotary_base=args.rotary_base,
            rope_scaling=args.use_rope_scaling,
            rope_scaling_factor=args.rope_scaling_factor,
            seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
            mtp_block_spec=_mtp_spec(args, config, stage, block_spec),
            vp_stage=stage,
        )
    )
    model.model_type = ModelType.encoder_or_decoder
    return model


def centre_norms(chunks: list[Any], args: argparse.Namespace | Mapping[str, Any]) -> None:
    """Add the 1 of zero-centred norms to the weights that were loaded."""
    import torch

    if (
        not getattr(complete(args), "apply_layernorm_1p", False)
        or chunks[0].config.layernorm_zero_centered_gamma
    ):
        return
    for module in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(module, torch.nn.RMSNorm | torch.nn.LayerNorm):
            module.weight.data += 1


def is_local(config: Any) -> bool:
    """Whether the modules are megatron-core's own, and not those of TransformerEngine."""
    return bool(config.transformer_impl == "local")


def _block_spec(args: SimpleNamespace, config: Any, stage: int | None) -> Any:
    """One spec per layer for mixtures of experts and delta nets, otherwise one spec for all layers."""
    from megatron.core.models.gpt import gpt_layer_specs as specs

    if has_delta_nets(args):
        return delta_block_spec(config, stage, _layer_spec(args, config), local=is_local(config))
    if not args.num_experts:
        return _layer_spec(args, config)
    build = specs.get_gpt_decoder_block_spec
    options = supported(build, normalization=args.normalization, vp_stage=stage)
    return build(config, use_transformer_engine=not is_local(config), **options)


def _layer_spec(args: SimpleNamespace, config: Any) -> Any:
    from megatron.core.models.gpt import gpt_layer_specs as specs

    local, other = specs.get_gpt_layer_local_spec, specs.get_gpt_layer_with_transformer_engine_spec
    build = local if is_local(config) else other
    return build(
        **supported(
            build,
            num_experts=args.num_experts or None,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=args.qk_layernorm,
            multi_latent_attention=args.multi_latent_attention,
            normalization=args.normalization,
        )
    )


def _mtp_spec(args: SimpleNamespace, config: Any, stage: int | None, block_spec: Any) -> Any:
    """The spec of multi-token prediction layers, which repeats that of the last decoder layer."""
    if not args.mtp_num_layers:
        return None
    from megatron.core.models.gpt import gpt_layer_specs as specs

    layers = getattr(block_spec, "layer_specs", None)
    layer_spec = layers[-1] if layers else _layer_spec(args, config)
    build = specs.get_gpt_mtp_block_spec
    return build(
        config, layer_spec, use_transformer_engine=not is_local(config), **supported(build, vp_stage=stage)
    )
