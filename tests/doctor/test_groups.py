"""Causes computed for runs of many processes: groups, meshes, sizes that divide, nodes, converters."""

from __future__ import annotations

import pytest

from reshard.diagnosis.finding import UNKNOWN
from reshard.diagnosis.logs import diagnose_text
from tests.doctor.test_classes import SITE, first, raised

MEGATRON = "/home/user/Megatron-LM/megatron/training/arguments.py"
RENDEZVOUS = (
    "WARNING:torch.distributed.elastic.rendezvous.dynamic_rendezvous:The node 'node04_38824_0' has failed to shutdown"
    " the rendezvous '42' due to an error of type RendezvousConnectionError."
)
SAID = {
    raised("IndexError: list index out of range", "pg = m[0]", f"{SITE}/torch/distributed/device_mesh.py"): (
        "mesh-without-rank",
        "num_replicate: 2",
    ),
    "KeyError: \"Invalid mesh_dim_names ('dp_shard_cp',) specified. Valid mesh_dim_names are ['tp'].\"": (
        "mesh-lacks-dimension",
        "parallelism_config_dp_shard_size",
    ),
    raised("ValueError: The arg 'group_size' (8) must not exceed the world size (2)"): (
        "short-ranks",
        "--nproc-per-node 8",
    ),
    f"{RENDEZVOUS}\n{raised('RuntimeError: Broken pipe', file=f'{SITE}/torch/distributed/run.py')}": (
        "rendezvous-lost",
        "--standalone",
    ),
    "subprocess.CalledProcessError: Command 'ssh -o PasswordAuthentication=no 10.0.0.7 hostname' returned non-zero exit"
    " status 255.": ("ssh-refused", "ssh-copy-id 10.0.0.7"),
    "RuntimeError: Using hostfile at /job/hostfile but host=worker-1 was not reachable via ssh.": (
        "ssh-refused",
        "ssh-copy-id worker-1",
    ),
    raised(
        "Exception: Unknown tensor name decoder.layers.0.mixer.in_proj.layer_norm_weight",
        file="/home/user/Megatron-LM/tools/checkpoint/hybrid_conversion.py",
    ): ("names-converter", "reshard inspect"),
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


TRACE = f"""Traceback (most recent call last):
  File "/home/user/train.py", line 3, in <module>
    trainer.train()
  File "{SITE}/torch/distributed/fsdp/fully_sharded_data_parallel.py", line 454, in __init__
    _init_process_group_state(
"""


def test_the_title_above_a_traceback_without_its_end_is_its_message() -> None:
    found = first(f"FSDP error: _dim_group_infos list index out of range\n{TRACE}")
    assert found.code == "mesh-without-rank"
    found = first(f"[BUG] 'LlamaAttention' object has no attribute 'num_heads'\n{TRACE}")
    assert found.code == "api-is-gone"


@pytest.mark.parametrize(
    "title", ["$ python train.py --fail", "12:00:01 INFO the last run failed", "Training on 8 GPUs"]
)
def test_a_line_of_the_log_is_no_title(title: str) -> None:
    assert first(f"{title}\n{TRACE}").code == UNKNOWN


def test_a_rendezvous_is_no_cause_beside_an_exception() -> None:
    text = f"{raised('ValueError: frobs')}\n{RENDEZVOUS}\n"
    assert all(found.code != "rendezvous-lost" for found in diagnose_text("log", text))


def test_who_asked_for_an_attribute_is_not_torch() -> None:
    asked = raised("", "model.frob(3)", f"{SITE}/peft/tuners/tuners_utils.py").rstrip()
    getter = f'  File "{SITE}/torch/nn/modules/module.py", line 1207, in __getattr__\n    raise AttributeError(f(x))\n'
    found = first(f"{asked}\n{getter}AttributeError: 'PoolModel' object has no attribute 'frob'")
    assert "model.frob(3)" in found.rule.en and "pip install -U peft" in found.remedy.en


def test_a_loss_that_goes_around_the_engine_of_deepspeed() -> None:
    trace = (
        raised("", "loss.backward()").rstrip()
        + f"""
  File "{SITE}/torch/_tensor.py", line 521, in backward
    torch.autograd.backward(
  File "{SITE}/deepspeed/runtime/zero/stage_1_and_2.py", line 940, in reduce
    grad = self.ipg_buffer[self.ipg_index].narrow(0, 1, 2)
AttributeError: 'DeepSpeedZeroOptimizer' object has no attribute 'ipg_index'"""
    )
    found = first(trace)
    assert found.code == "engine-bypassed" and "engine.backward(loss)" in found.remedy.en
    assert first(f"deepspeed==0.18.9\n{trace}").code != "engine-bypassed"
    inside = trace.replace("/home/user/train.py", f"{SITE}/deepspeed/runtime/engine.py")
    assert first(inside).code != "engine-bypassed"
