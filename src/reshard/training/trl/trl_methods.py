"""How TRL trains with each method: its trainer, its config, and the models that it needs besides the trained one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from reshard.oracle.transformers import auto_class
from reshard.training.options import PARALLEL_PLANS
from reshard.training.run import config_of

TrlOptions = Mapping[str, Any]


@dataclass(frozen=True)
class TrlMethod:
    """A method of TRL. The names of its trainer and its config begin with `name`.

    `package` is the one in `trl` that exports both, for example `experimental.orpo`. `sequences` is the number of
    sequences per sample that pass through the model at once. `reference` tells whether the model is compared with its
    initial state, `teacher` is the option that names the teacher model. `classifies` means that the model's head gives
    one number per sequence. `plans` are the supported ones, for the reason `why`.
    """

    name: str
    package: str = "trainer"
    sequences: int = 1
    reference: Callable[[TrlOptions], bool] = lambda options: False
    teacher: str | None = None
    classifies: bool = False
    plans: tuple[str, ...] = PARALLEL_PLANS
    why: str = ""

    @property
    def config(self) -> str:
        """The name of its config."""
        return f"{self.name}Config"

    @property
    def config_file(self) -> str:
        """The file that declares it, in TRL's folder."""
        return f"{self.package.replace('.', '/')}/{self.name.lower()}_config.py"

    def trainer_class(self) -> Any:
        """TRL's trainer."""
        return getattr(import_module(f"trl.{self.package}"), f"{self.name}Trainer")

    def config_class(self) -> Any:
        """TRL's config."""
        return getattr(import_module(f"trl.{self.package}"), self.config)

    def model_class(self, folder: Path) -> Any:
        """transformers' class of the trained model, which starts from the model in a folder."""
        import transformers

        if self.classifies:
            return transformers.AutoModelForSequenceClassification
        return auto_class(config_of(folder))

    @property
    def model_arguments(self) -> dict[str, Any]:
        """Additional arguments of its model: a reward is one number."""
        return {"num_labels": 1} if self.classifies else {}


def _with_beta(options: TrlOptions) -> bool:
    return float(options.get("beta") or 0) != 0


TRL_METHODS = {
    "sft": TrlMethod("SFT"),
    "dpo": TrlMethod("DPO", sequences=2, reference=lambda options: True),
    "kto": TrlMethod("KTO", reference=lambda options: True),
    "reward": TrlMethod("Reward", sequences=2, classifies=True),
    "distillation": TrlMethod(
        "Distillation",
        teacher="teacher_model_name_or_path",
        plans=("ddp", "fsdp2", "zero2", "zero3"),
        why="tensor-parallel ranks would draw different answers to one prompt, and count each of its tokens again",
    ),
    "grpo": TrlMethod("GRPO", reference=_with_beta),
    "rloo": TrlMethod("RLOO", reference=_with_beta),
}
"""Methods by the names that users type."""
