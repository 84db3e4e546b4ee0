"""A command under guard behaves as it does alone: its output, exit status, terminal and signals."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from reshard.runs.guard.supervise import supervision
from reshard.runs.guard.supervise.output_relay import OutputRelay
from reshard.runs.guard.supervise.supervision import supervise
from reshard.runs.guard.watch.process_tree import Processes, ProcessTree

RESHARD = str(Path(sys.executable).with_name("reshard"))
GUARD = (RESHARD, "guard", "--quiet", "--no-check", "--")
PYTHON = sys.executable
Steps = Sequence[tuple[bytes, bytes]]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def session(words: Sequence[str], steps: Steps = ()) -> tuple[bytes, int]:
    """What a command prints on a terminal, and its exit code; after each text of `steps`, keys are pressed."""
    child, terminal = pty.fork()
    if not child:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 77, 0, 0))
        os.execvp(words[0], list(words))
    printed, seen, left = b"", 0, list(steps)
    while select.select([terminal], [], [], 120)[0]:
        try:
            printed += os.read(terminal, 4096)
        except OSError:  # the end of a terminal
            break
        if left and left[0][0] in printed[seen:]:
            seen, keys = len(printed), left.pop(0)[1]
            os.write(terminal, keys)
    return printed, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def relay_of(log: Path) -> OutputRelay:
    """A relay whose output goes to a log only."""
    return OutputRelay.of(log, stdout=os.open(os.devnull, os.O_WRONLY))


def alone_and_guarded(code: str, steps: Steps = ()) -> list[tuple[bytes, int]]:
    return [session((*before, PYTHON, "-c", code), steps) for before in ((), GUARD)]


def test_the_command_has_the_terminal_and_its_size() -> None:
    alone, guarded = alone_and_guarded(
        "import os, sys\nprint(*map(os.isatty, range(3)), os.get_terminal_size())"
    )
    assert alone == guarded
    assert b"True True True os.terminal_size(columns=77, lines=33)" in guarded[0]


def test_a_debugger_reads_what_is_typed() -> None:
    steps = [(b"(Pdb) ", b"x = 7\n"), (b"(Pdb) ", b"c\n")]
    code = "import pdb\nx = 5\npdb.set_trace()\nprint('x is', x)"
    for printed, status in alone_and_guarded(code, steps):
        assert (b"x is 7" in printed, status) == (True, 0)


def test_a_password_is_not_shown() -> None:
    code = "import getpass; print('it has', len(getpass.getpass()), 'characters')"
    alone, guarded = alone_and_guarded(code, [(b"assword: ", b"secret\n")])
    assert alone == guarded
    assert b"it has 6 characters" in guarded[0] and b"secret" not in guarded[0]


@pytest.mark.thorough
def test_a_progress_bar_is_redrawn_as_it_is_alone() -> None:
    code = "import sys, tqdm\nfor _ in tqdm.tqdm(range(3), bar_format='{n}/{total}', mininterval=0): pass"
    alone, guarded = alone_and_guarded(code)
    assert alone == guarded
    assert b"\r3/3" in guarded[0]


@pytest.mark.thorough
def test_ctrl_c_reaches_the_command_once() -> None:
    code = (
        "import signal, time\nheard = []\nsignal.signal(signal.SIGINT, lambda *_: heard.append(1))\n"
        "print('ready', flush=True)\nend = time.time() + 60\n"
        "while not heard and time.time() < end: time.sleep(0.05)\ntime.sleep(0.5)\n"
        "print('heard', len(heard))\nraise SystemExit(5)"
    )
    for printed, status in alone_and_guarded(code, [(b"ready", b"\x03")]):
        assert (b"heard 1" in printed, status) == (True, 5)


@pytest.mark.thorough
def test_ctrl_z_stops_it_and_fg_goes_on() -> None:
    for before in ("", " ".join(GUARD)):
        command = f"{before} {PYTHON} -c 'import time; print(1, flush=True); time.sleep(1); print(2)'"
        printed, _ = session(
            ["bash", "--norc", "-ic", f"{command}; echo stopped $?; fg; echo ended $?"], [(b"1", b"\x1a")]
        )
        assert b"stopped 148" in printed and printed.index(b"stopped") < printed.index(
            b"\n2\r"
        ) < printed.index(b"ended 0")


def test_streams_stay_apart_and_in_order() -> None:
    code = "import os\nfor each in range(200):\n os.write(1, b'out %d\\n' % each); os.write(2, b'err %d\\n' % each)"
    words = (PYTHON, "-c", code)
    alone, guarded = (
        subprocess.run([*before, *words], capture_output=True, check=True) for before in ((), GUARD)
    )
    assert (alone.stdout, alone.stderr) == (guarded.stdout, guarded.stderr)
    one, same = (
        subprocess.run([*before, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True)
        for before in ((), GUARD)
    )
    assert one.stdout == same.stdout


def test_standard_input_is_the_commands() -> None:
    code = "import sys; print(sys.stdin.read()[::-1])"
    done = subprocess.run([*GUARD, PYTHON, "-c", code], input=b"abc", capture_output=True, check=True)
    assert done.stdout == b"cba\n"


def test_a_reader_that_left_is_a_broken_pipe_for_the_command() -> None:
    code = (
        "import os\ntry:\n while True: os.write(1, b'y\\n')\nexcept BrokenPipeError: os.write(2, b'broken')"
    )
    words = shlex.join([*GUARD, PYTHON, "-c", code])
    done = subprocess.run(["bash", "-c", f"{words} | head -1"], capture_output=True, check=True, timeout=300)
    assert (done.stdout, done.stderr.startswith(b"broken")) == (b"y\n", True)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("code", "found"),
    [("yes | head -1", b"Broken pipe"), (f"{PYTHON} -c 'print(1)' > /dev/full", b"No space left on device")],
)
def test_output_that_leads_nowhere_is_the_cause(code: str, found: bytes) -> None:
    done = subprocess.run(["bash", "-c", f"{shlex.join(GUARD)} {code}"], capture_output=True, check=False)
    assert b"error: the command could no longer write to stdout" in done.stderr and found in done.stderr
    assert done.returncode == int(b"space" in found)  # else that of head


COUNTS = """
import signal, sys, time
heard = []
for each in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
    signal.signal(each, lambda number, frame: heard.append(number))
