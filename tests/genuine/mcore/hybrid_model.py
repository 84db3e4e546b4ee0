"""megatron-core's HybridModel, whose layers are attention or an MLP alone, in the order of a pattern.

It has only a spec of TransformerEngine's modules: see `tests.genuine.fake_te`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from reshard.algebra.layout import Layout
from reshard.oracle.megatron.gpt_model import build_config
from reshard.oracle.megatron.process_groups import supported
from reshard.oracle.megatron.stored_arguments import complete


def build_model(args: dict[str, Any], layout: Layout, **settings: Any) -> list[Any]:
    """The chunks of this rank, one for each virtual pipeline stage, as `hybrid_builder` of Megatron-LM 0.19 does."""
    full = complete(args)
    config = build_config(full, layout, **settings)
    stages = range(layout.virtual) if layout.virtual else [None]
    return [_build_chunk(full, args["hybrid_layer_pattern"], config, stage).eval() for stage in stages]


@contextmanager
def loading_gpt(pattern: str) -> Iterator[None]:
    """Let `load_weights` load an iteration of a GPTModel as `--load` of Megatron-LM 0.19 does."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.gpt_checkpoint_interop import (
        gpt_compatible_layer_maps,
        retarget_sharded_state_dict_to_gpt_checkpoint,
    )

    load = dist_checkpointing.load

    def load_retargeted(wanted: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        retarget_sharded_state_dict_to_gpt_checkpoint(wanted, gpt_compatible_layer_maps(pattern))
        return load(wanted, *args, **kwargs)

    dist_checkpointing.load = load_retargeted
    try:
        yield
    finally:
        dist_checkpointing.load = load


def _build_chunk(args: SimpleNamespace, pattern: str, config: Any, stage: int | None) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    first, last = parallel_state.is_pipeline_first_stage, parallel_state.is_pipeline_last_stage
    return HybridModel(
        config=config,
        hybrid_stack_spec=hybrid_stack_spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        hybrid_layer_pattern=pattern,
        pre_process=first(**supported(first, ignore_virtual=False, vp_stage=stage)),
        post_process=last(**supported(last, ignore_virtual=False, vp_stage=stage)),
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        vp_stage=stage,
    )
