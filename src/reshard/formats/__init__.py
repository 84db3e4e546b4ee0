"""One module for each format. The format of a path is always detected."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from reshard.algebra.tensors import Tensor
from reshard.base.errors import UNUSABLE, ReshardError, reading_values, type_and_message
from reshard.base.garbage import uncollected
from reshard.base.later_imports import imported_later
from reshard.base.plugins import Registry, leave_out
from reshard.base.quantities import size
from reshard.base.suggest import did_you_mean
from reshard.folders import companion_names, companions, find_weights
from reshard.folders.allowed_paths import check_open
from reshard.folders.iterations import Iteration
from reshard.formats import (
    dcp,
    deepspeed,
    detection,
    foreign,
    fsdp_ranks,
    gguf,
    huggingface,
    internlm,
    megatron,
    mlx,
    not_found,
    orbax,
    peft,
    quantization,
    state_dict_names,
    tables,
    weight_files,
)
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.contract import Format, Target
from reshard.formats.json_beside import object_beside
from reshard.formats.optimizer import OptimizerStates, States
from reshard.stores import checkpoint_names
from reshard.transfer.run_files import MARKER
from reshard.transfer.source_files import Sources

with imported_later(__name__):
    from reshard.transfer.unfinished_marker import parsed_marker


FORMATS = Registry(
    "reshard.formats",
    Format,
    lambda: (
        megatron.TORCH_DIST,
        megatron.ZARR,
        megatron.LEGACY,
        megatron.NEMO,
        megatron.FSDP_DTENSOR,
        dcp.FORMAT,
        fsdp_ranks.FORMAT,
        deepspeed.FORMAT,
        peft.FORMAT,
        mlx.ADAPTER,
        *tables.FORMATS,
        internlm.FORMAT,
        mlx.FORMAT,
        huggingface.FORMAT,
        gguf.FORMAT,
        orbax.FORMAT,
        orbax.UNSCANNED,
    ),
    names=lambda each: each.all_names,
)
"""Formats by name, in the order of detection: the first match wins."""


def _file_names() -> checkpoint_names.FileNames:
    """What stores are told of the names of files."""
    formats = FORMATS.values()
    naming: dict[str, checkpoint_names.Named] = {
        companion_names.RECORD: lambda record: record[companion_names.FILES_KEY]
    }
    for each in formats:
        naming.update(each.naming)
    return checkpoint_names.FileNames(
        usual=tuple(
            {*companion_names.USUAL_FILES, *naming, *(file for each in formats for file in each.files)}
        ),
        naming=naming,
        weights=huggingface.WEIGHT_SUFFIXES,
        other=huggingface.FOR_OTHER_PROGRAMS,
        twice=huggingface.STORED_AGAIN,
    )


checkpoint_names.declare(_file_names)


def written() -> dict[str, Target]:
    """The targets that can be written, by format name."""
    return {each.name: each.target for each in FORMATS.values() if each.target}


def named_by(path: Path) -> str | None:
    """The format of which a file with this name is a complete output; None if there is none."""
    with_suffix = written() if path.suffix else {}
    return next((name for name, target in with_suffix.items() if target.embeds == path.suffix), None)


def quantizations() -> list[str]:
    """The values of `--quantize`, of all targets."""
    return list(dict.fromkeys(how for target in written().values() for how in target.dtypes.quantizes))


def quantized_as(how: str) -> str:
    """A value of `--quantize`. Raises ReshardError if no target has it."""
    if how in quantizations():
        return how
    by_target = (
        f"{name}: {target.dtypes.listed}" for name, target in written().items() if target.dtypes.quantizes
    )
    raise ReshardError(
        "quantize-value-unknown",
        "reshard does not write weights of this kind",
        expected="; ".join(by_target),
        found=f"--quantize {how}",
        remedy="leave out --quantize: when a .gguf file is written, the command that makes K-quants of it is printed"
        if _K_QUANT.fullmatch(how)
        else did_you_mean(how, quantizations(), "choose one of these, for the format of the output", _BITS),
    )


_BITS = {f"{bits}{unit}": f"affine-{bits}" for bits in (2, 3, 4, 5, 6, 8) for unit in ("", "bit", "-bit")}
"""What users of mlx-lm call its quantizations, and their values of `--quantize`."""
_K_QUANT = re.compile(r"(?i)i?q\d_(k|xs|xxs|s|m|nl)(_\w+)?")
"""Types of llama.cpp that only its llama-quantize computes."""


def writable(name: str) -> Format:
    """The writable format with this name or alias. Raises ReshardError if there is none."""
    plain = name.lower().replace("_", "-")
    format = next((each for each in FORMATS.values() if plain in each.all_names), None)
    if format and format.target:
        return format
    if format:
        raise ReshardError(
            "format-only-read",
            f"{format.name} checkpoints can be read, but not written",
            found=f"--to {name}",
            expected=", ".join(written()),
            remedy=f"pass --to {format.instead}" if format.instead else "choose another format",
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
    """The format of the checkpoint at `path`, or None."""
    name = next((each.name for each in FORMATS.values() if _holds(path, each)), None)
    if name or not foreign.is_state_dict(path) or _is_part(path):
        return name
    return huggingface.NAME


def _is_part(file: Path) -> bool:
    """Whether a file may be a part of a checkpoint: of an engine's, or the optimizer next to any."""
    if state_dict_names.NO_WEIGHTS.search(file.stem):
        return True
    above = [*file.absolute().parents][: not_found.ABOVE]
    without_ranks = (huggingface.NAME, detection.GGUF)
    engines = (each for each in FORMATS.values() if each.name not in without_ranks)
    return any(_holds(folder, each) for each in engines for folder in above)


