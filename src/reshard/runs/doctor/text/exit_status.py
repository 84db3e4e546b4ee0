"""How a process ended, in the words of launchers, shells and Python: an exit status, or a signal by number or name."""

import re
import signal

_STATUS = re.compile(
    r"(?i:exit ?codes?|exit status|return ?code|exited with(?: (?:exit )?(?:code|status))?)\s*(?:is\s*)?"
    r"(?:[:=]\s*)?(?P<status>-?\d+)\b"
)
_NUMBER = re.compile(
    r"(?:[Rr]eceived|[Cc]aught|got|by|on|with) [Ss]ignal:? (?P<number>\d+)|[Ss]ignal: .{0,100}\((?P<other>\d+)\)"
    r"|\bSignal (?P<torchrun>\d+) \(SIG"
)
_DIED = re.compile(r"died with <Signals\.(?P<name>SIG[A-Z]+)")
_NAME = re.compile(r"[Ss]ignal:? (?P<name>SIG[A-Z]+)")
_OF_SHELL = r"(?:^|line \d+:\s+\d+\s|:\s|[\u4e00-\u9fff]\s?)"
"""Before what a shell prints of a process that a signal ended, also in a Chinese sentence."""
_WORDS = {
    "SIGSEGV": re.compile(rf"{_OF_SHELL}(?i:s)egmentation fault\b|!!!!!!! Segfault encountered !!!!!!!"),
    "SIGABRT": re.compile(rf"{_OF_SHELL}Aborted\b"),
    "SIGBUS": re.compile(rf"{_OF_SHELL}Bus error\b"),
    "SIGILL": re.compile(rf"{_OF_SHELL}Illegal instruction\b"),
    "SIGKILL": re.compile(rf"{_OF_SHELL}Killed\b"),
}
"""What shells and Python's faulthandler print."""
CRASHES = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL")
"""The signals of processes that crashed; others come from outside."""
_ENDED = re.compile(
    r"terminated (?:by|with) signal|\*\*\* \[.{0,300}\] Error \d+|sigkill_handler\] (?:Killing subprocess|\[)"
    r"|\bcore dumped\b|Fatal Python error|^oom_kill"
)
"""Other words of a make, a launcher or the kernel, which tell neither status nor signal."""


def reports_exit(text: str) -> bool:
    """Whether a line says that a process failed or was ended."""
    status = _STATUS.search(text)
    if status and int(status["status"]):
        return True
    return any(pattern.search(text) for pattern in (_NUMBER, _DIED, _ENDED, *_WORDS.values()))


def signal_in(text: str) -> str:
    """The name of the signal by which a line says that a process ended; "" for other lines."""
    if match := _DIED.search(text) or _NAME.search(text):
        return match["name"]
    if match := _NUMBER.search(text):
        return _name_of(int(next(each for each in match.groups() if each)))
    if match := _STATUS.search(text):
        return _name_of(_of_status(int(match["status"])))
    return next((name for name, pattern in _WORDS.items() if pattern.search(text)), "")


def _of_status(status: int) -> int:
    """The signal in an exit status: -9, 137 of a shell, 247 of DeepSpeed, which exits with -9."""
    if status < 0:
        return -status
    return status - 128 if status < 192 else 256 - status


def _name_of(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else ""
