"""FSDP checkpoints with one file per rank: those of torch, accelerate and verl are read, and damage is noticed."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import reshard
from reshard.base.errors import ReshardError
from reshard.oracle.transformers import transformers_logits
from reshard.transfer.elements import RAW_DTYPES
from reshard.transfer.gather import Gatherer
from reshard.transfer.thread_files import OpenFiles
from tests.commandline import reshard as command
from tests.environments import python
from tests.genuine import make_fsdp_ranks as makers
from tests.genuine.ranks import on_ranks
from tests.judges import TOKENS, assert_agree, assert_same_tensors, tensors_of

Models = Callable[..., Path]
MODELS = [kind for kind in makers.KINDS if kind not in ("accelerate-nameless", "accelerate-adapter", "mixed")]
OTHERS = ("torch-2.6.0", "torch-2.10.0", "torch-2.15.0")
SMALL = ("fsdp1", "fsdp1-mesh", "fsdp1-hsdp", "fsdp2-hsdp", "fsdp2-tp")
VERL = makers.DATA / "verl"
UNEVEN = {"hidden_size": 18, "intermediate_size": 25, "num_hidden_layers": 2, "head_dim": 6}
UNEVEN |= {"num_attention_heads": 3, "num_key_value_heads": 1}
FLAT: dict[str, tuple[str, dict[str, Any]]] = {
    "uneven": ("llama", UNEVEN),
    "tied": ("llama", {**UNEVEN, "tie_word_embeddings": True}),
    "mixtral": ("mixtral", {"num_hidden_layers": 2}),
    "deepseek_v3": ("deepseek_v3", {"num_hidden_layers": 2}),
}
"""Sizes that four ranks do not divide, one storage under two names, renamed and fused experts, buffers."""


@pytest.fixture(scope="module")
def source(hf_model: Models) -> Path:
    return hf_model("llama")


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every kind of `makers.KINDS`, written by four ranks."""
    import accelerate  # noqa: F401 - imported once, before the ranks are forked
    import transformers.models.llama.modeling_llama  # noqa: F401

    out = tmp_path_factory.mktemp("fsdp")
    on_ranks(makers.WORLD, makers.all_kinds, source, out)
    on_ranks(makers.WORLD, makers.odd_tensors, out)
    return out


@pytest.fixture(scope="module")
def flat_sources(hf_model: Models) -> dict[str, Path]:
    return {name: hf_model(variant, **options) for name, (variant, options) in FLAT.items()}


