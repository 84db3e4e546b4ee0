"""InternEvo: what its own 0.4.9 wrote is read, and what is written is what it writes and loads.

The checkpoints in `data/internlm`, with InternEvo's logits beside each, were made by `genuine/make_internlm.py`. The
slow tests make them anew and let InternEvo load ours; they run where it is installed.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import reshard
from reshard.errors import ReshardError
from reshard.formats import internlm
from reshard.formats.internlm_names import is_old_order
from reshard.formats.internlm_shards import Rank, Shards
from reshard.formats.internlm_write import stages
from reshard.layout import Layout
from reshard.oracle.megatron import megatron_logits
from tests.commandline import reshard as run
from tests.genuine.internlm_reference import hub_logits
from tests.judges import assert_agree, assert_same_tensors, tensors_of

DATA = Path(__file__).parent / "data" / "internlm"
NAMES = sorted(folder.name for folder in DATA.iterdir())
WRITABLE = {
    "internlm2-tp2pp2": Layout(2, 2),
    "internlm2-chunks": Layout(1, 2, 2),
    "internlm1-tp2": Layout(2),
    "llama-tp16": Layout(16),
}
"""Those that reshard would write in the same way: no weight parallelism, rotary rows in halves."""

Copies = Callable[[str], Path]


@pytest.fixture
def copy_of(tmp_path: Path) -> Copies:
    """A checkpoint of InternEvo's that a test may change."""
    return lambda name: Path(shutil.copytree(DATA / name, tmp_path / name))


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The Hugging Face folder of a checkpoint, converted once."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name) / "hub"
            reshard.convert(DATA / name, made[name], no_tokenizer=True)
        return made[name]

    return get


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Load a file, change what it holds, and save it again as InternEvo saves it."""
    content = torch.load(path, weights_only=True)
    torch.save(change(content), path)


def config_with(folder: Path, **keys: Any) -> None:
    """Write `model_config.pt` anew, with other keys; None takes one out."""
    config = {**reshard.formats.internlm_config.read_model_config(folder), "dtype": torch.bfloat16, **keys}
    torch.save({key: value for key, value in config.items() if value is not None}, folder / "model_config.pt")


def problems_of(folder: Path, out: Path, **options: Any) -> str:
    """The problems for which a conversion is refused, before anything is written."""
    with pytest.raises(ReshardError) as refused:
        reshard.convert(folder, out, no_tokenizer=True, **options)
    assert not out.exists()
    return str(refused.value)


def same_as_before(folder: Path, out: Path, reference: Path) -> list[str]:
    """Convert `folder`, check that its tensors are those of `reference`, and return the notes."""
    result = reshard.convert(folder, out, no_tokenizer=True)
    assert_same_tensors(tensors_of(out), tensors_of(reference))
    return result.plan.notes


# ---------------------------------------------------------------------------------------------- reading


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


@pytest.mark.parametrize(
    "name", ["internlm2-tp2pp2", "internlm2-biases", "internlm1-tp2", "llama-tp2", "moe-tp2"]
)
def test_weights_go_to_megatron_directly(name: str, tmp_path: Path) -> None:
    layout, flags = (Layout(ep=2), ("--ep", 2)) if name == "moe-tp2" else (Layout(2), ("--tp", 2))
    result = run("convert", DATA / name, tmp_path / "m", "--to", "megatron", *flags, "--no-tokenizer")
    assert result.code == 0, result.err
    checkpoint, expected = reshard.open(tmp_path / "m"), np.load(DATA / name / "logits.npz")
    args = dict(checkpoint.args or {})
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


# -------------------------------------------------------------------------- spellings of other versions


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


def test_where_shapes_do_not_tell_w2_from_w3_a_note_says_what_was_taken(tmp_path: Path) -> None:
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
    assert any("w2 and w3 are both [32, 32]" in note and "0.3.0" in note for note in result.plan.notes)
    down = tensors_of(tmp_path / "out")["model.layers.0.feed_forward.w2.weight"]
    assert torch.equal(down, whole["model.layers.0.feed_forward.w2.weight"])


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


@pytest.mark.parametrize(("name", "order"), [("llama-tp2", "in pairs"), ("internlm2-isp", "in halves")])
def test_a_note_says_which_order_of_rotary_rows_was_assumed(
    name: str, order: str, hub: Callable[[str], Path]
) -> None:
    notes = reshard.convert(DATA / name, hub(name).parent / "dry", no_tokenizer=True, dry_run=True).plan.notes
    assert any("says nothing of adapt_hf" in note and order in note for note in notes)


def test_without_a_model_config_the_config_of_the_base_is_taken(
    copy_of: Copies, tmp_path: Path, hub: Callable[[str], Path]
) -> None:
    folder = copy_of("internlm2-tp2pp2")
    (folder / "model_config.pt").unlink()
    assert "--base" in problems_of(folder, tmp_path / "refused")
    result = reshard.convert(folder, tmp_path / "out", base=hub("internlm2-tp2pp2"), no_tokenizer=True)
    assert_same_tensors(tensors_of(tmp_path / "out"), tensors_of(hub("internlm2-tp2pp2")))
    assert any("there is no model_config.pt" in note for note in result.plan.notes)


def test_remote_code_of_the_base_travels_along(tmp_path: Path, hub: Callable[[str], Path]) -> None:
    base = Path(shutil.copytree(hub("internlm2-tp2pp2"), tmp_path / "base"))
    config = json.loads((base / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_internlm2.InternLM2ForCausalLM"}
    (base / "config.json").write_text(json.dumps(config))
    (base / "modeling_internlm2.py").write_text("# the hub's code\n")
    reshard.convert(DATA / "internlm2-tp2pp2", tmp_path / "out", base=base, no_tokenizer=True)
    assert (tmp_path / "out" / "modeling_internlm2.py").read_text() == "# the hub's code\n"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["auto_map"] == config["auto_map"]


def test_of_several_steps_the_last_is_taken_or_the_one_that_was_asked_for(tmp_path: Path) -> None:
    for step, name in ((9, "internlm2-isp"), (10, "internlm1-tp2")):
        shutil.copytree(DATA / name, tmp_path / "run" / str(step))
    assert run("inspect", tmp_path / "run", "--json").json["iteration"] == 10
    reshard.convert(tmp_path / "run", tmp_path / "nine", iteration=9, no_tokenizer=True)
    assert json.loads((tmp_path / "nine" / "config.json").read_text())["model_type"] == "internlm2"
    assert "there is no folder of that iteration" in problems_of(
        tmp_path / "run", tmp_path / "out", iteration=8
    )


def test_what_is_no_weight_is_left_behind_by_name(copy_of: Copies, tmp_path: Path) -> None:
    folder = copy_of("internlm1-tp2")
    (folder / "optimizer_tp0_pp0_zo0.pt").write_bytes(bytes(1000))
    buffer = {"model.blocks.0.mixer.rotary_emb.inv_freq": torch.ones(4)}
    edit(folder / "model_tp0_pp0.pt", lambda content: content | buffer)
    dropped = reshard.convert(folder, tmp_path / "out", no_tokenizer=True).plan.dropped
    assert dropped == {"optimizer states": 1000, "rotary buffers": 16}


# -------------------------------------------------------------------------------------------- bad input


def test_a_tensor_that_differs_between_ranks_is_refused(copy_of: Copies, tmp_path: Path) -> None:
    folder = copy_of("internlm2-tp2pp2")
    key = "model.layers.1.ffn_norm.weight"
    edit(folder / "model_tp1_pp0.pt", lambda content: content | {key: content[key] + 1})
    found = problems_of(folder, tmp_path / "out")
    assert "layers.1.ffn_norm.weight" in found and "replicated tensors are equal on all ranks" in found


@pytest.mark.parametrize(
    ("name", "gone"),
    [
        ("internlm2-tp2pp2", "model_tp0_pp1.pt"),
        ("llama-tp16", "model_tp7_pp0.pt"),
        ("internlm2-isp-tp2wp2pp2", "model_tp1_wp1_pp0.pt"),
    ],
)
def test_the_file_of_a_rank_that_is_missing_is_named(
    name: str, gone: str, copy_of: Copies, tmp_path: Path
) -> None:
    folder = copy_of(name)
    (folder / gone).unlink()
    found = problems_of(folder, tmp_path / "out")
    assert f"{folder}/{gone}" in found and "the file of a rank is missing" in found


@pytest.mark.parametrize(
    ("name", "gone", "message"),
    [
        ("llama-tp2", "model_tp1_*", "the files of some ranks are missing"),
        ("internlm2-isp", "model_tp0_wp1_*", "the files of some ranks are missing"),
        ("internlm2-tp2pp2", "model_tp*_pp1.pt", "the files of a pipeline stage are missing"),
        ("moe-tp2", "model_moe_layer1_expert2_tp1.pt", "a shard of a tensor is missing"),
        ("moe-tp2", "model_moe_layer1_expert2_*", "mlp.moe_layer.experts.2"),
    ],
)
def test_last_ranks_and_experts_that_are_missing_are_noticed(
    name: str, gone: str, message: str, copy_of: Copies, tmp_path: Path
) -> None:
    folder = copy_of(name)
    for file in folder.glob(gone):
        file.unlink()
    assert message in problems_of(folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("internlm2-tp2pp2", "model_tp0_pp0.pt", "model_tp1_pp0.pt"),
        ("internlm2-isp", "model_tp0_wp0_pp0.pt", "model_tp0_wp1_pp0.pt"),
        ("llama-tp16", "model_tp3_pp0.pt", "model_tp12_pp0.pt"),
        ("moe-tp2", "model_moe_layer0_expert1_tp0.pt", "model_moe_layer0_expert1_tp1.pt"),
    ],
)
def test_a_rank_that_was_copied_over_another_is_named(
    name: str, first: str, second: str, copy_of: Copies, tmp_path: Path
) -> None:
    folder = copy_of(name)
    shutil.copy(folder / first, folder / second)
    found = problems_of(folder, tmp_path / "out")
    assert "is a copy of another rank's" in found and first in found and second in found


def test_shards_that_are_not_equal_are_refused(copy_of: Copies, tmp_path: Path) -> None:
    folder, key = copy_of("llama-tp2"), "model.layers.0.feed_forward.w1.weight"
    edit(folder / "model_tp1_pp0.pt", lambda content: content | {key: content[key][:10].clone()})
    found = problems_of(folder, tmp_path / "out")
    assert "not equal in size" in found and "layers.0.feed_forward.w1.weight" in found
    assert "[24, 32], [10, 32]" in found


@pytest.mark.parametrize("switch", ["norm_head", "apply_post_layer_norm", "is_reward", "moe_use_residual"])
def test_models_that_no_hub_model_computes_are_refused(switch: str, copy_of: Copies, tmp_path: Path) -> None:
    folder = copy_of("internlm2-isp")
    config_with(folder, **{switch: True})
    assert f"{switch}=True" in problems_of(folder, tmp_path / "out")


def test_files_of_fsdp_are_refused_with_the_way_out(copy_of: Copies, tmp_path: Path) -> None:
    folder = copy_of("llama-tp2")
    for file in folder.glob("model_tp*_pp0.pt"):
        file.rename(file.with_name(f"{file.stem}_dp0.pt"))
    assert "zero1=dict(fsdp=False)" in problems_of(folder, tmp_path / "out")


def test_experts_of_two_stages_in_one_file_are_noticed() -> None:
    shards = Shards()
    for stage, layers in enumerate((1, 2, 2)):
        state = {
            f"model.blocks.{i}.norm1.weight": reshard.checkpoint.Tensor(None, _ones()) for i in range(layers)
        }
        shards.count(Rank(0, None, stage), state)
    with pytest.raises(ReshardError, match="saved under one name"):
        shards.stage_of_experts(2, Path("model_moe_layer2_expert0_tp0.pt"))


def _ones() -> Any:
    return reshard.views.View.of("x", 8)


@pytest.mark.parametrize("content", [b"no archive", b""])
def test_files_that_are_none_are_refused(content: bytes, copy_of: Copies, tmp_path: Path) -> None:
    folder = copy_of("llama-tp2")
    (folder / "model_tp1_pp0.pt").write_bytes(content)
    assert "model_tp1_pp0.pt" in problems_of(folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        ("blocks.0.mixer.Wqkv.weight", (47, 32)),
        ("blocks.0.mixer.out_proj.weight", (16,)),
        ("blocks.0.norm1.weight", ()),
        ("embedding.weight", ()),
        ("blocks.1.mlp.w2.weight", (3, 4, 5)),
        ("head.weight", (0,)),
    ],
)
def test_tensors_of_any_shape_are_refused_without_a_traceback(
    key: str, shape: tuple[int, ...], copy_of: Copies, tmp_path: Path
) -> None:
    folder = copy_of("internlm1-tp2")
    for file in folder.glob("model_tp*.pt"):
        edit(file, lambda content: content | {f"model.{key}": torch.zeros(shape)})
    problems_of(folder, tmp_path / "out")


@pytest.mark.parametrize(
    "gone", ["model.embedding.weight", "model.norm.weight", "model.blocks.0.mlp.w1.weight"]
)
def test_a_tensor_that_all_ranks_lack_is_missed(gone: str, copy_of: Copies, tmp_path: Path) -> None:
    folder = copy_of("internlm1-tp2")
    for file in folder.glob("model_tp*.pt"):
        edit(file, lambda content: {key: tensor for key, tensor in content.items() if key != gone})
    assert "missing" in problems_of(folder, tmp_path / "out")


def test_a_file_without_tensors_is_refused(copy_of: Copies, tmp_path: Path) -> None:
    folder = copy_of("llama-tp2")
    torch.save([1, 2], folder / "model_tp1_pp0.pt")
    assert "not the weights of a rank" in problems_of(folder, tmp_path / "out")
    torch.save([1, 2], folder / "model_config.pt")
    assert "model_config.pt cannot be read" in problems_of(folder, tmp_path / "out")


# ---------------------------------------------------------------------------------------------- writing


@pytest.mark.parametrize("name", WRITABLE)
def test_what_is_written_is_what_internevo_wrote(
    name: str, tmp_path: Path, hub: Callable[[str], Path]
) -> None:
    layout = WRITABLE[name]
    reshard.convert(
        hub(name),
        tmp_path / "out",
        to="internlm",
        tp=layout.tp,
        pp=layout.pp,
        vpp=layout.vpp,
        no_tokenizer=True,
    )
    genuine = {file.name for file in (DATA / name).glob("model_tp*.pt")}
    assert {file.name for file in (tmp_path / "out").glob("model_tp*.pt")} == genuine
    for file in genuine:
        ours, theirs = (
            torch.load(folder / file, weights_only=True) for folder in (tmp_path / "out", DATA / name)
        )
        assert_same_tensors(ours, theirs)
    ours = torch.load(tmp_path / "out" / "model_config.pt", weights_only=True)
    theirs = reshard.formats.internlm_config.read_model_config(DATA / name)
    choices = {"dtype", "use_flash_attn", "parallel_output", "multiple_of", "mlp_layer_fusion", "adapt_hf"}
    assert {key: ours[key] for key in theirs.keys() - choices} == {
        key: theirs[key] for key in theirs.keys() - choices
    }


@pytest.mark.parametrize(
    ("name", "tp", "pp"), [("internlm2-tp2pp2", 1, 3), ("llama-tp2", 2, 1), ("internlm1-tp2", 4, 2)]
)
def test_other_layouts_come_back_bit_for_bit(
    name: str, tp: int, pp: int, tmp_path: Path, hub: Callable[[str], Path]
) -> None:
    reshard.convert(DATA / name, tmp_path / "evo", to="internlm", tp=tp, pp=pp, no_tokenizer=True)
    assert internlm.detect(tmp_path / "evo")
    assert same_as_before(tmp_path / "evo", tmp_path / "out", hub(name)) is not None
    assert run("verify", tmp_path / "evo", DATA / name).code == 0


def test_layers_that_do_not_divide_go_to_the_last_stages() -> None:
    assert stages(Layout(1, 3), 8) == [(0, 0, range(2)), (1, 0, range(2, 5)), (2, 0, range(5, 8))]
    interleaved = [(0, 0, range(1)), (1, 0, range(1, 3)), (0, 1, range(3, 4)), (1, 1, range(4, 6))]
    assert stages(Layout(1, 2, 2), 6) == interleaved
    with pytest.raises(ReshardError, match="do not divide over the pipeline"):
        stages(Layout(1, 2, 4), 6)
    with pytest.raises(ReshardError, match="distributes layers itself"):
        stages(Layout(1, 2, stages=(3, 5)), 8)


def test_a_width_that_is_no_neat_ratio_is_built_as_it_is() -> None:
    for hidden, ffn in ((4096, 11008), (2048, 8192), (5120, 13824), (896, 4864), (7, 101)):
        config = {
            "hidden_size": hidden,
            "intermediate_size": ffn,
            "num_attention_heads": 1,
            "num_hidden_layers": 1,
        }
        made = reshard.formats.internlm_config.engine_config("llama", config | {"vocab_size": 8}, 1, None)
        multiple = made["multiple_of"]
        assert -(-int(hidden * made["mlp_ratio"]) // multiple) * multiple == ffn


def test_a_tied_head_is_written_as_a_tensor_of_its_own(tmp_path: Path, hub: Callable[[str], Path]) -> None:
    source = Path(shutil.copytree(hub("llama-tp2"), tmp_path / "tied"))
    tensors = tensors_of(source)
    del tensors["lm_head.weight"]
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    reshard.convert(source, tmp_path / "evo", to="internlm", tp=2, no_tokenizer=True)
    reshard.convert(tmp_path / "evo", tmp_path / "back", no_tokenizer=True)
    back = tensors_of(tmp_path / "back")
    assert torch.equal(back.pop("lm_head.weight"), tensors["model.embed_tokens.weight"])
    assert_same_tensors(back, tensors)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"tp": 3}, "do not divide over --tp 3"),
        ({"tp": 4}, "query groups do not divide over --tp 4"),
        ({"pp": 6}, "layers do not divide over the pipeline"),
        ({"ep": 2}, "the model has no experts"),
    ],
)
def test_layouts_that_internevo_cannot_build_are_refused(
    layout: dict[str, int], message: str, tmp_path: Path, hub: Callable[[str], Path]
) -> None:
    assert message in problems_of(hub("internlm2-tp2pp2"), tmp_path / "out", to="internlm", **layout)


def test_families_that_internevo_does_not_have_are_refused(
    hf_model: Callable[..., Path], tmp_path: Path
) -> None:
    found = problems_of(hf_model("qwen2"), tmp_path / "out", to="internlm")
    assert "cannot be written for the family qwen2" in found and "llama, internlm2, internlm" in found
    assert "no heads of this size" in problems_of(hf_model("llama"), tmp_path / "out", to="internlm")


# ---------------------------------------------------------------------------------- the real framework


@pytest.fixture
def internevo() -> Callable[..., None]:
    """Run `make_internlm` in a process of its own: InternEvo keeps its groups in global variables."""
    if importlib.util.find_spec("internlm") is None:
        pytest.skip("InternEvo is not here: pip install --no-deps InternEvo==0.4.9 && pip install einops")

    def call(*words: object) -> None:
        command = [sys.executable, "-m", "tests.genuine.make_internlm", *map(str, words)]
        subprocess.run(command, check=True, capture_output=True, timeout=600)

    return call


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("internlm2-tp2pp2", {"tp": 2, "pp": 2}),
        ("internlm2-interleaved", {"tp": 1}),
        ("internlm2-chunks", {"pp": 2, "vpp": 2}),
        ("llama-tp2", {"pp": 2}),
        ("llama-tp16", {"tp": 4}),
        ("internlm2-biases", {"tp": 2}),
        ("internlm1-tp2", {"tp": 2, "pp": 2}),
    ],
)
def test_internevo_loads_strictly_and_computes_the_same(
    name: str,
    layout: dict[str, int],
    tmp_path: Path,
    hub: Callable[[str], Path],
    internevo: Callable[..., None],
) -> None:
    reshard.convert(hub(name), tmp_path / "evo", to="internlm", no_tokenizer=True, **layout)
    internevo("judge", tmp_path / "evo", tmp_path / "logits.npz")
    assert_agree(np.load(tmp_path / "logits.npz")["logits"], np.load(DATA / name / "logits.npz")["logits"])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_checkpoints_that_are_made_anew_are_read(
    name: str, tmp_path: Path, internevo: Callable[..., None]
) -> None:
    internevo("make", tmp_path, name)
    reshard.convert(tmp_path / name, tmp_path / "hub", no_tokenizer=True)
    expected = np.load(tmp_path / name / "logits.npz")
    assert_agree(hub_logits(tmp_path / "hub", expected["tokens"]), expected["logits"])
