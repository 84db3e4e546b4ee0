"""The weights of ZeRO 0, 1, 2 and 3: complete tensors as views over the flat partitions of the ranks.

- ZeRO 1 and 2: each group of parameters is one vector, the parameters concatenated in the order of `param_shapes`;
  every rank has an equal part of it, and the last one may be padded.
- ZeRO 3: every rank has `ceil(numel / ranks)` elements of each parameter, one parameter after another; frozen
  parameters likewise, but each in a separate tensor.

Sources: `utils/zero_to_fp32.py`, `runtime/zero/stage_1_and_2.py` and `stage3.py` of deepspeed 0.19.8.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, TypeGuard

from reshard.algebra.dtypes import castable
from reshard.algebra.split_vectors import SplitVector
from reshard.algebra.storage import StoredTensor
from reshard.algebra.tensors import Replica, Tensor
from reshard.algebra.views import Piece, View
from reshard.base.errors import Problem, ReshardError, raise_all
from reshard.containers.torchfiles.untrusted import stored_in, values_of
from reshard.formats.deepspeed.step_files import (
    COPY_AGAIN,
    UNIVERSAL_FIRST,
    LoadedFile,
    StepFiles,
    zero_config,
)
from reshard.formats.optimizer import (
    MASTER_STATE,
    MOMENTS,
    OPTIMIZER_STATES,
    Adam,
    OptimizerContents,
    OptimizerStates,
    settings_of,
)

MASTER_COPIES = "copies of fp32 masters"
ROUNDED = "the module's weights equal the rounded fp32 masters"
OUT_OF_STEP = (
    "the file names do not match their ranks or steps, or a file is damaged: copy the step again; or "
    "move the optim_states files elsewhere to convert the module's weights without the masters"
)

Shapes = Mapping[str, tuple[int, ...]]


@dataclass
class StepContent:
    """The content of a step: its tensors, and data about them."""

    tensors: dict[str, Tensor]
    optimizer: OptimizerContents = field(default_factory=OptimizerContents)
    replicas: list[Replica] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    variant: str = ""


def read_weights(files: StepFiles) -> StepContent:
    """The weights of a step. Raises ReshardError naming all that is missing or does not add up."""
    module = _module(files)
    if not files.optimizers:
        return _from_module(files, module)
    gather = _gather_zero3 if files.stage == 3 else _gather_groups
    masters = gather(files, MASTER_STATE)
    frozen = frozen_weights(files) if files.stage == 3 else {}
    tensors = {**module, **frozen, **masters}
    share(tensors, files.model)
    _refuse_empty(files, tensors)
    kinds = [kind for kind in MOMENTS if all(_partitions(file, kind) for file in files.optimizers.values())]
    adam = adam_of(files.optimizers[min(files.optimizers)], files.model) if kinds else None
    return StepContent(
        tensors,
        OptimizerContents(OptimizerStates(kinds, partial(gather, files)), adam),
        roundings(module, masters, files.model),
        _left_behind(files, module, masters),
        master_notes(module, masters),
        f"ZeRO {files.stage}, {files.ranks} ranks",
    )


def _module(files: StepFiles) -> dict[str, Tensor]:
    """The tensors of the module, including experts; under ZeRO 3 its parameters are empty."""
    module = files.model.content.get("module")
    if not isinstance(module, Mapping):
        raise ReshardError(
            "zero-without-module",
            "the model states contain no module",
            file=str(files.model.path),
            expected="module, a state dict",
            found=type(module).__name__,
            remedy="save with the engine's save_checkpoint()",
        )
    if files.model.content.get("ds_autoep_layers"):
        raise ReshardError(
            "deepspeed-autoep-unsupported",
            "checkpoints with AutoEP, which replaces the model's experts with its own, are not supported",
            file=str(files.model.path),
            remedy=UNIVERSAL_FIRST,
        )
    tensors = dict(module)
    for file in files.experts:
        tensors.update(file.content)
    return {
        str(name): Tensor.stored(item) for name, item in tensors.items() if isinstance(item, StoredTensor)
    }


def _from_module(files: StepFiles, module: dict[str, Tensor]) -> StepContent:
    """The weights in the module, for a step without files of optimizer states."""
    share(module, files.model)
    _refuse_empty(files, module)
    optimizer = sum(stored.nbytes for stored in stored_in(files.model.content.get("optimizer")))
    notes = []
    if files.stage:
        notes.append("the fp32 masters (optim_states files) are missing: the weights are the module's")
    elif (name := main_dtype(module)) != "float32":
        notes.append(
            "ZeRO 0 does not record which parameters its fp32 masters belong to: "
            f"the weights are the module's, in {name}"
        )
    return StepContent(
        module,
        dropped=+Counter({OPTIMIZER_STATES: optimizer}),
        notes=notes,
        variant=f"ZeRO {files.stage}",
    )


def roundings(
    module: Mapping[str, Tensor],
    masters: Mapping[str, Tensor],
    model: LoadedFile,
    code: str = "zero-masters-differ",
    remedy: str = OUT_OF_STEP,
) -> list[Replica]:
    """The module's copies of the masters, to compare: every step rounds the masters into it, except skipped steps.

    This detects swapped partitions of ranks, and those of another step. ZenFlow updates masters while the model
    continues, so its module lags behind, and is not compared.
    """
    if zero_config(model).get("zenflow"):
        return []
    return [
        Replica(name, module[name], Tensor(module[name].dtype, master.view), ROUNDED, remedy, code)
        for name, master in masters.items()
        if name in module
        and module[name].view.numel
        and castable(module[name].dtype)
        and castable(master.dtype)
    ]


def main_dtype(tensors: Mapping[str, Tensor]) -> str:
    """The dtype of most elements."""
    counted: Counter[str] = Counter()
    for tensor in tensors.values():
        counted[tensor.dtype.name] += 1 + tensor.view.numel
    return counted.most_common(1)[0][0] if counted else "float32"


def master_notes(module: Mapping[str, Tensor], masters: Mapping[str, Tensor]) -> list[str]:
    """A note on which weights are read, if module and masters differ."""
    trained = main_dtype({name: tensor for name, tensor in module.items() if name in masters} or module)
    if trained == "float32":
        return []
    return [
        f"the weights are the fp32 masters of training in {trained}; "
        f"--dtype {trained} gives the rounded weights that the model computed with"
    ]


def adam_of(file: LoadedFile, model: LoadedFile) -> Adam:
    """Adam's step count, and the settings of the first parameter group."""
    groups = next(values_of(file.content, "param_groups"), None)
    first = groups[0] if isinstance(groups, list) and groups else {}
    steps, skipped = (model.content.get(key) for key in ("global_steps", "skipped_steps"))
    if not isinstance(steps, int):
        return Adam(None, settings_of(first))
    return Adam(steps - skipped if isinstance(skipped, int) else steps, settings_of(first))


