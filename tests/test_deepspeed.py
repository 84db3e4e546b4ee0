"""DeepSpeed: reshard reads real checkpoints bit for bit, and DeepSpeed loads those that reshard writes.

The checkpoints in `tests/data/deepspeed` come from `tests/genuine/make_deepspeed.py`, with DeepSpeed's own results.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import reshard
from reshard.base.errors import Problem, ReshardError
from reshard.formats.deepspeed import step_files
from reshard.transfer.gather import Gatherer
from reshard.transfer.thread_files import OpenFiles
from tests.commandline import reshard as command
from tests.environments import python
from tests.genuine import make_deepspeed
from tests.genuine.make_deepspeed import LATER, TAG, TOKENS, VARIANTS
from tests.judges import tensors_of

DATA = Path(__file__).parent / "data" / "deepspeed"
WHOLE = [name for name, variant in VARIANTS.items() if not variant.lora and variant.family != "moe"]
MASTERS = [name for name in WHOLE if VARIANTS[name].stage]
SKIPPED = {"z1_fp16": 1}
"""How many of the two steps were skipped because gradients overflowed."""

MIXED_UP = {"z2_round_robin"}
"""Kinds for which DeepSpeed's own converter takes states and masters from the wrong places: zero_to_fp32 does not."""

Weights = dict[str, torch.Tensor]


@pytest.fixture
def copy(tmp_path: Path) -> Iterator[Any]:
    """Copy a checkpoint, to damage it."""
    yield lambda name: Path(shutil.copytree(DATA / name, tmp_path / name))


def converted(source: Path, out: Path, **options: Any) -> Weights:
    """The tensors of the Hugging Face folder that `source` is converted to."""
    reshard.convert(source, out, no_tokenizer=True, **options)
    return tensors_of(out)


def assert_holds(ours: Weights, wanted: Weights) -> None:
    """Assert the same bits for each name in `wanted`; a tied head may be missing next to its embedding."""
    for name, tensor in wanted.items():
        if name == "lm_head.weight" and name not in ours:
            continue
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


def problems_of(folder: Path) -> list[Problem]:
    """The reason why a checkpoint cannot be opened."""
    with pytest.raises(ReshardError) as caught:
        reshard.open(folder)
    return caught.value.problems


# ---------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("name", MASTERS)
def test_weights_are_the_fp32_masters_as_zero_to_fp32_gathers_them(name: str, tmp_path: Path) -> None:
    ours = converted(DATA / name, tmp_path / "out")
    assert_holds(ours, load_file(DATA / name / "fp32.safetensors"))


@pytest.mark.parametrize("name", WHOLE)
def test_dtype_of_training_gives_the_weights_that_the_engine_computed_with(name: str, tmp_path: Path) -> None:
    variant = VARIANTS[name]
    ours = converted(DATA / name, tmp_path / "out", dtype=variant.dtype)
    module = load_file(DATA / name / "module.safetensors")
    assert ours.keys() == module.keys()
    assert_holds(ours, module)


@pytest.mark.parametrize("name", WHOLE)
def test_transformers_computes_the_logits_of_the_engine(name: str, tmp_path: Path) -> None:
    converted(DATA / name, tmp_path / "out", dtype=VARIANTS[name].dtype)
    assert_computes_as(DATA / name, tmp_path / "out")


def assert_computes_as(made: Path, folder: Path) -> None:
    """Assert that transformers' logits of `folder` match those of the engine that made it, in its precision."""
    dtype = VARIANTS[made.name].dtype
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.no_grad():
        ours = model(torch.tensor(TOKENS)).logits.float().numpy()
    assert_close(ours, np.load(made / "logits.npy"), dtype)


def assert_close(ours: Any, engine: Any, dtype: str) -> None:
    """Assert that logits agree, relative to the largest: a bfloat16 sum depends on the machine's order of addition."""
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    assert engine.std() > 0.1
    assert np.abs(ours - engine).max() <= tolerance * np.abs(engine).max()


