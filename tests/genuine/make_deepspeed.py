"""Tiny checkpoints that the real DeepSpeed wrote on a CPU, and its results for any checkpoint.

    DS_BUILD_OPS=0 pip install deepspeed==0.19.8 peft
    python -m tests.genuine.make_deepspeed make OUT [NAME …]                   checkpoints of VARIANTS
    python -m tests.genuine.make_deepspeed load FOLDER OUT RANKS STAGE DTYPE   load a universal one, train a step

Each folder has the output of `save_checkpoint` (or of `ds_to_universal` from it), config.json, and results
of DeepSpeed itself: `fp32.safetensors` from `get_fp32_state_dict_from_zero_checkpoint`, `module.safetensors` with the
weights that the engine computed with, `exp_avg.safetensors` with that state of its optimizer, and `logits.npy`, its
forward pass over `TOKENS`. Loading writes `fp32.safetensors`, `exp_avg.safetensors` and `logits.npy`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).parents[2]

TOKENS = [[3, 14, 15, 9, 26, 5, 35, 8], [2, 7, 18, 28, 1, 8, 2, 45]]
SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


class Variant(NamedTuple):
    """One checkpoint. `stage` is ZeRO's, `universal` makes it universal, `extra` goes into `zero_optimization`.

    With `later` it also has the next step, which `latest` does not name. `sizes` replace those of the config.
    """

    stage: int
    dtype: str
    family: str = "llama"
    ranks: int = 2
    tied: bool = False
    frozen: str = ""
    lora: bool = False
    groups: bool = False
    universal: bool = False
    extra: tuple[tuple[str, Any], ...] = ()
    later: bool = False
    sizes: tuple[tuple[str, Any], ...] = ()


VARIANTS = {
    "z0": Variant(0, "float32"),
    "z0_bf16": Variant(0, "bfloat16", family="qwen2"),
    "z1": Variant(1, "bfloat16", tied=True, frozen="norm"),
    "z1_fp32": Variant(1, "float32"),
    "z1_fp16": Variant(1, "float16"),
    "z2": Variant(2, "bfloat16", family="qwen2", groups=True, ranks=3),
    "z2_round_robin": Variant(2, "bfloat16", ranks=3, extra=(("round_robin_gradients", True),), later=True),
    "z2_fp32": Variant(2, "float32", frozen="embed", tied=True),
    "z3": Variant(3, "bfloat16", ranks=3, frozen="mlp"),
    "z3_fp32": Variant(3, "float32", family="qwen2", tied=True, extra=(("sub_group_size", 2000),)),
    "z3_later": Variant(3, "float32", later=True),
    "z2_lora": Variant(2, "float32", lora=True),
    "z3_lora": Variant(3, "float32", lora=True),
    "z2_moe": Variant(2, "bfloat16", family="moe", ranks=4),
    "universal_z2": Variant(2, "bfloat16", groups=True, universal=True),
    "universal_z3": Variant(3, "bfloat16", ranks=3, frozen="embed", universal=True),
}
SERVED = {
    f"served_z{stage}": Variant(stage, "float32", sizes=(("head_dim", 32), ("vocab_size", 283)))
    for stage in (2, 3)
}
"""Models for vLLM: with heads that its attention for CPUs has."""
TAG, LATER = "global_step2", "global_step3"


def variant_of(name: str) -> Variant:
    return {**VARIANTS, **SERVED}[name]


def make(out: Path, names: list[str]) -> None:
    """Make these variants in folders with their names below `out`, with one launch for each number of ranks."""
    for ranks in sorted({variant_of(name).ranks for name in names}):
        mine = [name for name in names if variant_of(name).ranks == ranks]
        _launch(ranks, "make", str(out), *mine)


def load(folder: Path, out: Path, ranks: int, stage: int, dtype: str) -> None:
    """Load the universal checkpoint at `folder` into ZeRO `stage` at `ranks` ranks; the results go to `out`."""
    out.mkdir(parents=True)
    _launch(ranks, "load", str(folder), str(out), str(ranks), str(stage), dtype)


def _launch(ranks: int, *words: str) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    launch += ["-m", "tests.genuine.make_deepspeed"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, *words],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stdout[-6000:])


def _make_as_rank(out: Path, names: list[str]) -> None:
    import torch.distributed as dist

    for name in names:
        _make_one(variant_of(name), out / name)
        dist.barrier()
        if dist.get_rank() == 0:
            _consolidate(variant_of(name), out / name)
        dist.barrier()


def _load_as_rank(folder: Path, out: Path, variant: Variant) -> None:
    """Load into a model of other weights, with a schedule of DeepSpeed (ZeRO 3) or of torch, and train a step."""
    import torch
    import torch.distributed as dist
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).to(
        getattr(torch, variant.dtype)
    )
    engine = engine_of(model, variant, universal=True)
    engine.load_checkpoint(str(folder))
    masters, averages = full_states(engine, "fp32"), full_states(engine, "exp_avg")
    answer = logits(engine)
    _train(engine, 1)
    if dist.get_rank() == 0:
        save_file(masters, out / "fp32.safetensors")
        save_file(averages, out / "exp_avg.safetensors")
        np.save(out / "logits.npy", answer)


def _train(engine: Any, steps: int) -> None:
    import torch
    import torch.distributed as dist

    engine.train()
    for step in range(steps):
        torch.manual_seed(100 * step + dist.get_rank())
        ids = torch.randint(0, SIZES["vocab_size"], (1, 12))
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()


def logits(engine: Any) -> Any:
    """The engine's forward pass over `TOKENS`."""
    import torch

    engine.eval()
    with torch.no_grad():
        return engine(input_ids=torch.tensor(TOKENS)).logits.float().numpy()


