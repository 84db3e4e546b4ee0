"""An opened checkpoint as a mapping: the tensors that `convert` would write, read one by one and in slices."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import reshard
from tests.judges import assert_same_tensors, tensors_of

DATA = Path(__file__).parent / "data"
LORA, PEERS = DATA / "megatron_lora", DATA / "peers"

GENUINE: dict[str, dict[str, Any]] = {
    "deepspeed/z1_fp16": {},
    "deepspeed/z2_round_robin": {},
    "deepspeed/z3": {},
    "deepspeed/z2_moe": {},
    "deepspeed/z3_lora": {"lora_alpha": 16},
    "deepspeed/universal_z3": {},
    "internlm/internlm1-isp": {},
    "internlm/internlm2-chunks": {},
    "internlm/internlm2-tp2pp2": {},
    "internlm/moe-tp2": {},
    "megatron_lora/swift-tp2": {"base": LORA / "base-llama"},
    "megatron_lora/bridge-tp2": {"base": LORA / "base-llama", "merge": True},
    "peers/bridge/qwen3_vl_moe": {"base": PEERS / "bridge" / "base-qwen3_vl_moe"},
    "peers/mcore-bridge/minimax_m2": {"base": PEERS / "mcore-bridge" / "base-minimax_m2"},
    "peers/swift/qwen3": {},
    "torchtitan/qwen3_moe": {},
    "verl/fsdp1": {},
    "verl/fsdp2-lora": {},
}
"""Checkpoints of the engines themselves, and the options for reading them."""


def read(path: Path, **options: Any) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, read through the mapping."""
    return {name: tensor.torch() for name, tensor in reshard.open(path, **options).items()}


def written(path: Path, out: Path, **options: Any) -> dict[str, torch.Tensor]:
    """Every tensor of the folder that `convert` makes of a checkpoint, read by the safetensors library."""
    reshard.convert(path, out, no_tokenizer=True, **options)
    return tensors_of(out)


# ------------------------------------------------------------------------------------------- the same values


@pytest.mark.parametrize("name", GENUINE)
def test_any_checkpoint_maps_to_what_convert_writes(name: str, tmp_path: Path) -> None:
    options = GENUINE[name]
    assert_same_tensors(read(DATA / name, **options), written(DATA / name, tmp_path / "out", **options))


@pytest.mark.parametrize("name", ["z1", "z2_fp32", "z3", "z3_fp32", "universal_z2"])
def test_weights_of_deepspeed_are_those_that_its_own_zero_to_fp32_gathers(name: str) -> None:
    weights = reshard.open(DATA / "deepspeed" / name)
    for key, tensor in load_file(DATA / "deepspeed" / name / "fp32.safetensors").items():
        if key in weights:  # a tied head is left to its embedding
            assert torch.equal(weights[key].torch(), tensor), key


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp1-hsdp", "fsdp1-mesh", "fsdp2-hsdp", "fsdp2-tp"])
@pytest.mark.parametrize("version", ["torch-2.6.0", "torch-2.10.0"])
def test_ranks_of_fsdp_map_to_the_state_dict_that_torch_gathered(version: str, kind: str) -> None:
    expected = torch.load(DATA / "fsdp_ranks" / version / "expected")
    assert_same_tensors(read(DATA / "fsdp_ranks" / version / kind), expected)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3", {"tp": 2, "pp": 2}),
        ("qwen3_moe", {"tp": 2, "pp": 2, "ep": 2}),
        ("deepseek_v3", {"pp": 2, "ep": 4}),
    ],
)
@pytest.mark.parametrize("to", ["megatron", "megatron-legacy"])
def test_megatron_maps_to_what_transformers_saved(
    family: str, layout: dict[str, int], to: str, hf_model: Callable[..., Path], tmp_path: Path
) -> None:
    source = hf_model(family)
    reshard.convert(source, tmp_path / "there", to=to, **layout)  # type: ignore[arg-type]
    saved = tensors_of(source)
    for tensor in (weights := reshard.open(tmp_path / "there")).values():
        assert torch.equal(tensor.torch(), saved[tensor.name]), tensor.name
    assert saved.keys() - weights.keys() <= {"lm_head.weight"}


