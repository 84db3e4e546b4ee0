"""Messages that name their remedy, and failures told in few words."""

from __future__ import annotations

import pytest

from reshard.base.languages import LANGUAGES
from reshard.runs.checks.finding import UNKNOWN_FAILURE
from reshard.runs.checks.phrases import aside
from reshard.runs.doctor.log_diagnosis import diagnose_text
from tests.doctor.test_classes import SITE, first, raised

PACKAGES = {
    "ImportError: Using X quantization requires Accelerate: `pip install accelerate` and the latest version of "
    "quanto: `pip install -i https://pypi.org/simple/ optimum-quanto`": "accelerate optimum-quanto",
    "ImportError: To load GPTQ weights: pip install optimum and auto-gptq": "optimum auto-gptq",
    "RuntimeError: no backend (`pip install -U torchao[dev]` or `pip install quanto`).": "'torchao[dev]'",
    "ValueError: Tracking is off. Please pip install swanlab to use it.": "swanlab",
    "ImportError: Video needs decoders, pip3 install av decord.": "av decord",
    "ImportError: Please `pip install ruamel.yaml` first.": "ruamel.yaml",
    "ValueError: This tokenizer requires tiktoken to be installed.": "tiktoken",
}


@pytest.mark.parametrize("said", PACKAGES)
def test_packages_that_a_message_asks_for(said: str) -> None:
    found = first(raised(said, file=f"{SITE}/loader.py"))
    assert found.code == "packages-to-install"
    assert f"-m pip install -U {PACKAGES[said]}\n" in found.remedy.en


def test_the_range_of_a_refused_version_is_in_the_command() -> None:
    said = (
        "ImportError: transformers>=4.41.2,<=4.45.0 is required for a normal functioning of this module, but found "
        "transformers==4.45.2.\nTo fix: pip install transformers>=4.41.2,<=4.45.0"
    )
    for cure in (first(said).remedy.en, first(raised(said)).remedy.zh):
        assert "install 'transformers>=4.41.2,<=4.45.0'" in cure


SETTINGS = {
    "ValueError: Please use `FORCE_FROB=1` to launch DeepSpeed training.": "FORCE_FROB=1",
    "ValueError: the eval split is too small for packing. You should set `eval_sample_packing: False`.": "False`",
    "The backend is not set, please initialize it using init_process_group()": "init_process_group()",
}


@pytest.mark.parametrize("said", SETTINGS)
def test_a_setting_that_a_message_names(said: str) -> None:
    found = first(said)
    assert (found.code, found.certainty) == ("message-names-cure", "likely")
    assert SETTINGS[said] in found.remedy.zh


def test_a_switch_for_more_messages_is_no_cure() -> None:
    said = "RuntimeError: kernel failed. Please set `CUDA_LAUNCH_BLOCKING=1` to see where."
    assert first(raised(said)).code != "message-names-cure"
    assert first(raised("ValueError: Please check your model and dataset.")).code != "message-names-cure"
    said = "RuntimeError: worker failed, 32 is more than max_lora_rank, please check the stack trace above"
    assert first(raised(said)).code != "message-names-cure"


@pytest.mark.parametrize("said", ["Make sure that:\n", "Please check the following:\n\n", "You should set:"])
def test_a_sentence_without_its_end_is_no_cure(said: str) -> None:
    found = first(raised(f"ValueError: no frob. {said}"))
    assert found.code == UNKNOWN_FAILURE and "says what to do" not in found.remedy.en


def test_a_list_belongs_to_the_sentence_before_it() -> None:
    found = first(raised("ValueError: no frob.\nYou should set one of:\n  --frob-home DIR\n  frob.cfg"))
    assert found.code == "message-names-cure" and "--frob-home DIR" in found.remedy.zh


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("ImportError: libcudart.so.11.0: cannot open shared object file: No such", "cuda-library-missing"),
        (
            "    assert isinstance(weight, DTensor)\nAssertionError",
            UNKNOWN_FAILURE,
        ),
        ("RuntimeError: self and mat2 must have the same dtype", "dtypes-differ"),
    ],
)
def test_a_message_without_the_rest(said: str, code: str) -> None:
    assert first(said).code == code


def test_certainties_are_told_in_both_languages() -> None:
    (found,) = diagnose_text("log", "RuntimeError: self and mat2 must have the same dtype")
    assert [aside(found).of(language) for language in LANGUAGES] == [
        "(dtypes-differ, likely)",
        "（dtypes-differ，很可能）",
    ]


def test_a_title_above_a_log_of_preparations() -> None:
    said = "ValueError: The number of images does not match the number of <image> tokens in [{'content': '<image>a'"
    found = first(
        f"{said}\n\nConverting format of dataset: 100%|##########| 1/1 [00:00<00:00, 483 examples/s]"
    )
    assert found.code == UNKNOWN_FAILURE and found.places[0].line == 1


@pytest.mark.parametrize(
    ("said", "code", "cure"),
    [
        (
            "[ERROR:swift] import vllm_utils error: No module named 'openai.types'",
            "submodule-missing",
            "-U openai",
        ),
        ("ModuleNotFoundError: No module named 'flask.types'", "submodule-missing", "print(flask.__path__)"),
        (
            "ValueError: no. Please make sure you have installed `bitsandbytes>=0.37.0`.",
            "version-required",
            "0.37.0",
        ),
        (
            "ValueError: This takes no images. Please check whether the correct `template` is used.",
            "message-names-cure",
            "",
        ),
        (
            "ValueError: There is no module or parameter named 'score' in Qwen2VLModel",
            "names-engine",
            "reward model",
        ),
    ],
)
def test_causes_in_few_words(said: str, code: str, cure: str) -> None:
    found = first(said)
    assert found.code == code and cure in found.remedy.en


REQUIRED = {
    "ValueError: For safety, we now require users to upgrade torch to at least v2.6 in order to load.": "torch>=2.6",
    "ImportError: This kernel works with PyTorch 2.4.1 or newer only.": "torch>=2.4.1",
    "RuntimeError: transformers version must be at least 4.51.3 for this model": "transformers>=4.51.3",
}


@pytest.mark.parametrize("said", REQUIRED)
def test_a_release_that_is_required_in_prose(said: str) -> None:
    found = first(raised(said, file=f"{SITE}/transformers/loader.py"))
    assert found.code == "version-required" and f"install '{REQUIRED[said]}'" in found.remedy.en


@pytest.mark.parametrize("module", ["training.tokenizer.tokenizer", "optimizer", "legacy.model"])
def test_what_only_the_sources_of_megatron_have_is_no_release_of_its_package(module: str) -> None:
    said = f"    from megatron.{module} import X\nModuleNotFoundError: No module named 'megatron.{module}'"
    assert diagnose_text("log", said)[0].code == "megatron-training-missing"