def full_states(engine: Any, kind: str) -> dict[str, Any]:
    """The complete fp32 masters, or a complete state of the optimizer, by parameter name."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    trained = [(name, p) for name, p in engine.module.named_parameters() if p.requires_grad]
    if kind == "fp32":
        return {name: safe_get_full_fp32_param(p).clone() for name, p in trained}
    return {name: safe_get_full_optimizer_state(p, kind).clone() for name, p in trained}


def _model(variant: Variant) -> Any:
    """A model of random weights, all different."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    if variant.family == "moe":
        return _mixture().to(torch.bfloat16)
    sizes = {**SIZES, "tie_word_embeddings": variant.tied, **dict(variant.sizes)}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(variant.family, **sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
            else:
                parameter.normal_(0, 0.3)
    model = model.to(getattr(torch, variant.dtype))
    if variant.frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(variant.frozen not in name)
    if variant.lora:
        from peft import LoraConfig, get_peft_model

        targets = ["q_proj", "v_proj"]
        lora = LoraConfig(
            r=2, lora_alpha=4, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM"
        )
        model = get_peft_model(model, lora)
    return model


def _mixture() -> Any:
    """An embedding, four of DeepSpeed's experts over two ranks, and a head, with the loss of a language model."""
    import torch
    from deepspeed.moe.layer import MoE
    from torch import nn

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(67, 16)
            expert = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 16))
            self.moe = MoE(16, expert, num_experts=4, ep_size=2, k=1, eval_capacity_factor=4.0)
            self.head = nn.Linear(16, 67)

        def forward(self, input_ids: Any, labels: Any) -> Any:
            logits = self.head(self.moe(self.embed(input_ids))[0])
            return Namespace(loss=nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))

    model = Mixture()
    torch.manual_seed(torch.distributed.get_rank())
    for name, parameter in model.named_parameters():
        if "deepspeed_experts" in name:
            nn.init.normal_(parameter, 0, 0.3)
    return model


