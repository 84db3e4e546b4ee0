"""Weights were missing and have been drawn at random."""

from safetensors.torch import load_file, save_file
from small import CURED, copied, load

folder = copied("qwen3")
state = load_file(folder / "model.safetensors")
kept = {name: tensor for name, tensor in state.items() if CURED or "layers.1.mlp" not in name}
save_file(kept, folder / "model.safetensors", {"format": "pt"})
load(folder)
