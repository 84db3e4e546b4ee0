"""Memory, GPUs and ports that were requested and not there, with their numbers, in the words of every framework."""

from __future__ import annotations

import subprocess
import sys

import pytest

from reshard.runs.doctor.causes.out_of_memory import shortage
from reshard.runs.doctor.log_diagnosis import diagnose_text

GIB = 2.0**30
SAID = {
    "Error out of memory at line 380 in file /home/user/bitsandbytes/csrc/ops.cu": ("device", {}),
    # torch 2.13, c10/cuda/CUDACachingAllocator.cpp, c10/xpu/XPUCachingAllocator.cpp, torch/mps
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 79.15 GiB "
    "of which 1.25 GiB is free. Process 4711 has 40.50 GiB memory in use. Process 12 has 8.00 GiB memory in use. "
    "Including non-PyTorch memory, this process has 29.40 GiB memory in use. Of the allocated memory 28.11 GiB is "
    "allocated by PyTorch, and 0.50 GiB is reserved by PyTorch but unallocated.": (
        "device",
        {
            "asked": 2 * GIB,
            "there": 1.25 * GIB,
            "total": 79.15 * GIB,
            "others": 48.5 * GIB,
            "own": 29.4 * GIB,
        },
    ),
    "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 15.78 GiB total capacity; 10.00 GiB already "
    "allocated; 10.75 MiB free; 14.50 GiB reserved in total by PyTorch)": (
        "device",
        {"asked": 20 * 2.0**20, "total": 15.78 * GIB, "unallocated": 4.5 * GIB},
    ),
    "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 63.98 GiB of "
    "which 512.00 MiB is free.": ("device", {"asked": GIB, "there": GIB / 2, "total": 63.98 * GIB}),
    "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 59.61 GiB. GPU 0 has a total capacity of 28.55 "
    "GiB.": (
        "device",
        {"asked": 59.61 * GIB, "total": 28.55 * GIB},
    ),
    "RuntimeError: NPU out of memory. Tried to allocate 260.00 MiB (NPU 0; 28.50 GiB total capacity; 10.24 GiB already "
    "allocated; 10.24 GiB current active; 149.57 MiB free; 10.28 GiB reserved in total by PyTorch)": (
        "device",
        {"asked": 260 * 2.0**20, "there": 149.57 * 2.0**20, "total": 28.5 * GIB},
    ),
    "RuntimeError: MPS backend out of memory (MPS allocated: 5.05 GB, other allocations: 2.29 GB, max allowed: 6.77 "
    "GB). Tried to allocate 1024.00 MB on private pool.": (
        "device",
        {"asked": GIB, "total": 6.77 * GIB},
    ),
    # vLLM, Ray, Triton, Slurm, Linux, numpy, the C++ library, jemalloc
    "ValueError: Free memory on device (14.3/23.6 GiB) on startup is less than desired GPU memory utilization (0.9, "
    "21.3 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.": (
        "free",
        {"asked": 21.3 * GIB, "there": 14.3 * GIB, "total": 23.6 * GIB},
    ),
    "ray.exceptions.OutOfMemoryError: 1 worker(s) were killed due to the node running low on memory. Memory on the "
    "node (IP: 10.10.10.1) was 110.41GB / 121.63GB (0.907749), which exceeds the memory usage threshold of 0.900000.": (
        "host",
        {"own": 110.41 * GIB, "total": 121.63 * GIB},
    ),
    "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 180224, Hardware limit: 101376.": (
        "kernel",
        {"asked": 180224, "there": 101376},
    ),
    "Memory cgroup out of memory: Killed process 24680 (python3) total-vm:98304000kB, anon-rss:67108864kB": (
        "container",
        {"own": 64 * GIB},
    ),
    "slurmstepd: error: Detected 1 oom_kill event in StepId=4711.0. Some of the step tasks have been OOM Killed.": (
        "container",
        {},
    ),
    "terminate called after throwing an instance of 'std::bad_alloc'": ("host", {}),
    "<jemalloc>: Error in malloc(): out of memory": ("host", {}),
}


@pytest.mark.parametrize("said", SAID, ids=lambda said: said[:40])
def test_numbers_are_read_in_the_words_of_every_maker(said: str) -> None:
    kind, numbers = SAID[said]
    found = shortage(said)
    assert found is not None and found.kind == kind
    assert {name: found.sizes[name] for name in numbers} == pytest.approx(numbers)


@pytest.mark.parametrize("said", SAID, ids=lambda said: said[:40])
def test_each_is_a_failure_that_is_not_unknown(said: str) -> None:
    found = diagnose_text("log", said)
    assert found and found[0].code != "unknown-failure" and found[0].severity == "error"


def test_a_host_that_has_too_little_is_told_what_was_requested() -> None:
    """numpy's own message, from this interpreter."""
    run = subprocess.run(
        [sys.executable, "-c", "import numpy; numpy.ones((10**7, 10**7))"],
        capture_output=True,
        text=True,
        check=False,
    )
    found = diagnose_text("log", run.stderr)
    assert found[0].code == "short-host-memory" and "728 TiB requested" in found[0].rule.en
