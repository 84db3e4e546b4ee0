"""Folders of torch.distributed.checkpoint: reshard reads what real engines write, and they load what it writes.

A converted checkpoint is judged by its logits: transformers must compute from the Hugging Face folder what the engine
itself computed when it saved. A written one is judged by loading it into a live, sharded model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from transformers import CLIPConfig, CLIPModel

import reshard
from reshard.algebra.tensors import Tensor
from reshard.base.errors import ReshardError
from reshard.containers.dcp_metadata import read_metadata, write_metadata
from reshard.families import FAMILIES
from reshard.oracle.transformers import transformers_logits
from reshard.transfer.gather import Gatherer
from reshard.transfer.source_files import Sources
from reshard.transfer.thread_files import OpenFiles
from tests.commandline import reshard as command
from tests.formats.test_dcp import written
from tests.genuine import make_dcp
from tests.genuine.live import live_and_hub
from tests.genuine.make_torchtitan import SAVED as TITAN
from tests.genuine.ranks import on_ranks
from tests.judges import TOKENS, assert_agree, assert_same_tensors, tensors_of

pytest.importorskip("accelerate")

Maker = Callable[..., Path]
LIKE_OTHERS = ("fsdp2-model", "accelerate-1", "trainer-1")
KINDS = [
    pytest.param(kind, marks=pytest.mark.slow) if kind in LIKE_OTHERS else kind for kind in make_dcp.KINDS
]


@pytest.fixture(scope="module")
def saved(hf_model: Maker, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Get the folder that a user would pass for a kind of `make_dcp.KINDS`, made once."""
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = make_dcp.make(kind, hf_model("llama"), tmp_path_factory.mktemp("dcp") / kind)
        return made[kind]

    return get