def _left_behind(
    files: StepFiles, module: Mapping[str, Tensor], masters: Mapping[str, Tensor]
) -> Counter[str]:
    """Bytes of optimizer states, and of the module's copies of weights that the masters store exactly."""
    stored = sum(each.nbytes for file in files.optimizers.values() for each in stored_in(file.content))
    states = stored - sum(tensor.nbytes for tensor in masters.values())
    copies = sum(tensor.nbytes for name, tensor in module.items() if name in masters)
    return +Counter({OPTIMIZER_STATES: states, MASTER_COPIES: copies})


def share(tensors: dict[str, Tensor], model: LoadedFile) -> None:
    """Add parameters that the model has under a second name, such as a tied head."""
    shared = model.content.get("shared_params")
    for alias, owner in shared.items() if isinstance(shared, Mapping) else ():
        if owner in tensors:
            tensors[alias] = tensors[owner]


def _refuse_empty(files: StepFiles, tensors: Mapping[str, Tensor]) -> None:
    """Raise ReshardError for parameters whose elements are in no file."""
    shapes = {**shapes_of(files.model), **frozen_shapes(files.model)}
    raise_all(
        Problem(
            "tensor-empty",
            "a tensor has no elements",
            tensor=name,
            file=str(files.model.path),
            rule="ZeRO 3 leaves Size([0]) in the module, and keeps the elements in the files of the ranks",
            expected=str(list(shapes[name])) if name in shapes else "one part in each rank's file",
            found=str(list(tensor.shape)),
            remedy="save again with the engine's save_checkpoint(); state_dict() alone does not gather",
        )
        for name, tensor in tensors.items()
        if not tensor.view.numel and shapes.get(name) != tensor.shape
    )


# ------------------------------------------------------------------------------------------ what files say


def groups_of(model: LoadedFile) -> list[Shapes]:
    """The trained parameters and their shapes, by group, in the order in which they are flattened."""
    groups = model.content.get("param_shapes")
    groups = groups if isinstance(groups, list) else [groups]
    return [
        {str(name): tuple(shape) for name, shape in group.items()}
        for group in groups
        if isinstance(group, Mapping)
    ]


def shapes_of(model: LoadedFile) -> Shapes:
    """The shape of each trained parameter."""
    return {name: shape for group in groups_of(model) for name, shape in group.items()}


def frozen_shapes(model: LoadedFile) -> Shapes:
    """The shape of each parameter that is not in the optimizer."""
    shapes = model.content.get("frozen_param_shapes")
    return {str(name): tuple(shape) for name, shape in shapes.items()} if isinstance(shapes, Mapping) else {}


