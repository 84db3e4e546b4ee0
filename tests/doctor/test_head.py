"""The five failures that the doctor exists for: real runs, each explained from its log, its script, and its checkpoint.

The fast tests read the logs next to the scripts; the slow ones record them again with the frameworks of their time,
then apply the cure: they fix the line, or type the command, and the same run succeeds.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import reshard
from reshard.runs.doctor import Finding
from tests.commandline import reshard as command
from tests.doctor.head import runs, tiny_model
from tests.genuine.megatron import Genuine


@dataclass(frozen=True)
class Told:
    """The expected findings for a run: ids from its log, script and checkpoint separately, and from all together.

    `words` are in the cure for all together, in both languages.
    """

    log: str
    script: str | None
    checkpoint: str | None
    together: str
    words: str


CASES = {
    "export": Told(
        "dtensor-mixed-copy",
        "script-export-device-map",
        "checkpoint-lacks",
        "script-export-device-map",
        "device_map=None",
    ),
    "grpo": Told("dtensor-mixed-cat-ddp", "script-device-map", None, "script-device-map", "device_map=None"),
    "grpo-accelerate-1.9": Told(
        "dtensor-ddp", "script-device-map", None, "script-device-map", "device_map=None"
    ),
    "finetune": Told(
        "device-map-distributed",
        "script-device-map",
        "checkpoint-old-gradient-checkpointing",
        "script-device-map",
        "device_map=None",
    ),
    "finetune-fixed": Told(
        "old-gc-crash",
        None,
        "checkpoint-old-gradient-checkpointing",
        "checkpoint-old-gradient-checkpointing",
        "trust_remote_code",
    ),
    "export-sft": Told(
        "export-without-tokenizer", None, "checkpoint-lacks", "checkpoint-lacks", "--base HF_FOLDER"
    ),
    "export-sft-4.51": Told(
        "export-without-tokenizer", None, "checkpoint-lacks", "checkpoint-lacks", "--base HF_FOLDER"
    ),
    "convert2hf": Told(
        "internlm-convert-tp",
        "script-first-rank-only",
        "checkpoint-lacks",
        "script-first-rank-only",
        "reshard convert",
    ),
}


def log_of(name: str) -> Path:
    return runs.HERE / runs.RUNS[name].case / f"{name}.log"


def script_of(name: str) -> Path:
    run = runs.RUNS[name]
    word = [word for word in run.words if word.endswith(".py") and word != "multi_gpu.py"][-1]
    return runs.HERE / run.case / word


@pytest.fixture(scope="module")
def checkpoint_of(
    genuine: Callable[[str], Genuine], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path | None]:
    """The checkpoint of a run, made by the original framework; None if the run had none."""
    remote = tmp_path_factory.mktemp("Qwen-14B-Chat")
    tiny_model.main(str(remote))
    runs.add_remote_code(remote)
    settings = remote / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast"))

    def get(name: str) -> Path | None:
        case = runs.RUNS[name].case
        if case == "internlm_tp":
            return runs.INTERNLM
        if case in runs.TRAINED:
            return genuine(runs.TRAINED[case]).roots["torch_dist"]
        return remote if case == "device_map" else None

    return get


def ids(findings: list[Finding]) -> list[str]:
    return [finding.code for finding in findings]


def errors(findings: list[Finding]) -> list[str]:
    return [finding.code for finding in findings if finding.severity == "error"]


@pytest.mark.parametrize("name", CASES)
def test_the_log_alone_names_one_cause(name: str) -> None:
    found = reshard.doctor(log_of(name))
    assert errors(found) == [CASES[name].log] == ids(found)[:1]
    assert found[0].certainty == "sure"


@pytest.mark.parametrize("name", CASES)
def test_the_script_alone_shows_the_line(name: str) -> None:
    found = reshard.doctor(script_of(name))
    told = CASES[name].script
    assert ids(found) == ([told] if told else [])
    for finding in found:
        place = finding.places[0]
        assert script_of(name).read_text().splitlines()[place.line - 1].strip() == place.text


@pytest.mark.core("export", "convert2hf")
@pytest.mark.parametrize("name", [name for name, told in CASES.items() if told.checkpoint])
def test_the_checkpoint_alone_shows_what_is_wrong_with_it(
    name: str, checkpoint_of: Callable[[str], Path | None]
) -> None:
    assert ids(reshard.doctor(checkpoint_of(name))) == [CASES[name].checkpoint]


@pytest.mark.core("export", "convert2hf", "grpo")
@pytest.mark.parametrize("name", CASES)
def test_log_script_and_checkpoint_point_at_one_cause(
    name: str, checkpoint_of: Callable[[str], Path | None]
) -> None:
    targets = [log_of(name), script_of(name), checkpoint_of(name)]
    found = reshard.doctor(*(target for target in targets if target))
    first = found[0]
    assert errors(found) == [first.code] == [CASES[name].together]
    assert first.certainty == "sure" and CASES[name].log in first.also
    assert all(CASES[name].words in cure for cure in (first.remedy.en, first.remedy.zh))
    assert log_of(name) in {Path(place.target) for place in first.places}


# --------------------------------------------------------------------------------- the commands that it prints


def typed(cure: str, base: Path, out: Path) -> list[str]:
    """The single command of a cure as a person types it: with their own base and destination."""
    (line,) = re.findall(r"(?m)^reshard convert .*$", cure)
    words = [str(base) if word == "HF_FOLDER" else word for word in shlex.split(line)[1:]]
    return [*words[:2], str(out), *words[3:]]


@pytest.mark.core("export")
@pytest.mark.parametrize("name", ["export", "export-sft", "convert2hf"])
def test_the_printed_command_converts_the_checkpoint(
    name: str, checkpoint_of: Callable[[str], Path | None], tmp_path: Path
) -> None:
    found = reshard.doctor(log_of(name), script_of(name), checkpoint_of(name))
    tiny_model.main(str(tmp_path / "base"), experts="sft" in name)
    words = typed(found[0].remedy.en, tmp_path / "base", tmp_path / "out")
    if name == "convert2hf":
        words = [*words[:3], "--no-tokenizer"]  # InternLM's tokenizer is that of no model here
    done = command(*words)
    assert done.code == 0, done.err
    model_type = AutoModelForCausalLM
    if name == "convert2hf":  # InternLM is Llama with biases; its own class comes with its code
        model_type = LlamaForCausalLM
        written = json.loads((tmp_path / "out" / "config.json").read_text())
        (tmp_path / "out" / "config.json").write_text(
            json.dumps({**written, "model_type": "llama", "attention_bias": True, "auto_map": {}})
        )
    _, told = model_type.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]
    if name != "convert2hf":
        assert AutoTokenizer.from_pretrained(tmp_path / "out")("What is 1 plus 2?")["input_ids"]


@pytest.mark.thorough
def test_what_a_megatron_folder_lacks_is_listed(
    checkpoint_of: Callable[[str], Path | None], tmp_path: Path
) -> None:
    shutil.copytree(checkpoint_of("export-sft"), tmp_path / "run")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").unlink()
    (found,) = reshard.doctor(tmp_path / "run")
    assert "tokenizer" in found.message.en and "latest_checkpointed_iteration.txt" in found.message.en
    assert "config.json" not in found.message.en  # its arguments contain the same
    assert "--base" in found.remedy.en


# ------------------------------------------------------------------------------------ with the real frameworks


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_run_made_anew_fails_and_is_told_alike(name: str, tmp_path: Path) -> None:
    python = runs.prepared(name, tmp_path)
    status, log = runs.log_of(name, tmp_path, python)
    (tmp_path / "run.log").write_text(log)
    found = reshard.doctor(tmp_path / "run.log")
    assert status != 0 and errors(found) == [CASES[name].log], log
    both = reshard.doctor(tmp_path / "run.log", script_of(name))
    assert both[0].code == (CASES[name].script or CASES[name].log) and both[0].certainty == "sure"


def fix(script: Path) -> None:
    """Do what the doctor says of the lines that it found."""
    lines = script.read_text().splitlines()
    for finding in reshard.doctor(script):
        assert finding.code in ("script-device-map", "script-export-device-map")
        for place in finding.places:
            lines[place.line - 1] = re.sub(
                r"""device_map=["']auto["']""", "device_map=None", lines[place.line - 1]
            )
    script.write_text("\n".join(lines) + "\n")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["export", "grpo"])
