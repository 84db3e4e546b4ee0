"""`--with-optimizer` between engines: a run of torch continues in megatron-core, and the reverse.

Both train the same model in float32 with Adam on the same tokens, so the following losses show whether weights, both
moments, step, learning rate and weight decay have all arrived in the right place.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("megatron.core")

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)
from transformers import AutoConfig, AutoModelForCausalLM

import reshard
from reshard.algebra.layout import Layout
from reshard.base.errors import ReshardError
from tests.genuine.megatron import QWEN2
from tests.genuine.train_megatron import train_and_save
from tests.test_optimizer import PORTABLE, Case, Sizes, values

SEQUENCES = 4
TOKENS = np.random.default_rng(0).integers(0, 283, (16, 17))
EXACT = 2e-5
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
Models = Callable[..., Path]
# 284 rows divide over two ranks, so neither side has padding in its softmax.
VARIANTS: dict[str, dict[str, Any]] = {"qwen2": {"vocab_size": 284}, "qwen3_tied": {"vocab_size": 284}}


def adam(model: Any) -> torch.optim.AdamW:
    """Megatron's parameter groups: matrices decay, norms and biases do not."""
    groups: tuple[list[Any], list[Any]] = ([], [])
    for parameter in model.parameters():
        groups[parameter.ndim < 2].append(parameter)
    return torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": 0.01}, {"params": groups[1], "weight_decay": 0.0}], lr=2e-3
    )


def train(model: Any, optimizer: torch.optim.Optimizer, first: int, steps: int) -> list[float]:
    """The losses of `steps` steps from step `first` on, with gradients clipped as the oracle clips them."""
    losses = []
    for step in range(first, first + steps):
        rows = [(step * SEQUENCES + i) % len(TOKENS) for i in range(SEQUENCES)]
        tokens = torch.from_numpy(TOKENS[rows])
        logits = model(input_ids=tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.fixture(scope="module", params=VARIANTS)
def run(
    request: pytest.FixtureRequest, hf_model: Models, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[float]]:
    """The checkpoint of torch after two steps, and the losses of the next two steps."""
    base = hf_model(request.param, **VARIANTS[request.param])
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    optimizer = adam(model)
    train(model, optimizer, 0, 2)
    out: Path = tmp_path_factory.mktemp("run") / "checkpoint-2"
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=out, no_dist=True)
    for name in ("config.json", "tokenizer.json"):
        (out / name).write_bytes((base / name).read_bytes())
    return out, train(model, optimizer, 2, 2)


def in_megatron(folder: Path, out: Path, layout: Layout, **options: Any) -> tuple[float, ...]:
    """The next two losses of megatron-core, which loads everything from `folder`."""
    checkpoint = reshard.open(folder).checkpoint
    assert checkpoint.iteration == 2
    return train_and_save(
        checkpoint.description.args,
        out,
        TOKENS,
        checkpoint=checkpoint.path,
        resume=True,
        layout=layout,
        steps=2,
        iteration=4,
        sequences=SEQUENCES,
        distributed_optimizer=True,
        save=(),
        **options,
    ).losses


@pytest.mark.parametrize("layout", [Sizes(tp=2), Sizes(pp=2)], ids=["tp2", "pp2"])
@pytest.mark.core("qwen2-pp2")
def test_a_run_of_torch_goes_on_in_megatron(
    layout: Layout, run: tuple[Path, list[float]], tmp_path: Path
) -> None:
    source, losses = run
    ours = tmp_path / "ours"
    sizes = {"tp": layout.tp, "pp": layout.pp, "vocab_divisible_by": 2 // layout.tp}
    plan = reshard.convert(
        source, ours, to="megatron", with_optimizer=True, transformer_impl="local", **sizes
    ).plan
    assert {"--use-distributed-optimizer", "--override-opt_param-scheduler"} <= set(plan.load_with)
    assert in_megatron(ours, tmp_path / "on", layout, bf16=False) == pytest.approx(losses, rel=EXACT)


@pytest.mark.thorough
def test_its_weights_become_main_weights_beside_bfloat16(
    run: tuple[Path, list[float]], tmp_path: Path
) -> None:
    source, losses = run
    options = {"to": "megatron", "with_optimizer": True, "transformer_impl": "local", "vocab_divisible_by": 2}
    reshard.convert(source, tmp_path / "half", dtype="bfloat16", **options)
    reshard.convert(source, tmp_path / "full", **options)
    half, full = (values(reshard.open(tmp_path / name).checkpoint.path) for name in ("half", "full"))
    name = "decoder.layers.self_attention.linear_qkv.weight"
    assert torch.equal(half[f"optimizer.state.param.{name}"], full[name])
    assert torch.equal(half[name], full[name].bfloat16())
    assert in_megatron(tmp_path / "half", tmp_path / "on", Sizes()) == pytest.approx(losses, rel=2e-3)


def loaded(folder: Path) -> tuple[Any, torch.optim.Optimizer]:
    """The model and the optimizer of a folder, as torch loads them."""
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float()
    optimizer = adam(model)
    weights = get_model_state_dict(model)
    states = get_optimizer_state_dict(model, optimizer, options=FLAT)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder, no_dist=True)
    model.load_state_dict(weights)
    set_optimizer_state_dict(model, optimizer, states, options=FLAT)
    return model, optimizer


