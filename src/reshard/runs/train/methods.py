"""The methods of TRL that a recipe can train with."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainingMethod:
    """A method: `name` begins the names of TRL's trainer and config.

    `rewarded` methods take reward functions. A method with a `second_model` keeps a reference or a teacher beside the
    trained model; others may, with a beta. `generates` means that the model answers prompts; `sequences` is the number
    of sequences of a record. `more` are lines of the trainer's arguments.
    """

    name: str
    help: str
    rewarded: bool = False
    second_model: bool = False
    generates: bool = False
    sequences: int = 1
    more: tuple[str, ...] = ()
    lora_options: tuple[str, ...] = ()


TRAINING_METHODS = {
    "sft": TrainingMethod("SFT", "Supervised fine-tuning, also on images."),
    "dpo": TrainingMethod("DPO", "Direct preference optimization.", second_model=True, sequences=2),
    "kto": TrainingMethod("KTO", "Kahneman-Tversky optimization.", second_model=True),
    "reward": TrainingMethod(
        "Reward", "A reward model.", sequences=2, lora_options=("--lora_task_type", "SEQ_CLS")
    ),
    "distillation": TrainingMethod(
        "Distillation",
        "On-policy distillation from a teacher: --teacher_model_name_or_path.",
        second_model=True,
        generates=True,
        more=("teacher_model=config.teacher_model_name_or_path,",),
    ),
    "grpo": TrainingMethod("GRPO", "Group relative policy optimization.", generates=True, rewarded=True),
    "rloo": TrainingMethod("RLOO", "REINFORCE leave-one-out.", generates=True, rewarded=True),
}
"""By the names that users type. Their data are in `guard/data/records.py`."""
