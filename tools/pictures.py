"""`python -m tools.pictures`: redraw the pictures of the README.

The overview is drawn for light and dark pages. Terminals are recorded: the commands run, on a small model that
`demo.make_model` makes or a genuine log, and the picture shows their output.
"""

from __future__ import annotations

import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

REPOSITORY = Path(__file__).parents[1]
FOLDER = REPOSITORY / "docs" / "pictures"
FONT = "ui-sans-serif, system-ui, 'Segoe UI', Helvetica, Arial, sans-serif"
COLORS = {
    "light": {"text": "#1f2328", "dim": "#59636e", "box": "#f6f8fa", "line": "#d1d9e0", "core": "#0969da"},
    "dark": {"text": "#f0f6fc", "dim": "#9198a1", "box": "#151b23", "line": "#3d444d", "core": "#4493f8"},
}
LEFT = [
    ("Megatron-Core", "Megatron-LM · ms-swift · NeMo"),
    ("PyTorch FSDP · DCP", "accelerate · Trainer · verl · torchtitan"),
    ("DeepSpeed", "ZeRO 0 to 3 · universal"),
]
RIGHT = [
    ("InternEvo", "InternLM"),
    ("LoRA adapters", "PEFT · Megatron · DeepSpeed"),
    ("Quantized originals", "FP8 · MXFP4 · AWQ · GPTQ"),
]
WIDTH, HEIGHT = 960, 330
BOX, CORE = (270, 72), (226, 118)

COLUMNS = 100
MODEL = "demo.make_model base text.jsonl"
MEGATRON = "reshard convert base checkpoint --to megatron --tp 2 --pp 2 --ep 2 --quiet"
RECORDINGS: dict[str, tuple[list[str], list[str]]] = {
    "terminal": (
        [MODEL, MEGATRON],
        [
            "reshard inspect checkpoint",
            "reshard convert checkpoint model",
            "reshard verify checkpoint model",
        ],
    ),
    "doctor": ([], ["reshard doctor grpo.log train_grpo.py --lang en"]),
}
"""The hidden setup command and the visible command, by the name of the picture."""
FAILED = REPOSITORY / "tests" / "doctor" / "head" / "cat_mixed"
"""A genuine script and its log, for the doctor."""


def overview(mode: str) -> str:
    """The formats in a circle, the Hugging Face folder in the middle, and the conversions between them."""
    colors = COLORS[mode]
    middle = (WIDTH - CORE[0]) / 2, (HEIGHT - CORE[1]) / 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="{FONT}" '
        'role="img" aria-label="reshard converts between Hugging Face folders and training checkpoints">',
        f'<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="{colors["core"]}"/></marker></defs>',
    ]
    for side, boxes in enumerate((LEFT, RIGHT)):
        for row, (title, of) in enumerate(boxes):
            x = 10 if side == 0 else WIDTH - BOX[0] - 10
            y = 20 + row * (BOX[1] + 37)
            parts += _box(x, y, *BOX, title, of, colors, colors["line"])
            ends = (x + BOX[0] + 6, middle[0] - 6) if side == 0 else (x - 6, middle[0] + CORE[0] + 6)
            target = middle[1] + CORE[1] * (row + 1) / 4
            parts.append(
                f'<path d="M{ends[0]} {y + BOX[1] / 2:.0f}L{ends[1]:.0f} {target:.0f}" stroke="{colors["core"]}" '
                'stroke-width="1.6" fill="none" marker-start="url(#a)" marker-end="url(#a)"/>'
            )
    parts += _box(*middle, *CORE, "Hugging Face", "safetensors, config, tokenizer", colors, colors["core"])
    for x in (324, WIDTH - 324):
        parts.append(_text(x, HEIGHT / 2 - 12, "verify", 13, colors["core"], "600"))
        parts.append(_text(x, HEIGHT / 2 + 22, "convert", 13, colors["core"], "600"))
    return "\n".join([*parts, "</svg>\n"])


def _box(
    x: float, y: float, width: float, height: float, title: str, of: str, colors: dict[str, str], line: str
) -> list[str]:
    middle = x + width / 2
    return [
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{width}" height="{height}" rx="10" fill="{colors["box"]}" '
        f'stroke="{line}" stroke-width="1.5"/>',
        _text(middle, y + height / 2 - 6, title, 17, colors["text"], "600"),
        _text(middle, y + height / 2 + 17, of, 12.5, colors["dim"], "400"),
    ]


def _text(x: float, y: float, words: str, size: float, color: str, weight: str) -> str:
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" fill="{color}" font-weight="{weight}" '
        f'text-anchor="middle">{escape(words)}</text>'
    )


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


def recorded(name: str) -> str:
    """A recorded terminal."""
    unseen, typed = RECORDINGS[name]
    with tempfile.TemporaryDirectory() as made, Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere, force_terminal=True)
        folder = Path(shutil.copytree(FAILED, Path(made) / "work"))
        for command in unseen:
            printed(command, folder)
        for number, command in enumerate(typed):
            console.print("\n" * bool(number) + f"[bold][green]$[/] {command}[/]", highlight=False)
            shown = _settled(printed(command, folder))
            for place, written in ((f"{folder}/", ""), (sys.executable, "python"), (str(Path.home()), "~")):
                shown = shown.replace(place, written)
            console.print(Text.from_ansi(shown))
    return _without_web_fonts(console.export_svg(title="reshard", theme=DIMMED_MONOKAI, unique_id=name))


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
    for mode in COLORS:
        (FOLDER / f"overview-{mode}.svg").write_text(overview(mode), encoding="utf-8")
    for name in RECORDINGS:
        (FOLDER / f"{name}.svg").write_text(recorded(name), encoding="utf-8")


if __name__ == "__main__":
    main()
