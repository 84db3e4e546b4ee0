"""Memory that ran out: a GPU's, the host's, a container's, /dev/shm, an inference engine's. The sizes say why."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

from reshard.base.languages import Text
from reshard.runs.checks import rules
from reshard.runs.checks.finding import Finding
from reshard.runs.checks.phrases import phrase_text, sentence
from reshard.runs.doctor.text.first_failure import live_lines
from reshard.runs.doctor.text.log import Log, Traceback
from reshard.runs.doctor.text.partial_failures import CUT_OFF_TRACEBACK, is_launchers

MessageSizes = dict[str, float]
"""Bytes by meaning: what was asked for, what is there (free), what others use, …"""

CONTAINER_PATTERN = re.compile(
    r"Memory cgroup out of memory: Kill|Detected \d+ oom[-_]kill event|task \d+(?:[-,]\d+)*: Out Of Memory"
    r"|\boom_kill\b|[Ee]xceeded (?:job|step) memory limit|\bOOMKilled\b"
)
_KINDS = {
    kind: re.compile(pattern, re.ASCII)
    for kind, pattern in {
        "device": r"\b(?:CUDA|HIP|XPU|NPU|MUSA|MPS|TPU)\b[ \w:]{0,20}out of memory|hipErrorOutOfMemory"
        r"|(?i:cuda|hip|xpu) ?(?:driver |runtime )?error[^\n]{0,40}out of memory|Cuda failure(?: 2)? 'out of memory'"
        r"|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|cudaMalloc failed: out of memory"
        r"|CU(?:BLAS|DNN)_STATUS_ALLOC_FAILED|Error out of memory at line \d+ in file \S{0,200}csrc/"
        r"|\bOutOfMemoryError: (?!out of resource|\d+ worker|Task was killed|Java)",
        "kernel": r"out of resources?: (?:shared memory,|[\w.]{1,120}) Required: \d+,? Hardware limit: ?\d+",
        "free": r"[Ff]ree memory on device .{0,80}is less than desired GPU memory utilization",
        "cache": r"No available memory for the cache blocks"
        r"|Not enough memory\. Please try (?:to increase|increasing) --mem-"
        r"|KV cache is needed, which is larger than the available KV cache memory",
        "shared": r"out of shared memory\. Please try to raise|unable to allocate shared memory\(shm\)"
        r"|unable to (?:mmap|open|write to) [^\n]{0,40}file </torch_|No space left on device[^\n]{0,40}/dev/shm"
        r"|/dev/shm[^\n]{0,200}No space left on device|creating shared memory segment /dev/shm/nccl-"
        r"|The object store is full|ObjectStoreFullError",
        "container": CONTAINER_PATTERN.pattern,
        "host": r"DefaultCPUAllocator: (?:can't allocate|not enough) memory|Out of memory: Kill(?:ed)? process"
        r"|\bArrayMemoryError\b|Unable to allocate [\d.]+ \w+ for an array|std::bad_alloc"
        r"|malloc[^\n]{0,40}out of memory|[Cc]annot allocate memory|paging file is too small"
        r"|running low on memory\.\s+Memory on the node|(?m:^(?:[\w.]+\.)?MemoryError\b)",
    }.items()
}
"""What runs out, and the messages of drivers, allocators, kernels, schedulers and engines about it."""
_SIZE = r"(?<![\d.])(\d+(?:\.\d*)?) ?([KkMGT]i?B|bytes|B)\b"
_SIZES = {
    name: re.compile(pattern.replace("SIZE", _SIZE))
    for name, pattern in {
        "asked": r"[Tt]ried to allocate SIZE|Unable to allocate SIZE for|SIZE KV cache is needed"
        r"|desired GPU memory utilization \([\d.]+, SIZE\)|Required: (\d+)()",
        "there": r"of which SIZE is free|[;,] SIZE free|available KV cache memory \(SIZE\)"
        r"|[Ff]ree memory on device[^(]{0,40}\(([\d.]+)/[\d.]+ (\wiB)\)|Hardware limit: ?(\d+)()",
        "total": r"total capacity of SIZE|[;(] ?SIZE total capacity|max allowed: SIZE"
        r"|[Ff]ree memory on device[^(]{0,40}\([\d.]+/SIZE\)|\) was [\d.]+ ?\w+ / SIZE",
        "own": r"this process has SIZE memory in use|\) was SIZE / |anon-rss:SIZE",
        "allocated": r"memory SIZE is allocated by PyTorch|; SIZE already allocated|MPS allocated: SIZE",
        "unallocated": r"SIZE is reserved by PyTorch but unallocated",
        "reserved": r"; SIZE reserved in total",
    }.items()
}
_OTHER = re.compile(rf"Process (\d+) has {_SIZE} memory in use")
_UNITS = {"": 0, "b": 0, "k": 10, "m": 20, "g": 30, "t": 40}
LEAST_SHARE = 0.1
"""The minimum share of a device that other processes must use to be the cause."""
LEAST_UNLISTED_SHARE = 0.25
"""The same, if the message does not list them: the process itself uses some memory outside of torch."""
NEAR_LINES = 30
"""Lines around an exit status in which the system reports the reason."""


class Shortage(NamedTuple):
    """What ran out, by a message, and the sizes in it."""

    kind: str
    sizes: MessageSizes


def shortage(message: str) -> Shortage | None:
    """What ran out, by a failure's message; None if it is about something else."""
    kind = next((kind for kind, pattern in _KINDS.items() if pattern.search(message)), None)
    return Shortage(kind, _sizes(message)) if kind else None


