"""The adapter's rank and its config do not agree."""

from pathlib import Path

from peft import PeftModel
from small import CURED, edited, load, with_lora

with_lora(load()).save_pretrained("out")
edited(Path("out/adapter_config.json"), r=4 if CURED else 8)
PeftModel.from_pretrained(load(), "out")
