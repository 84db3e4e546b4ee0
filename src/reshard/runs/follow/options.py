"""What a watch is asked to do: the record of which its command line and its docs are made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from typing import Annotated, ClassVar

from reshard.base.errors import Problem, raise_all
from reshard.base.options import BYTES, MACHINES, SECONDS, About
from reshard.base.shared_options import MemoryOption
from reshard.commands.options import PushOptions
from reshard.final.saved_checkpoints import steps_in
from reshard.model.find_config import read_base
from reshard.serve.options import ShownOptions
from reshard.transfer.source_files import Sources


@dataclass(frozen=True, kw_only=True)
class Actions:
    """What is done with a step, and when. Each field is a flag."""

    folder: Annotated[Path | None, About("Convert each step into a folder in DIR.", "DIR", flag="--to")] = (
        None
    )
    keep: Annotated[int | None, About("Keep the folders of the newest N steps only.", "N", least=1)] = None
    program: Annotated[
        tuple[str, ...],
        About(
            "Run this for each step, without a shell. {path} is the model, {step} its number, {name} its name.",
            "COMMAND",
            flag="--run",
        ),
    ] = ()
    once: Annotated[bool, About("Do what there is to do now, then exit.")] = False
    every: Annotated[float, About("How often to look for new steps.", "DURATION", least=1, unit=SECONDS)] = (
        30.0
    )
    limit_rate: Annotated[
        int | None,
        About("Read and write at most so many bytes in a second.", "SIZE", unit=BYTES, group=MACHINES),
    ] = None


@dataclass(frozen=True, kw_only=True)
class WatchOptions(PushOptions, MemoryOption, ShownOptions, Actions):
    """Options of a watch: what it does, and how it converts, as `reshard convert` does."""

    HELP: ClassVar[dict[str, str]] = {
        "push_to_hub": "Upload each step to a branch of this Hugging Face repository, with the name of the step.",
    }

    def check(self, run: Path) -> None:
        """Raise ReshardError for what cannot be watched, and for options that would be refused for each step."""
        self.check_push()
        for base in self.base_paths:
            read_base(base, Sources())
        raise_all(problem for is_wrong, problem in self._checks(run) if is_wrong)

    def _checks(self, run: Path) -> Iterator[tuple[object, Problem]]:
        """What would be wrong, after whether it is."""
        yield (
            not run.is_dir(),
            Problem(
                "run-not-found",
                "there is no such folder",
                file=str(run),
                remedy=f"correct the path; if the run has not begun: mkdir -p {run}",
            ),
        )
        yield (
            [place for _, place in steps_in(run)] == [run],
            Problem(
                "run-is-a-checkpoint",
                "this is one checkpoint, not a run with several",
                file=str(run),
                expected="a folder with a checkpoint of each step in it",
                remedy=f"convert it: reshard convert {run} OUT; or watch the folder above it",
            ),
        )
        yield (
            self.folder and self.folder.resolve() in (run.resolve(), *run.resolve().parents),
            Problem(
                "watch-into-run",
                "the steps of the run are in the folder of --to",
                file=str(run),
                rule="what is in this folder is taken for an output",
                remedy="choose another folder with --to, for example one beside the run",
            ),
        )
        yield (
            not (self.folder or self.push_to_hub or self.program),
            Problem(
                "watch-without-action",
                "nothing is to be done with the steps",
                expected="--to DIR, --push-to-hub Org/Name or --run COMMAND",
                remedy="add --to DIR, for a folder of each step",
            ),
        )
        yield (
            self.keep and not self.folder,
            Problem("keep-without-folder", "--keep is for --to", remedy="add --to DIR, or leave out --keep"),
        )
        program = " ".join(self.program[:1])
        yield (
            program and "{" not in program and not which(program),
            Problem(
                "run-command-not-found",
                "there is no such program",
                file=program,
                rule="--run starts a program, without a shell",
                remedy="correct its path, or make it executable; for a line of a shell: --run \"sh -c '…'\"",
            ),
        )
