"""Save models as vLLM's sharded_state: `python -m tests.genuine.save_sharded_state CASES`, where vLLM is installed.

CASES is a JSON list of [model, folder, arguments of `vllm.LLM`].
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
from pathlib import Path


def main(cases: str) -> None:
    """Load each model, and save what vLLM has in memory, with what is beside it, as its example does."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    from tests.genuine.serve_vllm import SETTINGS

    for model, folder, options in json.loads(cases):
        llm = LLM(model=model, **{**SETTINGS, **options})
        Path(folder).mkdir()
        llm.llm_engine.engine_core.save_sharded_state(path=folder)
        for file in Path(model).iterdir():
            if file.suffix not in (".safetensors", ".bin"):
                shutil.copy(file, folder)
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0|1")  # a core for each of two ranks
    main(sys.argv[1])
