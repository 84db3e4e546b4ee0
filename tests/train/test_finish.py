"""A run ends in a folder that loads; failed checks are reported, and the folder does not get its final name."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import reshard
from reshard.base.errors import ReshardError
from reshard.guard.end.acceptance import checked
from reshard.guard.end.final_folder import FinishedRun
from reshard.oracle.transformers import transformers_logits
from reshard.training import output_folder
from reshard.training.finish import export, finish
from reshard.training.output_folder import clear
from reshard.training.run import Run
from tests.environments import python
from tests.judges import TOKENS, tensors_of
from tests.train.conftest import spoil

Models = Callable[..., Path]


def run_of(model: Path, output: Path, **fields: Any) -> Run:
    return Run("sft", model, model, output, **fields)


def crc(tensor: torch.Tensor) -> int:
    return crc32(tensor.contiguous().view(torch.uint8).numpy().tobytes())


def digests(folder: Path) -> dict[str, int]:
    """The TRL engine's record of the weights in memory: a CRC32 per tensor."""
    return {name: crc32(tensor.contiguous().numpy().tobytes()) for name, tensor in tensors_of(folder).items()}


def leave(run: Run, checkpoint: Path, found: dict[str, int]) -> None:
    """The files of the ranks when they are done."""
    for folder in (run.output, checkpoint):
        (folder / "run.json").write_text(json.dumps(run.as_dict()))
    content = {"checkpoint": str(checkpoint), "step": 4, "digests": found}
    (run.output / "trained.json").write_text(json.dumps(content))


def trained(model: Path, output: Path, **fields: Any) -> tuple[Run, Path]:
    """A run whose checkpoint transformers has saved as its Trainer does: weights changed, use_cache off."""
    run, checkpoint = run_of(model, output, **fields), output / "checkpoint-4"
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.01)
    loaded.config.use_cache = False
    loaded.save_pretrained(checkpoint)
    AutoTokenizer.from_pretrained(model).save_pretrained(checkpoint)
    leave(run, checkpoint, digests(checkpoint))
    return run, checkpoint


def adapted(model: Path, output: Path) -> tuple[Run, Path]:
    """A run with LoRA, whose adapter PEFT has saved."""
    run, checkpoint = run_of(model, output, lora=True), output / "checkpoint-4"
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), config).save_pretrained(checkpoint)
    AutoTokenizer.from_pretrained(model).save_pretrained(checkpoint)
    leave(run, checkpoint, digests(checkpoint))
    return run, checkpoint


def wrong(finished: FinishedRun) -> dict[str, str]:
    return {check.name: check.problems[0].message for check in finished.checks if not check.right}


@pytest.mark.parametrize("name", ["qwen2", "qwen3_tied", "qwen3_moe"])
def test_the_final_folder_is_what_was_trained(name: str, tiny: Models, tmp_path: Path) -> None:
    run, checkpoint = trained(tiny(name), tmp_path / "out")
    finished = finish(run)
    assert finished.whole, finished.problems
    assert finished.final == run.output / "final" and not finished.merged
    assert [check.name for check in finished.checks] == [
        *("converted", "bits", "loads strictly", "config", "tied head", "tokenizer", "chat template"),
        "generation config",
    ]
    np.testing.assert_array_equal(
        transformers_logits(finished.final, TOKENS), transformers_logits(checkpoint, TOKENS)
    )
    config = json.loads((finished.final / "config.json").read_text())
    assert config["use_cache"] and config["torch_dtype"] == "float32" and config["rope_theta"] == 50000.0
    assert {"run.json", "tokenizer.json", "chat_template.jinja"} <= {p.name for p in finished.final.iterdir()}
    assert ("lm_head.weight" in tensors_of(finished.final)) == (name != "qwen3_tied")
    report = (run.output / "report.html").read_text()
    assert "loads strictly" in report and '<meta http-equiv="refresh"' not in report


