"""The format of Meta's Llama code, read and written: the judge is its own model."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import reshard
from reshard.base.errors import ReshardError
from reshard.formats.tables.meta import settings_of_width
from reshard.oracle.transformers import transformers_logits
from tests.environments import python
from tests.judges import assert_agree, assert_same_tensors, tensors_of

GENUINE = Path(__file__).parents[1] / "data" / "meta"
"""What `tests.genuine.make_meta save FOLDER 2 64 rope_theta=500000.0` left."""
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 12))
LLAMA_3 = 128256


def meta(*words: object) -> None:
    subprocess.run([python("meta"), "-m", "tests.genuine.make_meta", *map(str, words)], check=True)


def agree(folder: Path, source: Path) -> None:
    """Whether transformers computes what Meta's model did."""
    assert_agree(transformers_logits(folder, TOKENS), np.load(source / "logits.npy"))


def test_the_files_of_ranks_become_what_they_compute(tmp_path: Path) -> None:
    assert "TP2" in str(reshard.inspect(GENUINE))
    reshard.convert(GENUINE, tmp_path / "hf", no_tokenizer=True)
    agree(tmp_path / "hf", GENUINE)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_written_has_the_same_bits(ranks: int, tmp_path: Path) -> None:
    """In the layout of Meta's files but for the embedding, whose columns Llama 2 divides."""
    reshard.convert(GENUINE, tmp_path / "out", to="meta", tp=ranks, no_tokenizer=True)
    assert reshard.verify(tmp_path / "out", GENUINE).equal
    params = json.loads((tmp_path / "out" / "params.json").read_text())
    theirs = json.loads((GENUINE / "params.json").read_text())
    kept = params.keys() & theirs.keys() - {"multiple_of"}
    assert {key: params[key] for key in kept} == {key: theirs[key] for key in kept}
    for rank in range(ranks):
        name = f"consolidated.{rank:02d}.pth"
        ours = torch.load(tmp_path / "out" / name)
        if ranks == 2:
            own = torch.load(GENUINE / name)
            table = ours.pop("tok_embeddings.weight"), own.pop("tok_embeddings.weight")
            assert [*table[0].shape], [*table[1].shape] == ([64, 16], [32, 32])
            assert ours.keys() == own.keys()
            assert all(torch.equal(ours[key], own[key]) for key in own)


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_of_the_hub_comes_back(tied: bool, hf_model: Callable[..., Path], tmp_path: Path) -> None:
    """A tied head is stored twice, as in Llama 3.2, and is one tensor again."""
    base = hf_model("llama", dtype="bfloat16", head_dim=8, vocab_size=288, tie_word_embeddings=tied)
    reshard.convert(base, tmp_path / "meta", to="meta", tp=2)
    assert "output.weight" in torch.load(tmp_path / "meta" / "consolidated.00.pth")
    reshard.convert(tmp_path / "meta", tmp_path / "back", base=base)
    assert_same_tensors(tensors_of(tmp_path / "back"), tensors_of(base))


