"""Setup of a rank: its device and process groups, the model filled with its shards, the optimizer, the schedule."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from reshard.algebra.layout import Layout
from reshard.base.errors import ReshardError
from reshard.engines.megatron import cpu_patches, process_groups
from reshard.engines.megatron.fill_model import fill, place
from reshard.engines.megatron.gpt_model import LayerSpec, build_config, build_model
from reshard.engines.megatron.stored_arguments import complete
from reshard.engines.megatron.weight_shards import Coordinates, ShardedWeights
from reshard.training.collectives import join
from reshard.training.megatron import lora
from reshard.training.megatron.batches import (
    RunSteps,
    check_ranks,
    is_half,
    schedule,
    uses_transformer_engine,
)
from reshard.training.megatron.core_fields import DATA_PARALLEL, MODEL, OPTIMIZER, given_to
from reshard.training.megatron.options import MegatronOptions
from reshard.training.megatron.sharded_weights import weights_of
from reshard.training.run import Run


@dataclass
class Trainee:
    """What a rank trains. `chunks` are the bare models of its virtual stages, `wrapped` what the schedule runs."""

    run: Run
    options: MegatronOptions
    steps: RunSteps
    layout: Layout
    at: Coordinates
    weights: ShardedWeights
    args: dict[str, Any]
    chunks: list[Any]
    wrapped: list[Any]
    optimizer: Any
    scheduler: Any
    transformer_engine: bool


def start(run: Run, options: MegatronOptions) -> Layout:
    """Set this rank's device first, then join the process group. Raises ReshardError if there are too few ranks."""
    import torch

    if run.layout.tp * run.layout.cp > 1:
        # Overlapping communication and computation relies on the order in which both were launched.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    cpu_patches.enable()
    if not torch.distributed.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        join(backend, timedelta(minutes=options.distributed_timeout_minutes))
    check_ranks(options, run.layout, torch.distributed.get_world_size())
    layout = replace(run.layout, etp=options.expert_tensor_parallel_size or run.layout.tp)
    process_groups.initialize(layout, seed=options.seed, timeout=options.distributed_timeout_minutes)
    return layout


def open_weights(run: Run, options: MegatronOptions, transformer_engine: bool) -> ShardedWeights:
    """The plan of the base's weights, in the dtype of training."""
    dtype = str(dtype_of(options)).removeprefix("torch.")
    return weights_of(run.model, run, options, transformer_engine=transformer_engine, dtype=dtype)


def dtype_of(options: MegatronOptions) -> Any:
    """The dtype of the weights during training."""
    import torch

    if not is_half(options):
        return torch.float32
    return torch.float16 if options.fp16 else torch.bfloat16


def prepare(
    run: Run,
    options: MegatronOptions,
    steps: RunSteps,
    layout: Layout,
    weights: ShardedWeights,
    transformer_engine: bool,
) -> Trainee:
    """Build, fill and wrap the model of this rank, and make its optimizer. Process groups must exist."""
    args = {**weights.model.args, "padded_vocab_size": weights.rows}
    args["moe_grouped_gemm"] = (
        options.moe_grouped_gemm is not False and transformer_engine and bool(args.get("num_experts"))
    )
    chunks = _build(args, options, layout, transformer_engine)
    modules = [_in_halves(chunk) for chunk in chunks] if is_half(options) else chunks
    at = place(weights.layout)
    fill(chunks, weights, at)
    for chunk in chunks:
        _leave_out_padding(chunk, weights)
        _let_experts_add_biases(chunk)
    if run.lora:
        lora.adapt(chunks, weights, at, options)
    wrapped = _wrap(modules, options)
    optimizer = _optimizer(wrapped, options)
    scheduler = _scheduler(optimizer, options, steps)
    return Trainee(
        run,
        options,
        steps,
        layout,
        at,
        weights,
        args,
        chunks,
        wrapped,
        optimizer,
        scheduler,
        transformer_engine,
    )


def gather_weights(trainee: Trainee) -> None:
    """Gather all updated weights on each rank, as the next forward pass would; collective.

    With `overlap_param_gather`, a rank has updated only its own shard until then.
    """
    if trainee.options.overlap_param_gather:
        for module in trainee.wrapped:
            module.start_param_sync(force_sync=True)


