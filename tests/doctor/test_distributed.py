"""Launchers, DeepSpeed, FSDP, DDP, rendezvous and memory: what the cures of distributed runs begin with."""

from __future__ import annotations

import re

import pytest

from tests.doctor.test_classes import SITE, first, raised

BATCH = (
    f'  File "{SITE}/deepspeed/runtime/config.py", line 950, in _set_batch_related_parameters\n'
    "    grad_acc = train_batch // micro_batch\n"
)
RUNS = {
    "RuntimeError: launcher 'pdsh' not installed.": ("deepspeed-launcher-missing", "install -y pdsh"),
    "AssertionError: DeepSpeed requires --deepspeed_config to specify configuration file": (
        "deepspeed-no-config",
        "json.tool",
    ),
    "ValueError: Expected a string path to an existing deepspeed config, or a dictionary. Received: a/z.json": (
        "deepspeed-no-config",
        "realpath",
    ),
    "pydantic_core.ValidationError: 1 validation error for DeepSpeedZeroConfig\nstage3_prefetch_bucket_size\n"
    "  Input should be a valid integer, got a number with a fractional part [type=int_from_float,"
    " input_value=15099494.4, input_type=float]": (
        "deepspeed-bucket-fraction",
        '"stage3_prefetch_bucket_size": 15099494}',
    ),
    "ValueError: When using DeepSpeed, `accelerate.prepare()` requires you to pass at least one of training or"
    " evaluation dataloaders with `batch_size` attribute": ("deepspeed-batch-unknown", "all in one call"),
    "AssertionError: You can't use same `Accelerator()` instance with multiple models when using DeepSpeed": (
        "deepspeed-one-model",
        ".to(accelerator.device",
    ),
    "AttributeError: 'DummyOptim' object has no attribute 'step'": (
        "optimizer-placeholder",
        "--use_deepspeed",
    ),
    "AttributeError: 'DeepSpeedZeRoOffload' object has no attribute 'backward'": (
        "zero3-no-optimizer",
        "prepare(model, optimizer",
    ),
    "ValueError: Cannot get 16bit model weights because `stage3_gather_16bit_weights_on_model_save` in DeepSpeed"
    " config is False.": ("zero3-not-gathered-on-save", 'on_model_save": true'),
    "RuntimeError: still have inflight params [{'id': 5, 'status': 'AVAILABLE', 'ds_shape': (2,)}]": (
        "zero3-order",
        "-U deepspeed",
    ),
    "AssertionError: {'id': 2, 'status': 'NOT_AVAILABLE', 'numel': 0, 'ds_shape': (0,)}": (
        "zero3-order",
        "use_reentrant",
    ),
    "ValueError: consumed 1048576 numels out of 1048832 - something is wrong": (
        "zero-sizes-differ",
        "reshard convert",
    ),
    "RuntimeError: Unable to JIT load the fused_adam op due to ninja not being installed.": (
        "deepspeed-op-needs",
        "install ninja",
    ),
    "RuntimeError: Unable to JIT load the async_io op due to it not being compatible due to hardware/software"
    " issue. None": ("deepspeed-op-unsupported", "libaio-dev"),
    "AssertionError: Non-root FSDP instance's `_is_root` should not have been set yet": (
        "fsdp-root",
        "summon_full_params",
    ),
    "ValueError: Inconsistent compute device and `device_id` on rank 1: cuda:0 vs cuda:1": (
        "fsdp-other-device",
        "set_device",
    ),
    "RuntimeError: DistributedDataParallel is not needed when a module doesn't have any parameters": (
        "ddp-nothing-trains",
        "is_trainable=True",
    ),
    "StopIteration: Caught StopIteration in replica 0 on device 0.": (
        "replica-without-parameters",
        "torchrun",
    ),
    "RuntimeError: No backend type associated with device type cpu": (
        "collective-on-cpu",
        "cuda:nccl,cpu:gloo",
    ),
    "RuntimeError: Tensors must be CUDA and dense": ("collective-on-cpu", "tensor.to(device)"),
    "torch.distributed.DistStoreError: Socket Timeout": ("store-wait", "first error"),
    "torch.distributed.DistStoreError: wait timeout after 600000ms, keys: /default_pg/0//cuda": (
        "store-wait",
        "ddp_timeout",
    ),
    "torch.distributed.elastic.multiprocessing.api.SignalException: Process 23946 got signal: 1": (
        "terminal-closed",
        "tmux",
    ),
    "slurmstepd: error: *** STEP 812203.0 ON gpu017 CANCELLED AT 2024-02-11T04:20:36 DUE TO TIME LIMIT ***": (
        "slurm-ended-job",
        "--time=",
    ),
    "OSError: AF_UNIX path too long": ("socket-path-long", "TMPDIR=/tmp"),
    "train.py: error: unrecognized arguments: --local-rank=0": ("local-rank-argument", '"--local-rank"'),
    "ValueError: You need to use at least 2 processes to use `--multi_gpu`.": (
        "accelerate-one-process",
        "--num_processes 1",
    ),
    "ValueError: The config file at /a/default_config.yaml had unknown keys (['enable_cpu_affinity']), please try"
    " upgrading your `accelerate` version": ("accelerate-config-newer", "-U accelerate"),
    "ValueError: trying to initialize the default process group twice!": (
        "process-group-twice",
        "is_initialized()",
    ),
    "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use"
    " the 'spawn' start method": ("cuda-after-fork", "dataloader_num_workers=0"),
    "RuntimeError: one of the variables needed for gradient computation has been modified by an inplace"
    " operation: [torch.cuda.LongTensor [1, 512]] is at version 3": (
        "changed-in-place",
        "broadcast_buffers=False",
    ),
    "RuntimeError: FSDP only supports single device modules but got params on {device(type='cuda', index=0)}": (
        "fsdp-on-cpu",
        "device_id=",
    ),
    "RuntimeError: Your training graph has changed in this iteration, e.g., one parameter is unused": (
        "ddp-static-graph",
        "find_unused_parameters=True",
    ),
    "DistributedOperationException: Cannot apply desired operation due to shape mismatches. All shapes across"
    " devices must be valid.": ("gather-shapes-differ", "pad_across_processes"),
    "ValueError: To launch a multi-GPU training from your notebook, the `Accelerator` should only be": (
        "notebook-used-gpu",
        "Restart the kernel",
    ),
    "AttributeError: module 'torch.distributed' has no attribute 'is_initialized'": (
        "torch-without-distributed",
        "is_available()",
    ),
    "ncclInternalError: Internal check failed.\nLast error:\nProxy Call to rank 1 failed (Connect)": (
        "nccl-internal",
        "NCCL_DEBUG=INFO",
    ),
    "ValueError: Invalid for universal checkpoint: ./c/latest_universal does not exist": (
        "universal-not-converted",
        "ds_to_universal",
    ),
    "RuntimeError: cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned": (
        "batch-pinned-on-gpu",
        "dataloader_pin_memory=False",
    ),
    "RuntimeError: Expected a 'cuda' device type for generator but found 'cpu'": (
        "generator-on-other-device",
        'Generator(device="cuda")',
    ),
    "ValueError: Tried to find checkpoint-latest but folder does not exist": (
        "accelerate-state-folder",
        "load_state",
    ),
    "RuntimeError: context has already been set": ("start-method-set", "force=True"),
    "ValueError: prefetch_factor option could only be specified in multiprocessing.": (
        "prefetch-without-workers",
        "dataloader_num_workers",
    ),
    "RuntimeError: Trying to resize storage that is not resizable": (
        "batch-not-stacked",
        "DataCollatorWithPadding",
    ),
    "RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable": (
        "gpu-busy",
        "nvidia-smi",
    ),
    "ImportError: Unable to import torch, please visit https://pytorch.org/ to see how": (
        "deepspeed-installed-first",
        "--no-build-isolation",
    ),
    "Exception: The current node timed out during startup. This could happen because": (
        "ray-start-timeout",
        "ray stop --force",
    ),
    "ValueError: Hostfile is empty or not formatted correctly, unable to proceed with launching.": (
        "hostfile-not-read",
        "slots=8",
    ),
    "RuntimeError: Unable to proceed, no GPU resources available": ("gpu-not-there", "nvidia-smi"),
}


