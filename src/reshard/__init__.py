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

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from reshard.version import __version__

if TYPE_CHECKING:
    from reshard import guard as guard
    from reshard.algebra.layout import Layout, SavedLayout
    from reshard.api import convert, doctor, inspect, open, support, verify
    from reshard.conversion import Conversion
    from reshard.coverage import Proof
    from reshard.doctor import Finding, diagnose
    from reshard.errors import Problem, ReshardError
    from reshard.formats.checkpoint import Checkpoint
    from reshard.formats.record import Integrity
    from reshard.inspection import Inspection
    from reshard.train.calls import export, report, train
    from reshard.train.start import Outcome
    from reshard.transfer.plan import Plan
    from reshard.verification import Comparison
    from reshard.weights import LazyTensor, Weights

__all__ = [
    "Checkpoint",
    "Comparison",
    "Conversion",
    "Finding",
    "Inspection",
    "Integrity",
    "Layout",
    "LazyTensor",
    "Outcome",
    "Plan",
    "Problem",
    "Proof",
    "ReshardError",
    "SavedLayout",
    "Weights",
    "__version__",
    "convert",
    "diagnose",
    "doctor",
    "export",
    "inspect",
    "open",
    "report",
    "support",
    "train",
    "verify",
]

_HOMES = {
    "reshard.algebra.layout": ("Layout", "SavedLayout"),
    "reshard.api": ("convert", "doctor", "inspect", "open", "support", "verify"),
    "reshard.conversion": ("Conversion",),
    "reshard.coverage": ("Proof",),
    "reshard.doctor": ("Finding", "diagnose"),
    "reshard.errors": ("Problem", "ReshardError"),
    "reshard.formats.checkpoint": ("Checkpoint",),
    "reshard.formats.record": ("Integrity",),
    "reshard.inspection": ("Inspection",),
    "reshard.train.calls": ("export", "report", "train"),
    "reshard.train.start": ("Outcome",),
    "reshard.transfer.plan": ("Plan",),
    "reshard.verification": ("Comparison",),
    "reshard.weights": ("LazyTensor", "Weights"),
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


class _Package(ModuleType):
    """This package. `train` and `doctor` stay functions when the subpackages of these names are imported."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
