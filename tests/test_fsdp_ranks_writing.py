"""Files of FSDP's ranks that reshard writes: torch and verl load them, for any number of ranks."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import reshard
from reshard.base.errors import Problem, ReshardError
from reshard.containers.torchfiles.pickles import Opaque
from reshard.containers.torchfiles.read import read_torch_file
from reshard.oracle.transformers import transformers_logits
from reshard.transfer.source_files import Sources
from tests.commandline import reshard as command
from tests.environments import python
from tests.genuine import fsdp_runs as runs
from tests.genuine import make_fsdp_ranks as makers
from tests.genuine.ranks import on_ranks
from tests.judges import TOKENS, assert_agree, assert_same_tensors, tensors_of
from tests.test_fsdp_ranks import OTHERS, UNEVEN, edit

Models = Callable[..., Path]
ROOT = Path(__file__).parents[1]
ACTOR = makers.DATA / "verl" / "fsdp2" / "global_step_3" / "actor"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "uneven": ("llama", UNEVEN),
    "tied": ("llama", makers.TINY),
    "moe": ("qwen3_moe", {}),
    "deepseek": ("deepseek_v3", {"num_hidden_layers": 2}),
}
"""Shards of unequal sizes and empty ones, a weight with two names, fused experts, a buffer in every rank's file."""


def assert_torch_loads(source: Path, folder: Path, world: int, tmp_path: Path, device: str = "cuda") -> None:
    """Assert that torch loads `folder` as it would have saved the model in `source`, and computes the same."""
    logits = tmp_path / "logits"
    logits.mkdir()
    on_ranks(world, runs.load, source, folder, logits, device)
    assert_agree(np.load(logits / "logits.npy"), transformers_logits(source, TOKENS))


@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.core("tied-4")
def test_a_model_is_what_its_ranks_would_save(
    name: str, world: int, hf_model: Models, tmp_path: Path
) -> None:
    variant, options = MODELS[name]
    source = hf_model(variant, **options)
    reshard.convert(source, tmp_path / "ranks", to="fsdp-ranks", dp=world)
    assert_torch_loads(source, tmp_path / "ranks", world, tmp_path)
    reshard.convert(tmp_path / "ranks", tmp_path / "back")
    assert_same_tensors(tensors_of(tmp_path / "back"), tensors_of(source))


@pytest.mark.thorough
@pytest.mark.parametrize("through", ["megatron", "dcp", "deepspeed"])
def test_other_formats_become_files_of_ranks(through: str, hf_model: Models, tmp_path: Path) -> None:
    source = hf_model("qwen3_moe")
    reshard.convert(source, tmp_path / "there", to=through, tp=2 if through == "megatron" else 1)
    reshard.convert(tmp_path / "there", tmp_path / "ranks", to="fsdp-ranks", dp=3)
    assert_torch_loads(source, tmp_path / "ranks", 3, tmp_path)


@pytest.mark.parametrize("kind", ["fsdp2-hsdp", "fsdp2-tp", "fsdp1-mesh", "accelerate-1", "accelerate-local"])
@pytest.mark.thorough
def test_ranks_of_any_mesh_become_those_of_one_axis(kind: str, hf_model: Models, tmp_path: Path) -> None:
    """FSDP1 as well: its state dicts have the same tensors."""
    source = hf_model("llama", **makers.TINY)
    on_ranks(makers.WORLD, makers.one_kind, source, tmp_path / "run", 0, makers.KINDS[kind])
    reshard.convert(tmp_path / "run", tmp_path / "ranks", to="fsdp-ranks", dp=3, base=source)
    reshard.convert(tmp_path / "run", tmp_path / "hf", base=source)
    has_mesh = not kind.startswith("accelerate")
    assert_torch_loads(tmp_path / "hf", tmp_path / "ranks", 3, tmp_path, "cpu" if has_mesh else "cuda")


# --------------------------------------------------------------------------------------- the form of the pickle


def attributes(value: Any) -> Iterator[tuple[str, str]]:
    """The attributes of the mesh and the placement of a DTensor, as pairs of class and name, and their types."""
    if isinstance(value, dict):
        for each in value.values():
            yield from attributes(each)
    elif isinstance(value, Opaque):
        for name, each in value.state.items() if isinstance(value.state, dict) else ():
            yield f"{value.qualname}.{name}", type(each).__name__
            yield from attributes(each)
    elif isinstance(value, tuple):
        for each in value:
            yield from attributes(each)


