"""Checkpoints of a run: torch_dist as Megatron-LM writes it, each complete or absent.

    OUT/latest_checkpointed_iteration.txt    names the last one
    OUT/iter_0000100/                        weights, optimizer, schedule, random states; run.json
    OUT/iter_0000100/config.json …           config, tokenizer and template, so that it loads with no other folder

The optimizer is saved as `fully_reshardable`, with a tensor of each state for each weight, so that a run can continue
in another layout. With LoRA only the adapters are saved, and `run_config.yaml` with their settings, as in
Megatron-Bridge.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import yaml

from reshard.base.errors import Problem, ReshardError
from reshard.engines.megatron.checkpoint_io import SaveOptions, every, load_run, write_torch_dist
from reshard.engines.megatron.stored_arguments import to_store
from reshard.folders import iterations
from reshard.folders.base_hints import RUN_CONFIG
from reshard.folders.companions import find_companions
from reshard.formats.megatron.common_state import read_common
from reshard.formats.megatron.megatron_request import LORA
from reshard.guard.end.completeness import RUN_RECORD, note_files
from reshard.stores.hub import name_of
from reshard.training.damaged_checkpoints import reading
from reshard.training.engine_registry import engine_of
from reshard.training.megatron.lora import is_adapter
from reshard.training.megatron.rank_setup import Trainee, dtype_of, gather_weights
from reshard.transfer.source_files import Sources

PORTABLE_OPTIMIZER = SaveOptions(optimizer_sharding="fully_reshardable")
_OURS = {
    *("fp32", "pack", "train_epochs", "transformer_impl", "moe_grouped_gemm"),
    *("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "report_to"),
}
"""Options that Megatron-LM does not have, or that `Trainee.args` already has."""
_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "world_size",
)


def save(trainee: Trainee, step: int) -> Path:
    """Write `iter_<step>` and update the tracker; collective. Until then, the previous checkpoint is the last one."""
    import torch

    gather_weights(trainee)
    run, first = trainee.run, torch.distributed.get_rank() == 0
    folder = run.output / iterations.name_of(step)
    partial = folder.with_name(f".{folder.name}.partial")
    if first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    torch.distributed.barrier()
    state = {"args": _arguments(trainee, step), "checkpoint_version": 3.0, "iteration": step}
    write_torch_dist(
        partial,
        state,
        trainee.chunks,
        trainee.layout,
        trainee.optimizer,
        trainee.scheduler,
        PORTABLE_OPTIMIZER,
        is_adapter if run.lora else every,
    )
    torch.distributed.barrier()
    if first:
        _note(trainee, partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.replace(folder)
        tracker = run.output / f".{iterations.TRACKER}"
        tracker.write_text(str(step), encoding="utf-8")
        tracker.replace(run.output / iterations.TRACKER)
    torch.distributed.barrier()
    return folder


def _note(trainee: Trainee, folder: Path) -> None:
    """Write the files of a checkpoint that are not tensors."""
    for name, file in find_companions(Sources(), trainee.run.model).files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(file, folder / name)
    record = trainee.run.output / RUN_RECORD
    if record.is_file():
        shutil.copyfile(record, folder / RUN_RECORD)
    if trainee.run.lora:
        (folder / RUN_CONFIG).write_text(yaml.safe_dump(_run_config(trainee), sort_keys=False))
    note_files(folder)


def _run_config(trainee: Trainee) -> dict[str, Any]:
    """Megatron-Bridge's record of an adapter: its settings, its base and the layout."""
    options, layout = trainee.options, trainee.weights.layout
    return {
        "model": {
            "tensor_model_parallel_size": layout.tp,
            "pipeline_model_parallel_size": layout.pp,
            "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
            "expert_model_parallel_size": layout.ep,
            "hf_model_id": name_of(trainee.run.model),
        },
        "peft": {
            "_target_": LORA,
            "target_modules": list(options.lora_target_modules),
            "dim": options.lora_r,
            "alpha": options.lora_alpha,
            "dropout": options.lora_dropout,
        },
    }


def _arguments(trainee: Trainee, step: int) -> Any:
    """The arguments in the form in which Megatron-LM stores them."""
    import torch

    options, steps, dtype = trainee.options, trainee.steps, dtype_of(trainee.options)
    of_run = {
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "params_dtype": dtype,
        "transformer_impl": "transformer_engine" if trainee.transformer_engine else "local",
        "sequence_parallel": trainee.wrapped[0].config.sequence_parallel,
        "context_parallel_size": trainee.layout.cp,
        "expert_tensor_parallel_size": trainee.layout.etp,
        "data_parallel_size": steps.replicas,
        "world_size": torch.distributed.get_world_size(),
        "rank": 0,
        "optimizer": "adam",
        "train_iters": steps.total,
        "global_batch_size": steps.sequences,
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": str(trainee.run.model),
        "consumed_train_samples": step * steps.sequences,
        "ckpt_format": "torch_dist",
        "iteration": step,
        "no_save_optim": False,
        "no_save_rng": False,
        "ckpt_fully_parallel_save": True,
        "dist_ckpt_optim_fully_reshardable": True,
    }
    given = {name: value for name, value in options.as_dict().items() if name not in _OURS}
    return to_store(trainee.args, trainee.layout, **{**given, **of_run})


def resume(trainee: Trainee) -> int:
    """Load the last checkpoint of the output, from any layout. Returns the step at which it was saved.

    Returns 0 if there is none. Random states belong to ranks, and are restored if the layout is the same. Raises
    ReshardError if the checkpoint is of another model.
    """
    output = trainee.run.output
    folder = engine_of(trainee.run).checkpoints.last(output)
    if folder is None:
        return 0
    common = read_common(folder, Sources())
    stored, step = vars(common["args"]), int(common["iteration"])
    ours = vars(_arguments(trainee, step))
    same = all(stored.get(name) == ours.get(name) for name in _SIZES)
    _refuse_other_optimizer(folder, stored, ours)
    with reading(trainee.run, folder):
        found = load_run(
            trainee.chunks,
            folder,
            trainee.optimizer,
            trainee.scheduler,
            only=is_adapter if trainee.run.lora else every,
            random_states=trainee.layout if same else None,
        )
    lacking = [key for key in (*found.missing, *found.unexpected) if is_adapter(key) or not trainee.run.lora]
    if lacking:
        raise ReshardError(
            [
                Problem(
                    "megatron-resumed-run-differs",
                    "the checkpoint to resume from belongs to another run",
                    tensor=key,
                    file=str(folder),
                    remedy="pass the model and options that the run began with, or another -o",
                )
                for key in lacking
            ]
        )
    return step


def _refuse_other_optimizer(folder: Path, stored: dict[str, Any], ours: dict[str, Any]) -> None:
    """Refuse distributed optimizer states for a plain optimizer, and vice versa; plain ones with other experts."""
    name = "use_distributed_optimizer"
    spread = [args["expert_model_parallel_size"] > 1 for args in (stored, ours)]
    if stored[name] != ours[name] or (not ours[name] and spread[0] != spread[1]):
        raise ReshardError(
            "resumed-optimizer-differs",
            "the checkpoint's optimizer does not fit this run's",
            file=str(folder),
            expected=f"{name} {stored[name]}, --ep {stored['expert_model_parallel_size']}",
            found=f"{name} {ours[name]}, --ep {ours['expert_model_parallel_size']}",
            remedy="resume with the optimizer and the experts that the run began with",
        )
