"""Causes computed from the words of a failure: attributes, values that are None, dtypes, names, what was refused."""

from __future__ import annotations

import pytest

from reshard.base.languages import LANGUAGES
from reshard.runs.checks.finding import UNKNOWN_FAILURE
from reshard.runs.doctor.log_diagnosis import diagnose_text
from tests.doctor.test_classes import SITE, assert_class, raised

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
    raised(
        "AttributeError: 'FrobTrainer' object has no attribute 'sft_args'",
        "if self.state.global_step % self.sft_args.acc_steps == 0:",
        f"{SITE}/frob/trainers.py",
    ): ("attribute-of-itself", "pip install -U frob"),
    raised("TypeError: 'NoneType' object is not subscriptable", "logits = outputs.logits[..., :-1, :]"): (
        "value-is-none",
        "Print it",
    ),
    raised("TypeError: 'NoneType' object is not iterable", "kwargs.update(self.args.generation_kwargs)"): (
        "setting-is-none",
        "Set `generation_kwargs`",
    ),
    raised("AttributeError: 'NoneType' object has no attribute 'wake_up'", "self.engine.wake_up()"): (
        "value-is-none",
        "Print it",
    ),
    "AttributeError: 'AdamW' object has no attribute 'train'": ("attribute-of-optimizer", "accelerate"),
    "AttributeError: 'RunArguments' object has no attribute 'frob'": ("attribute-of-arguments", "--frob"),
    raised(
        "NameError: name 'init_empty_weights' is not defined",
        "with init_empty_weights():",
        f"{SITE}/transformers/modeling_utils.py",
    ): ("name-of-optional", "-U accelerate"),
    "AttributeError: module 'numpy' has no attribute 'typeDict'": ("gone-before", "numpy<"),
    "AttributeError: 'NoneType' object has no attribute 'cdequantize_blockwise_bf16_nf4'": (
        "bitsandbytes-cuda-setup",
        "python -m bitsandbytes",
    ),
    raised(
        "TypeError: int() argument must be a string, a bytes-like object or a real number, not 'NoneType'",
        "n = int(args.size)",
    ): (
        "setting-is-none",
        "Set `size`",
    ),
    raised(
        "AttributeError: 'NoneType' object has no attribute 'to'", "p = val.to(dtype)", "/a/convert_to_hf.py"
    ): (
        "value-is-none",
        "Print it",
    ),
    raised(
        "AttributeError: 'FrobConfig' object has no attribute 'rotary'",
        "self.r = config.rotary",
        "/home/user/.cache/huggingface/modules/transformers_modules/frob/a1/modeling_frob.py",
    ): ("attribute-of-config", "revision=COMMIT"),
    "AttributeError: 'FrobFlashAttention2' object has no attribute '_flash_attention_forward'": (
        "attribute-gone",
        "'transformers<=4.42.4'",
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
    "AttributeError: 'list' object has no attribute 'startswith'": ("text-expected", "tokenize=False"),
    "AttributeError: 'PeftModelForCausalLM' object has no attribute 'save_checkpoint'": (
        "attribute-of-other",
        "`prepare`",
    ),
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
    assert found.code == UNKNOWN_FAILURE and found.places[0].line == 1


def test_an_option_that_its_class_checks_is_named() -> None:
    said = (
        'Traceback (most recent call last):\n  File "/v/site-packages/transformers/training_args.py", line 1887, in '
        "__post_init__\n    elif FULL in self.fsdp:\nTypeError: argument of type 'NoneType' is not iterable"
    )
    (found,) = diagnose_text("log", said)
    assert found.code == "setting-is-none" and "`fsdp`" in found.remedy.en
