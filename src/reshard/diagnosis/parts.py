"""Which part of a run failed, by its frames, if nothing else is known: what it does, and how to avoid it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from reshard.diagnosis.data import data
from reshard.diagnosis.finding import Finding, Text
from reshard.diagnosis.log import Log, Traceback
from reshard.diagnosis.reading import clipped
from reshard.diagnosis.rules import told_at

INNERMOST = 2
"""Number of innermost frames in which a part must occur: further out it only called what failed."""


_PASSES_ON = re.compile(
    r"torch/(?:serialization|nn/modules/module|utils/_contextlib)\.py|deepspeed/utils/nvtx\.py"
    r"|checkpoint_engine/torch_checkpoint_engine\.py|/contextlib\.py"
)
"""Frames of general functions, which belong to the part that calls them."""
_BUILDS = re.compile(r"[Bb]uild(?:ing)? wheels?\b|/pip-install-|/pip-build-env-|setup\.py")


@dataclass(frozen=True)
class Part:
    """A part of `parts.yaml`: its frames, its messages, what it does, and how a run can avoid it."""

    name: str
    frames: re.Pattern[str] | None
    said: re.Pattern[str]
    what: Text
    way: Text

    def shows(self, root: Traceback) -> bool:
        """Whether a failure is in this part, by its message or by its innermost frames."""
        frames = [frame.replace("\\", "/") for frame in root.frames]
        frames = [frame for frame in frames if not _PASSES_ON.search(frame)][-INNERMOST:]
        return bool(self.said.search(f"{root.said}\n{root.source}")) or bool(
            self.frames and any(self.frames.search(frame) for frame in frames)
        )


def of_part(root: Traceback, log: Log) -> Finding | None:
    """The finding for the part in which the first failure is; None for code of no known part."""
    first = root.root
    if _BUILDS.search("\n".join([first.said, *first.frames])):
        return None  # the part has not run yet
    part = next((part for part in _parts() if part.shows(first)), None)
    if part is None:
        return None
    where = "".join(f"  `{frame}`\n" for frame in first.frames[-3:])
    values = {"what": part.what, "way": part.way, "shown": Text.same(f"{where}  {_quoted(first.said)}")}
    return told_at(("part-failed", values), log.name, first.last, first.said)


def _quoted(said: str) -> str:
    return "\n  ".join(clipped(said, 600).split("\n")[:6])


@lru_cache(maxsize=1)
def _parts() -> tuple[Part, ...]:
    return tuple(
        Part(
            each["part"],
            re.compile(each["frames"]) if each["frames"] else None,
            re.compile(each["said"]),
            *(Text(each[key]["en"].strip(), each[key]["zh"].strip()) for key in ("what", "way")),
        )
        for each in data("parts.yaml")
    )
