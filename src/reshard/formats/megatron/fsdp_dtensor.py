"""Checkpoints of Megatron-FSDP (`--use-megatron-fsdp --ckpt-format fsdp_dtensor`): how they are named and read.

An iteration folder that torch's DCP saves. Weights are those that the optimizer updates, in float32 by default:

    args, iteration, checkpoint_version                     objects; Megatron-Bridge saves no args
    model.module.<name>                                     weights
    optimizer.state.module.module.module.<name>.exp_avg     states
    optimizer.param_to_group_meta.module.module.module.<name>.lr      objects: the group of each parameter
    opt_param_scheduler.max_lr …                            objects

A name is that of the module, with global numbers of experts. `linear_fc1` of a SwiGLU is two tensors: the gate ends in
`_w`, the up half in `_v`. Ranks cut the elements of all parameters of a unit anywhere, but between rows. Sources:
`fsdp_dtensor_checkpoint.py` and `distributed/fsdp` of megatron-core 0.16.1, `training/checkpointing.py` of Megatron-LM.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from reshard.algebra.dtypes import BY_NAME
from reshard.algebra.layout import SavedLayout
from reshard.algebra.storage import StoredTensor
from reshard.base.errors import UNUSABLE, Problem, ReshardError, listed
from reshard.containers.dcp_metadata import DcpChunk, DcpMetadata, DcpTensor
from reshard.containers.torchfiles.read import ChunkReader, scalar
from reshard.containers.torchfiles.untrusted import number_of
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.detection import FSDP_DTENSOR
from reshard.formats.megatron.common_state import object_in, with_expert_before_module
from reshard.formats.megatron.mcore import BELOW, is_carried, is_gated, unfused
from reshard.formats.megatron.optimizer_states import MAX_VALUES, distributed_of
from reshard.formats.optimizer import Adam
from reshard.transfer.source_files import Sources

VARIANT = "fsdp_dtensor"
"""What Megatron-LM calls the format."""

WITHOUT_GROUPS = (
    "the optimizer states are left out: the checkpoint has no parameter groups that count their steps"
)

_WEIGHT = re.compile(r"model\.(?:module\.)+((?:language_model\.)?(?:embedding|decoder|mtp|output_layer)\..+)")
_OTHER = re.compile(r"model\.(?:module\.)+(.+)")
_STATE = re.compile(r"optimizer\.state\.(?:module\.)+(.+)\.(\w+)")
_GROUP = re.compile(r"optimizer\.param_to_group_meta\.(?:module\.)+(.+)\.(\w+)")
_SCHEDULE = "opt_param_scheduler."
_FLOAT32 = BY_NAME["float32"]


def is_fsdp_dtensor(metadata: DcpMetadata) -> bool:
    """Whether the names are Megatron-FSDP's: modules of one layer each, below its wrapper."""
    return any(_WEIGHT.fullmatch(key) for key in metadata.tensors)


def respelled(tensors: Mapping[str, DcpTensor]) -> dict[str, DcpTensor]:
    """The tensors under the keys that torch_dist has for them, if it does not stack layers.

    reshard names a tensor in all ways in which runs may spell it. Raises ReshardError if such names are of different
    tensors.
    """
    renamed: dict[str, DcpTensor] = {}
    clashes = []
    for key, tensor in tensors.items():
        first = renamed.setdefault(_respelled(key, tensor), tensor)
        if first.chunks != tensor.chunks:
            clashes.append(key)
    if clashes:
        raise ReshardError(
            "megatron-fsdp-names-clash",
            "two tensors of the checkpoint are the same parameter of the model",
            tensor=listed(clashes, 2),
            rule="a norm or an expert has one tensor, whichever layer spec names it",
            remedy="two runs were saved into this folder: take another iteration",
        )
    return renamed


def _respelled(key: str, tensor: DcpTensor) -> str:
    if state := _STATE.fullmatch(key):
        kind = state[2]
        if kind == "master_param" and tensor.dtype == _FLOAT32:
            kind = "param"  # of the optimizer that is aware of precisions
        return f"optimizer.state.{kind}.{_unfused_name(state[1])}"
    weight = _OTHER.fullmatch(key)
    return _unfused_name(weight[1]) if weight else key


def _unfused_name(name: str) -> str:
    within = name.removeprefix(BELOW)
    if is_carried(within):
        return name
    return name[: len(name) - len(within)] + with_expert_before_module(unfused(within))


def recognized(checkpoint: Checkpoint, tensors: Mapping[str, DcpTensor]) -> Checkpoint:
    """A checkpoint under its own format, with its problems and a note; `tensors` are the weights that it stores."""
    args, layout = checkpoint.description.args, checkpoint.layout
    return replace(
        checkpoint,
        format=FSDP_DTENSOR,
        problems=[
            *checkpoint.problems,
            *_delta_net_problem(tensors),
            *_alternation_problem(tensors, args, layout),
        ],
        notes=[*checkpoint.notes, *_notes(tensors, args)],
    )


