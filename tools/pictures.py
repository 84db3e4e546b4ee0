"""`python -m tools.pictures`: redraw the pictures of the README.

Terminals are recorded: the commands run, on the checkpoint in `examples/` or a genuine log, and the pictures show their
output, for light and for dark pages.
"""

from __future__ import annotations

import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, DIMMED_MONOKAI
from rich.text import Text

REPOSITORY = Path(__file__).parents[1]
FOLDER = REPOSITORY / "docs" / "pictures"
THEMES = {"light": DEFAULT_TERMINAL_THEME, "dark": DIMMED_MONOKAI}
COLUMNS = 100
EXAMPLES = REPOSITORY / "examples"
RECORDINGS = {
    "terminal": [
        "reshard inspect examples/megatron-run",
        "reshard convert examples/megatron-run model",
        "reshard verify examples/megatron-run model",
    ],
    "doctor": ["reshard doctor grpo.log train_grpo.py --lang en"],
}
"""The commands, by the name of the picture."""
FAILED = REPOSITORY / "tests" / "doctor" / "head" / "cat_mixed"
"""A genuine script and its log, for the doctor."""


def printed(command: str, folder: Path) -> str:
    """The output of a command on a terminal of `COLUMNS` columns."""
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", *command.split()]
    path = os.pathsep.join(map(str, (REPOSITORY / "src", REPOSITORY)))
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "TERM": "xterm-256color", "PYTHONPATH": path}
    environment.pop("NO_COLOR", None)
    with subprocess.Popen(
        words, cwd=folder, stdout=theirs, stderr=theirs, stdin=theirs, env=environment
    ) as run:
        os.close(theirs)
        chunks = []
        while True:
            try:
                chunk = os.read(ours, 1 << 16)
            except OSError:  # on Linux, the other end is closed
                break
            if not chunk:
                break
            chunks.append(chunk)
    os.close(ours)
    if run.returncode and "doctor" not in words:  # its findings cause exit status 1
        raise SystemExit(f"{command}: exit status {run.returncode}\n{b''.join(chunks).decode()}")
    return b"".join(chunks).decode().replace("\r\n", "\n")


def recorded(name: str) -> dict[str, str]:
    """A recorded terminal, by the mode of the page."""
    with tempfile.TemporaryDirectory() as made, Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True)
        folder = Path(shutil.copytree(FAILED, Path(made) / "work"))
        shutil.copytree(EXAMPLES, folder / "examples")
        for number, command in enumerate(RECORDINGS[name]):
            console.print("\n" * bool(number) + f"[bold][green]$[/] {command}[/]", highlight=False)
            shown = _settled(printed(command, folder))
            for place, written in ((f"{folder}/", ""), (sys.executable, "python"), (str(Path.home()), "~")):
                shown = shown.replace(place, written)
            console.print(Text.from_ansi(shown))
    pictures = {
        mode: console.export_svg(title="reshard", theme=theme, unique_id=name, clear=False)
        for mode, theme in THEMES.items()
    }
    return {mode: _without_web_fonts(picture) for mode, picture in pictures.items()}


def _settled(text: str) -> str:
    """The text without anything that a progress bar overwrote or erased."""
    lines = [""]
    for part in re.split(r"(\n|\r|\x1b\[1A|\x1b\[2K)", text):
        if part == "\n":
            lines.append("")
        elif part == "\x1b[1A":
            lines.pop()
        elif part in ("\r", "\x1b[2K"):
            lines[-1] = ""
        else:
            lines[-1] += part
    return "\n".join(lines).rstrip("\n")


def _without_web_fonts(svg: str) -> str:
    """The picture loads nothing from elsewhere."""
    before, _, rest = svg.partition("@font-face")
    while rest:
        rest = rest.partition("}")[2]
        head, mark, tail = rest.partition("@font-face")
        before, rest = before + head, tail if mark else ""
    return before


def main() -> None:
    """Write all pictures."""
    FOLDER.mkdir(exist_ok=True)
    for name in RECORDINGS:
        for mode, picture in recorded(name).items():
            (FOLDER / f"{name}-{mode}.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