def form_of(folder: Path) -> dict[str, str]:
    """The attributes of the first tensor in the file of rank 1."""
    (file,) = folder.glob("*rank_1.pt")
    first = next(iter(read_torch_file(file, Sources(file)).values()))
    return dict(attributes(first.args[3]))


@pytest.mark.parametrize("version", OTHERS)
def test_a_mesh_has_the_form_of_its_release_of_torch(version: str, tmp_path: Path) -> None:
    """Releases cannot load each other's: 2.6 has no module for the layout of a mesh, and 2.10 another class in it."""
    source, base = makers.DATA / "fsdp_ranks" / version / "fsdp2-hsdp", tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text('{"model_type": "mine", "architectures": ["Mine"]}')
    reshard.convert(source, tmp_path / "out", to="fsdp-ranks", dp=4, base=base, no_tokenizer=True)
    genuine, ours = form_of(source), form_of(tmp_path / "out")
    lists = {"torch.distributed.device_mesh.DeviceMesh._coordinate_on_dim"}
    assert {name: kind for name, kind in ours.items() if name in genuine and name not in lists} == {
        name: kind
        for name, kind in genuine.items()
        if not name.endswith("_hash") and name in ours and name not in lists
    } | {"torch.distributed.tensor._dtensor_spec.DTensorSpec._hash": "NoneType"}
    lost = {name.rpartition(".")[2] for name in genuine.keys() - ours.keys()}
    assert lost <= {"_hash"}  # which is computed again


@pytest.mark.slow
@pytest.mark.parametrize("version, environment", [("2.6.0", "torch-2.6"), ("2.15.0", "torch-2.15")])
def test_another_torch_loads_its_form(version: str, environment: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text('{"model_type": "mine", "architectures": ["Mine"]}')
    source = makers.DATA / "fsdp_ranks" / f"torch-{version}" / "fsdp2-hsdp"
    for world in (1, 5):
        out = tmp_path / str(world)
        reshard.convert(source, out, to="fsdp-ranks", dp=world, base=base, no_tokenizer=True)
        words = [python(environment), "-m", "tests.genuine.make_fsdp_ranks", "load", str(world), str(out)]
        subprocess.run(words, check=True, cwd=ROOT, timeout=300)


@pytest.fixture
def actor(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ACTOR, tmp_path / "actor"))


# --------------------------------------------------------------------------------------- the optimizer


def kept(folder: Path, source: Path, world: int, out: Path) -> dict[str, Any]:
    """The complete weights and states of the run in `folder`, as torch loads them."""
    on_ranks(world, runs.load_run, source, folder, out)
    return dict(torch.load(out, weights_only=False))


def test_parameters_have_the_order_in_which_the_optimizer_counts_them(tmp_path: Path) -> None:
    reshard.convert(ACTOR, tmp_path / "ranks", to="fsdp-ranks", dp=1, with_optimizer=True)
    files = ACTOR / "model_world_size_2_rank_0.pt", tmp_path / "ranks" / "model_world_size_1_rank_0.pt"
    theirs, ours = (list(read_torch_file(file, Sources())) for file in files)
    assert ours == theirs


@pytest.mark.core("4")
@pytest.mark.parametrize("world", [1, 3, 4])
def test_a_run_goes_on_with_other_ranks(world: int, tmp_path: Path) -> None:
    """Weights, states, steps, settings and the schedule are the same, bit for bit."""
    reshard.convert(ACTOR, tmp_path / "hf")
    reshard.convert(ACTOR, tmp_path / "ranks", to="fsdp-ranks", dp=world, with_optimizer=True)
    ours = kept(tmp_path / "ranks", tmp_path / "hf", world, tmp_path / "ours")
    assert_same_runs(ours, kept(ACTOR, tmp_path / "hf", 2, tmp_path / "source"))
    assert (tmp_path / "ranks/huggingface/tokenizer.json").is_file()
    config = (tmp_path / "ranks/fsdp_config.json").read_text()
    assert config == (ACTOR / "fsdp_config.json").read_text().replace(
        '"world_size": 2', f'"world_size": {world}'
    )


