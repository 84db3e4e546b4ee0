"""Which rank failed first, and why, in logs of torchrun, DeepSpeed's launcher and `accelerate launch`.

The logs in tests/data/guard are of two ranks of which the second is killed, exits or raises in its third step.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from reshard.base.errors import Problem
from reshard.runs.guard.end.failure import Failure, RunEvidence, failure_in
from reshard.runs.guard.watch.memory_watch import oom_kills
from reshard.runs.guard.watch.watcher import Notice

DATA = Path(__file__).parents[1] / "data"
LAUNCHERS = ("torchrun", "accelerate", "deepspeed")


def told(name: str, seen: RunEvidence = RunEvidence()) -> Failure:  # noqa: B008 (frozen)
    file = DATA / name
    return failure_in(file.name, file.read_text(), seen)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_killed_rank_is_named_and_not_the_one_that_lost_it(launcher: str) -> None:
    failure = told(f"guard/{launcher}-kill.log")
    assert failure.who == "rank 1"
    expected = "ended without a traceback" if launcher == "deepspeed" else "killed by SIGKILL"
    assert expected in failure.shown[-1]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_an_exception_is_the_cause_whatever_the_exit_status_was(launcher: str) -> None:
    """After it, torch aborts the process: torchrun reports SIGABRT."""
    failure = told(f"guard/{launcher}-raise.log")
    assert failure.who == "rank 1" and failure.shown[-1] == "ValueError: bad shard"
    assert failure.findings[0].code == "unknown-failure"


def test_an_exception_in_the_body_of_a_script_is_shown_with_its_line() -> None:
    log = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/user/train/train.py", line 26, in <module>
[rank1]:     raise ValueError("record 1234 has no answer")
[rank1]: ValueError: record 1234 has no answer
"""
    shown = failure_in("output.log", log, RunEvidence(ranks=2)).shown
    assert shown == ("  /home/user/train/train.py:26 <module>", "ValueError: record 1234 has no answer")


def test_a_killed_rank_is_out_of_memory_only_with_evidence() -> None:
    (alone, *_) = told("guard/torchrun-kill.log").findings
    assert alone.code == "killed-by-signal" and alone.certainty == "possible"
    (counted, *_) = told("guard/torchrun-kill.log", RunEvidence(oom_kills=1)).findings
    assert counted.code == "short-container-memory"


def test_what_the_guard_saw_outranks_the_signal_and_not_an_exception() -> None:
    stopped = Notice(
        Problem("rank-stopped", "rank 1 is stopped", remedy="send it SIGCONT", values={"pids": "7"})
    )
    seen = RunEvidence(notices=(stopped,))
    for name in ("guard/torchrun-kill.log", "guard/deepspeed-kill.log", "train/exit.log"):
        assert told(name, seen).findings[0].code == "rank-stopped"
    assert told("guard/torchrun-raise.log", seen).findings[0].code == "unknown-failure"


@pytest.mark.parametrize(("status", "signal"), [(137, "SIGKILL"), (247, "SIGKILL"), (139, "SIGSEGV")])
def test_a_command_that_was_killed_is_told_by_its_exit_status(status: int, signal: str) -> None:
    failure = failure_in("log", "step 1 loss 2.0\n", RunEvidence(ranks=1, status=status))
    assert (failure.who, failure.did) == ("the command", "failed")
    assert failure.shown[0] == "step 1 loss 2.0" and f"killed by {signal}" in failure.shown[1]
    assert failure.findings[0].code.startswith("killed-")
    assert "killed" not in str(failure_in("log", "step 1 loss 2.0\n", RunEvidence(ranks=1, status=1)).shown)


def test_a_rank_that_ended_without_a_word_is_not_its_neighbour() -> None:
    """torchrun reports rank 1, which lost rank 0, as the root cause. Its log: `tests.train.ranks`, fail=exit."""
    failure = told("train/exit.log")
    assert failure.who == "rank 0"
    assert failure.shown[-1] == "ended with exit status 3, without a traceback"


@pytest.mark.parametrize("name", [*(f"guard/{each}-exit.log" for each in LAUNCHERS[::2]), "train/exit.log"])
def test_the_rank_that_failed_first_is_not_said_to_have_lost_another(name: str) -> None:
    failure = told(name)
    assert failure.did == "failed first"
    assert failure.findings and failure.findings[0].code == "rank-ended-silently"


def test_a_killed_rank_was_killed_whatever_the_others_report() -> None:
    content = (DATA / "guard/torchrun-kill.log").read_text()
    lost = "[rank0]: RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:1680\n"
    failure = failure_in("log", f"[rank0]: Traceback (most recent call last):\n{lost}{content}")
    assert (failure.who, failure.findings[0].code) == ("rank 1", "killed-by-signal")


