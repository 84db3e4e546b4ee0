"""Load a model into vLLM and record what its loaders do: `python -m tests.genuine.record_vllm MODEL OUT TP`.

OUT gets the recording of each rank, and the parameters that the rank then has, as `rank-N.pt`. vLLM starts ranks as
processes of their own, in which `sitecustomize` below keeps the parameters: put `OUT/site` on PYTHONPATH.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.genuine.after_import import after_import

KEEP = """
import os, torch
before = module.Landings.recording

def recording(self, model, engine, shapes, rank=0, ranks=1):
    kept = {name: each.detach().clone() for name, each in model.named_parameters()}
    torch.save(kept, os.environ["KEEP_IN"] + f"/rank-{rank}.pt")
    return before(self, model, engine, shapes, rank, ranks)

module.Landings.recording = recording
"""


def prepare(out: Path) -> dict[str, str]:
    """The variables with which this must be started."""
    (out / "site").mkdir(parents=True)
    (out / "site/sitecustomize.py").write_text(after_import("reshard.live.record_loading", KEEP))
    binding = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1", "HF_HUB_OFFLINE": "1"}
    return {**binding, "KEEP_IN": str(out), "PYTHONPATH": str(out / "site")}


def main(model: str, out: str, tp: str) -> None:
    """Load and record."""
    from vllm import LLM

    LLM(
        model=model,
        load_format="reshard",
        model_loader_extra_config={"record": out},
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=4,
        dtype="float32",
        skip_tokenizer_init=True,
        tensor_parallel_size=int(tp),
        gpu_memory_utilization=0.5,
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(*sys.argv[1:])
