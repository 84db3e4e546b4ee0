"""Checkpoints of Megatron-FSDP, read and written.

The judge is megatron-core's own Megatron-FSDP, which trains on gloo (`tests/genuine/megatron_fsdp.py`): it loads what
reshard writes strictly, and goes on as if it had never stopped. `tests/data/megatron_fsdp` has what it saved, with the
weights, states and logits of the run (`tests/genuine/make_megatron_fsdp.py`).
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("megatron.core")

import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import reshard
from reshard.algebra.layout import Layout
from reshard.base.errors import ReshardError
from reshard.containers.dcp_metadata import DcpMetadata, read_metadata, write_metadata
from reshard.oracle.megatron.load_weights import load_weights
from reshard.oracle.transformers import transformers_logits
from reshard.transfer.source_files import Sources
from tests import commandline
from tests.bad_input.damage import cut, refusal
from tests.environments import python
from tests.genuine.make_megatron_fsdp import SMALL, TOKENS, VARIANTS
from tests.genuine.mcore import models
from tests.genuine.mcore.checkpoint_io import SaveOptions
from tests.genuine.mcore.models import build_model, one_expert_at_a_time
from tests.genuine.mcore.ranks import run_ranks
from tests.genuine.megatron import DEEPSEEK_V3, QWEN2_MOE, QWEN2_TIED, QWEN3, QWEN3_MOE
from tests.genuine.megatron_fsdp import REPOSITORY, Result, Run, train
from tests.genuine.train_megatron import train_and_save

DATA = Path(__file__).parent / "data" / "megatron_fsdp"
STEP = "iter_0000002"
ROWS = SMALL["vocab_size"]
"""Rows of the vocabulary without its padding, which a Hugging Face model does not have."""


def convert(source: Path, out: Path, **options: Any) -> Path:
    reshard.convert(source, out, no_tokenizer=True, **options)
    return out


def stored(folder: Path) -> dict[str, Any]:
    """Everything in a folder of torch's DCP, as torch reads it."""
    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else io.BytesIO()
        for key, entry in metadata.items()
    }
    load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    return state


# ------------------------------------------------------------------------------------------------- reading