@pytest.fixture(scope="module")
def made_flat(flat_sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every model of `FLAT`, as LOCAL_STATE_DICT of four ranks."""
    import accelerate  # noqa: F401 - imported once, before the ranks are forked

    out = tmp_path_factory.mktemp("flat")
    on_ranks(makers.WORLD, makers.flat_models, flat_sources, out)
    return out


@pytest.fixture
def broken(made: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a kind, to be damaged."""

    def copy(kind: str) -> Path:
        return Path(shutil.copytree(made / kind, tmp_path / "broken"))

    return copy


def values(tensor: reshard.formats.checkpoint.Tensor) -> torch.Tensor:
    """The elements of a tensor, as reshard gathers them."""
    files = OpenFiles()
    out = np.empty(tensor.view.numel, RAW_DTYPES[tensor.dtype.itemsize])
    Gatherer(files, None, 1 << 20).fill(tensor.view.window(0, tensor.view.numel), tensor.dtype, out)
    files.close()
    dtype = getattr(torch, tensor.dtype.name)
    return torch.frombuffer(bytearray(out.tobytes()), dtype=dtype).reshape(tensor.shape)


def assert_expected(folder: Path, expected: Path) -> None:
    """Assert that the checkpoint in `folder` has the complete tensors that torch saved, bit for bit."""
    checkpoint = reshard.open(folder).checkpoint
    whole = torch.load(expected)
    assert_same_tensors({name: values(tensor) for name, tensor in checkpoint.tensors.items()}, whole)


def problem_of(folder: Path) -> str:
    """The only problem of opening `folder`."""
    with pytest.raises(ReshardError) as raised:
        reshard.open(folder)
    assert len(raised.value.problems) == 1, str(raised.value)
    return str(raised.value)


def edit(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Load a rank's file with torch, change its content, and save it again."""
    state = torch.load(file, weights_only=False)
    change(state)
    torch.save(state, file)


def rank_file(folder: Path, rank: int) -> Path:
    (file,) = (path for path in folder.iterdir() if path.stem.endswith((f"rank_{rank}", f"rank{rank}")))
    return file


# ------------------------------------------------------------------------------------------------ reading


@pytest.mark.core("fsdp2-tp", "fsdp1-hsdp", "accelerate-2")
@pytest.mark.parametrize("kind", MODELS)
def test_the_model_becomes_what_its_ranks_computed(
    kind: str, made: Path, source: Path, tmp_path: Path
) -> None:
    """The same tensors as in the model before sharding, and the logits of the sharded model itself."""
    reshard.convert(made / kind, tmp_path / "out", base=source)
    assert_same_tensors(tensors_of(tmp_path / "out"), torch.load(made / kind / "expected"))
    assert_agree(transformers_logits(tmp_path / "out", TOKENS), np.load(made / kind / "logits.npy"))


def test_each_kind_is_what_it_is_named_after(made: Path) -> None:
    """The files contain the classes that they should test, so that no two cases are the same."""
    variants = {kind: reshard.open(made / kind).checkpoint.variant for kind in MODELS}
    assert variants == {
        "fsdp2": "DTensor",
        "fsdp2-hsdp": "DTensor",
        "fsdp2-tp": "DTensor",
        "tp": "DTensor, plain",
        "fsdp1-mesh": "DTensor",
        "fsdp1-hsdp": "DTensor",
        "accelerate-1": "ShardedTensor",
        "accelerate-2": "DTensor",
        "accelerate-local": "ShardedTensor, flat",
        "accelerate-full": "plain",
    }
    notes = " ".join(reshard.open(made / "fsdp2-tp").checkpoint.notes)
    assert "_StridedShard(0, split_factor=2), Shard(0) on a mesh of dp_shard 2 × tp 2" in notes
    assert "Shard(0), Shard(1) on a mesh" in notes
    assert (
        "Replicate, Shard(0) on a mesh of ddp 2 × fsdp 2"
        in reshard.open(made / "fsdp2-hsdp").checkpoint.notes[0]
    )


def test_shards_that_do_not_divide(made: Path) -> None:
    """Empty shards, uneven chunks, two splits of one axis in either order: as torch itself gathers them."""
    whole = torch.load(made / "odd" / "expected")
    assert torch.equal(whole["ordered"], whole["strided"])
    assert_expected(made / "odd", made / "odd" / "expected")


@pytest.mark.parametrize("name", FLAT)
def test_flat_parameters_take_their_shapes_from_the_config(
    name: str, made_flat: Path, flat_sources: dict[str, Path], tmp_path: Path
) -> None:
    reshard.convert(made_flat / name, tmp_path / "out", base=flat_sources[name])
    assert_agree(transformers_logits(tmp_path / "out", TOKENS), np.load(made_flat / name / "logits.npy"))
    live = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    assert_same_tensors(live, torch.load(made_flat / name / "expected"))


def test_flat_parameters_are_of_one_axis_until_the_model_is_known(made_flat: Path) -> None:
    """The elements in order, across ranks and without the padding of flat parameters."""
    found = {name: values(tensor) for name, tensor in reshard.open(made_flat / "uneven").tensors.items()}
    whole = torch.load(made_flat / "uneven" / "expected")
    assert_same_tensors(found, {name: tensor.flatten() for name, tensor in whole.items()})


@pytest.mark.parametrize("version", OTHERS)
@pytest.mark.parametrize("kind", SMALL)
def test_other_versions_of_torch(version: str, kind: str) -> None:
    """2.6 records a mesh as a tensor; 2.10 as a layout, and the order of shards twice."""
    folder = makers.DATA / "fsdp_ranks" / version
    assert_expected(folder / kind, folder / "expected")


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2-hsdp"])
def test_verl(kind: str, tmp_path: Path) -> None:
    """The run's folder is enough: weights, config and tokenizer are found inside it."""
    reshard.convert(VERL / kind, tmp_path / "out")
    assert_agree(transformers_logits(tmp_path / "out", TOKENS), np.load(VERL / kind / "logits.npy"))
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_an_adapter_that_verl_trained(hf_model: Models, tmp_path: Path) -> None:
    """Merged with the alpha that verl stored next to it, it computes the same as the ranks did."""
    base = hf_model("llama", **makers.TINY)
    reshard.convert(VERL / "fsdp2-lora", tmp_path / "out", merge=True, base=base)
    logits = transformers_logits(tmp_path / "out", TOKENS)
    assert_agree(logits, np.load(VERL / "fsdp2-lora" / "logits.npy"))
    assert np.abs(logits - transformers_logits(base, TOKENS)).max() > 0.1


@pytest.mark.core("fsdp2-tp", "accelerate-2")
@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "accelerate-full"])
def test_files_that_changed_names_are_read_right(
    kind: str, broken: Callable[[str], Path], source: Path, tmp_path: Path
) -> None:
    """Each tensor records its position, so the weights do not depend on file names; a note names the files."""
    folder = broken(kind)
    assert not any("renamed" in note for note in reshard.open(folder).checkpoint.notes)
    first, second = rank_file(folder, 1), rank_file(folder, 2)
    first.rename(folder / "spare")
    second.rename(first)
    (folder / "spare").rename(second)
    assert any(
        f"record their position: {first.name}, {second.name}" in note
        for note in reshard.open(folder).checkpoint.notes
    )
    reshard.convert(folder, tmp_path / "out", base=source)
    assert_same_tensors(tensors_of(tmp_path / "out"), torch.load(folder / "expected"))


