"""In each process of a vLLM server: keep the parameters of each update as their loaders would fill them, and memory.

`sitecustomize` in a folder on PYTHONPATH runs this; `$KEEP_IN` gets `update-N-rank-R.pt`, with the most bytes of
messages that were in memory at once.
"""

from __future__ import annotations

import os
import weakref
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SITE = """
import importlib.util, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "reshard.live.vllm_transfer":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            from tests.genuine import kept_updates
            kept_updates.watch(module)

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


def prepare(out: Path) -> dict[str, str]:
    """The variables with which a server must be started."""
    (out / "site").mkdir(parents=True)
    (out / "site/sitecustomize.py").write_text(SITE)
    return {"KEEP_IN": str(out), "PYTHONPATH": f"{out / 'site'}:{Path.cwd()}"}


def watch(module: Any) -> None:
    """Keep what passes through the backend."""
    import torch

    engine, layers, begun = module.ReshardTransferEngine, module.LayersOf, module._begun
    kept: dict[str, Any] = {}
    memory = {"now": 0, "most": 0}
    filling, receive = layers.filling, engine.receive_weights

    @contextmanager
    def keeping(self: Any, names: Any) -> Any:
        with filling(self, names) as targets:
            yield targets
            kept.update({name: tensor.detach().clone() for name, tensor in targets.items()})

    def counted(*given: Any) -> Any:
        incoming = begun(*given)
        memory["now"] += incoming.buffer.nbytes
        memory["most"] = max(memory["most"], memory["now"])
        weakref.finalize(incoming.buffer, freed, incoming.buffer.nbytes)
        return incoming

    def freed(nbytes: int) -> None:
        memory["now"] -= nbytes

    def received(self: Any, info: Any) -> None:
        receive(self, info)
        path = f"{os.environ['KEEP_IN']}/update-{info.number}-rank-{self.parallel_config.rank}.pt"
        torch.save({"parameters": dict(kept), "most": memory["most"]}, path)

    layers.filling, module._begun, engine.receive_weights = keeping, counted, received
