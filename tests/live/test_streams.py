"""The tensors of a checkpoint as a stream: those that `convert` writes, and never those of damaged bytes."""

from __future__ import annotations

import os
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import reshard
from reshard import ReshardError
from reshard.transfer import prefetch
from tests.judges import assert_same_tensors, tensors_of
from tests.test_weights import DATA, GENUINE, written

Models = Callable[..., Path]
UP = "model.layers.1.mlp.up_proj.weight"


def streamed(path: Any, **options: Any) -> dict[str, torch.Tensor]:
    return dict(reshard.stream(path, framework="torch", **options))


@pytest.mark.parametrize("name", GENUINE)
def test_any_checkpoint_streams_what_convert_writes(name: str, tmp_path: Path) -> None:
    options = GENUINE[name]
    assert_same_tensors(streamed(DATA / name, **options), written(DATA / name, tmp_path / "out", **options))


@pytest.fixture(scope="module")
def model(hf_model: Models) -> Path:
    return hf_model("qwen3_moe")


@pytest.fixture(scope="module")
def megatron(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stream") / "megatron"
    reshard.convert(model, folder, to="megatron", tp=2, pp=2, ep=2)
    return folder


@pytest.mark.core("3-file", "1-model")
@pytest.mark.parametrize("order", ["file", "model"])
@pytest.mark.parametrize("workers", [1, 3])
def test_parts_and_threads_change_nothing(
    order: str, workers: int, model: Path, megatron: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "PART_BYTES", 1000)
    found = streamed(megatron, order=order, workers=workers, memory="16MiB")
    assert_same_tensors(found, tensors_of(model))
    if order == "model":
        assert list(found) == list(reshard.open(megatron))


def test_the_order_of_the_files_reads_each_file_once(megatron: Path) -> None:
    weights = reshard.open(megatron)
    files = [weights[name].files[0] for name in streamed(weights)]
    assert len(set(files)) > 1 and files == sorted(files)


def test_quantized_weights_are_streamed_as_stored_or_dequantized(model: Path, tmp_path: Path) -> None:
    reshard.convert(model, tmp_path / "fp8", quantize="fp8", dtype="bfloat16")
    assert_same_tensors(streamed(tmp_path / "fp8"), tensors_of(tmp_path / "fp8"))
    expected = written(tmp_path / "fp8", tmp_path / "plain", dtype="bfloat16")
    assert_same_tensors(streamed(tmp_path / "fp8", dtype="bfloat16"), expected)


def test_numpy_arrays_have_the_dtypes_of_the_mapping(megatron: Path) -> None:
    weights = reshard.open(megatron, dtype="bfloat16")
    for name, array in reshard.stream(weights):
        assert array.dtype == weights[name].numpy().dtype and np.array_equal(array, weights[name].numpy())


# ------------------------------------------------------------------------------------------- a part of it


def test_names_experts_and_boxes_select(model: Path, megatron: Path) -> None:
    whole = tensors_of(model)
    names = ["model.norm.weight", "lm_head.weight"]
    assert_same_tensors(streamed(megatron, names=names), {name: whole[name] for name in names})
    box = (slice(0, 8), slice(16, 32))
    found = streamed(megatron, boxes={"lm_head.weight": box})
    assert found.keys() == whole.keys() and torch.equal(found["lm_head.weight"], whole["lm_head.weight"][box])
    found = streamed(megatron, experts=range(2, 4))
    assert {name.split(".experts.")[1][0] for name in found if ".experts." in name} == {"2", "3"}
    assert len([name for name in whole if ".experts." not in name]) == len(
        [name for name in found if ".experts." not in name]
    )


def test_of_stacked_experts_some_rows_are_read(hf_model: Models) -> None:
    source = hf_model("gpt_oss")
    whole = tensors_of(source)
    found = streamed(source, experts=range(1, 3))
    stacked = [name for name in whole if ".experts." in name]
    assert {whole[name].ndim for name in stacked} == {2, 3}  # biases and weights
    for name in stacked:
        assert torch.equal(found[name], whole[name][1:3]), name


def test_names_may_be_read_once(megatron: Path) -> None:
    names = ["model.norm.weight", "lm_head.weight"]
    assert streamed(megatron, names=iter(names)).keys() == {*names}


def test_tensors_without_axes_or_elements_can_be_named(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = {"scale": torch.tensor(3.0), "none": torch.zeros(0, 4), "other": torch.ones(2)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text('{"model_type": "unknown"}')
    expected = {name: tensors[name] for name in ("scale", "none")}
    assert_same_tensors(streamed(tmp_path, names=["scale", "none"]), expected)


def test_a_part_reads_only_its_own_files(model: Path, tmp_path: Path) -> None:
    reshard.convert(model, tmp_path / "shards", max_shard_size="50KB")
    weights = reshard.open(tmp_path / "shards")
    (file,) = weights["model.norm.weight"].files
    for other in tmp_path.glob("shards/*.safetensors"):
        if str(other) != file:
            other.unlink()
    assert list(streamed(weights, names=["model.norm.weight"])) == ["model.norm.weight"]


# ------------------------------------------------------------------------------------------- memory


def test_memory_is_that_of_the_limit_whatever_the_model(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    size = 8 << 20
    arrays = {f"model.layers.{i}.weight": np.full(size, i, np.uint8) for i in range(24)}
    save_file(arrays, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "unknown"}')
    del arrays
    weights = reshard.open(tmp_path)
    tracemalloc.start()
    try:
        for name, array in reshard.stream(weights, memory="64MiB", workers=2):
            assert array[0] == array[-1] == int(name.split(".")[2])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 80 << 20


def test_a_loop_may_end_early(megatron: Path) -> None:
    for _ in reshard.stream(megatron):
        break
    assert len(streamed(megatron)) > 1


# ------------------------------------------------------------------------------------------- what is wrong


def test_a_forked_process_cannot_go_on_with_it(megatron: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a worker of torch's DataLoader would: its process has no threads that read."""
    monkeypatch.setattr(prefetch, "PART_BYTES", 1 << 10)
    stream = iter(reshard.stream(megatron))
    next(stream)
    child = os.fork()
    if not child:
        try:
            list(stream)
        except ReshardError as error:
            os._exit(7 if error.problems[0].code == "stream-in-another-process" else 1)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert len(list(stream)) > 1


def test_damaged_bytes_end_in_an_error(hf_model: Models, tmp_path: Path) -> None:
    reshard.convert(hf_model("qwen3"), tmp_path / "legacy", to="megatron-legacy", tp=2)
    file = max(tmp_path.rglob("*.pt"), key=lambda each: each.stat().st_size)
    with zipfile.ZipFile(file) as archive:
        largest = max(archive.infolist(), key=lambda each: each.file_size)
    content = bytearray(file.read_bytes())
    content[largest.header_offset + 300] ^= 1
    file.write_bytes(content)
    with pytest.raises(ReshardError) as caught:
        streamed(tmp_path / "legacy")
    assert {problem.code for problem in caught.value.problems} == {"checksum-mismatch"}
    assert all(problem.tensor for problem in caught.value.problems)


def test_a_file_that_changes_meanwhile_is_an_error(model: Path, tmp_path: Path) -> None:
    reshard.convert(model, tmp_path / "shards", max_shard_size="50KB")
    found = reshard.stream(tmp_path / "shards", memory="16MiB")
    next(found)
    last = max(tmp_path.glob("shards/*.safetensors"))
    last.write_bytes(last.read_bytes())
    os.utime(last, (1, 1))
    with pytest.raises(ReshardError) as caught:
        list(found)
    assert [problem.code for problem in caught.value.problems] == ["source-changed"]


def test_a_deleted_file_is_an_error(model: Path, tmp_path: Path) -> None:
    reshard.convert(model, tmp_path / "shards", max_shard_size="50KB")
    weights = reshard.open(tmp_path / "shards")
    max(tmp_path.glob("shards/*.safetensors")).unlink()
    with pytest.raises(ReshardError, match="safetensors"):
        streamed(weights)


def test_values_that_do_not_fit_are_an_error(model: Path, tmp_path: Path) -> None:
    from tests.test_overflow import with_values

    large = with_values(model, tmp_path / "large", {"model.norm.weight": [1e30]})
    with pytest.raises(ReshardError) as caught:
        streamed(large, dtype="float16")
    assert [(problem.code, problem.tensor) for problem in caught.value.problems] == [
        ("values-overflow", "model.norm.weight")
    ]


def test_values_that_do_not_fit_are_counted_in_all_parts(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.test_overflow import with_values

    monkeypatch.setattr(prefetch, "PART_BYTES", 32)
    values = [1e30, *[0.0] * 20, 1e30]
    large = with_values(model, tmp_path / "large", {"model.norm.weight": values})
    with pytest.raises(ReshardError, match="2 values in the output"):
        streamed(large, dtype="float16", names=["model.norm.weight"])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"order": "alphabet"}, "order='alphabet'"),
        ({"framework": "jax"}, "framework='jax'"),
        ({"names": "model.norm.weight"}, "names='model.norm.weight'"),
        ({"names": ["model.norm.weigth"]}, "did you mean model.norm.weight"),
        ({"boxes": {"nope": 0}}, "nope"),
        ({"names": ["lm_head.weight"], "boxes": {"model.norm.weight": 0}}, "model.norm.weight"),
        ({"experts": [1, 2]}, "experts=[1, 2]"),
        ({"experts": range(-2, 2)}, "experts=range(-2, 2)"),
        ({"experts": range(6, 12)}, "below 8"),
        ({"boxes": ["lm_head.weight"]}, "boxes=['lm_head.weight']"),
        ({"boxes": {"model.norm.weight": 64}}, "model.norm.weight"),
        ({"memory": "1KiB"}, "--memory"),
        ({"workers": 0}, "workers=0"),
        ({"dtype": "int4"}, "int4"),
    ],
)
def test_wrong_arguments_are_told_at_once(options: dict[str, Any], told: str, megatron: Path) -> None:
    with pytest.raises(ReshardError) as caught:
        next(reshard.stream(megatron, **options))
    assert told in str(caught.value)
