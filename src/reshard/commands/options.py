"""The options of `reshard convert`: how a conversion runs, besides what is in the output (`formats/options.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from reshard.base.errors import ReshardError
from reshard.base.options import ADVANCED, MACHINES, About
from reshard.base.shared_options import MemoryOption, OnBytesOption, OnStepOption, TargetOptions
from reshard.cluster import slurm_executor
from reshard.formats.options import ConversionOptions
from reshard.hub.push import OnUpload, Push
from reshard.stores import StorePath
from reshard.stores.bucket import Bucket
from reshard.transfer.plan import Plan
from reshard.transfer.staging import OnResume


@dataclass(frozen=True, kw_only=True)
class PushOptions:
    """The repository for an output."""

    push_to_hub: Annotated[
        str | None,
        About(
            "Upload DST to this Hugging Face repository afterwards, with a model card, in one commit.",
            "ORG/NAME",
            group=MACHINES,
        ),
    ] = None
    private: Annotated[bool, About("Create the repository as private.", group=MACHINES)] = False

    def check_push(self) -> None:
        """Raise ReshardError if only --private is given."""
        if self.private and not self.push_to_hub:
            raise ReshardError(
                "private-without-push",
                "--private is for --push-to-hub",
                remedy="add --push-to-hub Org/Name, or leave out --private",
            )


@dataclass(frozen=True, kw_only=True)
class RunOptions(PushOptions, OnBytesOption, OnStepOption, MemoryOption, TargetOptions):
    """How a conversion runs, and its callbacks. The bytes of the output do not depend on any of this.

    With `on`, jobs of Slurm do the work, and `workers` and `memory` apply to each. If a run is interrupted, its files
    are kept, and the next run for the same output continues from there.

    Without `sync`, nothing waits for the disk. After a crash of the machine, recent writes may be lost, even those of a
    complete output; if an interrupted run is continued, these are written again.

    If an upload to the Hub fails, the same call repeats only the upload.
    """

    dry_run: Annotated[
        bool, About("Print the plan, or why the conversion is refused, and write nothing.")
    ] = False
    verify: Annotated[
        bool, About("Read the output back from disk before it is published, and compare checksums.")
    ] = False
    workers: Annotated[
        int | None,
        About("Threads, or with --on threads per job. [default: two per core]", "N", least=1, group=MACHINES),
    ] = None
    on: Annotated[
        str | None,
        About(
            "Run as jobs of Slurm, for example slurm:partition=P,nodes=N,time=MIN.",
            "WHERE",
            group=MACHINES,
        ),
    ] = None
    no_sync: Annotated[
        bool,
        About(
            "Do not wait for the disk. If the machine crashes within a minute, DST may be lost or damaged.",
            group=MACHINES,
        ),
    ] = False
    strict: Annotated[bool, About("Fail if weights contain NaN or Inf.", group=ADVANCED)] = False
    no_checksum: Annotated[bool, About("Do not check or record CRC32s of the source.", group=ADVANCED)] = (
        False
    )
    command: Annotated[
        str, About("Command that `inspect` shows to continue this run if it is interrupted.", typed=False)
    ] = ""
    on_plan: Annotated[
        Callable[[Plan], None],
        About(
            "Called with the `Plan` before any weight is read. In a notebook, on_plan, on_bytes and on_resume draw a "
            "progress bar by default."
        ),
    ] = lambda plan: None
    on_resume: Annotated[
        OnResume,
        About(
            "Called with a note and the number of bytes already written when an interrupted run is continued."
        ),
    ] = lambda note, nbytes: None
    on_upload: Annotated[
        OnUpload, About("Called with the address of the repository and the number of bytes to upload.")
    ] = lambda address, nbytes: None
    branch: str | None = None
    """The branch of the repository, if that is not `main`."""

    @property
    def checksum(self) -> bool:
        """Whether the CRC32s of the source are checked and recorded."""
        return not self.no_checksum

    @property
    def sync(self) -> bool:
        """Whether files are on the disk before the output is published."""
        return not self.no_sync

    @property
    def push(self) -> Push | None:
        """The repository for the output."""
        if not self.push_to_hub:
            return None
        return Push(self.push_to_hub, self.private, self.overwrite, self.branch)

    def check(self, target: Path) -> None:
        """Raise ReshardError for options that cannot be combined."""
        self.check_push()
        if not self.sync and (self.verify or self.on is not None):
            other = "--verify" if self.verify else "--on"
            raise ReshardError(
                "no-sync-not-combinable",
                f"--no-sync and {other} cannot be combined",
                rule="--verify and --on need an output that is on the disk",
                remedy="leave out one of them",
            )
        if self.on is not None:
            slurm_executor.check_executor(self.on, target)
        if isinstance(target, StorePath):
            Bucket(target)  # raises if nothing can be written there
            if self.push:
                raise ReshardError(
                    "push-needs-local-folder",
                    "--push-to-hub uploads a folder on this machine",
                    file=str(target),
                    remedy="choose a folder as the destination, or leave out --push-to-hub",
                )


@dataclass(frozen=True, kw_only=True)
class ConvertOptions(RunOptions, ConversionOptions):
    """All options of `reshard convert`."""
