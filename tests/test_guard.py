"""The guard: one explained error before a known failure, on models as torch and transformers make them."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from reshard import guard
from reshard.base.errors import ReshardError
from reshard.runs.guard import in_script
from tests.work import calls


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[object]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def model(*, tied: bool = False) -> LlamaForCausalLM:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, tie_word_embeddings=tied, **sizes))


def refused(*given: object) -> list[str]:
    with pytest.raises(ReshardError) as caught:
        guard.check(*given)  # type: ignore[arg-type]
    assert all(problem.remedy for problem in caught.value.problems)
    return [problem.message for problem in caught.value.problems]


def test_sound_models_pass(mesh: object) -> None:
    plain = model(tied=True)
    guard.check(plain, torch.optim.AdamW(plain.parameters()))
    sharded = fully_shard(model(), mesh=mesh)
    guard.check(sharded, torch.optim.AdamW(sharded.parameters()))
    guard.check(DistributedDataParallel(model()))


def test_a_layer_that_is_sharded_alone(mesh: object) -> None:
    mixed = model()
    fully_shard(mixed.model.layers[0], mesh=mesh)
    assert refused(mixed) == ["plain parameters mixed with DTensors"]


def adapted(base: nn.Module) -> nn.Module:
    return get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"]))


def test_lora_under_fsdp2(mesh: object) -> None:
    sound = adapted(model())
    fully_shard(sound, mesh=mesh)
    guard.check(sound, torch.optim.AdamW([each for each in sound.parameters() if each.requires_grad]))
    late = adapted(fully_shard(model(), mesh=mesh))
    assert refused(late) == ["plain parameters mixed with DTensors"]


def test_parameters_that_fsdp2_ignores(mesh: object) -> None:
    ignoring = model()
    fully_shard(ignoring, mesh=mesh, ignored_params={ignoring.model.norm.weight})
    guard.check(ignoring)


def test_tensor_parallelism_leaves_norms_plain(mesh: object) -> None:
    parallel = model()
    plan = {"up_proj": ColwiseParallel(), "gate_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
    parallelize_module(parallel.model.layers[0].mlp, mesh, plan)
    guard.check(parallel, torch.optim.AdamW(parallel.parameters()))


def test_a_weight_that_was_distributed_by_hand(mesh: object) -> None:
    mixed = model()
    up = mixed.model.layers[0].mlp.up_proj
    up.weight = nn.Parameter(distribute_tensor(up.weight.data, mesh, [Shard(0)]))
    assert refused(mixed) == ["plain parameters mixed with DTensors"]
    with pytest.raises(RuntimeError, match="got mixed"):
        mixed(torch.zeros(1, 2, dtype=torch.long))


def test_fsdp1_ties_through_its_flat_parameter(mesh: object) -> None:
    flat = FullyShardedDataParallel(model(tied=True), device_id=torch.device("cpu"))
    guard.check(flat, torch.optim.AdamW(flat.parameters()))


def test_what_accelerate_has_prepared(mesh: object) -> None:
    plain = model()
    guard.check(*Accelerator(cpu=True).prepare(plain, torch.optim.AdamW(plain.parameters())))


TENSOR_PARALLEL = """
import sys, torch
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, DistributedConfig
from reshard import guard
from reshard.base.errors import ReshardError
from reshard.runs.guard import in_script

torch.distributed.init_process_group("gloo")
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], distributed_config=DistributedConfig(tp_size=2))
kinds = {type(parameter.data).__name__ for parameter in model.parameters()}
assert kinds == {"DTensor", "Tensor"}, kinds
guard.check(model, torch.optim.AdamW(model.parameters()))
wrapped = DistributedDataParallel(torch.nn.Linear(2, 2))
wrapped.module = model
try:
    guard.check(wrapped)
except ReshardError as error:
    assert [problem.message for problem in error.problems] == ["a sharded model is wrapped in DistributedDataParallel"]
