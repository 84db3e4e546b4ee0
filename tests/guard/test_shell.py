"""An interactive shell under guard has job control, on a real terminal."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from reshard.runs.guard.supervise.shell_terminal import is_interactive_shell
from tests.guard.test_terminal import GUARD, RESHARD, session

BASH = ("bash", "--norc", "--noprofile", "-i")
PROMPT = b"next> "


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PS1", PROMPT.decode())
    monkeypatch.setenv("TERM", "dumb")


def typed(*lines: bytes) -> list[tuple[bytes, bytes]]:
    """Each line is typed at a prompt."""
    return [(PROMPT, line) for line in lines]


@pytest.mark.parametrize("before", [(), GUARD], ids=["alone", "guarded"])
def test_jobs_stop_and_go_on(before: tuple[str, ...]) -> None:
    code = "import time; print('be' + 'gun', flush=True); time.sleep(1); print('en' + 'ded')"
    job = f'{sys.executable} -c "{code}"\n'  # a shell that is stopped in vfork would never be seen to stop
    steps = [*typed(job.encode()), (b"begun\r\n", b"\x1a"), *typed(b"fg\n", b"echo status $?\n", b"exit 3\n")]
    printed, status = session((*before, *BASH), steps)
    assert b"job control" not in printed and b"Stopped" in printed
    assert printed.index(b"Stopped") < printed.index(b"\r\nended") < printed.index(b"\r\nstatus 0")
    assert status == 3


@pytest.mark.parametrize("before", [(), GUARD], ids=["alone", "guarded"])
def test_ctrl_c_ends_the_job_and_not_the_shell(before: tuple[str, ...]) -> None:
    steps = [*typed(b"sh -c 'echo be''gun; sleep 60'\n"), (b"begun\r\n", b"\x03")]
    printed, status = session((*before, *BASH), [*steps, *typed(b"echo status $?\n", b"exit\n")])
    assert b"\r\nstatus 130" in printed and status == 0


def test_a_job_has_the_size_of_the_terminal_and_reads_keys() -> None:
    code = "import os; print(os.get_terminal_size(), os.isatty(0), input('name: ')[::-1])"
    steps = [*typed(f'{sys.executable} -c "{code}"\n'.encode()), (b"name: ", b"abc\n"), *typed(b"exit\n")]
    printed, status = session((*GUARD, *BASH), steps)
    assert b"os.terminal_size(columns=77, lines=33) True cba" in printed and status == 0


def test_the_terminal_and_the_log_are_as_before_and_complete(tmp_path: Path) -> None:
    guarded = " ".join((RESHARD, "guard", "--no-check", "--log", "log", "--", *BASH))
    script = f"before=$(stty -g); {guarded}; [ $before = $(stty -g) ] && echo sa''me"
    printed, _ = session(("sh", "-c", script), typed(b"stty -echo\n", b"echo in the l''og\n", b"exit\n"))
    assert b"same" in printed
    assert "stdout F next> in the log" in (tmp_path / "log/output.log").read_text()


@pytest.mark.parametrize(
    ("line", "is_one"),
    [
        ("bash", True),
        ("bash -i", True),
        ("/bin/bash --rcfile file -l", True),
        ("bash -ic command", True),
        ("zsh", True),
        ("bash run.sh", False),
        ("bash run.sh -i", False),
        ("bash -lc command", False),
        ("bash -c command -i", False),
        ("python -i", False),
    ],
)
def test_interactive_shells(line: str, is_one: bool) -> None:
    assert is_interactive_shell(line.split()) is is_one


def test_a_notice_begins_its_line_on_a_raw_terminal() -> None:
    steps = typed(*(b"echo step %d/9 loss nan\n" % step for step in range(1, 9)))
    printed, status = session((*GUARD, *BASH), steps)
    assert b"\r\nreshard guard: the loss is NaN or infinite\r\n" in printed and status == 1


def test_a_shell_that_reads_a_pipe_needs_no_terminal() -> None:
    printed, status = session(("sh", "-c", f"echo 'echo read' | {' '.join((*GUARD, 'bash'))}"))
    assert (printed, status) == (b"read\r\n", 0)
