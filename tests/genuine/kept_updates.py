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

from tests.genuine.after_import import after_import

SITE = after_import(
    "reshard.live.vllm_transfer", "from tests.genuine import kept_updates\nkept_updates.watch(module)"
)


def prepare(out: Path) -> dict[str, str]:
    """The variables with which a server must be started."""
    (out / "site").mkdir(parents=True)
    (out / "site/sitecustomize.py").write_text(SITE)
    paths = (out / "site", Path.cwd(), *filter(None, [os.environ.get("PYTHONPATH")]))
    return {"KEEP_IN": str(out), "PYTHONPATH": ":".join(map(str, paths))}


def watch(module: Any) -> None:
    """Keep what passes through the backend."""
    import torch

    from reshard.live.transfer_meeting import Meeting

    engine, layers, receiving = module.ReshardTransferEngine, module.LayersOf, Meeting.receive
    kept: dict[str, Any] = {}
    memory = {"now": 0, "most": 0}
    filling, receive = layers.filling, engine.receive_weights

    @contextmanager
    def keeping(self: Any, names: Any) -> Any:
        with filling(self, names) as targets:
            yield targets
            kept.update({name: tensor.detach().clone() for name, tensor in targets.items()})

    def counted(meeting: Any, buffer: torch.Tensor, sender: int) -> int:
        memory["now"] += buffer.nbytes
        memory["most"] = max(memory["most"], memory["now"])
        weakref.finalize(buffer, freed, buffer.nbytes)
        return receiving(meeting, buffer, sender)

    def freed(nbytes: int) -> None:
        memory["now"] -= nbytes

    def received(self: Any, info: Any) -> None:
        receive(self, info)
        path = f"{os.environ['KEEP_IN']}/update-{info.number}-rank-{self.parallel_config.rank}.pt"
        torch.save({"parameters": dict(kept), "most": memory["most"]}, path)

    layers.filling, Meeting.receive, engine.receive_weights = keeping, counted, received
