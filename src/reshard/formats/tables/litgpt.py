"""Folders of LitGPT: `lit_model.pth`, a file of torch, with `model_config.yaml`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from reshard.base.errors import UNUSABLE, ReshardError, listed
from reshard.families.dialects import litgpt
from reshard.families.renaming import in_all_layers
from reshard.folders.base_hints import read_yaml
from reshard.folders.iterations import Iteration
from reshard.formats import apply_renamings, huggingface
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.detection import LITGPT, LITGPT_FILE, LITGPT_SETTINGS
from reshard.formats.tables import litgpt_config
from reshard.formats.tables.unknown_tensors import refuse_misfits
from reshard.transfer.source_files import Sources

TRAINED = ("lora_", "adapter_", "gating_factor")
"""What names of weights that are not merged contain."""


def open_checkpoint(path: Path, sources: Sources, iteration: Iteration | None = None) -> Checkpoint:
    """Open a folder or a file. Raises ReshardError."""
    file = path / LITGPT_FILE if path.is_dir() else path
    checkpoint = huggingface.open_checkpoint(file, sources, iteration)
    settings = _settings(checkpoint.description.folder, sources)
    _refuse_unmerged(checkpoint)
    rules = litgpt.renames(settings, old=any(f".{litgpt.OLD_QKV}." in name for name in checkpoint.tensors))
    if rules is None:
        raise ReshardError(
            "litgpt-model-unsupported",
            "reshard does not know how LitGPT names the tensors of this model",
            file=str(checkpoint.description.folder / LITGPT_SETTINGS),
            found=f"name {settings.get('name')}, mlp_class_name {settings.get('mlp_class_name')}",
            remedy=f"let LitGPT convert it: litgpt convert_from_litgpt {checkpoint.description.folder} OUT, and pass "
            "the file that it writes, in a folder with the model's config.json",
        )
    sizes = litgpt_config.sizes(settings)
    hub = apply_renamings.on_hub(checkpoint.tensors, rules, sizes)
    _refuse_misfits(checkpoint, hub, sizes["num_hidden_layers"])
    config = litgpt_config.config_of(settings)
    description = replace(checkpoint.description, config=config, recorded=config or sizes)
    return replace(checkpoint, path=path, format=LITGPT, tensors=hub, description=description, variant="")


def _settings(folder: Path, sources: Sources) -> Mapping[str, Any]:
    """The settings of the model, with all the sizes that rules need."""
    file = folder / LITGPT_SETTINGS
    if not file.is_file():
        raise ReshardError(
            "litgpt-without-config",
            "there is no model_config.yaml beside the weights of LitGPT",
            file=str(folder),
            rule="it tells which model they are of, and how many heads there are",
            remedy="copy it from the folder that the run started from, into the same folder",
        )
    try:
        settings = read_yaml(file, sources)
        litgpt_config.sizes(settings)
    except (ValueError, *UNUSABLE) as error:
        raise ReshardError(
            "litgpt-config-unreadable",
            "model_config.yaml does not describe a model",
            file=str(file),
            expected=f"{', '.join(litgpt_config.SIZE_KEYS.values())} as numbers",
            found=str(error),
            remedy="copy it again from the folder that the run started from",
        ) from None
    return settings


def _refuse_unmerged(checkpoint: Checkpoint) -> None:
    trained = [name for name in checkpoint.tensors if any(each in name for each in TRAINED)]
    if trained:
        raise ReshardError(
            "litgpt-not-merged",
            "the weights of an adapter are not merged into those of the model",
            file=str(checkpoint.path),
            found=listed(trained, 2),
            remedy=f"merge LoRA with LitGPT: litgpt merge_lora {checkpoint.description.folder}; "
            "its Adapter methods cannot be merged",
        )


def _refuse_misfits(checkpoint: Checkpoint, hub: Iterable[str], layers: int) -> None:
    """Raise ReshardError for tensors that are missing, or that no rule has renamed."""
    wanted = {
        "transformer.wte.weight",
        litgpt.HEAD[0],
        *in_all_layers(litgpt.LAYERS, layers, checkpoint.tensors),
    }
    unknown = {*checkpoint.tensors} & {*hub} - {*litgpt.HEAD}
    refuse_misfits(checkpoint, wanted, unknown, LITGPT_SETTINGS)
