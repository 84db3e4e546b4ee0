"""Adapters of Megatron-Core, compared with megatron-core's own results and judged by the real PEFT."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

import reshard
from reshard.base.errors import ReshardError
from tests import commandline
from tests.environments import python
from tests.genuine import make_megatron_lora as genuine
from tests.genuine.peft import load
from tests.judges import THRESHOLD, assert_same_tensors

DATA = Path(__file__).parent / "data" / "megatron_lora"


def base_of(name: str) -> Path:
    variant = {**genuine.VARIANTS, **genuine.SHARED_GROUPS}[name]
    return DATA / f"base-{variant.base}"


def made(name: str, out: Path) -> Path:
    """Let the frameworks write a variant now."""
    shutil.copytree(base_of(name), out / base_of(name).name)
    command = [python("bridges"), "-m", "tests.genuine.make_megatron_lora", str(out), name]
    subprocess.run(command, check=True, timeout=300)
    return out / name


def assert_computes_what_megatron_did(model: torch.nn.Module, name: str, data: Path = DATA) -> None:
    reference = np.load(data / name / "logits.npy")
    tokens = torch.from_numpy(genuine.TOKENS)
    with torch.no_grad():
        ours = model.eval()(tokens).logits.numpy()
        before = load(base_of(name)).eval()(tokens).logits.numpy()
    assert np.abs(before - reference).max() > 0.1 * np.abs(reference).max()
    assert np.abs(ours - reference).max() <= THRESHOLD * np.abs(reference).max()


@pytest.mark.parametrize("name", genuine.VARIANTS)
def test_a_merged_model_computes_what_megatron_did_with_the_adapter(name: str, tmp_path: Path) -> None:
    reshard.convert(DATA / name, tmp_path / "ours", base=base_of(name), merge=True, no_tokenizer=True)
    assert_computes_what_megatron_did(load(tmp_path / "ours"), name)


@pytest.mark.parametrize("name", genuine.VARIANTS)
def test_peft_loads_the_adapter_and_computes_what_megatron_did(name: str, tmp_path: Path) -> None:
    reshard.convert(DATA / name, tmp_path / "ours", base=base_of(name))
    assert_computes_what_megatron_did(PeftModel.from_pretrained(load(base_of(name)), tmp_path / "ours"), name)


def test_projections_of_a_fused_linear_share_their_lora_a(tmp_path: Path) -> None:
    reshard.convert(DATA / "swift-tp2", tmp_path / "fused", base=base_of("swift-tp2"))
    reshard.convert(DATA / "bridge-canonical-tp2", tmp_path / "apart", base=base_of("swift-tp2"))
    for folder, shared in (("fused", True), ("apart", False)):
        tensors = load_file(tmp_path / folder / "adapter_model.safetensors")
        layer = "base_model.model.model.layers.0.self_attn"
        a = [tensors[f"{layer}.{name}.lora_A.weight"] for name in ("q_proj", "k_proj", "v_proj")]
        assert torch.equal(a[0], a[1]) is torch.equal(a[0], a[2]) is shared


@pytest.mark.parametrize("name", ["bridge-canonical-tp2", "swift-tp2"])
def test_shards_tell_the_order_of_rows_where_no_layout_is_recorded(name: str, tmp_path: Path) -> None:
    """Gate and up are in the order of the ranks that saved them; files next to the weights get lost."""
    bare = Path(shutil.copytree(DATA / name, tmp_path / "bare"))
    (bare / "iter_0000003" / "run_config.yaml").unlink(missing_ok=True)
    common = bare / "iter_0000003" / "common.pt"
    content = torch.load(common, weights_only=False)
    content.pop("args", None)
    torch.save(content, common)
    assert reshard.open(bare).layout.as_dict() is None
    for folder in (DATA / name, bare):
        reshard.convert(folder, tmp_path / folder.name / "peft", base=base_of(name), lora_alpha=genuine.ALPHA)
    ours, whole = (
        load_file(tmp_path / each / "peft" / "adapter_model.safetensors") for each in ("bare", name)
    )
    assert_same_tensors(ours, whole)


def test_an_adapter_merges_into_a_megatron_base(tmp_path: Path) -> None:
    name = "bridge-tp2"
    reshard.convert(base_of(name), tmp_path / "base", to="megatron", tp=2, no_tokenizer=True)
    for base in (base_of(name), tmp_path / "base"):
        reshard.convert(
            DATA / name,
            tmp_path / base.name / "ours",
            base=base,
            merge=True,
            to="megatron",
            pp=2,
            no_tokenizer=True,
        )
    assert reshard.verify(tmp_path / "base" / "ours", tmp_path / "base-llama" / "ours").equal


def test_inspect_says_what_it_is_and_what_to_type(tmp_path: Path) -> None:
    found = commandline.reshard("inspect", DATA / "swift-tp2", "--json").json
    assert any("rank 4" in note and "alpha 12" in note and "linear_qkv" in note for note in found["notes"])
    words = ["BASE_FOLDER", str(DATA / "swift-tp2-merged")]
    typed = [str(base_of("swift-tp2")) if word == words[0] else word for word in found["next"].split()[1:]]
    typed = [str(tmp_path / "out") if word == words[1] else word for word in typed]
    assert commandline.reshard(*typed, "--no-tokenizer", "--quiet").code == 0


def test_without_its_base_a_fused_adapter_is_refused(tmp_path: Path) -> None:
    for options in ({"merge": True}, {"to": "peft"}):
        with pytest.raises(ReshardError, match="--base DIR"):
            reshard.convert(DATA / "swift-tp2", tmp_path / "ours", **options)  # type: ignore[arg-type]


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReshardError) as caught:
        reshard.convert(DATA / "swift-experts-ep2", tmp_path / "ours", base=DATA / "base-llama", merge=True)
    assert any(".experts.0.linear_fc1" in str(problem.tensor) for problem in caught.value.problems)


@pytest.mark.slow
@pytest.mark.parametrize("name", genuine.VARIANTS)
def test_what_is_checked_in_is_what_the_projects_write(name: str, tmp_path: Path) -> None:
    reshard.convert(
        made(name, tmp_path), tmp_path / "ours", base=base_of(name), merge=True, no_tokenizer=True
    )
    assert_computes_what_megatron_did(load(tmp_path / "ours"), name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bridge-tp4", "swift-tp4"])
def test_an_adapter_of_ranks_that_share_query_groups(name: str, tmp_path: Path) -> None:
    adapter, base = made(name, tmp_path), base_of(name)
    reshard.convert(adapter, tmp_path / "merged", base=base, merge=True, no_tokenizer=True)
    assert_computes_what_megatron_did(load(tmp_path / "merged"), name, tmp_path)
    reshard.convert(adapter, tmp_path / "peft", base=base)
    assert_computes_what_megatron_did(
        PeftModel.from_pretrained(load(base), tmp_path / "peft"), name, tmp_path
    )


@pytest.mark.slow
def test_an_adapter_that_mixed_its_tokens_is_refused(tmp_path: Path) -> None:
    """Megatron-Bridge trains canonical adapters on ranks that share query groups, without computing their product."""
    name = "bridge-canonical-tp4"
    adapter = made(name, tmp_path)
    for options in ({"merge": True}, {"to": "peft"}, {"to": "megatron"}):
        with pytest.raises(ReshardError, match="this adapter mixed up its tokens") as refused:
            reshard.convert(adapter, tmp_path / "ours", base=base_of(name), **options)  # type: ignore[arg-type]
        assert len(refused.value.problems) == 2 * 3  # three pairs in two layers
        assert not (tmp_path / "ours").exists()
