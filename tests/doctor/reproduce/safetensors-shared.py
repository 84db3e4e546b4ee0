"""Tied tensors given to safetensors' save_file."""

from safetensors.torch import save_file, save_model
from small import CURED, load

model = load("models/qwen3-tied")
if CURED:
    save_model(model, "out/tied.safetensors")
else:
    save_file(model.state_dict(), "out/tied.safetensors")
