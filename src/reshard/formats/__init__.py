"""One module for each format. What a path holds is detected, never asked for."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from reshard.algebra.tensors import Tensor
from reshard.errors import UNUSABLE, ReshardError, said, size, understood
from reshard.formats import (
    companions,
    dcp,
    deepspeed,
    descent,
    foreign,
    fsdp_ranks,
    huggingface,
    internlm,
    megatron,
    not_found,
    peft,
    quantization,
    wrappers,
)
from reshard.formats.checkpoint import Checkpoint, Iteration, States
from reshard.formats.places import belongs
from reshard.formats.target import Format, Target
from reshard.plugins import Registry, leave_out
from reshard.suggest import did_you_mean
from reshard.transfer.marker import MARKER, parsed_marker
from reshard.transfer.memory import uncollected
from reshard.transfer.sources import read_source

FORMATS = Registry(
    "reshard.formats",
    Format,
    lambda: (
        megatron.TORCH_DIST,
        megatron.LEGACY,
        dcp.FORMAT,
        fsdp_ranks.FORMAT,
        deepspeed.FORMAT,
        peft.FORMAT,
        internlm.FORMAT,
        huggingface.FORMAT,
    ),
    names=lambda each: each.all_names,
)
"""By name, in the order in which they are looked for: a folder that could be two of them is the first."""


def written() -> dict[str, Target]:
    """What can be written, by the name of its format."""
    return {each.name: each.target for each in FORMATS.values() if each.target}


def writable(name: str) -> Format:
    """The format to write that a name or one of its aliases stands for. Raises ReshardError if there is none."""
    plain = name.lower().replace("_", "-")
    found = next((each for each in FORMATS.values() if plain in each.all_names), None)
    if found and found.target:
        return found
    if found:
        raise ReshardError(
            "format-only-read",
            f"{found.name} checkpoints can be read, but not written",
            found=f"--to {name}",
            expected=", ".join(written()),
            remedy=f"pass --to {found.instead}" if found.instead else "choose another format",
        )
    known = {alias: each.name for each in FORMATS.values() if each.target for alias in each.all_names}
    raise ReshardError(
        "format-unknown",
        "unknown format",
        found=f"--to {name}",
        expected=", ".join(written()),
        remedy=did_you_mean(name, known, "see `reshard support`"),
    )


def detect(path: Path) -> str | None:
    """The format of what lies at `path`, or None."""
    return next((each.name for each in FORMATS.values() if _holds(path, each)), None)


def _holds(path: Path, format: Format) -> bool:
    try:
        return format.detect(path)
    except UNUSABLE as error:
        leave_out(
            "plugin-format-fails",
            f"the format {format.name} failed to detect whether a path is in it",
            said(error),
            "report it to its authors",
        )
        return False


@uncollected()
def open_checkpoint(
    path: Path, iteration: Iteration | None = None, strip: tuple[str, ...] = ()
) -> Checkpoint:
    """Open a checkpoint of any format. Raises ReshardError if there is none, or if it is damaged.

    Where `path` holds none itself, the folder below it is taken that engines are known to put it in. Where it has the
    engine's own weights and Hugging Face's, as ms-swift leaves them, the engine's are taken: the others have a file to
    name. `strip` lists marks of wrappers that are to be taken out of the names of tensors.
    """
    if not path.exists():
        raise not_found.nothing_there(path)
    refuse_unfinished(path)
    folder, was_step = descent.descend(path, lambda place: detect(place) is not None, iteration)
    iteration = None if was_step else iteration
    name = detect(folder) if folder else None
    if folder is None or name is None:
        if iteration is not None:
            raise not_found.no_iteration(path, iteration)
        raise not_found.no_checkpoint(path, FORMATS, lambda place: detect(place) is not None)
    with understood(folder):
        checkpoint = FORMATS[name].open(folder, iteration)
    checkpoint.root = descent.find_root(checkpoint.root, path)
    _leave_links(checkpoint)
    checkpoint.tensors = wrappers.all_stripped(checkpoint.tensors, strip)
    states = checkpoint.states
    checkpoint.states = States({kind: partial(_state, states, kind, strip, folder) for kind in states})
    checkpoint.problems += wrappers.wrapper_problems(checkpoint.tensors, str(folder))
    if checkpoint.dialect == "hf":
        config = _config_beside(checkpoint)
        if by_mlx := foreign.quantized_by_mlx(folder, config):
            raise ReshardError(by_mlx)
        checkpoint.quantization, lacking = quantization.find(checkpoint.tensors, config, str(folder))
        checkpoint.problems += lacking
    if folder != path:
        checkpoint.notes.insert(0, f"the weights are in {folder.relative_to(path)}")
    kept = checkpoint.format
    if kept != huggingface.NAME and (other := huggingface.weights_in(folder)):
        checkpoint.notes.append(
            f"the folder has Hugging Face weights too: the {kept} weights are used; for the others, pass {other}"
        )
    return checkpoint


def refuse_unfinished(path: Path) -> None:
    """Raise ReshardError if a conversion to a store has not come to its end there, or in the folder above."""
    for folder in (path, path.parent):
        if (folder / MARKER).is_file():
            marker = parsed_marker(read_source(folder / MARKER))
            raise ReshardError(
                "conversion-unfinished",
                "this is an unfinished conversion, and no checkpoint",
                file=str(folder),
                rule=f"{MARKER} is there until all files are complete",
                found=f"{size(marker.uploaded)} of {size(marker.total)} are uploaded" if marker else None,
                remedy=f"continue it: {marker.anywhere}" if marker else "run the conversion again",
            )


def _config_beside(checkpoint: Checkpoint) -> Mapping[str, Any] | None:
    """The config of a checkpoint, where one can be read; what is wrong with it is told by who needs it."""
    try:
        path = checkpoint.root / companions.CONFIG
        there = path.is_file() and belongs(path, checkpoint.root)
        return companions.read_object(path) if there else checkpoint.config
    except ReshardError:
        return checkpoint.config


def _leave_links(checkpoint: Checkpoint) -> None:
    """Note the companions that are links out of their folder, and follow no link to a folder of them."""
    linked = [folder for folder in checkpoint.beside if folder.is_symlink()]
    checkpoint.beside = tuple(folder for folder in checkpoint.beside if folder not in linked)
    checkpoint.notes += companions.told(linked)
    for folder in checkpoint.folders:
        checkpoint.notes += companions.links_out_of(folder)


def _state(
    states: Mapping[str, Mapping[str, Tensor]], kind: str, strip: tuple[str, ...], folder: Path
) -> dict[str, Tensor]:
    with understood(folder):
        return wrappers.all_stripped(states[kind], strip)
