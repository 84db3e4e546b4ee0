"""A safetensors file is really a Git LFS pointer."""

from small import LFS_POINTER, copied, load

path = copied("qwen3") / "model.safetensors"
path.write_text(LFS_POINTER)
load(path.parent)
