"""A full model file holds LoRA names."""

from safetensors.torch import save_file
from small import CURED, copied, load, with_lora

folder = copied("qwen3")
adapted = with_lora(load())
if CURED:
    adapted.merge_and_unload().save_pretrained(folder)
else:
    save_file(adapted.state_dict(), folder / "model.safetensors", {"format": "pt"})
load(folder)
