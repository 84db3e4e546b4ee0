"""Train a Megatron-Core model for some steps with Megatron's own schedule and optimizer, and save it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from reshard.algebra.layout import Layout
from reshard.oracle.megatron.load_weights import Mismatch, load_weights
from reshard.oracle.megatron.logits import BatchTokens
from reshard.oracle.megatron.stored_arguments import complete
from tests.genuine.held_states import save_held_states
from tests.genuine.mcore import models
from tests.genuine.mcore.checkpoint_io import SaveOptions, load_run, save_checkpoint
from tests.genuine.mcore.models import LayerSpec, build_model, one_expert_at_a_time, to_store
from tests.genuine.warm import run_ranks


@dataclass(frozen=True)
class TrainingRun:
    """The iteration folder that was written and the loss of every step."""

    folder: Path
    losses: tuple[float, ...]


@dataclass(frozen=True)
class _Recipe:
    """Everything that a rank needs; `initial` is the iteration folder to start from."""

    args: argparse.Namespace | Mapping[str, Any]
    layout: Layout
    out: Path
    initial: Path | None
    resume: bool
    tokens: BatchTokens
    steps: int
    sequences: int | None
    lr: float
    bf16: bool
    distributed_optimizer: bool
    optimizer: str
    bucket_size: int | None
    gradients: bool
    held: bool
    spec: LayerSpec
    seed: int
    iteration: int
    save: tuple[SaveOptions, ...]
    observe: Callable[[list[Any], int], object] | None

    @property
    def is_layer_wise(self) -> bool:
        """Whether each data-parallel rank has whole matrices of Muon's."""
        return self.distributed_optimizer and self.optimizer != "adam"


def train_and_save(
    args: argparse.Namespace | Mapping[str, Any],
    out: Path | str,
    tokens: BatchTokens,
    *,
    checkpoint: Path | str | None = None,
    resume: bool = False,
    layout: Layout | None = None,
    steps: int = 2,
    sequences: int | None = None,
    lr: float = 1e-3,
    bf16: bool = True,
    distributed_optimizer: bool = False,
    optimizer: str = "adam",
    bucket_size: int | None = None,
    gradients: bool = True,
    held: bool = False,
    spec: LayerSpec = "local",
    seed: int = 1234,
    iteration: int | None = None,
    save: SaveOptions | tuple[SaveOptions, ...] = SaveOptions(),  # noqa: B008 (frozen)
    observe: Callable[[list[Any], int], object] | None = None,
) -> TrainingRun:
    """Train for `steps` on `tokens` [sequences, length + 1] and write `out/iter_*` with its tracker file.

    Starts from the iteration folder `checkpoint`, loaded strictly, or from random weights. With `resume`, optimizer and
    scheduler come from there too, and training continues with the sequences that it has not seen. Every step
    takes the next `sequences` (by default, one for each pipeline stage and data parallel rank), cyclically.
    Weights are bfloat16 with float32 main weights unless `bf16` is off. Several `save` options write the same model
    several times, each into a subfolder of `out` that is named after its format. With `steps=0` nothing is trained,
    and without `resume` there is no optimizer to save. Buffers of gradients have buckets of about `bucket_size`
    elements, if that is given. Without `gradients`, these are random, and nothing is computed: for modules that do not
    run on a CPU. With `held`, the states of the distributed optimizer are also saved one by one, in `out/held`.
    `observe` is called on each rank with the wrapped chunks and the number of steps, before the first step and after
    each. Raises RankError, with the cause, if a rank fails.
    """
    layout = layout or Layout()
    if not vars(complete(args)).get("num_experts"):
        layout = replace(layout, etp=layout.tp)  # as Megatron-LM has it: else half of the ranks save nothing
    elif steps and layout.ep == 1 and layout.etp != layout.tp:
        raise ValueError(f"megatron-core lets experts that tensor parallel ranks share drift apart: {layout}")
    if spec == "local" and steps:
        args = one_expert_at_a_time(args)
    recipe = _Recipe(
        args=args,
        layout=layout,
        out=Path(out),
        initial=Path(checkpoint) if checkpoint else None,
        resume=resume,
        tokens=tokens,
        steps=steps,
        sequences=sequences,
        lr=lr,
        bf16=bf16,
        distributed_optimizer=distributed_optimizer,
        optimizer=optimizer,
        bucket_size=bucket_size,
        gradients=gradients,
        held=held,
        spec=spec,
        seed=seed,
        iteration=steps if iteration is None else iteration,
        save=save if isinstance(save, tuple) else (save,),
        observe=observe,
    )
    return run_ranks(layout.world_size, _train_rank, recipe)[-1]


