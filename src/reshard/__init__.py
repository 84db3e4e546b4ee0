"""Convert LLM checkpoints between Hugging Face, Megatron-Core, FSDP, DeepSpeed, InternEvo and PEFT.

Each command is a function of the same name, and its flags are the arguments:

    import reshard

    print(reshard.inspect("ckpt"))                             # what it is, and whether it is complete
    reshard.convert("ckpt", "model-hf")                        # to a Hugging Face folder
    assert reshard.verify("ckpt", "model-hf")                  # the same weights, bit for bit
    weight = reshard.open("ckpt")["model.norm.weight"]         # one tensor, whatever the layout
    print(weight.shape, weight.dtype, weight[:8].numpy())

Everything that a user can fix raises `ReshardError`, whose `problems` list all offenders at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from reshard.version import __version__

if TYPE_CHECKING:
    from reshard import guard as guard
    from reshard.algebra.layout import Layout, SavedLayout
    from reshard.api.conversion import convert
    from reshard.api.inspection import inspect
    from reshard.api.streams import stream
    from reshard.api.supported import support
    from reshard.api.transfers import described_trainer, transfer_plan
    from reshard.api.verification import verify
    from reshard.api.weights import open
    from reshard.base.errors import Problem, ReshardError
    from reshard.commands.conversion import Conversion
    from reshard.commands.coverage import Proof
    from reshard.commands.inspection import Inspection
    from reshard.commands.lazy import LazyTensor
    from reshard.commands.verification import Comparison
    from reshard.commands.weights import Weights
    from reshard.formats.checkpoint import Checkpoint
    from reshard.live.python_api import from_pretrained, load_into
    from reshard.live.weight_sender import weight_sender
    from reshard.live.weight_source import weight_source
    from reshard.records.reshard_json import Integrity
    from reshard.runs.doctor import Finding
    from reshard.runs.doctor.python_api import doctor
    from reshard.runs.train.python_api import train
    from reshard.runs.train.start import TrainingRun
    from reshard.transfer.plan import Plan

__all__ = [
    "Checkpoint",
    "Comparison",
    "Conversion",
    "Finding",
    "Inspection",
    "Integrity",
    "Layout",
    "LazyTensor",
    "Plan",
    "Problem",
    "Proof",
    "ReshardError",
    "SavedLayout",
    "TrainingRun",
    "Weights",
    "__version__",
    "convert",
    "described_trainer",
    "doctor",
    "from_pretrained",
    "inspect",
    "load_into",
    "open",
    "stream",
    "support",
    "train",
    "transfer_plan",
    "verify",
    "weight_sender",
    "weight_source",
]

_HOMES = {
    "reshard.algebra.layout": ("Layout", "SavedLayout"),
    "reshard.api.conversion": ("convert",),
    "reshard.runs.doctor.python_api": ("doctor",),
    "reshard.api.inspection": ("inspect",),
    "reshard.api.streams": ("stream",),
    "reshard.api.transfers": ("described_trainer", "transfer_plan"),
    "reshard.api.supported": ("support",),
    "reshard.api.verification": ("verify",),
    "reshard.api.weights": ("open",),
    "reshard.commands.conversion": ("Conversion",),
    "reshard.commands.coverage": ("Proof",),
    "reshard.runs.doctor": ("Finding",),
    "reshard.base.errors": ("Problem", "ReshardError"),
    "reshard.formats.checkpoint": ("Checkpoint",),
    "reshard.live.python_api": ("from_pretrained", "load_into"),
    "reshard.live.weight_sender": ("weight_sender",),
    "reshard.live.weight_source": ("weight_source",),
    "reshard.records.reshard_json": ("Integrity",),
    "reshard.commands.inspection": ("Inspection",),
    "reshard.runs.train.python_api": ("train",),
    "reshard.runs.train.start": ("TrainingRun",),
    "reshard.transfer.plan": ("Plan",),
    "reshard.commands.verification": ("Comparison",),
    "reshard.commands.lazy": ("LazyTensor",),
    "reshard.commands.weights": ("Weights",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

if not TYPE_CHECKING:  # with `__getattr__`, a type checker would accept any name
    # Imported on first use, so that `reshard --help` does not import numpy.

    def __getattr__(name: str) -> Any:
        if name == "guard":
            return import_module(f"{__name__}.guard")
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(import_module(_HOME[name]), name)
        return found

    def __dir__() -> list[str]:
        return sorted(["guard", *__all__])