def values(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The elements of a tensor in float32."""
    files = OpenFiles()
    read = Gatherer(files, None).read(tensor, 0, tensor.view.numel)
    files.close()
    return read.view(np.float32).reshape(tensor.shape)


def as_torch_reads(folder: Path) -> dict[str, Any]:
    """The contents of a folder as torch itself reads it, with the saved nesting."""
    state: dict[str, Any] = {}
    _load_state_dict(
        state, storage_reader=FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    return state


def save(state: dict[str, Any], folder: Path) -> Path:
    """Save a state dict from one rank."""
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


# ---------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.core("fsdp2-tp")
def test_transformers_computes_what_the_engine_computed(
    kind: str, saved: Callable[[str], Path], hf_model: Maker, tmp_path: Path
) -> None:
    source = saved(kind)
    checkpoint = reshard.open(source).checkpoint
    assert (checkpoint.format, checkpoint.dialect.name) == ("dcp", "hf")
    reshard.convert(source, tmp_path / "hf", base=hf_model("llama"))
    assert_agree(transformers_logits(tmp_path / "hf", TOKENS), np.load(source.parent / "logits.npy"))
    moved = tensors_of(tmp_path / "hf")["model.layers.0.mlp.up_proj.weight"]
    assert not torch.equal(moved, tensors_of(hf_model("llama"))["model.layers.0.mlp.up_proj.weight"])


@pytest.mark.core("fsdp2-tp", "fsdp1", "trainer-2")
@pytest.mark.parametrize("kind", ["fsdp2-app", "fsdp2-tp", "fsdp1", "accelerate-2", "trainer-2"])
def test_optimizer_states_are_read_under_the_names_of_their_tensors(
    kind: str, saved: Callable[[str], Path]
) -> None:
    checkpoint = reshard.open(saved(kind)).checkpoint
    assert checkpoint.optimizer.states.keys() == {"exp_avg", "exp_avg_sq"}
    assert checkpoint.optimizer.adam and checkpoint.optimizer.adam.step == 1
    assert checkpoint.optimizer.adam.settings["betas"] == (0.9, 0.999)
    for states in checkpoint.optimizer.states.values():
        assert {name: state.shape for name, state in states.items()} == {
            name: tensor.shape for name, tensor in checkpoint.tensors.items()
        }
    assert 2 * checkpoint.nbytes < checkpoint.dropped["optimizer states"] < 2.5 * checkpoint.nbytes


@pytest.mark.thorough
def test_optimizer_states_are_those_that_torch_reads(saved: Callable[[str], Path]) -> None:
    for kind, folder in (("fsdp2-tp", "step-1"), ("accelerate-2", "optimizer_0")):
        checkpoint = reshard.open(saved(kind)).checkpoint
        theirs = as_torch_reads(saved(kind) / folder)
        states = theirs["optim" if kind == "fsdp2-tp" else "optimizer"]["state"]
        for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.3.mlp.down_proj.weight"):
            ours = values(checkpoint.optimizer.states["exp_avg"][name])
            assert np.array_equal(ours, states[name]["exp_avg"].numpy()) and ours.any()


def test_what_is_no_weight_is_dropped_by_named_rules(saved: Callable[[str], Path]) -> None:
    assert reshard.open(saved("fsdp2-tp")).checkpoint.dropped.keys() == {
        "optimizer states",
        "learning rate schedules",
        "other objects",
    }
    assert "random number states" in reshard.open(saved("fsdp2-app")).checkpoint.dropped
    titan = {"optimizer states", "learning rate schedules", "data loader states", "training progress"}
    assert reshard.open(TITAN / "llama").checkpoint.dropped.keys() == titan


@pytest.mark.parametrize("nested", [True, False], ids=["below model", "at the top"])
def test_a_scalar_of_the_model_is_a_weight_and_one_of_the_loop_is_not(nested: bool, tmp_path: Path) -> None:
    """CLIP's `logit_scale` has no dimension, like the step that training loops save."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    vision = {**sizes, "image_size": 32, "patch_size": 16}
    config = CLIPConfig(text_config={**sizes, "vocab_size": 64}, vision_config=vision, projection_dim=16)
    model = CLIPModel(config)
    model.save_pretrained(tmp_path / "hub")
    weights = dict(model.state_dict())
    loop = {"step": torch.tensor(3), "best_loss": torch.tensor(0.5)}
    folder = save({"model": weights, **loop} if nested else {**weights, **loop}, tmp_path / "dcp")
    report = reshard.convert(folder, tmp_path / "out", base=tmp_path / "hub", no_tokenizer=True)
    assert_same_tensors(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "hub"))
    assert report.plan.dropped["training progress"] == 12
    reshard.convert(tmp_path / "hub", tmp_path / "again", to="dcp", no_tokenizer=True)
    reshard.convert(tmp_path / "again", tmp_path / "back", no_tokenizer=True)
    assert_same_tensors(tensors_of(tmp_path / "back"), tensors_of(tmp_path / "hub"))


def test_names_without_a_record_of_their_nesting_are_found(hf_model: Maker, tmp_path: Path) -> None:
    """`.metadata` maps keys to paths; if the user flattened the state dict, only the names show the nesting."""
    weights = tensors_of(hf_model("qwen2"))
    save({f"trainer.policy.{name}": tensor for name, tensor in weights.items()}, tmp_path / "dcp")
    assert reshard.open(tmp_path / "dcp").tensors.keys() == weights.keys()


def test_a_trainer_checkpoint_says_what_it_lacks(saved: Callable[[str], Path], hf_model: Maker) -> None:
    source = saved("trainer-2")
    shown = command("inspect", source, "--json").json
    assert any("weights only, no config or tokenizer; pass --base" in note for note in shown["notes"])
    assert shown["next"].startswith("reshard convert ") and shown["next"].endswith(" --base HF_FOLDER")
    refused = command("convert", source, source.parent / "out")
    assert refused.code == 2
    assert "pass the Hugging Face folder that training started from (--base DIR)" in " ".join(
        refused.err.split()
    )
    words = shown["next"].replace("HF_FOLDER", str(hf_model("llama"))).split()[1:]
    assert command(*words).code == 0


