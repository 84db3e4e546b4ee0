"""Adapters as PEFT's `save_pretrained` writes them: adapter_model.safetensors (or .bin) and adapter_config.json.

The package `adapters` interprets the tensors; adapters can also be inside the checkpoints of other formats.
"""

from __future__ import annotations

from pathlib import Path

from reshard.algebra.tensors import Replica, Tensor
from reshard.base.plain_json import to_json
from reshard.containers import safetensors
from reshard.families.dialect import HUB
from reshard.folders import iterations
from reshard.folders.iterations import Iteration
from reshard.formats import huggingface, weight_files
from reshard.formats.checkpoint import Checkpoint, ModelDescription
from reshard.formats.contract import CheckpointKind, Format, Target, Writing
from reshard.transfer.plan import OutputFile
from reshard.transfer.source_files import Sources

NAME = "peft"
ADAPTER_CONFIG = "adapter_config.json"
SAVED = ".modules_to_save."
WEIGHTS_FILES = ("adapter_model.safetensors", "adapter_model.bin")


def detect(path: Path) -> bool:
    """Whether `path` is a folder with an adapter and no model, or the file of an adapter."""
    if path.is_file():
        return path.name in WEIGHTS_FILES
    return any((path / name).is_file() for name in WEIGHTS_FILES) and weight_files.weights_in(path) is None


def open_checkpoint(path: Path, sources: Sources, iteration: Iteration | None = None) -> Checkpoint:
    """Open an adapter. Its tensors keep PEFT's names (see `read_adapter`). Raises ReshardError if damaged."""
    iterations.refuse(path, iteration, "an adapter")
    file = path if path.is_file() else next(path / name for name in WEIGHTS_FILES if (path / name).is_file())
    tensors = huggingface.read_weights(file, sources)
    replicas = _taken_twice(tensors)
    return Checkpoint(
        path=path,
        format=NAME,
        dialect=HUB,
        tensors=tensors,
        replicas=replicas,
        description=ModelDescription(file.parent),
        variant=file.suffix.lstrip("."),
    )


def _taken_twice(tensors: dict[str, Tensor]) -> list[Replica]:
    """Take out second copies of trained weights.

    If the vocabulary was resized, `save_pretrained` of PEFT 0.21 writes all that a trained embedding or head consists
    of, `modules_to_save.weight` among it, beside `weight`.
    """
    copies = []
    for copy in [name for name in tensors if SAVED in name]:
        name = copy.replace(SAVED, ".")
        if name in tensors:
            copies.append(Replica(copy, tensors[name], tensors.pop(copy), f"this is a second copy of {name}"))
    return copies


class PeftWriting(Writing):
    """The two files of an adapter."""

    def files(self) -> list[OutputFile]:
        """The two files of an adapter; its settings become adapter_config.json."""
        config = OutputFile.of_bytes(ADAPTER_CONFIG, to_json(dict(self.request.adapter or {})))
        return [safetensors.output_file(WEIGHTS_FILES[0], self.request.tensors), config]


FORMAT = Format(
    NAME,
    "LoRA adapter of PEFT: adapter_model.safetensors; adapter_model.bin is read",
    detect,
    open_checkpoint,
    Target(PeftWriting, holds=frozenset({CheckpointKind.ADAPTER})),
    aliases=("lora",),
    files=("adapter_config.json", *WEIGHTS_FILES),
    seen={"LoRA adapter": r"adapter_(?:model|config)\.|(?:^|/)adapter(?:_\w+)?/?$"},
    judged=("PEFT",),
)
