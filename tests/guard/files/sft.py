"""Supervised fine-tuning with TRL, of a script that leaves the layout to its launcher: `accelerate launch sft.py`."""

import os

from datasets import load_dataset
from trl import SFTConfig, SFTTrainer, TrlParser

if os.environ.get("ACCELERATE_USE_FSDP"):
    import fsdp_on_cpu  # noqa: F401  without a GPU accelerate leaves FSDP out


def main() -> None:
    (args,) = TrlParser(SFTConfig).parse_args_and_config()
    trainer = SFTTrainer(
        model="model",
        args=args,
        train_dataset=load_dataset("json", data_files="data.jsonl", split="train"),
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
