"""As `remedy_cases.py`: configs, tensors, adapters and optimizer states that do not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from reshard.containers.dcp_metadata import DcpMetadata
from tests.bad_input.damage import edit_config, edit_metadata, edit_tensors
from tests.bad_input.remedy_cases import SRC, TO_MEGATRON, Case, _cast
from tests.commandline import reshard

Change = Callable[[Path], object]
Tensors = dict[str, Any]

PLAIN = {"src": "qwen3", "base": "qwen3"}
MOE = {"src": "qwen3_moe", "base": "qwen3_moe"}
NATIVE = {"src": "torch_dist", "base": "qwen3"}
ADAPTER = {"src": "adapter", "base": "llama"}
BRIDGE = {"src": "data megatron_lora/bridge-tp2", "base": "data megatron_lora/base-llama"}
ZERO = {"src": "data deepspeed/z2"}
VERL = {"src": "data verl/fsdp2/global_step_3/actor"}
RANKS = "convert src dst --to fsdp-ranks --dp 3 --with-optimizer"
TRAINED = {"src": "frozen q_proj", "base": "qwen3"}
EVO = {"src": "internlm2"}
DIR = {"DIR": "base"}
MERGE = "convert src dst --merge --base base"
FUSE = "convert src dst --to megatron --base base"
STATES = "convert src dst --to megatron --base base --with-optimizer"
STATES_IN_DCP = ("--to", "dcp", "--with-optimizer")
BUFFERS = "convert src dst --to megatron --with-optimizer --no-tokenizer"
TO_EVO = "convert src dst --to internlm --no-tokenizer"
QUERY = "model.layers.1.self_attn.q_proj.weight"


def config(**changes: Any) -> Change:
    """Change every config.json of the source."""
    return lambda there: [
        edit_config(path.parent, **changes) for path in (there / "src").rglob("config.json")
    ]


def without_config(there: Path) -> None:
    for path in (there / "src").rglob("config.json"):
        path.unlink()


def with_tensors_in_schedule(there: Path) -> None:
    import torch

    for path in (there / "src").glob("extra_state*"):
        torch.save({"lr_scheduler": {"base_lrs": [torch.tensor(1.0)]}}, path)


def tensors(change: Callable[[Tensors], object], folder: str = "src") -> Change:
    return lambda there: edit_tensors(there / folder, change)


def without_masters(there: Path) -> None:
    """Remove the masters from the buffers of an optimizer."""

    def change(metadata: DcpMetadata) -> None:
        for key in [key for key in metadata.tensors if key.endswith(".param")]:
            del metadata.tensors[key]

    edit_metadata(there / "src/iter_0000001", change)


def exchange_layers(there: Path) -> None:
    """Exchange the weights of two layers, which Megatron stacks."""

    def change(metadata: DcpMetadata) -> None:
        chunks = metadata.tensors["decoder.layers.self_attention.linear_proj.weight"].chunks
        first, second, *rest = sorted(chunks)
        exchanged = [first._replace(offsets=second.offsets), second._replace(offsets=first.offsets)]
        chunks[:] = [*exchanged, *rest]

    edit_metadata(there / "src/iter_0000001", change)


def settings(**changes: Any) -> Change:
    """Change the settings of an adapter."""

    def change(there: Path) -> None:
        path = there / "src/adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def pairs(change: Callable[[Tensors], Tensors]) -> Change:
    """Change the tensors of an adapter."""

    def apply(there: Path) -> None:
        path = there / "src/adapter_model.safetensors"
        save_file(change(load_file(path)), path, metadata={"format": "pt"})

    return apply


def _of_two(found: Tensors) -> Tensors:
    return {
        name.replace(".weight", f".{each}.weight"): tensor
        for name, tensor in found.items()
        for each in ("one", "two")
    }


def _with_names_of_nobody(there: Path) -> None:
    config(model_type="nobodys")(there)
    edit_tensors(
        there / "src",
        lambda held: [held.update({name.replace("layers", "blocks"): held.pop(name)}) for name in [*held]],
    )


def _with_another_tower(there: Path) -> None:
    file = there / "other" / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b"visual.pos_embed.", b"visual.positions."))


def _with_a_head(there: Path) -> None:
    config(architectures=["Qwen3ForSequenceClassification"])(there)
    edit_tensors(
        there / "src",
        lambda held: [
            held.pop("lm_head.weight"),
            held.update({"score.weight": np.ones((2, 64), np.float32)}),
        ],
    )


def _with_a_record_that_was_edited(there: Path) -> None:
    assert reshard("convert", "src", "dst", "--to", "megatron").code == 0
    shutil.move("src", "SRC")
    shutil.move("dst", "DST")
    path = there / "DST/reshard.json"
    path.write_text(path.read_text().replace('"options"', '"options" ', 1))


def _with_a_base_that_was_moved(there: Path) -> None:
    without_config(there)
    assert reshard("convert", "src", "dst", "--base", "base").code == 0
    shutil.move("base", "moved")


def _step_without_tracker(there: Path) -> None:
    (there / "src/latest").unlink()
    shutil.copytree(there / "src/global_step2", there / "src/global_step99")


def _in_a_run(there: Path) -> None:
    (there / "run").mkdir()
    shutil.move("src", "run/step-3")


def less(begin: str) -> Change:
    """Remove the tensors whose names begin so, of any dtype."""

    def change(there: Path) -> None:
        from safetensors.torch import load_file, save_file

        path = there / "src" / "model.safetensors"
        kept = {name: each for name, each in load_file(path).items() if not name.startswith(begin)}
        save_file(kept, path, metadata={"format": "pt"})

    return change


def _trained_without_a_norm(there: Path) -> None:
    """A run with states, of which a norm was not saved, and the complete model."""

    def change(metadata: DcpMetadata) -> None:
        for key in [key for key in metadata.tensors if key.endswith("model.norm.weight")]:
            del metadata.tensors[key]

    assert reshard("convert", "src", "base", "--no-tokenizer").code == 0
    assert reshard("convert", "src", "dcp", *STATES_IN_DCP, "--no-tokenizer").code == 0
    edit_metadata(there / "dcp", change)


FILLED = "convert src dst --no-tokenizer --fill-from base"
CASES: dict[str, list[Case]] = {
    "fill-quantization-differs": [Case({"src": "fp8", "base": "qwen3"}, FILLED, {}, less("lm_head."))],
    "filled-tensors-without-states": [
        Case(
            VERL,
            "convert dcp dst --to megatron --no-tokenizer --with-optimizer --fill-from base",
            {},
            _trained_without_a_norm,
        )
    ],
    "untied-head-missing": [Case(PLAIN, TO_MEGATRON, {"DIR": "base"}, less("lm_head."))],
    "model-part-missing": [
        Case(
            {"src": "qwen3_vl", "base": "qwen3_vl"},
            f"{TO_MEGATRON} --no-tokenizer",
            {"DIR": "base"},
            less("model.visual."),
        )
    ],
    "format-without-muon": [
        Case({"src": "data megatron-muon/layers"}, "convert src dst --to dcp --no-tokenizer --with-optimizer")
    ],
    "fsdp-order-unknown": [
        Case(
            VERL,
            RANKS.replace("src", "dcp"),
            {},
            lambda there: reshard("convert", "src", "dcp", *STATES_IN_DCP),
        )
    ],
    "fsdp-schedule-unknown": [Case(VERL, RANKS, {}, with_tensors_in_schedule)],
    "tensor-missing": [
        Case({"src": "llama"}, TO_MEGATRON, {"--family": "llama"}, config(model_type="qwen3")),
    ],
    "tensor-unknown": [
        Case(PLAIN, TO_MEGATRON, {"--base": "base", "--family": "qwen3"}, config(model_type="llama"))
    ],
    "tensor-shape-differs": [Case(MOE, TO_MEGATRON, DIR, config(moe_intermediate_size=20))],
    "config-size-differs": [
        Case(PLAIN, TO_MEGATRON, DIR, config(num_hidden_layers=2)),
        Case(MOE, TO_MEGATRON, DIR, config(num_experts=2, num_local_experts=2)),
    ],
    "weights-fewer-than-config": [Case(PLAIN, TO_MEGATRON, DIR, config(num_hidden_layers=6))],
    "config-incomplete-for-family": [Case(PLAIN, TO_MEGATRON, DIR, config(hidden_size=...))],
    "config-contradicts-itself": [Case(PLAIN, TO_MEGATRON, DIR, config(rope_theta=3.0))],
    "config-contradicts-arguments": [Case(NATIVE, "convert src dst", DIR, config(num_key_value_heads=2))],
    "config-differs-from-arguments": [Case(NATIVE, "inspect src", {}, config(rms_norm_eps=0.5))],
    "config-not-beside-checkpoint": [
        Case({"src": "dcp", "base": "qwen3"}, "convert src dst", DIR, without_config)
    ],
    "vocabulary-size-differs": [Case(NATIVE, "convert src dst", DIR, config(vocab_size=100_000))],
    "engine-computes-another-model": [Case(PLAIN, TO_MEGATRON, {}, config(hidden_act="gelu"))],
    "model-type-unknown-here": [Case(NATIVE, "convert src dst", {}, config(model_type="frob"))],
    "model-type-differs-here": [Case(NATIVE, "convert src dst", DIR, config(model_type="granite"))],
    "values-overflow": [
        Case(SRC, f"{TO_MEGATRON} --dtype float16", {}, tensors(lambda held: held[QUERY].fill(1e9)))
    ],
    "engine-without-head": [Case(SRC, TO_MEGATRON, {}, _with_a_head)],
    "model-unknown": [Case(PLAIN, TO_MEGATRON, DIR, without_config)],
    "arguments-lack-parts": [
        Case(
            {"src": "native qwen3_vl", "base": "qwen3_vl"},
            "convert src dst --no-tokenizer",
            DIR,
            without_config,
        )
    ],
    "convert-megatron-lacks-family": [
        Case({"src": "qwen3_vl"}, f"{TO_MEGATRON} --no-tokenizer --engine mcore")
    ],
    "convert-family-not-for-engine": [Case({"src": "internlm3"}, f"{TO_MEGATRON} --engine megatron-bridge")],
    "family-not-for-engine": [Case(SRC, "convert src dst --to internlm", {"--to": "megatron"})],
    "experts-differ": [
        Case(
            MOE, "convert src dst --to dcp", {}, lambda there: _cast(there / "src", "layers.1.mlp.experts.2.")
        )
    ],
    "format-dtype-fixed": [Case(SRC, "convert src dst --to deepspeed --dtype bfloat16")],
    "nothing-to-quantize": [
        Case(SRC, "convert src dst --quantize fp8 --max-shard-size 1MB", {}, _with_names_of_nobody),
    ],
    "model-part-not-kept": [
        Case({"src": "mlx qwen3_vl", "base": "qwen3_vl"}, "convert src dst --no-tokenizer", DIR)
    ],
    "part-tensor-unlike-base": [
        Case(
            {"src": "native qwen3_vl", "other": "qwen3_vl", "base": "qwen3_vl"},
            "convert src dst --no-tokenizer --base other",
            DIR,
            _with_another_tower,
        )
    ],
    "mistral-model-unsupported": [
        Case(SRC, "convert src dst --to mistral", {}, config(model_type="nobodys"))
    ],
    "mlx-groups-too-large": [Case({"src": "qwen2"}, "convert src dst --to mlx --quantize affine-4-128")],
    "mlx-model-unsupported": [Case(SRC, "convert src dst --to mlx", {}, config(model_type="nobodys"))],
    "quantization-method-differs": [Case(SRC, "convert src dst --quantize mxfp4")],
    "stacked-experts-fp8-unsupported": [
        Case(
            {"src": "gpt_oss"},
            "convert src dst --quantize fp8 --max-shard-size 1MB",
            {},
            config(model_type="nobodys"),
        )
    ],
    "weight-not-divisible-into-blocks": [
        Case({"src": "gpt_oss of another width"}, "convert src dst --quantize mxfp4 --max-shard-size 1MB")
    ],
    "quantized-source-not-finite": [
        Case(
            {"src": "gpt_oss"},
            "convert src dst --quantize mxfp4 --max-shard-size 1MB",
            {},
            tensors(lambda held: held["model.layers.1.mlp.experts.gate_up_proj"].fill(np.nan)),
        )
    ],
    "weights-quantized": [
        Case({"src": "fp8"}, TO_MEGATRON, {}, config(quantization_config={"quant_method": "quark"})),
        Case(
            {"src": "fp8"},
            "convert src dst --dtype bfloat16",
            {},
            config(quantization_config={"quant_method": "quark"}),
        ),
    ],
    "expert-biases-tensor-parallel": [Case({"src": "gpt_oss"}, f"{TO_MEGATRON} --tp 2")],
    "legacy-layout-unsupported": [
        Case(
            {"src": "qwen3_moe"},
            "convert src dst --to megatron-legacy --tp 2 --ep 2 --etp 4",
            {"--etp": "1", "--tp": "2"},
        )
    ],
    "delta-net-layout-unsupported": [Case({"src": "qwen3_next"}, "convert src dst --to megatron-legacy")],
    "meta-model-unsupported": [
        Case(
            {"src": "llama"},
            "convert src dst --to meta",
            {"--to": "dcp"},
            config(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}),
        )
    ],
    "internevo-layout-fixed": [Case(EVO, f"{TO_EVO} --pp 2 --stages 1,1")],
    "internlm-layers-not-divisible": [
        Case(EVO, f"{TO_EVO} --pp 6"),
        Case(EVO, f"{TO_EVO} --pp 2 --vpp 3"),
        Case(EVO, f"{TO_EVO} --pp 6 --vpp 2"),
    ],
    "internlm-iteration-not-found": [
        Case({"src": "data internlm/internlm2-tp2pp2"}, "convert src dst --no-tokenizer --iteration 9")
    ],
    "nanotron-step-not-found": [
        Case(
            {"src": "data nanotron/llama-tp2-pp2"},
            "convert src dst --no-tokenizer --iteration 9",
            {"--iteration": "10"},
        )
    ],
    "dcp-iteration-mismatch": [Case({"src": "dcp"}, "convert src dst --iteration 5")],
    "iteration-folder-missing": [Case({"src": "dcp"}, "convert run dst --iteration 5", {}, _in_a_run)],
    "deepspeed-step-not-found": [
        Case(ZERO, "convert src dst --no-tokenizer --iteration 7", {"--iteration": "2"})
    ],
    "deepspeed-tracker-missing": [
        Case(ZERO, "convert src dst --no-tokenizer", {"N": "2"}, _step_without_tracker)
    ],
    "deepspeed-latest-missing": [
        Case(
            ZERO,
            "convert src dst --no-tokenizer",
            {"N": "2"},
            lambda there: (there / "src/latest").write_text("global_step30"),
        )
    ],
    "digest-record-missing": [Case({"SRC": "qwen3", "DST": "qwen3"}, "verify DST")],
    "record-modified": [Case(SRC, "verify SRC DST --proof", {}, _with_a_record_that_was_edited)],
    "proof-not-planned": [
        Case(NATIVE, "verify src dst --proof", {"--base": "moved"}, _with_a_base_that_was_moved)
    ],
    # ------------------------------------------------------------------------------------------- adapters
    "adapter-base-not-named": [Case(ADAPTER, TO_MEGATRON, DIR)],
    "adapter-for-without-adapter": [Case(ADAPTER, f"{MERGE} --for vllm", DIR)],
    "adapter-engine-unable": [
        Case({"src": "adapter with DoRA", "base": "llama"}, "convert src dst --base base --for vllm", DIR)
    ],
    "merge-base-unknown": [
        Case(ADAPTER, "convert src dst --merge", DIR, settings(base_model_name_or_path="gone/base"))
    ],
    "base-is-adapter": [
        Case({**ADAPTER, "wrong": "adapter"}, "convert src dst --merge --base wrong", DIR),
    ],
    "lora-alpha-unknown": [
        Case(ADAPTER, MERGE, {"N": "8"}, lambda there: (there / "src/adapter_config.json").unlink())
    ],
    "lora-alpha-not-finite": [Case(ADAPTER, MERGE, {"N": "8"}, settings(lora_alpha=float("inf")))],
    "adapter-ambiguous": [Case(ADAPTER, MERGE, {"NAME": "one"}, pairs(_of_two))],
    "adapter-name-unknown": [Case(ADAPTER, f"{MERGE} --adapter three", {"NAME": "one"}, pairs(_of_two))],
    "adapter-strengths-differ": [
        Case(ADAPTER, FUSE, DIR, settings(alpha_pattern={"layers.1.self_attn.q_proj": 99}))
    ],
    "adapter-covers-some-linears": [
        Case(
            ADAPTER,
            FUSE,
            DIR,
            pairs(lambda held: {name: each for name, each in held.items() if "layers.1." not in name}),
        )
    ],
    "megatron-bridge-adapter-unsupported": [Case({"src": "adapter with DoRA", "base": "llama"}, FUSE, DIR)],
    "megatron-adapter-misfits-base": [
        Case({**ADAPTER, "base": "llama of another width", "other": "llama"}, FUSE, {"DIR": "other"})
    ],
    "adapter-misfits-base": [
        Case({**ADAPTER, "base": "llama of another width", "other": "llama"}, MERGE, {"DIR": "other"})
    ],
    "fused-adapter-dtypes-differ": [
        Case(
            ADAPTER,
            FUSE,
            {},
            pairs(
                lambda held: {
                    name: each.astype(np.float16) if "1.self_attn.q" in name else each
                    for name, each in held.items()
                }
            ),
        )
    ],
    "base-quantized": [
        Case(
            {**ADAPTER, "good": "llama"},
            MERGE,
            {"DIR": "good"},
            tensors(lambda held: held.update({QUERY: held[QUERY].astype(np.int8)}), "base"),
        )
    ],
    "base-config-quantized": [
        Case(
            {**ADAPTER, "base": "fp8 llama", "good": "llama"},
            MERGE,
            {"DIR": "good"},
            lambda there: edit_config(there / "base", quantization_config={"quant_method": "quark"}),
        )
    ],
    "adapter-base-unknown": [Case(BRIDGE, f"{TO_MEGATRON} --no-tokenizer", DIR)],
    "adapter-base-family-unknown": [
        Case(
            {**BRIDGE, "bad": "gpt_oss"},
            "convert src dst --no-tokenizer --base bad",
            DIR,
            lambda there: edit_config(there / "bad", model_type="nobodys"),
        )
    ],
    "adapter-module-unknown": [
        Case(
            {
                "src": "data megatron_lora/swift-experts-ep2",
                "base": "data megatron_lora/base-qwen3_moe",
                "bad": "data megatron_lora/base-llama",
            },
            "convert src dst --no-tokenizer --base bad",
            DIR,
        )
    ],
    "adapter-optimizer-unsupported": [
        Case(
            {"src": "data deepspeed/z2_lora", "base": "qwen3"},
            f"{STATES} --no-tokenizer",
            then={"lora-alpha-unknown"},
        )
    ],
    # ----------------------------------------------------------------------------------- optimizer states
    "format-without-optimizer": [
        Case(TRAINED, "convert src dst --base base --with-optimizer"),
    ],
    "optimizer-states-missing": [Case({"src": "dcp"}, "convert src dst --to megatron --with-optimizer")],
    "optimizer-state-partial": [Case(TRAINED, STATES)],
    "optimizer-order-unknown": [Case({"src": "buffers"}, BUFFERS, change=without_masters)],
    "optimizer-order-unproven": [Case({"src": "untrained buffers"}, BUFFERS)],
    "optimizer-masters-differ": [Case({"src": "buffers"}, BUFFERS, change=exchange_layers)],
    "optimizer-state-missing-for-layers": [Case({"src": "frozen layers.0.mlp", "base": "qwen3"}, STATES)],
    "optimizer-state-shape-differs": [Case({"src": "misshapen states", "base": "qwen3"}, STATES)],
}
