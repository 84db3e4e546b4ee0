"""Checkpoints that nanotron wrote become the models that it computes: `tests/genuine/make_nanotron.py` made them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch

import reshard
from reshard.base.errors import ReshardError
from reshard.oracle.transformers import transformers_logits
from tests.judges import assert_agree, assert_same_tensors, tensors_of

DATA = Path(__file__).parent / "data" / "nanotron"
NAMES = sorted(path.name for path in DATA.iterdir())
LLAMAS = [name for name in NAMES if name.startswith("llama")]
TIED, QKV = "llama-tp2-pp2", "model/model/decoder/0/pp_block/attn/qkv_proj"
NORM = "model/model/decoder/1/pp_block/input_layernorm"
Copy = Callable[..., Path]


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    """A copy of a run, with changed settings of its model."""

    def copied(name: str, **changes: Any) -> Path:
        run = Path(shutil.copytree(DATA / name, tmp_path / "checkpoints"))
        path = run / "10" / "model_config.json"
        content = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))
        return run

    return copied


def part(run: Path, module: str, rank: int = 0, weight: str = "weight") -> Path:
    return next((run / "10" / module).glob(f"model_{weight}_*_tp-rank-{rank}-of-*.safetensors"))


def problems_of(run: Path) -> list[Any]:
    with pytest.raises(ReshardError) as raised:
        reshard.convert(run, run.parent / "out", no_tokenizer=True)
    assert not (run.parent / "out").exists()
    return raised.value.problems


@pytest.mark.parametrize("name", NAMES)
def test_transformers_computes_what_nanotron_computes(name: str, tmp_path: Path) -> None:
    reshard.convert(DATA / name, tmp_path / "out", no_tokenizer=True)
    judged = np.load(DATA / name / "10.npz")
    assert_agree(transformers_logits(tmp_path / "out", judged["tokens"]), judged["logits"])


@pytest.mark.parametrize("name", LLAMAS)
def test_weights_are_those_of_nanotrons_converter(name: str, tmp_path: Path) -> None:
    reshard.convert(DATA / name, tmp_path / "out", no_tokenizer=True)
    assert_same_tensors(tensors_of(tmp_path / "out"), load_torch(DATA / name / "10.safetensors"))


def test_the_config_is_derived(tmp_path: Path) -> None:
    reshard.convert(DATA / "qwen2-moe-tp2", tmp_path / "out", no_tokenizer=True)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    wanted = {
        "architectures": ["Qwen2MoeForCausalLM"],
        "mlp_only_layers": [0],
        "norm_topk_prob": False,
        "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 40,
    }
    assert wanted.items() <= config.items()


@pytest.mark.parametrize("place", [".", "10", "10/model"])
def test_all_folders_of_a_run_can_be_passed(place: str) -> None:
    found = reshard.inspect(DATA / TIED / place)
    assert found.family == "llama"
    assert {"format": "nanotron", "layout": "TP2 · PP2", "iteration": "10"}.items() <= found.rows().items()


def test_a_step_is_that_of_latest_txt_or_the_requested_one(copy: Copy) -> None:
    """A later one may be incomplete: nanotron writes latest.txt after the weights."""
    run = copy(TIED)
    shutil.copytree(run / "10", run / "20")
    shutil.rmtree(run / "20" / NORM)
    assert reshard.inspect(run).checkpoint.iteration == 10
    assert reshard.inspect(run.parent).checkpoint.iteration == 10
    with pytest.raises(ReshardError, match="input_layernorm"):
        reshard.convert(run, run.parent / "out", iteration=20, no_tokenizer=True)
    with pytest.raises(ReshardError, match="steps 10, 20"):
        reshard.convert(run / "10", run.parent / "out", iteration=15, no_tokenizer=True)
    (run / "latest.txt").write_text("30")
    (problem,) = problems_of(run)
    assert (problem.code, problem.expected) == ("nanotron-step-not-found", "step 30, as latest.txt says")


def test_parallel_megatron_from_nanotron(tmp_path: Path) -> None:
    reshard.convert(DATA / TIED, tmp_path / "hf", no_tokenizer=True)
    reshard.convert(DATA / TIED, tmp_path / "megatron", to="megatron", tp=2, pp=2, no_tokenizer=True)
    assert reshard.verify(tmp_path / "megatron", tmp_path / "hf").equal
    assert reshard.verify(DATA / TIED, tmp_path / "hf").equal


def test_optimizer_states_are_dropped_by_name(copy: Copy) -> None:
    run = copy(TIED)
    for folder in ("optimizer", "lr_scheduler", "random"):
        (run / "10" / folder).mkdir()
        (run / "10" / folder / "states_pp-0-of-2_tp-0-of-2.pt").write_bytes(bytes(10))
    assert reshard.open(run).checkpoint.dropped == {
        "optimizer states": 10,
        "learning rate schedules": 10,
        "random number states": 10,
    }


def test_rows_are_interleaved_in_versions_without_the_setting(copy: Copy, tmp_path: Path) -> None:
    run = copy("llama-interleaved-tp2", rope_interleaved=...)
    done = reshard.convert(run, tmp_path / "out", no_tokenizer=True)
    assert any("rope_interleaved" in note for note in done.plan.notes)
    judged = load_torch(DATA / "llama-interleaved-tp2" / "10.safetensors")
    assert_same_tensors(tensors_of(tmp_path / "out"), judged)


# ------------------------------------------------------------------------------------------- bad input


def test_all_missing_ranks_are_named(copy: Copy) -> None:
    run = copy(TIED)
    gone = [*(run / "10").rglob("*_tp-rank-1-of-2.safetensors")]
    for path in gone:
        path.unlink()
    problems = problems_of(run)
    assert {problem.code for problem in problems} == {"nanotron-rank-missing"}
    assert {problem.found for problem in problems} == {"1, and none of rank tp 1"}
    assert len(gone) == 9
    assert {problem.tensor for problem in problems} == {
        "model.token_position_embeddings.pp_block.token_embedding.weight",
        "model.decoder.*.pp_block.attn.o_proj.weight (all 2)",
        "model.decoder.*.pp_block.attn.qkv_proj.weight (all 2)",
        "model.decoder.*.pp_block.mlp.down_proj.weight (all 2)",
        "model.decoder.*.pp_block.mlp.gate_up_proj.weight (all 2)",
    }


def test_all_missing_parameters_are_named(copy: Copy) -> None:
    run = copy(TIED)
    for layer in (0, 1):
        shutil.rmtree(run / "10" / NORM.replace("/1/", f"/{layer}/"))
    shutil.rmtree(run / "10" / "model" / "model" / "final_layer_norm")
    assert {problem.tensor for problem in problems_of(run)} == {
        "model.final_layer_norm.pp_block.weight",
        "model.decoder.*.pp_block.input_layernorm.weight (all 2)",
    }


def test_a_copy_of_another_rank_is_noticed(copy: Copy) -> None:
    run = copy(TIED)
    shutil.copy(part(run, QKV, 0), part(run, QKV, 1))
    (problem,) = problems_of(run)
    assert problem.code == "nanotron-parts-misfit"
    assert "has the slices of" in problem.found


def test_a_name_that_says_any_number_of_ranks(copy: Copy) -> None:
    run = copy(TIED)
    for path in (run / "10" / QKV).glob("*"):
        path.rename(path.with_name(path.name.replace("tp-rank-1-of-2", "tp-rank-1-of-99999")))
    part(run, QKV).unlink()
    (problem,) = problems_of(run)
    assert (problem.code, problem.expected) == ("nanotron-rank-missing", "99999 files")


def test_files_of_two_layouts_are_not_mixed(copy: Copy) -> None:
    run = copy(TIED)
    shutil.copy(part(run, QKV, 0), part(run, QKV, 0).with_name("model_weight.safetensors"))
    other = part(run, QKV.replace("qkv_proj", "o_proj"))
    shutil.copy(other, other.with_name(other.name.replace("-of-2.", "-of-4.")))
    assert [problem.code for problem in problems_of(run)] == ["nanotron-saves-mixed"] * 2


@pytest.mark.parametrize(
    "metadata",
    [
        {"unsharded_shape": "(64, 32)"},
        {"unsharded_shape": "(64, 32)", "local_global_slices_pairs": "0,16,None|None,None,None"},
        {"unsharded_shape": "(64, 32)", "local_global_slices_pairs": "0,16,2|0,32,1#0,16,2|0,32,1"},
        {"unsharded_shape": "(64, 32)", "local_global_slices_pairs": "0,99,None|0,32,1#0,99,None|0,32,1"},
        {"unsharded_shape": "(64, 32)", "local_global_slices_pairs": "0,8,None|0,32,1#0,16,None|0,32,1"},
        {"unsharded_shape": "(64,)", "local_global_slices_pairs": "0,8,None|0,32,1#0,16,None|0,32,1"},
    ],
)
def test_metadata_that_cannot_be_read(metadata: dict[str, str], copy: Copy) -> None:
    run = copy(TIED)
    path = part(run, QKV)
    save_file({"data": np.zeros((32, 32), np.float16)}, path, metadata)
    (problem,) = problems_of(run)
    assert (problem.code, problem.file) == ("nanotron-part-unreadable", str(path))


def test_parts_of_another_dtype(copy: Copy) -> None:
    run = copy("llama-interleaved-tp2")
    path = part(run, QKV)
    metadata = reshard.formats.tables.nanotron.read_file(path, reshard.open(run).checkpoint.sources)[1]
    data = load_torch(path)["data"].float().numpy()
    save_file({"data": data}, path, metadata)
    assert load_file(path)["data"].dtype == np.float32
    (problem,) = problems_of(run)
    assert "bfloat16 [64, 32], float32 [64, 32]" in problem.found


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"is_llama_config": ..., "is_starcoder2_config": True}, "is_starcoder2_config"),
        ({"sliding_window_size": 8, "no_rope_layer": 2}, "8"),
        ({"moe_config": {"num_experts": 4, "enable_shared_expert": False}}, "enable_shared_expert is false"),
    ],
)
def test_models_that_the_hub_does_not_have(changes: dict[str, Any], found: str, copy: Copy) -> None:
    (problem,) = problems_of(copy(TIED, **changes))
    assert problem.found == found


def test_mup_is_refused(copy: Copy) -> None:
    run = copy(TIED)
    (run / "10" / "config.yaml").write_text("model:\n  init_method:\n    use_mup: true\n")
    (problem,) = problems_of(run)
    assert problem.code == "nanotron-setting-unsupported"
    (run / "10" / "config.yaml").write_text("model:\n  init_method:\n    std: 0.02\n")
    assert reshard.inspect(run).family == "llama"


def test_without_the_settings_of_the_model(copy: Copy) -> None:
    run = copy(TIED)
    (run / "10" / "model_config.json").unlink()
    (problem,) = problems_of(run)
    assert problem.code == "nanotron-config-missing"