print("ready", flush=True)
end = time.time() + 60
while not heard and time.time() < end:
    time.sleep(0.05)
time.sleep(0.5)  # for a second one
print(*heard)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
@pytest.mark.parametrize("to_all", [False, True])
@pytest.mark.thorough
def test_a_signal_reaches_the_command_once(number: int, to_all: bool) -> None:
    with subprocess.Popen(
        [*GUARD, PYTHON, "-c", COUNTS], stdout=subprocess.PIPE, start_new_session=True
    ) as guard:
        assert guard.stdout
        assert guard.stdout.readline() == b"ready\n"
        (os.killpg if to_all else os.kill)(guard.pid, number)
        assert guard.stdout.read() == b"%d\n" % number
    assert guard.returncode == 0


def test_an_ignored_signal_stays_ignored() -> None:
    code = "import signal; print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)"
    done = subprocess.run(["nohup", *GUARD, PYTHON, "-c", code], capture_output=True, check=True)
    assert done.stdout == b"True\n"


def test_what_goes_on_after_the_command_still_prints() -> None:
    later = "(until [ -e go ]; do sleep 0.1; done; echo later) & echo now"
    with subprocess.Popen(
        ["bash", "-c", shlex.join([*GUARD, "bash", "-c", later])], stdout=subprocess.PIPE
    ) as guard:
        try:
            assert guard.wait(timeout=300) == 0
        finally:
            Path("go").touch()
        assert guard.stdout and guard.stdout.read() == b"now\nlater\n"


@pytest.mark.thorough
def test_the_command_ends_with_a_guard_that_is_killed() -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    with subprocess.Popen([*GUARD, PYTHON, "-c", code], stdout=subprocess.PIPE) as guard:
        assert guard.stdout
        child = int(guard.stdout.readline())
        guard.kill()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{child}/stat").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{child}/stat").exists()


def test_the_log_keeps_lines_with_times_and_streams(tmp_path: Path) -> None:
    code = "import sys\nprint('10%\\r20%\\r30%')\nprint('warning', file=sys.stderr)\nprint('no end', end='')"
    log = tmp_path / "log"
    subprocess.run(
        [*GUARD[:-1], "--log", str(log), "--", PYTHON, "-c", code], capture_output=True, check=True
    )
    lines = sorted(each.split(" ", 1)[1] for each in (log / "output.log").read_text().splitlines())
    assert lines == ["stderr F warning", "stdout F 30%", "stdout F no end"]


def test_the_command_inherits_descriptors() -> None:
    line = f"{shlex.join(GUARD)} cat <(echo from a descriptor)"
    done = subprocess.run(["bash", "-c", line], capture_output=True, check=True, timeout=300)
    assert done.stdout == b"from a descriptor\n"


def until_full(pipe: int) -> None:
    """Wait until nothing more has gone into a pipe for half a second."""
    before, deadline = -1, time.monotonic() + 60
    while (waiting := _waiting(pipe)) != before or not waiting:
        assert time.monotonic() < deadline
        before = waiting
        time.sleep(0.5)


def _waiting(pipe: int) -> int:
    """How many bytes are in a pipe."""
    (count,) = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))
    return int(count)


@pytest.mark.thorough
def test_output_to_a_pipe_that_does_not_block_is_complete() -> None:
    source, target = os.pipe()
    os.set_blocking(target, False)
    code = "for number in range(40_000): print('line', number)"
    with subprocess.Popen([*GUARD, PYTHON, "-c", code], stdout=target) as guard:
        os.close(target)
        until_full(source)
        with os.fdopen(source, "rb") as file:
            lines = file.read().splitlines()
    assert (guard.returncode, len(lines), lines[-1]) == (0, 40_000, b"line 39999")


