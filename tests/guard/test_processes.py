"""The processes of a run are found, with their ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest

from reshard.runs.guard.watch.process_tree import Process, Processes, ProcessTree, below, ranks_of
from tests.work import calls


@contextmanager
def running(code: str, environment: Mapping[str, str] | None = None, *before: str) -> Iterator[ProcessTree]:
    """Processes that write a line when all of them are there."""
    process = subprocess.Popen(
        [*before, sys.executable, "-c", code],
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
    )
    assert process.stdout is not None
    tree = ProcessTree(process.pid)
    try:
        process.stdout.readline()
        yield tree
    finally:
        for pid in tree.snapshot():
            os.kill(pid, signal.SIGKILL)
        process.communicate()


RANKS = """
import os, subprocess, sys, time
def start(code, **variables):
    return subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **variables}, stdout=subprocess.PIPE)
worker = "import os, time; os.fork() and print(flush=True); time.sleep(100)"
for each in [start(worker, **{sys.argv[1]: str(rank), "WORLD_SIZE": "4"}) for rank in (2, 3)]:
    each.stdout.readline()
print(flush=True); time.sleep(100)
""".replace("sys.argv[1]", "os.environ['NAME']")


@pytest.mark.parametrize("name", ["RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"])
def test_a_rank_is_the_process_itself_and_not_its_workers(name: str) -> None:
    with running(RANKS, {"NAME": name}) as tree:
        processes = tree.snapshot()
        ranks = ranks_of(processes)
        assert list(ranks) == [2, 3] and len(processes) == 5
        assert all(each.parent == tree.root and each.world == 4 for each in ranks.values())
        assert [len(list(below(each.pid, processes))) for each in ranks.values()] == [2, 2]
        assert processes[tree.root].rank is None
        assert all(each.memory > 1 << 20 and sys.executable in each.command for each in ranks.values())


def test_a_batch_script_of_slurm_is_no_rank() -> None:
    """It has SLURM_PROCID=0, which all its processes inherit."""
    with running(RANKS, {"NAME": "RANK", "SLURM_PROCID": "0"}) as tree:
        assert list(ranks_of(tree.snapshot())) == [2, 3]


def test_a_shell_around_a_rank_is_no_rank() -> None:
    code = "print(flush=True); import time; time.sleep(100)"
    with running(code, {"RANK": "1"}, "bash", "-c", '"$0" "$@"; true') as tree:
        processes = tree.snapshot()
        assert len(processes) == 2 and ranks_of(processes)[1].parent == tree.root


def test_a_program_that_a_rank_starts_by_a_shell_is_no_rank() -> None:
    code = (
        "import subprocess, sys\n"
        "inner = 'print(flush=True); import time; time.sleep(100)'\n"
        "subprocess.run(['bash', '-c', '\"$0\" \"$@\"; true', sys.executable, '-c', inner])"
    )
    with running(code, {"RANK": "1"}) as tree:
        processes = tree.snapshot()
        assert len(processes) == 3 and [each.pid for each in processes.values() if each.rank == 1] == [
            tree.root
        ]


def test_a_run_without_ranks_has_one() -> None:
    code = "sum(range(10**7)); print(flush=True); import time; time.sleep(100)"
    environment = dict.fromkeys(("RANK", "SLURM_PROCID"), "")
    with running(code, environment, "bash", "-c", '"$0" "$@"; true') as tree:
        (rank,) = ranks_of(tree.snapshot()).values()
        assert rank.parent == tree.root and rank.rank is None


def test_states_time_and_bytes() -> None:
    code = (
        "print(flush=True); input(); open('/dev/null', 'wb').write(bytes(1 << 20)); sum(range(10**7))\n"
        "print(flush=True); input()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )
    assert process.stdin is not None and process.stdout is not None
    tree = ProcessTree(process.pid)

    def reaching(state: str) -> Process:
        deadline = time.monotonic() + 60
        while (now := tree.snapshot()[process.pid]).state != state:
            assert time.monotonic() < deadline, now
            time.sleep(0.02)
        return now

    process.stdout.readline()
    before = reaching("S")
    process.stdin.write(b"\n")
    process.stdout.readline()
    after = reaching("S")
    assert after.seconds > before.seconds and after.io - before.io > 1 << 20
    process.send_signal(signal.SIGSTOP)
    reaching("T")
    process.kill()
    reaching("Z")
    process.communicate()
    assert tree.snapshot() == {}


def test_a_process_is_looked_at_in_few_calls() -> None:
    many = (
        "import os, time\nfor _ in range(29):\n    if not os.fork(): time.sleep(100)\n"
        "print(flush=True); time.sleep(100)"
    )
    with running(many) as tree:
        seen: list[Processes] = [tree.snapshot() for _ in range(4)]
        assert [len(each) for each in seen] == [30] * 4
        assert calls(tree.snapshot) < 100 * 30