def test_the_step_is_that_of_the_folder(saved: Callable[[str], Path]) -> None:
    assert reshard.open(saved("fsdp2-flat")).checkpoint.iteration == 1
    assert reshard.open(saved("trainer-2"), iteration=1).checkpoint.iteration == 1
    with pytest.raises(ReshardError, match="the folder of this iteration does not exist"):
        reshard.open(saved("fsdp2-flat"), iteration=2)


# ------------------------------------------------------------------------------------- names in memory

USUAL = ("qwen3_moe", "deepseek_v3", "mixtral", "phimoe", "nemotron_h", "ernie4_5_moe", "hy_v3", "granitemoe")
"""One of each kind; the others are slow."""
# Experts that the Hub stacks, and `save_pretrained` takes apart, are in tests/test_stacked_experts.py.
NAMED = (
    name
    for name, family in FAMILIES.items()
    if family.live
    and not (family.live.stacked or family.live.config)  # those are in tests/test_names_in_memory.py
)
UNDECLARED = (
    *("afmoe", "longcat_flash", "solar_open", "mellum", "flex_olmo", "cohere2_moe", "hunyuan_v1_moe"),
    *("minimax", "phimoe", "lfm2_moe", "jamba", "exaone_moe", "kolibri1", "mimo_v2_flash", "flint", "laguna"),
    *("axk1", "axk2", "granitemoe", "granitemoeshared", "granitemoehybrid", "aria_text"),
)
FUSED = sorted({*NAMED, *UNDECLARED})


@pytest.mark.parametrize(
    "model_type",
    [name if name in USUAL else pytest.param(name, marks=pytest.mark.slow) for name in FUSED],
)
def test_live_names_become_the_hubs_and_the_hubs_become_live(model_type: str, tmp_path: Path) -> None:
    """Compared with the state dict of the real model, and with the output of its `save_pretrained`."""
    live = live_and_hub(model_type, tmp_path / "hub")
    hub = tensors_of(tmp_path / "hub")
    save({"model": live}, tmp_path / "live")
    reshard.convert(tmp_path / "live", tmp_path / "hf", base=tmp_path / "hub", no_tokenizer=True)
    ours = tensors_of(tmp_path / "hf")
    assert (
        hub.keys() <= ours.keys() <= hub.keys() | {"lm_head.weight"}
    )  # which the Hub leaves out if it is tied
    assert_same_tensors({name: ours[name] for name in hub}, hub)
    reshard.convert(tmp_path / "hub", tmp_path / "dcp", to="dcp", no_tokenizer=True)
    written = as_torch_reads(tmp_path / "dcp")
    assert written.keys() == {"model"}
    assert_same_tensors(written["model"], live)


@pytest.mark.thorough
def test_a_live_mixture_of_experts_that_was_trained_and_sharded(hf_model: Maker, tmp_path: Path) -> None:
    on_ranks(2, make_dcp.fsdp2, hf_model("qwen3_moe"), tmp_path, "model", 1)
    assert any(".gate_up_proj" in name for name in reshard.open(tmp_path / "checkpoint").tensors)
    reshard.convert(tmp_path / "checkpoint", tmp_path / "hf", base=hf_model("qwen3_moe"))
    assert_agree(transformers_logits(tmp_path / "hf", TOKENS), np.load(tmp_path / "logits.npy"))


# ---------------------------------------------------------------------------------------------- writing


@pytest.mark.core("qwen3_moe")
@pytest.mark.parametrize("name", ["llama", "llama_tied", "qwen3_moe", "mixtral", "deepseek_v3"])
def test_a_live_sharded_model_loads_it_strictly(name: str, hf_model: Maker, tmp_path: Path) -> None:
    plan = reshard.convert(hf_model(name), tmp_path / "dcp", to="dcp", max_shard_size="200KB").plan
    chunks = [file for file in plan.files if file.path.endswith(".distcp")]
    assert len(chunks) > 3 and all(file.size < 300_000 for file in chunks)
    on_ranks(2, make_dcp.load, hf_model(name), tmp_path / "dcp")
    assert reshard.verify(hf_model(name), tmp_path / "dcp").equal


