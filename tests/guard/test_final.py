"""`--final`: the last checkpoint of any framework as a folder that loads, with its name only if all checks pass."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from reshard.final import acceptance, finite_weights
from reshard.final.final_folder import FinalFolder, FinalRequest, final_of
from reshard.final.saved_checkpoints import FoundCheckpoint, saved_in
from reshard.formats import open_checkpoint
from reshard.oracle.transformers import transformers_logits
from reshard.transfer.run_files import locked

Models = Callable[..., Path]
DATA = Path(__file__).parents[1] / "data"


def wrong(finished: FinalFolder) -> dict[str, str]:
    return {check.name: check.problems[0].message for check in finished.checks if not check.right}


def found_in(folder: Path) -> FoundCheckpoint:
    found = saved_in(folder).weights
    assert found
    return found


def saved(model: Path, output: Path) -> Path:
    """A step as the Trainer saves it, without a tokenizer."""
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).save_pretrained(output / "checkpoint-4")
    return output


def adapted(model: Path, output: Path) -> Path:
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), config).save_pretrained(
        output / "checkpoint-4"
    )
    return output


def test_the_tokenizer_is_that_of_the_base_if_the_step_has_none(hf_model: Models, tmp_path: Path) -> None:
    model = hf_model("qwen3")
    finished = final_of(found_in(saved(model, tmp_path)), tmp_path / "final", FinalRequest(model=str(model)))
    assert finished.whole, finished.problems
    assert len(AutoTokenizer.from_pretrained(finished.path)) == 283
    assert not (tmp_path / "final.unchecked").exists()


def test_the_steps_of_deepspeed_become_a_folder_that_loads(tmp_path: Path) -> None:
    """The test data has no tokenizer, and neither has what it was trained on."""
    finished = final_of(found_in(DATA / "deepspeed/z3"), tmp_path / "final")
    assert set(wrong(finished)) <= {"tokenizer", "chat template"}
    assert np.isfinite(transformers_logits(finished.path, np.arange(8)[None])).all()


def test_an_adapter_stays_one_or_is_merged(hf_model: Models, tmp_path: Path) -> None:
    found = found_in(adapted(hf_model("qwen3"), tmp_path))
    adapter = final_of(found, tmp_path / "adapter")
    assert adapter.whole, adapter.problems
    merged = final_of(found, tmp_path / "merged", FinalRequest(merge=True))
    assert merged.whole, merged.problems
    assert (adapter.path / "adapter_config.json").is_file() and (merged.path / "config.json").is_file()


@pytest.mark.parametrize("name", ["swift-tp2", "bridge-tp2"])
def test_so_does_an_adapter_of_megatron_core(name: str, tmp_path: Path) -> None:
    """The test data has no tokenizer."""
    found = found_in(DATA / "megatron_lora" / name)
    origin = {"base": DATA / "megatron_lora" / "base-llama", "folder": tmp_path}
    for merge, file in ((False, "adapter_config.json"), (True, "config.json")):
        finished = final_of(found, tmp_path / str(merge), FinalRequest(merge=merge, **origin))
        assert set(wrong(finished)) <= {"tokenizer", "chat template"}
        assert (finished.path / file).is_file()


def test_what_has_no_adapter_is_not_merged(hf_model: Models, tmp_path: Path) -> None:
    model = hf_model("qwen3")
    finished = final_of(
        found_in(saved(model, tmp_path)), tmp_path / "final", FinalRequest(merge=True, base=model)
    )
    assert wrong(finished) == {"converted": "no adapter to merge"}
    assert not (tmp_path / "final").exists()


def test_a_step_with_nan_gets_no_name(hf_model: Models, tmp_path: Path) -> None:
    model = hf_model("qwen3")
    file = saved(model, tmp_path) / "checkpoint-4/model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    finished = final_of(found_in(tmp_path), tmp_path / "final", FinalRequest(base=model))
    assert wrong(finished) == {"converted": "a weight is NaN or infinite"}
    assert not (tmp_path / "final").exists()


def test_without_transformers_the_checks_say_what_they_left_out(
    hf_model: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = hf_model("qwen3")
    monkeypatch.setattr(acceptance, "find_spec", lambda name: None)
    finished = final_of(found_in(saved(model, tmp_path)), tmp_path / "final", FinalRequest(base=model))
    told = {check.name: check.found for check in finished.checks}
    assert finished.whole
    assert told["loads strictly"].startswith("not checked: transformers is not installed beside reshard")
    assert told["tokenizer"] == "not checked: transformers is not installed beside reshard"
    assert [check.name for check in finished.checks if not check.checked] == [
        *("loads strictly", "tokenizer", "chat template")
    ]


def test_what_is_compared_with_the_base_is_not_ticked_without_it(hf_model: Models, tmp_path: Path) -> None:
    """The base that the adapter names is gone, as on another machine."""
    model = Path(shutil.copytree(hf_model("qwen3"), tmp_path / "model"))
    found = found_in(adapted(model, tmp_path / "out"))
    shutil.rmtree(model)
    checks = {each.name: each for each in final_of(found, tmp_path / "final").checks}
    fits = checks["adapter fits its base"]
    assert not fits.checked and "the base model is not known" in fits.found


def test_what_users_added_stays(hf_model: Models, tmp_path: Path) -> None:
    """Also if the name is that of a link to the folder, and if the new folder has a file of the same name."""
    model = hf_model("qwen3")
    found, place = found_in(saved(model, tmp_path)), tmp_path / "final"
    (tmp_path / "disk/final").mkdir(parents=True)
    place.symlink_to("disk/final")
    assert final_of(found, place, FinalRequest(base=model)).path == place
    (place / "README.md").write_text("mine")
    (place / "notes/empty").mkdir(parents=True)
    (place / "notes/today").write_text("mine, too")
    (place / "latest").symlink_to("notes")
    record = json.loads((place / "reshard.json").read_text())
    del record["files"]["generation_config.json"]
    (place / "reshard.json").write_text(json.dumps(record))
    again = final_of(found, place, FinalRequest(base=model))
    assert again.whole and place.is_symlink()
    assert (place / "README.md").read_text() == "mine"
    assert (place / "latest/today").read_text() == "mine, too" and (place / "notes/empty").is_dir()
    assert again.checks[-1].found == "kept in final: README.md, generation_config.json.kept, latest, notes"
    assert [each.name for each in (tmp_path / "disk").iterdir()] == ["final"]


def test_a_file_with_the_name_of_the_folder_stays(hf_model: Models, tmp_path: Path) -> None:
    model = hf_model("qwen3")
    (tmp_path / "final").write_text("mine")
    assert final_of(found_in(saved(model, tmp_path)), tmp_path / "final", FinalRequest(base=model)).whole
    assert (tmp_path / "final.kept").read_text() == "mine"


@pytest.mark.parametrize("at", [0, 3, 4, 9, 10])
def test_weights_are_looked_through_to_their_end(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finite_weights, "WINDOW_ELEMENTS", 4)
    weight = torch.zeros(11)
    save_file({"model.norm.weight": weight}, tmp_path / "model.safetensors")
    assert list(finite_weights.nonfinite(open_checkpoint(tmp_path))) == []
    weight[at] = torch.inf
    save_file({"model.norm.weight": weight}, tmp_path / "model.safetensors")
    assert list(finite_weights.nonfinite(open_checkpoint(tmp_path))) == ["model.norm.weight"]


def test_a_model_that_reshard_did_not_write_is_kept(hf_model: Models, tmp_path: Path) -> None:
    model = hf_model("qwen3")
    (tmp_path / "final").mkdir()
    (tmp_path / "final/model.safetensors").write_text("mine")
    assert final_of(found_in(saved(model, tmp_path)), tmp_path / "final", FinalRequest(base=model)).whole
    assert (tmp_path / "final/model.safetensors.kept").read_text() == "mine"


def test_a_folder_that_cannot_be_replaced_stays(hf_model: Models, tmp_path: Path) -> None:
    model = hf_model("qwen3")
    found, place = found_in(saved(model, tmp_path)), tmp_path / "final"
    assert final_of(found, place, FinalRequest(base=model)).whole
    with locked(place):
        finished = final_of(found, place, FinalRequest(base=model))
    assert wrong(finished) == {"your files": "another run is writing to the destination"}
    assert (place / "config.json").is_file() and (finished.path / "config.json").is_file()