@pytest.mark.parametrize("said", RUNS, ids=lambda said: said[:60])
def test_a_message_of_a_distributed_run(said: str) -> None:
    code, cure = RUNS[said]
    for text in (said, raised(said)):
        found = first(text)
        assert found.code == code and found.certainty != "sure"
        assert cure in found.remedy.en
        for told in (found.message, found.rule, found.remedy):
            assert not re.search(r"\{[a-z]+\}", told.en + told.zh)


LINES = {
    "ValueError: [deepspeed] failed to resume from checkpoint ./out/checkpoint-1000": "resume-without-latest",
    "mpirun has detected an attempt to run as root.": "mpirun-as-root",
    "[W socket.cpp:663] [c10d] The IPv4 network addresses of (node-01, 29500) cannot be retrieved (gai error: -2 - Name"
    " or service not known).": "host-unreachable",
    "python: can't open file '/w/train.py': [Errno 2] No such file or directory\nERROR:torch.distributed.elastic."
    "multiprocessing.api:failed (exitcode: 2) local_rank: 0 (pid: 44) of binary: /usr/bin/python3": "no-such-script",
    "error: #error -- unsupported GNU version! gcc versions later than 11 are not supported!\n"
    "RuntimeError: Error building extension 'fused_adam'": "compiler-too-new",
}


