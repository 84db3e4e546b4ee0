"""A command under guard ignores and receives the signals that it would without a guard."""

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
from pathlib import Path

import pytest

RESHARD = str(Path(sys.executable).with_name("reshard"))
GUARD = (RESHARD, "guard", "--quiet", "--no-check", "--")
MASKS = ("grep", "-E", "^Sig(Blk|Ign|Cgt)", "/proc/self/status")
ANNOUNCED = """
import signal, sys, time
heard = []
for name in sys.argv[1:]:
    signal.signal(signal.Signals[name], lambda number, frame: heard.append(signal.Signals(number).name))
print("ready", flush=True)
end = time.time() + 60
while len(heard) < len(sys.argv) - 1 and time.time() < end:
    time.sleep(0.05)
time.sleep(0.5)  # for a second one
print(*heard)
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "start",
    ["", "trap '' INT QUIT PIPE;", "trap '' ALRM XFSZ USR1;", pytest.param("bg=1;", id="background")],
)
def test_signals_are_ignored_as_at_the_start(start: str) -> None:
    alone, guarded = (
        subprocess.run(
            [
                "bash",
                "-c",
                f"{start} {shlex.join([*before, *MASKS])} {'& wait' if start == 'bg=1;' else '; :'}",
            ],
            capture_output=True,
            check=True,
        ).stdout
        for before in ((), GUARD)
    )
    assert alone == guarded and alone.count(b"\n") == 3


def test_a_program_that_restores_sigpipe_for_its_children_is_no_shell() -> None:
    """Python ignores SIGPIPE itself; its subprocess gives children the default."""
    alone, guarded = (
        subprocess.run([*before, *MASKS], capture_output=True, check=True).stdout for before in ((), GUARD)
    )
    assert alone == guarded


OTHERS = ("SIGALRM", "SIGCONT", "SIGWINCH", "SIGABRT", "SIGVTALRM", "SIGRTMIN")


def test_other_signals_reach_the_command_in_their_order() -> None:
    with subprocess.Popen(
        [*GUARD, sys.executable, "-c", ANNOUNCED, *OTHERS], stdout=subprocess.PIPE, start_new_session=True
    ) as guard:
        assert guard.stdout and guard.stdout.readline() == b"ready\n"
        for number, name in enumerate(OTHERS):
            (os.killpg if number % 2 else os.kill)(guard.pid, signal.Signals[name])
            select.select([], [], [], 0.4)  # the kernel orders pending signals by number
        assert guard.stdout.read().decode().split() == [*OTHERS]
    assert guard.returncode == 0


def test_a_signal_that_was_ignored_reaches_a_command_that_handles_it() -> None:
    command = shlex.join([*GUARD, sys.executable, "-c", ANNOUNCED, "SIGINT"])
    with subprocess.Popen(
        ["bash", "-c", f"{command} & echo $!; wait"], stdout=subprocess.PIPE, start_new_session=True
    ) as shell:
        assert shell.stdout
        pid = int(shell.stdout.readline())
        assert shell.stdout.readline() == b"ready\n"
        os.kill(pid, signal.SIGINT)
        assert shell.stdout.read() == b"SIGINT\n"


def test_a_signal_that_ends_the_command_is_its_exit_status() -> None:
    with subprocess.Popen(
        [*GUARD, "bash", "-c", "echo ready; exec sleep 60"], stdout=subprocess.PIPE
    ) as guard:
        assert guard.stdout and guard.stdout.readline() == b"ready\n"
        guard.send_signal(signal.SIGALRM)
        guard.stdout.read()
    assert guard.returncode == 128 + signal.SIGALRM


SIZES = """
import os, signal, time
sizes = []
signal.signal(signal.SIGWINCH, lambda *_: sizes.append(tuple(os.get_terminal_size(1))))
print("ready", flush=True)
end = time.time() + 60
while (not sizes or sizes[-1] != (70, 20)) and time.time() < end:
    time.sleep(0.05)
print("last", sizes[-1])
"""


def test_the_command_learns_the_new_size_of_the_terminal() -> None:
    child, terminal = pty.fork()
    if not child:
        os.execvp(GUARD[0], [*GUARD, sys.executable, "-c", SIZES])
    printed = b""
    while select.select([terminal], [], [], 120)[0]:
        try:
            printed += os.read(terminal, 4096)
        except OSError:
            break
        if printed.endswith(b"ready\r\n"):
            fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 70, 0, 0))
    os.waitpid(child, 0)
    os.close(terminal)
    assert b"last (70, 20)" in printed