def test_a_rank_that_only_lost_others_did_not_fail_first() -> None:
    """All others are on another node."""
    log = (
        "[rank0]: Traceback (most recent call last):\n"
        '[rank0]:   File "/home/user/train.py", line 2, in <module>\n'
        "[rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:1680\n"
    )
    failure = failure_in("log", log, RunEvidence(ranks=16))
    assert (failure.who, failure.did) == ("rank 0", "lost its connection to another rank")


def test_without_ranks_there_is_no_other_rank() -> None:
    """As urllib and requests print a server that closed the connection."""
    for said in (
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "requests.exceptions.ConnectionError: ('Connection aborted.', ConnectionResetError(104, 'Connection reset by "
        "peer'))",
        "OSError: curl: (56) Recv failure: Connection reset by peer",
    ):
        log = (
            f'Traceback (most recent call last):\n  File "/home/user/train.py", line 2, in <module>\n{said}\n'
        )
        failure = failure_in("log", log, RunEvidence(ranks=1))
        assert (failure.who, failure.did) == ("the command", "failed")
        assert "peer-died" not in {each.code for each in failure.findings}, said


def test_a_launcher_that_fails_is_no_rank() -> None:
    log = (
        "Traceback (most recent call last):\n"
        '  File "/home/user/venv/bin/torchrun", line 6, in <module>\n'
        "    sys.exit(main())\n"
        '  File "/home/user/venv/lib/python3.11/site-packages/torch/distributed/run.py", line 900, in main\n'
        "    run(args)\n"
        '  File "/home/user/venv/lib/python3.11/site-packages/torch/distributed/launcher/api.py", line 233, in '
        "_get_addr_and_port\n"
        "    raise ValueError(\n"
        "ValueError: The port number of the rendezvous endpoint '127.0.0.1:2925135' must be an integer\n"
    )
    failure = failure_in("log", log, RunEvidence(ranks=2))
    assert (failure.who, failure.did) == ("the launcher", "failed")


def test_a_script_is_seen_with_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rewards.py").write_text(
        "import torch.distributed as dist\n"
        "def score(completions, **more):\n"
        "    if dist.get_rank() == 0:\n"
        "        dist.all_gather_object([], 1)\n"
        "    return [0.0 for _ in completions]\n"
    )
    monkeypatch.chdir(tmp_path)
    log = (
        "[rank1]: Traceback (most recent call last):\n"
        '[rank1]:   File "/home/user/train.py", line 2, in <module>\n'
        "[rank1]: RuntimeError: Timed out waiting 1800000ms for recv operation to complete\n"
    )
    (alone,) = failure_in("log", log).findings
    first, *_ = failure_in("log", log, RunEvidence(scripts=(Path("rewards.py"),))).findings
    assert alone.code == "hang-gloo"
    assert first.code == "script-rank-guard" and "hang-gloo" in first.also
    assert str(first.places[0]) == "rewards.py:4"


def test_a_log_without_any_failure_shows_its_end() -> None:
    noise = "Loading weights: 100%|████| 25/25 [00:00<00:00, 5504.05it/s]"
    lines = ["loading", noise, "/x/a.py:1: FutureWarning: old", "  warnings.warn(", "Segmentation fault"]
    failure = failure_in("log", "".join(f"[default0]:{line}\n" for line in lines))
    assert failure.shown == ("loading", "Segmentation fault")


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with 64 MiB of memory, where this process may make one."""
    v1 = Path("/sys/fs/cgroup/memory")
    folder = (v1 if v1.is_dir() else Path("/sys/fs/cgroup")) / f"reshard-tests-{os.getpid()}"
    limit = folder / ("memory.limit_in_bytes" if v1.is_dir() else "memory.max")
    try:
        folder.mkdir()
        limit.write_text(str(64 << 20))
        yield folder
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    finally:
        if folder.is_dir():
            folder.rmdir()


def test_the_kernel_counts_whom_its_killer_ended(group: Path) -> None:
    code = (
        "import subprocess, sys\n"
        "from reshard.runs.guard.watch.memory_watch import oom_kills\n"
        f"open({str(group / 'cgroup.procs')!r}, 'w').write('0')\n"
        "before = oom_kills()\n"
        "greedy = subprocess.run([sys.executable, '-c', 'bytearray(400 << 20)'])\n"
        "print(greedy.returncode, oom_kills() - before)\n"
    )
    before = oom_kills()
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert shown.stdout.split() == ["-9", "1"], shown.stderr
    assert oom_kills() == before, "in another group"