def test_accelerate_resumes_from_it(hf_model: Maker, tmp_path: Path) -> None:
    folder = tmp_path / "pytorch_model_fsdp_0"
    reshard.convert(hf_model("llama"), folder, to="dcp")
    on_ranks(2, make_dcp.accelerate_load, hf_model("llama"), folder)


def test_it_is_written_from_any_format(hf_model: Maker, tmp_path: Path) -> None:
    source = hf_model("qwen3_moe")
    reshard.convert(source, tmp_path / "megatron", to="megatron", tp=2, pp=2)
    reshard.convert(tmp_path / "megatron", tmp_path / "dcp", to="dcp")
    on_ranks(2, make_dcp.load, source, tmp_path / "dcp")
    reshard.convert(TITAN / "qwen3", tmp_path / "titan", to="dcp", no_tokenizer=True)
    assert reshard.verify(TITAN / "qwen3", tmp_path / "titan").equal


def test_large_tensors_are_cut_so_that_ranks_read_their_own(
    hf_model: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reshard.containers.dcp_chunks.MAX_CHUNK_BYTES", 4096)
    reshard.convert(hf_model("qwen3_moe"), tmp_path / "dcp", to="dcp")
    tables = FileSystemReader(tmp_path / "dcp").read_metadata().state_dict_metadata
    chunks = tables["model.model.layers.0.mlp.experts.gate_up_proj"].chunks
    assert [tuple(chunk.sizes) for chunk in chunks] == [(1, 64, 64)] * 8
    on_ranks(2, make_dcp.load, hf_model("qwen3_moe"), tmp_path / "dcp")


def test_config_and_tokenizer_travel_along(hf_model: Maker, tmp_path: Path) -> None:
    reshard.convert(hf_model("llama"), tmp_path / "dcp", to="dcp", dtype="bfloat16")
    assert json.loads((tmp_path / "dcp" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    reshard.convert(tmp_path / "dcp", tmp_path / "hf")  # needs no --base
    assert (tmp_path / "hf" / "tokenizer.json").is_file()
    assert reshard.open(tmp_path / "dcp").checkpoint.dtypes == {"bfloat16": 39}


# ------------------------------------------------------------------------------------------- bad input


@pytest.fixture
def weights(hf_model: Maker) -> dict[str, torch.Tensor]:
    """The tensors of a small model."""
    return tensors_of(hf_model("qwen2"))


def refused(folder: Path) -> str:
    """The error message of opening a folder; through the command line, so that a traceback would be noticed."""
    result = command("inspect", folder)
    assert result.code in (1, 2)
    return " ".join((result.out + result.err).split())


def test_a_save_that_did_not_finish(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    save({"model": weights}, tmp_path / "dcp")
    (tmp_path / "dcp" / ".metadata").unlink()
    assert "the save did not finish" in refused(tmp_path / "dcp")


def test_empty_folders(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model_fsdp_0").mkdir()
    assert "no checkpoint found here" in refused(tmp_path)
    save({}, tmp_path / "nothing")
    assert "this folder contains no weights" in refused(tmp_path / "nothing")


def test_a_folder_of_optimizer_states_alone(saved: Callable[[str], Path]) -> None:
    assert "pass the folder of the model next to it" in refused(saved("accelerate-2") / "optimizer_0")


def test_a_file_that_is_missing_and_one_that_is_short(saved: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(saved("fsdp2-app") / "step-1", tmp_path / "dcp")
    (folder / "__1_0.distcp").unlink()
    short = folder / "__2_0.distcp"
    short.write_bytes(short.read_bytes()[:-4096])
    message = refused(folder)
    assert "__1_0.distcp" in message and "missing" in message
    assert "__2_0.distcp" in message and "cut short" in message


def test_chunks_that_overlap_are_refused(tmp_path: Path) -> None:
    """As many elements as the tensor has, but the place of a chunk is another's, and its own is empty."""
    written(tmp_path)
    metadata = read_metadata(tmp_path / ".metadata", Sources())
    for tensor in metadata.tensors.values():
        tensor.chunks[:] = [chunk._replace(file=Path(chunk.file).name) for chunk in tensor.chunks]
    metadata.objects.clear()
    chunks = metadata.tensors["layers.weight"].chunks
    chunks[1] = chunks[1]._replace(offsets=chunks[0].offsets)
    (tmp_path / ".metadata").write_bytes(write_metadata(metadata))
    assert "chunks of a tensor overlap" in refused(tmp_path)


def test_two_models_in_one_state_dict(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    critic = {"v_head.weight": torch.ones(3, 3)}
    save({"policy": weights, "critic": critic}, tmp_path / "dcp")
    message = refused(tmp_path / "dcp")
    assert "more than one model" in message and "critic.v_head.weight" in message


def test_two_models_under_one_prefix(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    titan = as_torch_reads(TITAN / "qwen3" / "checkpoint" / "step-1")
    save({"model": weights | titan}, tmp_path / "dcp")
    assert "tensors of two models are mixed" in refused(tmp_path / "dcp")


def test_a_model_that_is_there_twice(
    weights: dict[str, torch.Tensor], hf_model: Maker, tmp_path: Path
) -> None:
    save(
        {"model": weights, "ema": {name: tensor.clone() for name, tensor in weights.items()}},
        tmp_path / "same",
    )
    reshard.convert(tmp_path / "same", tmp_path / "hf", base=hf_model("qwen2"))
    assert_same_tensors(tensors_of(tmp_path / "hf"), weights)
    averaged = {name: tensor * 0.5 for name, tensor in weights.items()}
    save({"model": weights, "ema": averaged}, tmp_path / "other")
    with pytest.raises(ReshardError, match=r"two models that differ(?s:.*)'model\.' and 'ema\.'"):
        reshard.convert(tmp_path / "other", tmp_path / "hf2", base=hf_model("qwen2"))
    assert any("'ema.'" in note for note in reshard.inspect(tmp_path / "other").notes)


def test_files_of_safetensors_are_named(weights: dict[str, torch.Tensor], tmp_path: Path) -> None:
    kind = SerializationFormat.SAFETENSORS
    writer = dcp.FileSystemWriter(tmp_path / "dcp", serialization_format=kind)
    dcp.save({"model": weights}, storage_writer=writer, no_dist=True)
    message = refused(tmp_path / "dcp")
    assert "safetensors" in message and "SerializationFormat" in message
    assert "damaged" not in message and "cut short" not in message


def test_a_tensor_that_is_there_fused_and_by_itself(tmp_path: Path) -> None:
    live = live_and_hub("qwen3_moe", tmp_path / "hub")
    name = "model.layers.1.mlp.experts.0.up_proj.weight"
    save({"model": live | {name: tensors_of(tmp_path / "hub")[name]}}, tmp_path / "dcp")
    with pytest.raises(ReshardError, match=f"under two names(?s:.*){name}"):
        reshard.convert(tmp_path / "dcp", tmp_path / "hf", base=tmp_path / "hub", no_tokenizer=True)


def test_experts_that_are_missing_cannot_be_fused(tmp_path: Path) -> None:
    live_and_hub("flex_olmo", tmp_path / "hub")
    tensors = tensors_of(tmp_path / "hub")
    del tensors["model.layers.1.mlp.experts.2.up_proj.weight"]
    save({"model": tensors}, tmp_path / "dcp")
    with pytest.raises(ReshardError, match="experts of a layer are missing"):
        reshard.convert(
            tmp_path / "dcp", tmp_path / "out", to="dcp", base=tmp_path / "hub", no_tokenizer=True
        )


def test_a_folder_of_megatron_core_is_not_taken_for_one(tmp_path: Path, hf_model: Maker) -> None:
    reshard.convert(hf_model("llama"), tmp_path / "megatron", to="megatron")
    assert reshard.open(tmp_path / "megatron").format == "megatron"
    assert reshard.open(tmp_path / "megatron" / "release").format == "megatron"