def _holds(path: Path, format: Format) -> bool:
    try:
        return format.detect(path)
    except UNUSABLE as error:
        leave_out(
            "plugin-format-fails",
            f"the format {format.name} failed to detect whether a path is in it",
            type_and_message(error),
            "report it to its authors",
        )
        return False


@uncollected()
def open_checkpoint(
    path: Path,
    iteration: Iteration | None = None,
    strip: tuple[str, ...] = (),
    sources: Sources | None = None,
) -> Checkpoint:
    """Open a checkpoint of any format. Raises ReshardError if none is found, or if it is damaged.

    The files in a `.nemo` archive are read where they are.

    If `path` itself is not a checkpoint, the folder below it where engines are known to save is opened. If the folder
    has both engine weights and Hugging Face weights, as ms-swift saves them, the engine weights are read: to read the
    others, users pass their file. `strip` lists wrapper prefixes to remove from tensor names. `sources`, which the
    checkpoint keeps, open all files.
    """
    sources = sources or Sources(path)
    if not path.exists():
        raise not_found.nothing_there(path)
    check_open(path)
    path = foreign.in_archive(path)
    refuse_unfinished(path, sources)
    folder, format, iteration = _locate(path, iteration)
    if format.name == huggingface.NAME and (of_tool := foreign.named_by_a_tool(folder)):
        raise ReshardError(of_tool)
    with reading_values(folder):
        checkpoint = format.open(folder, sources, iteration)
    root = find_weights.find_root(checkpoint.description.folder, path)
    tokenizers, linked = _without_links(checkpoint.description.tokenizers, root, sources)
    location = [] if folder == path else [f"the weights are in {folder.relative_to(path)}"]
    tensors = state_dict_names.all_stripped(checkpoint.tensors, strip, str(folder))
    return _recognized(
        replace(
            checkpoint,
            sources=sources,
            description=replace(checkpoint.description, folder=root, tokenizers=tokenizers),
            tensors=tensors,
            optimizer=replace(
                checkpoint.optimizer, states=_stripped_states(checkpoint.optimizer.states, strip, folder)
            ),
            problems=[*checkpoint.problems, *state_dict_names.wrapper_problems(tensors, str(folder))],
            notes=[*location, *checkpoint.notes, *linked, *_other_weights(checkpoint.format, folder)],
        ),
        folder,
    )


