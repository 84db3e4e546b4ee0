"""What people use for the same roads on a CPU, each as a command: `python -m bench.peers NAME SRC DST`."""

from __future__ import annotations

import sys
from pathlib import Path


def dcp_load_all(src: Path, dst: Path) -> None:
    """torch.distributed.checkpoint loads every tensor, safetensors saves them: the core of most exporters."""
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = dcp.FileSystemReader(src)
    entries = reader.read_metadata().state_dict_metadata
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(state, storage_reader=dcp.FileSystemReader(src), no_dist=True)
    dst.mkdir(parents=True)
    save_file(state, dst / "model.safetensors", metadata={"format": "pt"})


def dcp_to_torch_save(src: Path, dst: Path) -> None:
    """torch's own converter, to one torch.save file."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save as convert

    convert(src, dst)


if __name__ == "__main__":
    name, src, dst = sys.argv[1:]
    {"dcp_load_all": dcp_load_all, "dcp_to_torch_save": dcp_to_torch_save}[name](Path(src), Path(dst))
