"""What a guard is asked to do: the record from which command line, Python signature, docs and JSON are made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from reshard.base.options import SECONDS, About


@dataclass(frozen=True, kw_only=True)
class GuardOptions:
    """Options of a guard. Each field is a flag of the same name, an argument, and a key of `--json`."""

    check: Annotated[bool, About("Check the command, its files and this machine before the start.")] = True
    startup: Annotated[
        float,
        About("Longest time without any progress before the first step.", "DURATION", least=1, unit=SECONDS),
    ] = 900.0
    stall: Annotated[
        float,
        About("Longest time without any progress after the first step.", "DURATION", least=1, unit=SECONDS),
    ] = 600.0
    on_stall: Annotated[str, About("What to do if the run stalls.", choices=("report", "stop"))] = "report"
    nan_steps: Annotated[
        int, About("End the run after N consecutive steps with a NaN or infinite loss; 0 never does.", "N")
    ] = 3
    output: Annotated[
        Path | None, About("Folder of the run's checkpoints, if the command does not name it.", "DIR")
    ] = None
    log: Annotated[
        Path | None, About("Folder for the log; by default a new one in reshard-guard.", "DIR")
    ] = None
    final: Annotated[
        Path | None, About("At the end, convert the last checkpoint into this folder, and check it.", "DIR")
    ] = None
    merge: Annotated[bool, About("With --final, merge an adapter into its base.")] = False
    base: Annotated[
        Path | None, About("With --final, the base model, if the checkpoint does not name it.", "DIR")
    ] = None
    overwrite: Annotated[
        bool, About("With --final, replace a model that reshard wrote there before. Your own files stay.")
    ] = False
    requeue: Annotated[
        int, About("In a Slurm job, requeue it up to N times, and continue from the last checkpoint.", "N")
    ] = 0
