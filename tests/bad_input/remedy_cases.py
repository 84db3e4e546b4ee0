"""Inputs that reshard refuses with a remedy, and what a user would fill in for its placeholders: requests and files.

Those of what checkpoints contain are in `remedy_contents.py`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models

from tests.bad_input.damage import edit_config, edit_tensors
from tests.commandline import reshard
from tests.genuine.huggingface import make_model


@dataclass(frozen=True)
class Case:
    """An input, and a command that one problem refuses.

    `make` copies originals into a folder; the `words` of the command are relative to it. `given` has what a user fills
    in for a placeholder or an option without a value. `then` are the codes of other problems that remain.
    """

    make: Mapping[str, str]
    words: str
    given: Mapping[str, str] = field(default_factory=dict)
    change: Callable[[Path], object] = lambda there: None
    then: Collection[str] = ()


def _no_tokenizer(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.name.startswith(("tokenizer", "vocab", "merges", "special_tokens")):
            path.unlink()


def _no_tracker(folder: Path) -> None:
    (folder / "latest_checkpointed_iteration.txt").unlink()
    (folder / "release").rename(folder / "iter_0000010")
    shutil.copytree(folder / "iter_0000010", folder / "iter_0000020")


def _track(folder: Path, step: str) -> None:
    (folder / "release").rename(folder / "iter_0000010")
    (folder / "latest_checkpointed_iteration.txt").write_text(step)


def _cast(folder: Path, part: str, dtype: Any = np.float16) -> None:
    edit_tensors(
        folder,
        lambda tensors: tensors.update({k: v.astype(dtype) for k, v in tensors.items() if part in k}),
    )


def _infinite(folder: Path) -> None:
    def change(tensors: dict[str, Any]) -> None:
        tensors["model.norm.weight"][0] = np.inf

    edit_tensors(folder, change)


def _wrap(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file({f"_orig_mod.{k}": v for k, v in load_file(path).items()}, path, metadata={"format": "pt"})


def _unknown_family(folder: Path) -> None:
    """Tensors and a config that no family has."""
    rows = np.zeros((4, 4), np.float32)
    save_file({"wte.weight": rows, "h.0.attn.weight": rows}, folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]})
    )


def _converted(there: Path) -> None:
    assert reshard("convert", "ckpt", "dst").code == 0


def _from_elsewhere(there: Path) -> None:
    """The same, where the source has no record of its own."""
    (there / "ckpt" / "reshard.json").unlink()
    _converted(there)


def _only(folder: Path, name: str) -> None:
    """A file of a tokenizer, and no other."""
    _no_tokenizer(folder)
    (folder / name).write_text('{"model": {}}')


def _unigram(there: Path) -> None:
    _no_tokenizer(there / "src")
    Tokenizer(models.Unigram([("a", 0.0)])).save(str(there / "src" / "tokenizer.json"))


def _rows_without_groups(there: Path) -> None:
    shutil.rmtree(there / "src")
    make_model("llama", there / "src", hidden_size=40, intermediate_size=24, head_dim=10)


def _as_gguf(there: Path) -> None:
    assert reshard("convert", "src", "dst.gguf").code == 0


TWO = {"ckpt": "torch_dist", "base": "qwen3"}
MOE = {"src": "qwen3_moe"}
SRC = {"src": "qwen3"}
BOTH = {"src": "qwen3", "base": "qwen3"}
TO_MEGATRON = "convert src dst --to megatron"
CASES: dict[str, list[Case]] = {
    # A server that starts does not end: this one has no port, whatever else is right.
    "token-not-passed": [
        Case(
            {"ckpt": "qwen3"},
            "serve ckpt --host 0.0.0.0 --port 99999",
            {"--token": "secret"},
            then={"address-not-usable"},
        )
    ],
    "tokenizer-not-beside-checkpoint": [
        Case(TWO, "convert ckpt dst", {"DIR": "base"}, lambda there: _no_tokenizer(there / "ckpt"))
    ],
    "tokenizer-not-in-base": [
        Case(
            TWO,
            "convert ckpt dst --base base",
            {},
            lambda there: [_no_tokenizer(each) for each in there.iterdir()],
        )
    ],
    "weights-without-tokenizer": [
        Case(
            TWO,
            "inspect ckpt",
            {"SRC": "ckpt", "DST": "dst", "DIR": "base"},
            lambda there: _no_tokenizer(there / "ckpt"),
        )
    ],
    "page-file-exists": [Case(BOTH, "verify src base --html src/config.json", {"FILE": "page.html"})],
    "page-not-writable": [Case(BOTH, "verify src base --html absent/page.html", {"FILE": "page.html"})],
    "tracker-missing": [
        Case(TWO, "convert ckpt dst", {"N": "10"}, lambda there: _no_tracker(there / "ckpt")),
    ],
    "tracker-unreadable": [
        Case(TWO, "convert ckpt dst", {"N": "10"}, lambda there: _track(there / "ckpt", "seven")),
    ],
    "tracked-iteration-missing": [
        Case(TWO, "convert ckpt dst", {"--iteration": "10"}, lambda there: _track(there / "ckpt", "7")),
    ],
    "iteration-not-found": [
        Case(
            TWO,
            "convert ckpt dst --iteration 11",
            {"--iteration": "10"},
            lambda there: _track(there / "ckpt", "10"),
        )
    ],
    "iteration-contradicts-path": [
        Case(
            TWO,
            "convert ckpt/iter_0000010 dst --iteration 11",
            {},
            lambda there: _track(there / "ckpt", "10"),
        )
    ],
    "iterations-not-found": [Case(SRC, f"{TO_MEGATRON} --iteration 5")],
    "megatron-model-without-experts": [Case(SRC, f"{TO_MEGATRON} --ep 2")],
    "megatron-model-not-available": [
        Case(SRC, f"{TO_MEGATRON} --engine mcore-bridge --megatron-model hybrid")
    ],
    "megatron-model-not-in-format": [Case(SRC, "convert src dst --to megatron-fsdp --megatron-model hybrid")],
    "megatron-fsdp-without-stages": [Case(SRC, "convert src dst --to megatron-fsdp --pp 2")],
    "megatron-fsdp-model-unsupported": [Case({"src": "qwen3_next"}, "convert src dst --to megatron-fsdp")],
    "virtual-stages-without-pipeline": [Case(SRC, f"{TO_MEGATRON} --vpp 2", {"--pp": "2"})],
    "layers-not-divisible": [
        Case(SRC, f"{TO_MEGATRON} --pp 5"),
        Case(SRC, f"{TO_MEGATRON} --pp 2 --vpp 3"),
        Case(SRC, f"{TO_MEGATRON} --pp 3 --stages 1,2,2"),
        Case(SRC, f"{TO_MEGATRON} --stages 4,0"),
        Case(SRC, f"{TO_MEGATRON} --stages 1,3"),
    ],
    "size-not-divisible": [Case(SRC, f"{TO_MEGATRON} --tp 3"), Case(MOE, f"{TO_MEGATRON} --ep 3")],
    "source-already-hugging-face": [
        Case(SRC, "convert src dst", {"--dtype": "bfloat16", "--quantize": "fp8", "--max-shard-size": "1MB"})
    ],
    "format-without-layout": [Case(TWO, "convert ckpt dst --tp 2")],
    "destination-exists": [Case(SRC, "convert src dst.gguf", {}, _as_gguf)],
    "destination-must-be-folder": [
        Case(SRC, "convert src dst.gguf --max-shard-size 100KB", {"--max-shard-size": "1GB"})
    ],
    "quantize-value-unknown": [
        Case(SRC, "convert src dst.gguf --quantize q4_k_m"),
        Case(SRC, "convert src dst.gguf --quantize q8_1"),
    ],
    "gguf-mxfp4-without-experts": [Case(SRC, "convert src dst.gguf --quantize mxfp4")],
    "gguf-tokenizer-unreadable": [
        Case(
            BOTH,
            "convert src dst.gguf",
            {"DIR": "base"},
            lambda there: _only(there / "src", "tokenizer.json"),
        )
    ],
    "gguf-model-unsupported": [Case({"src": "phi3"}, "convert src dst.gguf")],
    "gguf-not-loadable": [Case({"src": "deepseek_v3_noq"}, "convert src dst.gguf")],
    "gguf-tokenizer-not-bpe": [Case(SRC, "convert src dst.gguf", {}, _unigram)],
    "mlx-rows-without-groups": [
        Case(SRC, "convert src dst --to mlx --quantize affine-4-32", {}, _rows_without_groups)
    ],
    "gguf-tokenizer-unknown": [
        Case(BOTH, "convert src dst.gguf", {"DIR": "base"}, lambda there: _only(there / "src", "vocab.txt"))
    ],
    "quantize-value-of-another-format": [
        Case(SRC, "convert src dst.gguf --quantize fp8"),
        Case(SRC, "convert src dst --to huggingface --quantize q8_0"),
    ],
    "engine-not-for-format": [Case(TWO, "convert ckpt dst --engine mcore-bridge")],
    "dtype-not-convertible": [Case(SRC, f"{TO_MEGATRON} --dtype int4", {"--dtype": "bfloat16"})],
    "format-unknown": [Case(SRC, "convert src dst --to megatorn"), Case(SRC, "convert src dst --to onnx")],
    "format-only-read": [Case(SRC, "convert src dst --to nemo")],
    "ranks-not-passed": [Case(SRC, "convert src dst --to fsdp-ranks", {"--dp": "2"})],
    "ranks-not-for-format": [Case(SRC, f"{TO_MEGATRON} --dp 2")],
    "family-not-found": [
        Case(SRC, f"{TO_MEGATRON} --family qwen33"),
        Case(SRC, f"{TO_MEGATRON} --family zzz", {"--family": "qwen3"}),
    ],
    "model-type-unsupported": [
        Case(
            SRC,
            TO_MEGATRON,
            {"NAME": "llama"},
            lambda there: _unknown_family(there / "src"),
            {"config-incomplete-for-family"},
        )
    ],
    "megatron-core-lacks-family": [
        Case(SRC, TO_MEGATRON, {}, lambda there: edit_config(there / "src", model_type="olmo2")),
    ],
    "model-type-unknown": [
        Case(SRC, TO_MEGATRON, {}, lambda there: edit_config(there / "src", model_type="frob"))
    ],
    "model-type-differs": [
        Case(SRC, TO_MEGATRON, {}, lambda there: edit_config(there / "src", model_type="granite")),
        Case(
            SRC,
            f"{TO_MEGATRON} --family qwen3",
            {},
            lambda there: edit_config(there / "src", model_type="frob", logits_scaling=8.0),
        ),
    ],
    "destination-not-empty": [Case({**TWO, "dst": "qwen3"}, "convert ckpt dst")],
    "record-of-single-file": [Case(SRC, "verify dst.gguf", {"SRC": "src", "FILE": "dst.gguf"}, _as_gguf)],
    "merge-without-adapter": [Case(TWO, "convert ckpt dst --merge --base base", {"DIR": "base"})],
    "adapter-not-in-source": [Case(SRC, "convert src dst --to peft", {"--to": "megatron"})],
    "private-without-push": [
        Case(SRC, f"{TO_MEGATRON} --private", then={"push-format-not-for-hub"})  # it needs no network
    ],
    "stacked-layers-dtypes-differ": [
        Case(SRC, TO_MEGATRON, {}, lambda there: _cast(there / "src", "layers.2.input_layernorm"))
    ],
    "fused-dtypes-differ": [
        Case(SRC, TO_MEGATRON, {}, lambda there: _cast(there / "src", "layers.2.self_attn.q_proj"))
    ],
    "tensor-not-finite": [Case(SRC, f"{TO_MEGATRON} --strict", {}, lambda there: _infinite(there / "src"))],
    "wrapper-in-names": [Case(SRC, TO_MEGATRON, {}, lambda there: _wrap(there / "src"))],
    "memory-too-small": [Case(SRC, f"{TO_MEGATRON} --memory 1B")],
    "proof-output-first": [Case(TWO, "verify dst ckpt --proof", {}, _from_elsewhere)],
    "proof-made-from-another": [Case(TWO, "verify base dst --proof", {"SRC": "ckpt"}, _converted)],
    "proof-arguments-wrong": [Case(TWO, "verify dst --proof", {"SRC": "ckpt", "DST": "dst"}, _converted)],
    "page-needs-two-checkpoints": [
        Case(BOTH, "verify src --html page.html", {"A": "src", "B": "base", "FILE": "page.html"})
    ],
    "second-checkpoint-missing": [Case(BOTH, "verify src --base base", {"A": "src", "B": "base"})],
    "command-unknown": [Case(SRC, "inpsect src"), Case(SRC, "frobnicate src")],
    "option-not-known": [
        Case(SRC, f"{TO_MEGATRON} --tensor-parallel-size 2"),
        Case(SRC, "inspect src --frob"),
    ],
    "catalogue-entry-unknown": [Case({}, "doctor --explain frob")],
    "push-format-not-for-hub": [
        Case(
            SRC,
            f"{TO_MEGATRON} --push-to-hub Org/Name --dry-run --max-shard-size 1MB",
            then={"hub-not-logged-in", "hub-switched-off"},  # the tests are offline
        )
    ],
    "quantized-output-unsupported": [Case(SRC, f"{TO_MEGATRON} --quantize fp8")],
    "executor-unknown": [Case(SRC, f"{TO_MEGATRON} --on frob")],
}