@pytest.mark.parametrize("hidden", [2048, 3072, 4096, 5120, 8192, 16384])
def test_the_width_is_what_meta_computes_of_its_settings(hidden: int) -> None:
    for width in (hidden * 4, hidden * 7 // 2, hidden * 3, 14336, 11008, hidden + 7):
        told = settings_of_width(hidden, width)
        step, factor = told["multiple_of"], told["ffn_dim_multiplier"]
        wide = int(2 * (4 * hidden) / 3)  # FeedForward of llama-models
        wide = int(factor * wide) if factor is not None else wide
        assert step * ((wide + step - 1) // step) == width


@pytest.mark.parametrize(("tied", "factor"), [(False, 8), (True, 32)])
def test_the_scaled_rope_of_a_tied_model_is_that_of_llama_3_2(
    tied: bool, factor: int, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(GENUINE, source)
    for file in source.glob("*.pth") if tied else ():
        content = torch.load(file)
        del content["output.weight"]
        torch.save(content, file)
    params = json.loads((source / "params.json").read_text())
    (source / "params.json").write_text(json.dumps(params | {"use_scaled_rope": True}))
    reshard.convert(source, tmp_path / "out", no_tokenizer=True)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_parameters"]["factor"] == factor
    assert any("factor of the scaled rope" in note for note in reshard.inspect(source).notes)


def test_the_file_of_torchtune_is_read(tmp_path: Path) -> None:
    reshard.convert(GENUINE, tmp_path / "one", to="meta", no_tokenizer=True)
    epoch = tmp_path / "epoch_0"
    epoch.mkdir()
    (tmp_path / "one" / "consolidated.00.pth").rename(epoch / "model-00001-of-00001.bin")
    shutil.copy(tmp_path / "one" / "params.json", epoch)
    assert reshard.verify(epoch, GENUINE).equal
    assert reshard.verify(epoch / "model-00001-of-00001.bin", GENUINE).equal


def _without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _copied(folder: Path) -> None:
    shutil.copy(folder / "consolidated.00.pth", folder / "consolidated.01.pth")


def _changed(**values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "params.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def _narrower(folder: Path) -> None:
    content = torch.load(folder / "consolidated.01.pth")
    content["layers.0.attention.wq.weight"] = content["layers.0.attention.wq.weight"][:8].clone()
    torch.save(content, folder / "consolidated.01.pth")


def _lacking(folder: Path) -> None:
    content = torch.load(folder / "consolidated.01.pth")
    del content["layers.0.attention.wq.weight"]
    torch.save(content, folder / "consolidated.01.pth")


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (_without("consolidated.00.pth"), "rank-file-missing"),
        (_without("consolidated.01.pth"), "rank-file-missing"),
        (_without("params.json"), "meta-params-unusable"),
        (_changed(n_heads="4"), "meta-params-unusable"),
        (_copied, "rank-file-copied"),
        (_narrower, "rank-parts-misfit"),
        (_lacking, "rank-parts-misfit"),
    ],
)
def test_damage_is_named(damage: Callable[[Path], None], code: str, tmp_path: Path) -> None:
    shutil.copytree(GENUINE, tmp_path / "source")
    damage(tmp_path / "source")
    with pytest.raises(ReshardError) as raised:
        reshard.convert(tmp_path / "source", tmp_path / "out", no_tokenizer=True)
    assert {problem.code for problem in raised.value.problems} == {code}
    assert not (tmp_path / "out").exists()


def test_the_norms_of_ranks_are_compared(tmp_path: Path) -> None:
    shutil.copytree(GENUINE, tmp_path / "source")
    content = torch.load(tmp_path / "source" / "consolidated.01.pth")
    content["norm.weight"] += 1
    torch.save(content, tmp_path / "source" / "consolidated.01.pth")
    with pytest.raises(ReshardError, match=r"norm\.weight"):
        reshard.convert(tmp_path / "source", tmp_path / "out", no_tokenizer=True)


def test_a_model_that_meta_does_not_build_is_refused(hf_model: Callable[..., Path], tmp_path: Path) -> None:
    base = hf_model("llama", head_dim=16)
    with pytest.raises(ReshardError, match="heads that together"):
        reshard.convert(base, tmp_path / "out", to="meta")
    with pytest.raises(ReshardError, match=r"divided over ranks by --tp only"):
        reshard.convert(base, tmp_path / "out", to="meta", tp=2, pp=2)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "scaled"), [(1, "false"), (2, "true")])
def test_meta_s_own_model_reads_and_writes_the_same(ranks: int, scaled: str, tmp_path: Path) -> None:
    """Saved by Meta's model, converted, and written again for it: it loads strictly, and computes the same."""
    source, hub = tmp_path / "source", tmp_path / "hf"
    meta("save", source, ranks, LLAMA_3, f"use_scaled_rope={scaled}", "rope_theta=500000.0")
    reshard.convert(source, hub, no_tokenizer=True)
    agree(hub, source)
    for tp in (1, 2):
        again = tmp_path / f"tp{tp}"
        reshard.convert(hub, again, to="meta", tp=tp, no_tokenizer=True)
        meta("load", again, tp)
        agree(hub, again)
