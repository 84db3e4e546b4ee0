"""DeepSpeed's universal checkpoints: a folder for each parameter, which any number of ranks and any stage loads.

`<tag>/zero/<name>/{fp32,exp_avg,exp_avg_sq}.pt` contain complete tensors: `{"cat_dim", "param"}` if the source was ZeRO
1 or 2 (or Megatron-DeepSpeed), a flat tensor if it was ZeRO 3, whose shape is in the model states. The model states are
next to `zero`, and `optimizer_state.pt` is in it; `latest_universal` names the tag. Sources: `ds_to_universal.py`,
`universal_checkpoint.py` and the loaders of stages 1 to 3 in deepspeed 0.19.8.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from reshard.algebra.dtypes import BY_NAME
from reshard.algebra.storage import StoredTensor
from reshard.algebra.tensors import Tensor
from reshard.base.errors import ReshardError, listed, raise_all
from reshard.containers.file_names import path_below
from reshard.containers.torchfiles.pickles import Global, Reduce
from reshard.containers.torchfiles.read import read_torch_file
from reshard.containers.torchfiles.write import NewTensor, image_bytes, layout_torch_file
from reshard.formats.contract import (
    KEEPS_ITS_DTYPE,
    PlannedStates,
    Writing,
)
from reshard.formats.deepspeed.step_files import COPY_AGAIN, LoadedFile, StepFiles, read_models
from reshard.formats.deepspeed.zero import (
    MASTER_COPIES,
    Shapes,
    StepContent,
    adam_of,
    frozen_weights,
    master_notes,
    roundings,
    shapes_of,
    share,
)
from reshard.formats.optimizer import (
    MASTER_STATE,
    MOMENTS,
    OPTIMIZER_STATES,
    Adam,
    OptimizerContents,
    OptimizerStates,
)
from reshard.transfer.plan import Block, OutputFile, Planned
from reshard.transfer.source_files import Sources

OPTIMIZER_STATE = "optimizer_state.pt"
MIXED_UP = (
    "either DeepSpeed's ds_to_universal mixed up parameters trained with round_robin_gradients, or a "
    "file is damaged or from another step: convert the original step"
)


def read_universal(folder: Path, sources: Sources) -> StepContent:
    """The weights of a universal checkpoint. Raises ReshardError naming all that is missing or damaged."""
    models = read_models(folder, sources)
    shapes = shapes_of(models[0]) if models else {}
    names = sorted(child.name for child in (folder / "zero").iterdir() if child.is_dir())
    tensors = _tensors(folder, sources, MASTER_STATE, shapes, sorted({*names, *shapes}))
    module_tensors = _module_tensors(folder, models)
    tensors |= {name: tensor for name, tensor in module_tensors.items() if name not in shapes}
    if models:
        share(tensors, models[0])
    states = {
        kind: stateful for kind in MOMENTS if (stateful := _parameters_with(folder, sources, kind, names))
    }
    left = sum(file.stat().st_size for kind in MOMENTS for file in (folder / "zero").glob(f"*/{kind}.pt"))
    copies = sum(tensor.nbytes for name, tensor in module_tensors.items() if name in shapes)
    return StepContent(
        tensors,
        OptimizerContents(
            OptimizerStates(states, lambda kind: _tensors(folder, sources, kind, shapes, states[kind])),
            _adam(folder, sources, models) if states and models else None,
        ),
        roundings(
            module_tensors,
            {name: tensors[name] for name in shapes},
            models[0],
            "universal-masters-differ",
            MIXED_UP,
        )
        if models
        else [],
        +Counter({OPTIMIZER_STATES: left, MASTER_COPIES: copies}),
        master_notes(module_tensors, tensors) if module_tensors else [],
        "universal",
    )


def _parameters_with(folder: Path, sources: Sources, kind: str, names: Sequence[str]) -> list[str]:
    """The parameters with a state; none if the first is a single repeated zero, the placeholder of a fresh state."""
    stateful = [name for name in names if (folder / "zero" / name / f"{kind}.pt").is_file()]
    if stateful:
        stored, _ = _stored_tensor(folder / "zero" / stateful[0] / f"{kind}.pt", sources)
        if not any(stored.strides) and stored.numel > 1:
            return []
    return stateful


def _module_tensors(folder: Path, models: dict[int, LoadedFile]) -> dict[str, Tensor]:
    """The module's tensors in the model states: buffers, frozen parameters, copies of the masters."""
    if not models or models[0].content.get("mp_world_size", 1) != 1:
        return {}
    module = models[0].content.get("module")
    tensors = dict(module) if isinstance(module, Mapping) else {}
    stored = {
        str(name): Tensor.stored(item) for name, item in tensors.items() if isinstance(item, StoredTensor)
    }
    stored = {name: tensor for name, tensor in stored.items() if tensor.view.numel}
    if models[0].path.name.startswith("zero_"):
        stored |= frozen_weights(StepFiles(folder, models, stage=3))
    return stored


