"""Causes computed from the words of a failure: attributes, values that are None, dtypes, names, what was refused."""

from __future__ import annotations

import pytest

from reshard.base.languages import LANGUAGES
from reshard.runs.checks.finding import UNKNOWN_FAILURE
from reshard.runs.doctor.log_diagnosis import diagnose_text
from tests.doctor.test_classes import assert_class, raised

CALLS = {
    "ImportError: cannot import name 'ProcessGroupCollection' from 'megatron.core.process_groups_config'"
    " (/opt/megatron-lm/megatron/core/process_groups_config.py)": (
        "api-came-later",
        "git -C /opt/megatron-lm",
    ),
    raised(
        "ModuleNotFoundError: No module named 'megatron.core.dist_checkpointing'", "from nemo import nlp"
    ): (
        "module-not-found",
        "pip install",
    ),
    "AttributeError: 'GRPOTrainer' object has no attribute 'current_gradient_accumulation_steps'": (
        "api-came-later",
        "transformers>=4.55",
    ),
    raised("KeyError: 'model.embed_tokens.weight'", 'state_dict["model.embed_tokens.weight"]'): (
        "names-lookup",
        "reshard inspect",
    ),
    raised(
        "RuntimeError: The size of tensor a (0) must match the size of tensor b (4096) at non-singleton dimension 1",
        "base_layer.weight.data = base_layer.weight.data + delta_weight",
    ): ("shape-empty-side", "GatheredParameters"),
    "ModuleNotFoundError: No module named 'deepspeed.frobs'": ("gone-before", "deepspeed<"),
    "AttributeError: module 'numpy' has no attribute 'typeDict'": ("gone-before", "numpy<"),
    "AttributeError: 'NoneType' object has no attribute 'cdequantize_blockwise_bf16_nf4'": (
        "bitsandbytes-cuda-setup",
        "python -m bitsandbytes",
    ),
}

REFUSALS = {
    "RuntimeError: One of the differentiated Tensors does not require grad": ("no-grad", "use_reentrant"),
    "Could not find the bitsandbytes CUDA binary at PosixPath('/a/libbitsandbytes_cuda121.so')\n"
    "OSError: /a/libbitsandbytes_cpu.so: cannot open shared object file: No such file or directory": (
        "bitsandbytes-cuda-setup",
        "python -m bitsandbytes",
    ),
    "torch.distributed.DistBackendError: [1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] "
    "via c10d key-value store by key '0', but store->get('0') got error: Socket Timeout": (
        "ranks-absent",
        "that rank's own log",
    ),
}


@pytest.mark.parametrize("text", [*CALLS, *REFUSALS], ids=lambda text: text[-60:])
def test_a_class_of_causes_is_computed(text: str) -> None:
    assert_class(text, *{**CALLS, **REFUSALS}[text])


ALONE = {
    "ImportError: Using `has_x` requires transformer_engine to be installed.": (
        "packages-to-install",
        "install -U --no-build-isolation 'transformer-engine[pytorch]'",
    ),
    "ImportError: PyTorch must be installed to use this": ("packages-to-install", "install -U torch\n"),
}


@pytest.mark.parametrize("said", ALONE)
def test_a_message_without_frames_is_enough(said: str) -> None:
    code, cure = ALONE[said]
    (found,) = diagnose_text("log", said)
    assert found.code == code and all(cure in found.remedy.of(language) for language in LANGUAGES)


@pytest.mark.parametrize("needed", ["CUDA", "it", "git", "both", "this package"])
def test_what_pip_does_not_install_is_no_package(needed: str) -> None:
    found = diagnose_text("log", f"RuntimeError: this operator requires {needed} to be installed.")
    assert all(each.code != "packages-to-install" for each in found)


def test_what_a_launcher_ended_after_is_the_failure() -> None:
    said = (
        "Error CUDA driver version is insufficient for CUDA runtime version at line 167 in file D:\\b\\csrc\\ops.cu\n"
        "Traceback (most recent call last):\n"
        '  File "E:\\v\\lib\\site-packages\\accelerate\\commands\\launch.py", line 1104, in launch_command\n...'
    )
    (found,) = diagnose_text("log", said)
    assert found.code == UNKNOWN_FAILURE and found.places[0].line == 1
