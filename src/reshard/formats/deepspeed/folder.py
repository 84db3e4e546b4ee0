"""DeepSpeed: ZeRO 0 to 3 and universal checkpoints can be read, universal ones also written.

`save_checkpoint` makes a folder for each step, its tag (`global_step<N>` unless the caller sets another), and next to
it `latest`, which names one. Trainer has them in `checkpoint-<N>`, with config and tokenizer. `ds_to_universal.py`
writes `latest_universal`. Source: `runtime/engine.py` and `checkpoint/ds_to_universal.py` of deepspeed 0.19.8.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from reshard.algebra.tensors import Tensor
from reshard.base.errors import ReshardError
from reshard.families.dialect import HUB
from reshard.folders.iterations import Iteration
from reshard.formats.checkpoint import Checkpoint, ModelDescription
from reshard.formats.deepspeed.step_files import read_step
from reshard.formats.deepspeed.universal import read_universal
from reshard.formats.deepspeed.zero import read_weights
from reshard.formats.detection import DEEPSPEED, TRACKERS, deepspeed_steps, is_universal, tracked_tag
from reshard.formats.state_dict_names import prefix_of, without_buffers
from reshard.formats.unique_names import under_new_names
from reshard.transfer.source_files import Sources

_NUMBER = re.compile(r"(\d+)(?:[-_]?universal)?$")


def _number(name: str) -> int | None:
    match = _NUMBER.search(name)
    return int(match[1]) if match else None


def open_checkpoint(path: Path, sources: Sources, iteration: Iteration | None = None) -> Checkpoint:
    """Open the tracked (or the requested) step. Raises ReshardError naming all that is missing or damaged."""
    folder = _choose(path, iteration)
    files = read_step(folder, sources) if not is_universal(folder) else None
    weights = read_weights(files) if files else read_universal(folder, sources)
    prefix = prefix_of(weights.tensors)
    weights.dropped["rotary buffers"] += without_buffers(weights.tensors)
    return Checkpoint(
        path=folder,
        format=DEEPSPEED,
        dialect=HUB,
        tensors=_without_prefix(prefix, weights.tensors),
        description=ModelDescription(_root(folder)),
        iteration=_number(folder.resolve().name),
        optimizer=weights.optimizer.changed(partial(_without_prefix, prefix)),
        dropped=+weights.dropped,
        replicas=[each._replace(tensor=each.tensor.removeprefix(prefix)) for each in weights.replicas],
        notes=weights.notes,
        variant=weights.variant,
    )


def _without_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return under_new_names((name, name.removeprefix(prefix), tensor) for name, tensor in tensors.items())


def _root(folder: Path) -> Path:
    """The folder of config and tokenizer: the parent of the step's folder if it has a tracker, or the step's folder."""
    parent = folder.resolve().parent
    inside = (folder / "config.json").is_file()
    tracked = any((parent / name).is_file() for name in (*TRACKERS, "config.json"))
    return parent if tracked and not inside else folder


def _choose(path: Path, iteration: Iteration | None) -> Path:
    """The folder of the step. Raises ReshardError if it does not exist, or if the step is ambiguous."""
    steps = deepspeed_steps(path)
    listed = ", ".join(steps) or "no folder of a step"
    if iteration is not None:
        matches = [step for name, step in steps.items() if _number(name) == iteration]
        if not matches:
            raise ReshardError(
                "deepspeed-step-not-found",
                "this iteration does not exist",
                file=str(path / f"global_step{iteration}"),
                found=listed,
                remedy="choose one of these with --iteration",
            )
        return matches[0]
    tag = tracked_tag(path) if path.name not in steps else None
    if tag is None and len(steps) == 1:
        return next(iter(steps.values()))
    if tag is None:
        raise ReshardError(
            "deepspeed-tracker-missing",
            "the tracker file is missing, so the latest step is not known",
            file=str(path / TRACKERS[0]),
            rule="`latest` names the last step that was saved completely",
            found=listed,
            remedy="choose one with --iteration N, or name its folder",
        )
    if tag not in steps:
        raise ReshardError(
            "deepspeed-latest-missing",
            "the step that `latest` names is missing",
            file=str(path / tag),
            rule="the tracker file names a folder with the files of all ranks",
            expected=tag,
            found=listed,
            remedy="copy the missing folder, or choose another with --iteration N",
        )
    return steps[tag]
