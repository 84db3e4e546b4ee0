"""Megatron trains like transformers, in every layout; and the output is the trained model."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import reshard
from reshard.algebra.layout import Layout
from reshard.engines.megatron.session import RankError
from reshard.training import megatron
from reshard.training.engine import Trained
from reshard.training.megatron.options import read
from reshard.training.megatron.packed_rows import make_rows
from reshard.training.run import Run
from tests.genuine.warm import megatron_logits
from tests.judges import THRESHOLD, TOKENS
from tests.train.conftest import spoil, write_lines
from tests.train.megatron import (
    CHATS,
    EPSILON,
    STEPS,
    Reference,
    Seen,
    assert_close,
    mean_loss,
    reference,
    run_of,
    train,
    write_chats,
    write_held_out,
)

Tiny = Callable[..., Path]
Runs = Callable[..., tuple[Run, Seen, Trained]]

CASES = {
    "qwen3 on one rank": ("qwen3", 1, Layout()),
    "qwen3 at TP2·PP2": ("qwen3", 4, Layout(tp=2, pp=2)),
    "qwen2 at TP2": ("qwen2", 2, Layout(tp=2)),
    "qwen3_moe at EP2": ("qwen3_moe", 2, Layout(ep=2)),
}
MORE_CASES = {
    "qwen3 at TP2": ("qwen3", 2, Layout(tp=2)),
    "qwen3 at PP2": ("qwen3", 2, Layout(pp=2)),
    "qwen3 on two replicas": ("qwen3", 2, Layout()),
    "qwen2 on one rank": ("qwen2", 1, Layout()),
    "qwen2 at PP2": ("qwen2", 2, Layout(pp=2)),
    "qwen2 at TP2·PP2": ("qwen2", 4, Layout(tp=2, pp=2)),
    "qwen3_moe on one rank": ("qwen3_moe", 1, Layout()),
    "qwen3_moe at TP2·EP2": ("qwen3_moe", 4, Layout(tp=2, ep=2)),
    "qwen3_moe at PP2": ("qwen3_moe", 2, Layout(pp=2)),
}


@pytest.fixture(scope="module")
def runs(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A case, trained once: its run, the reports of rank 0, its result."""

    @cache
    def get(name: str) -> tuple[Run, Seen, Trained]:
        model, world_size, layout = {**CASES, **MORE_CASES}[name]
        folder = tmp_path_factory.mktemp("megatron")
        others = {"eval_data": write_held_out(folder), "eval_interval": 2}
        run = run_of(tiny(model), write_chats(folder), folder / "out", layout, **others)
        return run, *train(run, world_size)

    return get


@pytest.fixture(scope="module")
def losses(tiny: Tiny) -> Callable[[str], Reference]:
    """transformers' measurements on a model."""
    return cache(lambda name: reference(tiny(name)))


@pytest.mark.parametrize(
    "name", [*CASES, *(pytest.param(each, marks=pytest.mark.slow) for each in MORE_CASES)]
)
@pytest.mark.core("qwen3_moe at EP2")
def test_losses_are_those_of_transformers(name: str, runs: Runs, losses: Callable[[str], Reference]) -> None:
    _, seen, _ = runs(name)
    expected = losses(name.split()[0])
    assert_close(seen, expected)
    assert list(seen.evaluations) == [2, 4]
    assert list(seen.evaluations.values()) == pytest.approx(expected.held_out[1::2], abs=EPSILON)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"recompute_granularity": "full"},
        {"recompute_granularity": "selective"},
        {"sequence_parallel": False},
        {"use_distributed_optimizer": False},
        {"pack": False, "global_batch_size": len(CHATS)},
        {"micro_batch_size": 4},
        {"make_vocab_size_divisible_by": 1},
        {"overlap_grad_reduce": True, "overlap_param_gather": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_how_it_is_computed_does_not_change_losses(
    options: dict[str, Any], tiny: Tiny, tmp_path: Path, losses: Callable[[str], Reference]
) -> None:
    layout = Layout(tp=1 if "overlap_param_gather" in options else 2)  # what replicas gather
    options |= {"eval_data": write_held_out(tmp_path)}
    run = run_of(tiny("qwen3"), write_chats(tmp_path), tmp_path / "out", layout, **options)
    seen, expected = train(run, 2)[0], losses("qwen3")
    assert_close(seen, expected)
    assert list(seen.evaluations.values()) == pytest.approx(expected.held_out, abs=EPSILON)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("flag", "dtype"), [("bf16", torch.bfloat16), pytest.param("fp16", torch.float16, marks=pytest.mark.slow)]
)
def test_weights_of_16_bits_are_trained_beside_those_of_32(
    flag: str, dtype: torch.dtype, tiny: Tiny, tmp_path: Path, losses: Callable[[str], Reference]
) -> None:
    run = run_of(tiny("qwen3"), write_chats(tmp_path), tmp_path / "out", **{flag: True})
    seen, trained = train(run)
    assert seen.losses == pytest.approx(losses("qwen3").losses, abs=0.1)
    reshard.convert(run.output, tmp_path / "final")
    assert megatron.ENGINE.check(run, trained, tmp_path / "final") == []
    assert {tensor.dtype for tensor in load_file(tmp_path / "final" / "model.safetensors").values()} == {
        dtype
    }


