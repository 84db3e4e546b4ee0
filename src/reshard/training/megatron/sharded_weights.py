"""The weights of a Hugging Face folder as sharded over the ranks of a run; nothing here needs torch."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from isal.isal_zlib import crc32

from reshard import adapters
from reshard.adapters.to_megatron import linears
from reshard.algebra.layout import Layout
from reshard.algebra.tensors import Tensor
from reshard.base.errors import ReshardError
from reshard.engines.megatron.weight_shards import ShardedWeights, sharded, states_of
from reshard.families.family import ENGINES, MCORE
from reshard.families.sized_family import Model
from reshard.formats import open_checkpoint
from reshard.formats.megatron.mcore import padded_vocabulary
from reshard.formats.megatron.supported_layouts import check_layout
from reshard.formats.sharding import Shard
from reshard.model.described_checkpoint import describe
from reshard.model.logical_tensors import logical_tensors
from reshard.model.resolve import resolve
from reshard.planning.adapter_tensors import same_bytes
from reshard.training.megatron.options import MegatronOptions
from reshard.training.run import Run
from reshard.transfer.compare import unequal_replicas
from reshard.transfer.gather import Gatherer
from reshard.transfer.memory_budget import shared
from reshard.transfer.plan import Planned
from reshard.transfer.thread_files import OpenFiles

WINDOW_ELEMENTS = 4 << 20
"""Elements that are read at once for a checksum."""


def layout_of(run: Run, options: MegatronOptions, model: Model) -> Layout:
    """The layout of a run. Raises ReshardError if it does not divide the model, or if MCore cannot compute it."""
    if model.family.computed_by != MCORE:
        raise ReshardError(
            "train-megatron-lacks-family",
            f"megatron-core's GPTModel does not compute the family {model.family.name}",
            rule=f"the engine of this family is {ENGINES[model.family.computed_by]}",
            found="--engine megatron",
            remedy=f"train it with --engine trl; or `reshard convert {run.model} DST --to megatron`, and train it with "
            "that engine",
        )
    etp = (options.expert_tensor_parallel_size or run.layout.tp) if model.dims.experts else 1
    layout = replace(run.layout, etp=etp, cp=1).over(model.dims.layers)
    check_layout(model, layout)
    if model.dims.experts and layout.ep == 1 and etp != layout.tp:
        raise ReshardError(
            "experts-would-drift-apart",
            "experts replicated on every tensor-parallel rank would drift apart",
            rule="megatron-core sums the gradients of experts over tensor-parallel ranks only if --ep shards them",
            found=f"--tp {layout.tp}, --ep 1, expert_tensor_parallel_size {etp}",
            remedy=f"add --ep {layout.tp}, or leave out --expert_tensor_parallel_size",
        )
    return layout


def weights_of(
    folder: Path, run: Run, options: MegatronOptions, *, transformer_engine: bool, dtype: str | None
) -> ShardedWeights:
    """The weights in a Hugging Face folder. Raises ReshardError for everything that prevents their training."""
    checkpoint = open_checkpoint(folder)
    if checkpoint.problems:
        raise ReshardError(checkpoint.problems)
    resolved = resolve(describe(checkpoint))
    model, logical = resolved.declared, logical_tensors(resolved)
    if problems := unequal_replicas(logical.replicas, shared(2, 1 << 28)):
        raise ReshardError(problems)
    layout = layout_of(run, options, model)
    if not transformer_engine:
        _refuse_spread_latent_attention(model, layout)
    _refuse_unpackable(model, options, transformer_engine)
    rows = padded_vocabulary(model.dims.vocab, options.make_vocab_size_divisible_by, layout.tp)
    return sharded(model, logical, layout, rows, transformer_engine=transformer_engine, dtype=dtype)


def _refuse_spread_latent_attention(model: Model, layout: Layout) -> None:
    """Refuse latent attention with tensor parallelism in the local spec.

    In megatron-core 0.16.1 (`multi_latent_attention.py`), it shards `linear_kv_down_proj` and gathers its output, whose
    gradient then lacks what the heads of other ranks contribute to the rotary part of the key.
    """
    if layout.tp > 1 and model.dims.kv_lora:
        raise ReshardError(
            "latent-attention-tensor-parallel",
            "the local spec cannot train latent attention with tensor parallelism",
            rule="megatron-core's local spec loses a part of the gradient of linear_kv_down_proj",
            found=f"--tp {layout.tp}, {model.family.name}",
            remedy="use --pp and --ep instead of --tp, or install TransformerEngine",
        )


def _refuse_unpackable(model: Model, options: MegatronOptions, transformer_engine: bool) -> None:
    args = model.args
    windowed = bool(args.get("window_size")) and not transformer_engine
    if options.pack and (windowed or args.get("mtp_num_layers")):
        raise ReshardError(
            "packing-unsupported",
            "samples of this model cannot share a sequence",
            rule="the local spec's sliding window replaces the mask that separates the samples"
            if windowed
            else "a multi-token prediction layer would predict the next sample",
            found="--pack true",
            remedy="add --pack false",
        )


def adapters_of(folder: Path, base: ShardedWeights, *, transformer_engine: bool) -> ShardedWeights:
    """A PEFT adapter in a folder, sharded as on the ranks that train it on `base`."""
    checkpoint = open_checkpoint(folder)
    adapter = adapters.find(checkpoint)
    tensors = []
    for name, linear in linears(adapter, base.model.binding(), same_bytes).items():
        kind = next(iter(linear.pairs.values())).a.dtype
        for side, view in (("in", linear.linear_in), ("out", linear.linear_out)):
            compiled = partial(view, linear.rank)
            full = f"{name}.adapter.linear_{side}.weight"
            tensors.append(Planned(full, kind, compiled().shape, compiled))
    return replace(base, states=states_of(tensors, base.model, base.layout, transformer_engine))


def checksums(weights: ShardedWeights) -> dict[str, int]:
    """CRC32s of all shards of all ranks, read from the files of `weights`."""
    found: dict[str, int] = {}
    with closing(OpenFiles()) as files:
        gatherer = Gatherer(files, None)
        for at in weights.everywhere():
            for chunk in range(weights.layout.vpp):
                for name, held in weights.of(at, chunk).items():
                    if at.key(chunk, name) not in found:
                        found[at.key(chunk, name)] = _checksum(held, gatherer)
    return found


def _checksum(held: Shard, gatherer: Gatherer) -> int:
    tensor, value = Tensor(held.dtype, held.source()), 0
    for begin in range(0, held.numel, WINDOW_ELEMENTS):
        part = gatherer.read(tensor, begin, min(begin + WINDOW_ELEMENTS, held.numel))
        value = crc32(part.view(np.uint8).data, value)
    return int(value)