@pytest.mark.core("qwen3_tied")
def test_a_run_of_megatron_goes_on_in_torch(run: tuple[Path, list[float]], tmp_path: Path) -> None:
    """From torch to megatron-core, two steps there, and back: as if torch had made them."""
    source, losses = run
    ours, layout = tmp_path / "ours", Sizes(tp=2)
    options = {"to": "megatron", "with_optimizer": True, "transformer_impl": "local"}
    reshard.convert(source, ours, tp=2, vocab_divisible_by=1, **options)
    checkpoint = reshard.open(ours).checkpoint
    saved = train_and_save(
        checkpoint.description.args,
        tmp_path / "on",
        TOKENS,
        checkpoint=checkpoint.path,
        resume=True,
        layout=layout,
        steps=1,
        iteration=3,
        sequences=SEQUENCES,
        distributed_optimizer=True,
        bf16=False,
        save=PORTABLE,
    )
    reshard.convert(tmp_path / "on", tmp_path / "back", to="dcp", base=source, with_optimizer=True)
    model, optimizer = loaded(tmp_path / "back")
    assert optimizer.state_dict()["param_groups"][0]["weight_decay"] == 0.01
    assert optimizer.state_dict()["param_groups"][1]["weight_decay"] == 0.0
    assert [*saved.losses, *train(model, optimizer, 3, 1)] == pytest.approx(losses, rel=EXACT)


def test_states_pass_through_megatron_bit_for_bit(run: tuple[Path, list[float]], tmp_path: Path) -> None:
    source, _ = run
    to_megatron = {"to": "megatron", "with_optimizer": True, "tp": 2, "vocab_divisible_by": 1}
    reshard.convert(source, tmp_path / "there", **to_megatron)
    reshard.convert(tmp_path / "there", tmp_path / "back", to="dcp", base=source, with_optimizer=True)
    theirs, ours = values(source), values(tmp_path / "back")
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert torch.equal(ours[key], tensor), key


@pytest.mark.thorough
def test_a_universal_checkpoint_has_the_same_states(run: tuple[Path, list[float]], tmp_path: Path) -> None:
    source, _ = run
    reshard.convert(source, tmp_path / "there", to="megatron", with_optimizer=True, pp=2)
    reshard.convert(
        tmp_path / "there", tmp_path / "universal", to="deepspeed", base=source, with_optimizer=True
    )
    reshard.convert(tmp_path / "universal", tmp_path / "back", to="dcp", base=source, with_optimizer=True)
    theirs, ours = values(source), values(tmp_path / "back")
    for key, tensor in theirs.items():
        assert torch.equal(ours[key], tensor), key


DEEPSPEED = Path(__file__).parent / "data" / "deepspeed"


@pytest.mark.core("universal_z2")
@pytest.mark.parametrize("name", ["z1_fp32", "z3_fp32", "universal_z2"])
def test_a_run_of_deepspeed_goes_on_in_megatron(name: str, tmp_path: Path) -> None:
    """megatron-core loads it strictly; its masters and moments are those that DeepSpeed itself reports."""
    source = DEEPSPEED / name
    reshard.convert(
        source,
        tmp_path / "ours",
        to="megatron",
        tp=2,
        dtype="bfloat16",
        with_optimizer=True,
        transformer_impl="local",
        no_tokenizer=True,
    )
    checkpoint = reshard.open(tmp_path / "ours").checkpoint
    options = {"resume": True, "steps": 0, "iteration": 2, "distributed_optimizer": True, "save": PORTABLE}
    train_and_save(
        checkpoint.description.args,
        tmp_path / "on",
        TOKENS % 67,
        checkpoint=checkpoint.path,
        layout=Sizes(tp=2),
        **options,
    )
    back = {"to": "dcp", "dtype": "float32", "base": source, "with_optimizer": True, "no_tokenizer": True}
    reshard.convert(tmp_path / "on", tmp_path / "back", **back)
    ours = values(tmp_path / "back")
    for key, tensor in load_file(source / "fp32.safetensors").items():
        assert torch.equal(ours[f"model.{key}"], tensor), key
    moments = load_file(source / "exp_avg.safetensors")
    assert any(tensor.any() for tensor in moments.values())
    for key, tensor in moments.items():
        assert torch.equal(ours[f"optimizer.state.{key}.exp_avg"], tensor), key
    assert float(ours["optimizer.state.model.norm.weight.step"]) == 2


