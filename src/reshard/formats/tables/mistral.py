"""Folders of Mistral's own code: `consolidated.safetensors`, or its shards, with `params.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from reshard.base.errors import ReshardError, listed
from reshard.base.plain_json import to_json
from reshard.containers import safetensors
from reshard.families.dialects import mistral
from reshard.folders.companion_names import CONFIG
from reshard.folders.iterations import Iteration
from reshard.formats import apply_renamings, foreign, huggingface
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.contract import Naming, Request, Target, Writing
from reshard.formats.detection import MISTRAL, MISTRAL_INDEX, MISTRAL_OLD, MISTRAL_SINGLE, PARAMS_FILE
from reshard.formats.json_beside import object_beside
from reshard.formats.tables import mistral_params
from reshard.formats.tables.unknown_tensors import refuse_misfits
from reshard.transfer.plan import OutputFile
from reshard.transfer.source_files import Sources

QUANTIZED_SUFFIXES = ("qscale_act", "qscale_weight")
"""The ends of the names of FP8 scales."""


def open_checkpoint(path: Path, sources: Sources, iteration: Iteration | None = None) -> Checkpoint:
    """Open a folder or a file. Raises ReshardError."""
    checkpoint = huggingface.open_checkpoint(_weights_path(path), sources, iteration)
    folder = checkpoint.description.folder
    config = object_beside(folder, CONFIG, sources)
    if foreign.with_names_of_a_tool(path, checkpoint.tensors, config) is None:
        return replace(checkpoint, path=path)  # the Hub's names, in files that are called so
    _refuse_quantized(checkpoint)
    derived, notes, recorded = None, list[str](), None
    if config is None:
        params = object_beside(folder, PARAMS_FILE, sources)
        if params is None:
            raise ReshardError(
                "mistral-without-params",
                "there is no params.json beside the weights of Mistral's own code",
                file=str(folder),
                rule="it tells how many heads there are, by which rows of queries and keys are put in order",
                remedy="copy or download it, or the model's config.json, into the same folder",
            )
        config, notes, recorded = mistral_params.config_of(
            params, checkpoint.tensors, str(folder / PARAMS_FILE)
        )
        derived = config
    rules = mistral.renames(config)
    if rules is None:
        raise mistral_params.unsupported([f"model_type {config.get('model_type')}"], str(folder / CONFIG))
    hub = apply_renamings.on_hub(checkpoint.tensors, rules, config)
    _refuse_misfits(checkpoint, hub, config)
    kept = [each for each in checkpoint.notes if "index" not in each]
    return replace(
        checkpoint,
        path=path,
        format=MISTRAL,
        tensors=hub,
        description=replace(checkpoint.description, config=derived, recorded=recorded),
        notes=[*kept, *notes],
    )


def _weights_path(path: Path) -> Path:
    """The path that has all weights: the index of shards, the only file, or the folder."""
    places = (path / name for name in (MISTRAL_INDEX, MISTRAL_SINGLE, MISTRAL_OLD)) if path.is_dir() else ()
    return next((place for place in places if place.is_file()), path)


def _refuse_quantized(checkpoint: Checkpoint) -> None:
    scales = [name for name in checkpoint.tensors if name.endswith(QUANTIZED_SUFFIXES)]
    if not scales:
        return
    raise ReshardError(
        "mistral-weights-quantized",
        "the weights are in FP8 with the scales of Mistral's own layout, which reshard does not read",
        file=str(checkpoint.path),
        found=listed(scales, 2),
        remedy="use the files of the Hub's layout, which reshard reads in FP8, too, or the unquantized release",
    )


def _refuse_misfits(checkpoint: Checkpoint, hub: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Raise ReshardError for tensors that are missing, or that no rule has renamed: all have other names on the Hub."""
    wanted = mistral.wanted(config, checkpoint.tensors)
    refuse_misfits(checkpoint, wanted, checkpoint.tensors.keys() & hub.keys(), "params.json")


def fit(request: Request) -> Request:
    """The request. Raises ReshardError for a model that Mistral's own code does not have."""
    if mistral.renames(request.config) is None:
        raise mistral_params.unsupported([f"model_type {request.config.get('model_type')}"])
    mistral_params.params_of(request.config, ())
    return request


class MistralWriting(Writing):
    """The weights, which mistral_inference reads from one file only, and what describes them."""

    def files(self) -> list[OutputFile]:
        """The weights, which mistral_inference reads from one file only, and what describes them."""
        params = mistral_params.params_of(
            self.request.config, [tensor.name for tensor in self.request.tensors]
        )
        return [
            safetensors.output_file(MISTRAL_SINGLE, self.request.tensors),
            OutputFile.of_bytes(PARAMS_FILE, to_json(params)),
        ]


TARGET = Target(MistralWriting, Naming((MISTRAL,), mistral.renames), fit=fit)
