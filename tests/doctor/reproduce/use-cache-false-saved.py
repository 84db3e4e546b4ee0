"""The saved config.json switches the key-value cache off."""

import json
from pathlib import Path

from small import MODEL, arguments, dataset, load
from transformers import Trainer

trainer = Trainer(model=load(), args=arguments(gradient_checkpointing=True), train_dataset=dataset())
trainer.train()
trainer.save_model("out/saved")
assert json.loads(Path(MODEL, "config.json").read_text())["use_cache"] is True
assert json.loads(Path("out/saved/config.json").read_text())["use_cache"] is False