def _train_rank(recipe: _Recipe) -> TrainingRun:
    import torch

    models.initialize(recipe.layout, seed=recipe.seed)
    dtype = torch.bfloat16 if recipe.bf16 else torch.float32
    chunks = build_model(recipe.args, recipe.layout, spec=recipe.spec, dtype=dtype, training=True)
    if recipe.initial is not None and not recipe.resume:
        _check(load_weights(chunks, recipe.initial))
    losses: list[float] = []
    optimizer = scheduler = None
    if recipe.steps or recipe.resume:
        wrapped = _wrap(chunks, recipe)
        optimizer, scheduler = _make_optimizer(wrapped, recipe)
        if recipe.initial is not None and recipe.resume:
            load_run(chunks, recipe.initial, optimizer, scheduler)
        batches = _batches(recipe)
        observe = recipe.observe or (lambda chunks, step: None)
        observe(wrapped, 0)
        for step in range(recipe.steps):
            losses.append(_step(wrapped, optimizer, batches, recipe))
            observe(wrapped, step + 1)
    elif recipe.bf16:
        _wrap_precision(chunks)
    folder = recipe.out
    for options in recipe.save:
        folder = save_checkpoint(
            recipe.out / options.format if len(recipe.save) > 1 else recipe.out,
            recipe.iteration,
            chunks,
            to_store(recipe.args, recipe.layout, **_run_arguments(recipe, dtype)),
            recipe.layout,
            optimizer=optimizer,
            scheduler=scheduler,
            options=options,
        )
    if recipe.held:
        save_held_states(recipe.out / "held", chunks, optimizer)
    return TrainingRun(folder, tuple(losses))


def _check(mismatch: Mismatch) -> None:
    if mismatch.missing or mismatch.unexpected:
        raise ValueError(f"missing: {mismatch.missing}; unexpected: {mismatch.unexpected}")


def _run_arguments(recipe: _Recipe, dtype: Any) -> dict[str, Any]:
    """The arguments that record how this run was made."""
    import torch

    world_size = torch.distributed.get_world_size()
    return {
        "bf16": recipe.bf16,
        "fp16": False,
        "params_dtype": dtype,
        "transformer_impl": "transformer_engine" if recipe.spec == "te" else "local",
        "use_distributed_optimizer": recipe.distributed_optimizer and not recipe.is_layer_wise,
        "data_parallel_size": world_size // recipe.layout.tp // recipe.layout.pp // recipe.layout.cp,
        "world_size": world_size,
        "rank": torch.distributed.get_rank(),
        "optimizer": recipe.optimizer,
        "use_layer_wise_distributed_optimizer": recipe.is_layer_wise,
        "lr": recipe.lr,
        "seq_length": recipe.tokens.shape[1] - 1,
        "consumed_train_samples": 0,
        "no_save_optim": False,
        "no_save_rng": False,
    }


def _wrap_precision(chunks: list[Any]) -> list[Any]:
    from megatron.core.transformer.module import Float16Module

    return [Float16Module(chunk.config, chunk) for chunk in chunks]


def _wrap(chunks: list[Any], recipe: _Recipe) -> list[Any]:
    """Mixed precision and data parallelism around each chunk, as Megatron-LM's `get_model` does."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=recipe.bucket_size is not None,  # or there are no buckets
        bucket_size=recipe.bucket_size,
        use_distributed_optimizer=recipe.distributed_optimizer,
        check_for_nan_in_grad=False,
    )
    modules = _wrap_precision(chunks) if recipe.bf16 else chunks
    placed = _layer_wise(modules, config) if recipe.is_layer_wise else [{} for _ in modules]
    wrapped = [
        DistributedDataParallel(
            config=module.config,
            ddp_config=config,
            module=module,
            disable_bucketing=index > 0,
            **placed[index],
        )
        for index, module in enumerate(modules)
    ]
    config.overlap_grad_reduce = False  # reduced when all are there, whatever the buckets
    for module in wrapped:
        module.broadcast_params()
    return wrapped


def _layer_wise(modules: list[Any], config: Any) -> list[dict[str, Any]]:
    """Where Muon's matrices and the weights of its Adam are in buffers, as Megatron-LM 0.19 places them."""
    from megatron.core import parallel_state as ps
    from megatron.core.optimizer import layer_wise_optimizer

    layer_wise_optimizer.tag_params_for_buffer_routing(modules)
    place = layer_wise_optimizer.LayerWiseDistributedOptimizer.compute_full_param_layout
    sizes = (
        ps.get_data_parallel_world_size(with_context_parallel=True),
        ps.get_expert_data_parallel_world_size(),
    )
    layouts = (
        place(
            [each for each in module.parameters() if each.requires_grad],
            config.bucket_size,
            sizes[0],
            config,
            expert_data_parallel_world_size=sizes[1],
        )
        for module in modules
    )
    return [{"full_param_layout": layout} for layout in layouts]