@pytest.mark.core("universal_z3", "z1", "z2_fp32", "z3")
@pytest.mark.parametrize("name", sorted({*MASTERS} - MIXED_UP))
def test_optimizer_states_are_those_that_the_engine_gathers(name: str, tmp_path: Path) -> None:
    reshard.convert(DATA / name, tmp_path / "out", to="deepspeed", with_optimizer=True, no_tokenizer=True)
    wanted = load_file(DATA / name / "exp_avg.safetensors")
    folders = tmp_path / "out" / f"{TAG}_universal" / "zero"
    found = {path.parent.name: torch.load(path)["param"] for path in folders.glob("*/exp_avg.pt")}
    assert wanted.keys() <= found.keys()
    for state, tensor in wanted.items():
        assert torch.equal(found[state], tensor), state
    assert {float(torch.load(path)) for path in folders.glob("*/step.pt")} == {2.0 - SKIPPED.get(name, 0)}


def test_a_note_says_which_weights_are_taken() -> None:
    (note,) = reshard.open(DATA / "z3").checkpoint.notes
    assert "fp32 masters" in note and "--dtype bfloat16" in note
    assert reshard.open(DATA / "z3_fp32").checkpoint.notes == []
    (note,) = reshard.open(DATA / "z0_bf16").checkpoint.notes
    assert "module's, in bfloat16" in note


def test_frozen_weights_keep_the_dtype_of_the_module() -> None:
    checkpoint = reshard.open(DATA / "z3").checkpoint
    frozen = {name for name, tensor in checkpoint.tensors.items() if tensor.dtype.name == "bfloat16"}
    assert frozen == {name for name in checkpoint.tensors if "mlp" in name}


@pytest.mark.parametrize("name", ["z2_lora", "z3_lora"])
def test_without_frozen_weights_the_adapter_alone_is_left(name: str) -> None:
    checkpoint = reshard.open(DATA / name).checkpoint
    trained = {n: t for n, t in load_file(DATA / name / "module.safetensors").items() if "lora_" in n}
    assert checkpoint.tensors.keys() == trained.keys()
    assert all(key.startswith("base_model.model.model.layers.") for key in trained)


@pytest.mark.parametrize("name", ["z2_lora", "z3_lora"])
def test_an_adapter_merged_into_its_base_computes_as_the_engine(name: str, tmp_path: Path) -> None:
    module = load_file(DATA / name / "module.safetensors")
    base = {_base_name(key): tensor for key, tensor in module.items() if "lora_" not in key}
    (tmp_path / "base").mkdir()
    save_file(base, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    shutil.copy(DATA / name / "config.json", tmp_path / "base")
    options: dict[str, Any] = {"base": tmp_path / "base", "merge": True, "lora_alpha": 4}
    converted(DATA / name, tmp_path / "out", dtype="float32", **options)
    assert_computes_as(DATA / name, tmp_path / "out")
    with pytest.raises(AssertionError):
        assert_computes_as(DATA / name, tmp_path / "base")


def _base_name(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".base_layer", "")


def test_masters_of_experts_get_the_numbers_of_the_whole_layer(tmp_path: Path) -> None:
    saved: Weights = {}
    for file in (DATA / "z2_moe" / TAG).glob("*model_states.pt"):
        content = torch.load(file)
        saved |= content.get("module", content)
    ours = converted(DATA / "z2_moe", tmp_path / "out")
    assert len([name for name in ours if "deepspeed_experts.3." in name]) == 4
    assert ours.keys() == saved.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor.bfloat16(), saved[name].bfloat16()), name
        assert tensor.dtype == torch.float32 and not torch.equal(tensor, saved[name].float()), name


def test_a_missing_expert_is_named(copy: Any) -> None:
    run = copy("z2_moe")
    file = run / TAG / "layer_0_expert_2_mp_rank_00_model_states.pt"
    file.unlink()
    (problem,) = problems_of(run)
    assert problem.file == str(file)


@pytest.mark.parametrize("name", ["z0", "z2", "z3"])
def test_the_folder_of_the_step_can_be_named_itself(name: str) -> None:
    run, step = (reshard.open(path).checkpoint for path in (DATA / name, DATA / name / TAG))
    assert step.tensors.keys() == run.tensors.keys()
    assert step.iteration == run.iteration == 2
    assert step.description.folder.resolve() == DATA / name


def test_iteration_chooses_a_step_and_latest_does_otherwise(copy: Any) -> None:
    run = copy("z2")
    shutil.copytree(run / TAG, run / "global_step10")
    assert reshard.open(run).checkpoint.iteration == 2
    assert reshard.open(run, iteration=10).checkpoint.path == run / "global_step10"
    (run / "latest").unlink()
    assert "--iteration" in str(problems_of(run)[0].remedy)


