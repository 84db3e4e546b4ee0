"""Adapters of Megatron-Core as Megatron-Bridge and ms-swift save them, and the logits of the adapted models.

The adapter modules, and the sharding of their checkpoints, are those of megatron-bridge and of
mcore-bridge, which is ms-swift's; the model, the save and the forward pass are megatron-core's, with the stand-in of
`fake_te` if TransformerEngine is requested. Both packages are imported without their model modules,
which need GPU packages.

    pip install --no-deps megatron-bridge==0.3.1 mcore-bridge==1.6.5
    python -m tests.genuine.make_megatron_lora tests/data/megatron_lora
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import types
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml

import reshard
from tests.genuine import fake_te

RANK, ALPHA = 4, 12
TOKENS = np.random.default_rng(0).integers(0, 60, (2, 12))
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
CANONICAL = (
    "linear_q",
    "linear_k",
    "linear_v",
    "linear_proj",
    "linear_fc1_gate",
    "linear_fc1_up",
    "linear_fc2",
)


class Variant(NamedTuple):
    """One checkpoint: its framework, its base, and its layout."""

    project: str
    base: str = "llama"
    layout: dict[str, int] = {"tp": 2}  # noqa: RUF012
    spec: str = "local"
    canonical: bool = False


VARIANTS = {
    "bridge-tp2": Variant("bridge"),
    "bridge-canonical-tp2": Variant("bridge", canonical=True),
    "bridge-experts": Variant("bridge", "qwen3_moe", {"ep": 1}),
    "swift-tp2": Variant("swift", spec="te"),
    "swift-pp2": Variant("swift", layout={"pp": 2}, spec="te"),
    "swift-experts-ep2": Variant("swift", "qwen3_moe", {"ep": 2}, spec="te"),
}

SHARED_GROUPS = {
    "bridge-tp4": Variant("bridge", layout={"tp": 4}),
    "bridge-canonical-tp4": Variant("bridge", layout={"tp": 4}, canonical=True),
    "swift-tp4": Variant("swift", layout={"tp": 4}, spec="te"),
}
"""More tensor parallel ranks than query groups. They are not checked in."""


def _folder(*names: str) -> Path | None:
    for place in sys.path:
        folder = Path(place, *names)
        if (folder / ("tuners" if names[0] == "mcore_bridge" else "peft")).is_dir():
            return folder
    return None


def _import_bare() -> None:
    """Make packages whose `__init__` is not run, so that the adapter modules can be imported alone."""
    mcore, bridge = _folder("mcore_bridge"), _folder("megatron", "bridge")
    assert mcore and bridge
    for name, folder in {
        "mcore_bridge": mcore,
        "mcore_bridge.tuners": mcore / "tuners",
        "mcore_bridge.utils": mcore / "utils",
        "megatron.bridge": bridge,
        "megatron.bridge.peft": bridge / "peft",
        "megatron.bridge.utils": bridge / "utils",
    }.items():
        module = types.ModuleType(name)
        module.__path__ = [str(folder)]
        module.__spec__ = PathFinder.find_spec(name, [str(folder.parent)])
        sys.modules[name] = module
    sys.modules["mcore_bridge.utils"].get_current_device = lambda: torch.device("cpu")  # type: ignore[attr-defined]


def make(name: str, out: Path) -> None:
    """Write the adapter `out/name`, with the logits of the adapted model next to it."""
    from reshard.algebra.layout import Layout
    from tests.genuine.mcore.ranks import run_ranks

    variant = {**VARIANTS, **SHARED_GROUPS}[name]
    base = out / f"base-{variant.base}"
    if not base.is_dir():
        make_base(variant.base, base)
    start = out / f"{name}.start"
    impl = "transformer_engine" if variant.spec == "te" else "local"
    reshard.convert(
        base, start, to="megatron", transformer_impl=impl, vocab_divisible_by=1, no_tokenizer=True,
        overwrite=True, **variant.layout,
    )  # fmt: skip
    checkpoint = reshard.open(start).checkpoint
    args = {**checkpoint.description.args, "moe_grouped_gemm": variant.spec == "te"}
    sizes = Layout(**{"etp": variant.layout.get("tp", 1), **variant.layout})
    folder = out / name / "iter_0000003"
    folder.mkdir(parents=True)
    logits = run_ranks(sizes.world_size, _rank, variant, args, sizes, checkpoint.path, folder)
    (out / name / "latest_checkpointed_iteration.txt").write_text("3")
    np.save(out / name / "logits.npy", next(found for found in logits if found is not None))
    _note(variant, out / name, folder)
    shutil.rmtree(start)


def make_base(name: str, folder: Path) -> None:
    """A tiny Hugging Face folder."""
    from tests.genuine.huggingface import make_model

    own = {"num_experts": 4, "moe_intermediate_size": 24} if name == "qwen3_moe" else {}
    make_model(name, folder, tokenizer=False, **SIZES, **own)


def _note(variant: Variant, out: Path, folder: Path) -> None:
    """The settings that each framework writes next to the weights."""
    if variant.project == "swift":
        arguments = {"tuner_type": "lora", "lora_rank": RANK, "lora_alpha": ALPHA, "model": "somebody/tiny"}
        (out / "args.json").write_text(json.dumps(arguments))
        return
    sizes = {axis: variant.layout.get(axis, 1) for axis in ("tp", "ep")}
    noted = {
        "model": {
            "tensor_model_parallel_size": sizes["tp"],
            "expert_model_parallel_size": sizes["ep"],
        },
        "peft": {"_target_": "megatron.bridge.peft.lora.LoRA", "dim": RANK, "alpha": ALPHA},
    }
    (folder / "run_config.yaml").write_text(yaml.safe_dump(noted))


def _rank(variant: Variant, args: Any, sizes: Any, start: Path, folder: Path) -> Any:
    from megatron.core import parallel_state as ps

    from reshard.oracle.megatron.load_weights import load_weights
    from reshard.oracle.megatron.logits import forward_logits
    from tests.genuine.mcore import models
    from tests.genuine.mcore.models import build_model

    models.initialize(sizes, seed=0)
    chunks = build_model(args, sizes, spec=variant.spec)  # type: ignore[arg-type]
    found = load_weights(chunks, start)
    assert not found.missing and not found.unexpected, found
    adapt: Callable[[Any, Variant], None] = _adapt_swift if variant.project == "swift" else _adapt_bridge
    for chunk in chunks:
        adapt(chunk, variant)
        _randomise(chunk)
    outputs = forward_logits(chunks, torch.from_numpy(TOKENS), sizes)
    _save(chunks, args, variant, folder)
    first = ps.get_tensor_model_parallel_rank() == 0 and ps.get_data_parallel_rank() == 0
    return outputs[-1].numpy() if outputs and first else None


def _adapt_bridge(chunk: Any, variant: Variant) -> None:
    if variant.canonical:
        CanonicalLoRA = importlib.import_module("megatron.bridge.peft.canonical_lora").CanonicalLoRA
        CanonicalLoRA(target_modules=list(CANONICAL), dim=RANK, alpha=ALPHA)([chunk], training=False)
    else:
        LoRA = importlib.import_module("megatron.bridge.peft.lora").LoRA
        LoRA(target_modules=list(LINEARS), dim=RANK, alpha=ALPHA)([chunk], training=False)


def _adapt_swift(chunk: Any, variant: Variant) -> None:
    from megatron.core.extensions.transformer_engine import TEGroupedLinear

    TEGroupedLinear.sharded_state_dict = _grouped  # mcore-bridge's own patch.py does the same on import
    LoraParallelLinear = importlib.import_module("mcore_bridge.tuners.lora").LoraParallelLinear
    for name, module in list(chunk.named_modules()):
        parent, _, leaf = name.rpartition(".")
        if leaf in LINEARS:
            # Those of one rank, as TransformerEngine has them; the stand-in keeps those of all.
            weight = module.weight0 if hasattr(module, "weight0") else module.weight
            module.out_features, module.in_features = weight.shape
            module.is_expert = ".experts." in name
            wrapped = LoraParallelLinear(module, "default", r=RANK, lora_alpha=ALPHA)
            setattr(chunk.get_submodule(parent), leaf, wrapped)


def _grouped(self: Any, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
    return self._sharded_state_dict_grouped(None, prefix, sharded_offsets, metadata)


def _randomise(chunk: Any) -> None:
    """Distinct values for all adapters: equal on ranks with the same part, different for shards."""
    from megatron.core import parallel_state as ps

    for name, parameter in chunk.named_parameters():
        if "lora_" not in name and ".adapter." not in name:
            continue
        shard = (
            ps.get_tensor_model_parallel_rank() if getattr(parameter, "tensor_model_parallel", False) else 0
        )
        expert = ps.get_expert_model_parallel_rank() if ".experts." in name else 0
        stage = ps.get_pipeline_model_parallel_rank()
        seed = [*name.encode(), shard, expert, stage]
        noise = np.random.default_rng(seed).standard_normal(parameter.shape, dtype=np.float32)
        parameter.data = 0.2 * torch.from_numpy(noise)


def _save(chunks: list[Any], args: Any, variant: Variant, folder: Path) -> None:
    from argparse import Namespace

    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as ps

    content = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    group = ps.get_data_parallel_group(with_context_parallel=True)
    state = chunks[0].sharded_state_dict(metadata={**content, "dp_cp_group": group})
    if variant.project == "swift":
        model = {key: value for key, value in state.items() if ".lora_A." in key or ".lora_B." in key}
        whole: dict[str, Any] = {"args": Namespace(**_plain(args)), "checkpoint_version": 3.0, "iteration": 3}
    else:
        model = {
            key: value for key, value in state.items() if ".adapter." in key and "_extra_state" not in key
        }
        whole = {"checkpoint_version": 3.0, "iteration": 3}
    dist_checkpointing.save({**whole, "model": model}, str(folder), content_metadata=content)


def _plain(args: Any) -> dict[str, Any]:
    """The arguments that JSON can represent, as ms-swift stores them."""
    return {name: value for name, value in args.items() if isinstance(value, int | float | str | list | None)}


def _fused_norm_is_returned() -> None:
    """Return the output of TransformerEngine's fused norms on request, which adapters need."""
    plain = fake_te.LayerNormLinear.forward

    def forward(self: Any, inputs: torch.Tensor, is_first_microbatch: Any = None) -> Any:
        output = plain(self, inputs, is_first_microbatch)
        if not getattr(self, "return_layernorm_output", False):
            return output
        normed = torch.nn.functional.rms_norm(inputs, (self.in_features,), self.layer_norm_weight, self.eps)
        return (*output, normed) if isinstance(output, tuple) else (output, normed)

    fake_te.LayerNormLinear.forward = forward  # type: ignore[method-assign]


def main(out: Path, names: list[str]) -> None:
    """Make the requested variants, or all."""
    fake_te.install()
    _fused_norm_is_returned()
    _import_bare()
    for name in names or VARIANTS:
        make(name, out)
        print(name, sorted(reshard.open(out / name).tensors)[:4])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