def _make_optimizer(wrapped: list[Any], recipe: _Recipe) -> tuple[Any, Any]:
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    config = wrapped[0].config
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer=recipe.optimizer,
            **({"use_layer_wise_distributed_optimizer": True} if recipe.is_layer_wise else {}),
            lr=recipe.lr,
            min_lr=recipe.lr,
            weight_decay=0.01,
            bf16=recipe.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=recipe.distributed_optimizer and not recipe.is_layer_wise,
            clip_grad=1.0,
        ),
        wrapped,
        **({} if recipe.optimizer == "adam" else {"config_overrides": {}}),
    )
    for module in wrapped:
        module.config.finalize_model_grads_func = finalize_model_grads
        module.config.grad_scale_func = optimizer.scale_loss
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=recipe.lr,
        min_lr=recipe.lr,
        lr_warmup_steps=0,
        lr_decay_steps=max(recipe.steps, 1),
        lr_decay_style="constant",
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=max(recipe.steps, 1),
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=True,
        override_opt_param_scheduler=False,
    )
    return optimizer, scheduler


def _batches(recipe: _Recipe) -> Iterator[tuple[Any, Any]]:
    """This data parallel rank's sequences, one at a time, as (inputs, next tokens), endlessly."""
    import torch
    from megatron.core import parallel_state as ps

    tokens = torch.from_numpy(np.asarray(recipe.tokens, dtype=np.int64))
    position, stride = ps.get_data_parallel_rank(), ps.get_data_parallel_world_size()
    if recipe.resume:
        position += (recipe.iteration - recipe.steps) * _sequences(recipe)
    while True:
        sequence = tokens[position % len(tokens)].unsqueeze(0)
        yield sequence[:, :-1], sequence[:, 1:]
        position += stride


def _sequences(recipe: _Recipe) -> int:
    from megatron.core import parallel_state as ps

    return recipe.sequences or recipe.layout.pp * int(ps.get_data_parallel_world_size())


def _step(wrapped: list[Any], optimizer: Any, batches: Iterator[tuple[Any, Any]], recipe: _Recipe) -> float:
    """One optimizer step over microbatches of one sequence; the loss is the mean over all ranks."""
    import torch
    from megatron.core import parallel_state as ps
    from megatron.core.pipeline_parallel import get_forward_backward_func

    for module in wrapped:
        module.zero_grad_buffer()
    optimizer.zero_grad()
    if not recipe.gradients:
        return _random_step(wrapped, optimizer)
    count = _sequences(recipe) // ps.get_data_parallel_world_size()
    microbatches = [next(batches) for _ in range(count)]
    length = recipe.tokens.shape[1] - 1
    results = get_forward_backward_func()(
        forward_step_func=_training_forward,
        data_iterator=[iter(microbatches) for _ in wrapped] if len(wrapped) > 1 else iter(microbatches),
        model=wrapped if len(wrapped) > 1 else wrapped[0],
        num_microbatches=len(microbatches),
        seq_length=length,
        micro_batch_size=1,
        decoder_seq_length=length,
        forward_only=False,
    )
    succeeded, _, _ = optimizer.step()
    if not succeeded:
        raise RuntimeError("the optimizer skipped a step: gradients were not finite")
    totals = torch.tensor([sum(float(result["loss"]) for result in results), float(len(results))])
    torch.distributed.all_reduce(totals)
    return float(totals[0] / totals[1])


def _random_step(wrapped: list[Any], optimizer: Any) -> float:
    """One optimizer step along random gradients: those of data-parallel ranks differ, and are reduced as all are."""
    import torch
    from megatron.core import parallel_state as ps

    generator = torch.Generator().manual_seed(ps.get_data_parallel_rank())
    for module in wrapped:
        for parameter in module.parameters():
            parameter.main_grad.copy_(torch.randn(parameter.main_grad.shape, generator=generator))
        module.finish_grad_sync()
    optimizer.step()
    return 0.0


def _training_forward(batches: Iterator[tuple[Any, Any]], model: Any) -> tuple[Any, Any]:
    import torch

    tokens, labels = next(batches)
    length = tokens.shape[1]
    positions = torch.arange(length).unsqueeze(0)
    mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]
    return model(tokens, positions, mask, labels=labels), _mean_loss


def _mean_loss(output: Any) -> tuple[Any, dict[str, Any]]:
    loss = output.float().mean()
    return loss, {"loss": loss.detach().clone()}  # the schedule scales the loss in place
