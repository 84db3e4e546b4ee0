"""Memory: the estimate compared with the bytes of real steps."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reshard.algebra.layout import Layout
from reshard.engines.megatron.session import run_ranks
from reshard.folders.companions import read_object
from reshard.training import memory
from reshard.training.engine import StateBytes, StepCounts
from reshard.training.engine_registry import engine_of
from reshard.training.memory import activations
from reshard.training.memory.activations import KeptBytes, LayerWidths
from reshard.training.run import Run
from reshard.training.trl.memory_estimate import sizes_of
from reshard.transfer.source_files import Sources

QWEN3_8B = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
SMALL = {
    "model_type": "qwen3",
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
SEQUENCES, LENGTH = 2, 75
"""150 tokens: no matrix of the models has that many rows or columns."""


def run_on(model: Path, **given: Any) -> Run:
    return Run(given.pop("method", "sft"), model, model, model / "out", **given)


def small(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def trainable(run: Run, dtype: str = "float32") -> Any:
    """The model that TRL trains in a run, with random weights."""
    import torch
    from peft import get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    from reshard.training.trl.adapter_checks import adapter_config

    config = AutoConfig.from_pretrained(str(run.model))
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.config.use_cache = False
    if run.lora:
        model = get_peft_model(model, adapter_config(engine_of(run).options(run), model))
    return model.train()


def tokens_of(model: Any) -> Any:
    import torch

    return torch.randint(3, model.config.vocab_size, (SEQUENCES, LENGTH))


def nbytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


@dataclass
class Saved:
    """Storages that autograd keeps: in the forward pass, and again in the backward pass."""

    forward: dict[int, Any] = field(default_factory=dict)
    again: dict[int, Any] = field(default_factory=dict)
    goes_back: bool = False

    def nbytes(self, again: bool = False) -> int:
        tensors = (self.again if again else self.forward).values()
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@contextmanager
def saved_tensors(model: Any) -> Iterator[Saved]:
    """Storages that autograd keeps during the block, without the parameters and their 16-bit copies."""
    import torch

    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    shapes = {tuple(p.shape) for p in model.parameters()} | {tuple(p.shape)[::-1] for p in model.parameters()}
    saved = Saved()

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        is_cast = tensor.dtype != torch.float32 and tuple(tensor.shape) in shapes
        if storage.data_ptr() not in own and not is_cast:
            (saved.again if saved.goes_back else saved.forward)[storage.data_ptr()] = tensor
        return tensor

    def unpack(tensor: Any) -> Any:
        saved.goes_back = True
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield saved


@pytest.mark.parametrize(
    ("name", "lora"),
    [("qwen2_tied", False), ("qwen3", True), ("qwen3_moe", False), ("qwen3_moe", True)],
)
def test_states_are_those_of_a_real_step(name: str, lora: bool, tiny: Callable[..., Path]) -> None:
    import torch

    run = run_on(tiny(name), lora=lora)
    model = trainable(run)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    ids = tokens_of(model)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    moments = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    engine = engine_of(run)
    found = memory.estimate(run, engine.batches(run, 1, 64), engine.precision(run), 1, gpu=False)
    assert found.always == {
        "weights": nbytes(model.parameters()),
        "gradients": nbytes(p.grad for p in trained),
        "optimizer": nbytes(moments),
    }


@pytest.mark.parametrize(
    ("config", "dtype", "autocast", "again"),
    [
        (SMALL, "float32", False, False),
        (SMALL, "bfloat16", False, False),
        (SMALL, "float32", True, False),
        (SMALL, "float32", False, True),
        ({**SMALL, **EXPERTS}, "float32", False, False),
        ({**SMALL, **EXPERTS}, "bfloat16", False, False),
    ],
)
def test_activations_are_those_that_autograd_keeps(
    config: dict[str, Any], dtype: str, autocast: bool, again: bool, tmp_path: Path
) -> None:
    import torch

    run = run_on(small(tmp_path / "model", config))
    model = trainable(run, dtype)
    if again:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with saved_tensors(model) as kept, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model.lm_head(model.model(tokens_of(model)).last_hidden_state)
    widths = LayerWidths.of(config)
    case = KeptBytes(
        computed=2 if autocast or dtype == "bfloat16" else 4, residual=2 if dtype == "bfloat16" else 4
    )
    layers = activations.of_layers(widths, case, LENGTH)
    if again:
        layers = widths.layers * activations.between_layers(widths, case)
    expected = SEQUENCES * LENGTH * (layers + activations.of_ends(widths, case))
    assert expected == pytest.approx(kept.nbytes(), rel=0.1)


@pytest.mark.parametrize(
    ("config", "dtype", "autocast", "again"),
    [
        (SMALL, "float32", False, False),
        (SMALL, "bfloat16", True, False),
        (SMALL, "float32", False, True),
        ({**SMALL, **EXPERTS}, "float32", False, False),
    ],
)
def test_adapters_keep_inputs_and_merged_experts_but_not_what_frozen_norms_would(
    config: dict[str, Any], dtype: str, autocast: bool, again: bool, tmp_path: Path
) -> None:
    import torch

    run = run_on(small(tmp_path / "model", config), lora=True, options={"lora_r": 8})
    model = trainable(run, dtype)
    if again:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    with saved_tensors(model) as kept, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model.get_base_model().model(tokens_of(model))
    widths, width = LayerWidths.of(config), 2 if autocast else 4
    case = KeptBytes(computed=width, residual=width, frozen=True)
    layers = activations.of_layers(widths, case, LENGTH)
    if again:
        layers = widths.layers * activations.between_layers(widths, case)
    merged = sizes_of(run, engine_of(run).options(run)).experts * width * widths.sparse
    norm = activations.of_ends(widths, case) - width * widths.hidden  # the head is left out here
    expected = SEQUENCES * LENGTH * (layers + norm) + merged
    assert expected == pytest.approx(kept.nbytes(), rel=0.1)
    assert (merged > 0) is ("num_experts" in config)


@pytest.mark.core("True-False-True")
@pytest.mark.parametrize(("lora", "autocast", "again"), [(False, True, False), (True, False, True)])
def test_the_peak_of_real_steps_is_foretold(lora: bool, autocast: bool, again: bool, tmp_path: Path) -> None:
    """Two optimizer steps with TRL's head, and every allocation in torch's profile."""
    options = {"lora_r": 8} if lora else {}
    run = run_on(small(tmp_path / "model", {**SMALL, "vocab_size": 4000}), lora=lora, options=options)
    precision = StateBytes(4, 4, 8, 2 if autocast else 4, again)
    found = memory.estimate(run, StepCounts(SEQUENCES, 1, 1, 1, LENGTH), precision, 1, gpu=False)
    assert found.total == pytest.approx(peak(run, autocast, again), rel=0.25)


@pytest.mark.thorough
def test_the_tiles_of_a_distillation_are_those_that_trl_computes_in(tmp_path: Path) -> None:
    import torch
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    folder = small(tmp_path / "model", {**SMALL, "vocab_size": 4000})
    run = run_on(folder, method="distillation", options={"teacher_model_name_or_path": str(folder)})
    batches, precision = StepCounts(SEQUENCES, 1, 1, 1, LENGTH), StateBytes(4, 4, 8, 4, False)
    _, step, _ = engine_of(run).estimates.parts(run, batches, precision, 1, gpu=False)
    hidden = [torch.randn(SEQUENCES, LENGTH, 256, requires_grad=each == 0) for each in range(2)]
    heads = [torch.randn(4000, 256, requires_grad=each == 0) for each in range(2)]
    with profiled() as seen:
        loss, _, _ = _chunked_divergence_loss(*hidden, *heads, torch.ones(SEQUENCES, LENGTH), 1.0)
        loss.backward()
    assert step["logits"] == pytest.approx(seen(), rel=0.1)


@contextmanager
def profiled() -> Iterator[Callable[[], int]]:
    """Record allocations; the function returns the most bytes that were allocated at once."""
    from torch.profiler import ProfilerActivity, profile

    gc.collect()  # what earlier tests have left would count as freed here
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:

        def most() -> int:
            events = [each for each in seen.profiler.kineto_results.events() if each.name() == "[memory]"]
            changes = [each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())]
            return int(np.cumsum(changes).max())

        yield most


def peak(run: Run, autocast: bool, again: bool) -> int:
    import torch
    from trl.trainer.utils import add_fused_lm_head

    with profiled() as seen:
        model = trainable(run)
        base = model.get_base_model() if run.lora else model
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        add_fused_lm_head(base, outputs=("log_probs", "entropy", "is_top1"))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
        for _ in range(2):
            ids = tokens_of(model)
            mask = torch.ones_like(ids)
            mask[0, 0] = 0
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = base(input_ids=ids, attention_mask=mask, labels=ids, fused_lm_head=True).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return seen()


def test_fsdp2_spreads_states_over_all_ranks(tiny: Callable[..., Path]) -> None:
    run = run_on(tiny("qwen3"), parallel="fsdp2")
    engine = engine_of(run)
    found = memory.estimate(run, engine.batches(run, 2, 64), engine.precision(run), 2, gpu=False)
    for rank in run_ranks(2, held_by_fsdp2, run):
        for part, size in rank.items():
            assert found.always[part] == pytest.approx(size, rel=0.02), part


def held_by_fsdp2(run: Run) -> dict[str, int]:
    """The memory of a rank after a step of FSDP2, layer by layer."""
    import torch
    from torch.distributed import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model, mesh = trainable(run), init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = tokens_of(model)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    moments = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    return {
        "weights": nbytes(p.to_local() for p in model.parameters()),
        "gradients": nbytes(p.grad.to_local() for p in model.parameters()),
        "optimizer": nbytes(each.to_local() for each in moments),
    }


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "ranks"), [("qwen2_tied", 2), ("qwen3_moe", 2), ("qwen2_tied", 4)])
def test_tensor_parallel_ranks_hold_what_the_plan_of_transformers_cuts(
    name: str, ranks: int, tiny: Callable[..., Path]
) -> None:
    run = run_on(tiny(name), parallel="tp", layout=Layout(tp=2))
    found = memory.estimate(run, StepCounts(1, 1, 1, 1, 64), StateBytes(4, 4, 8, 4), ranks, gpu=False)
    for weights in run_ranks(ranks, weights_under_tp, run):
        assert found.always["weights"] == pytest.approx(weights, rel=0.02)


def weights_under_tp(run: Run) -> int:
    import torch.distributed
    from torch.distributed.tensor import DTensor
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(tp_size=2, tp_plan="auto", fsdp_size=torch.distributed.get_world_size() // 2)
    model = AutoModelForCausalLM.from_pretrained(str(run.model), dtype="float32", distributed_config=config)
    return nbytes(p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())


def test_generation_holds_keys_and_values_of_all_completions(tiny: Callable[..., Path]) -> None:
    import torch

    run = run_on(tiny("qwen3"), method="grpo", reward=("tests.train.test_memory:run_on",))
    found = memory.estimate(run, StepCounts(2, 3, 1, 1, LENGTH), StateBytes(4, 4, 8, 4), 1, gpu=False)
    model = trainable(run).eval()
    ids = torch.randint(3, model.config.vocab_size, (2 * 3, LENGTH))
    cache = model(input_ids=ids, use_cache=True).past_key_values
    assert found.generation == {
        "keys and values": nbytes(each for layer in cache.layers for each in (layer.keys, layer.values))
    }
    assert found.total == sum(found.always.values()) + sum(found.step.values()), "the larger of both counts"


MEGATRON = {"seq_length": 64, "fp32": True, "global_batch_size": 2}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "layout", "lora", "options"),
    [
        ("qwen3_moe", Layout(tp=2, ep=2), False, {"expert_tensor_parallel_size": 1}),
        ("qwen2_tied", Layout(tp=2, pp=2), True, {"lora_r": 4}),
    ],
)
def test_megatrons_states_are_those_of_its_ranks(
    name: str, layout: Layout, lora: bool, options: dict[str, Any], tiny: Callable[..., Path], tmp_path: Path
) -> None:
    run = run_on(tiny(name), engine="megatron", layout=layout, lora=lora, options={**MEGATRON, **options})
    ranks = run_ranks(4, held_by_rank, run, 4)
    engine = engine_of(run)
    found = memory.estimate(run, engine_batches(run, 4), engine.precision(run), 4, gpu=False)
    real = max(ranks, key=lambda rank: rank["weights"])
    assert found.always["weights"] == real["weights"]
    assert found.always["gradients"] == pytest.approx(real["gradients"], rel=0.05), "buffers are padded"
    assert found.always["optimizer"] == pytest.approx(real["optimizer"], rel=0.02)


def engine_batches(run: Run, world_size: int) -> StepCounts:
    replicas = run.layout.replicas(world_size)
    return StepCounts(1, 2 // replicas, replicas, 1, int(run.options["seq_length"]))


def held_by_rank(run: Run, world_size: int) -> dict[str, int]:
    """The memory of a Megatron-Core rank after a step, and the memory kept by its first micro-batch."""
    from reshard.training.megatron.batches import steps_of
    from reshard.training.megatron.options import read
    from reshard.training.megatron.packed_rows import RowOrder
    from reshard.training.megatron.rank_setup import open_weights, prepare, start
    from reshard.training.megatron.training_step import run_step

    options = read(run)
    sizes = start(run, options)
    rows = np.zeros((2, 3, int(options.seq_length or 0)), np.int32)
    rows[:, :2] = np.random.default_rng(0).integers(3, 200, (2, 2, rows.shape[2]))
    weights = open_weights(run, options, False)
    trainee = prepare(run, options, steps_of(options, run.layout, world_size, 2), sizes, weights, False)
    with saved_tensors(trainee.chunks[0]) as kept:
        run_step(trainee, rows, RowOrder(2, 1), 0)
    chained = getattr(trainee.optimizer, "chained_optimizers", [trainee.optimizer])
    moments = [
        state[key]
        for each in chained
        for state in each.optimizer.state.values()
        for key in ("exp_avg", "exp_avg_sq")
    ]
    buffers = [
        buffer for module in trainee.wrapped for buffer in (*module.buffers, *module.expert_parallel_buffers)
    ]
    return {
        "weights": nbytes(p for chunk in trainee.chunks for p in chunk.parameters()),
        "gradients": nbytes(buffer.grad_data for buffer in buffers),
        "optimizer": nbytes(moments),
        "kept": kept.nbytes(),
        "kept again": kept.nbytes(again=True),
    }


@pytest.mark.parametrize("recompute", [None, "full"])
def test_megatrons_activations_are_those_that_autograd_keeps(
    recompute: str | None, tiny: Callable[..., Path]
) -> None:
    options = {**MEGATRON, "global_batch_size": 1, "recompute_granularity": recompute}
    run = run_on(tiny("qwen3"), engine="megatron", options=options)
    (real,) = run_ranks(1, held_by_rank, run, 1)
    found = memory.estimate(run, StepCounts(1, 1, 1, 1, 64), engine_of(run).precision(run), 1, gpu=False)
    one_layer_again = (
        real["kept again"] / read_object(run.model / "config.json", Sources())["num_hidden_layers"]
    )
    assert sum(found.step.values()) == pytest.approx(real["kept"] + one_layer_again, rel=0.2)


@pytest.mark.thorough
def test_ranks_that_share_a_query_group_keep_the_projections_of_all(tiny: Callable[..., Path]) -> None:
    """Each gathers the output of `linear_qkv`, and keeps views of it."""
    estimated, real = [], []
    for groups in (4, 2):
        model = tiny("qwen3", num_key_value_heads=groups)
        options = {**MEGATRON, "global_batch_size": 1}
        run = run_on(model, engine="megatron", layout=Layout(tp=4), options=options)
        real.append(run_ranks(4, held_by_rank, run, 4)[0]["kept"])
        found = memory.estimate(run, StepCounts(1, 1, 1, 1, 64), engine_of(run).precision(run), 4, gpu=False)
        estimated.append(sum(found.step.values()))
    assert real[1] > 1.1 * real[0]
    assert estimated[1] - estimated[0] == pytest.approx(real[1] - real[0], rel=0.01)


def test_a_first_stage_holds_the_micro_batches_that_it_has_begun(tiny: Callable[..., Path]) -> None:
    """Of eight layers the first stage has four, for two micro-batches; the last has one of them, and the logits."""
    options = {**MEGATRON, "global_batch_size": 2}
    run = run_on(tiny("qwen3", num_hidden_layers=8), engine="megatron", layout=Layout(pp=2), options=options)
    first, last = run_ranks(2, held_by_rank, run, 2)
    found = memory.estimate(run, StepCounts(1, 2, 1, 1, 64), engine_of(run).precision(run), 2, gpu=False)
    assert first["kept"] > 1.5 * last["kept"]
    assert found.step == {"activations": pytest.approx(first["kept"], rel=0.1)}


def test_a_length_of_one_token_has_half_of_nothing(tmp_path: Path) -> None:
    run = run_on(small(tmp_path, SMALL))
    found = memory.by_length(run, StepCounts(1, 1, 1, 1, 1), engine_of(run).precision(run), 1)
    assert [*found] == [1, 2] and 0 < found[1][0] < found[2][0]