@pytest.mark.slow
def test_experts_can_be_whole_where_all_else_is_cut(
    tiny: Tiny, tmp_path: Path, losses: Callable[[str], Reference]
) -> None:
    layout = Layout(tp=2, ep=2)
    run = run_of(
        tiny("qwen3_moe"), write_chats(tmp_path), tmp_path / "out", layout, expert_tensor_parallel_size=1
    )
    seen, trained = train(run, 2)
    assert_close(seen, losses("qwen3_moe"))
    reshard.convert(run.output, tmp_path / "final")
    assert megatron.ENGINE.check(run, trained, tmp_path / "final") == []


@pytest.mark.slow
def test_interleaved_stages_have_the_same_losses(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny("qwen3", num_hidden_layers=4)
    run = run_of(model, write_chats(tmp_path), tmp_path / "out", Layout(pp=2, vpp=2))
    assert_close(train(run, 2)[0], reference(model))


@pytest.mark.parametrize(
    ("name", "groups", "tp", "ep"),
    [
        ("qwen3", 1, 2, 1),
        pytest.param("qwen3", 2, 4, 1, marks=pytest.mark.slow),
        pytest.param("qwen2", 1, 4, 1, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", 2, 4, 2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_ranks_that_share_a_query_group_have_the_same_losses(
    name: str, groups: int, tp: int, ep: int, tiny: Tiny, tmp_path: Path
) -> None:
    model = tiny(name, num_key_value_heads=groups)
    options = {"expert_tensor_parallel_size": 2} if ep > 1 else {}
    run = run_of(model, write_chats(tmp_path), tmp_path / "out", Layout(tp=tp, ep=ep), **options)
    seen, trained = train(run, tp)
    assert_close(seen, reference(model))
    reshard.convert(run.output, tmp_path / "final")
    assert megatron.ENGINE.check(run, trained, tmp_path / "final") == []


@pytest.mark.slow
def test_layers_that_do_not_divide_are_spread_unevenly(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny("qwen3", num_hidden_layers=3)
    run = run_of(model, write_chats(tmp_path), tmp_path / "out", Layout(pp=2))
    seen, trained = train(run, 2)
    assert_close(seen, reference(model))
    reshard.convert(run.output, tmp_path / "final")
    assert megatron.ENGINE.check(run, trained, tmp_path / "final") == []


ALONE = {"pack": False, "global_batch_size": len(CHATS)}
WITHOUT_MTP = {**ALONE, "mtp_loss_scaling_factor": 0.0}
"""transformers leaves out the multi-token-prediction layers, and their losses."""

FAMILIES: dict[str, tuple[Layout, dict[str, Any]]] = {
    "llama": (Layout(tp=2), {}),
    "llama_rope_scaling": (Layout(pp=2), {}),
    "qwen2_tied": (Layout(pp=2), {}),
    "qwen2_moe": (Layout(ep=2), {}),
    "mixtral": (Layout(tp=2), {}),
    "phi3": (Layout(tp=2), {}),
    "internlm3_bias": (Layout(tp=2), {}),
    "gpt_oss": (Layout(tp=2, ep=2), {**ALONE, "expert_tensor_parallel_size": 1}),
    "deepseek_v2": (Layout(ep=2), {}),
    "deepseek_v3": (Layout(ep=2), {}),
    "deepseek_v3_mtp": (Layout(pp=2), WITHOUT_MTP),
    "glm4_moe": (Layout(tp=2), WITHOUT_MTP),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_other_families_have_the_same_losses(name: str, hf_model: Tiny, tmp_path: Path) -> None:
    model = hf_model(name, dtype="float32")
    layout, options = FAMILIES[name]
    run = run_of(model, write_chats(tmp_path), tmp_path / "out", layout, **options)
    seen, trained = train(run, 2)
    assert_close(seen, reference(model))
    reshard.convert(run.output, tmp_path / "final")
    assert megatron.ENGINE.check(run, trained, tmp_path / "final") == []


@pytest.mark.slow
def test_plain_text_is_learned_whole_whatever_its_length(tiny: Tiny, tmp_path: Path) -> None:
    texts = [f"{count} and one are {count + 1}. " * count for count in range(1, 20)]
    data = write_lines(tmp_path / "text.jsonl", [{"text": text} for text in texts])
    run = run_of(tiny("qwen3"), data, tmp_path / "out", Layout(pp=2), seq_length=512, train_iters=2)
    tokenizer = AutoTokenizer.from_pretrained(run.model)
    network = AutoModelForCausalLM.from_pretrained(run.model, dtype=torch.float32)
    total, count = 0.0, 0
    for text in texts:
        tokens = torch.tensor([*tokenizer(text)["input_ids"], tokenizer.eos_token_id])
        with torch.no_grad():
            logits = network(tokens[None]).logits[0, :-1]
        total += float(torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="sum"))
        count += len(tokens) - 1
    rows, _ = make_rows(run, read(run))
    run = replace(run, options={**run.options, "global_batch_size": len(rows)})
    seen, _ = train(run, 2)
    assert seen.losses[0] == pytest.approx(total / count, abs=EPSILON)
    assert seen.steps[1]["tokens"] == count


@pytest.mark.core("qwen3_moe at EP2")
@pytest.mark.parametrize("name", ["qwen3 at TP2·PP2", "qwen3_moe at EP2"])
def test_the_exported_folder_computes_what_megatron_does(name: str, runs: Runs, tmp_path: Path) -> None:
    run, _, trained = runs(name)
    final = tmp_path / "final"
    reshard.convert(run.output, final)
    model, told = AutoModelForCausalLM.from_pretrained(final, dtype=torch.float32, output_loading_info=True)
    assert not any(told.values()), told
    with torch.no_grad():
        ours = model.eval()(torch.from_numpy(TOKENS)).logits.numpy()
    checkpoint = reshard.open(run.output).checkpoint
    theirs = megatron_logits(
        trained.checkpoint, TOKENS, args=checkpoint.args, layout=checkpoint.layout.complete()
    ).logits
    theirs = theirs[..., : ours.shape[-1]]
    assert abs(ours - theirs).max() <= THRESHOLD * abs(theirs).max()
    assert len(AutoTokenizer.from_pretrained(final)) > 100


@pytest.mark.thorough
def test_the_check_names_each_weight_that_is_not_the_trained_one(runs: Runs, tmp_path: Path) -> None:
    run, _, trained = runs("qwen3 at TP2·PP2")
    final = tmp_path / "final"
    reshard.convert(run.output, final)
    assert megatron.ENGINE.check(run, trained, final) == []
    file = final / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] += 1  # the first rank's column, of the second stage
    save_file(tensors, file)
    (problem,) = megatron.ENGINE.check(run, trained, final)
    assert problem.tensor and problem.tensor.startswith("tp0 pp1 ")
    assert problem.tensor.endswith("decoder.layers.0.mlp.linear_fc2.weight")


@pytest.mark.thorough
def test_the_last_checkpoint_is_complete(runs: Runs, tmp_path: Path) -> None:
    run, seen, trained = runs("qwen2 at TP2")
    assert seen.checkpoints == [trained.checkpoint]
    assert trained.step == STEPS
    alone = tmp_path / "elsewhere"
    shutil.copytree(run.output, alone)
    reshard.convert(alone, tmp_path / "final")
    network = AutoModelForCausalLM.from_pretrained(tmp_path / "final", dtype=torch.float32)
    with torch.no_grad():
        assert float(mean_loss(network, model=run.model)) < seen.losses[-1]
    assert AutoTokenizer.from_pretrained(tmp_path / "final").chat_template


@pytest.mark.thorough
def test_a_step_says_what_it_measured(runs: Runs) -> None:
    _, seen, _ = runs("qwen3 at TP2·PP2")
    assert any("4 ranks, TP2 · PP2" in note for note in seen.notes)
    rates = [metrics["learning_rate"] for metrics in seen.steps.values()]
    assert rates == pytest.approx([0, 1e-3, 7.5e-4, 2.5e-4])
    tokenizer = AutoTokenizer.from_pretrained(runs("qwen3 at TP2·PP2")[0].model)
    rendered = [tokenizer.apply_chat_template(chat["messages"], tokenize=False) for chat in CHATS]
    tokens = sum(len(tokenizer(text)["input_ids"]) - 1 for text in rendered)
    assert {metrics["tokens"] for metrics in seen.steps.values()} == {tokens}
    assert all(metrics["grad_norm"] > 0 and metrics["memory"] > 1 << 20 for metrics in seen.steps.values())


@pytest.mark.thorough
def test_weights_of_the_base_that_are_nan_are_not_called_divergence(folder: Path, tmp_path: Path) -> None:
    spoil(folder, "model.layers.1.mlp.up_proj.weight", (3, 5))
    run = run_of(folder, write_chats(tmp_path), tmp_path / "out", Layout(tp=2))
    with pytest.raises(
        RankError, match=r"weights of the base model are NaN(.|\n)*found: model\.layers\.1\.mlp"
    ):
        train(run, 2)
    assert not list((tmp_path / "out").glob("iter_*"))
