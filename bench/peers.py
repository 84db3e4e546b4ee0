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


def merge_weights(src: Path, dst: Path) -> None:
    """`accelerate merge-weights`."""
    from accelerate.utils import merge_fsdp_weights

    merge_fsdp_weights(str(src / "pytorch_model_fsdp_0"), str(dst), safe_serialization=True)


def verl_merger(src: Path, dst: Path) -> None:
    """`python -m verl.model_merger merge --backend fsdp`."""
    from verl.model_merger.base_model_merger import ModelMergerConfig
    from verl.model_merger.fsdp_model_merger import FSDPModelMerger

    config = ModelMergerConfig(
        operation="merge",
        backend="fsdp",
        local_dir=str(src),
        target_dir=str(dst),
        hf_model_config_path=str(src / "huggingface"),
    )
    FSDPModelMerger(config).merge_and_save()


def zero_to_fp32(src: Path, dst: Path) -> None:
    """DeepSpeed's script, which it leaves beside each checkpoint."""
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as convert

    convert(str(src), str(dst))  # to pytorch_model.bin: as safetensors it refuses tied weights


def merge_and_unload(src: Path, dst: Path) -> None:
    """peft's merge, into the model that the adapter names."""
    from peft import AutoPeftModelForCausalLM

    AutoPeftModelForCausalLM.from_pretrained(src, dtype="bfloat16").merge_and_unload().save_pretrained(dst)


if __name__ == "__main__":
    name, src, dst = sys.argv[1:]
    globals()[name](Path(src), Path(dst))