def try_configs(args: Mapping[str, Any], options: MegatronOptions, layout: Layout) -> None:
    """Make megatron-core's configs, which validate their fields. Raises ReshardError if they refuse them."""
    spec: LayerSpec = "te" if uses_transformer_engine(options, layout) else "local"
    dtype = dtype_of(options)
    settings = _settings(options, layout)
    try:
        full = complete({**args, "padded_vocab_size": args.get("padded_vocab_size") or 1})
        build_config(
            full, layout.over(full.num_layers), spec=spec, dtype=dtype, training=True, settings=settings
        )
        _ddp_config(options)
        _optimizer_config(options, dtype)
    except (AssertionError, ValueError, TypeError, NotImplementedError) as error:
        raise ReshardError(
            "megatron-config-refused",
            "megatron-core refuses the options",
            found=str(error).split("\n")[0] or type(error).__name__,
            remedy="correct or leave out what this is about: "
            + " ".join(f"--{name}" for name in sorted(options.more)),
        ) from None


def _build(args: dict[str, Any], options: MegatronOptions, layout: Layout, transformer_engine: bool) -> Any:
    import torch

    gpu = torch.cuda.is_available()
    chunks = build_model(
        args,
        layout.over(int(args["num_layers"])),
        spec="te" if transformer_engine else "local",
        dtype=dtype_of(options),
        training=True,
        settings={
            **_settings(options, layout),
            "moe_grouped_gemm": args["moe_grouped_gemm"],
            "use_cpu_initialization": not gpu,
            "perform_initialization": False,  # every weight is read
        },
    )
    return [chunk.cuda(torch.cuda.current_device()) if gpu else chunk for chunk in chunks]


def _settings(options: MegatronOptions, layout: Layout) -> dict[str, Any]:
    """Fields of TransformerConfig for speed, memory and the loss."""
    import torch
    from megatron.core.transformer.enums import AttnBackend

    recompute = {
        "recompute_granularity": options.recompute_granularity,
        "recompute_method": options.recompute_method,
        "recompute_num_layers": options.recompute_num_layers,
    }
    # Stages pass on the residual stream, in the dtype in which it is kept.
    residual = {"pipeline_dtype": torch.float32} if options.more.get("fp32_residual_connection") else {}
    if options.recompute_granularity == "full":
        recompute["recompute_method"] = options.recompute_method or "uniform"
        recompute["recompute_num_layers"] = options.recompute_num_layers or 1
    return {
        **recompute,
        "sequence_parallel": layout.tp > 1 and options.sequence_parallel is not False,
        "calculate_per_token_loss": True,
        "moe_aux_loss_coeff": options.moe_aux_loss_coeff,
        "moe_router_bias_update_rate": options.moe_router_bias_update_rate,
        "mtp_loss_scaling_factor": options.mtp_loss_scaling_factor,
        "attention_backend": AttnBackend[options.attention_backend],
        **residual,
        **given_to(MODEL, options.more),
    }


def _leave_out_padding(chunk: Any, weights: ShardedWeights) -> None:
    """Exclude padding rows of the vocabulary from the softmax, so that the trained model is the same as the Hub's.

    Rows of zeros in the head give logits of 0, which would contribute to the loss.
    """
    import torch
    from megatron.core import parallel_state as ps

    if not chunk.post_process or weights.rows == weights.model.dims.vocab:
        return
    share = weights.rows // ps.get_tensor_model_parallel_world_size()
    valid = weights.model.dims.vocab - share * ps.get_tensor_model_parallel_rank()
    device = next(chunk.parameters()).device
    padding = torch.arange(share, device=device) >= valid
    if bool(padding.any()):

        def hide(module: Any, inputs: Any, output: Any) -> Any:
            logits, *rest = output
            return (logits.masked_fill(padding, torch.finfo(logits.dtype).min), *rest)

        chunk.output_layer.register_forward_hook(hide)