def test_an_adapter_loads_in_peft_and_is_merged(tiny: Models, tmp_path: Path) -> None:
    model = tiny("qwen3")
    run, _ = adapted(model, tmp_path / "out")
    finished = finish(run)
    assert finished.whole, finished.problems
    assert finished.merged == run.output / "merged"
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    ours = PeftModel.from_pretrained(base, finished.final).merge_and_unload().eval()
    with torch.inference_mode():
        expected = ours(input_ids=torch.from_numpy(TOKENS)).logits.numpy()
    np.testing.assert_allclose(transformers_logits(finished.merged, TOKENS), expected, rtol=0, atol=2e-6)
    names = {path.name for path in finished.final.iterdir()}
    assert {
        "adapter_config.json",
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "run.json",
    } <= names
    assert json.loads((finished.final / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        model
    )
    assert len(AutoTokenizer.from_pretrained(finished.final)) == 283


def test_a_weight_that_was_nan_in_the_base_is_not_blamed_on_the_training(
    folder: Path, tmp_path: Path
) -> None:
    run, _ = adapted(folder, tmp_path / "out")
    spoil(folder, "model.embed_tokens.weight", (-1, 0))
    finished = finish(run)
    assert wrong(finished) == {"merged: converted": "weights of the base model are NaN or infinite"}
    assert finished.problems[0].found == "model.embed_tokens.weight"


def test_a_merge_can_be_left_out(tiny: Models, tmp_path: Path) -> None:
    run, _ = adapted(tiny("qwen3"), tmp_path / "out")
    finished = finish(Run.of_dict({**run.as_dict(), "merge": False}))
    assert finished.whole and finished.merged is None and not (run.output / "merged").exists()


def test_other_bits_than_trained_keep_the_folder_from_its_name(tiny: Models, tmp_path: Path) -> None:
    run, checkpoint = trained(tiny("qwen3"), tmp_path / "out")
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.norm.weight"][3] += 1
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    finished = finish(run)
    assert wrong(finished) == {"bits": "a weight differs from the trained one"}
    assert finished.problems[0].tensor == "model.norm.weight"
    assert not (run.output / "final").exists() and finished.final == run.output / "final.unchecked"
    assert (checkpoint / "model.safetensors").exists()
    assert "✗" in (run.output / "report.html").read_text()


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_keep_the_folder_from_its_name(
    value: float, tiny: Models, tmp_path: Path
) -> None:
    run, checkpoint = trained(tiny("qwen3"), tmp_path / "out")
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.norm.weight"][3] = value
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    leave(run, checkpoint, digests(checkpoint))
    finished = finish(run)
    assert wrong(finished) == {"converted": "a weight is NaN or infinite"}
    assert finished.problems[0].tensor == "model.norm.weight"
    assert not (run.output / "final").exists()


def test_a_tensor_that_is_missing_is_named(tiny: Models, tmp_path: Path) -> None:
    run, checkpoint = trained(tiny("qwen3"), tmp_path / "out")
    tensors = load_file(checkpoint / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    finished = finish(run)
    assert list(wrong(finished)) == ["converted"]
    assert "model.layers.1.mlp.up_proj.weight" in str(finished.problems[0])


def test_a_tied_head_is_stored_once(tiny: Models, tmp_path: Path) -> None:
    """Sharded saves of tied models store it twice."""
    run, checkpoint = trained(tiny("qwen3_tied"), tmp_path / "out")
    tensors = load_file(checkpoint / "model.safetensors")
    twice = {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(twice, checkpoint / "model.safetensors", metadata={"format": "pt"})
    finished = finish(run)
    assert finished.whole, finished.problems
    assert "lm_head.weight" not in tensors_of(finished.final)


def test_a_tensor_of_the_adapter_that_is_not_whole_is_named(tiny: Models, tmp_path: Path) -> None:
    run, checkpoint = adapted(tiny("qwen3"), tmp_path / "out")
    file = checkpoint / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "q_proj.lora_A" in name)
    tensors[name] = tensors[name][:, :32].contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    leave(run, checkpoint, digests(checkpoint))
    finished = finish(run)
    assert wrong(finished) == {"adapter fits its base": "a tensor of the adapter is incomplete"}
    assert not finished.merged or not finished.merged.exists()


def test_a_tokenizer_with_other_ids_is_refused(tiny: Models, tmp_path: Path) -> None:
    run, checkpoint = trained(tiny("qwen3"), tmp_path / "out")
    content = json.loads((checkpoint / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[20:22]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (checkpoint / "tokenizer.json").write_text(json.dumps(content))
    assert wrong(finish(run)) == {"tokenizer": "tokens of the base have different ids or are missing"}


def test_a_lost_tokenizer_is_taken_from_the_base(tiny: Models, tmp_path: Path) -> None:
    run, checkpoint = trained(tiny("qwen3"), tmp_path / "out")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (checkpoint / name).unlink()
    finished = finish(run)
    assert finished.whole, finished.problems
    assert len(AutoTokenizer.from_pretrained(finished.final)) == 283


def test_a_lost_template_is_noticed(tiny: Models, tmp_path: Path) -> None:
    run, checkpoint = trained(tiny("qwen3"), tmp_path / "out")
    (checkpoint / "chat_template.jinja").unlink()
    assert wrong(finish(run)) == {"chat template": "the chat template is lost"}


def test_a_generation_config_with_tokens_that_there_are_not_is_noticed(tiny: Models, tmp_path: Path) -> None:
    run, checkpoint = trained(tiny("qwen3"), tmp_path / "out")
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": [2, 151645]}')
    assert wrong(finish(run)) == {"generation config": "the generation config names tokens that do not exist"}


def train_on(run: Run, checkpoint: Path) -> None:
    """Change the weights of a checkpoint, as more steps would."""
    tensors = {name: tensor + 1 for name, tensor in tensors_of(checkpoint).items()}
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    leave(run, checkpoint, digests(checkpoint))


def test_a_second_end_replaces_what_the_first_wrote_and_keeps_what_users_added(
    tiny: Models, tmp_path: Path
) -> None:
    run, checkpoint = trained(tiny("qwen3"), tmp_path / "out")
    final = finish(run).final
    (final / "README.md").write_text("mine")
    (final / "notes/deep").mkdir(parents=True)
    (final / "notes/deep/a.txt").write_text("mine, too")
    train_on(run, checkpoint)
    finished = finish(run)
    assert finished.whole and finished.checks[-1].found == "kept in final: README.md, notes"
    assert (final / "README.md").read_text() == "mine"
    assert (final / "notes/deep/a.txt").read_text() == "mine, too"
    assert digests(final) == digests(checkpoint)
    assert not list(run.output.glob("*.unchecked")) and not list(run.output.glob("*.replaced"))


def test_a_file_of_the_user_with_the_name_of_a_new_one_is_kept_next_to_it(
    tiny: Models, tmp_path: Path
) -> None:
    run, checkpoint = trained(tiny("qwen3"), tmp_path / "out")
    (checkpoint / "chat_template.jinja").rename(tmp_path / "template")
    (run.output / "final").mkdir()
    (run.output / "final/chat_template.jinja").write_text("mine")
    shutil.copy(tmp_path / "template", checkpoint / "chat_template.jinja")
    final = finish(run).final
    assert (final / "chat_template.jinja.kept").read_text() == "mine"
    assert (final / "chat_template.jinja").read_bytes() == (tmp_path / "template").read_bytes()


def test_a_second_end_without_another_step_leaves_the_first_alone(tiny: Models, tmp_path: Path) -> None:
    run, _ = trained(tiny("qwen3"), tmp_path / "out")
    final = finish(run).final
    (final / "README.md").write_text("mine")
    before = {path: path.stat().st_ino for path in (final, *final.iterdir())}
    assert finish(run).whole
    assert {path: path.stat().st_ino for path in (final, *final.iterdir())} == before
    with (final / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    assert finish(run).whole and (final / "model.safetensors").stat().st_size > 100
    assert (final / "README.md").read_text() == "mine"


@pytest.mark.core("0", "2")
@pytest.mark.parametrize("renames", range(4))
def test_what_users_added_survives_a_kill_at_any_time(
    renames: int, tiny: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, checkpoint = trained(tiny("qwen3"), tmp_path / "out")
    final = finish(run).final
    (final / "README.md").write_text("mine")
    train_on(run, checkpoint)
    rename, done = Path.rename, []

    def killed(self: Path, target: Path) -> Path:
        if self.name.startswith(("final", "README")):
            if len(done) == renames:
                raise KeyboardInterrupt
            done.append(self)
        return rename(self, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", killed)
        finish(run)
    assert finish(run).whole and digests(final) == digests(checkpoint)
    assert (final / "README.md").read_text() == "mine"
    assert not list(run.output.glob("*.unchecked")) and not list(run.output.glob("*.replaced"))


def test_a_link_in_the_place_of_a_result_is_kept(tiny: Models, tmp_path: Path) -> None:
    run, checkpoint = trained(tiny("qwen3"), tmp_path / "out")
    final = finish(run).final
    final.rename(tmp_path / "elsewhere")
    final.symlink_to(tmp_path / "elsewhere")
    before = digests(final)
    train_on(run, checkpoint)
    finish(run)
    assert not final.is_symlink() and digests(final) == digests(checkpoint)
    assert digests(run.output / "final.kept") == before


@pytest.mark.parametrize("overwrite", [False, True])
def test_the_result_of_a_run_is_not_the_output_of_another(
    overwrite: bool, tiny: Models, tmp_path: Path
) -> None:
    run, _ = trained(tiny("qwen3"), tmp_path / "out")
    other = replace(run, output=finish(run).final)
    (problem,) = output_folder.refused(other, overwrite=overwrite)
    assert problem.message == "the output is a checkpoint, not the folder of a run"


def test_what_users_added_is_not_overwritten(tiny: Models, tmp_path: Path) -> None:
    run, _ = trained(tiny("qwen3"), tmp_path / "out")
    final = finish(run).final
    (final / "README.md").write_text("mine")
    with pytest.raises(ReshardError, match="--overwrite does not delete") as refused:
        clear(run)
    assert refused.value.problems[0].found == "final/README.md"
    (final / "README.md").unlink()
    clear(run)
    assert not list(run.output.iterdir())


def test_a_run_that_has_not_ended_is_told_apart(tiny: Models, tmp_path: Path) -> None:
    run, _ = trained(tiny("qwen3"), tmp_path / "out")
    (run.output / "trained.json").unlink()
    with pytest.raises(ReshardError, match="is not finished"):
        finish(run)


def test_a_checkpoint_is_exported_by_its_record(tiny: Models, tmp_path: Path) -> None:
    _, checkpoint = trained(tiny("qwen3"), tmp_path / "out")
    plan = export(checkpoint, tmp_path / "dry", dry_run=True).plan
    assert plan.target == "huggingface" and not (tmp_path / "dry").exists()
    export(checkpoint, tmp_path / "model", dtype="bfloat16")
    assert {tensor.dtype for tensor in tensors_of(tmp_path / "model").values()} == {torch.bfloat16}
    with pytest.raises(ReshardError, match="no adapter to merge"):
        export(checkpoint, tmp_path / "merged", merge=True)


def test_an_adapter_is_exported_as_it_is_or_merged(tiny: Models, tmp_path: Path) -> None:
    _, checkpoint = adapted(tiny("qwen3"), tmp_path / "out")
    export(checkpoint, tmp_path / "adapter")
    export(checkpoint, tmp_path / "merged", merge=True)
    assert reshard.open(tmp_path / "adapter").format == "peft"
    assert reshard.open(tmp_path / "merged").format == "huggingface"
    with pytest.raises(ReshardError, match="already merged"):
        export(tmp_path / "merged", tmp_path / "again")


def test_a_checkpoint_without_a_record_is_refused(tiny: Models, tmp_path: Path) -> None:
    with pytest.raises(ReshardError, match="no record of a run"):
        export(tiny("qwen3"), tmp_path / "model")


OLD = """
import json, sys
import numpy, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokens = torch.from_numpy(numpy.load(sys.argv[1]))
for folder in sys.argv[2:]:
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True, torch_dtype="auto"
    )
    faults = info["missing_keys"] + info["mismatched_keys"] + info["unexpected_keys"]
    assert not faults, (folder, faults)
    assert model.config.use_cache and model.dtype == torch.float32
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "What is 1 plus 2?"}], tokenize=False)
    with torch.inference_mode():
        numpy.save(folder + "/logits.npy", model.eval()(tokens).logits.numpy())
    json.dump([len(tokenizer), text], open(folder + "/told.json", "w"))
"""


@pytest.mark.slow
def test_transformers_4_loads_what_transformers_5_has_trained(tiny: Models, tmp_path: Path) -> None:
    folders = [
        finish(trained(tiny(name), tmp_path / name)[0]).final for name in ("qwen2", "qwen3_tied", "qwen3_moe")
    ]
    adapter = finish(adapted(tiny("qwen3"), tmp_path / "lora")[0])
    assert adapter.merged
    folders.append(adapter.merged)
    np.save(tmp_path / "tokens.npy", TOKENS)
    for name in ("transformers-4.51", "transformers-4.53", "transformers-4.57"):
        words = [python(name), "-c", OLD, str(tmp_path / "tokens.npy"), *map(str, folders)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        sys.stderr.write(done.stderr)
        assert done.returncode == 0
        for folder in folders:
            expected = transformers_logits(folder, TOKENS)
            np.testing.assert_allclose(np.load(folder / "logits.npy"), expected, rtol=1e-5, atol=1e-5)
            length, text = json.loads((folder / "told.json").read_text())
            assert length == 283 and "What is 1 plus 2?" in text
            for made in ("logits.npy", "told.json"):
                (folder / made).unlink()


def test_nothing_of_a_checkpoint_is_changed(tiny: Models, tmp_path: Path) -> None:
    run, checkpoint = trained(tiny("qwen3"), tmp_path / "out")
    shutil.copytree(checkpoint, tmp_path / "before")
    finish(run)
    for file in checkpoint.iterdir():
        assert file.read_bytes() == (tmp_path / "before" / file.name).read_bytes()


def test_what_the_system_refuses_is_a_check_that_failed(tmp_path: Path) -> None:
    """Such as a full disk. Here a file is in the place of a folder."""
    (tmp_path / "file").touch()
    check = checked("written", lambda: str((tmp_path / "file/below").write_text("a")))
    assert not check.right and check.problems[0].found == "Not a directory"


def test_final_has_the_dtype_of_the_base(hf_model: Models, tmp_path: Path) -> None:
    base = hf_model("qwen2", dtype="bfloat16")
    run, checkpoint = trained(base, tmp_path)
    halves = {name: tensor.bfloat16() for name, tensor in tensors_of(checkpoint).items()}
    leave(run, checkpoint, {name: crc(tensor) for name, tensor in halves.items()})
    finished = finish(run)
    assert finished.whole, wrong(finished)
    assert all(torch.equal(tensor, halves[name]) for name, tensor in tensors_of(finished.final).items())
    assert json.loads((finished.final / "config.json").read_text())["dtype"] == "bfloat16"
    assert "rounded to bfloat16" in {check.name: check.found for check in finished.checks}["bits"]
    leave(replace(run, options={"dtype": "float32"}), checkpoint, digests(checkpoint))
    assert finish(replace(run, options={"dtype": "float32"})).whole
