"""Causes that follow from the type of a value, the owner of an attribute, or a part that was not built."""

from __future__ import annotations

import pytest

from reshard.diagnosis.finding import LANGUAGES
from reshard.diagnosis.logs import diagnose_text

CASES = {
    "AttributeError: 'list' object has no attribute 'startswith'": ("text-expected", "tokenize=False"),
    "AttributeError: 'PeftModelForCausalLM' object has no attribute 'save_checkpoint'": (
        "attribute-of-engine",
        "unset ACCELERATE_USE_DEEPSPEED",
    ),
    "ImportError: Using `has_x` requires transformer_engine to be installed.": (
        "packages-to-install",
        "install -U --no-build-isolation 'transformer-engine[pytorch]'",
    ),
    "ImportError: PyTorch must be installed to use this": ("packages-to-install", "install -U torch\n"),
    "ImportError: cannot import name 'helpers' from 'megatron.data' (/w/megatron/data/__init__.py)": (
        "dataset-helpers-unbuilt",
        "make -C",
    ),
    "frob: error: unrecognized arguments: --wibble 3": (
        "unknown-argument",
        "frob --help | grep -i -- --wibble",
    ),
}


@pytest.mark.parametrize("said", CASES)
def test_a_message_without_frames_is_enough(said: str) -> None:
    code, cure = CASES[said]
    (found,) = diagnose_text("log", said)
    assert found.code == code and all(cure in found.remedy.of(language) for language in LANGUAGES)


@pytest.mark.parametrize("needed", ["CUDA", "it", "git", "both", "this package"])
def test_what_pip_does_not_install_is_no_package(needed: str) -> None:
    found = diagnose_text("log", f"RuntimeError: this operator requires {needed} to be installed.")
    assert all(each.code != "packages-to-install" for each in found)


@pytest.mark.parametrize(
    "said", ["'list' object has no attribute 'append_all'", "'dict' object has no attribute 'x'"]
)
def test_attributes_that_no_text_has_expect_none(said: str) -> None:
    assert all(each.code != "text-expected" for each in diagnose_text("log", f"AttributeError: {said}"))


def test_what_a_launcher_ended_after_is_the_failure() -> None:
    said = (
        "Error CUDA driver version is insufficient for CUDA runtime version at line 167 in file D:\\b\\csrc\\ops.cu\n"
        "Traceback (most recent call last):\n"
        '  File "E:\\v\\lib\\site-packages\\accelerate\\commands\\launch.py", line 1104, in launch_command\n...'
    )
    (found,) = diagnose_text("log", said)
    assert found.code == "driver-too-old" and found.places[0].line == 1


def test_an_option_that_its_class_checks_is_named() -> None:
    said = (
        'Traceback (most recent call last):\n  File "/v/site-packages/transformers/training_args.py", line 1887, in '
        "__post_init__\n    elif FULL in self.fsdp:\nTypeError: argument of type 'NoneType' is not iterable"
    )
    (found,) = diagnose_text("log", said)
    assert found.code == "setting-is-none" and "`fsdp`" in found.remedy.en
