"""Causes computed from the words of a failure, one by one: hangs, releases, what hides a cause."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from reshard.runs.checks.finding import UNKNOWN, UNKNOWN_FAILURE
from reshard.runs.checks.rules import rules
from reshard.runs.doctor import log_diagnosis
from reshard.runs.doctor.log_diagnosis import diagnose_text
from tests.doctor.test_classes import LOAD, SITE, first, raised

SOURCE = Path(str(log_diagnosis.__file__)).parent


def test_a_key_of_a_newer_release_comes_with_that_release() -> None:
    found = first("ValueError: Some keys are not used by the HfArgumentParser: ['enable_liger_kernel']")
    assert found.code == "unknown-key" and "key of LLaMA-Factory since" in found.rule.en


def test_an_argument_of_other_releases_comes_with_their_range() -> None:
    found = first("ValueError: remaining_argv: ['--train_type', 'lora']")
    assert found.code == "unknown-key" and "up to 4.0.4: it is `--tuner_type` now" in found.rule.en
    later = first("ms-swift==4.6.0\nValueError: remaining_argv: ['--sft_type', 'lora']")
    assert "up to 2.6.1: delete it" in later.rule.en
    both = first("ValueError: remaining_argv: ['--train_type', 'lora', '--frob', '1']")
    assert "4.0.4" not in both.rule.en


def test_a_hang_that_torch_reports_without_a_collective() -> None:
    said = "ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress"
    found = first(
        "\n".join(f"[rank{rank}]:[E704 13:48:58.26 ProcessGroupNCCL.cpp:1746] {said}" for rank in range(9))
    )
    assert found.code == "hang-described" and found.certainty == UNKNOWN


@pytest.mark.parametrize(
    "said", ["训练卡住不动", "程序一直挂起，没有报错", "Training hangs forever, no error"]
)
def test_a_hang_in_somebody_s_own_words(said: str) -> None:
    found = first(said)
    assert found.code == "hang-described" and found.certainty == UNKNOWN
    assert "py-spy" in found.remedy.en and "py-spy" in found.remedy.zh
    assert not diagnose_text("log", "INFO: a worker hung up\n" + "step: 1\n" * 10)


def test_what_a_shell_says_after_a_script_died_is_no_progress() -> None:
    died = raised("KeyError: 'frob'", 'config["frob"]').replace("in f", "in <module>")
    assert first(f"{died}\nConversion is done, using time: 0 min 0 sec").message
    caught = died.replace("<module>", "load_optional")
    assert not diagnose_text("log", f"{caught}\nConversion is done, using time: 0 min 0 sec")
    assert not diagnose_text("log", f"{died}\n{{'loss': 0.3, 'epoch': 1.0}}\ntraining finished")


def test_what_follows_from_nothing_stays_unknown() -> None:
    for said in ("RuntimeError: the frob is gone", "KeyError: 'frob'", "ValueError: frob [1, 2]"):
        assert first(raised(said)).code == UNKNOWN_FAILURE


def test_a_lazy_import_is_told_as_what_it_wraps() -> None:
    wrapped = (
        "RuntimeError: Failed to import a.b because of the following error (look up to see its traceback):"
    )
    assert first(f"{wrapped}\nNo module named 'mergekit'").code == "module-not-found"
    assert first(f"{wrapped}\nmodule 'numpy' has no attribute 'typeDict'").code == "gone-before"


def test_messages_that_state_their_cure_have_no_entries_beside() -> None:
    found = first("ValueError: Please set padding_side='left' while you call the frob of a model.")
    assert "The message itself" in found.remedy.en and "--explain" not in found.remedy.en


def test_whatever_may_be_sure_says_where_its_facts_are_from() -> None:
    source = "\n".join(path.read_text() for path in SOURCE.rglob("*.py"))
    never = set(re.findall(r'finding\(\s*(?:f?"([a-z-]+)[^)]{0,400}certainty="(?:likely|possible)")', source))
    unsourced = [name for name, rule in rules().items() if not rule["sources"] and name not in never]
    assert [name for name in unsourced if name.startswith(SURE)] == []


SURE = ("env-", "script-", "config-", "checkpoint-", "launch-", "sharded-", "grpo-", "base-")
"""Rules that are certain by default: those that read environments, files and scripts."""


OF_RELEASES = {
    raised("KeyError: 'roberta'", 'kind = CONFIG_MAPPING[config_dict["model_type"]]'): (
        "installed-before",
        "'transformers>=4.15.0'",
    ),
    raised("KeyError: 'llama'", 'kind = CONFIG_MAPPING[config_dict["model_type"]]'): (
        "api-came-later",
        "'transformers>=4.28.0'",
    ),
    "ImportError: cannot import name 'TrainingArguments' from 'transformers'"
    f" ({SITE}/transformers/__init__.py)": ("installed-before", "transformers>=4.15.0"),
    "ImportError: cannot import name 'WarmupLinearSchedule' from 'transformers'"
    f" ({SITE}/transformers/__init__.py)": ("gone-before", "transformers<4.15.0"),
    "TypeError: TrainingArguments.__init__() got an unexpected keyword argument 'eval_strategy'": (
        "api-came-later",
        "transformers>=4.41.0",
    ),
}


@pytest.mark.parametrize("said", OF_RELEASES)
def test_releases_and_formats(said: str) -> None:
    code, cure = OF_RELEASES[said]
    found = first(raised(said))
    assert found.code == code and cure in found.remedy.en


def test_a_hint_of_the_message_is_its_cure() -> None:
    found = first("ValueError: No FSDP parameters. HINT: Create the optimizer after the model.")
    assert "> HINT: Create the optimizer after the model." in found.remedy.en


def test_a_list_of_names_that_was_cut_off() -> None:
    text = LOAD + 'Missing key(s) in state_dict: "a.layers.12.k.weight", "a.layers.12.k.bias", "a.layers.'
    assert first(text).code == "names-layers-of-model"


def test_a_model_that_was_packed_when_it_was_loaded() -> None:
    text = (
        f"{LOAD}size mismatch for p.weight: copying a param with shape torch.Size([4096, 1024]) from checkpoint,"
        " the shape in current model is torch.Size([2097152, 1])."
    )
    assert "quantized to 4 bits on loading" in first(text).rule.en
