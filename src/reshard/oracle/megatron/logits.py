"""Megatron-Core's own logits for given tokens, from a checkpoint loaded strictly in any layout."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reshard.algebra.layout import Layout
from reshard.base.errors import Problem, raise_all
from reshard.oracle.megatron import process_groups
from reshard.oracle.megatron.gpt_model import build_model, centre_norms
from reshard.oracle.megatron.load_weights import Mismatch, load_weights, refuse_unloadable
from reshard.oracle.megatron.ranks import run_ranks

BuildModel = Callable[..., list[Any]]
BatchTokens = npt.NDArray[np.integer[Any]]


class MegatronLogits(NamedTuple):
    """Logits, float32 [batch, sequence, padded vocabulary], and those of the multi-token prediction layers in order.

    `other` are the keys besides those of weights, such as extra states, that only the model or the checkpoint has.
    """

    logits: npt.NDArray[np.float32]
    mtp: tuple[npt.NDArray[np.float32], ...]
    other: tuple[str, ...] = ()


def megatron_logits(
    checkpoint: Path | str,
    tokens: BatchTokens,
    *,
    args: argparse.Namespace | Mapping[str, Any],
    layout: Layout | None = None,
    build: BuildModel = build_model,
    **settings: Any,
) -> MegatronLogits:
    """Run `tokens` [batch, sequence] through the checkpoint in the iteration folder `checkpoint`, in float32.

    torch_dist is loaded in `layout` (default: one rank); `mp_rank_*` in the layout that it was saved in, which
    must be passed as `layout`. `args` are Megatron-LM's, as the checkpoint stores them; `build` makes the model of a
    rank from them, the layout and the `settings`. Raises ReshardError if weights are missing or unexpected, or if the
    installed megatron-core cannot load the checkpoint; RankError if a rank fails.
    """
    folder = Path(checkpoint)
    refuse_unloadable(folder)
    layout = layout or Layout()
    ranks = run_ranks(layout.world_size, _rank_logits, folder, tokens, args, layout, build, settings)
    mismatch = Mismatch.union([each for each, _ in ranks])
    raise_all(_problems(mismatch, folder))
    *mtp, logits = next(outputs for _, outputs in ranks if outputs)
    return MegatronLogits(logits, tuple(mtp), mismatch.other)


def _problems(mismatch: Mismatch, folder: Path) -> list[Problem]:
    rule = "megatron-core's strict loading"
    missing = [
        Problem(
            "logits-megatron-weight-missing",
            "megatron-core lacks a weight",
            tensor=key,
            file=str(folder),
            rule=rule,
        )
        for key in mismatch.missing
    ]
    unexpected = [
        Problem(
            "logits-megatron-weight-unexpected",
            "megatron-core has no place for a weight",
            tensor=key,
            file=str(folder),
            rule=rule,
        )
        for key in mismatch.unexpected
    ]
    return missing + unexpected


def _rank_logits(
    folder: Path,
    tokens: BatchTokens,
    args: argparse.Namespace | Mapping[str, Any],
    layout: Layout,
    build: BuildModel,
    settings: Mapping[str, Any],
) -> tuple[Mismatch, list[npt.NDArray[np.float32]]]:
    """One rank's part: the last stage's first tensor and data parallel rank returns the logits."""
    import torch
    from megatron.core import parallel_state as ps

    process_groups.initialize(layout)
    chunks = build(args, layout, **settings)
    mismatch = load_weights(chunks, folder)
    everywhere: list[Mismatch] = [mismatch] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everywhere, mismatch)
    if any(each.missing or each.unexpected for each in everywhere):
        return mismatch, []
    centre_norms(chunks, args)
    outputs = forward_logits(chunks, torch.from_numpy(np.asarray(tokens, dtype=np.int64)), layout)
    first = ps.get_tensor_model_parallel_rank() == 0 and ps.get_data_parallel_rank() == 0
    return mismatch, [output.numpy() for output in outputs] if first else []


def forward_logits(chunks: list[Any], tokens: Any, layout: Layout) -> list[Any]:
    """The logits of each multi-token prediction layer and then of the model itself, each [batch, sequence, V].

    Collective; empty on ranks without the head. Every sequence is its own microbatch, because the interleaved
    pipeline schedule needs a multiple of the stages.
    """
    import torch
    from megatron.core.pipeline_parallel import get_forward_backward_func

    batch, length = tokens.shape
    microbatches = -(-batch // layout.pp) * layout.pp if layout.virtual else batch
    sequences = [tokens[min(index, batch - 1)].unsqueeze(0) for index in range(microbatches)]
    heads = [chunk.output_layer for chunk in chunks if chunk.post_process]
    collected: list[Any] = []
    hooks = [head.register_forward_hook(partial(_keep_output, collected)) for head in heads]
    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=[iter(sequences) for _ in chunks] if len(chunks) > 1 else iter(sequences),
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=microbatches,
            seq_length=length,
            micro_batch_size=1,
            decoder_seq_length=length,
            forward_only=True,
        )
    for hook in hooks:
        hook.remove()
    return _assemble(collected, microbatches, batch)


def _keep_output(collected: list[Any], module: Any, inputs: Any, output: Any) -> None:
    collected.append(output[0].detach().clone())  # the cross entropy turns the logits into softmax in place


def _forward_step(sequences: Any, model: Any) -> tuple[Any, Any]:
    """One microbatch. Only multi-token prediction uses the labels; it does not run without them."""
    import torch

    tokens = next(sequences)
    length = tokens.shape[1]
    positions = torch.arange(length).unsqueeze(0)
    mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]
    labels = tokens if model.config.mtp_num_layers else None
    return model(tokens, positions, mask, labels=labels), lambda output: (output.float().mean(), {})


def _assemble(collected: list[Any], microbatches: int, batch: int) -> list[Any]:
    """Join the vocabulary shards [sequence, 1, V/TP] of every call of the head into [batch, sequence, V]."""
    import torch
    from megatron.core import parallel_state as ps

    per_microbatch = len(collected) // microbatches
    outputs = []
    for head in range(per_microbatch):
        own = torch.cat(collected[head::per_microbatch][:batch], dim=1).float().contiguous()
        shards = [torch.empty_like(own) for _ in range(ps.get_tensor_model_parallel_world_size())]
        torch.distributed.all_gather(shards, own, group=ps.get_tensor_model_parallel_group())
        outputs.append(torch.cat(shards, dim=-1).transpose(0, 1).contiguous())
    return outputs