else:
    raise SystemExit("a sharded model in DDP passed")
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_tensor_parallelism_of_transformers_over_two_processes(tmp_path: Path) -> None:
    """Its plain norms next to DTensors are correct; the same model in DDP is not."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)).save_pretrained(tmp_path / "model")
    (tmp_path / "run.py").write_text(TENSOR_PARALLEL)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ran = subprocess.run(
        [*command, str(tmp_path / "run.py"), str(tmp_path / "model")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]


def test_a_sharded_model_in_ddp(mesh: object) -> None:
    wrapped = DistributedDataParallel(model())
    wrapped.module = fully_shard(model(), mesh=mesh)
    assert refused(wrapped) == ["a sharded model is wrapped in DistributedDataParallel"]


def test_a_device_map_over_several_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    spread = model()
    spread.hf_device_map = {"model.embed_tokens": 0, "model.layers.0": 1}
    guard.check(spread)
    monkeypatch.setenv("WORLD_SIZE", "2")
    (message,) = refused(spread)
    assert message == "a device map splits the model over devices in a multi-process run"


def test_ties_that_are_broken() -> None:
    broken = model(tied=True)
    broken.lm_head.weight = nn.Parameter(broken.lm_head.weight.detach().clone())
    assert refused(broken) == [
        "the head and the embedding are tied in the config, but are two tensors in the model"
    ]


def test_nothing_to_train() -> None:
    assert refused(model().requires_grad_(False)) == ["nothing is trainable"]


def test_an_optimizer_that_was_made_before_sharding(mesh: object) -> None:
    late = model()
    optimizer = torch.optim.AdamW(late.parameters())
    fully_shard(late, mesh=mesh)
    assert refused(late, optimizer) == ["the optimizer's parameters are not the model's"]


def test_an_optimizer_with_tensors_of_an_older_model() -> None:
    own, older = list(model().parameters()), list(model().parameters())
    trained = nn.Module()
    trained.every = nn.ParameterList(own)
    assert refused(trained, torch.optim.AdamW([*own[:3], *older[3:]])) == [
        "the optimizer's parameters are not the model's"
    ]


def test_an_optimizer_of_more_or_of_less() -> None:
    """An optimizer with an additional head, or for a part of the model only: both are intended."""
    own = model()
    guard.check(own, torch.optim.AdamW([*own.parameters(), nn.Parameter(torch.ones(3))]))
    guard.check(own, torch.optim.AdamW(list(own.parameters())[:2]))


def test_an_exception_comes_with_its_cause_and_fix(mesh: object) -> None:
    sharded = fully_shard(model(), mesh=mesh)
    parameter = next(sharded.parameters())
    with pytest.raises(RuntimeError) as caught, guard.explained():
        torch.add(parameter, torch.ones(parameter.shape))
    told = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "reshard doctor:" in told and "fix:" in told


def test_an_exception_that_nobody_described_stays_as_it_is() -> None:
    with pytest.raises(ValueError, match=r"^just so$") as caught, guard.explained():
        raise ValueError("just so")
    assert not getattr(caught.value, "__notes__", [])


def test_the_callback_checks_when_training_begins() -> None:
    with pytest.raises(ReshardError, match="nothing is trainable"):
        guard.callback().on_train_begin(None, None, None, model=model().requires_grad_(False))


# ------------------------------------------------------------------------------------ what else it may be given


def test_a_parameter_is_checked_in_few_calls(mesh: object) -> None:
    many = nn.ModuleList(nn.Linear(2, 2) for _ in range(500))
    own = torch.optim.SGD(many.parameters())
    other = torch.optim.AdamW([nn.Parameter(each.detach().clone()) for each in many.parameters()])
    assert refused(many, other) == ["the optimizer's parameters are not the model's"]
    assert calls(lambda: guard.check(many, own)) < 50 * 1000
    assert calls(lambda: refused(many, other)) < 50 * 1000


def test_several_optimizers_and_parts_of_a_model() -> None:
    parts = [model(), model()]
    own = [each for part in parts for each in part.parameters()]
    guard.check(parts, [torch.optim.AdamW(own[:5]), torch.optim.SGD(own[5:])])
    older = torch.optim.SGD(model().parameters())
    assert refused(parts, [torch.optim.AdamW(own[:5]), older]) == [
        "the optimizer's parameters are not the model's"
    ]
    assert refused([model(), model().requires_grad_(False)][1:]) == ["nothing is trainable"]


def test_what_is_no_model_and_no_optimizer() -> None:
    optimizer = torch.optim.AdamW(model().parameters())
    assert refused(optimizer, model()) == ["this is not a model", "this is not an optimizer"]
    assert refused([]) == refused(None) == ["this is not a model"]
    assert refused(model(), "AdamW") == ["this is not an optimizer"]


def test_names_of_one_device_are_no_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    whole = model()
    whole.hf_device_map = {"model": 0, "lm_head": "cuda:0"}
    guard.check(whole)
    whole.hf_device_map = {"model": 0, "lm_head": "cpu"}
    assert len(refused(whole)) == 1


def test_a_head_that_peft_copies() -> None:
    copied = get_peft_model(
        model(tied=True), LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    )
    with pytest.raises(ReshardError) as caught:
        guard.check(copied)
    assert "ensure_weight_tying" in (caught.value.problems[0].remedy or "")
    both = LoraConfig(
        target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"], ensure_weight_tying=True
    )
    guard.check(get_peft_model(model(tied=True), both))


def test_a_class_that_ties_nothing() -> None:
    class Untied(LlamaForCausalLM):
        _tied_weights_keys = {}  # noqa: RUF012

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    guard.check(Untied(LlamaConfig(vocab_size=32, tie_word_embeddings=True, **sizes)))


def test_what_the_guard_refuses_is_not_diagnosed_again(mesh: object) -> None:
    mixed = model()
    fully_shard(mixed.model.layers[0], mesh=mesh)
    with pytest.raises(ReshardError) as caught, guard.explained():
        guard.check(mixed)
    assert "got mixed" in str(caught.value) and not getattr(caught.value, "__notes__", [])


def test_a_diagnosis_that_fails_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(error: Exception) -> str:
        raise KeyError("catalogue")

    monkeypatch.setattr(in_script, "_diagnosis", broken)
    with pytest.raises(ValueError, match=r"^just so$"), guard.explained():
        raise ValueError("just so")


def test_explained_speaks_the_language_of_the_machine(mesh: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    parameter = next(fully_shard(model(), mesh=mesh).parameters())
    with pytest.raises(RuntimeError) as caught, guard.explained():
        torch.add(parameter, torch.ones(parameter.shape))
    assert "原因：" in "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


TWO = """
import sys, torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM
from reshard import guard
from reshard.base.errors import ReshardError
from reshard.runs.guard import in_script

