"""Releases of two packages that do not work together, by the message in which that shows."""

from __future__ import annotations

import re
from typing import NamedTuple

from reshard.diagnosis.finding import Finding
from reshard.diagnosis.history.table import table
from reshard.diagnosis.log import Log, Traceback
from reshard.diagnosis.rules import told_at
from reshard.diagnosis.words import words


class Clash(NamedTuple):
    """Two packages, the message, what else the log has to contain, what pip installs, and the words for the reason."""

    one: str
    two: str
    said: re.Pattern[str]
    shown: re.Pattern[str]
    newer: str
    older: str
    why: str


CLASHES = (
    # torch.autograd.graph._get_grad_fn_or_grad_acc takes no notice of no_grad before torch 2.4.1
    Clash(
        *("deepspeed", "torch"),
        re.compile(r"'NoneType' object has no attribute 'next_functions'"),
        re.compile(r"(?i)deepspeed"),
        *("torch>=2.4.1", "deepspeed<=0.18.0", "clash-next-functions"),
    ),
    # torch 2.0 made LRScheduler the base of its schedulers
    Clash(
        *("pytorch-lightning", "torch"),
        re.compile(r"provided lr scheduler `(?P<name>\w+)` doesn't follow PyTorch's LRScheduler API"),
        re.compile(r"(?i)lightning"),
        *("pytorch-lightning>=1.9", "torch<2", "clash-scheduler"),
    ),
    # fsspec 2023.10 gave its local file system two protocols, and a glob pattern another meaning
    Clash(
        *("datasets", "fsspec"),
        re.compile(
            r"Loading a dataset cached in a LocalFileSystem is not supported"
            r"|Invalid pattern: '\*\*' can only be an entire path component"
        ),
        re.compile(""),
        *("datasets>=2.14.6", "fsspec<2023.10", "clash-fsspec"),
    ),
)


def of_clash(root: Traceback, log: Log) -> Finding | None:
    """The finding that two installed releases do not work together; None for other failures."""
    for clash in CLASHES:
        match = clash.said.search(root.said)
        if match is None or not clash.shown.search(log.text):
            continue
        if (name := match.groupdict().get("name")) and not _is_of_torch(name):
            return None
        values = {**clash._asdict(), "why": words(clash.why)}
        return told_at(("releases-clash", values), log.name, root.last, root.said)
    return None


def _is_of_torch(name: str) -> bool:
    """Whether a scheduler is one of torch's own, and not a class of the user's."""
    torch = table("torch")
    return bool(torch and name in torch.raw["attributes"])
