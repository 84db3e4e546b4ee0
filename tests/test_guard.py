"""The guard: one explained error before a trap closes, on models as torch and transformers make them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from reshard import guard
from reshard.errors import ReshardError


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
    assert refused(mixed) == ["plain parameters beside DTensors"]


def test_a_sharded_model_in_ddp(mesh: object) -> None:
    wrapped = DistributedDataParallel(model())
    wrapped.module = fully_shard(model(), mesh=mesh)
    assert refused(wrapped) == ["a sharded model lies in DistributedDataParallel"]


def test_a_device_map_over_several_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    spread = model()
    spread.hf_device_map = {"model.embed_tokens": 0, "model.layers.0": 1}
    guard.check(spread)
    monkeypatch.setenv("WORLD_SIZE", "2")
    (message,) = refused(spread)
    assert message == "a device map spreads the model over devices in a run of several processes"


def test_parameters_without_memory() -> None:
    with torch.device("meta"):
        empty = model()
    assert refused(empty) == ["parameters have no memory"]


def test_ties_that_are_broken() -> None:
    broken = model(tied=True)
    broken.lm_head.weight = nn.Parameter(broken.lm_head.weight.detach().clone())
    assert refused(broken) == [
        "the head and the embedding are tied in the config, and two tensors in the model"
    ]


def test_nothing_to_train() -> None:
    assert refused(model().requires_grad_(False)) == ["nothing is trainable"]


def test_an_optimizer_that_was_made_before_sharding(mesh: object) -> None:
    late = model()
    optimizer = torch.optim.AdamW(late.parameters())
    fully_shard(late, mesh=mesh)
    assert refused(late, optimizer) == ["the optimizer holds other tensors than the model"]


def test_an_exception_comes_with_its_cause_and_cure(mesh: object) -> None:
    sharded = fully_shard(model(), mesh=mesh)
    parameter = next(sharded.parameters())
    with pytest.raises(RuntimeError) as caught, guard.explained():
        torch.add(parameter, torch.ones(parameter.shape))
    told = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "reshard doctor:" in told and "cure:" in told


def test_an_exception_that_nobody_described_stays_as_it_is() -> None:
    with pytest.raises(ValueError, match=r"^just so$") as caught, guard.explained():
        raise ValueError("just so")
    assert not getattr(caught.value, "__notes__", [])


def test_the_callback_checks_when_training_begins() -> None:
    with pytest.raises(ReshardError, match="nothing is trainable"):
        guard.callback().on_train_begin(None, None, None, model=model().requires_grad_(False))