def test_a_folder_of_trainer_is_read_with_its_config(copy: Any, tmp_path: Path) -> None:
    (tmp_path / "output").mkdir()
    copy("z3").rename(tmp_path / "output" / "checkpoint-2")
    checkpoint = reshard.open(tmp_path / "output").checkpoint
    assert checkpoint.description.folder == tmp_path / "output" / "checkpoint-2"
    assert reshard.inspect(tmp_path / "output").family == "llama"


def test_without_masters_the_weights_are_those_of_the_module(copy: Any, tmp_path: Path) -> None:
    run = copy("z2")
    for file in run.glob("*/*optim_states.pt"):
        file.unlink()
    checkpoint = reshard.open(run).checkpoint
    assert "masters (optim_states files) are missing" in checkpoint.notes[0]
    ours = converted(run, tmp_path / "out")
    assert_holds(ours, load_file(DATA / "z2" / "module.safetensors"))


def test_a_prefix_of_a_wrapper_is_left_out_of_names(copy: Any) -> None:
    run = copy("z0")
    file = run / TAG / "mp_rank_00_model_states.pt"
    content = torch.load(file, weights_only=False)
    content["module"] = {f"module.{name}": tensor for name, tensor in content["module"].items()}
    torch.save(content, file)
    assert reshard.open(run).tensors.keys() == reshard.open(DATA / "z0").tensors.keys()


def test_no_class_of_deepspeed_is_imported() -> None:
    script = (
        "import reshard, sys; reshard.open(sys.argv[1]); assert not {'torch', 'deepspeed'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script, str(DATA / "z2")], check=True)


# ------------------------------------------------------------------------------------------- bad input


def test_every_missing_file_of_a_rank_is_named(copy: Any) -> None:
    run = copy("z3")
    (run / TAG / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    (run / TAG / "zero_pp_rank_2_mp_rank_00_model_states.pt").unlink()
    missing = {Path(str(problem.file)).name for problem in problems_of(run)}
    assert missing == {
        "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
        "zero_pp_rank_2_mp_rank_00_model_states.pt",
    }


def test_the_model_states_of_zero_3_alone_hold_no_weights(copy: Any) -> None:
    run = copy("z3_fp32")
    for file in run.glob("*/*optim_states.pt"):
        file.unlink()
    problems = problems_of(run)
    assert len(problems) == 2
    assert all("Size([0])" in str(problem.found) for problem in problems)


@pytest.mark.parametrize("name", ["z2", "z3", "z3_fp32"])
def test_a_copy_of_another_rank_is_noticed(name: str, copy: Any) -> None:
    run = copy(name)
    first, second = sorted((run / TAG).glob("*zero_pp_rank_[01]_*optim_states.pt"))
    shutil.copy(first, second)
    (problem,) = problems_of(run)
    assert "copy of another rank" in problem.message
    assert problem.file == str(second)


def test_a_copy_of_frozen_weights_is_noticed(copy: Any) -> None:
    run = copy("z3")
    first, second = sorted((run / TAG).glob("zero_pp_rank_[01]_*model_states.pt"))
    shutil.copy(first, second)
    (problem,) = problems_of(run)
    assert "copy of another rank" in problem.message
    assert problem.file == str(second)


def test_exchanged_ranks_are_noticed(copy: Any) -> None:
    run = copy("z1_fp32")
    first, second = sorted((run / TAG).glob("*optim_states.pt"))
    first.rename(run / "spare")
    second.rename(first)
    (run / "spare").rename(second)
    assert {problem.message for problem in problems_of(run)} == {"a file belongs to another rank"}


def exchange(first: Path, second: Path) -> None:
    first.rename(first.with_name("spare"))
    second.rename(first)
    first.with_name("spare").rename(second)


@pytest.mark.parametrize("name", [name for name in VARIANTS if VARIANTS[name].stage in (1, 2)])
def test_any_two_ranks_of_zero_1_and_2_that_were_exchanged(name: str, copy: Any, tmp_path: Path) -> None:
    """If their lists of parameters do not show it, the module's weights do; untouched files pass all checks."""
    run = copy(name)
    files = sorted((run / TAG).glob("*optim_states.pt"))
    assert bool(files) != VARIANTS[name].universal
    options: dict[str, Any] = {"no_tokenizer": True, "lora_alpha": 4 if VARIANTS[name].lora else None}
    reshard.convert(run, tmp_path / "untouched", **options)
    for first, second in combinations(files, 2):
        exchange(first, second)
        with pytest.raises(ReshardError) as caught:
            reshard.convert(run, tmp_path / "out", **options)
        assert {problem.message for problem in caught.value.problems} <= {
            "a file belongs to another rank",
            "a tensor is stored twice, with different values",
        }
        assert not (tmp_path / "out").exists()
        exchange(first, second)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("z2_round_robin", "optim_states"), ("z3_later", "optim_states"), ("z3_later", "model_states")],
)
def test_the_file_of_another_step_is_noticed(name: str, kind: str, copy: Any) -> None:
    run = copy(name)
    files = sorted((run / TAG).glob(f"*{kind}.pt"))
    shutil.copy(run / LATER / files[1].name, files[1])
    (problem,) = problems_of(run)
    assert problem.message == "a rank's file belongs to another run or iteration"
    assert (problem.file, problem.found) == (str(files[1]), "step 3")
    assert problem.expected == f"step 2, as in {files[0].name}"


