"""How TRL trains with each method: its trainer, its config, and the models that it needs besides the trained one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from reshard.training.run import PARALLEL

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Way:
    """A method of TRL. `module` has the trainer and its config, whose names begin with `name`.

    `sequences` is the number of sequences per sample that pass through the model at once. `reference` tells whether the
    model is compared with its initial state, `teacher` is the option that names the teacher model. `classifies` means
    that the model's head gives one number per sequence. `whole_logits` is the number of float32 copies of the logits of
    all tokens of a batch; with 0 they are computed tile by tile. `counted` means that the loss is divided by the tokens
    of all ranks, and that TRL does not multiply it by the number of ranks. `plans` are the supported ones, for the
    reason `why`. `unread` are options of the config that the trainer ignores.
    """

    name: str
    module: str = "trl"
    sequences: int = 1
    reference: Callable[[Options], bool] = lambda options: False
    teacher: str | None = None
    classifies: bool = False
    whole_logits: int = 0
    counted: bool = False
    plans: tuple[str, ...] = PARALLEL
    why: str = ""
    unread: tuple[str, ...] = ()

    @property
    def config(self) -> str:
        """The name of its config."""
        return f"{self.name}Config"

    @property
    def experimental(self) -> bool:
        """Whether TRL declares it experimental."""
        return ".experimental." in self.module

    def trainer_class(self) -> Any:
        """TRL's trainer."""
        return getattr(self._imported(), f"{self.name}Trainer")

    def config_class(self) -> Any:
        """TRL's config."""
        return getattr(self._imported(), self.config)

    def model_class(self) -> Any:
        """transformers' class of the trained model."""
        import transformers

        return (
            transformers.AutoModelForSequenceClassification
            if self.classifies
            else transformers.AutoModelForCausalLM
        )

    @property
    def model_arguments(self) -> dict[str, Any]:
        """Additional arguments of its model: a reward is one number."""
        return {"num_labels": 1} if self.classifies else {}

    def _imported(self) -> Any:
        if self.experimental:  # else each rank prints a notice
            os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
        return import_module(self.module)


def _always(options: Options) -> bool:
    return True


def _with_beta(options: Options) -> bool:
    return float(options.get("beta") or 0) != 0


_WHOLE_TEACHER = (
    "every rank needs the complete teacher, and only these plans give the same losses as one process"
)

_OF_SFT = (
    *("packing", "packing_strategy", "eval_packing", "padding_free", "pad_to_multiple_of", "shuffle_dataset"),
    *("assistant_only_loss", "completion_only_loss", "loss_type", "use_liger_kernel"),
)
"""Options that GKD's config inherits from SFT's, and its trainer ignores (TRL 1.16)."""

WAYS = {
    "sft": Way("SFT"),
    "dpo": Way("DPO", sequences=2, reference=_always),
    "kto": Way("KTO", reference=_always),
    "orpo": Way("ORPO", "trl.experimental.orpo", sequences=2, whole_logits=3),
    "cpo": Way("CPO", "trl.experimental.cpo", sequences=2, whole_logits=3),
    "reward": Way("Reward", sequences=2, classifies=True),
    "gkd": Way(
        "GKD",
        "trl.experimental.gkd",
        teacher="teacher_model_name_or_path",
        whole_logits=7,
        counted=True,
        plans=("ddp", "fsdp2"),
        why=_WHOLE_TEACHER,
        unread=_OF_SFT,
    ),
    "grpo": Way("GRPO", reference=_with_beta),
}
"""Methods by the names that users type."""