@pytest.mark.slow
def test_a_signal_reaches_a_command_whose_output_nobody_reads() -> None:
    code = (
        "import os, signal\nsignal.signal(signal.SIGTERM, lambda *_: os._exit(7))\n"
        "while True: os.write(1, bytes(65536))"
    )
    with subprocess.Popen([*GUARD, PYTHON, "-c", code], stdout=subprocess.PIPE) as guard:
        assert guard.stdout
        full, held = 1 << 16, b""
        while int.from_bytes(held, sys.byteorder) < full:
            held = fcntl.ioctl(guard.stdout, termios.FIONREAD, bytes(4))
            time.sleep(0.02)
        guard.terminate()
        assert guard.wait(60) == 7


@pytest.mark.slow
def test_the_report_comes_after_output_that_is_read_slowly(tmp_path: Path) -> None:
    words = [RESHARD, "guard", "--no-check", "--", PYTHON, "-c", "print('line\\n' * 40_000, end=''); 1 / 0"]
    with (tmp_path / "screen").open("w+") as screen:
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=screen) as guard:
            assert guard.stdout
            time.sleep(2)
            screen.seek(0)
            assert "failed" not in screen.read()
            assert guard.stdout.read().count(b"line\n") == 40_000
        screen.seek(0)
        assert (guard.returncode, "failed" in screen.read()) == (1, True)


def test_a_line_without_an_end_is_looked_at_once_it_has_settled(tmp_path: Path) -> None:
    relay = relay_of(tmp_path / "log")
    out, _ = relay.ends
    os.write(out, b"10%\r20%")
    relay.move(relay.streams[0])
    assert [[line.text for line in relay.lines()] for _ in range(3)] == [["10%"], ["20%"], []]
    os.write(out, b"\r30%\n")
    relay.move(relay.streams[0])
    assert [line.text for line in relay.lines()] == ["30%"]
    relay.begun()
    relay.close()


def test_a_second_run_with_the_same_log_folder_has_a_log_of_its_own(tmp_path: Path) -> None:
    for code in ("print('old')", "print('new')"):
        words = [*GUARD[:-1], "--log", str(tmp_path / "log"), "--", PYTHON, "-c", code]
        subprocess.run(words, capture_output=True, check=True, timeout=300)
    second = [path.read_text() for path in (tmp_path / "log").glob("*/output.log")]
    assert len(second) == 1 and "new" in second[0] and "old" not in second[0]


def test_a_log_that_cannot_be_created_is_refused_with_its_option(tmp_path: Path) -> None:
    (tmp_path / "reshard-guard").touch()
    done = subprocess.run([*GUARD, "true"], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 2 and "choose another one: --log DIR" in done.stderr


def test_ctrl_c_during_the_report_keeps_the_exit_status() -> None:
    code = "import os; print(os.getpid(), flush=True); raise SystemExit(7)"
    with subprocess.Popen(
        [*GUARD, PYTHON, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as guard:
        assert guard.stdout and guard.stderr
        child = Path(f"/proc/{int(guard.stdout.readline())}")
        while child.exists():
            time.sleep(0.02)
        time.sleep(0.3)  # the report takes a second
        guard.send_signal(signal.SIGINT)
        said = guard.stderr.read()
    assert guard.returncode == 7 and b"nothing was changed" not in said


@pytest.mark.thorough
@pytest.mark.parametrize("status", [0, 3])
def test_a_command_may_remove_the_log(tmp_path: Path, status: int) -> None:
    code = f"echo hi; rm -r reshard-guard; exit {status}"
    done = subprocess.run([*GUARD, "bash", "-c", code], capture_output=True, check=False, timeout=300)
    assert (done.returncode, done.stdout, b"error: the system" in done.stderr) == (status, b"hi\n", False)


def test_ranks_are_remembered_if_their_launcher_ends_while_they_are_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "TICK_SECONDS", 0.05)
    start, shots = subprocess.Popen(["bash", "-c", "RANK=0 sleep 50 & wait"]), []

    def snapshot(tree: ProcessTree) -> Processes:
        if any(each.command == "sleep 50" for each in shots[-1:] and shots[-1].values()):
            start.kill()
            os.waitid(os.P_PID, start.pid, os.WEXITED | os.WNOWAIT)
        shots.append(original(tree))
        return shots[-1]

    original = ProcessTree.snapshot
    monkeypatch.setattr(ProcessTree, "snapshot", snapshot)
    relay = relay_of(tmp_path / "log")
    relay.begun()
    outcome = supervise(lambda: start, relay, (), print)
    (rank,) = outcome.left
    os.kill(rank, signal.SIGKILL)


@pytest.mark.slow
def test_ranks_that_outlive_their_launcher_are_named(tmp_path: Path) -> None:
    sleeps = f"{PYTHON} -c 'import time; time.sleep(50)'"
    code = f"RANK=0 {sleeps} & RANK=1 {sleeps} & sleep 4; kill -KILL $$"
    with (tmp_path / "screen").open("w+") as screen:
        status = subprocess.run(
            [*GUARD, "bash", "-c", code], stdout=screen, stderr=screen, check=False
        ).returncode
        screen.seek(0)
        line = next(line for line in screen if line.startswith("ranks that still run"))
    pids = [int(word) for word in line.split(" kill ")[1].split()]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert (status, len(pids)) == (128 + 9, 2)
