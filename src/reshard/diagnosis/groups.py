"""Processes that do not find each other: ranks outside of a device mesh, a lost rendezvous, ssh between the nodes."""

from __future__ import annotations

import re
from collections.abc import Callable

from packaging.version import Version

from reshard.diagnosis.failures import CUT_OFF, is_consequence
from reshard.diagnosis.finding import Finding
from reshard.diagnosis.log import Log, Traceback
from reshard.diagnosis.rules import Told, told_at


def of_groups(root: Traceback, log: Log) -> Finding | None:
    """The finding about the processes of a run and their groups; None for other failures."""
    for ask in _ASKED:
        if found := ask(root, log):
            return told_at(found, log.name, root.last, root.said)
    return None


_DIMENSIONS = re.compile(
    r"Invalid mesh_dim_names? (?P<asked>\([^)\n]*\)|['\"]\w+['\"]) specified\. Valid mesh_dim_names are"
    r" (?P<there>\[[^\]\n]*\])"
)
_IN_MESH = re.compile(r"torch/distributed/(?:device_mesh|fsdp/_init_utils)\.py|_dim_group_\w+")


def _dimensions(root: Traceback, log: Log) -> Told | None:
    """A dimension that a device mesh does not have."""
    match = _DIMENSIONS.search(root.said)
    if match is None:
        return None
    asked, there = (", ".join(re.findall(r"\w+", match[part])) for part in ("asked", "there"))
    return "mesh-lacks-dimension", {"asked": asked, "there": there or "–"}


def _outside(root: Traceback, log: Log) -> Told | None:
    """A rank that belongs to no group of a device mesh."""
    where = "\n".join([root.said, root.source, *root.frames[-2:]])
    is_outside = "list index out of range" in root.said and _IN_MESH.search(where)
    return ("mesh-without-rank", {}) if is_outside else None


_LOST = re.compile(
    r"has failed to (?:shutdown|send a keep-alive heartbeat to) the rendezvous '(?P<id>[^'\n]{1,100})' due to an"
    r" error of type Rendezvous(?:Connection|Closed|Timeout)Error"
)


def _rendezvous(root: Traceback, log: Log) -> Told | None:
    """The end of the process that hosts the rendezvous, if nothing else failed."""
    nothing_else = root.exception == CUT_OFF or is_consequence(root) or "Rendezvous" in root.exception
    match = _LOST.search(log.text) if nothing_else else None
    return ("rendezvous-lost", {"id": match["id"]}) if match else None


_SSH = tuple(
    re.compile(pattern)
    for pattern in (
        r"'ssh [^'\n]{0,200}?(?P<host>[\w.@-]+) hostname' returned non-zero exit status 255",
        r"host=(?P<host>[\w.@-]+) was not reachable via ssh",
        r"pdsh@\S+: (?P<host>[\w.@-]+): ssh exited with exit code 255",
        r"(?m)^(?:(?P<host>[\w.@-]+): )?(?:Host key verification failed|\S*: Permission denied \(publickey)",
    )
)


def _ssh(root: Traceback, log: Log) -> Told | None:
    """A node that ssh does not enter without a password."""
    shown = "\n".join([root.said, *(line.text for line in log.lines[-NEAR:])])
    match = next((hit for pattern in _SSH if (hit := pattern.search(shown))), None)
    return ("ssh-refused", {"host": match["host"] or "NODE"}) if match else None


NEAR = 30
"""Lines at the end of a log in which ssh and pdsh print why they failed."""

_ONE_DTYPE = re.compile(
    r"expected there to be only one unique element in <generator object [^\n]{0,200}gather"
)


def _dtypes(root: Traceback, log: Log) -> Told | None:
    """Parameters of several dtypes that ZeRO-3 gathers in one buffer."""
    return ("zero3-dtypes", {}) if _ONE_DTYPE.search(root.said) else None


_BACKWARD = re.compile(r"torch/_tensor\.py:\d+ backward")
_ENGINES = re.compile(r"/(?:deepspeed|accelerate|colossalai|lightning\w*|pytorch_lightning)/")
_ZERO = re.compile(r"deepspeed/runtime/zero/|'DeepSpeedZeroOptimizer\w*' object")
TAKES_LOSSES = Version("0.18.1")
"""DeepSpeed from which `loss.backward()` is allowed."""


def bypassed(root: Traceback, log: Log) -> Finding | None:
    """The finding that a loss was not passed to DeepSpeed's engine, which prepares ZeRO for the backward pass."""
    frames = [frame.replace("\\", "/") for frame in root.frames]
    at = next((at for at, frame in enumerate(frames) if _BACKWARD.search(frame)), 0)
    version = log.versions.get("deepspeed")
    if not at or any(_ENGINES.search(frame) for frame in frames[:at]):
        return None
    if not _ZERO.search("\n".join([root.said, *frames[at:]])):
        return None
    if version and Version(version) >= TAKES_LOSSES:
        return None
    return told_at(("engine-bypassed", {"frame": root.frames[at - 1]}), log.name, root.last, root.said)


_FREED = re.compile(
    r"'weight' must be 2-D|The tensor has a non-zero number of elements, but its data is not allocated yet"
    r"|setStorage: .{0,300}out of bounds for storage of size 0|size mismatch, got \d+, \d+x\d+,0\b"
    r"|mat2 must be a matrix, got 1-D tensor"
)
_FSDP = re.compile(r"FullyShardedDataParallel|torch/distributed/fsdp/|(?i:\bfsdp)")
_ZERO_3 = re.compile(r"(?i:deepspeed|zero[-_ ]?3)")


def sharded(root: Traceback, log: Log) -> Finding | None:
    """The finding that a module of an FSDP model ran without the wrapper that gathers its parameters."""
    if not _FREED.search(root.root.said) or not _FSDP.search(log.text) or _ZERO_3.search(log.text):
        return None
    return told_at(("fsdp-bypassed", {}), log.name, root.last, root.said)


_ASKED: tuple[Callable[[Traceback, Log], Told | None], ...] = (
    *(_dimensions, _outside, _rendezvous, _ssh, _dtypes),
)
