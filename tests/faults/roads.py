"""Conversions for faults: a source of every kind, and an output of every kind.

Sources are files of the frameworks, in tests/data; sources in reshard's own output are made of those.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import reshard
from tests.faults.run import Check, Scene, content

DATA = Path(__file__).parents[1] / "data"
MISTRAL = DATA / "peers" / "bridge" / "base-mistral"
LLAMA = DATA / "megatron_lora" / "base-llama"
SWIFT = DATA / "peers" / "swift" / "qwen3" / "checkpoint-3"
Make = Callable[[Path], object]


def copied(source: Path | str) -> Make:
    return lambda out: shutil.copytree(DATA / source, out)


def converted(source: Path, **options: Any) -> Make:
    return lambda out: reshard.convert(source, out, **options)


def as_pytorch_model(out: Path) -> None:
    """A folder with weights saved by `torch.save`."""
    import torch
    from safetensors.torch import load_file

    shutil.copytree(MISTRAL, out)
    torch.save(load_file(out / "model.safetensors"), out / "pytorch_model.bin")
    (out / "model.safetensors").unlink()


def unpacked(archive: str) -> Make:
    return lambda out: shutil.unpack_archive(DATA / archive, out, "tar")


def adapter(out: Path) -> None:
    """An adapter in PEFT's format."""
    reshard.convert(DATA / "megatron_lora" / "swift-tp2", out, to="peft", base=LLAMA, no_tokenizer=True)


def mlx_adapter(out: Path) -> None:
    """An adapter of mlx-lm: the factors of one of PEFT's, turned."""
    import json

    from safetensors.numpy import load_file, save_file

    adapter(out)
    parts = load_file(out / "adapter_model.safetensors")
    names = {".lora_A.weight": ".lora_a", ".lora_B.weight": ".lora_b"}
    turned = {
        name.removeprefix("base_model.model.").replace(of_peft, of_mlx): np.ascontiguousarray(value.T)
        for name, value in parts.items()
        for of_peft, of_mlx in names.items()
        if name.endswith(of_peft)
    }
    shutil.rmtree(out)
    out.mkdir()
    save_file(turned, out / "adapters.safetensors")
    settings = {"fine_tune_type": "lora", "lora_parameters": {"rank": 4, "scale": 2.0, "dropout": 0.0}}
    (out / "adapter_config.json").write_text(json.dumps(settings))


class Road(NamedTuple):
    """A function that makes the source (and, at `base`, its base), and the flags of the command."""

    make: Make
    flags: tuple[str, ...]
    base: Make | None = None
    overwrite: bool = False
    interrupted: bool = False


