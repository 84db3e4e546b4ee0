"""The folder has no file with weights."""

from small import CURED, copied, load

folder = copied("qwen3")
if not CURED:
    (folder / "model.safetensors").unlink()
load(folder)
