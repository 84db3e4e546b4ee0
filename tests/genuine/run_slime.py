"""Run slime's `tools/convert_torch_dist_to_hf.py` on a CPU, from its source: slime is on no package index.

    git clone https://github.com/THUDM/slime && git -C slime checkout 624b824a8
    python -m tests.genuine.run_slime slime ARGUMENTS…

Of slime, only the module with its names is imported: its package needs the GPU image. `tests/data/scripts/slime` is
what it left of `tests/data/megatron_zarr/qwen2-tp2-pp2/torch_dist`, with the files there that are no weights as
--origin-hf-dir.
"""

from __future__ import annotations

import runpy
import sys
from types import ModuleType


def main(root: str, *words: str) -> None:
    """Run the script in the source at `root`."""
    sys.path.insert(0, root)
    for name in ("slime", "slime.backends", "slime.backends.megatron_utils"):
        package = ModuleType(name)
        package.__path__ = [f"{root}/{name.replace('.', '/')}"]
        sys.modules[name] = package
    sys.argv = [f"{root}/tools/convert_torch_dist_to_hf.py", *words]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
