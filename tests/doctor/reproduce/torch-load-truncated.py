"""A .pt or .bin archive is cut off."""

import torch
from small import copied, load

folder = copied("qwen3")
(folder / "model.safetensors").unlink()
path = folder / "pytorch_model.bin"
torch.save(load().state_dict(), path)
path.write_bytes(path.read_bytes()[:200000])
load(folder)
