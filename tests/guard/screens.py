"""Run every genuine command with every injury, alone and under guard, and compare what is on the screen.

    python -m tests.guard.screens FOLDER [COMMAND | COMMAND:INJURY …]

Each run leaves `FOLDER/COMMAND.INJURY.alone.json` or `….guard.json`, and is not repeated while that is there.
`FOLDER/screens.md` has the table and the screens of all runs so far.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from tests.doctor.head.runs import neutral
from tests.guard.commands import COMMANDS, Command, prepare
from tests.guard.injuries import INJURIES, NONE, Injury, can_mount
from tests.guard.running import Outcome, run

ALL = {NONE.name: NONE, **INJURIES}
LINES = 30
KINDS = {"alone": None, "guard": ()}
"""Options of the guard; None is a run without it."""


def main(folder: Path, names: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or COMMANDS:
        for command, injury in _asked(name):
            _compare(command, injury, folder)
            (folder / "screens.md").write_text(markdown(folder))


def _asked(name: str) -> Iterator[tuple[Command, Injury]]:
    """What COMMAND or COMMAND:INJURY names and can be run: a command that fails by itself has no injuries."""
    command, _, only = name.partition(":")
    for injury in ALL.values() if not only else [ALL[only]]:
        makes_sense = injury is NONE or not COMMANDS[command].fails
        if makes_sense and (injury.name != "disk" or can_mount()):
            yield COMMANDS[command], injury


def _compare(command: Command, injury: Injury, folder: Path) -> None:
    for kind, options in KINDS.items():
        file = folder / f"{command.name}.{injury.name}.{kind}.json"
        if (injury.alone or options is not None) and not file.exists():
            with tempfile.TemporaryDirectory() as place:
                outcome = run(command, prepare(Path(place)), injury, options)
            screen = _last_lines(neutral(outcome.screen, Path(place)))
            file.write_text(json.dumps({**asdict(outcome), "screen": screen}, indent=1, ensure_ascii=False))
            print(file.stem, outcome.status, outcome.visible, outcome.ended, flush=True)


def _last_lines(screen: str) -> str:
    screen = re.sub(r"/\S*?/bin/(?=\w)", "/home/user/venv/bin/", screen)
    lines = [line for line in screen.splitlines() if line.strip()]
    return "\n".join(lines[-LINES:])


def markdown(folder: Path) -> str:
    """The table of all runs, and their screens."""
    heads = "| command | injury | alone: status | visible | end | guard: status | visible | end |"
    rows, screens = [heads, "|---" * 8 + "|"], []
    for command in COMMANDS.values():
        for injury in ALL.values():
            both = {kind: _outcome(folder / f"{command.name}.{injury.name}.{kind}.json") for kind in KINDS}
            cells = [cell for outcome in both.values() for cell in _cells(outcome, injury)]
            if any(both.values()):
                rows.append(f"| {' | '.join((command.name, injury.name, *cells))} |")
            screens += [
                f"## {command.name}, {injury.name}, {kind}\n\n```text\n{outcome.screen}\n```\n"
                for kind, outcome in both.items()
                if outcome
            ]
    return "\n".join((*rows, "", *screens))


def _outcome(file: Path) -> Outcome | None:
    return Outcome(**json.loads(file.read_text())) if file.exists() else None


def _cells(outcome: Outcome | None, injury: Injury) -> tuple[str, str, str]:
    if outcome is None:
        return "", "", ""
    visible = "" if injury is NONE else _seconds(outcome.visible, "never")
    status = "runs on" if outcome.status is None else str(outcome.status)
    return status, visible, _seconds(outcome.ended, "never")


def _seconds(value: float | None, otherwise: str) -> str:
    return otherwise if value is None else f"{value:.1f} s"


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(str(__doc__))
    main(Path(sys.argv[1]), sys.argv[2:])
