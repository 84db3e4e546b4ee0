"""Feeds inputs to one target, and collects the failures."""

from __future__ import annotations

import tempfile
import traceback
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import reshard
from tests.fuzz.guard import Forbidden, watching
from tests.fuzz.targets import Target

SOURCE = str(Path(reshard.__file__).parent)


class Attempts:
    """A target with its own folder in memory, which is removed with the object."""

    def __init__(self, target: Target) -> None:
        shared = Path("/dev/shm")
        self._temporary = tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None)
        folder = Path(self._temporary.name)
        (folder / "seeds").mkdir()
        (folder / "inputs").mkdir()
        self.seeds = target.seeds(folder / "seeds")
        assert self.seeds, "a target without a genuine input"
        self._target = target
        self._take = target.open(folder / "inputs")
        self.accepted = 0
        """How many genuine inputs are not refused: where none is, mutations of them reach little."""
        for seed in self.seeds:  # what is imported on the way counts for no input
            with suppress(*target.errors):
                self._take(seed)
                self.accepted += 1
        self.folder = folder
        self.inputs = 0
        self.failures: dict[str, bytes] = {}

    def __call__(self, data: bytes) -> str | None:
        """Run one input. A failure is returned, and kept once for each place of failure."""
        self.inputs += 1
        try:
            with watching(self.folder):
                self._take(data)
        except self._target.errors:
            return None
        except (Exception, Forbidden) as error:
            said = _described(error)
            self.failures.setdefault(said, data)
            return said
        return None

    def end(self) -> None:
        """Remove the folder."""
        self._temporary.cleanup()

    def keep(self, folder: Path) -> list[str]:
        """Write the failing inputs to a folder; returns the errors, and the path of each input."""
        said = []
        for failure, data in self.failures.items():
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / sha256(data).hexdigest()[:12]
            path.write_bytes(data)
            said.append(f"{failure}  [{path}]")
        return said


def _described(error: BaseException) -> str:
    """The type of an error with its message in short, and the last line of reshard in its traceback."""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if each.filename.startswith(SOURCE)]
    where = f"{Path(frames[-1].filename).relative_to(SOURCE)}:{frames[-1].lineno}" if frames else "?"
    return f"{where} {type(error).__name__}: {str(error)[:160]!r}"