def engine_of(model: Any, variant: Variant, universal: bool = False) -> Any:
    """DeepSpeed's engine around `model`. With `universal` it loads universal checkpoints."""
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    if variant.dtype == "float16":  # which DeepSpeed allows only where a CPU has instructions for it
        get_accelerator().is_fp16_supported = lambda: True
        get_accelerator().supported_dtypes = lambda: [torch.float, torch.bfloat16, torch.float16]
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[Any] = trained
    if variant.family == "moe":
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        groups = split_params_into_different_moe_groups_for_optimizer({"params": trained, "name": "all"})
    if variant.groups:  # as Trainer has it: no weight decay for vectors
        groups = [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
        ]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {
            "stage": variant.stage,
            "stage3_param_persistence_threshold": 20,
            **dict(variant.extra),
        },
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**6,
        "bf16": {"enabled": variant.dtype == "bfloat16"},
        # A scale with which the first step overflows, and is skipped.
        "fp16": {"enabled": variant.dtype == "float16", "initial_scale_power": 16, "hysteresis": 1},
    }
    schedule = None
    if universal:
        config["checkpoint"] = {"load_universal": True}
        if variant.stage == 3:
            config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}
        else:  # as Trainer hands its own over
            schedule = partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=_constant)
    return deepspeed.initialize(model=model, model_parameters=groups, config=config, lr_scheduler=schedule)[0]


def _constant(step: int) -> float:
    return 1.0


def _make_one(variant: Variant, out: Path) -> None:
    """Train two steps and save."""
    import torch.distributed as dist
    from safetensors.torch import save_file

    model = _model(variant)
    engine = engine_of(model, variant)
    _train(engine, 2)
    engine.save_checkpoint(str(out), tag=TAG, exclude_frozen_parameters=variant.lora)
    if variant.family == "moe":  # DeepSpeed gathers no experts: their files are the answer
        (out / "config.json").write_text('{"model_type": "mixture"}')
        return
    config = model.config
    answer = logits(engine)
    weights = module_weights(engine)
    if dist.get_rank() == 0:
        np.save(out / "logits.npy", answer)
        save_file(weights, out / "module.safetensors")
        config.architectures = ["LlamaForCausalLM" if variant.family == "llama" else "Qwen2ForCausalLM"]
        config.dtype = variant.dtype
        (out / "config.json").write_text(json.dumps(config.to_dict(), indent=2, default=str))
    if variant.later:
        _train(engine, 1)
        engine.save_checkpoint(str(out), tag=LATER, save_latest=False)


def module_weights(engine: Any) -> dict[str, Any]:
    """The complete weights that an engine computes with, under the names of the module. Collective."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def _consolidate(variant: Variant, out: Path) -> None:
    """DeepSpeed's own results, and its universal checkpoint."""
    import torch
    from deepspeed.checkpoint import ds_to_universal
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    from safetensors.torch import save_file

    for script in out.glob("zero_to_*.py"):
        script.unlink()
    if not variant.stage or variant.family == "moe":
        return
    state = get_fp32_state_dict_from_zero_checkpoint(str(out), tag=TAG)
    save_file({name: tensor.clone() for name, tensor in state.items()}, out / "fp32.safetensors")
    universal = out / f"{TAG}_universal"
    settings = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    ds_to_universal.main(
        Namespace(
            input_folder=str(out / TAG), output_folder=str(universal), inject_missing_state=True, **settings
        )
    )
    averages = {}
    for path in universal.glob("zero/*/exp_avg.pt"):
        content = torch.load(path)
        tensor = content["param"] if isinstance(content, dict) else content
        averages[path.parent.name] = tensor.reshape(state[path.parent.name].shape).clone()
    save_file(averages, out / "exp_avg.safetensors")
    if variant.universal:
        shutil.rmtree(out / TAG)
        (out / "latest").unlink()
    else:
        shutil.rmtree(universal)
        (out / "latest_universal").unlink()


def _main(command: str, *words: str) -> None:
    if "RANK" not in os.environ:
        if command == "make":
            make(Path(words[0]), list(words[1:]) or list(VARIANTS))
        else:
            load(Path(words[0]), Path(words[1]), int(words[2]), int(words[3]), words[4])
        return
    import deepspeed
    import torch.distributed as dist

    deepspeed.init_distributed("gloo")
    if command == "make":
        _make_as_rank(Path(words[0]), list(words[1:]))
    else:
        _load_as_rank(Path(words[0]), Path(words[1]), Variant(int(words[3]), words[4]))
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(*sys.argv[1:])