def test_masters_of_another_step_than_the_module_are_noticed(copy: Any, tmp_path: Path) -> None:
    run = copy("z2_round_robin")
    for file in (run / LATER).glob("*optim_states.pt"):
        shutil.copy(file, run / TAG)
    done = command("convert", run, tmp_path / "out", "--no-tokenizer")
    assert done.code == 2 and "the module's weights equal the rounded fp32 masters" in done.err
    assert command("verify", run, DATA / "z2_round_robin").code == 2
    for file in run.glob("*/*optim_states.pt"):  # as the remedy says
        file.unlink()
    assert_holds(converted(run, tmp_path / "out"), load_file(DATA / "z2_round_robin" / "module.safetensors"))


def test_one_nan_is_as_good_as_another(copy: Any, tmp_path: Path) -> None:
    """A GPU rounds NaN to another NaN than a CPU."""
    run = copy("universal_z2")
    step = run / f"{TAG}_universal"
    master, model = step / "zero" / "model.norm.weight" / "fp32.pt", step / "mp_rank_00_model_states.pt"
    content = torch.load(master)
    content["param"].data[3] = float("nan")
    torch.save(content, master)
    with pytest.raises(ReshardError, match="with different values"):
        converted(run, tmp_path / "out")
    content = torch.load(model)
    content["module"]["model.norm.weight"].view(torch.int16)[3] = 0x7FFF
    torch.save(content, model)
    assert converted(run, tmp_path / "out")["model.norm.weight"].isnan().sum() == 1


def test_files_of_another_number_of_ranks_are_noticed(copy: Any) -> None:
    run = copy("z2")
    file = run / TAG / "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt"
    shutil.copy(DATA / "z2_lora" / TAG / "zero_pp_rank_1_mp_rank_00_optim_states.pt", file)
    (problem,) = problems_of(run)
    assert problem.message == "files of runs with different numbers of ranks"
    assert problem.file == str(file)


@pytest.mark.parametrize("name", ["z1_fp32", "z3_fp32"])
def test_partitions_that_do_not_make_up_the_parameters_are_refused(name: str, copy: Any) -> None:
    run = copy(name)
    for file in run.glob("*/*model_states.pt"):
        content = torch.load(file, weights_only=False)
        content["param_shapes"][-1]["model.norm.weight"] = torch.Size([160])
        torch.save(content, file)
    assert "do not make up" in problems_of(run)[0].message


def test_latest_that_names_a_folder_that_is_not_there_is_an_error(copy: Any) -> None:
    run = copy("z2")
    (run / "latest").write_text("global_step30")
    (problem,) = problems_of(run)
    assert problem.file == str(run / "global_step30")
    assert problem.found == TAG


def test_a_tracker_without_any_step_is_an_error(copy: Any) -> None:
    run = copy("z2")
    shutil.rmtree(run / TAG)
    (problem,) = problems_of(run)
    assert problem.message == "the step that `latest` names is missing"