ROADS: dict[str, Road] = {
    "safetensors to torch_dist": Road(copied(MISTRAL), ("--to", "megatron", "--tp", "2", "--pp", "2")),
    "shards to legacy": Road(
        converted(MISTRAL, to="huggingface", max_shard_size="20kB"), ("--to", "megatron-legacy", "--tp", "2")
    ),
    "pytorch_model.bin to dcp": Road(as_pytorch_model, ("--to", "dcp", "--verify")),
    "torch_dist to shards": Road(copied(SWIFT), ("--max-shard-size", "20kB")),
    "legacy to torch_dist": Road(
        converted(MISTRAL, to="megatron-legacy", tp=2, pp=2), ("--to", "megatron", "--tp", "4")
    ),
    "zarr to safetensors": Road(copied("megatron_zarr/qwen2-tp2-pp2/zarr"), ()),
    "nemo to torch_dist": Road(unpacked("nemo/ranks-tp2-pp2.nemo"), ("--to", "megatron", "--tp", "2")),
    "megatron-fsdp to megatron-fsdp": Road(
        copied("megatron_fsdp/qwen3"), ("--to", "megatron-fsdp", "--with-optimizer")
    ),
    "nanotron to safetensors": Road(copied("nanotron/llama-tp2-pp2"), ()),
    "deepseek-inference to safetensors": Road(copied("deepseek_inference/v3.2"), ()),
    "meta to meta": Road(copied("meta"), ("--to", "meta", "--tp", "2", "--no-tokenizer")),
    "internlm to safetensors": Road(copied("internlm/internlm2-tp2pp2"), ("--verify",)),
    "internlm to internlm": Road(copied("internlm/llama-tp2"), ("--to", "internlm", "--pp", "2")),
    "dcp to safetensors": Road(copied("torchtitan/qwen3"), ()),
    "fsdp-ranks to safetensors": Road(copied("verl/fsdp2-hsdp/global_step_3/actor"), ("--dtype", "float32")),
    "fsdp-ranks to fsdp-ranks": Road(
        copied("verl/fsdp2/global_step_3/actor"), ("--to", "fsdp-ranks", "--dp", "3", "--with-optimizer")
    ),
    "deepspeed to safetensors": Road(copied("deepspeed/z3"), ()),
    "deepspeed to universal": Road(copied("deepspeed/z2"), ("--to", "deepspeed", "--with-optimizer")),
    "adapter of mlx-lm merged": Road(mlx_adapter, ("--merge",), copied(LLAMA)),
    "adapter to peft": Road(copied("megatron_lora/swift-tp2"), ("--to", "peft"), copied(LLAMA)),
    "adapter merged": Road(adapter, ("--merge",), copied(LLAMA)),
    "fp8 to bfloat16": Road(
        converted(MISTRAL, to="huggingface", quantize="fp8"), ("--to", "megatron", "--dtype", "bfloat16")
    ),
    "litgpt to safetensors": Road(copied("litgpt"), ()),
    "mistral to mistral": Road(copied("mistral"), ("--to", "mistral", "--verify")),
    "paddle to safetensors": Road(copied("paddle/nlp-llama-fused"), ()),
    "sharded_state to safetensors": Road(copied("vllm/tp2"), ()),
    "mlx to safetensors": Road(copied("mlx"), ("--no-tokenizer",)),
    "quantized for mlx": Road(copied(MISTRAL), ("--to", "mlx", "--quantize", "affine-4-32")),
    "safetensors to gguf": Road(copied(MISTRAL), ("--to", "gguf")),
    "gguf to safetensors": Road(converted(MISTRAL, to="gguf", no_tokenizer=True), ("--to", "huggingface")),
    "safetensors to orbax": Road(copied(LLAMA), ("--to", "orbax", "--no-tokenizer")),
    "orbax to unscanned": Road(
        converted(LLAMA, to="orbax", no_tokenizer=True), ("--to", "orbax-unscanned", "--no-tokenizer")
    ),
    "unscanned to safetensors": Road(
        converted(LLAMA, to="orbax-unscanned", no_tokenizer=True), ("--no-tokenizer",)
    ),
    "quantized": Road(copied(MISTRAL), ("--to", "huggingface", "--quantize", "fp8")),
    "continued": Road(copied(MISTRAL), ("--to", "megatron", "--tp", "2"), interrupted=True),
    "replaced": Road(copied(MISTRAL), ("--to", "megatron", "--overwrite"), overwrite=True),
}


CHECKS = {
    "verify of two": (copied(MISTRAL), ("verify", MISTRAL)),
    "verify of one": (converted(MISTRAL, to="megatron-legacy", tp=2), ("verify",)),
    "inspect": (copied(SWIFT), ("inspect",)),
}
"""A function that makes a checkpoint, and the command that finds its damage."""


def check(name: str, root: Path) -> Check:
    """A checkpoint with one changed byte, or without a file, and the command that finds it."""
    make, words = CHECKS[name]
    make(root / "src")
    if name == "inspect":
        next((root / "src").glob("*/__1_0.distcp")).unlink()
    else:
        damaged = max((root / "src").rglob("*.*"), key=lambda path: path.stat().st_size)
        content = bytearray(damaged.read_bytes())
        content[len(content) // 2] ^= 1
        damaged.write_bytes(content)
    return Check(root, (*words, root / "src"))


def scene(road: Road, root: Path, workers: int = 1) -> Scene:
    """The conversion in an empty folder."""
    road.make(root / "src")
    words: list[object] = ["convert", root / "src", root / "dst", "--no-tokenizer", "--workers", workers]
    if road.base:
        road.base(root / "base")
        words += ["--base", root / "base"]
    before = None
    if road.overwrite:
        reshard.convert(root / "src", root / "dst", to="megatron-legacy", no_tokenizer=True)
        before = content(root / "dst")
    return Scene(root, (*words, *road.flags), before, road.interrupted)