def test_a_state_dict_inside_of_another(broken: Callable[[str], Path]) -> None:
    folder = broken("fsdp2")
    for rank in range(makers.WORLD):
        torch.save(
            {"model": torch.load(rank_file(folder, rank), weights_only=False), "step": 3},
            rank_file(folder, rank),
        )
    assert_expected(folder, folder / "expected")
    assert reshard.open(folder).checkpoint.notes[-1] == "skipped, because they are not weights: step"


def test_inspect_names_what_verl_saved_beside_the_weights() -> None:
    seen = command("inspect", VERL / "fsdp1", "--json").json
    actor = VERL / "fsdp1" / "global_step_3" / "actor"
    assert seen["format"] == "fsdp-ranks"
    assert seen["family"] == "llama"
    assert seen["problems"] == []
    assert seen["dropped"] == {
        "optimizer states": sum(file.stat().st_size for file in actor.glob("optim*")),
        "training state": sum(file.stat().st_size for file in actor.glob("extra_state*")),
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", makers.VERL)
def test_verl_writes_what_is_kept_here(kind: str, tmp_path: Path) -> None:
    words = [python("verl"), "-m", "tests.genuine.make_fsdp_ranks", "verl", kind, str(tmp_path)]
    subprocess.run(words, check=True, cwd=Path(__file__).parents[1], timeout=300)
    fresh, kept = reshard.open(tmp_path).checkpoint, reshard.open(VERL / kind).checkpoint
    assert {name: (t.dtype, t.shape) for name, t in fresh.tensors.items()} == {
        name: (t.dtype, t.shape) for name, t in kept.tensors.items()
    }
    assert fresh.notes == kept.notes
    assert fresh.dropped.keys() == kept.dropped.keys()


def test_the_file_of_one_rank_leads_to_all(made: Path) -> None:
    file = rank_file(made / "fsdp2", 2)
    assert reshard.open(file).tensors == reshard.open(made / "fsdp2").tensors


def test_dtypes_stay_as_they_are(made: Path, source: Path, tmp_path: Path) -> None:
    """Norms in float32 next to weights in bfloat16, which verl's own merger makes bfloat16 as well."""
    reshard.convert(made / "mixed", tmp_path / "out", base=source)
    expected = makers.halved(torch.load(made / "mixed" / "expected"))
    assert {tensor.dtype for tensor in expected.values()} == {torch.float32, torch.bfloat16}
    assert_same_tensors(tensors_of(tmp_path / "out"), expected)


# ------------------------------------------------------------------------------------------------ damage


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp2-hsdp", "accelerate-1", "accelerate-local"])
def test_the_file_of_one_rank_over_that_of_another(kind: str, broken: Callable[[str], Path]) -> None:
    """torch and verl's merger accept it, and the model is wrong."""
    folder = broken(kind)
    shutil.copy(rank_file(folder, 0), rank_file(folder, 1))
    problem = problem_of(folder)
    assert "copy of another rank's" in problem
    assert str(rank_file(folder, 1)) in problem
    assert "rank 0" in problem


@pytest.mark.parametrize("kind", SMALL)
def test_the_copy_of_a_rank_from_an_older_torch(kind: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(makers.DATA / "fsdp_ranks" / "torch-2.6.0" / kind, tmp_path / kind))
    shutil.copy(rank_file(folder, 2), rank_file(folder, 3))
    assert "copy of another rank's" in problem_of(folder)


@pytest.mark.parametrize("kind", ["fsdp2", "accelerate-1", "accelerate-2", "accelerate-local"])
@pytest.mark.parametrize("rank", [1, 3])
def test_a_missing_rank_is_named(kind: str, rank: int, broken: Callable[[str], Path]) -> None:
    """Including the last one, whose existence accelerate's names do not show."""
    folder = broken(kind)
    file = rank_file(folder, rank)
    file.unlink()
    problem = problem_of(folder)
    assert f"expected: the file of rank {rank}" in problem
    assert str(file) in problem


def test_a_plain_tensor_that_all_ranks_share_is_taken_and_said(made: Path) -> None:
    checkpoint = reshard.open(made / "tp").checkpoint
    assert any(
        "replicated on every rank, not sharded: model.embed_tokens.weight and " in note
        for note in checkpoint.notes
    )


def test_a_plain_tensor_that_differs_between_ranks(
    broken: Callable[[str], Path], source: Path, tmp_path: Path
) -> None:
    folder = broken("tp")
    edit(rank_file(folder, 2), lambda state: state["model.norm.weight"].add_(1))
    with pytest.raises(ReshardError, match="different values") as raised:
        reshard.convert(folder, tmp_path / "out", base=source)
    assert [problem.tensor for problem in raised.value.problems] == ["model.norm.weight"]
    assert not (tmp_path / "out").exists()


def test_a_replica_that_differs(broken: Callable[[str], Path], source: Path, tmp_path: Path) -> None:
    """Ranks 0 and 2 of a hybrid mesh have the same shards."""
    folder = broken("fsdp2-hsdp")
    edit(rank_file(folder, 2), lambda state: state["lm_head.weight"].to_local().add_(1))
    with pytest.raises(ReshardError, match="different values") as raised:
        reshard.convert(folder, tmp_path / "out", base=source)
    assert [problem.tensor for problem in raised.value.problems] == ["lm_head.weight"]


def test_plain_shards_do_not_say_where_they_belong(broken: Callable[[str], Path]) -> None:
    folder = broken("fsdp2")

    def local(state: dict[str, Any]) -> None:
        state.update({name: tensor.to_local() for name, tensor in state.items()})

    for rank in range(makers.WORLD):
        edit(rank_file(folder, rank), local)
    assert "without to_local()" in problem_of(folder)


def test_ranks_that_name_the_mesh_differently(broken: Callable[[str], Path]) -> None:
    folder = broken("fsdp2-hsdp")

    def rename(state: dict[str, Any]) -> None:
        for tensor in state.values():
            tensor.device_mesh._mesh_dim_names = ("tp", "fsdp")

    edit(rank_file(folder, 3), rename)
    problem = problem_of(folder)
    assert "ddp 2 × fsdp 2" in problem
    assert "tp 2 × fsdp 2" in problem
    assert str(rank_file(folder, 3)) in problem


def test_an_empty_shard_where_the_placement_says_otherwise(broken: Callable[[str], Path]) -> None:
    folder = broken("fsdp2")
    edit(rank_file(folder, 1), lambda state: emptied(state["model.norm.weight"]))
    problem = problem_of(folder)
    assert "tensor: model.norm.weight" in problem
    assert "expected: float32 [16]" in problem
    assert "found: float32 [0]" in problem


def emptied(tensor: Any) -> None:
    tensor._local_tensor = torch.empty(0)


def test_a_tensor_that_one_rank_lacks(broken: Callable[[str], Path]) -> None:
    folder = broken("fsdp2")
    edit(rank_file(folder, 1), lambda state: state.pop("lm_head.weight"))
    problem = problem_of(folder)
    assert "do not add up to it" in problem
    assert "tensor: lm_head.weight" in problem


def test_a_sum_that_was_not_added_up(made: Path) -> None:
    with pytest.raises(ReshardError, match="partial sum that was not reduced"):
        reshard.open(made / "partial")


def test_a_tensor_of_another_kind_is_not_left_out(broken: Callable[[str], Path]) -> None:
    folder = broken("fsdp2")
    edit(rank_file(folder, 2), lambda state: state.update({"model.norm.weight": torch.eye(2).to_sparse()}))
    problem = problem_of(folder)
    assert "_rebuild_sparse_tensor" in problem
    assert "tensor: model.norm.weight" in problem


def test_a_mesh_of_another_size_than_the_files(broken: Callable[[str], Path]) -> None:
    folder = broken("fsdp2")
    for rank in range(makers.WORLD):
        file = rank_file(folder, rank)
        if rank < 2:
            file.rename(file.with_name(f"model_world_size_2_rank_{rank}.pt"))
        else:
            file.unlink()
    assert "mesh does not match the number of files" in problem_of(folder)


def test_two_saves_in_one_folder(broken: Callable[[str], Path], made: Path) -> None:
    folder = broken("fsdp2")
    for rank in range(2):
        shutil.copy(rank_file(made / "fsdp2", rank), folder / f"model_world_size_2_rank_{rank}.pt")
    problem = problem_of(folder)
    assert "several saves in one folder" in problem
    assert "model_world_size_2 (2 ranks), model_world_size_4 (4 ranks)" in problem


def test_a_coordinate_outside_of_the_mesh(broken: Callable[[str], Path]) -> None:
    folder = broken("fsdp2")

    def move(state: dict[str, Any]) -> None:
        for tensor in state.values():
            tensor.device_mesh._coordinate_on_dim = (7,)

    edit(rank_file(folder, 3), move)
    problem = problem_of(folder)
    assert "a DTensor cannot be read" in problem
    assert "coordinate (7,) in a mesh of (4,)" in problem


@pytest.mark.parametrize(("kind", "why"), [("nameless", "use_orig_params=True"), ("adapter", "adapter")])
def test_flat_parameters_that_no_config_describes(kind: str, why: str, made: Path) -> None:
    """Without use_orig_params, they have no names; and no config has the shapes of an adapter's matrices."""
    problem = problem_of(made / f"accelerate-{kind}")
    assert why in problem
    assert "SHARDED_STATE_DICT" in problem


@pytest.mark.parametrize("to", ["huggingface", "megatron"])
def test_flat_parameters_without_a_config(to: str, made: Path, tmp_path: Path) -> None:
    with pytest.raises(ReshardError, match="their shapes are unknown") as raised:
        reshard.convert(made / "accelerate-local", tmp_path / "out", to=to)
    (problem,) = (str(each) for each in raised.value.problems if "shapes" in each.message)
    assert "--base DIR" in problem
    assert "SHARDED_STATE_DICT" in problem
    assert not (tmp_path / "out").exists()


def test_flat_parameters_of_a_family_that_nobody_declared(
    broken: Callable[[str], Path], source: Path, tmp_path: Path
) -> None:
    """They are not taken unchanged, as tensors with shapes would be; a forced family provides the shapes."""
    folder = broken("accelerate-local")
    config = {**json.loads((source / "config.json").read_text()), "model_type": "olmo2"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ReshardError, match="their shapes are unknown") as raised:
        reshard.convert(folder, tmp_path / "out", no_tokenizer=True)
    assert len(raised.value.problems) == 1
    assert "found: model_type olmo2" in str(raised.value)
    assert "--family NAME" in str(raised.value)
    assert "their shapes are unknown" in command("inspect", folder).out
    reshard.convert(folder, tmp_path / "out", family="llama", no_tokenizer=True)
    assert_same_tensors(tensors_of(tmp_path / "out"), torch.load(folder / "expected"))


def test_flat_parameters_that_are_not_of_the_size_that_the_config_says(
    made: Path, hf_model: Models, tmp_path: Path
) -> None:
    """All of them are listed; those that are the same in every layer only once."""
    other = hf_model("llama", intermediate_size=112)
    with pytest.raises(ReshardError) as raised:
        reshard.convert(made / "accelerate-local", tmp_path / "out", base=other)
    assert {problem.tensor for problem in raised.value.problems} == {
        f"model.layers.*.mlp.{name}_proj.weight (all 4)" for name in ("gate", "up", "down")
    }
    assert "expected: 7168 elements, [112, 64]" in str(raised.value)
    assert "found: 6144 elements" in str(raised.value)


def test_inspect_says_that_flat_parameters_need_a_config(made: Path) -> None:
    seen = command("inspect", made / "accelerate-local", "--json").json
    assert seen["tensors"] == len(torch.load(made / "accelerate-local" / "expected"))
    assert any("LOCAL_STATE_DICT" in note and "--base DIR" in note for note in seen["notes"])
    assert {problem["severity"] for problem in seen["problems"]} == {"warning"}
    assert "--base HF_FOLDER" in seen["next"]


def test_names_with_the_mark_of_a_wrapper(
    broken: Callable[[str], Path], source: Path, tmp_path: Path
) -> None:
    folder = broken("fsdp2")

    def wrap(state: dict[str, Any]) -> None:
        for name in list(state):
            state[f"_orig_mod.{name}"] = state.pop(name)

    for rank in range(makers.WORLD):
        edit(rank_file(folder, rank), wrap)
    with pytest.raises(ReshardError, match=r"--strip _orig_mod\."):
        reshard.convert(folder, tmp_path / "out", base=source)
    reshard.convert(folder, tmp_path / "out", base=source, strip=("_orig_mod.",))
    assert_same_tensors(tensors_of(tmp_path / "out"), torch.load(folder / "expected"))


def test_a_flipped_bit(broken: Callable[[str], Path], source: Path, tmp_path: Path) -> None:
    """torch.load and verl's merger do not check the checksums in the file."""
    folder = broken("fsdp2")
    storage = next(
        piece.source.storage  # type: ignore[union-attr]
        for piece in reshard.open(folder).tensors["lm_head.weight"].view.pieces
    )
    with Path(storage.path).open("r+b") as file:
        file.seek(storage.offset + 5)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 4]))
    torch.load(storage.path, weights_only=False)
    with pytest.raises(ReshardError, match=r"checksum|CRC"):
        reshard.convert(folder, tmp_path / "out", base=source)


def test_an_iteration_is_not_to_be_had(made: Path) -> None:
    with pytest.raises(ReshardError, match="leave out --iteration"):
        reshard.open(made / "fsdp2", 3)
