"""Checkpoints of mcore-bridge, for any supported model type: saved from a folder, and exported from a checkpoint.

The model, the weight import and export, saver and loader are mcore-bridge's and ms-swift's own. The arguments are the
defaults of ms-swift's dataclass, unchecked: its check looks the model up in a registry of published ones and imports
their image processors. TransformerEngine is the stand-in of `fake_te`.

    python -m tests.genuine.make_mcore_bridge save BASE OUT TP PP EP            in the environment "ms-swift"
    python -m tests.genuine.make_mcore_bridge export BASE OUT TP PP EP CHECKPOINT

`save` loads the Hugging Face folder BASE and saves a Megatron checkpoint at OUT. `export` loads CHECKPOINT strictly,
into a model filled with NaN, and writes it to the Hugging Face folder OUT. Several jobs are separated by `--`; one that
fails does not keep the others from being done.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path
from typing import Any

from tests.genuine import fake_te
from tests.genuine.make_swift import know_mimo, let_it_run_without_gpu
from tests.genuine.peers import load_all_keys, run_jobs


def run(command: str, base: str, out: str, *rest: str) -> None:
    """Do one job: `save` or `export`, on as few ranks as the layout takes."""
    from tests.genuine.mcore.ranks import run_ranks

    tp, pp, ep = map(int, rest[:3])
    checkpoint = rest[3] if command == "export" else None
    run_ranks(max(tp, ep) * pp, _rank, base, out, (tp, pp, ep), checkpoint)


def _rank(base: str, out: str, layout: tuple[int, int, int], checkpoint: str | None) -> None:
    import torch

    let_it_run_without_gpu()
    know_mimo()
    hf_config = _config(base)
    args = _arguments(base, out, layout, checkpoint, hf_config)
    megatron = importlib.import_module("swift.megatron.utils")
    importlib.import_module("swift.megatron.utils.megatron_lm_utils")._initialize_mpu(args)
    importlib.import_module("megatron.core.tensor_parallel").model_parallel_cuda_manual_seed(1)
    models = importlib.import_module("swift.megatron.model").get_mcore_model(args, hf_config)
    bridge = models[0].config.bridge
    if checkpoint is None:
        for model in models:
            as_in_training(model)
        bridge.load_weights(models, base)
        megatron.save_mcore_checkpoint(args, models)
        return
    for model in models:
        as_in_training(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
    _load_strictly(megatron, args, models)
    bridge.save_weights(models, out)


def _config(base: str) -> Any:
    transformers = importlib.import_module("transformers")
    return transformers.AutoConfig.from_pretrained(base, trust_remote_code=any(Path(base).glob("*.py")))


def _arguments(
    base: str, out: str, layout: tuple[int, int, int], checkpoint: str | None, hf_config: Any
) -> Any:
    """ms-swift's arguments of an export, with their defaults."""
    import torch

    kind = importlib.import_module("swift.megatron.arguments").MegatronExportArguments
    args = object.__new__(kind)
    for field in dataclasses.fields(kind):
        made = field.default_factory is not dataclasses.MISSING
        setattr(args, field.name, field.default_factory() if made else field.default)
    register = importlib.import_module("mcore_bridge.model.register")
    hf_type = hf_config.model_type
    # ms-swift calls lmms-lab's llavaonevision1_5 llava_onevision1_5.
    meta = next(meta for meta in register.MODEL_MAPPING.values() if hf_type in spellings(meta.model_types))
    tp, pp, ep = layout
    sizes = importlib.import_module("mcore_bridge").hf_to_mcore_config(hf_config)
    moe = bool(sizes.get("num_moe_experts"))
    mtp = next((n for n in map(_predicted, (hf_config, _text(hf_config))) if n), None) or _stored(base)
    values: dict[str, Any] = dict(
        model=base,
        model_dir=base,
        model_type=hf_type,
        megatron_model_meta=meta,
        output_dir=out,
        mcore_model=checkpoint,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep if moe else 1,
        expert_tensor_parallel_size=1,
        sequence_parallel=moe and tp > 1,
        mtp_num_layers=mtp,
        pipeline_model_parallel_layout=_stages(hf_config, pp, mtp or 0),
        torch_dtype=torch.bfloat16,
        bf16=True,
        fp16=False,
        finetune=True,
        task_type="causal_lm",
        tuner_type="full",
        ddp_backend="gloo",
        use_cpu_initialization=True,
        recompute_granularity=None,
        gradient_accumulation_fusion=False,
        attention_backend=importlib.import_module("megatron.core.transformer.enums").AttnBackend.unfused,
        **dict.fromkeys(("no_save_optim", "no_save_rng", "no_load_optim", "no_load_rng"), True),
    )
    for name, value in values.items():
        setattr(args, name, value)
    return args


def spellings(model_types: list[str]) -> list[str]:
    return [*model_types, *(each.replace("llava_", "llava") for each in model_types)]


def _stages(hf_config: Any, pp: int, mtp: int) -> str | None:
    """The layers of each stage, without which megatron-core refuses layers whose experts a table chooses."""
    if pp == 1 or "hash_moe" not in (getattr(hf_config, "mlp_layer_types", None) or ()):
        return None
    later = hf_config.num_hidden_layers // pp
    stages = ["E" + "t" * (hf_config.num_hidden_layers - later * (pp - 1)), *["t" * later] * (pp - 1)]
    return "|".join(stages) + "m" * mtp + "L"


def _text(hf_config: Any) -> Any:
    return hf_config.get_text_config()


def _predicted(config: Any) -> int:
    """The number of MTP layers that a config names; mcore-bridge builds them only on request."""
    names = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
    return next((getattr(config, name) for name in names if getattr(config, name, None)), 0)


def _stored(base: str) -> int | None:
    """The number of MTP layers of a folder whose config names none, such as Qwen3-Next's."""
    load_file = importlib.import_module("safetensors.torch").load_file
    names = [name for file in Path(base).glob("*.safetensors") for name in load_file(file)]
    return len({name.split(".")[2] for name in names if name.startswith("mtp.layers.")}) or None


def as_in_training(model: Any) -> None:
    """Cast weights to bf16 as in megatron-core's Float16Module, which keeps some in float32, as router biases."""

    def cast(tensor: Any) -> Any:
        kept = getattr(tensor, "keep_in_fp32", False) or not tensor.is_floating_point()
        return tensor if kept else tensor.bfloat16()

    model._apply(cast)
    for module in model.modules():
        if hasattr(module, "_maintain_float32_expert_bias"):
            module._maintain_float32_expert_bias()


def _load_strictly(megatron: Any, args: Any, models: list[Any]) -> None:
    """Make ms-swift's loader raise for keys that one side lacks, which it ignores."""
    visual = models[0].config.model_meta.visual_cls
    # The speech modules are not in mcore-bridge's model; it copies them from the folder that it loaded last.
    load_all_keys(tuple(f"{module}." for module in getattr(visual, "_generator", None) or ()))
    for model in models:
        into = model.load_state_dict

        def strict(state: Any, into: Any = into, **_: Any) -> None:
            found = into(state, strict=False)
            wrong = [
                name for name in (*found.missing_keys, *found.unexpected_keys) if "_extra_state" not in name
            ]
            assert not wrong, wrong

        model.load_state_dict = strict
    megatron.load_mcore_checkpoint(args, models)


if __name__ == "__main__":
    fake_te.install()
    for module in (
        "mcore_bridge",
        "swift.megatron.arguments",
        "swift.megatron.model",
        "swift.megatron.utils",
    ):
        importlib.import_module(module)  # once, and not in each of the ranks
    sys.exit(run_jobs(run, sys.argv[1:]))