def plain(args: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The weights that megatron-core has in a GPTModel, without Megatron-FSDP, after it loaded a torch_dist folder."""
    models.initialize(Layout(), seed=3)
    (model,) = build_model(one_expert_at_a_time(args), Layout(), spec="local", dtype=torch.float32)
    mismatch = load_weights([model], folder)
    assert not mismatch.missing and not mismatch.unexpected
    return {
        key: value.numpy() for key, value in model.state_dict().items() if isinstance(value, torch.Tensor)
    }


def of_run(name: str) -> dict[str, Any]:
    """The weights that a run had in the end, under the names of the local spec, and without tensor parallelism."""
    found = {}
    for entry, value in np.load(DATA / name / "result.npz").items():
        if not entry.startswith("weights/"):
            continue
        key = entry.removeprefix("weights/module.")
        key = key.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
        key = re.sub(r"experts\.(linear_fc\d\.weight)(\d+)", r"experts.local_experts.\2.\1", key)
        # A rank of tensor parallelism has its rows of the gate, then those of the up half.
        parts = np.split(value, 2 * VARIANTS[name].layout.tp) if "linear_fc1" in key else [value]
        found[key] = np.concatenate([*parts[::2], *parts[1::2]])
    return found


@pytest.mark.core("qwen3-tp2", "qwen3-moe-ep2")
@pytest.mark.parametrize("name", VARIANTS)
def test_weights_are_those_of_the_run(name: str, tmp_path: Path) -> None:
    """Converted to torch_dist, which megatron-core loads strictly."""
    convert(DATA / name, tmp_path / "core", to="megatron", transformer_impl="local")
    ours = run_ranks(1, plain, VARIANTS[name].args, tmp_path / "core" / STEP)[0]
    theirs = of_run(name)
    assert ours.keys() == theirs.keys() and len(theirs) > 15
    for key, value in theirs.items():
        np.testing.assert_array_equal(ours[key], value, key)


@pytest.mark.core("qwen2-tied")
@pytest.mark.parametrize("name", [name for name, run in VARIANTS.items() if run.layout.tp == 1])
def test_transformers_computes_what_the_run_computed(name: str, tmp_path: Path) -> None:
    """Megatron-FSDP computes in bfloat16, and transformers here in float32."""
    convert(DATA / name, tmp_path / "hf")
    logits = transformers_logits(tmp_path / "hf", TOKENS[:2, :-1])
    theirs = np.load(DATA / name / "result.npz")["logits"][..., :ROWS]
    assert np.abs(logits - theirs).max() < 0.02 < np.abs(theirs).max() / 10
    assert commandline.reshard("verify", DATA / name, tmp_path / "hf", "--proof").code == 0


def test_what_is_said_of_it() -> None:
    checkpoint = reshard.open(DATA / "qwen3-tp2").checkpoint
    assert (checkpoint.format, checkpoint.variant) == ("megatron-fsdp", "fsdp_dtensor")
    assert checkpoint.iteration == 2 and checkpoint.layout.tp == 2 and checkpoint.dtypes == {"float32": 19}
    assert any("--dtype bfloat16" in note for note in checkpoint.notes)


def test_states_reach_torch_dist(tmp_path: Path) -> None:
    """The moments of all layers, the step, the groups and the schedule."""
    convert(DATA / "qwen3", tmp_path / "core", to="megatron", with_optimizer=True)
    ours, theirs = stored(tmp_path / "core" / STEP), np.load(DATA / "qwen3" / "result.npz")
    for module in ("self_attention.linear_qkv.weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"):
        for kind in ("exp_avg", "exp_avg_sq"):
            names = [f"{kind}/module.module.module.decoder.layers.{layer}.{module}" for layer in range(2)]
            found = ours[f"optimizer.state.{kind}.decoder.layers.{module}"].numpy()
            np.testing.assert_array_equal(found, np.stack([theirs[name] for name in names]))
    weights = ours["optimizer.state.param.output_layer.weight"].numpy()
    np.testing.assert_array_equal(weights, theirs["weights/module.output_layer.weight"])
    common = torch.load(tmp_path / "core" / STEP / "common.pt", weights_only=False)
    groups = common["optimizer"]["optimizer"]["param_groups"]
    assert [(group["wd_mult"], group["step"], group["lr"]) for group in groups] == [
        (1.0, 2, 1e-2),
        (0.0, 2, 1e-2),
    ]
    assert common["opt_param_scheduler"]["max_lr"] == 1e-2


def without(folder: Path, lost: Callable[[str], bool]) -> DcpMetadata:
    """Rewrite `.metadata` without some keys, and return it."""
    metadata = read_metadata(folder / ".metadata", Sources())
    for entries in (metadata.tensors, metadata.objects):
        for key in [key for key in entries if lost(key)]:
            del entries[key]  # type: ignore[attr-defined]
    rewrite(folder, metadata)
    return metadata


def rewrite(folder: Path, metadata: DcpMetadata) -> None:
    for entry in metadata.tensors.values():
        entry.chunks = [chunk._replace(file=Path(chunk.file).name) for chunk in entry.chunks]
    for key, chunk in metadata.objects.items():
        metadata.objects[key] = chunk._replace(file=Path(chunk.file).name)
    (folder / ".metadata").write_bytes(write_metadata(metadata))


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(DATA / name, tmp_path / "src"))


def test_megatron_bridge_saves_no_arguments(copy: Callable[[str], Path], tmp_path: Path) -> None:
    source = copy("qwen3")
    convert(source, tmp_path / "hf")
    without(source / STEP, lambda key: key == "args")
    assert reshard.open(source).checkpoint.format == "megatron-fsdp"
    convert(source, tmp_path / "again", base=tmp_path / "hf")
    assert reshard.verify(tmp_path / "hf", tmp_path / "again").equal


def test_states_without_groups_are_left_out(copy: Callable[[str], Path]) -> None:
    source = copy("qwen3")
    without(source / STEP, lambda key: "param_to_group_meta" in key)
    checkpoint = reshard.open(source).checkpoint
    assert checkpoint.optimizer.adam is None
    assert any("no parameter groups that count their steps" in note for note in checkpoint.notes)
    words = (
        "convert",
        source,
        source.parent / "dst",
        "--to",
        "megatron",
        "--with-optimizer",
        "--no-tokenizer",
    )
    problem = refusal(*words)
    assert problem["code"] == "optimizer-states-missing"


# --------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("share", [0, 0.5, 0.999])
@pytest.mark.parametrize("file", ["__0_0.distcp", "__1_0.distcp", ".metadata"])
def test_a_truncated_file(copy: Callable[[str], Path], file: str, share: float) -> None:
    path = cut(copy("qwen3") / STEP / file, share)
    problem = refusal("convert", path.parents[1], path.parents[2] / "dst", "--no-tokenizer")
    assert problem["file"] == str(path) and "copy" in problem["remedy"]


def test_a_missing_file(copy: Callable[[str], Path]) -> None:
    source = copy("qwen3")
    (source / STEP / "__1_0.distcp").unlink()
    problem = refusal("convert", source, source.parent / "dst", "--no-tokenizer")
    assert problem["code"] == "dcp-file-missing" and "__1_0.distcp" in problem["file"]


def test_a_tensor_is_missing(tmp_path: Path) -> None:
    source = convert(DATA / "qwen3", tmp_path / "src", to="megatron-fsdp")
    without(
        source / STEP, lambda key: key.startswith("model.") and key.endswith("layers.1.mlp.linear_fc2.weight")
    )
    problem = refusal("convert", source, source.parent / "dst", "--no-tokenizer")
    assert problem["code"] == "tensor-missing" and "layers.1.mlp" in problem["tensor"]


@pytest.mark.parametrize("half", ["_w", "_v"])
def test_half_of_a_swiglu_is_missing(copy: Callable[[str], Path], half: str) -> None:
    source = copy("qwen3")
    without(source / STEP, lambda key: key == f"model.module.decoder.layers.1.mlp.linear_fc1.weight{half}")
    problem = refusal("convert", source, source.parent / "dst", "--no-tokenizer")
    assert problem["code"] == "torch-dist-chunks-missing" and "layers.1.mlp.linear_fc1" in problem["tensor"]


def test_a_chunk_is_missing(copy: Callable[[str], Path]) -> None:
    source = copy("qwen3-tp2")
    metadata = read_metadata(source / STEP / ".metadata", Sources())
    del metadata.tensors["model.module.output_layer.weight"].chunks[1]
    rewrite(source / STEP, metadata)
    problem = refusal("convert", source, source.parent / "dst", "--no-tokenizer")
    assert problem["code"] == "torch-dist-chunks-missing" and problem["tensor"] == "output_layer.weight"


def test_two_names_of_one_parameter_with_different_values(copy: Callable[[str], Path]) -> None:
    source = copy("qwen3")
    metadata = read_metadata(source / STEP / ".metadata", Sources())
    prefix = "model.module.decoder.layers.0"
    other = metadata.tensors[f"{prefix}.pre_mlp_layernorm.weight"]
    metadata.tensors[f"{prefix}.self_attention.linear_qkv.layer_norm_weight"] = other
    rewrite(source / STEP, metadata)
    assert refusal("inspect", source)["code"] == "megatron-fsdp-names-clash"


# --------------------------------------------------------------------------------------------- writing


@pytest.mark.parametrize("name", VARIANTS)
def test_a_run_finds_every_key_that_it_would_save(name: str, tmp_path: Path) -> None:
    """With the same values. Random number states, which belong to ranks, are not written."""
    options = {"with_optimizer": True} if VARIANTS[name].save_optimizer else {}
    convert(DATA / name, tmp_path / "ours", to="megatron-fsdp", **options)
    ours, theirs = stored(tmp_path / "ours" / STEP), stored(DATA / name / STEP)
    wanted = {key for key in theirs if not key.startswith("rng_state")}
    assert len(wanted) > 15 and not wanted - ours.keys()
    for key in wanted - {"args"}:
        same = torch.equal if isinstance(theirs[key], torch.Tensor) else object.__eq__
        assert same(ours[key], theirs[key]) is True or ours[key] == theirs[key], key
    assert ours["args"].ckpt_format == "fsdp_dtensor" and ours["args"].bf16


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """Each tensor has all names that a run may ask for, and is stored once."""
    ours = convert(DATA / "qwen3", tmp_path / "ours", to="megatron-fsdp", with_optimizer=True)
    assert reshard.verify(DATA / "qwen3", ours).equal
    once, again = (reshard.open(each).checkpoint for each in (DATA / "qwen3", ours))
    first, second = once.optimizer.adam, again.optimizer.adam
    assert first and second and first.step == second.step == 2
    assert first.settings == second.settings != {}
    assert (
        once.tensors.keys() == again.tensors.keys()
        and once.optimizer.states.keys() == again.optimizer.states.keys()
    )
    written, layer = (
        read_metadata(ours / STEP / ".metadata", Sources()).tensors,
        "model.module.decoder.layers.0",
    )
    local = written[f"{layer}.input_layernorm.weight"]
    assert local == written[f"{layer}.self_attention.linear_qkv.layer_norm_weight"] and len(local.chunks) == 1
    assert commandline.reshard("verify", DATA / "qwen3", ours, "--proof").code == 0


@pytest.mark.parametrize("variant", ["mimo", "deepseek_v3_mtp"])
def test_multi_token_prediction_is_read_under_both_of_its_names(
    variant: str, hf_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Also where Transformer Engine fuses a norm of that layer."""
    ours = convert(hf_model(variant), tmp_path / "ours", to="megatron-fsdp")
    assert reshard.verify(hf_model(variant), ours).equal


@pytest.mark.thorough
def test_the_masters_of_a_run_become_the_weights(genuine: Callable[..., Any], tmp_path: Path) -> None:
    """Megatron-FSDP has no other weights."""
    source = genuine("qwen2-fully-reshardable")
    convert(source.iteration(), tmp_path / "ours", to="megatron-fsdp", with_optimizer=True)
    ours, theirs = stored(tmp_path / "ours" / STEP), stored(source.iteration())
    for layer in range(4):
        module = "mlp.linear_fc2.weight"
        found = ours[f"model.module.decoder.layers.{layer}.{module}"]
        assert torch.equal(found, theirs[f"optimizer.state.param.decoder.layers.{module}"][layer])
        assert not torch.equal(found, theirs[f"decoder.layers.{module}"][layer].float())


def test_only_plain_settings_are_written(tmp_path: Path) -> None:
    """Megatron-LM's `common.pt` can have anything; an object of Megatron-FSDP has a name, and is loaded by torch."""
    core = convert(DATA / "qwen3", tmp_path / "core", to="megatron", with_optimizer=True) / STEP / "common.pt"
    common = torch.load(core, weights_only=False)
    common["opt_param_scheduler"] |= {("a", "tuple"): 1, "a tensor": torch.ones(2)}
    common["optimizer"]["optimizer"]["param_groups"][0] |= {0: 1, "capturable": torch.ones(2)}
    torch.save(common, core)
    ours = stored(convert(core.parents[1], tmp_path / "ours", to="megatron-fsdp", with_optimizer=True) / STEP)
    assert {"max_lr", "num_steps"} <= {
        key.rpartition(".")[2] for key in ours if key.startswith("opt_param_sch")
    }
    assert "opt_param_scheduler.a tensor" not in ours
    group = "optimizer.param_to_group_meta.module.module.module.output_layer.weight"
    assert ours[f"{group}.lr"] == 1e-2 and ours[f"{group}.capturable"] is False


@pytest.mark.parametrize(
    ("model", "flags", "code"),
    [
        ("qwen3", ["--pp", "2"], "megatron-fsdp-without-stages"),
        ("qwen3", ["--dtype", "bfloat16"], "format-dtype-fixed"),
        ("qwen3_next", [], "megatron-fsdp-model-unsupported"),
    ],
)
def test_what_is_not_written(
    hf_model: Callable[..., Path], model: str, flags: list[str], code: str, tmp_path: Path
) -> None:
    words = ("convert", hf_model(model), tmp_path / "dst", "--to", "megatron-fsdp", "--no-tokenizer", *flags)
    assert refusal(*words)["code"] == code


def test_flags_to_load_it(hf_model: Callable[..., Path], tmp_path: Path) -> None:
    done = commandline.reshard("convert", hf_model("qwen3"), tmp_path / "out", "--to", "megatron-fsdp")
    assert done.code == 0
    for flag in ("--use-megatron-fsdp", "--ckpt-format fsdp_dtensor", "--no-load-optim", "--qk-layernorm"):
        assert flag in done.err
    assert (tmp_path / "out" / "release" / ".metadata").is_file()


# ---------------------------------------------------------------------------------- Megatron-FSDP goes on

MORE_TOKENS = np.random.default_rng(0).integers(0, 250, (8, 13))
GROUPED = {"moe_grouped_gemm": True}
RUNS = {
    "dense": Run(QWEN3, MORE_TOKENS),
    "one rank": Run(QWEN3, MORE_TOKENS, layout=Layout()),
    "tied head": Run(QWEN2_TIED, MORE_TOKENS),
    "optimizer states alone are sharded": Run(QWEN3, MORE_TOKENS, strategy="optim"),
    "tensor parallelism": Run(QWEN3, MORE_TOKENS, layout=Layout(tp=2, dp=2)),
    "experts": Run(QWEN3_MOE, MORE_TOKENS),
    "experts on ranks of their own": Run(QWEN3_MOE, MORE_TOKENS, layout=Layout(ep=2, dp=2)),
    "shared experts": Run(QWEN2_MOE, MORE_TOKENS),
    "latent attention and MTP": Run(DEEPSEEK_V3, MORE_TOKENS),
    "Transformer Engine": Run(QWEN3, MORE_TOKENS, spec="te"),
    "grouped experts": Run({**QWEN3_MOE, **GROUPED}, MORE_TOKENS, layout=Layout(ep=2), spec="te"),
}


def assert_equal(ours: dict[str, Any], theirs: dict[str, Any], rows: int | None = None) -> None:
    assert ours.keys() == theirs.keys() and theirs
    for key, value in theirs.items():
        is_table = key.endswith(("word_embeddings.weight", "output_layer.weight"))
        most = rows if is_table else None
        np.testing.assert_array_equal(ours[key][:most], value[:most], key)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Result, Result]]:
    """What a run saved after two steps, what it had then, and what it has after the next two."""

    @cache
    def get(name: str) -> tuple[Path, Result, Result]:
        out = tmp_path_factory.mktemp("run")
        half = train(replace(RUNS[name], out=out))
        go_on = replace(RUNS[name], initial=out / STEP, resume=True, iteration=2)
        return out, half, train(go_on)

    return get


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("through", ["megatron-fsdp", "megatron"])
def test_a_run_goes_on_as_if_it_had_never_stopped(
    name: str, through: str, runs: Callable[[str], tuple[Path, Result, Result]], tmp_path: Path
) -> None:
    """Everything is loaded strictly. After two more steps, losses, weights, moments and groups are the same."""
    source, _, later = runs(name)
    sizes = {"tp": RUNS[name].layout.tp, "ep": RUNS[name].layout.ep}
    if through == "megatron":
        source = convert(source, tmp_path / "core", to="megatron", with_optimizer=True, **sizes)
    convert(source, tmp_path / "ours", to="megatron-fsdp", with_optimizer=True, **sizes)
    ours = train(replace(RUNS[name], initial=tmp_path / "ours" / STEP, resume=True, iteration=2))
    assert ours.losses == later.losses and ours.groups == later.groups
    assert_equal(ours.weights, later.weights)
    assert ours.states.keys() == later.states.keys()
    for parameter, states in later.states.items():
        assert_equal(ours.states[parameter], states)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "experts on ranks of their own", "tied head", "grouped experts"])
