"""The checkpoint holds nothing that this run can resume from."""

from pathlib import Path

from small import CURED, arguments, dataset, load
from transformers import Trainer

saving = {"save_strategy": "steps", "save_steps": 1} if CURED else {}
trainer = Trainer(model=load(), args=arguments(**saving), train_dataset=dataset())
if CURED:
    trainer.train()
folder = Path(trainer.args.output_dir) / "checkpoint-1"
folder.mkdir(parents=True, exist_ok=True)
trainer.train(resume_from_checkpoint=str(folder))
