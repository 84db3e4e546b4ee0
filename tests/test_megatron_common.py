"""Where Megatron-Core keeps what is not a weight: in `common.pt`, or as objects in the chunk files.

`tests/data/megatron-0.19` was written by megatron-core 0.19 (`tests/genuine/make_newer_megatron.py`).
"""

from __future__ import annotations

import os
import shutil
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("megatron.core")

import torch

import reshard
from reshard.base.errors import ReshardError
from reshard.containers.dcp_metadata import DcpChunk, read_metadata, write_metadata
from reshard.oracle.transformers import transformers_logits
from reshard.transfer.source_files import Sources
from tests import commandline
from tests.bad_input.test_damaged_files import Trap
from tests.genuine import torch_dcp
from tests.genuine.make_newer_megatron import ARGS
from tests.genuine.make_newer_megatron import TOKENS as ITS_TOKENS
from tests.genuine.megatron import QWEN3, QWEN3_MOE
from tests.genuine.warm import megatron_logits
from tests.judges import assert_agree
from tests.test_optimizer import assert_same, values

NEWER = Path(__file__).parent / "data" / "megatron-0.19"
STEP = "iter_0000002"
COMMON = "common_state/shard_0_1"


def refused(path: Path) -> dict[str, Any]:
    done = commandline.reshard("inspect", path, "--json")
    assert done.code == 2
    (problem,) = done.json["problems"]
    return dict(problem)


@pytest.fixture
def newer(tmp_path: Path) -> Path:
    """A copy of the checkpoint to be damaged."""
    return Path(shutil.copytree(NEWER, tmp_path / "newer"))


def test_transformers_computes_what_a_newer_megatron_computes(tmp_path: Path) -> None:
    checkpoint = reshard.open(NEWER).checkpoint
    assert checkpoint.description.args and checkpoint.description.args["num_layers"] == ARGS["num_layers"]
    assert checkpoint.iteration == 2 and str(checkpoint.layout) == "TP2 · PP1"
    assert "other objects" not in checkpoint.dropped
    reshard.convert(NEWER, tmp_path / "hf", no_tokenizer=True)
    logits = transformers_logits(tmp_path / "hf", ITS_TOKENS[:2, :12])
    assert_agree(logits, np.load(NEWER / "logits.npy"))
    assert commandline.reshard("verify", NEWER, tmp_path / "hf", "--proof").code == 0


@pytest.mark.thorough
def test_an_older_megatron_loads_it_converted(tmp_path: Path) -> None:
    """With all states of the optimizer, and what it keeps beside them."""
    reshard.convert(NEWER, tmp_path / "one", to="megatron", tp=1, with_optimizer=True, no_tokenizer=True)
    ours = megatron_logits(tmp_path / "one" / STEP, ITS_TOKENS[:2, :12], args=ARGS).logits
    assert_agree(ours, np.load(NEWER / "logits.npy"))
    assert_same(values(tmp_path / "one" / STEP), values(NEWER / STEP))
    common = torch.load(tmp_path / "one" / STEP / "common.pt", weights_only=False)
    theirs = torch_dcp.object_in(NEWER / STEP, COMMON)[0]
    for key in ("optimizer", "opt_param_scheduler", "content_metadata", "iteration"):
        assert common[key] == theirs[key], key


def replaced(folder: Path, chunk: DcpChunk | None) -> None:
    """Write the iteration's `.metadata` again, with this chunk for the common state, or without one."""
    file = folder / ".metadata"
    metadata = read_metadata(file, Sources())
    for tensor in metadata.tensors.values():
        tensor.chunks = [each._replace(file=Path(each.file).name) for each in tensor.chunks]
    metadata.objects = {COMMON: chunk} if chunk else {}
    file.write_bytes(write_metadata(metadata))


def test_a_common_state_that_is_missing(newer: Path) -> None:
    replaced(newer / STEP, None)
    problem = refused(newer)
    assert problem["code"] == "torch-dist-file-missing" and "common.pt" in problem["file"]


def test_a_common_state_in_a_file_that_is_missing(newer: Path) -> None:
    chunk = read_metadata(newer / STEP / ".metadata", Sources()).objects[COMMON]
    Path(chunk.file).unlink()
    assert refused(newer)["code"] == "dcp-file-missing"


def test_code_in_a_common_state_is_not_run(newer: Path, tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    torch.save([Trap(os.system, f"touch {sprung}")], newer / STEP / "__9_0.distcp")
    size = (newer / STEP / "__9_0.distcp").stat().st_size
    replaced(newer / STEP, DcpChunk((), (), "__9_0.distcp", 0, size))
    assert "nothing was executed" in refused(newer)["message"]
    assert not sprung.exists()
    torch.load(newer / STEP / "__9_0.distcp", weights_only=False)
    assert sprung.exists(), "the trap is live"


def test_logits_that_the_installed_megatron_cannot_compute(tmp_path: Path) -> None:
    done = commandline.reshard("verify", NEWER, NEWER, "--logits")
    assert done.code == 2 and "the installed megatron-core cannot load this checkpoint" in done.err


# ------------------------------------------------------------------------------------------- torch's DCP


@pytest.mark.thorough
@pytest.mark.parametrize("args", [QWEN3, QWEN3_MOE], ids=["qwen3", "qwen3-moe"])
def test_torch_dcp_holds_what_torch_dist_holds(args: dict[str, Any], tmp_path: Path) -> None:
    torch_dcp.make(args, tmp_path)
    check_the_same(tmp_path)


def test_torch_dcp_with_grouped_experts(transformer_engine: Executor, tmp_path: Path) -> None:
    args = {**QWEN3_MOE, "moe_grouped_gemm": True}
    transformer_engine.submit(torch_dcp.make, args, tmp_path, "te").result(timeout=120)
    check_the_same(tmp_path)


def check_the_same(folder: Path) -> None:
    for name in ("torch_dcp", "torch_dist"):
        reshard.convert(folder / name, folder / f"{name}-hf", no_tokenizer=True)
    comparison = reshard.verify(folder / "torch_dcp-hf", folder / "torch_dist-hf")
    assert comparison.equal and comparison.tensors > 20
    checkpoint = reshard.open(folder / "torch_dcp").checkpoint
    assert checkpoint.iteration == 2 and checkpoint.variant == "torch_dcp"
    assert checkpoint.dropped["optimizer states"] > 2 * checkpoint.nbytes
    assert any("numbers instead of the names" in note for note in checkpoint.notes)
    assert commandline.reshard("verify", folder / "torch_dcp", folder / "torch_dcp-hf", "--proof").code == 0
    with pytest.raises(ReshardError, match="no optimizer states that can be converted"):
        reshard.convert(
            folder / "torch_dcp", folder / "no", to="megatron", with_optimizer=True, no_tokenizer=True
        )
