"""Missing ranks and unknown keys, in the words of torch, argparse and others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from reshard.runs.doctor.log_diagnosis import diagnose_text

BARRIER = """
import sys, torch.distributed as dist
from datetime import timedelta
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=3)
dist.barrier()
if rank != 1:
    dist.monitored_barrier(timeout=timedelta(seconds=2), wait_all_ranks=True)
"""
WATCHDOG = (
    "[rank{0}]:[E101 10:00:00.0 ProcessGroupNCCL.cpp:632] [Rank {0}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=12, OpType=ALLREDUCE, NumelIn=1000, NumelOut=1000, Timeout(ms)=600000) ran for 600001 "
    "milliseconds before timing out.\n"
)
NCCL = "node{1}:11:12 [{2}] NCCL INFO comm 0x55 rank {0} nranks 16 cudaDev {2} busId 1000 - Init COMPLETE\n"


def told(text: str) -> str:
    """The text of the first finding about a log."""
    first = diagnose_text("log", text)[0]
    return "\n".join([first.code, first.rule.en, *map(str, first.evidence)])


@pytest.mark.slow
def test_the_rank_that_gloo_names_is_told(tmp_path: Path) -> None:
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", BARRIER, str(rank), str(tmp_path / "store")],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    said = "".join(run.communicate()[1] for run in runs)
    assert "ranks-absent\nrank 1 never reached the barrier" in told(said), said


def test_a_rank_that_waited_in_no_collective_is_told() -> None:
    names = "".join(NCCL.format(rank, rank // 8, rank % 8) for rank in range(16))
    waits = "".join(WATCHDOG.format(rank) for rank in range(16) if rank != 11)
    shown = told(names + waits)
    assert "hang-nccl" in shown
    assert "rank 0-10, 12-15 of 16 waited" in shown and "rank 11 never reached" in shown


def test_ranks_that_did_not_come_are_counted() -> None:
    said = "[rank0]: DistStoreError: Timed out after 9 seconds waiting for clients. 3/4 clients joined"
    assert "3 of 4 ranks came, 1 did not" in told(said)
    assert "20 processes came where 16 were expected" in told(
        "torch.distributed.DistStoreError: Timed out initializing process group in store based barrier on rank: 0, for "
        "key: store_based_barrier_key:1 (world_size=16, num_workers_joined=20, timeout=0:30:00)"
    )


RUNS = (
    "CollectiveFingerPrint(SequenceNumber=7, OpType={}, TensorShape=[{}], TensorDtypes=Float, TensorDeviceTypes="
    "TensorOptions(dtype=float (default), device=cpu))"
)
MISMATCH = (
    "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: "
    f"{RUNS.format('ALLREDUCE', 8)}, but Rank 1 is running collective: {RUNS.format('BROADCAST', 4)}."
    "Collectives differ in the following aspects: \t Op type: ALLREDUCEvs BROADCAST"
)


def test_the_collectives_of_two_ranks_are_told() -> None:
    shown = told(MISMATCH)
    assert "collective-mismatch" in shown and "Rank 0: 7 ALLREDUCE [8]; rank 1: 7 BROADCAST [4]" in shown


ARGPARSE = """
import argparse
parser = argparse.ArgumentParser("train.py")
parser.add_argument("--learning_rate"), parser.add_argument("--num-train-epochs")
parser.parse_args(["--learnig_rate", "1e-4", "--num_train_epoch", "3"])
"""


def test_the_nearest_argument_is_told_from_the_usage() -> None:
    run = subprocess.run([sys.executable, "-c", ARGPARSE], capture_output=True, text=True, check=False)
    shown = told(run.stderr)
    assert "`learnig_rate` is unknown; the nearest known name is `learning_rate`" in shown
    assert "`num_train_epoch` is unknown; the nearest known name is `num-train-epochs`" in shown
