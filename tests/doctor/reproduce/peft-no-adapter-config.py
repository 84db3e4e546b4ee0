"""The adapter folder has no adapter_config.json."""

from pathlib import Path

from peft import PeftModel
from small import CURED, load, with_lora

with_lora(load()).save_pretrained("out")
if not CURED:
    Path("out/adapter_config.json").unlink()
PeftModel.from_pretrained(load(), "out")
