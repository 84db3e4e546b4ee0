"""A safetensors file is cut off."""

from small import copied, load

path = copied("qwen3") / "model.safetensors"
path.write_bytes(path.read_bytes()[:200000])
load(path.parent)