def _is_vector(item: Any) -> TypeGuard[StoredTensor]:
    return isinstance(item, StoredTensor) and len(item.shape) == 1 and item.strides == (1,)


def _partitions(file: LoadedFile, kind: str) -> list[StoredTensor]:
    """A rank's partitions of the masters (`MASTER_STATE`) or of a state, by group; empty if a group has none."""
    optimizer = file.optimizer
    partitions: Any
    if kind == MASTER_STATE:
        partitions = optimizer.get("single_partition_of_fp32_groups", optimizer.get("fp32_flat_groups"))
        partitions = [partitions] if isinstance(partitions, StoredTensor) else partitions
    else:
        base = optimizer.get("base_optimizer_state", optimizer.get("optimizer_state_dict"))
        base = base.get("state", {}) if isinstance(base, Mapping) else base
        groups = list(base.values()) if isinstance(base, Mapping) else base or []
        partitions = [group.get(kind) for group in groups if isinstance(group, Mapping)]
    whole = isinstance(partitions, list | tuple) and all(map(_is_vector, partitions))
    if whole and (kind == MASTER_STATE or len(partitions) == len(_partitions(file, MASTER_STATE))):
        return list(partitions)
    if kind == MASTER_STATE:
        raise ReshardError(
            "zero-masters-misplaced",
            "the fp32 masters of a rank are not in ZeRO's layout",
            file=str(file.path),
            expected="one vector per parameter group",
            found="the layout of the first versions of ZeRO 1" if partitions else "none",
            remedy="save again with DeepSpeed 0.8 or later",
        )
    return []


# --------------------------------------------------------------------------------------- ZeRO 1 and ZeRO 2

_LOCAL_EXPERT = re.compile(r"(.*\.deepspeed_experts\.)(\d+)(\..*)")


def _gather_groups(files: StepFiles, kind: str) -> dict[str, Tensor]:
    """The parameters of all groups, cut out of the ranks' concatenated partitions."""
    groups = groups_of(files.model)
    ranks = [files.optimizers[rank] for rank in sorted(files.optimizers)]
    _same_groups(groups, ranks)
    tensors: dict[str, Tensor] = {}
    problems: list[Problem] = []
    for index, shapes in enumerate(groups):
        starts, length = _starts(shapes, ranks[0], index)
        owners = _owners(ranks, index)
        for place, members in enumerate(owners):
            line = SplitVector([_partitions(file, kind)[index] for file in members])
            if _aligned(len(line), len(members)) != _aligned(length, len(members)):
                problems.append(_wrong_size(members[0], f"group {index}", length, len(line), len(members)))
                continue
            if kind == MASTER_STATE:
                problems += _misplaced_problems(members, starts, shapes, index)
            for name, shape in shapes.items():
                whole = _global_name(name, shapes, place) if len(owners) > 1 else name
                parts = line.cut(starts[name], starts[name] + prod(shape))
                tensors[whole] = Tensor(line.dtype, View(shape, tuple(parts)))
    raise_all(problems)
    return tensors


def _same_groups(groups: Sequence[Shapes], ranks: Sequence[LoadedFile]) -> None:
    raise_all(
        Problem(
            "zero-group-count-differs",
            "a rank has a different number of parameter groups",
            file=str(file.path),
            rule="every rank has a part of every group",
            expected=f"{len(groups)} groups",
            found=f"{len(_partitions(file, MASTER_STATE))} groups",
            remedy=COPY_AGAIN,
        )
        for file in ranks
        if len(_partitions(file, MASTER_STATE)) != len(groups)
    )


def _starts(shapes: Shapes, file: LoadedFile, group: int) -> tuple[dict[str, int], int]:
    """The offset of each parameter in the vector of its group, and the end of the last one.

    `parameter_alignment` of DeepSpeed 0.19 adds padding after each parameter.
    """
    paddings = file.optimizer.get("param_alignment_paddings")
    padding = paddings[group] if isinstance(paddings, list) and len(paddings) > group else [0] * len(shapes)
    starts, end = {}, 0
    for (name, shape), behind in zip(shapes.items(), padding, strict=False):
        starts[name] = end
        end += prod(shape) + behind
    return starts, end