def test_a_run_starts_from_a_hugging_face_model(
    name: str, runs: Callable[[str], tuple[Path, Result, Result]], tmp_path: Path
) -> None:
    source, half, _ = runs(name)
    convert(source, tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "ours", to="megatron-fsdp")
    loaded = train(replace(RUNS[name], initial=tmp_path / "ours" / "release", steps=0))
    assert_equal(loaded.weights, half.weights, rows=250)
    np.testing.assert_array_equal(loaded.logits[..., :250], half.logits[..., :250])


@pytest.mark.slow
def test_training_moves_from_and_to_the_distributed_optimizer(tmp_path: Path) -> None:
    """Both optimizers do the same, up to the order of their sums."""

    def distributed(out: Path, **options: Any) -> Any:
        return train_and_save(
            QWEN3, out, MORE_TOKENS, layout=Layout(dp=2), lr=1e-2, distributed_optimizer=True, **options
        )

    save = SaveOptions(optimizer_sharding="fully_reshardable")
    half, whole = (
        distributed(tmp_path / "half", save=save),
        distributed(tmp_path / "whole", steps=4, save=save),
    )
    convert(half.folder, tmp_path / "fsdp", to="megatron-fsdp", with_optimizer=True)
    run = replace(RUNS["dense"], initial=tmp_path / "fsdp" / STEP, resume=True, iteration=2)
    ours = train(replace(run, out=tmp_path / "later"))
    assert ours.losses == pytest.approx(whole.losses[2:], rel=1e-3)
    assert ours.losses != pytest.approx(train(replace(run, resume=False)).losses, rel=1e-4)
    convert(
        tmp_path / "later", tmp_path / "back", to="megatron", with_optimizer=True, transformer_impl="local"
    )
    back = distributed(
        tmp_path / "end", checkpoint=tmp_path / "back" / "iter_0000004", resume=True, iteration=6, save=()
    )
    assert back.losses == pytest.approx(distributed(tmp_path / "six", steps=6, save=()).losses[4:], rel=2e-3)


