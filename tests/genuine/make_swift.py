"""Folders of ms-swift: `checkpoint-N` of `megatron sft`, and the output of `megatron export --to_mcore`.

The arguments, their check and their copy in the checkpoint, the model, the saver and the layout of the folder are
ms-swift's and mcore-bridge's own; `save_checkpoint` below is the method of its trainer. Only the training steps in
between are left out: it saves the weights of the Hugging Face folder that it starts from. TransformerEngine is the
stand-in of `fake_te`.

    python -m tests.genuine.make_swift NAME BASE OUT          in the environment "ms-swift"
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.genuine import fake_te
from tests.genuine.peers import MOE, Run

STEP = 3


DEEPSEEK = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 24,
}
RUNS = {
    "qwen3": Run("qwen3", tp=2),
    "qwen3-tied": Run("qwen3", {"tie_word_embeddings": True}),
    "qwen3-megatron-only": Run("qwen3", options={"save_safetensors": False, "no_save_optim": True}),
    "qwen3-hub-only": Run("qwen3", options={"no_save_optim": True}),
    "qwen3-export": Run("qwen3", tp=2, options={"to_mcore": True}),
    "llama": Run("llama", pp=2),
    "qwen3_moe": Run("qwen3_moe", MOE, tp=2, ep=2, options={"sequence_parallel": True}),
    "qwen3_moe-megatron-only": Run(
        "qwen3_moe",
        MOE,
        tp=2,
        ep=2,
        options={"sequence_parallel": True, "save_safetensors": False, "no_save_optim": True},
    ),
    "deepseek_v3": Run("deepseek_v3", DEEPSEEK, pp=2),
    "dots1": Run("dots1", DEEPSEEK, tp=2, pp=2, ep=2, options={"sequence_parallel": True}),
    "ernie4_5": Run("ernie4_5", tp=2, pp=2),
    "mimo": Run("mimo", {"num_nextn_predict_layers": 1}, tp=2, pp=2),
    "qwen3-lora": Run("qwen3", tp=2, options={"tuner_type": "lora"}),
}


def make(name: str, base: Path, out: Path) -> None:
    """Write the folder of the run `name`, started from the Hugging Face folder `base`, to `out`."""
    from tests.genuine.mcore.ranks import run_ranks

    run_ranks(RUNS[name].ranks, _rank, RUNS[name], base, out)


def _rank(run: Run, base: Path, out: Path) -> None:

    if run.model_type == "mimo":
        know_mimo()
    let_it_run_without_gpu()
    arguments = importlib.import_module("swift.megatron.arguments")
    given: dict[str, Any] = {
        "model": str(base),
        "model_type": run.model_type,
        "template": "dummy",
        "torch_dtype": "bfloat16",
        "output_dir": str(out),
        "tensor_model_parallel_size": run.tp,
        "pipeline_model_parallel_size": run.pp,
        "expert_model_parallel_size": run.ep,
        "use_cpu_initialization": True,
        "attention_backend": "unfused",
        "ddp_backend": "gloo",
        **run.options,
    }
    if "to_mcore" in run.options:
        args = arguments.MegatronExportArguments(**given)
        export = importlib.import_module("swift.megatron.pipelines.export.export").MegatronExport
        pipeline = object.__new__(export)
        pipeline.args = args
        pipeline.run()
        return
    args = arguments.MegatronSftArguments(dataset=["none"], add_version=False, **given)
    args.save_args(args.output_dir)
    _save(args, base)


def know_mimo() -> None:
    """The classes that MiMo's folder on the Hub contains as code: Qwen2's, with MTP layers in the config."""
    from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

    config = type("MiMoConfig", (Qwen2Config,), {"model_type": "mimo"})
    AutoConfig.register("mimo", config)
    AutoModelForCausalLM.register(
        config, type("MiMoForCausalLM", (Qwen2ForCausalLM,), {"config_class": config})
    )


def _save(args: Any, base: Path) -> None:
    """The trainer's work at a step that saves."""
    trainer = importlib.import_module("swift.megatron.trainers").MegatronTrainer
    get_mcore_model = importlib.import_module("swift.megatron.model").get_mcore_model
    template = importlib.import_module("swift.pipelines").prepare_model_template(args, load_model=False)[1]
    models = get_mcore_model(args, template.processor.model_info.config)
    bridge = models[0].config.bridge
    for model in models:
        model.bfloat16()
        for module in model.modules():  # as megatron-core's Float16Module leaves routers
            if hasattr(module, "_maintain_float32_expert_bias"):
                module._maintain_float32_expert_bias()
    bridge.load_weights(models, str(base))
    if args.tuner_type == "lora":
        prepare = importlib.import_module("swift.megatron.utils").prepare_mcore_model
        peft_models = [prepare(args, model) for model in models]
        _train(peft_models)
    state = SimpleNamespace(
        iteration=STEP, consumed_train_samples=48, best_global_step=None, last_model_checkpoint=None
    )
    training = object.__new__(trainer)
    training.__dict__ |= {
        "args": args,
        "state": state,
        "template": template,
        "bridge": bridge,
        "optimizer": None,
        "opt_param_scheduler": None,
        "wrapped_models": models,
        "unwrapped_models": models,
    }
    training.save_checkpoint()


def _train(models: list[Any]) -> None:
    """Give adapters values, as training would; they begin as zeros."""
    import torch

    for model in models:
        for number, (name, parameter) in enumerate(model.named_parameters()):
            if "lora_B" in name:
                values = torch.Generator().manual_seed(number)
                parameter.data = 0.1 * torch.randn(parameter.shape, generator=values).to(parameter.dtype)


def let_it_run_without_gpu() -> None:
    """Patch ms-swift's and mcore-bridge's own needs for a GPU and for a rank's launcher, beyond megatron-core's."""
    import torch

    rank, ranks = (str(each()) for each in (torch.distributed.get_rank, torch.distributed.get_world_size))
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    replace_gpu_calls()


def replace_gpu_calls() -> None:
    """Patch ms-swift's and mcore-bridge's own needs for a GPU, beyond megatron-core's."""
    import torch

    for name in ("set_device", "empty_cache", "ipc_collect"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    move = torch.Tensor.to

    def stay(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self if args == ("cuda",) else move(self, *args, **kwargs)

    torch.Tensor.to = stay
    saver = importlib.import_module("mcore_bridge.utils").StreamingSafetensorSaver
    add = saver.add_tensor
    # What comes from a GPU is a copy of its own; on a CPU it is a view, whose other owners safetensors refuses.
    saver.add_tensor = lambda self, name, tensor: self.is_save_rank and add(self, name, tensor.clone())


if __name__ == "__main__":
    fake_te.install()
    make(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