def _tensors(
    folder: Path, sources: Sources, kind: str, shapes: Shapes, names: Sequence[str]
) -> dict[str, Tensor]:
    """One tensor for each parameter. Raises ReshardError listing all that are missing or have the wrong size."""
    tensors, problems = {}, []
    for name in names:
        path = path_below(folder / "zero", f"{name}/{kind}.pt")
        try:
            tensors[name] = _tensor(path, sources, name, shapes.get(name))
        except ReshardError as error:
            problems += error.problems
    raise_all(problems)
    return tensors


def _tensor(path: Path, sources: Sources, name: str, shape: tuple[int, ...] | None) -> Tensor:
    if not path.is_file():
        raise ReshardError(
            "universal-parameter-missing",
            "a parameter is missing",
            tensor=name,
            file=str(path),
            rule="a universal checkpoint has one folder per parameter, with its fp32 values",
            remedy=COPY_AGAIN,
        )
    stored, flat = _stored_tensor(path, sources)
    if flat and shape is None:
        raise ReshardError(
            "universal-shape-unknown",
            "the shape of a parameter is not recorded",
            tensor=name,
            file=str(path),
            rule="from ZeRO 3, parameters are stored flat, and param_shapes of the model states has their shapes",
            found=f"{stored.numel} elements",
            remedy="copy zero_pp_rank_0_mp_rank_00_model_states.pt into the folder above `zero`",
        )
    if flat and shape is not None and prod(shape) != stored.numel:
        raise ReshardError(
            "universal-parameter-size-differs",
            "a parameter has the wrong size",
            tensor=name,
            file=str(path),
            rule="param_shapes in the model states records the shape of each parameter",
            expected=f"{prod(shape)} elements of {list(shape)}",
            found=f"{stored.numel} elements",
            remedy="the files are of different runs: convert the checkpoint with ds_to_universal.py again",
        )
    tensor = Tensor.stored(stored)
    return Tensor(tensor.dtype, tensor.view.reshape(*shape)) if flat and shape is not None else tensor


def _stored_tensor(path: Path, sources: Sources) -> tuple[StoredTensor, bool]:
    """The tensor of a file, and whether it is stored flat, without its shape."""
    content = read_torch_file(path, sources)
    stored = content.get("param") if isinstance(content, Mapping) else content
    if not isinstance(stored, StoredTensor):
        raise ReshardError(
            "universal-file-without-tensor",
            "a parameter's file contains no tensor",
            file=str(path),
            expected="a tensor, or a dict with `param`",
            found=type(content).__name__,
            remedy=COPY_AGAIN,
        )
    return stored, stored is content


def _adam(folder: Path, sources: Sources, models: Mapping[int, LoadedFile]) -> Adam:
    path = folder / "zero" / OPTIMIZER_STATE
    content = read_torch_file(path, sources) if path.is_file() else {}
    return adam_of(LoadedFile(path, content if isinstance(content, Mapping) else {}), models[0])


# ---------------------------------------------------------------------------------------------- writing

VERSION = "0.19.8"
"""The deepspeed version whose universal checkpoints are written."""

_FLOAT32 = BY_NAME["float32"]
_MODEL_STATES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
"""The files that engines of stage 0 to 2, and of stage 3, look for."""