def of_memory(root: Traceback, log: Log) -> Finding | None:
    """The finding that memory ran out. If the failure is only an exit status, the lines around it count."""
    short = shortage(root.error_text) or shortage(lines_near(root, log))
    if short is None:
        return None
    values = {name: _size_text(value) for name, value in short.sizes.items()}
    share = short.sizes.get("there", 0.0) / short.sizes.get("total", 1.0)
    missing = dict.fromkeys(("asked", "there", "total"), "?")
    texts = {
        **missing,
        **values,
        "compared": values,
        "told": _sizes_sentence(short, root, log),
        "share": f"{max(0.1, share - 0.05):.2f}",
    }
    is_engines = short.kind == "device" and _ENGINE.search(
        "\n".join([*root.frames, root.error_text, lines_near(root, log)])
    )
    rule = f"short-{'engine' if is_engines else short.kind}-memory"
    finding = rules.finding(rule, values=texts)
    if short.kind == "device" and (first := _first(short.sizes, root.error_text)):
        return replace(finding, remedy=Text.lines([first, finding.remedy]))
    return finding


_ENGINE = re.compile(
    r"/(?:vllm|sglang|lmdeploy|turbomind|text_generation_server)/|\[TM\]|cuda[ _-]?graph failed", re.I
)
"""Frames and messages of programs that serve models."""


_LAST = re.compile(rf"{CONTAINER_PATTERN.pattern}|not enough slots available in the system")


def last_words(log: Log) -> Traceback | None:
    """The line in which a scheduler or kernel says, at the end of a log, why a run ended or did not begin."""
    lines = [line for line in live_lines(log) if line.text.strip()][-NEAR_LINES:]
    line = next((line for line in lines if _LAST.search(line.text)), None)
    if line is None:
        return None
    return Traceback(line.stream, line.number, line.number, line.number, "", line.text.strip())


def lines_near(root: Traceback, log: Log) -> str:
    """The lines around a failure that does not give the reason itself; "" for others."""
    if not is_launchers(root) and root.exception not in ("", CUT_OFF_TRACEBACK):
        return ""
    return "\n".join(line.text for line in log.lines if abs(line.number - root.last) <= NEAR_LINES)


def _sizes(message: str) -> MessageSizes:
    """The sizes in a message, and what follows from them."""
    hits = {name: pattern.search(message) for name, pattern in _SIZES.items()}
    sizes = {
        name: _bytes(*(part for part in hit.groups() if part is not None))
        for name, hit in hits.items()
        if hit
    }
    if "reserved" in sizes and "allocated" in sizes:
        sizes.setdefault("unallocated", max(0.0, sizes["reserved"] - sizes["allocated"]))
    if others := _others(message, sizes):
        return {**sizes, "others": sum(others.values())}
    own = sizes.get("own", sizes.get("reserved"))
    if own is not None and "total" in sizes and "there" in sizes:
        rest = sizes["total"] - sizes["there"] - own
        return {**sizes, "others": rest} if rest > LEAST_UNLISTED_SHARE * sizes["total"] else sizes
    return sizes


