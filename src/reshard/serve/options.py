"""What a server of checkpoints is asked to do: the record from which command line and docs are made."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, ClassVar

from reshard.base.options import About
from reshard.base.shared_options import MemoryOption
from reshard.final.saved_checkpoints import FoundCheckpoint
from reshard.folders.companion_names import CONFIG
from reshard.formats import huggingface
from reshard.formats.options import ConversionOptions, FolderOutput, Opening


@dataclass(frozen=True, kw_only=True)
class ShownOptions(FolderOutput, Opening):
    """What the folders depend on that a server shows: the options of `convert` that need no ranks."""

    HELP: ClassVar[dict[str, str]] = {
        "quantize": "Quantize the linear layers (fp8, fp8-ue8m0, nvfp4; mxfp4 is for gpt-oss only).",
        "max_shard_size": "Maximum size of a weights file. [default: 5GB]",
        "merge": "Merge adapters into the model at --base.",
        "fill_from": "Complete model that provides the tensors a checkpoint lacks; also used as --base.",
        "family": "Model family of the checkpoints, overriding their config.",
        "adapter": "Adapter to read, if a checkpoint contains several.",
    }

    @property
    def conversion(self) -> ConversionOptions:
        """The conversion whose output is shown: a Hugging Face folder, or PEFT's for an adapter."""
        return ConversionOptions(**{each.name: getattr(self, each.name) for each in fields(ShownOptions)})

    def conversion_of(self, step: FoundCheckpoint, run: Path) -> ConversionOptions:
        """The same for a step of a run. It may have its config far above it, where `convert` finds it for the run."""
        options = self.conversion
        if step.format == huggingface.NAME:
            options = replace(
                options, to=huggingface.NAME
            )  # `convert` refuses to copy unless that is asked for
        near = (step.path, step.path.parent)
        if options.base_path is None and not any((folder / CONFIG).is_file() for folder in near):
            above = (folder for folder in step.path.parents if folder == run or run in folder.parents)
            base = next((folder for folder in above if (folder / CONFIG).is_file()), None)
            options = replace(options, base=base)
        return options


@dataclass(frozen=True, kw_only=True)
class ServeOptions(ShownOptions, MemoryOption):
    """Options of a server. Each field is a flag of the same name."""

    port: Annotated[int, About("Port; 0 for any free one.", "N")] = 8765
    host: Annotated[str, About("Address to listen on. All but 127.0.0.1 need --token.", "HOST")] = "127.0.0.1"
    token: Annotated[
        str | None, About("What clients must send as HF_TOKEN. [default: RESHARD_TOKEN, if set]", "TOKEN")
    ] = None