def _let_experts_add_biases(chunk: Any) -> None:
    """Give each expert its own output and bias gradient.

    megatron-core 0.16.1 adds the bias in place to a tensor that a collective over a single rank returns unchanged,
    which autograd forbids; and under sequence parallelism it sums the gradients of biases over tensor-parallel ranks,
    which have different experts.
    """
    for name, module in chunk.named_modules():
        if ".local_experts." in name and name.endswith("linear_fc2") and module.bias is not None:
            module.bias.sequence_parallel = False
            module.register_forward_hook(lambda module, inputs, output: (output[0].clone(), *output[1:]))


def _in_halves(chunk: Any) -> Any:
    """Mixed precision around a chunk, as in Megatron-LM's `get_model`: routers keep their biases in float32."""
    from megatron.core.transformer.module import Float16Module

    module = Float16Module(chunk.config, chunk)
    for inner in chunk.modules():
        if hasattr(inner, "_maintain_float32_expert_bias"):
            inner._maintain_float32_expert_bias()
    return module


def _wrap(modules: list[Any], options: MegatronOptions) -> list[Any]:
    """Wrap each chunk for data parallelism."""
    from megatron.core.distributed import DistributedDataParallel

    config = _ddp_config(options)
    return [
        DistributedDataParallel(
            config=module.config, ddp_config=config, module=module, disable_bucketing=index > 0
        )
        for index, module in enumerate(modules)
    ]


def _ddp_config(options: MegatronOptions) -> Any:
    from megatron.core.distributed import DistributedDataParallelConfig

    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=not options.grad_reduce_in_bf16,
        overlap_grad_reduce=options.overlap_grad_reduce,
        overlap_param_gather=options.overlap_param_gather,
        use_distributed_optimizer=options.use_distributed_optimizer,
        check_for_nan_in_grad=False,  # `step` checks the loss and the norm
        **given_to(DATA_PARALLEL, options.more),
    )


def _optimizer_config(options: MegatronOptions, dtype: Any) -> Any:
    import torch
    from megatron.core.optimizer import OptimizerConfig

    return OptimizerConfig(
        optimizer="adam",
        lr=options.rate,
        min_lr=options.min_lr,
        weight_decay=options.weight_decay,
        adam_beta1=options.adam_beta1,
        adam_beta2=options.adam_beta2,
        adam_eps=options.adam_eps,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        params_dtype=dtype,
        use_distributed_optimizer=options.use_distributed_optimizer,
        overlap_param_gather=options.overlap_param_gather,
        clip_grad=options.clip_grad,
        **{"initial_loss_scale": _loss_scale(options), **given_to(OPTIMIZER, options.more)},
    )


def _optimizer(wrapped: list[Any], options: MegatronOptions) -> Any:
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import get_megatron_optimizer

    config = wrapped[0].config
    optimizer = get_megatron_optimizer(_optimizer_config(options, config.params_dtype), wrapped)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if options.overlap_grad_reduce:
        pauses = [module.no_sync for module in wrapped]
        config.no_sync_func = pauses if len(pauses) > 1 else pauses[0]
    return optimizer


def _loss_scale(options: MegatronOptions) -> float:
    """The initial scale of the sum over tokens, which is divided only after the backward pass.

    Megatron-LM begins with 2^32, which makes a short run skip its first steps.
    """
    return max(1.0, 2.0**16 / ((options.seq_length or 1) * options.micro_batch_size))


def _scheduler(optimizer: Any, options: MegatronOptions, steps: RunSteps) -> Any:
    """The schedule, in units of sequences as in Megatron-LM."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    decay, warmup = schedule(options, steps)
    start, end = options.start_weight_decay, options.end_weight_decay
    return OptimizerParamScheduler(
        optimizer,
        init_lr=options.lr_warmup_init,
        max_lr=options.rate,
        min_lr=options.min_lr,
        lr_warmup_steps=warmup * steps.sequences,
        lr_decay_steps=decay * steps.sequences,
        lr_decay_style=options.lr_decay_style,
        start_wd=options.weight_decay if start is None else start,
        end_wd=options.weight_decay if end is None else end,
        wd_incr_steps=steps.total * steps.sequences,
        wd_incr_style=options.weight_decay_incr_style,
        wsd_decay_steps=options.lr_wsd_decay_iters and options.lr_wsd_decay_iters * steps.sequences,
        lr_wsd_decay_style=options.lr_wsd_decay_style,
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
