"""The adapter loads, but none of its weights arrive."""

from peft import PeftModel
from safetensors.torch import load_file, save_file
from small import CURED, load, with_lora

with_lora(load()).save_pretrained("out")
path = "out/adapter_model.safetensors"
if not CURED:  # saved from inside a wrapper
    wrapped = {name.replace("model.model.", "model.module.model."): x for name, x in load_file(path).items()}
    save_file(wrapped, path)
PeftModel.from_pretrained(load(), "out")
