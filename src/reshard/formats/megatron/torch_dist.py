"""Megatron-Core's torch_dist checkpoints: chunks of complete tensors, in files that torch's DCP metadata maps.

`<root>/latest_checkpointed_iteration.txt` names `iter_0000002` or `release`; that folder has `.metadata`,
`metadata.json`, `__<rank>_<n>.distcp` and, before megatron-core 0.19, `common.pt` (see `common_state.py`). torch_dcp,
which torch's DCP alone writes, is read as well. Source: megatron-core's dist_checkpointing 0.12 to 0.19.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from reshard.algebra.layout import Layout
from reshard.base.errors import Problem, ReshardError, cause_of, raise_all
from reshard.base.later_imports import imported_later
from reshard.containers.dcp_chunks import ChunkFile
from reshard.containers.dcp_metadata import (
    DcpMetadata,
    DcpTensor,
    chunk_spans,
    read_metadata,
    write_metadata,
)
from reshard.containers.torchfiles.write import image_bytes, layout_torch_file
from reshard.families.dims import layer_pattern
from reshard.folders import iterations
from reshard.folders.iterations import Iteration
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.detection import TORCH_DIST
from reshard.formats.megatron.common_state import is_torch_dcp
from reshard.formats.megatron.hybrid_layers import hybrid_layout, hybrid_place
from reshard.formats.megatron.mcore import (
    LINEARS_BESIDE,
    PARALLEL_LINEARS,
    STACKED_BESIDE,
    WRAPPED_BY,
    LayerSpelling,
    MegatronPosition,
    StageFinder,
    is_carried,
    is_gated,
    name_of,
    place_of,
    split_of,
    stored_args,
)
from reshard.formats.megatron.megatron_request import MegatronWriting
from reshard.formats.megatron.optimizer_states import NUMBERED_STATES, MegatronOptimizer, torch_file
from reshard.formats.megatron.rank_seeds import exchanged
from reshard.formats.sharding import shard_boxes
from reshard.transfer.plan import OutputFile, Planned
from reshard.transfer.source_files import Sources

with imported_later(__name__):
    from reshard.containers.torchfiles.read import ChunkReader
    from reshard.formats.copied_files import explained
    from reshard.formats.megatron import fsdp_dtensor
    from reshard.formats.megatron.common_state import ReadChunk, read_common, respelled
    from reshard.formats.megatron.stacked_keys import SavedIteration, checkpoint_of, not_a_weight, unprefixed


HEAD = "output_layer.weight"


def open_checkpoint(path: Path, sources: Sources, iteration: Iteration | None = None) -> Checkpoint:
    """Open the tracked (or the requested) iteration. Raises ReshardError naming all that is missing or damaged."""
    folder, step = iterations.choose(path, iteration)
    try:
        return _open(folder, sources, step)
    except ReshardError as error:
        raise ReshardError(explained(error.problems, folder.glob("*.distcp"))) from cause_of(error)


def _open(folder: Path, sources: Sources, step: Iteration | None) -> Checkpoint:
    metadata = read_metadata(folder / ".metadata", sources)
    stored, variant = _respelled_tensors(metadata)
    saved = SavedIteration(
        TORCH_DIST,
        stored,
        metadata.objects,
        read_common(folder, sources, metadata),
        partial(_reading, sources),
        partial(exchanged, metadata.objects, sources),
        variant,
    )
    if variant == "torch_dcp":
        saved = replace(saved, left_out=NUMBERED_STATES)
    elif variant == fsdp_dtensor.VARIANT:
        read = partial(fsdp_dtensor.read_optimizer, metadata, sources)
        saved = replace(saved, left_out=fsdp_dtensor.WITHOUT_GROUPS, optimizer=lambda _: read())
        weights = {key: tensor for key, tensor in stored.items() if not not_a_weight(key)}
        return fsdp_dtensor.recognized(checkpoint_of(folder, step, saved, sources), weights)
    return checkpoint_of(folder, step, saved, sources)


def _respelled_tensors(metadata: DcpMetadata) -> tuple[dict[str, DcpTensor], str]:
    """The tensors under torch_dist's own keys, and the variant of the format if it has others."""
    if not is_torch_dcp(metadata.objects):
        return unprefixed(metadata.tensors), ""
    if fsdp_dtensor.is_fsdp_dtensor(metadata):
        return fsdp_dtensor.respelled(metadata.tensors), fsdp_dtensor.VARIANT
    return respelled(metadata.tensors), "torch_dcp"


@contextmanager
def _reading(sources: Sources, stored: Mapping[str, DcpTensor]) -> Iterator[ReadChunk]:
    """Each chunk is a file of torch.save inside a `.distcp` file."""
    chunks = ChunkReader(sources, chunk_spans(stored.values()))
    try:
        yield lambda tensor, chunk: chunks.read(
            chunk.file, chunk.offset, chunk.length, tensor.dtype, chunk.sizes
        )
    finally:
        chunks.close()


# ---------------------------------------------------------------------------------------------- writing


