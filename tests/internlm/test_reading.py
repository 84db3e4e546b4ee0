"""InternEvo's checkpoints are read: all layouts, and the spellings of other versions."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import reshard
from reshard.algebra.layout import Layout
from reshard.formats.internlm.tensor_names import is_old_order
from reshard.transfer.source_files import Sources
from tests.commandline import reshard as run
from tests.genuine.internlm_reference import hub_logits
from tests.genuine.warm import megatron_logits
from tests.internlm.checkpoints import DATA, NAMES, Copies, config_with, edit, problems_of, same_as_before
from tests.judges import assert_agree, tensors_of

# --------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("name", NAMES)
def test_the_hub_folder_computes_what_internevo_computes(name: str, hub: Callable[[str], Path]) -> None:
    expected = np.load(DATA / name / "logits.npz")
    assert_agree(hub_logits(hub(name), expected["tokens"]), expected["logits"])


@pytest.mark.parametrize(
    ("name", "family", "layout", "weight_parallel"),
    [
        ("internlm2-tp2pp2", "internlm2", {"tp": 2, "pp": 2, "vpp": 1}, 1),
        ("internlm2-chunks", "internlm2", {"tp": 1, "pp": 2, "vpp": 2}, 1),
        ("internlm2-isp", "internlm2", {"tp": 1, "pp": 1, "vpp": 1}, 2),
        ("internlm2-isp-tp2wp2pp2", "internlm2", {"tp": 2, "pp": 2, "vpp": 1}, 2),
        ("internlm1-tp2", "internlm", {"tp": 2, "pp": 1, "vpp": 1}, 1),
        ("llama-tp16", "llama", {"tp": 16, "pp": 1, "vpp": 1}, 1),
        ("moe-tp2", "internlm_moe", {"tp": 2, "pp": 1, "vpp": 1}, 1),
    ],
)
def test_inspect_tells_family_layout_and_weight_parallelism(
    name: str, family: str, layout: dict[str, int], weight_parallel: int
) -> None:
    found = run("inspect", DATA / name, "--json").json
    assert (found["format"], found["family"]) == ("internlm", family)
    assert {key: found["layout"][key] for key in layout} == layout
    assert (f"weight-parallel over {weight_parallel}" in found["variant"]) == (weight_parallel > 1)
    assert not [problem for problem in found["problems"] if problem.get("severity") == "error"]


def test_sizes_rope_and_epsilon_come_from_the_model_config(hub: Callable[[str], Path]) -> None:
    config = json.loads((hub("internlm2-interleaved") / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("internlm2", ["InternLM2ForCausalLM"])
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    assert [config[key] for key in sizes] == [96, 32, 48, 2]
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (4, 2)
    assert (config["rope_theta"], config["rms_norm_eps"], config["bias"]) == (1000000.0, 1e-5, False)
    assert config["torch_dtype"] == "bfloat16"


def test_the_router_of_experts_stays_float32(hub: Callable[[str], Path]) -> None:
    tensors = tensors_of(hub("moe-tp2"))
    assert tensors["model.layers.1.mlp.gate.weight"].dtype == torch.float32
    assert tensors["model.layers.1.mlp.experts.3.w2.weight"].dtype == torch.bfloat16


def test_verify_finds_the_checkpoint_and_its_hub_folder_equal(hub: Callable[[str], Path]) -> None:
    assert run("verify", DATA / "internlm2-interleaved", hub("internlm2-interleaved")).code == 0
    assert run("verify", DATA / "internlm2-tp2pp2", hub("internlm2-chunks")).code != 0


@pytest.mark.core("internlm2-tp2pp2", "moe-tp2")
@pytest.mark.parametrize(
    "name", ["internlm2-tp2pp2", "internlm2-biases", "internlm1-tp2", "llama-tp2", "moe-tp2"]
)
def test_weights_go_to_megatron_directly(name: str, tmp_path: Path) -> None:
    layout, flags = (Layout(ep=2), ("--ep", 2)) if name == "moe-tp2" else (Layout(2), ("--tp", 2))
    result = run("convert", DATA / name, tmp_path / "m", "--to", "megatron", *flags, "--no-tokenizer")
    assert result.code == 0, result.err
    checkpoint, expected = reshard.open(tmp_path / "m").checkpoint, np.load(DATA / name / "logits.npz")
    args = dict(checkpoint.description.args)
    found = megatron_logits(checkpoint.path, expected["tokens"], args=args, layout=layout, spec="local")
    assert_agree(found.logits, expected["logits"])
    assert run("verify", DATA / name, tmp_path / "m").code == 0


def test_biases_that_megatron_trained_and_internlm_lacks_are_not_dropped(tmp_path: Path) -> None:
    reshard.convert(DATA / "internlm1-tp2", tmp_path / "m", to="megatron-legacy", no_tokenizer=True)
    same_as_before(tmp_path / "m", tmp_path / "back", _converted(DATA / "internlm1-tp2", tmp_path / "hub"))
    (file,) = tmp_path.glob("m/release/*/model_optim_rng.pt")
    content = torch.load(file, weights_only=False)
    content["model"]["decoder.layers.1.mlp.linear_fc2.bias"][3] = 0.5
    torch.save(content, file)
    found = problems_of(tmp_path / "m", tmp_path / "out")
    assert "decoder.layers.1.mlp.linear_fc2.bias" in found and "left out if they are zeros" in found


def _converted(source: Path, out: Path) -> Path:
    reshard.convert(source, out, no_tokenizer=True)
    return out


# ------------------------------------------------------------------------- spellings of other versions


@pytest.mark.parametrize("name", ["internlm1-tp2", "internlm2-isp", "moe-tp2"])
def test_w2_and_w3_of_versions_before_0_3_are_put_in_order(
    name: str, copy_of: Copies, tmp_path: Path, hub: Callable[[str], Path]
) -> None:
    folder = copy_of(name)
    for file in folder.glob("model_*_*.pt"):
        edit(file, lambda content: {_swapped(key): tensor for key, tensor in content.items()})
    same_as_before(folder, tmp_path / "out", hub(name))


def _swapped(key: str) -> str:
    return key.replace(".w2.", ".x.").replace(".w3.", ".w2.").replace(".x.", ".w3.")


def test_where_shapes_do_not_tell_w2_from_w3_the_version_does(tmp_path: Path) -> None:
    """By the keys that it adds to the config; and InternLM2 came with the new order."""
    assert is_old_order({"w1": (8, 8), "w2": (8, 8), "w3": (8, 8)}) is None
    folder = tmp_path / "square"
    folder.mkdir()
    shapes = {"w1": (48, 32), "w2": (32, 48), "w3": (48, 32)} | {
        "w2": (32, 32),
        "w3": (32, 32),
        "w1": (32, 32),
    }
    state = torch.load(DATA / "internlm2-interleaved" / "model_tp0_pp0.pt", weights_only=True)
    other = torch.load(DATA / "internlm2-interleaved" / "model_tp1_pp0.pt", weights_only=True)
    whole = {
        key: tensor
        if tensor.ndim == 1
        else torch.cat([tensor, other[key]], 1 if "wo" in key or "tok" in key else 0)
        for key, tensor in state.items()
    }
    for key in whole:
        if ".feed_forward." in key:
            whole[key] = torch.randn(shapes[key.split(".")[-2]]).bfloat16()
    torch.save(whole, folder / "model_tp0_pp0.pt")
    shutil.copy(DATA / "internlm2-interleaved" / "model_config.pt", folder)
    result = reshard.convert(folder, tmp_path / "out", no_tokenizer=True)
    assert result.plan.notes == []
    down = tensors_of(tmp_path / "out")["model.layers.0.feed_forward.w2.weight"]
    assert torch.equal(down, whole["model.layers.0.feed_forward.w2.weight"])


def test_nothing_is_assumed_where_neither_shapes_nor_version_tell_w2_from_w3(copy_of: Copies) -> None:
    folder = copy_of("internlm1-tp2")
    alike = {f"model.blocks.{i}.mlp.w{n}.weight": torch.randn(24, 24) for i in range(2) for n in (1, 2, 3)}
    for file in folder.glob("model_tp*.pt"):
        edit(file, lambda content: content | alike)
    assert reshard.open(folder).checkpoint.problems == []
    config_with(folder, mlp_layer_fusion=None)  # as before InternEvo 0.4
    (problem,) = reshard.open(folder).checkpoint.problems
    assert "which of them is the down projection" in problem.message
    assert "add mlp_layer_fusion=False" in str(problem.remedy)


@pytest.mark.parametrize("told_by", ["config_file.pt", "config.json"])
def test_internlm2_that_was_saved_as_slices_is_fused_rank_by_rank(
    told_by: str, copy_of: Copies, tmp_path: Path, hub: Callable[[str], Path]
) -> None:
    folder = copy_of("internlm2-tp2pp2")
    for file in folder.glob("model_tp*_pp*.pt"):
        edit(file, _sliced)
    if told_by == "config_file.pt":
        torch.save('JOB_NAME = "7b"\nmodel_type = "INTERNLM2"\n', folder / told_by)
    else:
        shutil.copy(hub("internlm2-tp2pp2") / told_by, folder)
    same_as_before(folder, tmp_path / "out", hub("internlm2-tp2pp2"))


def _sliced(content: dict[str, Any]) -> dict[str, Any]:
    """A rank's wqkv as later versions save it: the first half of its rows as wq, a quarter each as wk and wv."""
    result = {}
    for key, tensor in content.items():
        if "wqkv" in key:
            rows = tensor.shape[0]
            parts = tensor.split([rows // 2, rows // 4, rows // 4])
            result |= {
                key.replace("wqkv", name): part.clone()
                for name, part in zip(("wq", "wk", "wv"), parts, strict=True)
            }
        else:
            result[key] = tensor
    return result


def test_files_that_name_the_weight_parallel_rank_alone_are_read(
    copy_of: Copies, tmp_path: Path, hub: Callable[[str], Path]
) -> None:
    folder = copy_of("internlm2-isp")
    for file in folder.glob("model_tp0_wp*.pt"):
        file.rename(folder / file.name.replace("tp0_", ""))
    same_as_before(folder, tmp_path / "out", hub("internlm2-isp"))


def test_an_embedding_that_flash_attention_cut_by_rows_is_joined_by_rows(
    copy_of: Copies, tmp_path: Path, hub: Callable[[str], Path]
) -> None:
    folder, key = copy_of("llama-tp2"), "model.tok_embeddings.weight"
    files = sorted(folder.glob("model_tp*_pp0.pt"))
    whole = torch.cat([torch.load(file, weights_only=True)[key] for file in files], 1)
    for file, rows in zip(files, whole.chunk(2), strict=True):
        old = torch.load(file, weights_only=True)
        old.pop(key)
        torch.save(old | {"model.tok_embeddings.word_embeddings.weight": rows.clone()}, file)
    same_as_before(folder, tmp_path / "out", hub("llama-tp2"))


def test_qk_interleaved_of_later_versions_goes_before_adapt_hf(
    copy_of: Copies, tmp_path: Path, hub: Callable[[str], Path]
) -> None:
    folder = copy_of("internlm2-interleaved")
    config_with(folder, adapt_hf=None, qk_interleaved=True)
    assert same_as_before(folder, tmp_path / "out", hub("internlm2-interleaved")) == []


def test_rows_in_pairs_of_the_first_internlm_are_put_in_halves(
    copy_of: Copies, tmp_path: Path, hub: Callable[[str], Path]
) -> None:
    """Of queries and keys; the same files mean other rows if the config says so."""
    folder = copy_of("internlm1-tp2")
    config_with(folder, adapt_hf=False)
    reshard.convert(folder, tmp_path / "out", no_tokenizer=True)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    half = config["hidden_size"] // config["num_attention_heads"] // 2
    found = tensors_of(tmp_path / "out")
    for name, rows in tensors_of(hub("internlm1-tp2")).items():
        pairs = ".q_proj." in name or ".k_proj." in name
        expected = rows.unflatten(0, (-1, half, 2)).transpose(1, 2).flatten(0, 2) if pairs else rows
        assert torch.equal(found[name], expected), name


@pytest.mark.parametrize(("name", "order"), [("llama-tp2", "in pairs"), ("internlm2-isp", "in halves")])
def test_a_note_says_which_order_of_rotary_rows_was_assumed(
    name: str, order: str, hub: Callable[[str], Path]
) -> None:
    notes = reshard.convert(DATA / name, hub(name).parent / "dry", no_tokenizer=True, dry_run=True).plan.notes
    assert any("says nothing of adapt_hf" in note and order in note for note in notes)


@pytest.mark.parametrize("name", ["internlm2-tp2pp2", "llama-tp2", "internlm1-tp2", "moe-tp2"])
def test_without_a_model_config_nothing_is_assumed(
    name: str, copy_of: Copies, tmp_path: Path, hub: Callable[[str], Path]
) -> None:
    """No config on the Hub contains the order of rows. The remedy tells the user how to set it."""
    folder = copy_of(name)
    config = reshard.formats.internlm.model_config.read_model_config(folder, Sources())
    (folder / "model_config.pt").unlink()
    for base in (None, hub(name)):
        found = problems_of(folder, tmp_path / "refused", base=base)
        assert "there is no model_config.pt" in found and "another step of the same run" in found
    assert run("verify", folder, DATA / name).code == 2
    torch.save({**config, "dtype": torch.bfloat16}, folder / "model_config.pt")
    same_as_before(folder, tmp_path / "out", hub(name))


def test_rows_in_pairs_are_not_taken_for_halves(copy_of: Copies, tmp_path: Path) -> None:
    """Four tensors of this one were wrong, with only a note."""
    folder = copy_of("internlm2-interleaved")
    reshard.convert(folder, tmp_path / "right", no_tokenizer=True)
    (folder / "model_config.pt").unlink()
    problems_of(folder, tmp_path / "out", base=tmp_path / "right")


def test_slices_of_wqkv_are_not_taken_for_llama(copy_of: Copies, tmp_path: Path) -> None:
    """Versions that save them add qk_interleaved to every config; without it, they are Llama's."""
    folder = copy_of("internlm2-tp2pp2")
    for file in folder.glob("model_tp*_pp*.pt"):
        edit(file, _sliced)
    config_with(folder, adapt_hf=None, qk_interleaved=False)
    found = problems_of(folder, tmp_path / "out")
    assert "slices of InternLM2's wqkv" in found and "config_file.pt" in found
    torch.save('model_type = "LLAMA2"\n', folder / "config_file.pt")
    assert reshard.open(folder).checkpoint.problems == []
    assert reshard.open(DATA / "llama-tp2").checkpoint.problems == []


def test_a_missing_config_is_told_only_where_the_engine_tells_none(copy_of: Copies) -> None:
    folder = copy_of("internlm2-tp2pp2")
    (warning,) = run("inspect", folder, "--json").json["problems"]
    assert warning["message"] == "tokenizer not found next to the weights"
    (folder / "model_config.pt").unlink()
    messages = [problem["message"] for problem in run("inspect", folder, "--json").json["problems"]]
    assert messages[:2] == ["there is no model_config.pt", "config.json not found next to the weights"]


def test_remote_code_of_the_base_travels_along(tmp_path: Path, hub: Callable[[str], Path]) -> None:
    base = Path(shutil.copytree(hub("internlm2-tp2pp2"), tmp_path / "base"))
    config = json.loads((base / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_internlm2.InternLM2ForCausalLM"}
    (base / "config.json").write_text(json.dumps(config))
    (base / "modeling_internlm2.py").write_text("# the Hub's code\n")
    reshard.convert(DATA / "internlm2-tp2pp2", tmp_path / "out", base=base, no_tokenizer=True)
    assert (tmp_path / "out" / "modeling_internlm2.py").read_text() == "# the Hub's code\n"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["auto_map"] == config["auto_map"]


def test_of_several_steps_the_last_is_taken_or_the_one_that_was_asked_for(tmp_path: Path) -> None:
    for step, name in ((9, "internlm2-isp"), (10, "internlm1-tp2")):
        shutil.copytree(DATA / name, tmp_path / "run" / str(step))
    assert run("inspect", tmp_path / "run", "--json").json["iteration"] == 10
    reshard.convert(tmp_path / "run", tmp_path / "nine", iteration=9, no_tokenizer=True)
    assert json.loads((tmp_path / "nine" / "config.json").read_text())["model_type"] == "internlm2"
    assert "the folder of this iteration does not exist" in problems_of(
        tmp_path / "run", tmp_path / "out", iteration=8
    )


def test_what_is_no_weight_is_left_behind_by_name(copy_of: Copies, tmp_path: Path) -> None:
    folder = copy_of("internlm1-tp2")
    (folder / "optimizer_tp0_pp0_zo0.pt").write_bytes(bytes(1000))
    buffer = {"model.blocks.0.mixer.rotary_emb.inv_freq": torch.ones(4)}
    edit(folder / "model_tp0_pp0.pt", lambda content: content | buffer)
    dropped = reshard.convert(folder, tmp_path / "out", no_tokenizer=True).plan.dropped
    assert dropped == {"optimizer states": 1000, "rotary buffers": 16}
