"""The output for InternEvo is the same as InternEvo's own, and loads."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import reshard
from reshard.algebra.layout import Layout
from reshard.base.errors import ReshardError
from reshard.formats import internlm
from reshard.formats.internlm.write import stages
from reshard.transfer.source_files import Sources
from tests.commandline import reshard as run
from tests.environments import python
from tests.genuine.internlm_reference import hub_logits
from tests.internlm.checkpoints import DATA, NAMES, WRITABLE, problems_of, same_as_before
from tests.judges import assert_agree, assert_same_tensors, tensors_of

# --------------------------------------------------------------------------------------------- writing


@pytest.mark.parametrize("name", WRITABLE)
def test_what_is_written_is_what_internevo_wrote(
    name: str, tmp_path: Path, hub: Callable[[str], Path]
) -> None:
    layout = WRITABLE[name]
    reshard.convert(
        hub(name),
        tmp_path / "out",
        to="internlm",
        tp=layout.tp,
        pp=layout.pp,
        vpp=layout.vpp,
        no_tokenizer=True,
    )
    genuine = {file.name for file in (DATA / name).glob("model_tp*.pt")}
    assert {file.name for file in (tmp_path / "out").glob("model_tp*.pt")} == genuine
    for file in genuine:
        ours, theirs = (
            torch.load(folder / file, weights_only=True) for folder in (tmp_path / "out", DATA / name)
        )
        assert_same_tensors(ours, theirs)
    ours = torch.load(tmp_path / "out" / "model_config.pt", weights_only=True)
    theirs = reshard.formats.internlm.model_config.read_model_config(DATA / name, Sources())
    choices = {"dtype", "use_flash_attn", "parallel_output", "multiple_of", "mlp_layer_fusion", "adapt_hf"}
    assert {key: ours[key] for key in theirs.keys() - choices} == {
        key: theirs[key] for key in theirs.keys() - choices
    }


@pytest.mark.parametrize(
    ("name", "tp", "pp"), [("internlm2-tp2pp2", 1, 3), ("llama-tp2", 2, 1), ("internlm1-tp2", 4, 2)]
)
def test_other_layouts_come_back_bit_for_bit(
    name: str, tp: int, pp: int, tmp_path: Path, hub: Callable[[str], Path]
) -> None:
    reshard.convert(DATA / name, tmp_path / "evo", to="internlm", tp=tp, pp=pp, no_tokenizer=True)
    assert internlm.FORMAT.detect(tmp_path / "evo")
    assert same_as_before(tmp_path / "evo", tmp_path / "out", hub(name)) is not None
    assert run("verify", tmp_path / "evo", DATA / name).code == 0


def test_layers_that_do_not_divide_go_to_the_last_stages() -> None:
    assert stages(Layout(1, 3), 8) == [(0, 0, range(2)), (1, 0, range(2, 5)), (2, 0, range(5, 8))]
    interleaved = [(0, 0, range(1)), (1, 0, range(1, 3)), (0, 1, range(3, 4)), (1, 1, range(4, 6))]
    assert stages(Layout(1, 2, 2), 6) == interleaved
    with pytest.raises(ReshardError, match="cannot be divided among the pipeline stages"):
        stages(Layout(1, 2, 4), 6)
    with pytest.raises(ReshardError, match="distributes layers itself"):
        stages(Layout(1, 2, stages=(3, 5)), 8)


def test_a_width_that_is_no_neat_ratio_is_built_as_it_is() -> None:
    for hidden, ffn in ((4096, 11008), (2048, 8192), (5120, 13824), (896, 4864), (7, 101)):
        config = {
            "hidden_size": hidden,
            "intermediate_size": ffn,
            "num_attention_heads": 1,
            "num_hidden_layers": 1,
        }
        made = reshard.formats.internlm.model_config.engine_config(
            "llama", config | {"vocab_size": 8}, 1, None
        )
        multiple = made["multiple_of"]
        assert -(-int(hidden * made["mlp_ratio"]) // multiple) * multiple == ffn


def test_a_tied_head_is_written_as_a_tensor_of_its_own(tmp_path: Path, hub: Callable[[str], Path]) -> None:
    source = Path(shutil.copytree(hub("llama-tp2"), tmp_path / "tied"))
    tensors = tensors_of(source)
    del tensors["lm_head.weight"]
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    reshard.convert(source, tmp_path / "evo", to="internlm", tp=2, no_tokenizer=True)
    reshard.convert(tmp_path / "evo", tmp_path / "back", no_tokenizer=True)
    back = tensors_of(tmp_path / "back")
    assert torch.equal(back.pop("lm_head.weight"), tensors["model.embed_tokens.weight"])
    assert_same_tensors(back, tensors)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"tp": 3}, "are not divisible by --tp 3"),
        ({"tp": 4}, "query groups are not divisible by --tp 4"),
        ({"pp": 6}, "layers cannot be divided among the pipeline stages"),
        ({"ep": 2}, "divided over ranks by --tp, --pp, --vpp only"),
    ],
)
def test_layouts_that_internevo_cannot_build_are_refused(
    layout: dict[str, int], message: str, tmp_path: Path, hub: Callable[[str], Path]
) -> None:
    assert message in problems_of(hub("internlm2-tp2pp2"), tmp_path / "out", to="internlm", **layout)


def test_families_that_internevo_does_not_have_are_refused(
    hf_model: Callable[..., Path], tmp_path: Path
) -> None:
    found = problems_of(hf_model("qwen2"), tmp_path / "out", to="internlm")
    assert "the family qwen2 is not available for this engine" in found and "internlm2" in found
    assert "heads of this size" in problems_of(hf_model("llama"), tmp_path / "out", to="internlm")


# ---------------------------------------------------------------------------------- the real framework


@pytest.fixture
def internevo() -> Callable[..., None]:
    """Run `make_internlm` in its own process: InternEvo keeps its groups in global variables."""

    def call(*words: object) -> None:
        command = [python("internevo"), "-m", "tests.genuine.make_internlm", *map(str, words)]
        subprocess.run(command, check=True, capture_output=True, timeout=600)

    return call


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("internlm2-tp2pp2", {"tp": 2, "pp": 2}),
        ("internlm2-interleaved", {"tp": 1}),
        ("internlm2-chunks", {"pp": 2, "vpp": 2}),
        ("llama-tp2", {"pp": 2}),
        ("llama-tp16", {"tp": 4}),
        ("internlm2-biases", {"tp": 2}),
        ("internlm1-tp2", {"tp": 2, "pp": 2}),
    ],
)
def test_internevo_loads_strictly_and_computes_the_same(
    name: str,
    layout: dict[str, int],
    tmp_path: Path,
    hub: Callable[[str], Path],
    internevo: Callable[..., None],
) -> None:
    reshard.convert(hub(name), tmp_path / "evo", to="internlm", no_tokenizer=True, **layout)
    internevo("judge", tmp_path / "evo", tmp_path / "logits.npz")
    assert_agree(np.load(tmp_path / "logits.npz")["logits"], np.load(DATA / name / "logits.npz")["logits"])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_checkpoints_that_are_made_anew_are_read(
    name: str, tmp_path: Path, internevo: Callable[..., None]
) -> None:
    internevo("make", tmp_path, name)
    reshard.convert(tmp_path / name, tmp_path / "hub", no_tokenizer=True)
    expected = np.load(tmp_path / name / "logits.npz")
    assert_agree(hub_logits(tmp_path / "hub", expected["tokens"]), expected["logits"])