EXTRA_STATE = image_bytes(layout_torch_file([None]))
"""The extra state of a parallel linear without fp8 state; loading it is a no-op."""


class _TorchDistWriter:
    """Assigns the chunks of every tensor to ranks, like megatron-core."""

    def __init__(
        self,
        layout: Layout,
        layers: int,
        experts: int,
        spelling: LayerSpelling,
        stacked: bool,
        below: str,
        gated: bool,
        places: Mapping[str, MegatronPosition],
    ) -> None:
        self.layout, self.gated, self.places = layout, gated, places
        self.below = below
        self.layers, self.experts = layers, experts
        self.spelling, self.stacked = spelling, stacked
        self.having: dict[str, dict[int, int]] = {}
        for place in sorted(places.values(), key=lambda place: place.layer or 0):
            if place.stack == "decoder" and place.layer is not None:
                layers_with = self.having.setdefault(place.part, {})
                layers_with.setdefault(place.layer, len(layers_with))
        self.metadata = DcpMetadata({}, {})
        self.stages = StageFinder(layout, layers)
        self.table = self.stages.table()
        self.files: dict[int, ChunkFile] = {}
        self.problems: list[Problem] = []

    def add(self, tensor: Planned, name: str, prefix: str = "") -> None:
        """Cut one tensor, a weight or a state of the weight `name`, into the chunks of all ranks that store it."""
        place = self.places.get(name) or place_of(name)
        split = split_of(name, self.gated)
        ranks = self.layout.tp if place.expert is None else self.layout.etp
        key, lead, at = self._key(place)
        key = prefix + key
        entry = self.metadata.tensors.setdefault(key, DcpTensor(tensor.dtype, (*lead, *tensor.shape), []))
        if entry.dtype != tensor.dtype:
            self.problems.append(
                Problem(
                    "stacked-layers-dtypes-differ",
                    "Megatron stacks these layers into one tensor, but they have different dtypes",
                    tensor=tensor.name,
                    rule=f"{key} has one dtype",
                    expected=str(entry.dtype),
                    found=str(tensor.dtype),
                    remedy="choose one for all: --dtype bfloat16",
                )
            )
        for rank in range(ranks if split else 1):
            file = self._file(place, rank)
            for low, size in shard_boxes(tensor.shape, split, rank, ranks):
                entry.chunks.append(file.add(tensor, low, size, at))

    def add_extra_state(self, place: MegatronPosition, layers: int = 1) -> None:
        """Add the object that the module at `place` saves with its weight, which may itself stack `layers`."""
        key, lead, at = self._key(place._replace(module=f"{place.module}._extra_state"))
        if lead:
            shards = [f"{'.'.join(map(str, at))}_{'.'.join(map(str, lead))}"]
        else:
            shards = [f"{layer}_{layers}" for layer in range(layers)]
        file = self._file(place, 0)
        for shard in shards:
            self.metadata.objects[f"{key}/shard_{shard}"] = file.append(EXTRA_STATE)

    def refuse_gaps(self) -> None:
        """Record a problem for each key that stacks layers or experts of which some have no state."""
        for key, tensor in self.metadata.tensors.items():
            elements = sum(prod(chunk.sizes) for chunk in tensor.chunks)
            if elements < prod(tensor.shape):
                self.problems.append(
                    Problem(
                        "optimizer-state-missing-for-layers",
                        "some layers have an optimizer state, others do not",
                        tensor=key,
                        rule="Megatron stacks the states of all layers into one tensor",
                        expected=f"{prod(tensor.shape)} elements of {list(tensor.shape)}",
                        found=f"{elements} elements",
                        remedy="remove --with-optimizer: Megatron cannot store the states of only some layers",
                    )
                )

    def _key(self, place: MegatronPosition) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """The key of a tensor, the leading axes that it stacks, and its index on them."""
        module = place.module if place.layer is None else self.spelling.module(place.module, place[1:3])
        lead: tuple[int, ...] = ()
        at: tuple[int, ...] = ()
        if place.layer is None:
            return module if is_carried(module) else self.below + module, lead, at
        prefix = f"{self.below}{place.stack}.layers."
        if self.stacked and place.stack == "decoder":
            layers = self.having[place.part]
            lead, at = (len(layers),), (layers[place.layer],)
        else:
            prefix += f"{place.layer}."
        if place.expert is not None:
            module = module.replace("mlp.experts.", "mlp.experts.experts.", 1)
            lead, at = (*lead, self.experts), (*at, place.expert)
        return prefix + module, lead, at

    def _file(self, place: MegatronPosition, rank: int) -> ChunkFile:
        if place.stack == "decoder" and place.layer is not None:
            stage = self.table[place.layer][0]
        else:
            first = place.module.startswith("embedding.") or is_carried(name_of(place))
            stage = 0 if first else self.stages.last[0]
        if place.expert is None:
            number = self.layout.dense_rank(stage, rank)
        else:
            ep = place.expert * self.layout.ep // self.experts
            number = self.layout.expert_rank(stage, ep, rank)
        if number not in self.files:
            self.files[number] = ChunkFile(f"__{number}_0.distcp")
        return self.files[number]


