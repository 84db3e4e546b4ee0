"""A safetensors file is empty."""

from small import copied, load

path = copied("qwen3") / "model.safetensors"
path.write_bytes(b"")
load(path.parent)