def test_dcp_maps_to_what_torch_loads(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    path = DATA / "torchtitan" / "llama"
    dcp_to_torch_save(next(each.parent for each in path.rglob(".metadata")), tmp_path / "all.pt")
    loaded = torch.load(tmp_path / "all.pt", weights_only=False)
    loaded = loaded.get("model", loaded)
    weights = reshard.open(path)
    renamed = {"model.embed_tokens.weight": "tok_embeddings.weight", "model.norm.weight": "norm.weight"}
    renamed |= {"model.layers.0.mlp.down_proj.weight": "layers.0.feed_forward.w2.weight"}
    for ours, theirs in renamed.items():
        assert torch.equal(weights[ours].torch(), loaded[theirs]), ours


def test_quantized_weights_are_mapped_as_stored_and_dequantized_with_a_dtype(
    hf_model: Callable[..., Path], tmp_path: Path
) -> None:
    pytest.importorskip("ml_dtypes")
    fp8 = tmp_path / "fp8"
    reshard.convert(hf_model("qwen3"), fp8, dtype="bfloat16", quantize="fp8", to="huggingface")
    stored = reshard.open(fp8)
    assert_same_tensors(read(fp8), tensors_of(fp8))
    name = "model.layers.0.mlp.up_proj.weight"
    assert stored[name].numpy().dtype.name == "float8_e4m3fn" and f"{name}_scale_inv" in stored
    options = {"dtype": "bfloat16", "to": "huggingface"}
    plain = read(fp8, dtype="bfloat16")
    assert_same_tensors(plain, written(fp8, tmp_path / "plain", **options))
    part = reshard.open(fp8, dtype="bfloat16")[name][3:40, 5:60]
    assert torch.equal(part.torch(), plain[name][3:40, 5:60])
    assert part.numpy().dtype.name == "bfloat16"


# ------------------------------------------------------------------------------------------- a mapping


@pytest.fixture(scope="module")
def run(hf_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "run"
    reshard.convert(hf_model("qwen3"), path, to="megatron", tp=2, pp=2)
    return path


UP = "model.layers.0.mlp.up_proj.weight"


def test_it_is_a_mapping(run: Path) -> None:
    weights = reshard.open(run)
    assert len(weights) == len([*weights]) == len(weights.keys()) == 47
    assert UP in weights and "x" not in weights and weights.get("x") is None
    tensor = weights[UP]
    assert (tensor.shape, tensor.dtype, tensor.ndim, tensor.size) == ((96, 64), "float32", 2, 96 * 64)
    assert tensor.nbytes == 96 * 64 * 4 and len(tensor) == 96 and len(tensor.files) == 2
    assert repr(tensor) == f"<LazyTensor {UP}: float32 [96, 64]>"
    assert [row.shape for row in tensor][:2] == [(64,), (64,)]
    assert np.asarray(tensor).sum() == np.array(tensor, np.float32).sum() == tensor.numpy().sum()
    assert UP in weights._repr_html_() and weights.format == "megatron"


def test_a_name_that_is_not_there_is_a_key_error_that_helps(run: Path) -> None:
    with pytest.raises(KeyError) as missing:
        reshard.open(run)["model.layers.0.mlp.up_proj.wieght"]
    assert isinstance(missing.value, reshard.ReshardError) and f"did you mean {UP}?" in str(missing.value)


def test_what_convert_refuses_is_refused_at_the_first_look(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    (config,) = (tmp_path / "run").rglob("config.json")
    config.write_text(json.dumps({**json.loads(config.read_text()), "intermediate_size": 100}))
    weights = reshard.open(tmp_path / "run")
    with pytest.raises(reshard.ReshardError):
        len(weights)


INDICES: list[Any] = [
    *(0, -1, slice(None), slice(3, 7), slice(-5, None), slice(90, 200), slice(5, 5), ...),
    *(
        (slice(10, 60), slice(2, 9)),
        (slice(None), 3),
        (5, 6),
        (..., slice(1, 3)),
        (slice(4, 5), ...),
        (np.int64(3), -2),
    ),
]


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_a_part_is_what_numpy_says(index: Any, run: Path) -> None:
    tensor = reshard.open(run)[UP]
    part, expected = tensor[index], tensor.numpy()[index]
    assert part.shape == expected.shape and np.array_equal(part.numpy(), expected)
    assert np.array_equal(part[...].numpy(), expected)


@pytest.mark.parametrize("index", [slice(0, 9, 2), None, [1, 2], "a", 1.0, True], ids=str)
def test_other_indices_are_refused(index: Any, run: Path) -> None:
    with pytest.raises(reshard.ReshardError, match="integers, slices of step one"):
        reshard.open(run)[UP][index]


@pytest.mark.parametrize("index", [96, -97, (0, 64), (0, 0, 0)], ids=str)
def test_an_index_out_of_range_is_an_index_error(index: Any, run: Path) -> None:
    with pytest.raises(IndexError):
        reshard.open(run)[UP][index]


def test_a_file_that_changed_since_it_was_opened_is_not_read(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    tensor = reshard.open(tmp_path / "run")[UP]
    Path(tensor.files[0]).write_bytes(Path(tensor.files[0]).read_bytes()[:-8])
    with pytest.raises(reshard.ReshardError, match="changed while it was read"):
        tensor.numpy()


# ------------------------------------------------------------------------------------------- the bytes of a slice


def bytes_read() -> int:
    """The bytes that this process has read, as Linux counts them."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.genuine.huggingface import make_model

    path = tmp_path_factory.mktemp("large")
    make_model("llama", path / "model", hidden_size=256, intermediate_size=1024)
    reshard.convert(path / "model", path / "run", to="megatron", tp=4, pp=2)
    return path


@pytest.mark.parametrize("name", ["model", "run"])
def test_a_slice_reads_its_bytes_alone(name: str, large: Path) -> None:
    tensor = reshard.open(large / name)[UP]
    begin = bytes_read()
    overhead = bytes_read() - begin
    for part in (tensor[0:128], tensor[300], tensor[1000:1024], tensor):
        begin = bytes_read()
        part.raw()
        assert bytes_read() - begin - overhead == part.nbytes


def test_a_slice_of_a_remote_checkpoint_moves_little_more_than_itself(large: Path) -> None:
    pytest.importorskip("aiohttp")
    from tests.stores.web_server import web_server

    with web_server(large) as web:
        weights = reshard.open(f"{web.address}/model")
        assert len(weights) == len(reshard.open(large / "model"))
        before, part = web.sent, weights[UP][0:128]
        assert web.sent == before  # nothing yet
        assert np.array_equal(part.numpy(), reshard.open(large / "model")[UP][0:128].numpy())
        assert part.nbytes <= web.sent - before < part.nbytes + 1024


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    yield


def test_wrong_arguments_are_told_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import reshard\n"
        "for call in (lambda: reshard.weight_source('m', base='m'), lambda: reshard.weight_sender('m', 'x')):\n"
        "    try: call()\n"
        "    except reshard.ReshardError as error: print(error.problems[0].code)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["argument-wrong"] * 2


def test_torch_is_asked_for_in_words(run: Path, without_torch: None) -> None:
    tensor = reshard.open(run)[UP]
    assert tensor.numpy().shape == tensor.shape
    with pytest.raises(reshard.ReshardError, match="torch, which is not installed"):
        tensor.torch()


# ------------------------------------------------------------------------------------------- all at once


def test_a_model_of_transformers_loads_the_state_dict(run: Path, hf_model: Callable[..., Path]) -> None:
    from transformers import AutoModelForCausalLM

    source = hf_model("qwen3")
    expected = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_config(expected.config, dtype=torch.bfloat16)
    with reshard.open(run) as weights:
        tensors = weights.state_dict(device="cpu", dtype=torch.bfloat16)
    model.load_state_dict(tensors, strict=True)
    assert_same_tensors(model.state_dict(), expected.state_dict())
    assert {each.dtype for each in tensors.values()} == {torch.bfloat16}


@pytest.mark.parametrize(("name", "changed"), [("qwen3_moe", {}), ("llama", {"tie_word_embeddings": True})])
def test_a_model_with_other_names_in_memory_loads_the_state_dict(
    name: str, changed: dict[str, Any], hf_model: Callable[..., Path], tmp_path: Path
) -> None:
    """As docs/python.md says: experts are stacked in memory, and a tied head is not in the dictionary."""
    from transformers import AutoModelForCausalLM

    source = hf_model(name, **changed)
    reshard.convert(source, tmp_path / "run", to="megatron", tp=2)
    expected = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with reshard.open(tmp_path / "run") as weights:
        tensors = weights.state_dict()
    assert {*tensors} != {*expected.state_dict()}
    model, told = type(expected).from_pretrained(
        None, config=expected.config, state_dict=tensors, dtype=torch.float32, output_loading_info=True
    )
    assert not any(told.values())
    assert_same_tensors(model.state_dict(), expected.state_dict())


def test_a_state_dict_takes_dtypes_and_devices(run: Path, hf_model: Callable[..., Path]) -> None:
    weights = reshard.open(run)
    assert_same_tensors(weights.state_dict(), tensors_of(hf_model("qwen3")))
    assert_same_tensors(weights.state_dict(dtype="float16"), read(run, dtype="float16"))
    assert_same_tensors(reshard.open(run, dtype="bfloat16").state_dict(), read(run, dtype="bfloat16"))
    assert {each.device.type for each in weights.state_dict(torch.device("meta")).values()} == {"meta"}
    assert weights[UP].torch().device.type == "cpu" and weights[UP].torch("meta").is_meta
    with pytest.raises(reshard.ReshardError, match="int7"):
        weights.state_dict(dtype="int7")
    for device in ("cuda:64", "nothing", 1.5):
        with pytest.raises(reshard.ReshardError, match="torch cannot use this device"):
            weights.state_dict(device=device)  # type: ignore[arg-type]
        with pytest.raises(reshard.ReshardError, match="torch cannot use this device"):
            weights[UP].torch(device=device)  # type: ignore[arg-type]


PEAK = """
import resource, sys, torch, reshard
weights = reshard.open(sys.argv[1])
names = [*weights]
weights[min(names, key=lambda name: weights[name].nbytes)].torch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = weights.state_dict(dtype=torch.bfloat16)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, sum(each.nbytes for each in found.values()) // 1024)
"""


@pytest.mark.slow
def test_a_state_dict_takes_little_more_memory_than_the_model(tmp_path: Path) -> None:
    from tests.genuine.huggingface import make_model

    make_model("llama", tmp_path, hidden_size=1024, intermediate_size=4096, num_hidden_layers=8)
    done = subprocess.run([sys.executable, "-c", PEAK, tmp_path], capture_output=True, text=True, check=True)
    used, needed = map(int, done.stdout.split())
    assert used < 1.3 * needed + 64 * 1024, (used, needed)


# ------------------------------------------------------------------------------------------- open and closed


def test_a_closed_checkpoint_says_so(run: Path) -> None:
    with reshard.open(run) as weights:
        tensor = weights[UP]
        kept = tensor.torch()
    assert kept.shape == (96, 64) and "closed" in repr(weights)
    reads: list[Callable[[], Any]] = [
        *(tensor.numpy, tensor.torch, tensor[0].raw, weights.state_dict, weights.keys().__len__),
        *(lambda: weights[UP], lambda: UP in weights, lambda: len(weights), weights.__enter__),
    ]
    for read in reads:
        with pytest.raises(reshard.ReshardError) as closed:
            read()
        assert [problem.code for problem in closed.value.problems] == ["checkpoint-closed"]
    weights.close()


def test_repr_counts_what_len_counts(run: Path, tmp_path: Path, hf_model: Callable[..., Path]) -> None:
    reshard.convert(hf_model("qwen3_moe"), tmp_path / "experts", to="megatron", pp=2, ep=2)
    for path in (run, tmp_path / "experts"):
        weights = reshard.open(path)
        assert len(weights.tensors) != len(weights)
        assert repr(weights) == f"<Weights megatron {str(path)!r}: {len(weights)} tensors>"
    next((tmp_path / "experts").rglob("config.json")).write_text('{"model_type": "qwen3"}')
    assert repr(reshard.open(tmp_path / "experts"))  # though its tensors fit no model


def test_a_relative_path_is_that_of_the_folder_where_it_was_opened(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    weights = reshard.open("run")
    told = repr(weights)
    monkeypatch.chdir(tmp_path / "other")
    assert torch.equal(weights[UP].torch(), reshard.open(run)[UP].torch())
    assert repr(weights) == told and told.startswith("<Weights megatron 'run': ")
    (tmp_path / "run" / "release" / "__0_0.distcp").unlink()
    with pytest.raises(reshard.ReshardError) as gone:
        weights[UP].numpy()
    assert [problem.file for problem in gone.value.problems] == ["run/release/__0_0.distcp"]
    monkeypatch.chdir(tmp_path / "run")
    with pytest.raises(reshard.ReshardError) as missing:
        reshard.open(".")["x"]
    assert str(tmp_path) not in str(missing.value)
    with pytest.raises(reshard.ReshardError) as missing:
        reshard.open("../nothing")
    assert [problem.file for problem in missing.value.problems] == ["../nothing"]


@pytest.mark.thorough
def test_threads_may_share_a_checkpoint(run: Path) -> None:
    names, weights = [*reshard.open(run)], reshard.open(run)
    with ThreadPoolExecutor(8) as pool:
        found = dict(zip(names, pool.map(lambda name: weights[name].torch(), names), strict=True))
    assert_same_tensors(found, read(run))


@pytest.mark.thorough
def test_threads_may_convert_at_the_same_time(run: Path, tmp_path: Path) -> None:
    places = [tmp_path / str(number) for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        converted = [*pool.map(lambda place: reshard.convert(run, place, no_tokenizer=True), places)]
        assert len(converted) == 4
        assert all(pool.map(lambda place: reshard.verify(run, place), places))
