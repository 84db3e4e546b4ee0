"""The targets: each parser, called as users do, on genuine files with one of them replaced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import reshard
from reshard.base.errors import ReshardError
from reshard.base.plain_json import json_of
from reshard.base.plain_yaml import yaml_of
from reshard.base.values import parse_size
from reshard.containers.torchfiles.pickles import loads
from reshard.containers.torchfiles.read import read_torch_file
from reshard.formats.gguf.sentencepiece import pieces
from reshard.transfer.source_files import Sources
from tests.fuzz import calls, mutate, seeds
from tests.fuzz.calls import alone, directly, file_of, in_copy, pickled
from tests.fuzz.seeds import encoded, files, pickles


class Target(NamedTuple):
    """A parser. `seeds` are genuine inputs; if none are stored, they are made in the given folder.

    `open` makes the function that takes inputs, in an empty folder. That function may only raise `errors`.
    """

    mutate: mutate.Mutator
    seeds: Callable[[Path], list[bytes]]
    open: calls.Open
    errors: tuple[type[Exception], ...] = (ReshardError,)


def _bytes(found: Callable[[], list[bytes]], open: calls.Open, **more: tuple[type[Exception], ...]) -> Target:
    return Target(mutate.of_bytes, lambda folder: found(), open, **more)


def _text(found: Callable[[], list[bytes]], open: calls.Open, **more: tuple[type[Exception], ...]) -> Target:
    return Target(mutate.of_words, lambda folder: found(), open, **more)


def _json(found: Callable[[], list[bytes]], open: calls.Open, **more: tuple[type[Exception], ...]) -> Target:
    return Target(mutate.of_json, lambda folder: found(), open, **more)


def _pickle(found: Callable[[], list[bytes]], open: calls.Open) -> Target:
    return Target(mutate.of_pickle, lambda folder: found(), open)


def _made(make: Callable[[Path], Path], name: str, call: Callable[[Path], object]) -> Target:
    return Target(
        mutate.of_json, lambda folder: calls.content_of(make, name, folder), in_copy(make, name, call)
    )


NANOTRON = "nanotron/llama-interleaved-tp2/10"
QKV = "model/model/decoder/0/pp_block/attn/qkv_proj/model_weight_pp-rank-0-of-1_tp-rank-1-of-2.safetensors"
MISTRAL, SWIFT = "peers/bridge/base-mistral", "peers/swift/qwen3/checkpoint-3"
RANKS = (
    "fsdp_ranks/*/*/*rank*0.*",
    "internlm/*/*.pt",
    "deepspeed/z[23]/*/*.pt",
    "peers/swift/*/*/*/common.pt",
)

TARGETS: dict[str, Target] = {
    # What all others stand on.
    "json": _json(lambda: files("**/config.json"), directly(json_of), errors=(ValueError,)),
    "yaml": _text(lambda: files("**/run_config.yaml"), directly(yaml_of), errors=(ValueError,)),
    "pickle": _pickle(lambda: pickles(*RANKS), directly(lambda data: loads(data, "file"))),
    "torch-file": _bytes(
        lambda: files("fsdp_ranks/torch-2.6.0/*/*", "verl/*/*/*/extra*.pt"),
        alone("a.pt", lambda path: read_torch_file(path, Sources())),
    ),
    "torch-file-as-torch": _pickle(
        lambda: pickles(*RANKS),
        in_copy(
            lambda folder: seeds.copied("internlm/llama-tp2", folder),
            "model_tp0_pp0.pt",
            lambda folder: calls.torch_file_as_torch(folder / "model_tp0_pp0.pt"),
            pickled,
        ),
    ),
    "gguf": _bytes(lambda: files("foreign/*.gguf"), alone("model.gguf", reshard.inspect)),
    "safetensors": _bytes(seeds.safetensors, alone("model.safetensors", calls.safetensors_as_its_library)),
    # Hugging Face folders, and what reshard leaves in its own.
    "config": _json(
        lambda: files("peers/**/config.json", "**/config.json"),
        file_of(MISTRAL, "config.json", calls.to_megatron),
    ),
    "mistral-params": _json(lambda: files("mistral/params.json"), file_of("mistral", "params.json")),
    "litgpt-config": _text(lambda: files("litgpt/*.yaml"), file_of("litgpt", "model_config.yaml")),
    "mlx-config": _json(lambda: files("mlx/config.json"), file_of("mlx", "config.json")),
    "mlx-weights": _bytes(lambda: files("mlx/model.safetensors"), file_of("mlx", "model.safetensors")),
    "nanotron-config": _json(
        lambda: files("nanotron/*/10/model_config.json"), file_of(NANOTRON, "model_config.json")
    ),
    "nanotron-part": _bytes(lambda: files(f"nanotron/*/10/{QKV}"), file_of(NANOTRON, QKV)),
    "deepseek-config": _json(
        lambda: files("deepseek_inference/*/config_*.json"),
        file_of("deepseek_inference/v3.2", "config_v3.2.json"),
    ),
    "index": _made(calls.sharded, "model.safetensors.index.json", calls.to_megatron),
    "tokenizer": _json(seeds.vocabularies, file_of(MISTRAL, "tokenizer.json", calls.to_megatron)),
    "tokenizer-config": _json(
        seeds.vocabularies, file_of(MISTRAL, "tokenizer_config.json", calls.to_megatron)
    ),
    "record": _made(calls.sharded, "reshard.json", calls.replaced),
    "journal": _text(lambda: encoded(seeds.JOURNAL), calls.journal),
    "adapter-config": _made(calls.adapter, "adapter_config.json", calls.merged),
    # GGUF.
    "gguf-as-source": Target(
        mutate.of_bytes,
        lambda folder: calls.content_of(calls.as_gguf, "model.gguf", folder),
        in_copy(calls.as_gguf, "model.gguf", calls.to_hub),
    ),
    "gguf-tokenizer": _json(
        lambda: files("gguf/*/tokenizer.json"), file_of(MISTRAL, "tokenizer.json", calls.to_gguf)
    ),
    "gguf-tokenizer-config": _json(
        lambda: files("gguf/*/tokenizer_config.json"),
        file_of(MISTRAL, "tokenizer_config.json", calls.to_gguf),
    ),
    "gguf-pieces": _bytes(lambda: files("gguf/*/tokenizer.model"), directly(pieces), errors=(ValueError,)),
    # Megatron.
    "dcp-metadata": _pickle(
        lambda: files("torchtitan/*/checkpoint/*/.metadata"),
        file_of("torchtitan/qwen3", "checkpoint/*/.metadata"),
    ),
    "megatron-metadata": _pickle(lambda: files("peers/**/.metadata"), file_of(SWIFT, "*/.metadata")),
    "megatron-arguments": _pickle(
        lambda: pickles("peers/**/common.pt"), file_of(SWIFT, "*/common.pt", put=pickled)
    ),
    "megatron-chunk": _bytes(lambda: files(f"{SWIFT}/*/__1_1.distcp"), file_of(SWIFT, "*/__1_1.distcp")),
    "megatron-tracker": _bytes(
        lambda: encoded("3", "release"), file_of(SWIFT, "latest_checkpointed_iteration.txt")
    ),
    "zarr-array": _json(
        lambda: files("megatron_zarr/*/zarr/*/*.weight/.zarray"),
        file_of("megatron_zarr/qwen2-tp2-pp2/zarr", "*/*.linear_qkv.weight/.zarray"),
    ),
    "nemo-archive": _bytes(lambda: [seeds.archive()], alone("a.nemo", reshard.inspect)),
    "nemo-config": _text(seeds.nemo_configs, in_copy(seeds.unpacked, "model_config.yaml", reshard.inspect)),
    "run-config": _text(
        lambda: files("peers/bridge/**/run_config.yaml"), file_of("peers/bridge/mistral", "*/run_config.yaml")
    ),
    "swift-args": _json(
        lambda: files("**/args.json"), file_of("megatron_lora/swift-tp2", "args.json", calls.merged)
    ),
    # Other engines.
    "deepspeed-model": _pickle(
        lambda: pickles("deepspeed/*/*/mp_rank_00_model_states.pt"),
        file_of("deepspeed/z2", "*/mp_rank_00_model_states.pt", put=pickled),
    ),
    "deepspeed-zero": _pickle(
        lambda: pickles("deepspeed/*/*/*zero_pp_rank_0_*optim_states.pt"),
        file_of("deepspeed/z2", "*/*zero_pp_rank_0_*optim_states.pt", put=pickled),
    ),
    "deepspeed-latest": _bytes(lambda: encoded("global_step2"), file_of("deepspeed/z2", "latest")),
    "internlm-config": _pickle(
        lambda: pickles("internlm/*/model_config.pt"),
        file_of("internlm/internlm2-tp2pp2", "model_config.pt", put=pickled),
    ),
    "internlm-rank": _pickle(
        lambda: pickles("internlm/*/model_tp0_*.pt"),
        file_of("internlm/internlm2-tp2pp2", "model_tp0_pp0.pt", put=pickled),
    ),
    "fsdp-dtensor": _pickle(
        lambda: pickles("fsdp_ranks/*/*/*rank_1.pt"),
        file_of("fsdp_ranks/torch-2.10.0/fsdp2-tp", "*rank_1.pt", reshard.inspect, put=pickled),
    ),
    "fsdp-sharded": _pickle(
        lambda: pickles("fsdp_ranks/*/*/*rank1.bin"),
        file_of("fsdp_ranks/torch-2.6.0/fsdp1", "*rank1.bin", reshard.inspect, put=pickled),
    ),
    "fsdp-optimizer": _pickle(
        lambda: pickles("verl/fsdp2/*/*/optim*.pt"),
        file_of("verl/fsdp2/global_step_3/actor", "optim*rank_0.pt", calls.to_ranks, pickled),
    ),
    "fsdp-training-state": _pickle(
        lambda: pickles("verl/*/*/*/extra*.pt"),
        file_of("verl/fsdp2/global_step_3/actor", "extra*rank_0.pt", calls.to_ranks, pickled),
    ),
    "verl-config": _json(
        lambda: files("verl/**/fsdp_config.json"),
        file_of("verl/fsdp1/global_step_3/actor", "fsdp_config.json"),
    ),
    # What users type and train with.
    "size": _text(
        lambda: encoded(*seeds.SIZES), directly(lambda data: parse_size(data.decode("utf-8", "replace")))
    ),
    "url": _text(lambda: encoded(*seeds.URLS), directly(calls.url)),
    "marker": _json(lambda: encoded(seeds.MARKER), directly(calls.marker)),
    "arguments": _text(lambda: encoded(*seeds.ARGUMENTS), calls.arguments),
    "train-data": Target(
        mutate.of_json_lines, lambda folder: seeds.rows_as(seeds.as_lines), calls.data("data.jsonl")
    ),
    "train-data-json": _json(lambda: seeds.rows_as(seeds.as_array), calls.data("data.json")),
    "train-data-compressed": _bytes(lambda: seeds.rows_as(seeds.as_compressed), calls.data("data.jsonl.gz")),
    "train-data-parquet": _bytes(lambda: seeds.rows_as(seeds.as_parquet), calls.data("data.parquet")),
    # What the doctor reads.
    "doctor-log": _text(seeds.logs, alone("train.log", calls.diagnosed)),
    "doctor-script": _text(seeds.scripts, alone("train.py", calls.diagnosed)),
    "doctor-launch": _text(lambda: encoded(*seeds.LAUNCHES), alone("launch.sh", calls.diagnosed)),
    "doctor-yaml": _text(lambda: encoded(*seeds.YAMLS), alone("config.yaml", calls.diagnosed)),
    "doctor-json": _json(lambda: encoded(*seeds.JSONS), alone("ds_config.json", calls.diagnosed)),
}