@pytest.mark.parametrize("said", LINES, ids=list(LINES.values()))
def test_lines_without_an_exception(said: str) -> None:
    assert first(said).code == LINES[said]


PIN = raised("RuntimeError: CUDA error: out of memory", "return tensor.pin_memory()")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (raised("TypeError: unsupported operand type(s) for //: 'str' and 'str'"), "deepspeed-auto"),
        (raised("ModuleNotFoundError: No module named 'mpi4py'"), "deepspeed-without-launcher"),
        (raised("IndexError: pop from an empty deque"), "zero3-order"),
    ],
)
def test_words_that_need_the_rest_of_the_log(text: str, code: str) -> None:
    assert first(text).code != code
    begin, said = text.rsplit("\n", 1)
    assert first(f"{begin}\n{BATCH}{said}").code == code


CONNECTED = "host:1:2 [0] NCCL INFO Channel 00/0 : 0[1000] -> 1[2000] via P2P/direct pointer\n" * 8
TIMEOUT = (
    "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE, NumelIn=1)"
)
HANGS = {
    f"With two RTX 4090 it just hangs after this:\n{CONNECTED}": ("hang-peer-to-peer", "NCCL_P2P_DISABLE=1"),
    "一直卡在这里不动\nUsing /root/.cache/torch_extensions/py310_cu121 as PyTorch extensions root...": (
        "hang-described",
        "rm -rf ~/.cache/torch_extensions",
    ),
    "I call save_state() inside `if accelerator.is_main_process:` and the run hangs forever": (
        "hang-described",
        "all ranks",
    ),
    f"Running tokenizer on dataset (num_proc=16):  78%|███  | 15/20 [29:41<08:21]\n{TIMEOUT}": (
        "hang-nccl",
        "before the launch",
    ),
}


@pytest.mark.parametrize("text", HANGS, ids=list("pbrd"))
def test_what_the_last_lines_show_about_a_hang(text: str) -> None:
    code, cure = HANGS[text]
    found = first(text)
    assert (found.code, found.certainty) == (code, "likely")
    assert cure in "\n".join(found.remedy.en.split("\n")[:4])


def test_a_full_host_is_not_a_full_gpu() -> None:
    assert first(PIN).code == "pinned-memory"


FREE = "Tried to allocate 86.00 MiB"
MEMORY = {
    f"torch.OutOfMemoryError: CUDA out of memory. {FREE}. GPU 3 has a total capacity of 79.15 GiB of which 1.02 GiB is"
    " free. Process 211342 has 78.12 GiB memory in use. Of the allocated memory 77.31 GiB is allocated by PyTorch, and"
    " 10.87 MiB is reserved by PyTorch but unallocated.": "gradient accumulation",
    "RuntimeError: CUDA error: out of memory": "comes from CUDA itself",
    f"torch.OutOfMemoryError: CUDA out of memory. {FREE}. GPU 0 has a total capacity of 23.65 GiB of which 12.25 MiB"
    " is free. Process 31021 has 15.12 GiB memory in use. Process 48211 has 8.37 GiB memory in use.": "31021 48211",
    f"torch.cuda.OutOfMemoryError: CUDA out of memory. {FREE} (GPU 0; 23.65 GiB total capacity; 1.20 GiB already"
    " allocated; 15.50 MiB free; 1.30 GiB reserved in total by PyTorch)": "full of other processes",
    f"torch.cuda.OutOfMemoryError: CUDA out of memory. {FREE} (GPU 0; 39.59 GiB total capacity; 36.28 GiB already"
    " allocated; 43.19 MiB free; 37.65 GiB reserved in total by PyTorch)": "Fragmentation",
    f"torch.cuda.OutOfMemoryError: CUDA out of memory. {FREE} (GPU 0; 39.59 GiB total capacity; 37.64 GiB already"
    " allocated; 43.19 MiB free; 37.65 GiB reserved in total by PyTorch)": "`per_device_train_batch_size",
}


@pytest.mark.parametrize("said", MEMORY, ids=list(MEMORY.values()))
def test_the_cure_begins_with_what_the_sizes_show(said: str) -> None:
    found = first(raised(said))
    assert found.code == "cuda-out-of-memory"
    assert MEMORY[said] in "\n".join(found.remedy.en.split("\n")[:3])
