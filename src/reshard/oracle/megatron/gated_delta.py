"""Gated delta nets: Megatron-Core's module, and a spec of it in local modules if TransformerEngine does not run.

Megatron-Core only has a spec of TransformerEngine's modules. The module computes the same in both.
"""

from __future__ import annotations

from typing import Any


def delta_block_spec(config: Any, stage: int | None, layer: Any, *, local: bool) -> Any:
    """The layers of this rank: Megatron-Core's own spec, with `local` modules if requested.

    `layer` is the spec of a layer with attention, whose modules the other layers use too.
    """
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs

    build = specs.get_transformer_block_with_experimental_attention_variant_spec
    if not local:
        return build(config, vp_stage=stage)
    from megatron.core.models.backends import LocalSpecProvider

    class Provider(LocalSpecProvider):  # type: ignore[misc]
        def column_parallel_layer_norm_linear(self) -> type:
            return self.column_parallel_linear()  # type: ignore[no-any-return]

    def attention(**_: Any) -> Any:
        layer.submodules.self_attention.metainfo["fuse_input_layernorm"] = False
        return layer.submodules.self_attention

    kept = specs._get_backend_spec_provider, specs._get_self_attention_module_spec
    try:
        specs._get_backend_spec_provider = lambda config: Provider()
        specs._get_self_attention_module_spec = attention
        block = build(config, vp_stage=stage)
    finally:
        specs._get_backend_spec_provider, specs._get_self_attention_module_spec = kept
    for each in block.layer_specs:  # the spec of delta nets assumes that a linear layer contains the norm
        each.submodules.input_layernorm = Provider().layer_norm(rms_norm=True)
    return block