distributed.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}

def model(tied=False):
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, tie_word_embeddings=tied, **sizes))

def sharded(model, root=True):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh) if root else model

def refused(*given):
    try:
        guard.check(*given)
    except ReshardError as error:
        return [problem.message.split()[0] for problem in error.problems]
    return []

whole = sharded(model(tied=True))
optimizer = torch.optim.AdamW(whole.parameters())
assert refused(whole, optimizer) == []
whole(torch.zeros(1, 2, dtype=torch.long)).logits.sum().backward()
optimizer.step()
assert refused(whole, optimizer) == []
plain = DistributedDataParallel(model())
assert refused(plain, torch.optim.AdamW(plain.parameters())) == []
assert refused(sharded(model(), root=False)) == ["plain"]
plain.module = sharded(model())
assert refused(plain) == ["a"]
late = model()
optimizer = torch.optim.AdamW(late.parameters())
assert refused(sharded(late), optimizer) == ["the"]
spread = model()
spread.hf_device_map = {"model.embed_tokens": 0, "lm_head": 1}
assert refused(spread) == ["a"]
broken = model(tied=True)
broken.lm_head.weight = nn.Parameter(broken.lm_head.weight.detach().clone())
assert refused(sharded(broken)) == ["the"]
assert refused(sharded(model()).requires_grad_(False)) == ["nothing"]
distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_each_case_over_two_processes(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(TWO)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ran = subprocess.run(
        [*command, str(tmp_path / "run.py")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]


def test_the_callback_ends_a_run_by_the_rule_for_losses_in_logs() -> None:
    """Three losses in a row that are not finite; the Trainer prints 0 for NaN. An evaluation does not count."""
    callback, state = guard.callback(), SimpleNamespace(global_step=0)

    def log(**logs: float) -> None:
        state.global_step += 1
        callback.on_log(None, state, SimpleNamespace(should_save=False), logs=logs)

    log(loss=math.nan, learning_rate=1e-5)
    log(loss=2.0, grad_norm=math.nan, learning_rate=1e-5)
    for _ in range(5):
        log(eval_loss=math.nan, epoch=1)
    log(loss=0.0, grad_norm=math.nan, learning_rate=1e-5)
    log(loss=math.inf, learning_rate=1e-5)
    with pytest.raises(ReshardError, match="step 8: loss nan, 3 steps in a row") as raised:
        log(loss=math.nan, learning_rate=1e-5)
    assert raised.value.problems[0].code == "loss-not-finite"


@pytest.mark.thorough
def test_the_callback_in_a_trainer(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    given = {
        "use_cpu": True,
        "max_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    tokens = torch.arange(5, 9)
    data = [{"input_ids": tokens, "labels": tokens}] * 2
    arguments = TrainingArguments(output_dir=str(tmp_path), **given)
    Trainer(model(), arguments, train_dataset=data, callbacks=[guard.callback()]).train()
    frozen = Trainer(model(), arguments, train_dataset=data, callbacks=[guard.callback()])
    frozen.optimizer = torch.optim.SGD(model().parameters())
    with pytest.raises(ReshardError, match="the optimizer's parameters are not the model's"):
        frozen.train()