@pytest.mark.slow
def test_a_strict_load_notices_a_missing_tensor(
    runs: Callable[[str], tuple[Path, Result, Result]], tmp_path: Path
) -> None:
    """Proves that loading means something."""
    source, _, _ = runs("dense")
    ours = convert(source, tmp_path / "ours", to="megatron-fsdp")
    without(ours / STEP, lambda key: key.endswith("layers.1.input_layernorm.weight"))
    with pytest.raises(RuntimeError, match=r"layers\.1\.input_layernorm\.weight"):
        train(replace(RUNS["dense"], initial=ours / STEP, steps=0))


@pytest.mark.slow
def test_parts_that_follow_the_ranks_are_refused(tmp_path: Path) -> None:
    """Megatron-FSDP separates the gate of a SwiGLU alone: with another gate, tensor parallelism mixes the halves."""
    args = {**QWEN3, **SMALL, "swiglu": False, "quick_geglu": True}
    train(Run(args, TOKENS, out=tmp_path / "run", layout=Layout(tp=2), save_optimizer=False))
    with pytest.raises(ReshardError, match="depends on its tensor-parallel ranks"):
        reshard.convert(tmp_path / "run", tmp_path / "hf", no_tokenizer=True)
    train(Run(args, TOKENS, out=tmp_path / "alone", layout=Layout(dp=2), save_optimizer=False))
    assert reshard.open(tmp_path / "alone").checkpoint.format == "megatron-fsdp"


