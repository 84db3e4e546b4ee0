"""The folder has no usable config.json."""

from small import CURED, copied, load

folder = copied("qwen3")
if not CURED:
    (folder / "config.json").unlink()
load(folder)