def test_the_run_goes_through_with_the_mended_line(name: str, tmp_path: Path) -> None:
    python = runs.prepared(name, tmp_path)
    fix(tmp_path / script_of(name).name)
    status, log = runs.log_of(name, tmp_path, python)
    (tmp_path / "run.log").write_text(log)
    assert status == 0, log
    assert reshard.doctor(tmp_path / "run.log") == []


@pytest.mark.slow
def test_training_goes_through_without_the_old_method(tmp_path: Path) -> None:
    python = runs.prepared("finetune-fixed", tmp_path)
    for model in (tmp_path / "models").glob("*/modeling_qwen.py"):
        text = model.read_text()
        model.write_text(text[: text.index("    def _set_gradient_checkpointing")])
    status, log = runs.log_of("finetune-fixed", tmp_path, python)
    assert status == 0 and "finished" in log, log


@pytest.mark.slow
@pytest.mark.parametrize("name", ["export-sft", "export-sft-4.51"])
def test_the_export_goes_through_with_the_converted_folder(name: str, tmp_path: Path) -> None:
    python = runs.prepared(name, tmp_path)
    trained = tmp_path / "megatron_output" / "Qwen3-30B-A3B"
    (found,) = reshard.doctor(trained)
    converted = trained.with_name("converted")
    runs.make_base(tmp_path / "base", python, "experts")
    done = command(*typed(found.remedy.en, tmp_path / "base", converted))
    assert done.code == 0, done.err
    shutil.rmtree(trained)
    converted.rename(trained)
    status, log = runs.log_of(name, tmp_path, python)
    assert status == 0, log