def _delta_net_problem(tensors: Mapping[str, DcpTensor]) -> Iterator[Problem]:
    """A problem if a gated delta net has one tensor for its projections: mcore-bridge orders the rows otherwise."""
    if fused := [name for name in tensors if name.endswith(".self_attention.in_proj.weight")]:
        yield Problem(
            "megatron-fsdp-delta-net-fused",
            "the checkpoint stores the projections of a gated delta net in one tensor, which reshard does not divide",
            tensor=listed(fused, 2),
            expected="a tensor for each, as in_proj.weight.query",
            found="in_proj.weight",
            remedy="save it with Megatron-Bridge, which divides them, or train without Megatron-FSDP",
        )


def _alternation_problem(
    tensors: Mapping[str, DcpTensor], args: Mapping[str, Any], layout: SavedLayout
) -> Iterator[Problem]:
    """A problem if tensor-parallel ranks cut a tensor within its parts: the parts of all ranks then alternate."""
    fused = [
        name
        for name in tensors
        if (ranks := layout.etp if ".experts." in name else layout.tp) and ranks > 1 and _is_fused(name, args)
    ]
    if fused:
        yield Problem(
            "megatron-fsdp-parts-alternate",
            "the checkpoint stores fused tensors in an order that depends on its tensor-parallel ranks",
            tensor=listed(fused, 2),
            rule="Megatron-FSDP separates the halves of a SwiGLU alone, so that other fused tensors follow the ranks",
            found=f"TP {layout.tp}, ETP {layout.etp}",
            remedy="resume the run without tensor parallelism and save it, or save it with Megatron-Bridge",
        )


def _notes(tensors: Mapping[str, DcpTensor], args: Mapping[str, Any]) -> list[str]:
    """A note on which weights are read, if the model computed with others."""
    half = next((name for flag, name in (("bf16", "bfloat16"), ("fp16", "float16")) if args.get(flag)), None)
    if half is None or any(tensor.dtype.name == half for tensor in tensors.values()):
        return []
    return [f"the weights are the float32 masters: --dtype {half} gives those that the model computed with"]


def _is_fused(name: str, args: Mapping[str, Any]) -> bool:
    if is_carried(name.removeprefix(BELOW)) or name.startswith("optimizer."):
        return False
    if name.endswith((".linear_fc1.weight", ".linear_fc1.bias")):
        return is_gated(args)
    return name.endswith((".mixer.in_proj.weight", ".conv1d.weight", ".conv1d.bias"))


# ------------------------------------------------------------------------------------------- the optimizer


def read_optimizer(metadata: DcpMetadata, sources: Sources) -> Adam | None:
    """The step, the parameter groups and the schedule; None if the run saved no groups or no step.

    A group is stored with each of its parameters. Read are those of one parameter of each kind that Megatron-Core
    distinguishes: experts, vectors, embedding and head.
    """
    fields: dict[str, dict[str, DcpChunk]] = defaultdict(dict)
    for key, chunk in metadata.objects.items():
        if match := _GROUP.fullmatch(key):
            fields[match[1]][match[2]] = chunk
    try:
        groups: list[dict[str, Any]] = []
        for name in _one_of_each_kind(fields, metadata.tensors):
            group = {field: object_in(chunk, sources) for field, chunk in fields[name].items()}
            groups += [group] if group not in groups else []
        steps = groups[0]["step"] if "step" in groups[0] else _step(metadata.tensors, sources)
        steps = int(scalar(steps) if isinstance(steps, StoredTensor) else steps)
        schedule = {
            key.removeprefix(_SCHEDULE): object_in(chunk, sources)
            for key, chunk in metadata.objects.items()
            if key.startswith(_SCHEDULE)
        }
        optimizer = distributed_of(steps, groups, {"opt_param_scheduler": schedule} if schedule else {})
        return optimizer if number_of(optimizer.native, MAX_VALUES) <= MAX_VALUES else None
    except UNUSABLE:
        return None


def _one_of_each_kind(
    names: Mapping[str, Mapping[str, DcpChunk]], tensors: Mapping[str, DcpTensor]
) -> list[str]:
    """The first parameter of each kind."""
    vectors = set()
    for key, tensor in tensors.items():
        if (match := _STATE.fullmatch(key)) and match[2] == "exp_avg" and len(tensor.shape) < 2:
            vectors |= {match[1], match[1].removesuffix("_w").removesuffix("_v")}
    firsts: dict[tuple[bool, bool, bool], str] = {}
    for name in names:
        is_table = name.endswith(("word_embeddings.weight", "output_layer.weight"))
        firsts.setdefault((".experts." in name, name in vectors, is_table), name)
    return [*firsts.values()]


def _step(tensors: Mapping[str, DcpTensor], sources: Sources) -> float:
    """The step that torch's Adam counts for each parameter. It is zero if the rank that saved it has no part of one."""
    matches = ((_STATE.fullmatch(key), tensor) for key, tensor in tensors.items())
    steps = [tensor for match, tensor in matches if match and match[2] == "step"]
    reader = ChunkReader(sources)
    try:
        return max(
            scalar(reader.read(chunk.file, chunk.offset, chunk.length, tensor.dtype, chunk.sizes))
            for tensor in steps
            for chunk in tensor.chunks
        )
    finally:
        reader.close()
