"""The last complete checkpoint in a run's folder, of any framework: weights that open, and what resuming needs."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from reshard.base.errors import ReshardError
from reshard.base.plain_json import json_of
from reshard.final.finite_weights import first_nonfinite
from reshard.folders import iterations
from reshard.folders.find_weights import STEPS, descend
from reshard.formats import detect, huggingface, open_checkpoint, peft
from reshard.formats.checkpoint import Checkpoint
from reshard.stores.checkpoint_names import declared

MAX_DEPTH = 4
"""Levels of folders that are searched."""
MAX_FILES = 2000
"""Folders and files that are looked at, of an output folder or of one checkpoint."""
MAX_OPENED = 12
"""Checkpoints that are opened. Those of three steps with a NaN loss may be among them, after which guard ends a run."""
OWN_FORMAT = "torch.save"
"""The format of a file that only the script which saved it can read."""
OWN_MARKS = (b"param_groups", b"torch.nn.modules")
"""What the pickle of such a file contains: the state of an optimizer of torch, or a complete module."""
FINITE_WEIGHTS = "finite weights"
TRAINER_STATE = "trainer_state.json"
"""What the Hugging Face Trainer writes after weights and optimizer (transformers.trainer)."""
CHECKPOINT_NAMES = (
    *STEPS,
    re.compile(r"iter_(\d{7,})"),  # Megatron
    re.compile(r"(?:checkpoint|ckpt|step|epoch|iteration)[_-]?(\d+)"),  # Accelerate's save_state, own loops
)
CHECKPOINT_FILE = re.compile(
    r"(?:.*[_-])?(?:step|epoch|ep|iter|iteration|checkpoint|ckpt)[_=-]?(\d+)(?:[_-].*)?\.(?:pt|pth|bin|ckpt)"
)
"""A step in one file of torch.save, as own loops and Composer write it."""
TRACKER_FILES = {
    r"iter_\d": iterations.TRACKER,  # Megatron-LM, ms-swift
    r"global_step_\d": iterations.TRACKER,  # verl
    r"global_step\d": "latest",  # DeepSpeed
    r"\d": "latest.txt",  # nanotron; InternEvo, which has none, uses the same names
}
"""Files next to steps that name the last one, by the beginning of a step's name; they are written after it."""


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint whose files are complete. `lacks` is what else it would need; `when` is in Unix seconds."""

    path: Path
    step: int | None
    format: str
    when: float
    lacks: tuple[str, ...] = ()

    @property
    def resumable(self) -> bool:
        """Whether a run can continue from it: it is complete, and has optimizer and trainer states."""
        return not self.lacks

    @property
    def diverged(self) -> bool:
        """Whether only its weights are wrong."""
        return any(each.startswith(FINITE_WEIGHTS) for each in self.lacks)


@dataclass
class SavedCheckpoints:
    """The checkpoints of a run, the latest first, and what incomplete ones lack. Of older ones nothing is known."""

    checkpoints: list[FoundCheckpoint] = field(default_factory=list)
    incomplete: dict[Path, list[str]] = field(default_factory=dict)

    @property
    def last(self) -> FoundCheckpoint | None:
        """The last complete one: all files are there, and the weights are finite."""
        return next((each for each in self.checkpoints if not each.diverged), None)

    @property
    def resumable(self) -> FoundCheckpoint | None:
        """The last complete one from which the run can continue."""
        return next((each for each in self.checkpoints if each.resumable), None)

    @property
    def weights(self) -> FoundCheckpoint | None:
        """The last one that reshard can read, though its weights may be NaN; else the last one."""
        readable = (each for each in self.checkpoints if each.format != OWN_FORMAT)
        return next(readable, self.checkpoints[0] if self.checkpoints else None)


def saved_in(folder: Path, since: float = 0.0) -> SavedCheckpoints:
    """The checkpoints in `folder` that have changed since a time in Unix seconds, until a complete one is found."""
    saved = SavedCheckpoints()
    for when, place in steps_in(folder, since)[:MAX_OPENED]:
        checkpoint = checkpoint_at(when, place, folder)
        if isinstance(checkpoint, FoundCheckpoint):
            saved.checkpoints.append(checkpoint)
        elif checkpoint:
            saved.incomplete[place] = checkpoint
        if saved.resumable:
            break
    return saved


def checkpoint_at(when: float, place: Path, top: Path, *, alone: bool = False) -> FoundCheckpoint | list[str]:
    """A checkpoint, or what shows that it is none; nothing if it may be anything, or is `top` with its steps.

    One that is `alone` may have been copied without the file that names the last step.
    """
    if lost := _damage(place, alone):
        return lost
    try:
        checkpoint = open_checkpoint(place)
        if place == top != checkpoint.path:
            return []
        lacks = tuple(_missing(place, checkpoint)) or tuple(_nonfinite(checkpoint))
    except (ReshardError, OSError) as error:
        if any(mark in _pickled(place) for mark in OWN_MARKS):
            return FoundCheckpoint(place, step_of(place), OWN_FORMAT, when, tuple(_without_optimizer(place)))
        return [_problem_text(error)] if _is_step(place) else []
    return FoundCheckpoint(place, step_of(place), checkpoint.format, when, lacks)


def _nonfinite(checkpoint: Checkpoint) -> Iterator[str]:
    """Saved between the first NaN and the line of the log that shows it."""
    if name := first_nonfinite(checkpoint):
        yield f"{FINITE_WEIGHTS}: {name} is NaN or infinite"


def _is_step(place: Path) -> bool:
    """Whether it must be a checkpoint: a file, or the folder of a run, may be anything."""
    return place.is_dir() and step_of(place) is not None


def _problem_text(error: Exception) -> str:
    problem = error.problems[0] if isinstance(error, ReshardError) else None
    return f"{problem.message}: {problem.file}" if problem and problem.file else str(problem or error)


def step_of(place: Path) -> int | None:
    """The number of the step that the name of a folder or file tells."""
    return next(
        (
            int(match[1])
            for each in (*CHECKPOINT_NAMES, CHECKPOINT_FILE)
            if (match := each.fullmatch(place.name))
        ),
        None,
    )


def steps_in(folder: Path, since: float = 0.0) -> list[tuple[float, Path]]:
    """Steps, and the folder itself if it has weights, with the time of their last change, the latest first."""
    places = [(_change_time(each), each) for each in _steps(folder)]
    names = [each for each in _entries(folder) if step_of(each) is None]
    weights = [_modified(each) for each in names if each.suffix in declared().weights]
    if (weights or not places) and folder.is_dir() and detect(folder):
        places.append((max(weights, default=_change_time(folder)), folder))
    return sorted(((when, each) for when, each in places if when >= since), reverse=True)


def _steps(top: Path) -> Iterator[Path]:
    """Folders and files of steps below `top`; not those inside of one."""
    level, seen = [top], 0
    for _ in range(MAX_DEPTH):
        below = []
        for entry in (entry for folder in level for entry in _entries(folder)):
            seen += 1
            if seen > MAX_FILES:
                return
            if entry.is_symlink():
                continue
            if CHECKPOINT_FILE.fullmatch(entry.name):
                yield entry
            elif not entry.is_dir():
                continue
            elif step_of(entry) is None:
                below.append(entry)
            elif not entry.name.isdecimal():
                yield entry
        yield from (entry for folder in level for entry in _numbered_checkpoints(folder))
        level = below


def _entries(folder: Path) -> list[Path]:
    with suppress(OSError):
        return sorted(folder.iterdir()) if folder.is_dir() else []
    return []


def _numbered_checkpoints(folder: Path) -> list[Path]:
    """The last checkpoints named by a bare number, which may name anything."""
    numbers = [entry for entry in _entries(folder) if entry.name.isdecimal() and entry.is_dir()]
    last = sorted(numbers, key=lambda entry: int(entry.name))[-MAX_OPENED:]
    return [entry for entry in last if descend(entry, lambda folder: detect(folder) is not None)[0]]


def _change_time(folder: Path) -> float:
    """When a folder or what is directly in it was last changed."""
    return max(map(_modified, (folder, *_entries(folder)[:MAX_FILES])))


def _modified(path: Path) -> float:
    """When a file was last changed; 0 if it was deleted meanwhile."""
    with suppress(OSError):
        return path.lstat().st_mtime
    return 0.0


def _damage(folder: Path, alone: bool) -> list[str]:
    """What shows that a checkpoint was not finished, or is damaged, besides its weights."""
    if folder.is_file():
        return [] if _is_whole(folder) else ["it is cut off"]
    return [*_untracked(folder, alone), *_cut_files(folder)]


def _untracked(folder: Path, alone: bool) -> Iterator[str]:
    """Whether the file that names the last step does not name this one yet; one that is `alone` may have none."""
    tracker = next((name for begin, name in TRACKER_FILES.items() if re.match(begin, folder.name)), None)
    step, file = step_of(folder), folder.parent / (tracker or "")
    if tracker is None or step is None or (tracker == "latest.txt" and not file.is_file()):
        return
    if alone and not file.is_file():
        return
    try:
        last = re.search(r"\d+", file.read_text())
    except (OSError, ValueError):
        yield f"{tracker} is missing, which is written last"
        return
    if last and int(last[0]) < step:
        yield f"{tracker} names step {last[0]}: this one was not finished"


def _cut_files(folder: Path) -> Iterator[str]:
    """Files of torch.save that end too early, as those do that are being written."""
    for file in _inside(folder):
        with suppress(OSError):
            if file.suffix in (".pt", ".pth", ".bin") and file.is_file() and not _is_whole(file):
                yield f"{file.relative_to(folder)} is cut off"


def _inside(folder: Path) -> list[Path]:
    """What is in a checkpoint, and in its subfolders; other steps below it are not its own."""
    is_step = step_of(folder) is not None  # DeepSpeed's are inside of the Trainer's
    own = [each for each in _entries(folder) if is_step or step_of(each) is None]
    return [*own, *(each for at in own for each in _entries(at))][:MAX_FILES]


def _is_whole(file: Path) -> bool:
    with file.open("rb") as opened:
        begin = opened.read(2)
    return bool(begin) and (begin != b"PK" or zipfile.is_zipfile(file))


_OPTIMIZER = re.compile(r"(?i)optim")
_TRAINER = re.compile(r"scheduler\.pt$|rng_state\S*\.pth$|training_args\.bin$")
"""Other files of the Hugging Face Trainer."""


def _missing(folder: Path, checkpoint: Checkpoint) -> Iterator[str]:
    """What resuming needs besides weights."""
    named = [each.name for each in _inside(folder)]
    stored = checkpoint.optimizer.states or checkpoint.dropped.get("optimizer states")
    if not stored and not any(map(_OPTIMIZER.search, named)):
        yield from _without_optimizer(folder)
    of_trainer = checkpoint.format in (huggingface.NAME, peft.NAME) or any(map(_TRAINER.match, named))
    if re.fullmatch(r"checkpoint-\d+", folder.name) and of_trainer:
        try:
            json_of((folder / TRAINER_STATE).read_bytes())
        except (OSError, ValueError):
            yield TRAINER_STATE


def _without_optimizer(file: Path) -> Iterator[str]:
    """What a checkpoint lacks unless it is a file of torch.save with the state of an optimizer, by keys in its pickle.

    That of torch.optim has "param_groups", whatever a script calls it.
    """
    pickled = _pickled(file)
    if b"optim" not in pickled and b"param_groups" not in pickled:
        yield "the optimizer states"


def _pickled(file: Path) -> bytes:
    """The pickle in a file of torch.save; empty for anything else."""
    if not file.is_file() or not zipfile.is_zipfile(file):
        return b""
    with zipfile.ZipFile(file) as archive:
        return b"".join(archive.read(name) for name in archive.namelist() if name.endswith("/data.pkl"))