def _others(message: str, sizes: MessageSizes) -> dict[str, float]:
    """The bytes of other processes on a device, by their ids.

    In a container, torch lists its own process as another one, because it has another id outside.
    """
    listed = {process: _bytes(number, unit) for process, number, unit in _OTHER.findall(message)}
    taken = sizes.get("allocated", 0.0) + sizes.get("unallocated", 0.0)
    if taken and "own" not in sizes:
        own = min((each for each in listed if listed[each] >= taken), key=listed.__getitem__, default="")
        listed.pop(own, None)
    return listed


def _bytes(number: str, unit: str) -> float:
    return float(number) * 2.0 ** _UNITS[unit[:1].lower()]


def _size_text(size: float) -> str:
    powers = {40: "TiB", 30: "GiB", 20: "MiB", 10: "KiB", 0: "B"}
    power = next((each for each in powers if size >= 2**each), 0)
    return f"{size / 2**power:.4g} {powers[power]}"


_DEVICE = re.compile(r"\b(?:[GNX]PU|cuda:|device) ?(\d+)\b")
_PROCESS = re.compile(r"Kill(?:ed)? process (\d+ \([^)]*\))")
MAX_LISTED = 8
"""Maximum ranks and processes that are listed."""


def _sizes_sentence(short: Shortage, root: Traceback, log: Log) -> Text:
    """The sizes, whom they are about, and what they show, as a sentence; empty without any."""
    message, sizes = root.error_text, short.sizes
    ranks = {each.stream.rpartition("/")[2] for each in (root, *log.tracebacks) if shortage(each.error_text)}
    numbers = sorted(int(rank) for rank in ranks if rank.isdecimal())
    who = [f"rank {', '.join(map(str, numbers[:MAX_LISTED]))}"] if numbers else []
    who += [f"GPU {device[1]}"] if short.kind == "device" and (device := _DEVICE.search(message)) else []
    who += [f"process {process[1]}"] if (process := _PROCESS.search(message)) else []
    sizes_text = {name: _size_text(value) for name, value in sizes.items()}
    known = [
        phrase_text(f"short-{name}", **sizes_text)
        for name in ("asked", "there", "total", "own")
        if name in sizes
    ]
    texts = (
        [Text(", ".join(each.en for each in known), "，".join(each.zh for each in known))] if known else []
    )
    texts += [phrase_text("short-met", who=", ".join(who))] if who else []
    texts += [_reason_text(sizes)] if short.kind == "device" and _reason(sizes) else []
    return sentence(texts)


def _reason(sizes: MessageSizes) -> str:
    """The name of the reason why a device's memory was short, the most specific one first; "" if none shows."""
    requested, total, free = (sizes.get(name, 0.0) for name in ("asked", "total", "there"))
    if total and requested > total:
        return "memory-never"
    if total and sizes.get("others", 0.0) > LEAST_SHARE * total:
        return "memory-others"
    if requested and sizes.get("unallocated", 0.0) >= requested:
        return "memory-fragments"
    if requested and free > requested:
        return "memory-limited"
    if total and "allocated" in sizes:
        return "memory-own"
    return "memory-taken" if total and free else ""


def _reason_text(sizes: MessageSizes) -> Text:
    total = sizes.get("total", 0.0)
    taken = sizes.get("allocated", total - sizes.get("there", 0.0))
    texts = {name: _size_text(value) for name, value in sizes.items()}
    share = round(100 * taken / total) if total else 0
    return phrase_text(_reason(sizes), **{**texts, "allocated": _size_text(taken), "share": share})


_BARE = re.compile(r"(?:CUDA|HIP) error: out of memory")


def _first(sizes: MessageSizes, message: str) -> Text | None:
    """What to do first, if the sizes show another reason than the size of the run."""
    if not sizes:
        return phrase_text("memory-bare-way") if _BARE.search(message) else None
    reason = _reason(sizes)
    if reason == "memory-others":
        return phrase_text(
            "memory-others-way", processes=" ".join([*_others(message, sizes)][:MAX_LISTED]) or "PID"
        )
    known = ("memory-fragments", "memory-limited", "memory-never")
    return phrase_text(f"{reason}-way") if reason in known else None
