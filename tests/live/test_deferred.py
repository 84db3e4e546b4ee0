"""Deferred tensors follow the views of weight loaders, and read only what is copied."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import reshard
from reshard.base.errors import ReshardError
from reshard.live.deferred_tensors import DeferredTensor, ReadTally
from reshard.live.loaded_parameters import LoadingNotes
from reshard.live.record_loading import Landings

Make = Callable[[str], tuple[DeferredTensor, torch.Tensor]]
FUSED = "model.layers.1.mlp.experts.3.up_proj.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def weights(hf_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> reshard.Weights:
    out = tmp_path_factory.mktemp("deferred") / "tp2"
    reshard.convert(hf_model("qwen3_moe"), out, to="megatron", tp=2, ep=2)
    return reshard.open(out)


def made(weights: reshard.Weights, name: str) -> tuple[DeferredTensor, torch.Tensor]:
    return DeferredTensor(weights[name], ReadTally()), weights[name].torch()


VIEWS: dict[str, Callable[[torch.Tensor, int, int], Any]] = {
    "narrow": lambda x, a, b: (
        x.narrow(a % x.ndim, b % x.shape[a % x.ndim], 1 + (x.shape[a % x.ndim] - 1) // 3)
        if b % x.shape[a % x.ndim] + 1 + (x.shape[a % x.ndim] - 1) // 3 <= x.shape[a % x.ndim]
        else x
    ),
    "slice": lambda x, a, b: x[b % len(x) :],
    "end": lambda x, a, b: x[..., : 1 + b % x.shape[-1]],
    "row": lambda x, a, b: x[b % len(x)] if x.ndim > 1 else x,
    "negative": lambda x, a, b: x[-1 - b % len(x) :, ...],
    "step": lambda x, a, b: x[::2],
    "chunk": lambda x, a, b: x.chunk(1 + a % 4, dim=-1)[0],
    "split": lambda x, a, b: x.split(1 + b % len(x))[-1],
    "unbind": lambda x, a, b: x.unbind(0)[b % len(x)] if x.ndim > 1 else x,
    "transpose": lambda x, a, b: x.transpose(0, -1),
    "t": lambda x, a, b: x.t() if x.ndim == 2 else x,
    "permute": lambda x, a, b: x.permute(*reversed(range(x.ndim))),
    "unsqueeze": lambda x, a, b: x.unsqueeze(a % (x.ndim + 1)) if x.ndim < 4 else x,
    "none": lambda x, a, b: x[None] if x.ndim < 4 else x,
    "squeeze": lambda x, a, b: x.squeeze(a % x.ndim) if x.ndim > 1 else x,
    "reshape": lambda x, a, b: x.reshape(1, -1),
    "contiguous": lambda x, a, b: x.contiguous(),
    "like": lambda x, a, b: x.view_as(torch.empty(x.shape if a % 2 else (1, *x.shape))),
    "data": lambda x, a, b: x.data,
    "list": lambda x, a, b: x[[0, b % len(x)]],
    "double": lambda x, a, b: x.double(),
}
steps = st.lists(st.tuples(st.sampled_from(sorted(VIEWS)), st.integers(0, 9), st.integers(0, 90)), max_size=6)


@given(steps=steps)
def test_chains_of_views_are_those_of_torch(
    weights: reshard.Weights, steps: list[tuple[str, int, int]]
) -> None:
    found, expected = made(weights, QUERY)
    for name, a, b in steps:
        found, expected = VIEWS[name](found, a, b), VIEWS[name](expected, a, b)
        assert found.shape == expected.shape and found.dtype == expected.dtype
    assert torch.equal(torch.empty_like(expected).copy_(found), expected)


def test_only_what_is_copied_is_read(weights: reshard.Weights) -> None:
    tally = ReadTally()
    tensor = DeferredTensor(weights[QUERY], tally)
    half = tensor.shape[0] // 2
    parameter = torch.nn.Parameter(torch.empty(half, tensor.shape[1]), requires_grad=False)
    view = tensor.unsqueeze(0).narrow(1, half, half).squeeze(0)
    assert tally == ReadTally()
    parameter.data.copy_(view)
    assert tally == ReadTally(tensor.numel() * 4 // 2, {QUERY})
    assert torch.equal(parameter, weights[QUERY].torch()[half:])


def test_nothing_is_read_for_a_meta_tensor(weights: reshard.Weights) -> None:
    tally = ReadTally()
    tensor = DeferredTensor(weights[QUERY], tally)
    torch.empty(tensor.shape, device="meta").copy_(tensor)
    assert tally == ReadTally(0, {QUERY})


def test_a_view_out_of_range_is_refused_as_by_torch(weights: reshard.Weights) -> None:
    found, expected = made(weights, FUSED)
    for tensor in (found, expected):
        with pytest.raises(RuntimeError, match="exceeds dimension size"):
            tensor.narrow(0, 1, len(tensor))
        with pytest.raises(IndexError):
            tensor[len(tensor)]


def test_operations_that_need_elements_read_them(weights: reshard.Weights) -> None:
    found, expected = made(weights, FUSED)
    assert torch.equal(torch.cat([found, found]), torch.cat([expected, expected]))
    assert torch.equal(torch.stack(list(found)), expected)
    assert found.tolist() == expected.tolist()
    assert found.sum().item() == expected.sum().item()
    assert torch.equal(torch.from_numpy(found.numpy()), expected)
    parameter = torch.zeros_like(expected)
    parameter[:2] = found[:2]
    assert torch.equal(parameter[:2], expected[:2])


@pytest.mark.parametrize("narrow", ["float8_e4m3fn", "int8"])
def test_a_cast_that_would_lose_a_scale_is_refused(weights: reshard.Weights, narrow: str) -> None:
    found, _ = made(weights, FUSED)
    with pytest.raises(ReshardError) as caught:
        torch.empty(found.shape, dtype=getattr(torch, narrow)).copy_(found)
    problem = caught.value.problems[0]
    assert (problem.code, problem.expected) == ("engine-expects-another-precision", narrow)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(2, 2)
        self.b = torch.nn.Linear(2, 2)
        self.tied = self.a


def test_parameters_that_nothing_was_written_to_are_missing() -> None:
    model = Model()
    with torch.no_grad(), LoadingNotes(model) as loading:
        model.a.weight[:1].copy_(torch.ones(1, 2))
        model.b.weight = torch.nn.Parameter(torch.ones(2, 2))
    assert loading.unloaded([]) == ["a.bias", "b.bias"]
    assert loading.unloaded(["tied.bias"]) == ["b.bias"]
    assert loading.partial() == ["a.weight"]


def test_what_threads_of_a_pool_write_is_not_missing() -> None:
    """SGLang loads the experts of DeepSeek so."""
    model = Model()
    with torch.no_grad(), LoadingNotes(model) as loading, ThreadPoolExecutor() as pool:
        pool.submit(model.a.weight.data.copy_, torch.ones(2, 2)).result()
        pool.submit(model.a.bias.data[:1].copy_, torch.ones(1)).result()
    assert loading.unloaded([]) == ["b.weight", "b.bias"]
    assert loading.partial() == ["a.bias"]


@pytest.mark.parametrize("index", [slice(1, 3), (slice(1, 3), ...), [1, 2]], ids=str)
def test_elements_that_are_set_are_those_of_the_tensor(weights: reshard.Weights, index: Any) -> None:
    deferred, plain = made(weights, QUERY)
    target, expected = torch.zeros_like(plain), torch.zeros_like(plain)
    target[index], expected[index] = deferred[1:3], plain[1:3]
    assert torch.equal(target, expected)
    assert deferred.tally.nbytes == plain[1:3].nbytes


def test_what_a_loader_computes_in_its_place_is_not_recorded_as_a_copy(weights: reshard.Weights) -> None:
    tally, plain = Landings(), weights[QUERY].torch()
    model = torch.nn.Linear(*reversed(plain.shape), bias=False).requires_grad_(False)
    model.weight.copy_(DeferredTensor(weights[QUERY], tally))
    assert [*tally.recording(model, "engine", {}).parameters] == ["weight"]
    model.weight.copy_(-torch.exp(model.weight))
    recording = tally.recording(model, "engine", {})
    assert not recording.parameters and recording.loaded == (QUERY,)