@pytest.mark.slow
def test_fused_delta_nets_are_refused(hf_model: Callable[..., Path], tmp_path: Path) -> None:
    """mcore-bridge fuses them in another order, under the same name."""
    convert(hf_model("qwen3_next"), tmp_path / "core", to="megatron")
    args = dict(reshard.open(tmp_path / "core").checkpoint.description.args)
    train(Run(args, TOKENS, out=tmp_path / "run", steps=1, save_optimizer=False))
    problem = refusal("convert", tmp_path / "run", tmp_path / "dst", "--no-tokenizer")
    assert problem["code"] == "megatron-fsdp-delta-net-fused"


# ------------------------------------------------------------------------------ the package by itself


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3", "qwen3_tied"])
def test_the_package_alone_saves_and_loads_a_transformers_model(
    hf_model: Callable[..., Path], model: str, tmp_path: Path
) -> None:
    """As a folder of torch's DCP, whose names it puts below `module.`."""

    def alone(*paths: Path) -> None:
        command = [python("megatron-fsdp"), "-m", "tests.genuine.megatron_fsdp_alone", *paths]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY)]),
        }
        done = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    first, second = (hf_model(model, dtype="bfloat16", seed=seed) for seed in (0, 1))
    alone(first, tmp_path / "saved")
    assert reshard.open(tmp_path / "saved").checkpoint.variant == "names below model.module."
    convert(tmp_path / "saved", tmp_path / "hf", base=first, dtype="bfloat16")
    assert reshard.verify(first, tmp_path / "hf").equal
    convert(second, tmp_path / "dcp", to="dcp")
    alone(first, tmp_path / "loaded", tmp_path / "dcp")
    convert(tmp_path / "loaded", tmp_path / "again", base=second, dtype="bfloat16")
    assert reshard.verify(second, tmp_path / "again").equal
