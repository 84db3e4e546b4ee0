"""A running vLLM and a trainer of which something is lost: one error on both sides, and a new connection works."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import reshard

pytest.importorskip("megatron.core")

from tests.genuine.vllm_server import Server, serving
from tests.live.test_weight_transfer import SIZES

pytestmark = pytest.mark.slow

RANKS = 2
Models = Callable[..., Path]


@pytest.fixture(scope="module")
def model(hf_model: Models) -> Path:
    return hf_model("qwen3", dtype="bfloat16", **SIZES)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(model, tmp_path_factory.mktemp("server") / "log", dtype="bfloat16") as running:
        yield running


def sent(case: str, model: Path, url: str, folder: Path) -> list[Any]:
    """What each rank of a trainer tells after it has sent its weights; a killed one tells nothing."""
    if not (folder / "start").exists():
        reshard.convert(model, folder / "start", to="megatron", transformer_impl="local")
    for each in folder.glob(f"{case}*"):
        each.unlink()
    command = [sys.executable, "-m", "tests.live.faulty_trainers", case, url, folder, model]
    ranks = [subprocess.Popen(list(map(str, [*command, rank, RANKS]))) for rank in range(RANKS)]
    for each in ranks:
        each.wait(120)
    return [json.loads(each.read_text()) for each in sorted(folder.glob(f"{case}-*"))]


def codes(told: Any) -> set[str]:
    return {code for code, _ in told}


def test_a_killed_rank_ends_in_an_error_and_the_next_trainer_works(
    model: Path, server: Server, tmp_path: Path
) -> None:
    before = server.answers()
    assert sent("well", model, server.url, tmp_path) == [[], []]
    assert server.answers() == before  # the trainer has the same weights
    (left,) = sent("killed", model, server.url, tmp_path)
    assert codes(left) == {"transfer-rank-lost", "transfer-weights-mixed"}
    log = server.log.read_text(errors="replace")
    assert "the connection to a rank was lost" in log and "some of the new weights" in log
    assert sent("well", model, server.url, tmp_path) == [[], []]
    assert server.answers() == before
    assert sent("slow", model, server.url, tmp_path) == [[], []]
    assert server.answers() == before


def test_an_engine_that_is_killed_and_restarted(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path / "log", dtype="bfloat16") as first:
        found = sent("engine", model, f"{first.url} {first.process.pid}", tmp_path)
    assert len(found) == 2 and found[0] == found[1]
    assert codes(found[0]) == {"transfer-rank-lost", "transfer-weights-mixed"}
    with serving(model, tmp_path / "log-2", tp=2, dtype="bfloat16") as restarted:
        before = restarted.answers()
        assert sent("well", model, restarted.url, tmp_path) == [[], []]
        assert restarted.answers() == before


def test_another_model_is_refused_and_keeps_its_weights(
    server: Server, hf_model: Models, tmp_path: Path
) -> None:
    before = server.answers()
    other = hf_model("llama_tied", dtype="bfloat16", **SIZES)
    first, second = sent("well", other, server.url, tmp_path)
    assert first == second and codes(first) == {"transfer-of-another-model"}
    assert server.answers() == before


def test_a_server_without_the_backend_says_what_it_lacks(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path / "log", dtype="bfloat16", transfers=False) as without:
        first, second = sent("well", model, without.url, tmp_path)
    assert first == second and codes(first) == {"transfer-engine-refused"}
    first, second = sent("well", model, "http://127.0.0.1:9", tmp_path)
    assert first == second and codes(first) == {"transfer-rank-lost"}