def test_names_of_wrappers_are_removed_from_the_optimizer_as_well(actor: Path, tmp_path: Path) -> None:
    def wrap(state: dict[str, Any]) -> None:
        for name in list(state):
            state[f"_orig_mod.{name}"] = state.pop(name)

    options = {"to": "fsdp-ranks", "dp": 3, "with_optimizer": True}
    reshard.convert(actor, tmp_path / "plain", **options)  # type: ignore[arg-type]
    for file in actor.glob("model*"):
        edit(file, wrap)
    reshard.convert(actor, tmp_path / "out", strip=("_orig_mod.",), **options)  # type: ignore[arg-type]
    for file in (tmp_path / "plain").glob("*.pt"):
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes(), file.name


def assert_same_runs(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert list(ours["weights"]) == list(theirs["weights"])
    assert_same_tensors(ours["weights"], theirs["weights"])
    assert len(ours["states"]) == len(theirs["states"]) > 0
    for number, held in theirs["states"].items():
        assert_same_tensors(ours["states"][number], held)
    assert ours["groups"] == theirs["groups"]
    assert ours["schedule"] == theirs["schedule"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tied", "moe"])
def test_verl_resumes_with_other_ranks(name: str, hf_model: Models, tmp_path: Path) -> None:
    """verl's own manager loads them, and the steps that follow are those of the run with two ranks."""
    variant, options = MODELS[name]
    source = hf_model(variant, **options)

    def run(*words: object) -> None:
        full = [python("verl"), "-m", "tests.genuine.fsdp_runs", *map(str, words)]
        subprocess.run(full, check=True, cwd=ROOT, timeout=300)

    run("begin", 2, source, tmp_path)
    theirs = torch.load(tmp_path / "state.pt", weights_only=False)
    folder = tmp_path
    for world in (4, 3, 1):  # each from the one before
        reshard.convert(folder, tmp_path / str(world), to="fsdp-ranks", dp=world, with_optimizer=True)
        folder = tmp_path / str(world)
        run("resume", world, source, folder, tmp_path / "ours.pt")
        ours = torch.load(tmp_path / "ours.pt", weights_only=False)
        assert_same_runs(ours, theirs)
        assert np.allclose(ours["losses"], theirs["losses"], rtol=1e-5)
        assert theirs["losses"][1] < theirs["losses"][0]
        for key, tensor in theirs["after"].items():
            assert torch.allclose(ours["after"][key], tensor, atol=1e-5), key


def test_the_states_of_ranks_become_those_of_other_formats(tmp_path: Path) -> None:
    """By name, as torch numbers the parameters of the model."""
    reshard.convert(ACTOR, tmp_path / "hf")
    theirs = kept(ACTOR, tmp_path / "hf", 2, tmp_path / "source")
    reshard.convert(ACTOR, tmp_path / "dcp", to="dcp", with_optimizer=True)
    reshard.convert(tmp_path / "dcp", tmp_path / "zero", to="deepspeed", with_optimizer=True)
    names = [name for name in theirs["weights"] if name != "lm_head.weight"]
    for number, name in enumerate(names):
        (file,) = (tmp_path / "zero").glob(f"*/zero/{name}/exp_avg.pt")
        found = torch.load(file, weights_only=False)
        assert torch.equal(found["param"].flatten(), theirs["states"][number]["exp_avg"].flatten()), name


@pytest.mark.slow
def test_a_run_of_an_older_transformers_finds_its_names(hf_model: Models, tmp_path: Path) -> None:
    """transformers 4 has a module for each expert, and so have its state dicts."""
    source = tmp_path / "hf"
    reshard.convert(hf_model("qwen3_moe"), source, dtype="float32")

    def run(*words: object) -> None:
        full = [python("transformers-4.57"), "-m", "tests.genuine.fsdp_runs", *map(str, words)]
        subprocess.run(full, check=True, cwd=ROOT, timeout=300)

    run("save", 2, source, tmp_path / "run")
    reshard.convert(tmp_path / "run", tmp_path / "ranks", to="fsdp-ranks", dp=3, base=source)
    (tmp_path / "logits").mkdir()
    run("load", 3, source, tmp_path / "ranks", tmp_path / "logits")
    assert_agree(np.load(tmp_path / "logits/logits.npy"), transformers_logits(source, TOKENS))


# --------------------------------------------------------------------------------------- refusals


def refused(source: Path, out: Path, **options: Any) -> dict[str, Problem]:
    with pytest.raises(ReshardError) as raised:
        reshard.convert(source, out, **{"to": "fsdp-ranks", "dp": 3, "with_optimizer": True, **options})
    assert not out.exists()
    return {problem.code: problem for problem in raised.value.problems}


def test_the_number_of_ranks_is_needed(tmp_path: Path) -> None:
    told = command("convert", ACTOR, tmp_path / "out", "--to", "fsdp-ranks")
    assert told.code == 2 and "pass --dp with the number of ranks" in told.err
    assert "ranks-not-for-format" in refused(ACTOR, tmp_path / "out", to="dcp")
    assert "format-without-layout" in refused(ACTOR, tmp_path / "out", tp=2)
    assert "format-without-layout" in refused(ACTOR, tmp_path / "out", pp=2, ep=2)


def test_states_without_an_order_are_refused(hf_model: Models, tmp_path: Path) -> None:
    assert "optimizer-states-missing" in refused(hf_model("llama"), tmp_path / "out")
    reshard.convert(ACTOR, tmp_path / "dcp", to="dcp", with_optimizer=True)
    assert "fsdp-order-unknown" in refused(tmp_path / "dcp", tmp_path / "out")


def test_an_optimizer_of_fsdp1_is_refused(tmp_path: Path) -> None:
    problem = refused(makers.DATA / "verl" / "fsdp1", tmp_path / "out")["optimizer-states-missing"]
    assert "FSDP1 has states of flat parameters" in problem.remedy


def groups_apart(state: dict[str, Any]) -> None:
    first = state["param_groups"][0]
    state["param_groups"] = [
        {**first, "params": first["params"][:3]},
        {**first, "params": first["params"][3:]},
    ]


def other_kind(state: dict[str, Any]) -> None:
    state["state"][0]["max_exp_avg_sq"] = state["state"][0]["exp_avg_sq"]


def of_fewer(state: dict[str, Any]) -> None:
    state["param_groups"][0]["params"].pop()


def with_objects(state: dict[str, Any]) -> None:
    state["param_groups"][0]["lr"] = torch.tensor(0.1)


UNUSABLE: dict[Callable[[dict[str, Any]], None], str] = {
    groups_apart: "2 parameter groups",
    other_kind: "not those of Adam",
    of_fewer: "they are of 19 parameters, and the model has 20",
    with_objects: "the settings contain objects",
    dict.clear: "has another form",
}


@pytest.mark.parametrize("change", UNUSABLE, ids=lambda change: change.__name__)
def test_an_optimizer_that_cannot_be_used_does_not_keep_the_weights_back(
    change: Callable[[dict[str, Any]], None], actor: Path, tmp_path: Path
) -> None:
    for file in actor.glob("optim*"):
        edit(file, change)
    problem = refused(actor, tmp_path / "out")["optimizer-states-missing"]
    assert UNUSABLE[change] in problem.remedy
    reshard.convert(actor, tmp_path / "out", to="fsdp-ranks", dp=3)
    assert not [*(tmp_path / "out").glob("optim*")]


def test_the_files_of_an_optimizer_are_checked_like_those_of_the_model(actor: Path, tmp_path: Path) -> None:
    first, second = sorted(actor.glob("optim*"))
    content = second.read_bytes()
    second.unlink()
    assert "fsdp-rank-missing" in refused(actor, tmp_path / "out")
    shutil.copy(first, second)
    assert "fsdp-rank-copied" in refused(actor, tmp_path / "out")
    second.write_bytes(content[:-100])
    assert refused(actor, tmp_path / "out")
    second.write_bytes(content)
    edit(first, lambda state: state["state"][0].update(state["state"][1]))
    edit(second, lambda state: state["state"][0].update(state["state"][1]))
    assert "optimizer-state-shape-differs" in refused(actor, tmp_path / "out")


def test_a_schedule_of_objects_is_refused(actor: Path, tmp_path: Path) -> None:
    for file in actor.glob("extra_state*"):
        edit(file, lambda state: state["lr_scheduler"].update(base_lrs=[torch.tensor(1.0)]))
    assert "fsdp-schedule-unknown" in refused(actor, tmp_path / "out")


def test_inspect_says_how_to_change_the_number_of_ranks() -> None:
    seen = command("inspect", ACTOR, "--json").json
    line = f"reshard convert {ACTOR} OUTPUT --to fsdp-ranks --dp N --with-optimizer"
    assert any(line in note for note in seen["notes"])