def _aligned(numel: int, ranks: int) -> int:
    """`numel` with the padding that ZeRO may add to a vector: to a multiple of twice its ranks."""
    return -(-numel // (2 * ranks)) * 2 * ranks


def _owners(ranks: list[LoadedFile], group: int) -> list[list[LoadedFile]]:
    """The ranks that share a group, for each part of expert parallelism; all ranks if there is none."""
    count = ranks[0].optimizer.get("partition_count")
    size = count[group] if isinstance(count, list | tuple) and len(count) > group else len(ranks)
    if not isinstance(size, int) or size < 1 or len(ranks) % size:
        size = len(ranks)
    parts = len(ranks) // size
    return [ranks[place::parts] for place in range(parts)]


def _global_name(name: str, shapes: Shapes, place: int) -> str:
    """The name of an expert's parameter, with the expert's number in the complete layer instead of that on its rank."""
    match = _LOCAL_EXPERT.fullmatch(name)
    if not match:
        return name
    local = 1 + max(
        int(other_match[2]) for other in shapes if (other_match := _LOCAL_EXPERT.fullmatch(other))
    )
    return f"{match[1]}{place * local + int(match[2])}{match[3]}"


def _misplaced_problems(
    members: Sequence[LoadedFile], starts: Mapping[str, int], shapes: Shapes, group: int
) -> Iterator[Problem]:
    """Problems of files whose list of parameters does not begin with the one at their place in the vector.

    With `round_robin_gradients` the list has another order than the vector, so it is not compared.
    """
    if zero_config(members[0]).get("round_robin_gradients"):
        return
    begin = 0
    for file in members:
        size = _partitions(file, MASTER_STATE)[group].numel
        mappings = file.optimizer.get("param_slice_mappings")
        slices = mappings[group] if isinstance(mappings, list) and len(mappings) > group else {}
        inside = [n for n, s in shapes.items() if starts[n] < begin + size and starts[n] + prod(s) > begin]
        if isinstance(slices, Mapping) and slices and inside and next(iter(slices)) != inside[0]:
            yield Problem(
                "zero-file-of-another-rank",
                "a file belongs to another rank",
                tensor=inside[0],
                file=str(file.path),
                rule="a rank's file lists the parameters that the rank has a part of",
                expected=f"from {inside[0]} on",
                found=f"from {next(iter(slices))} on",
                remedy="the file was renamed: copy each rank's file again from where it was saved",
            )
        begin += size


def _wrong_size(file: LoadedFile, what: str, wanted: int, found: int, ranks: int) -> Problem:
    return Problem(
        "zero-partitions-incomplete",
        f"the partitions of {what} do not make up its parameters",
        file=str(file.path),
        rule="the ranks together store what param_shapes in the model states counts, plus padding",
        expected=f"{wanted} elements",
        found=f"{found} elements in {ranks} ranks",
        remedy="the files belong to different runs, or some are missing: copy the step again",
    )


# ------------------------------------------------------------------------------------------------- ZeRO 3


def _gather_zero3(files: StepFiles, kind: str) -> dict[str, Tensor]:
    """Every parameter, assembled from the piece on each rank."""
    ranks = [files.optimizers[rank] for rank in sorted(files.optimizers)]
    lines = [SplitVector(_partitions(file, kind)) for file in ranks]
    shapes = shapes_of(files.model)
    length = sum(_piece(shape, len(ranks)) for shape in shapes.values())
    raise_all(
        _wrong_size(file, "a rank", length, len(line), 1)
        for file, line in zip(ranks, lines, strict=True)
        if len(line) != length
    )
    tensors, begin = {}, 0
    for name, shape in shapes.items():
        tensors[name] = _joined_tensor(shape, lines, begin)
        begin += _piece(shape, len(ranks))
    return tensors


def _piece(shape: tuple[int, ...], ranks: int) -> int:
    return (prod(shape) + ranks - 1) // ranks


def _joined_tensor(shape: tuple[int, ...], lines: Sequence[SplitVector], begin: int) -> Tensor:
    """A tensor from the pieces that the lines have of it, from `begin`. The last ranks may have only padding."""
    numel, piece = prod(shape), _piece(shape, len(lines))
    pieces: list[Piece] = []
    for rank, line in enumerate(lines):
        count = max(0, min(piece, numel - rank * piece))
        pieces += line.cut(begin, begin + count, rank * piece)
    return Tensor(lines[0].dtype, View(shape, tuple(pieces)))


def frozen_weights(files: StepFiles) -> dict[str, Tensor]:
    """The parameters that are not in the optimizer: every rank's model states have a piece of each."""
    ranks = [files.models[rank] for rank in sorted(files.models)]
    tensors, problems = {}, []
    for name, shape in frozen_shapes(files.model).items():
        lines = [SplitVector(_fragment(file, name)) for file in ranks]
        piece = _piece(shape, len(ranks))
        wrong = [(file, line) for file, line in zip(ranks, lines, strict=True) if len(line) != piece]
        problems += [_wrong_size(file, name, piece, len(line), 1) for file, line in wrong]
        if not wrong and 0 not in shape:
            tensors[name] = _joined_tensor(shape, lines, 0)
    raise_all(problems)
    return tensors


def _fragment(file: LoadedFile, name: str) -> list[StoredTensor]:
    fragments = file.content.get("frozen_param_fragments")
    fragment = fragments.get(name) if isinstance(fragments, Mapping) else None
    return [fragment] if _is_vector(fragment) else []
