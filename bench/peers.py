"""Tools that people use for the same conversions on a CPU, as commands: `python -m bench.peers NAME SRC DST`."""

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


def fp8_cast_bf16(src: Path, dst: Path) -> None:
    """DeepSeek's script of this name, computed in torch instead of a GPU kernel: file by file, block by block."""
    import torch
    from safetensors.torch import load_file, save_file

    dst.mkdir(parents=True)
    for file in sorted(src.glob("*.safetensors")):
        stored = load_file(file)
        for name in [name for name in stored if name.endswith("_scale_inv")]:
            scales, weight = stored.pop(name), name.removesuffix("_scale_inv")
            rows, columns = stored[weight].shape
            scales = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
            stored[weight] = (stored[weight].float() * scales).to(torch.bfloat16)
        save_file(stored, dst / file.name, metadata={"format": "pt"})


def bf16_cast_fp8(src: Path, dst: Path) -> None:
    """The inverse, by the formula of its `weight_quant`."""
    import torch
    from safetensors.torch import load_file, save_file
    from torch.nn.functional import pad

    dst.mkdir(parents=True)
    for file in sorted(src.glob("*.safetensors")):
        stored = load_file(file)
        for name in [name for name in stored if name.endswith("_proj.weight")]:
            rows, columns = stored[name].shape
            padded = pad(stored[name].float(), (0, -columns % 128, 0, -rows % 128))
            blocks = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
            scales = blocks.abs().amax((1, 3)) / 448
            codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
            stored[name] = codes.flatten(2).flatten(0, 1)[:rows, :columns].contiguous()
            stored[f"{name}_scale_inv"] = scales
        save_file(stored, dst / file.name, metadata={"format": "pt"})


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
    """DeepSpeed's script, which it saves next to each checkpoint."""
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as convert

    convert(str(src), str(dst))  # to pytorch_model.bin: with safetensors it refuses tied weights


def merge_and_unload(src: Path, dst: Path) -> None:
    """peft's merge into the model that the adapter names."""
    from peft import AutoPeftModelForCausalLM

    AutoPeftModelForCausalLM.from_pretrained(src, dtype="bfloat16").merge_and_unload().save_pretrained(dst)


if __name__ == "__main__":
    name, src, dst = sys.argv[1:]
    globals()[name](Path(src), Path(dst))