class UniversalWriting(Writing):
    """A universal checkpoint."""

    def files(self) -> list[OutputFile]:
        """The files of a universal checkpoint that `load_universal` loads into ZeRO 1, 2 and 3 on any number of ranks.

        Tensors are float32 under the names of the engine's module. A missing state is stored as one repeated zero,
        because stage 3 requires all states.
        """
        tensors, states, optimizer = self.request.tensors, self.request.states, self.request.optimizer
        step = self.request.step
        tag = f"global_step{step}_universal"
        files = [OutputFile.of_bytes("latest_universal", tag.encode())]
        taken = (optimizer.step if optimizer else None) or 0
        count = struct.pack("<f", taken)
        for tensor in tensors:
            folder = f"{tag}/zero/{tensor.name}"
            files.append(_parameter(f"{folder}/{MASTER_STATE}.pt", tensor))
            for kind in MOMENTS:
                state = states.get(kind, {}).get(tensor.name)
                path = f"{folder}/{kind}.pt"
                files.append(_parameter(path, state) if state else _zeros(path, tensor.shape))
            files.append(_with_step(f"{folder}/step.pt", _STEP, count))
        files.append(_with_step(f"{tag}/zero/{OPTIMIZER_STATE}", _optimizer_state(states, optimizer), count))
        model = image_bytes(layout_torch_file(_model_states(tensors, step)))
        files += [OutputFile.of_bytes(f"{tag}/{name}", model) for name in _MODEL_STATES]
        return files

    def notes(self) -> list[str]:
        """How to load the folder with DeepSpeed, and what DeepSpeed does not load."""
        loads = 'load it with {"checkpoint": {"load_universal": true}} in the config of DeepSpeed'
        buffers = [tensor.name for tensor in self.request.tensors if tensor.name.endswith(KEEPS_ITS_DTYPE)]
        if not buffers:
            return [loads]
        return [
            loads,
            "DeepSpeed restores no buffers from a universal checkpoint: start the run from a model that has "
            f"{listed(buffers, 1)}",
        ]


_STEP = NewTensor("step", _FLOAT32, ())
"""The step of torch's Adam: a tensor, which DeepSpeed's own optimizers read as a number."""


def _parameter(path: str, tensor: Planned) -> OutputFile:
    image = layout_torch_file({"cat_dim": 0, "param": NewTensor("param", tensor.dtype, tensor.shape)})
    (slot,) = image.slots
    return OutputFile(
        path, image.size, [Block.whole(tensor, slot.offset, slot.crc_at)], partial(iter, image.literals)
    )


def _zeros(path: str, shape: tuple[int, ...]) -> OutputFile:
    zeros = NewTensor("param", _FLOAT32, shape, repeated=True)
    image = layout_torch_file({"cat_dim": 0, "param": zeros})
    return OutputFile.of_bytes(path, image_bytes(image, {"param": bytes(zeros.nbytes)}))


def _with_step(path: str, content: Any, step: bytes) -> OutputFile:
    return OutputFile.of_bytes(path, image_bytes(layout_torch_file(content), {"step": step}))


def _optimizer_state(states: PlannedStates, optimizer: Adam | None) -> dict[str, Any]:
    """The part that all parameters share. Without states it has no settings either: the new run's config applies."""
    settings = dict(optimizer.settings) if optimizer and states else {}
    return {
        "ds_version": VERSION,
        "param_groups": [settings],
        "optimizer_state_dict": {"state": {0: {"step": _STEP}}, "param_groups": [settings]},
    }


def _model_states(tensors: Sequence[Planned], step: int) -> dict[str, Any]:
    """What an engine reads in addition to the weights; schedules restart, both DeepSpeed's and torch's."""
    shapes = {tensor.name: Reduce(Global("torch", "Size"), (tensor.shape,)) for tensor in tensors}
    return {
        "module": {},
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [shapes],
        "frozen_param_shapes": None,
        "shared_params": {},
        "frozen_param_fragments": None,
        "lr_scheduler": {"last_batch_iteration": -1, "lr_lambdas": []},
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": step,
        "global_samples": 0,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": VERSION,
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.4},
    }
