"""An adapter config of a newer PEFT is read by an older one."""

# exits: 0

from pathlib import Path

from peft import PeftConfig
from small import CURED, edited, load, with_lora

with_lora(load()).save_pretrained("out")
if not CURED:
    edited(Path("out/adapter_config.json"), key_of_tomorrow=False)
PeftConfig.from_pretrained("out")