def _locate(path: Path, iteration: Iteration | None) -> tuple[Path, Format, Iteration | None]:
    """The folder of the checkpoint at or below `path`, its format, and the iteration that is left to find in it."""
    found = cache(detect)
    folder, was_step = find_weights.descend(path, lambda place: found(place) is not None, iteration)
    iteration = None if was_step else iteration
    name = found(folder) if folder else None
    if folder and name:
        return folder, FORMATS[name], iteration
    if iteration is not None:
        raise not_found.no_iteration(path, iteration)
    raise not_found.no_checkpoint(
        path,
        lambda place: detect(place) is not None,
        lambda place: detect(place) not in (None, detection.GGUF),
    )


def refuse_unfinished(path: Path, sources: Sources) -> None:
    """Raise ReshardError if `path`, or its parent, is an unfinished conversion to a store."""
    for folder in (path, path.parent):
        if (folder / MARKER).is_file():
            marker = parsed_marker(sources.read(folder / MARKER))
            raise ReshardError(
                "conversion-unfinished",
                "this is an unfinished conversion, not a checkpoint",
                file=str(folder),
                rule=f"{MARKER} exists until all files are complete",
                found=f"{size(marker.uploaded)} of {size(marker.total)} are uploaded" if marker else None,
                remedy=f"continue it: {marker.anywhere}" if marker else "run the conversion again",
            )


def _object_beside(checkpoint: Checkpoint, name: str) -> Mapping[str, Any] | None:
    """The object in a file beside the weights, if it is readable; errors are reported by the code that needs it."""
    with suppress(ReshardError):
        return object_beside(checkpoint.description.folder, name, checkpoint.sources)
    return None


def _with_settings_of_modelopt(
    config: Mapping[str, Any] | None, checkpoint: Checkpoint
) -> Mapping[str, Any] | None:
    """A config with the quantization settings that ModelOpt may store in a file of its own only."""
    if quantization.settings_of(config):
        return config
    content = _object_beside(checkpoint, companion_names.OF_MODELOPT)
    return {**(config or {}), "quantization_config": quantization.of_modelopt(content)} if content else config


def _without_links(
    folders: Iterable[Path], root: Path, sources: Sources
) -> tuple[tuple[Path, ...], list[str]]:
    """The companion folders that are no links, and notes on those that are, and on companions that link elsewhere."""
    linked = [folder for folder in folders if folder.is_symlink()]
    kept = tuple(folder for folder in folders if folder not in linked)
    notes = [note for folder in (*kept, root) for note in companions.links_out_of(folder, sources)]
    return kept, [*companions.links_note(linked), *notes]


def _other_weights(name: str, folder: Path) -> list[str]:
    """A note if a folder has Hugging Face weights besides those of an engine."""
    is_engine = name not in (huggingface.NAME, detection.MLX)
    other = weight_files.weights_in(folder) if is_engine else None
    if not other:
        return []
    return [
        f"the folder has Hugging Face weights too: the {name} weights are used; for the others, pass {other}"
    ]


def _recognized(checkpoint: Checkpoint, folder: Path) -> Checkpoint:
    """A checkpoint with the quantization of its weights. Raises ReshardError for the names of another tool."""
    if not checkpoint.has_hub_names:
        return checkpoint
    config = companions.hub_config(
        _object_beside(checkpoint, companion_names.CONFIG), checkpoint.description.config
    )
    if tool := foreign.with_names_of_a_tool(folder, checkpoint.tensors, config):
        raise ReshardError(tool)
    config = _with_settings_of_modelopt(config, checkpoint)
    quantized, lacking = quantization.find(checkpoint.tensors, config, str(folder))
    return replace(checkpoint, quantization=quantized, problems=[*checkpoint.problems, *lacking])


def _stripped_states(states: States, strip: tuple[str, ...], folder: Path) -> OptimizerStates:
    def read(state: str) -> Mapping[str, Tensor]:
        with reading_values(folder):
            return state_dict_names.all_stripped(states[state], strip, str(folder))

    return OptimizerStates(states, read)