def test_a_truncated_file_is_named(copy: Any) -> None:
    run = copy("z3")
    file = run / TAG / "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt"
    os.truncate(file, file.stat().st_size // 2)
    (problem,) = problems_of(run)
    assert problem.file == str(file)
    assert problem.message == "a file was cut short"


@pytest.mark.parametrize("name", ["z2", "z3", "universal_z3"])
def test_a_flipped_bit_in_the_masters_is_found_by_its_checksum(name: str, copy: Any, tmp_path: Path) -> None:
    run = copy(name)
    tensor = reshard.open(run).tensors["model.layers.1.self_attn.v_proj.weight"]
    storage = tensor.view.pieces[-1].source.storage
    content = bytearray(Path(storage.path).read_bytes())
    content[storage.offset + storage.nbytes // 2] ^= 4
    Path(storage.path).write_bytes(content)
    with pytest.raises(ReshardError, match="changed since they were written") as caught:
        reshard.convert(run, tmp_path / "out", no_tokenizer=True)
    assert caught.value.problems[0].file == storage.path
    assert not (tmp_path / "out").exists()


def test_tensor_parallel_files_are_refused_with_the_way_out(copy: Any) -> None:
    run = copy("z2")
    first = run / TAG / "mp_rank_00_model_states.pt"
    shutil.copy(first, first.with_name("mp_rank_01_model_states.pt"))
    (problem,) = problems_of(run)
    assert "tensor parallelism" in problem.message
    assert "ds_to_universal" in str(problem.remedy)


def test_a_universal_checkpoint_without_a_parameter_is_refused(copy: Any) -> None:
    run = copy("universal_z3")
    shutil.rmtree(run / f"{TAG}_universal" / "zero" / "model.norm.weight")
    (problem,) = problems_of(run)
    assert problem.tensor == "model.norm.weight"


def test_flat_parameters_without_model_states_have_no_shape(copy: Any) -> None:
    run = copy("universal_z3")
    for file in run.glob("*/*model_states.pt"):
        file.unlink()
    problems = problems_of(run)
    assert {problem.message for problem in problems} == {"the shape of a parameter is not recorded"}


def test_a_second_name_in_a_universal_checkpoint_has_the_masters_too(copy: Any) -> None:
    step = copy("universal_z2") / f"{TAG}_universal"
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    content = torch.load(step / "mp_rank_00_model_states.pt")
    for shapes in content["param_shapes"]:
        shapes.pop(head, None)
    content["shared_params"] = {head: embedding}
    content["module"][head] = content["module"][embedding]
    torch.save(content, step / "mp_rank_00_model_states.pt")
    shutil.rmtree(step / "zero" / head)
    tensors = reshard.open(step.parent).checkpoint.tensors
    assert tensors[head] == tensors[embedding] and tensors[head].dtype.name == "float32"


def test_padding_behind_each_parameter_is_skipped(tmp_path: Path) -> None:
    """That of `parameter_alignment` in DeepSpeed 0.19, in a vector of one rank."""
    shapes = {"first.weight": torch.Size([3]), "second.weight": torch.Size([2, 2])}
    torch.save({"module": {}, "param_shapes": [shapes]}, tmp_path / "mp_rank_00_model_states.pt")
    vector = torch.tensor([1.0, 2, 3, 0, 4, 5, 6, 7])
    state = {"single_partition_of_fp32_groups": [vector], "param_alignment_paddings": [[1, 0]]}
    torch.save({"optimizer_state_dict": state}, tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    tensors = reshard.open(tmp_path).checkpoint.tensors
    with closing(OpenFiles()) as files:
        read = Gatherer(files, None).read
        found = {name: read(each, 0, each.view.numel).view(np.float32) for name, each in tensors.items()}
    assert {name: [*each] for name, each in found.items()} == {
        "first.weight": [1, 2, 3],
        "second.weight": [4, 5, 6, 7],
    }


def test_two_files_of_one_rank_are_refused(copy: Any) -> None:
    run = copy("z2")
    file = run / TAG / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    shutil.copy(file, file.with_name(file.name.removeprefix("bf16_")))
    (problem,) = problems_of(run)
    assert problem.message == "two files belong to the same rank"


# --------------------------------------------------------------------------------------------- writing


def test_a_universal_checkpoint_holds_the_masters_of_its_source(tmp_path: Path) -> None:
    reshard.convert(DATA / "z3", tmp_path / "universal", to="deepspeed", no_tokenizer=True)
    reshard.convert(tmp_path / "universal", tmp_path / "back", no_tokenizer=True)
    wanted = {name: tensor.float() for name, tensor in load_file(DATA / "z3" / "fp32.safetensors").items()}
    assert_holds(tensors_of(tmp_path / "back"), wanted)


def test_a_universal_checkpoint_has_the_keys_of_a_genuine_one(tmp_path: Path) -> None:
    reshard.convert(DATA / "z2", tmp_path / "out", to="deepspeed", with_optimizer=True, no_tokenizer=True)
    ours, genuine = (folder / f"{TAG}_universal" for folder in (tmp_path / "out", DATA / "universal_z2"))
    assert (tmp_path / "out" / "latest_universal").read_text() == ours.name
    states = "mp_rank_00_model_states.pt"
    made, real = (torch.load(folder / states, weights_only=False) for folder in (ours, genuine))
    assert real.keys() - made.keys() <= {"checkpoint_parallel_dimensions"}
    for path in (genuine / "zero" / "model.norm.weight").iterdir():
        mine = torch.load(ours / "zero" / "model.norm.weight" / path.name)
        wanted = torch.load(path)
        if isinstance(wanted, dict):
            assert mine.keys() == wanted.keys()
            mine, wanted = mine["param"], wanted["param"]
        assert (mine.dtype, mine.shape) == (wanted.dtype, wanted.shape)


def test_states_that_the_source_lacks_take_up_no_space(tmp_path: Path) -> None:
    reshard.convert(DATA / "z0", tmp_path / "out", to="deepspeed", no_tokenizer=True)
    states = list(tmp_path.glob("out/*/zero/*/exp_avg*.pt"))
    assert len(states) == 2 * 21
    assert all(path.stat().st_size < 2000 for path in states)
    assert all(not torch.load(path)["param"].any() for path in states)
    assert reshard.open(tmp_path / "out").checkpoint.optimizer.states == {}


def test_masters_in_16_bits_are_refused(tmp_path: Path) -> None:
    done = command("convert", DATA / "z2", tmp_path / "out", "--to", "deepspeed", "--dtype", "bfloat16")
    assert done.code == 2
    assert "leave out --dtype" in done.err


# ------------------------------------------------------------------------------------ the real DeepSpeed


def _deepspeed(*words: object) -> None:
    done = subprocess.run(
        [python("deepspeed"), "-m", "tests.genuine.make_deepspeed", *map(str, words)],
        cwd=make_deepspeed.ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.slow
def test_the_real_deepspeed_writes_what_is_read(tmp_path: Path) -> None:
    names = ["z1", "z2_fp32", "universal_z2"]
    _deepspeed("make", tmp_path, *names)
    for name in names:
        ours = converted(tmp_path / name, tmp_path / f"{name}-hf")
        assert_holds(ours, load_file(tmp_path / name / "fp32.safetensors"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "ranks", "stage", "dtype"),
    [
        ("z2", 2, 1, "bfloat16"),
        ("z3_fp32", 2, 2, "float32"),
        ("z2", 2, 3, "bfloat16"),
        ("z1_fp32", 3, 3, "float32"),
        ("z0", 1, 2, "float32"),
        ("z0", 2, 3, "float32"),
    ],
)
def test_the_real_deepspeed_loads_what_is_written(
    source: str, ranks: int, stage: int, dtype: str, tmp_path: Path
) -> None:
    has_states = source != "z0"
    universal = tmp_path / "universal"
    reshard.convert(DATA / source, universal, to="deepspeed", with_optimizer=has_states, no_tokenizer=True)
    _deepspeed("load", universal, tmp_path / "out", ranks, stage, dtype)
    loaded = load_file(tmp_path / "out" / "fp32.safetensors")
    masters = "fp32" if has_states else "module"
    wanted = load_file(DATA / source / f"{masters}.safetensors")
    assert loaded.keys() == load_file(DATA / source / "module.safetensors").keys()
    assert_holds(loaded, wanted)
    if has_states:
        assert_holds(
            load_file(tmp_path / "out" / "exp_avg.safetensors"),
            load_file(DATA / source / "exp_avg.safetensors"),
        )
    assert_close(np.load(tmp_path / "out" / "logits.npy"), np.load(DATA / source / "logits.npy"), dtype)


def test_names_of_files_are_told_apart() -> None:
    assert step_files.OPTIMIZER_FILE.fullmatch("bf16_zero_pp_rank_10_mp_rank_00_optim_states.pt")
    assert step_files.OPTIMIZER_FILE.fullmatch("zero_pp_rank_1_mp_rank_00optim_states.pt")
    assert step_files.MODEL_FILE.fullmatch("layer_0_expert_1_mp_rank_00_model_states.pt") is None
