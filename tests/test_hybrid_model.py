"""HybridModel of megatron-core 0.19: read, written, and converted to GPTModel and back, with the optimizer."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("megatron.core")

import reshard
from reshard.base.errors import ReshardError
from reshard.containers.dcp_metadata import read_metadata
from reshard.oracle.transformers import transformers_logits
from reshard.transfer.source_files import Sources
from tests.environments import python
from tests.genuine.make_hybrid import ENVIRONMENT, RUNS, TOKENS
from tests.judges import assert_agree
from tests.test_families import VARIANTS, WIDE

ROOT = Path(__file__).parent.parent
DATA = Path(__file__).parent / "data" / "megatron-hybrid"
NOT_COMPUTED = {
    "llama_rope_scaling": "the rotary scaling of Llama 3",
    "cwm": "the rotary scaling of Llama 3",
    "ernie4_5": "interleaved rotary embeddings",
    "ernie4_5_bias_tied": "interleaved rotary embeddings",
}
"""Variants that HybridModel does not compute as GPTModel does, and what it lacks."""
NOT_JUDGED = {
    "deepseek_v3_noq": "megatron-core 0.19 adds a norm before linear_q_proj",
    "gpt_oss": "the stand-in for TransformerEngine has no attention with offsets",
}
"""Variants whose logits no HybridModel computes on a CPU, and why."""
BY_OWN_MEANS = ("dense", "tied", "experts")
"""Runs of GPTModel that megatron-core itself can load into a HybridModel."""
Convert = Callable[..., Path]


def run(*words: str | Path) -> str:
    """The last line of what tests/genuine/make_hybrid.py prints."""
    paths = os.pathsep.join(map(str, (ROOT / "src", ROOT)))
    command = [python(ENVIRONMENT), "-m", "tests.genuine.make_hybrid", *words]
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().rpartition("\n")[2]


def iteration(root: Path) -> Path:
    """The folder of the only iteration in a Megatron folder."""
    (folder,) = (each for each in root.iterdir() if each.is_dir())
    return folder


def logits(root: Path) -> np.ndarray:
    """What make_hybrid.py computed of the iteration, for the tokens that the vocabulary has."""
    folder = iteration(root)
    assert not (folder / "logits.txt").exists(), (folder / "logits.txt").read_text()
    with np.load(folder / "logits.npz") as saved:
        return np.stack([saved[name] for name in saved.files])[..., :250]


def keys(root: Path) -> tuple[dict[str, tuple[str, tuple[int, ...]]], set[str]]:
    """The tensors with dtype and shape, and the objects, but for those of a run."""
    metadata = read_metadata(iteration(root) / ".metadata", Sources())
    objects = {key for key in metadata.objects if not key.startswith(("common_state", "rng_state"))}
    return {key: (str(each.dtype), each.shape) for key, each in metadata.tensors.items()}, objects


@pytest.mark.parametrize("name", [each.name for each in sorted(DATA.iterdir())])
def test_what_a_hybrid_model_saved_is_read_and_written_alike(name: str, tmp_path: Path) -> None:
    """The folders are those of `make_hybrid make`, with logits of the HybridModel that was saved."""
    source, run_of = DATA / name, RUNS[name]
    sizes = {size: getattr(run_of.layout, size) for size in ("tp", "pp", "vpp", "ep", "etp")}
    options = {"to": "megatron", "no_tokenizer": True}
    assert reshard.inspect(source).as_dict()["variant"] == "hybrid"
    reshard.convert(source, tmp_path / "gpt", megatron_model="gpt", **options)
    reshard.convert(tmp_path / "gpt", tmp_path / "hybrid", megatron_model="hybrid", **sizes, **options)
    assert keys(tmp_path / "hybrid") == keys(source)
    assert reshard.verify(source, tmp_path / "hybrid").equal
    reshard.convert(source, tmp_path / "hf", no_tokenizer=True)
    computed = transformers_logits(tmp_path / "hf", TOKENS)
    assert_agree(logits(source)[-1], computed[..., :250])


def test_its_logits_need_a_gpu() -> None:
    with pytest.raises(ReshardError, match="--megatron-model gpt"):
        reshard.verify(DATA / "latent", DATA / "latent", logits=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_both_models_compute_and_train_the_same(name: str, tmp_path: Path) -> None:
    source, gpt, hybrid = tmp_path / "source", tmp_path / "gpt", tmp_path / "hybrid"
    run("make", name, source)
    options = {"to": "megatron", "with_optimizer": True, "no_tokenizer": True}
    layout = RUNS[name].layout
    reshard.convert(source, gpt, megatron_model="gpt", **options)
    sizes = {size: getattr(layout, size) for size in ("tp", "pp", "vpp", "ep", "etp")}
    reshard.convert(gpt, hybrid, megatron_model="hybrid", **sizes, **options)
    run("logits", iteration(gpt), iteration(hybrid))
    assert np.array_equal(logits(gpt), logits(source)) and np.array_equal(logits(hybrid), logits(source))
    losses = {
        run("resume", name, iteration(source), tmp_path / "further"),
        run("resume", name, iteration(hybrid), tmp_path / "further hybrid"),
        run("resume", f"gpt-{name}", iteration(gpt), tmp_path / "further gpt"),
    }
    assert len(losses) == 1, losses
    assert all(map(np.isfinite, json.loads(losses.pop())))
    for each in ("further hybrid", "further gpt"):
        assert reshard.verify(tmp_path / "further", tmp_path / each).equal
    if name in BY_OWN_MEANS:
        (iteration(gpt) / "logits.npz").unlink()
        run("interop", RUNS[name].pattern.replace("|", ""), iteration(gpt))
        assert np.array_equal(logits(gpt), logits(source))


@pytest.mark.slow
def test_every_family_is_computed(hf_model: Convert, tmp_path: Path) -> None:
    names = [name for name in VARIANTS if name not in NOT_COMPUTED and name not in NOT_JUDGED]
    for name in names:
        reshard.convert(hf_model(name), tmp_path / name, to="megatron", megatron_model="hybrid", **WIDE[name])
    run("logits", *(iteration(tmp_path / name) for name in names))
    for name in names:
        assert_agree(logits(tmp_path / name)[-1], transformers_logits(hf_model(name), TOKENS)[..., :250])


@pytest.mark.parametrize("name", NOT_COMPUTED)
@pytest.mark.core("ernie4_5")
def test_what_a_hybrid_model_lacks_is_named(name: str, hf_model: Convert, tmp_path: Path) -> None:
    with pytest.raises(ReshardError) as refused:
        reshard.convert(hf_model(name), tmp_path / "out", to="megatron", megatron_model="hybrid")
    (problem,) = refused.value.problems
    assert problem.code == "megatron-model-not-available" and NOT_COMPUTED[name] in str(problem.found)


@pytest.mark.parametrize("to", ["megatron-legacy", "megatron-fsdp"])
def test_other_formats_are_for_gpt_models(to: str, hf_model: Convert, tmp_path: Path) -> None:
    with pytest.raises(ReshardError, match="torch_dist only"):
        reshard.convert(hf_model("qwen3"), tmp_path / "out", to=to, megatron_model="hybrid")
    assert not (tmp_path / "out").exists()