def test_the_group_without_weight_decay_has_none_in_megatron(tmp_path: Path) -> None:
    reshard.convert(
        DEEPSPEED / "universal_z2", tmp_path / "out", to="megatron", with_optimizer=True, no_tokenizer=True
    )
    (file,) = tmp_path.glob("out/*/common.pt")
    groups = torch.load(file, weights_only=False)["optimizer"]["optimizer"]["param_groups"]
    assert [(group["wd_mult"], group["weight_decay"]) for group in groups] == [(1.0, 0.1), (0.0, 0.0)]


def test_tensors_without_states_are_named(tmp_path: Path) -> None:
    """Some weights of this run were frozen, so DeepSpeed has no states for them."""
    options = {"to": "megatron", "dtype": "bfloat16", "with_optimizer": True, "no_tokenizer": True}
    plan = reshard.convert(DEEPSPEED / "z1", tmp_path, dry_run=True, **options).plan
    moments = load_file(DEEPSPEED / "z1" / "exp_avg.safetensors")
    (note,) = [note for note in plan.notes if "no states of" in note]
    assert note.split()[6] not in moments
    assert 0 < plan.facts["optimizer"]["exp_avg"] < plan.tensors


@pytest.mark.thorough
def test_masters_become_the_weights_of_a_float32_folder(tmp_path: Path) -> None:
    """In bfloat16 they are reported as dropped, with the way to keep them."""
    case = Case({**QWEN2, "vocab_size": 256}, Sizes(tp=2), Sizes(tp=2))
    case.train(tmp_path / "run", case.source, 1, save=PORTABLE)
    convert = {"with_optimizer": True, "no_tokenizer": True}
    half = reshard.convert(tmp_path / "run", tmp_path / "half", to="dcp", **convert).plan
    assert half.dropped["optimizer states"] > 0 and any("--dtype float32" in note for note in half.notes)
    full = reshard.convert(tmp_path / "run", tmp_path / "full", to="dcp", dtype="float32", **convert).plan
    assert "optimizer states" not in full.dropped
    masters = values(tmp_path / "run" / "iter_0000001")[
        "optimizer.state.fp32_param.decoder.final_layernorm.weight"
    ]
    weights = values(tmp_path / "full")
    assert torch.equal(weights["model.model.norm.weight"], masters)
    assert not torch.equal(masters, masters.bfloat16().float())
    assert weights["optimizer.state.model.norm.weight.exp_avg"].dtype == torch.float32


@pytest.mark.parametrize(
    "frozen, message",
    [("layers.0.self_attn.q_proj", "a part of a tensor has"), ("layers.0.mlp", "some layers have")],
)
def test_states_of_a_part_of_a_fused_tensor_are_refused(
    frozen: str, message: str, hf_model: Models, tmp_path: Path
) -> None:
    base = hf_model("qwen2")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    train(model, optimizer, 0, 1)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=tmp_path / "step-1", no_dist=True)
    with pytest.raises(ReshardError, match=message):
        reshard.convert(tmp_path / "step-1", tmp_path / "out", to="megatron", base=base, with_optimizer=True)
    plan = reshard.convert(
        tmp_path / "step-1", tmp_path / "out", to="dcp", base=base, with_optimizer=True
    ).plan
    assert any(frozen in note for note in plan.notes if "no states of" in note)


def test_marks_of_wrappers_are_taken_out_of_states_too(run: tuple[Path, list[float]], tmp_path: Path) -> None:
    source, _ = run
    found = values(source)
    marked = {key.replace("layers.", "layers._orig_mod.", 1): tensor for key, tensor in found.items()}
    dcp.save(marked, checkpoint_id=tmp_path / "step-2", no_dist=True)
    options = {"strip": ("_orig_mod.",), "to": "dcp", "base": source, "with_optimizer": True}
    reshard.convert(tmp_path / "step-2", tmp_path / "ours", **options)
    ours = values(tmp_path / "ours")
    assert all(torch.equal(ours[key], tensor) for key, tensor in found.items())


def test_states_of_sgd_are_refused(hf_model: Models, tmp_path: Path) -> None:
    base = hf_model("qwen2")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    train(model, optimizer, 0, 1)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=tmp_path / "step-1", no_dist=True)
    with pytest.raises(ReshardError, match="no optimizer states that can be converted"):
        reshard.convert(tmp_path / "step-1", tmp_path / "out", to="megatron", base=base, with_optimizer=True)
    assert not (tmp_path / "out").exists()
