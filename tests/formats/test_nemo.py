"""NeMo's folders become Hugging Face folders: bit for bit the model that they were made from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import reshard
from reshard.base.errors import ReshardError
from tests.genuine.make_nemo import nemo1, nemo2
from tests.judges import assert_same_tensors, tensors_of


@pytest.fixture(scope="module")
def base(hf_model: Callable[..., Path]) -> Path:
    return hf_model("llama", dtype="bfloat16", head_dim=8)


def test_nemo_2_needs_no_base(base: Path, tmp_path: Path) -> None:
    """Neither for the config, which model.yaml determines, nor for the tokenizer."""
    source = nemo2(base, tmp_path / "run--step=10-last")
    assert "--base" not in reshard.inspect(source).next
    reshard.convert(source, tmp_path / "out")
    assert_same_tensors(tensors_of(tmp_path / "out"), tensors_of(base))
    derived, own = (json.loads((each / "config.json").read_text()) for each in (tmp_path / "out", base))
    keys = (
        "model_type",
        "hidden_size",
        "num_key_value_heads",
        "rms_norm_eps",
        "rope_parameters",
        "vocab_size",
    )
    assert {key: derived[key] for key in keys} == {key: own[key] for key in keys}
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("place", ["weights", "."])
def test_both_folders_can_be_passed(place: str, base: Path, tmp_path: Path) -> None:
    source = nemo2(base, tmp_path / "run")
    assert reshard.inspect(source / place).family == "llama"
    assert reshard.verify(source / place, base).equal


def test_the_last_of_several_checkpoints_of_a_run(base: Path, tmp_path: Path) -> None:
    """With the names that NeMo's ModelCheckpoint gives them."""
    runs = tmp_path / "results" / "checkpoints"
    for step, end in ((5, ""), (10, ""), (10, "-last")):
        nemo2(base, runs / f"llama--val_loss=1.2300-step={step}-consumed_samples={8 * step}.0{end}")
    for place in (runs, runs.parent):
        assert "step=10-consumed_samples=80.0-last" in str(reshard.inspect(place).notes)
    done = reshard.convert(runs, tmp_path / "out", iteration=5)
    assert any("step=5-" in note for note in done.plan.notes)
    assert_same_tensors(tensors_of(tmp_path / "out"), tensors_of(base))


def test_nemo_1_with_a_base(base: Path, tmp_path: Path) -> None:
    source = nemo1(base, tmp_path / "unpacked")
    reshard.convert(source, tmp_path / "out", base=base)
    assert_same_tensors(tensors_of(tmp_path / "out"), tensors_of(base))


def test_states_are_found_below_the_prefix(base: Path, tmp_path: Path) -> None:
    source = nemo2(base, tmp_path / "run", optimizer=True)
    reshard.convert(source, tmp_path / "out", to="dcp", with_optimizer=True)
    states = reshard.open(tmp_path / "out").checkpoint.optimizer.states["exp_avg_sq"]
    assert states.keys() == tensors_of(base).keys()


def test_wrappers_in_front_are_stripped_before_layers_are_unstacked(base: Path, tmp_path: Path) -> None:
    source = nemo2(base, tmp_path / "run", wrapper="_orig_mod.")
    with pytest.raises(ReshardError) as raised:
        reshard.convert(source, tmp_path / "out")
    assert [problem.code for problem in raised.value.problems] == ["wrapper-in-names"]
    reshard.convert(source, tmp_path / "out", strip=("_orig_mod.",))
    assert_same_tensors(tensors_of(tmp_path / "out"), tensors_of(base))


@pytest.mark.parametrize(
    "content", ["!!python/object/apply:os.system ['touch executed']", "[1", "x: &a [*a]"]
)
def test_a_hostile_model_yaml_builds_nothing(
    content: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = nemo2(base, tmp_path / "run")
    (source / "context" / "model.yaml").write_text(content)
    reshard.convert(source, tmp_path / "out", base=base)
    assert_same_tensors(tensors_of(tmp_path / "out"), tensors_of(base))
    assert not Path("executed").exists()


def test_a_model_yaml_that_leaves_out_defaults_needs_a_base(base: Path, tmp_path: Path) -> None:
    source = nemo2(base, tmp_path / "run")
    file = source / "context" / "model.yaml"
    model = yaml.safe_load(file.read_text())
    del model["config"]["rotary_base"]
    file.write_text(yaml.safe_dump(model))
    with pytest.raises(ReshardError) as raised:
        reshard.convert(source, tmp_path / "out")
    assert "--base" in reshard.inspect(source).next
    (problem,) = raised.value.problems
    assert problem.code == "model-unknown" and "--base" in str(problem.remedy)
    reshard.convert(source, tmp_path / "out", base=base)
    assert_same_tensors(tensors_of(tmp_path / "out"), tensors_of(base))
