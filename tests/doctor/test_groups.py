"""Causes computed for runs of many processes: groups, meshes, sizes that divide, nodes, converters."""

from __future__ import annotations

import pytest

from reshard.runs.checks.finding import UNKNOWN_FAILURE
from tests.doctor.test_classes import SITE, first, raised

MEGATRON = "/home/user/Megatron-LM/megatron/training/arguments.py"
SAID = {
    raised("ValueError: The arg 'group_size' (8) must not exceed the world size (2)"): (
        "mesh-size",
        "num_replicate: 2",
    ),
    raised("ssh: Could not resolve hostname node0: Name or service not known"): (
        "ssh-refused",
        "ssh-copy-id node0",
    ),
    raised("IndexError: list index out of range", "pg = m[0]", f"{SITE}/torch/distributed/device_mesh.py"): (
        "mesh-size",
        "num_replicate: 2",
    ),
    "subprocess.CalledProcessError: Command 'ssh -o PasswordAuthentication=no 10.0.0.7 hostname' returned non-zero exit"
    " status 255.": ("ssh-refused", "ssh-copy-id 10.0.0.7"),
    "RuntimeError: Using hostfile at /job/hostfile but host=worker-1 was not reachable via ssh.": (
        "ssh-refused",
        "ssh-copy-id worker-1",
    ),
}


@pytest.mark.parametrize("text", SAID, ids=lambda text: text[-60:])
def test_processes_that_do_not_fit_together(text: str) -> None:
    code, cure = SAID[text]
    found = first(text)
    assert found.code == code
    assert cure in found.remedy.en and cure in found.remedy.zh


DIVIDES = {
    "torchrun pretrain_gpt.py --num-attention-heads 28 --tensor-model-parallel-size 8\n"
    + raised(
        "AssertionError", "assert args.num_attention_heads % args.tensor_model_parallel_size == 0", MEGATRON
    ): (
        "28 / 8",
        "1, 2, 4, 7, 14, 28",
    ),
    raised(
        "AssertionError: global batch size (30) is not divisible by micro batch size (4) times data parallel size (2)"
    ): ("30 / 8", "24, 32"),
    "  num_layers ...................................... 30\nlaunch.sh --pp 4\n"
    + raised("ValueError: num_layers must be divisible by pipeline parallel size"): (
        "30 / 4",
        "1, 2, 3, 5, 6",
    ),
    raised("AssertionError: batch-size 64 not multiple of GPU count 3"): ("64 / 3", "63, 66"),
    raised("AssertionError", "assert args.batch_size % len(devices) == 0"): ("", "micro-batch"),
    "ValueError: Total number of attention heads (12) must be divisible by tensor parallel size (8).": (
        "12 / 8",
        "1, 2, 3, 4, 6, 12",
    ),
    raised("RuntimeError: world_size (3) is not divisible by 2"): ("3 / 2", "torchrun --nproc-per-node"),
    raised("AssertionError: 251 is not divisible by 2"): ("251 / 2", "1, 251"),
    "--tp 4\n"
    + raised("AssertionError: First dimension of the tensor should be divisible by tensor parallel size"): (
        "`tensor parallel size`",
        "`--sequence-parallel`",
    ),
}


@pytest.mark.parametrize("text", DIVIDES, ids=lambda text: text[-60:])
def test_sizes_that_do_not_divide_are_told_with_their_values(text: str) -> None:
    values, cure = DIVIDES[text]
    found = first(text)
    assert found.code == "not-divisible"
    assert values in found.rule.en and values in found.rule.zh
    assert cure in found.remedy.en and cure in found.remedy.zh


def test_values_that_contradict_a_check_are_not_told() -> None:
    found = first(
        "--tp 4\n" + raised("AssertionError: hidden size (64) must be divisible by tensor parallel size")
    )
    assert found.code == "not-divisible" and "64 / 4" not in found.rule.en


def test_a_batch_without_samples_and_a_group_of_one() -> None:
    found = first("ValueError: num_samples should be a positive integer value, but got num_samples=0")
    assert found.code == "short-samples"
    group = (
        "GRPO requires at least 2 generations per prompt to calculate the advantages. You provided 1, which"
    )
    found = first(raised(f"ValueError: {group} is less than the minimum required."))
    assert found.code == "grpo-one-generation" and "num_generations=1" in found.rule.en


TRACE = f"""Traceback (most recent call last):
  File "/home/user/train.py", line 3, in <module>
    trainer.train()
  File "{SITE}/torch/distributed/fsdp/fully_sharded_data_parallel.py", line 454, in __init__
    _init_process_group_state(
"""


def test_the_title_above_a_traceback_without_its_end_is_its_message() -> None:
    found = first(f"FSDP error: _dim_group_infos list index out of range\n{TRACE}")
    assert found.code == "mesh-size"
    found = first(f"[BUG] 'LlamaAttention' object has no attribute 'num_heads'\n{TRACE}")
    assert found.code == "api-is-gone"


@pytest.mark.parametrize(
    "title", ["$ python train.py --fail", "12:00:01 INFO the last run failed", "Training on 8 GPUs"]
)
def test_a_line_of_the_log_is_no_title(title: str) -> None:
    assert first(f"{title}\n{TRACE}").code == UNKNOWN_FAILURE