class TorchDistWriting(MegatronWriting):
    """One iteration in torch_dist, and the tracker that names it."""

    stores_hybrid = True

    def files(self) -> list[OutputFile]:
        """The files of one iteration and the tracker that names it."""
        tensors, layout = self.request.tensors, self.request.layout
        args, iteration = self.arguments, self.iteration
        transformer_engine, optimizer = args["transformer_impl"] != "local", self.optimizer
        places = {tensor.name: place_of(tensor.name) for tensor in tensors}
        if self.hybrid:
            places = {name: hybrid_place(place) for name, place in places.items()}
            layout = hybrid_layout(layout)
        hybrid = bool(layer_pattern(args))
        # Megatron-Core stacks layers only if they are all of one kind.
        kinds = ("moe_layer_freq", "linear_attention_freq")
        uniform = not hybrid and all(args.get(kind) in (None, 1) for kind in kinds)
        stacked = uniform and not args.get("use_double_wide_mlp")
        writer = _TorchDistWriter(
            layout,
            int(args["num_layers"]),
            int(args.get("num_experts") or 0),
            LayerSpelling(places.values(), transformer_engine=transformer_engine, torch_dist=True),
            stacked,
            self.prefix,
            is_gated(args),
            places,
        )
        for tensor in tensors:
            place = places[tensor.name]
            writer.add(tensor, tensor.name)
            for module in _with_extra_state(place, writer.spelling, hybrid):
                layers = tensor.shape[0] if module.startswith(STACKED_BESIDE) else 1
                writer.add_extra_state(place._replace(module=module), layers)
        if hybrid and HEAD not in places:  # a head that is the embedding has this state, too
            writer.add_extra_state(MegatronPosition(HEAD.removesuffix(".weight")))
        for prefix, states in optimizer.keyed().items() if optimizer else ():
            for name, state in states.items():
                writer.add(state, name, prefix)
        if optimizer:
            writer.refuse_gaps()
        raise_all(writer.problems)
        stacks = stacked or any(place.module.startswith(STACKED_BESIDE) for place in places.values())
        folder = iterations.name_of(iteration)
        files = [file.finished(folder) for _, file in sorted(writer.files.items())]
        metadata = {
            "sharded_backend": "torch_dist",
            "sharded_backend_version": 1,
            "common_backend": "torch",
            "common_backend_version": 1,
        }
        return [
            *files,
            OutputFile.of_bytes(f"{folder}/.metadata", write_metadata(writer.metadata)),
            OutputFile.of_bytes(f"{folder}/metadata.json", json.dumps(metadata).encode()),
            torch_file(f"{folder}/common.pt", _common_content(args, layout, iteration, optimizer, stacks)),
            OutputFile.of_bytes(iterations.TRACKER, str(iteration).encode()),
            *([] if self.request.adapter is None else [self.run_config(self.request.adapter)]),
        ]


def _common_content(
    args: Mapping[str, Any],
    layout: Layout,
    iteration: Iteration,
    optimizer: MegatronOptimizer | None,
    stacks: bool,
) -> dict[str, Any]:
    """The content of `common.pt`: all data that do not belong to a tensor. Keys of layers or of a tower may `stack`."""
    stored = stored_args(args, layout, "torch_dist")
    content = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if not stacks:  # a reader whose config would stack the layers then looks for one key per layer too
        content["non_homogeneous_layers"] = True
    if optimizer:
        stored["no_save_optim"] = False
        content |= optimizer.content_metadata
    return {
        "args": Namespace(**stored),
        "checkpoint_version": 3.0,
        "iteration": 0 if iteration == "release" else iteration,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": content,
        **(optimizer.common if optimizer else {}),
    }


def _with_extra_state(place: MegatronPosition, spelling: LayerSpelling, hybrid: bool) -> Iterator[str]:
    """The modules whose extra state is saved with the tensor at `place`: parallel linears of layers.

    A `hybrid` model also saves that of its head.

    Transformer Engine's attention has one too. Since 0.13 the decoder does not save it unless its softmax has a
    learnable offset; MTP layers of GPTModel do. Sparse attention with an indexer is Megatron-Core's own, and has none,
    but that of mcore-bridge has it inside.
    """
    module, _, kind = place.module.removesuffix(".query").rpartition(".")
    if is_carried(name_of(place)):
        yield from [module] if kind == "weight" and LINEARS_BESIDE.fullmatch(module) else []
        return
    if module == "mixer.in_proj" or (kind == "weight" and module.rpartition(".")[2] in PARALLEL_LINEARS):
        yield module
        dense = spelling.transformer_engine and not spelling.indexed and not hybrid
        if dense and place.stack == "mtp" and module.endswith(".linear_proj"):
            yield module.replace("linear_proj", "core_attention")
        if module.endswith(WRAPPED_BY):
            yield module.replace("indexer.index_qk_proj", "core_attention.core_attention")
    if (kind == "softmax_offset" and spelling.transformer_engine) or (hybrid and place.module == HEAD):
        yield module
