"""What processes do is read in every way, with and without the right to attach."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reshard.runs.guard.watch.process_tree import Process, ProcessTree, ranks_of
from reshard.runs.guard.watch.stack_signal import STACK_SIGNAL, stack_file
from reshard.runs.guard.watch.stacks import py_spy, read_stack
from tests.guard.watched import REPOSITORY, SCRIPTS, TORCHRUN

WITHOUT_CAPABILITY = ("setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace")
IS_ROOT = os.geteuid() == 0 and shutil.which("setpriv") is not None


@pytest.fixture(scope="module")
def hanging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[int, Process]]]:
    """Two ranks: 0 waits in an all_reduce for 1, which sleeps. Both have announced themselves."""
    folder = tmp_path_factory.mktemp("guard")
    environment = {"RESHARD_GUARD": str(folder), "ANNOUNCED": "1", "PYTHONPATH": str(REPOSITORY / "src")}
    environment |= {"SCRATCH": str(folder), "TORCH_FR_BUFFER_SIZE": "100"}
    run = subprocess.Popen(
        [*TORCHRUN, SCRIPTS / "gloo.py", "step:3", "record:1", "pause:300"],
        env={**os.environ, **environment},
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    tree = ProcessTree(run.pid)
    end = time.monotonic() + 300
    while not all((folder / f"trace_{rank}").exists() for rank in (0, 1)):
        assert run.poll() is None and time.monotonic() < end
        time.sleep(0.1)
    time.sleep(0.5)
    yield folder, ranks_of(tree.snapshot())
    for pid in tree.snapshot():
        os.kill(pid, signal.SIGKILL)
    run.wait()


def confined(process: Process, folder: Path) -> Any:
    """The stack of a process, as one without the right to attach reads it."""
    code = (
        "import json, sys; from pathlib import Path; from reshard.runs.guard.watch.process_tree import ProcessTree\n"
        "from reshard.runs.guard.watch.stacks import read_stack\n"
        "stack = read_stack(ProcessTree(int(sys.argv[1])).snapshot()[int(sys.argv[1])], Path(sys.argv[2]))\n"
        "print(json.dumps([stack.source, stack.waits_in(True), stack.place]))"
    )
    words = [*WITHOUT_CAPABILITY, sys.executable, "-c", code, str(process.pid), str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
    return json.loads(subprocess.run(words, capture_output=True, env=environment, check=True).stdout)


@pytest.mark.thorough
def test_py_spy(hanging: tuple[Path, dict[int, Process]]) -> None:
    _, ranks = hanging
    stacks = [read_stack(ranks[rank], None) for rank in (0, 1)]
    assert [stack.source for stack in stacks] == ["py-spy", "py-spy"]
    assert [stack.waits_in(True) for stack in stacks] == ["all_reduce", ""]
    assert stacks[0].place.endswith(" all_ranks") and "gloo.py:" in stacks[0].place
    assert stacks[1].place.endswith(" pause_in_data")


@pytest.mark.thorough
@pytest.mark.skipif(not IS_ROOT, reason="only root has this capability to lose")
def test_without_the_right_to_attach(hanging: tuple[Path, dict[int, Process]]) -> None:
    """py-spy is there and fails; the script itself says what it does, or else the kernel."""
    folder, ranks = hanging
    assert py_spy() is not None
    spied = [*WITHOUT_CAPABILITY, str(py_spy()), "dump", "--nonblocking", "--pid", str(ranks[0].pid)]
    assert subprocess.run(spied, capture_output=True).returncode != 0
    waiting, idle = (confined(ranks[rank], folder) for rank in (0, 1))
    assert waiting[:2] == ["faulthandler", "all_reduce"] and waiting[2].endswith(" all_ranks")
    assert idle[:2] == ["faulthandler", ""] and idle[2].endswith(" pause_in_data")
    unknown = confined(ranks[0], folder / "other")
    assert unknown[:2] == ["/proc", ""] and unknown[2].startswith("sleeping")


@pytest.mark.thorough
def test_the_flight_recorder(hanging: tuple[Path, dict[int, Process]]) -> None:
    from reshard.runs.guard.watch.flight_recorder import described, read_dumps

    folder, _ = hanging
    dumps = read_dumps({"TORCH_FR_DUMP_TEMP_FILE": str(folder / "trace_")}, since=0)
    assert dumps.keys() == {0, 1}
    assert list(described(dumps)) == [
        "flight recorder: rank 0 in gloo:all_reduce number 4 of group default_pg, shapes [[1]]; not called by rank 1"
    ]
    assert read_dumps({"TORCH_FR_DUMP_TEMP_FILE": str(folder / "trace_")}, since=time.time() + 1) == {}


def test_a_dump_that_is_none(tmp_path: Path) -> None:
    from reshard.runs.guard.watch.flight_recorder import read_dumps

    (tmp_path / "trace_0").write_bytes(b"cos\nsystem\n(S'touch run'\ntR.")
    (tmp_path / "trace_1").write_bytes(b"\x80\x04]\x94.")
    assert read_dumps({"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(tmp_path / "trace_")}, since=0) == {}


def test_a_pipe_without_a_reader_does_not_block(tmp_path: Path) -> None:
    from reshard.runs.guard.watch.flight_recorder import ask_for_dumps

    os.mkfifo(tmp_path / "pipe_0.pipe")
    os.mkfifo(tmp_path / "pipe_1.pipe")
    reader = os.open(tmp_path / "pipe_1.pipe", os.O_RDONLY | os.O_NONBLOCK)
    ask_for_dumps({"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(tmp_path / "pipe_")}, [0, 1, 2])
    assert os.read(reader, 10) == b"1"
    os.close(reader)


@pytest.mark.thorough
def test_a_process_that_does_not_handle_the_signal_is_not_sent_it(tmp_path: Path) -> None:
    """As after exec: the file is there, and the signal would end the process."""
    process = subprocess.Popen(["sleep", "100"])
    stack_file(tmp_path, process.pid).touch()
    stack = read_stack(ProcessTree(process.pid).snapshot()[process.pid], tmp_path)
    assert stack.source == "/proc" and process.poll() is None
    process.kill()
    process.wait()


def test_an_announcement_costs_nothing_without_the_command(tmp_path: Path) -> None:
    """No file and no handler without the command; with it, no torch, and forked workers announce nothing."""
    code = (
        "import os, sys, reshard.guard\n"
        "if not os.fork(): os._exit(0)\n"
        "os.wait(); print('torch' in sys.modules, os.getpid())"
    )
    plain = {"PYTHONPATH": str(REPOSITORY / "src"), "PATH": os.environ["PATH"]}
    for variables, expected in ((plain, 0), ({**plain, "RESHARD_GUARD": str(tmp_path)}, 1)):
        done = subprocess.run(
            [sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True
        )
        loaded, pid = done.stdout.split()
        assert loaded == "False"
        assert [path.name for path in tmp_path.iterdir()] == [f"stack-{pid}"] * expected
    assert STACK_SIGNAL == signal.SIGRTMIN + 5
