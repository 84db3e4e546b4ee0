"""What a program requested and did not get, with numbers: memory of every kind, GPUs, slots, heads, a port.

Drivers, allocators, kernels, schedulers and engines each have their own messages (`shortages.yaml`) with the same
content: how much was requested, how much is available, and what uses the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from reshard.diagnosis.data import data
from reshard.diagnosis.failures import CUT_OFF, is_launchers
from reshard.diagnosis.finding import Finding, Place, Text
from reshard.diagnosis.log import Log, Traceback
from reshard.diagnosis.root import live_lines
from reshard.diagnosis.rules import told
from reshard.diagnosis.words import words

Numbers = dict[str, float]


@dataclass(frozen=True)
class Shortage:
    """A kind in `shortages.yaml` that a message matches, and the numbers in it: bytes of memory, or counts."""

    kind: str
    numbers: Numbers

    @property
    def is_memory(self) -> bool:
        return _is_memory(self.kind)


_UNITS = {"b": 0, "k": 10, "m": 20, "g": 30, "t": 40}
_SIZE = r"(?<![\d.])(?P<number>\d+(?:\.\d*)?) ?(?P<unit>[KkMGT]i?B|bytes|B)\b"
_MEMORY = {
    "asked": (
        r"[Tt]ried to allocate SIZE",
        r"Unable to allocate SIZE for",
        r"allocating SIZE",
        r"CUDA (?:host )?[mc]alloc(?: async)? SIZE",
        r"SIZE KV cache is needed",
        r"desired GPU memory utilization \([\d.]+, SIZE\)",
    ),
    "there": (
        r"of which SIZE is free",
        r"[;,] SIZE free",
        r"available KV cache memory \(SIZE\)",
        r"[Ff]ree memory on device[^(]{0,40}\((?P<number>[\d.]+)/[\d.]+ (?P<unit>\wiB)\)",
    ),
    "total": (
        r"total capacity of SIZE",
        r"[;(] ?SIZE total capacity",
        r"max allowed: SIZE",
        r"[Ff]ree memory on device[^(]{0,40}\([\d.]+/SIZE\)",
        r"\) was [\d.]+ ?\w+ / SIZE",
    ),
    "own": (r"this process has SIZE memory in use", r"\) was SIZE / ", r"anon-rss:SIZE"),
    "allocated": (
        r"memory SIZE is allocated by PyTorch",
        r"; SIZE already allocated",
        r"MPS allocated: SIZE",
    ),
    "unallocated": (r"SIZE is reserved by PyTorch but unallocated",),
    "reserved": (r"; SIZE reserved in total",),
    "others": (r"Process \d+ has SIZE memory in use",),
}
"""Patterns for memory sizes in any message. `others` are summed."""
_DEVICE = re.compile(r"\b(?:[GNX]PU|cuda:|device) ?(?P<number>\d+)\b")
_PROCESS = re.compile(r"Kill(?:ed)? process (?P<process>\d+ \([^)]*\))|\(pid (?P<pid>\d+)\) is killed")
_TASK = re.compile(r"srun: error: (?P<host>[^\s:]+): tasks? (?P<task>\d+(?:[-,]\d+)*): Out Of Memory")
_NCCL = re.compile(r"(?<![\w.-])(?P<host>[\w.-]+):\d+:\d+ \[(?P<gpu>\d+)\] [^\n]*out of memory")
_NODE = re.compile(r"Memory on the node \(IP: (?P<host>[\w.:]+)")
MUCH = 0.1
"""The minimum share of a device that other processes must use to be the cause."""
UNSEEN = 0.25
"""The same, if the message does not list them: the process itself uses some memory outside of torch."""


def shortage(said: str, alone: bool = False) -> Shortage | None:
    """What was short, by a failure's message; None if nothing was. `alone`: only kinds that are never warnings."""
    for kind, patterns, is_alone in _kinds():
        for pattern in patterns if is_alone or not alone else ():
            if match := pattern.search(said):
                numbers = dict(_counts(match))
                return Shortage(kind, {**(_memory(said) if _is_memory(kind) else {}), **numbers})
    return None


def of_failure(root: Traceback, log: Log) -> Shortage | None:
    """What the first failure of a log lacked. If it is only an exit status, the last lines count."""
    return shortage(root.said) or shortage(_near(root, log))


def _near(root: Traceback, log: Log) -> str:
    """The lines around a failure that does not give the reason itself."""
    if not is_launchers(root) and root.exception not in ("", CUT_OFF):
        return ""
    return "\n".join(line.text for line in log.lines if abs(line.number - root.last) <= NEAR)


def last_words(log: Log) -> Traceback | None:
    """What the last lines of a log report as lacking, in words that no other rule recognises as a failure."""
    lines = [line for line in live_lines(log) if line.text.strip()][-NEAR:]
    if not lines or shortage("\n".join(line.text for line in lines), alone=True) is None:
        return None
    line = next((line for line in lines if shortage(line.text, alone=True)), lines[0])
    return Traceback(line.stream, line.number, line.number, line.number, "", line.text.strip())


NEAR = 30
"""Lines around an exit status in which the system reports the reason."""


def of_numbers(root: Traceback, log: Log) -> Finding | None:
    """The finding of what a failure lacked."""
    found = of_failure(root, log)
    if found is None:
        return None
    place = Place.of(log.name, root.last, root.said)
    texts = evidence(found, root, log)
    values = {**_shown(found), "told": _sentence(texts), "compared": _compared(found)}
    told_of = told(f"short-{_whose(found, root, log)}", [place], values, certainty="likely")
    first = alike(root, log) or way(found, root)
    return replace(told_of, remedy=Text.lines([first, told_of.remedy])) if first else told_of


def _compared(found: Shortage) -> dict[str, object]:
    """The numbers that the message itself has."""
    computed = ("others", "unallocated", "asked" if not found.is_memory else "")
    return {
        name: value for name, value in _shown(found).items() if name in found.numbers and name not in computed
    }


_BARE = re.compile(r"(?:CUDA|HIP) error: out of memory")


def way(found: Shortage, root: Traceback) -> Text | None:
    """What to do first about device memory, if its numbers show a reason other than the size of the run."""
    if found.kind != "device-memory":
        return None
    if _BARE.search(root.said) and not found.numbers:
        return words("memory-bare-way")
    verdict = _reason(found.numbers)
    if verdict == "memory-others":
        named = [process for process, _ in _others(root.said, found.numbers)]
        return words("memory-others-way", processes=" ".join(named[:8]) or "PID")
    known = ("memory-fragments", "memory-limited", "memory-never")
    return words(f"{verdict}-way") if verdict in known else None


_ALIKE = re.compile(r"EADDRINUSE|[Aa]ddress already in use|invalid device ordinal|Duplicate GPU detected")
"""What processes say that all take the same rank: one port for all of them, one GPU."""
_LAUNCHED = re.compile(
    r"\b(?:torchrun|torch\.distributed\.(?:run|launch)|accelerate[ -]launch)\s(?P<command>(?:[^\n]|(?<=\\)\n){0,2000})"
)
_ONE_RANK = re.compile(r"(?<!\S)--local[-_]rank[ =]\d{1,4}(?!\S)")
"""The same rank for every process, if it stands behind the script in a launcher's command."""


def alike(root: Traceback, log: Log) -> Text | None:
    """What to do first if the command line gives all processes the same local rank."""
    commands = _LAUNCHED.finditer(log.text) if _ALIKE.search(root.said) else ()
    for each in commands:
        typed = _ONE_RANK.search(each["command"].partition(".py")[2])
        if typed:
            return words("local-rank-typed-way", typed=typed[0])
    return None


_ENGINE = re.compile(
    r"/(?:vllm|sglang|lmdeploy|turbomind|text_generation_server)/|\[TM\]|cuda[ _-]?graph failed", re.I
)
"""Frames and messages of programs that serve models."""
_LOADS = re.compile(r"model_loader| load_model\b|create_weights| load_weights\b")
"""Frames in which they load the weights."""


def _whose(found: Shortage, root: Traceback, log: Log) -> str:
    """The kind whose rule is told: a GPU's memory depends on what uses it."""
    if found.kind != "device-memory":
        return found.kind
    if "MPS" in root.said:
        return "mps-memory"
    shown = "\n".join([*root.frames, root.said, _near(root, log)])
    if not _ENGINE.search(shown):
        return found.kind
    return "engine-weights-memory" if _LOADS.search("\n".join(root.frames)) else "engine-memory"


def evidence(found: Shortage, root: Traceback, log: Log) -> list[Text]:
    """What the numbers of a shortage show, which ranks it affected, and which flag caused it."""
    texts = [_numbers(found), _met(root, log, found), _typed(found, log)]
    if found.kind == "device-memory":
        texts += [_verdict(found.numbers), _estimate(found.numbers, log)]
    if found.kind == "ordinal":
        texts += [_ordinal(root, log)]
    return [text for text in texts if text is not None]


def _is_memory(kind: str) -> bool:
    return kind.endswith("-memory")


@lru_cache(maxsize=1)
def _kinds() -> list[tuple[str, list[re.Pattern[str]], bool]]:
    content: list[dict[str, Any]] = data("shortages.yaml")
    return [
        (
            each["kind"],
            [re.compile(one, re.MULTILINE | re.ASCII) for one in each["patterns"]],
            each.get("alone", False),
        )
        for each in content
    ]


@lru_cache(maxsize=1)
def _of_memory() -> dict[str, list[re.Pattern[str]]]:
    return {name: [re.compile(each.replace("SIZE", _SIZE)) for each in of] for name, of in _MEMORY.items()}


def _memory(said: str) -> Numbers:
    """Bytes by meaning, from a message."""
    numbers: Numbers = {}
    for name, patterns in _of_memory().items():
        found = next((hits for pattern in patterns if (hits := list(pattern.finditer(said)))), [])
        if found:
            sizes = [float(each["number"]) * 2.0 ** _UNITS[each["unit"][0].lower()] for each in found]
            numbers[name] = sum(sizes) if name == "others" else sizes[0]
    if "others" in numbers:
        numbers["others"] = sum(size for _, size in _others(said, numbers))
    if "reserved" in numbers and "allocated" in numbers:
        numbers.setdefault("unallocated", max(0.0, numbers["reserved"] - numbers["allocated"]))
    own = numbers.get("own", numbers.get("reserved"))
    if own is not None and "total" in numbers and "there" in numbers:
        others = numbers["total"] - numbers["there"] - own
        if others > UNSEEN * numbers["total"]:
            numbers.setdefault("others", others)
    return numbers


_PROCESS_HAS = re.compile(rf"Process (?P<process>\d+) has {_SIZE} memory in use")


def _others(said: str, numbers: Numbers) -> list[tuple[str, float]]:
    """Other processes on a device, by id, with their bytes.

    In a container, torch lists its own process as another one, because it has another id outside.
    """
    listed = [
        (each["process"], float(each["number"]) * 2.0 ** _UNITS[each["unit"][0].lower()])
        for each in _PROCESS_HAS.finditer(said)
    ]
    allocated = numbers.get("allocated", 0.0) + numbers.get("unallocated", 0.0)
    if "own" in numbers or not allocated:
        return listed
    own = min((each for each in listed if each[1] >= allocated), key=lambda each: each[1], default=None)
    return [each for each in listed if each is not own]


def _counts(match: re.Match[str]) -> Iterator[tuple[str, float]]:
    """The numbers in the groups of a pattern: for a list its length, for the last index one more."""
    for name, text in match.groupdict().items():
        if text is None:
            continue
        if text.startswith("["):
            yield name, len(re.findall(r"\d+", text))
        elif re.fullmatch(r"\d+(?:\.\d+)?", text):
            yield ("asked", float(text) + 1) if name == "last" else (name, float(text))
        elif text == "zero":
            yield name, 0


def _numbers(found: Shortage) -> Text | None:
    """What was requested, and what is available."""
    shown, known = _shown(found), found.numbers
    if "size" in known and "parts" in known:
        return words("short-parts", **shown) if known["parts"] and known["size"] % known["parts"] else None
    parts = [
        words(f"short-{name}", **shown)
        for name in ("asked", "there", "total", "own", "port")
        if name in known
    ]
    return _joined(parts, ", ", "，") if parts else None


def _shown(found: Shortage) -> dict[str, object]:
    """The numbers in printed form, and those that would divide what has to be divided."""
    is_bytes = found.is_memory and found.kind != "kernel-memory"
    shown: dict[str, object] = {
        name: _size(value) if is_bytes else f"{value:g}" for name, value in found.numbers.items()
    }
    size = int(found.numbers.get("size", 0))
    if size and "parts" in found.numbers:
        fits = [each for each in range(1, min(size, 512) + 1) if size % each == 0]
        shown["fits"] = ", ".join(map(str, fits))
    if found.numbers.get("total"):
        share = found.numbers.get("there", 0.0) / found.numbers["total"]
        shown["share"] = f"{max(0.1, share - 0.05):.2f}"
    return {
        **dict.fromkeys(("asked", "there", "fits", "size", "parts", "total", "share"), "?"),
        "port": "MASTER_PORT",
        **shown,
    }


def _size(value: float) -> str:
    unit = next((power for power in (40, 30, 20, 10) if value >= 2**power), 0)
    name = {0: "B", 10: "KiB", 20: "MiB", 30: "GiB", 40: "TiB"}[unit]
    return f"{value / 2**unit:.4g} {name}"


def _met(root: Traceback, log: Log, found: Shortage) -> Text | None:
    """What the shortage affected: the ranks, the device, the process, the machine."""
    said = root.said
    ranks = sorted({each.stream for each in log.tracebacks if _same(each, found)} - {""})
    ranks = ranks or [root.stream] * bool(root.stream)
    who = (
        [f"rank {_listed(ranks)}"]
        if ranks and all(rank.split("/")[-1].isdecimal() for rank in ranks)
        else ranks[:3]
    )
    if found.kind == "device-memory" and (device := _DEVICE.search(said)):
        who += [f"GPU {device['number']}"]
    if process := _PROCESS.search(said):
        who += [f"process {process['process'] or process['pid']}"]
    if task := _TASK.search(log.text):
        who += [f"task {task['task']}", task["host"]]
    if found.kind == "nccl-memory" and (nccl := _NCCL.search(log.text)):
        who += [nccl["host"], f"GPU {nccl['gpu']}"]
    if node := _NODE.search(said):
        who += [node["host"]]
    return words("short-met", who=", ".join(who)) if who else None


def _same(other: Traceback, found: Shortage) -> bool:
    seen = shortage(other.said)
    return seen is not None and seen.kind == found.kind


def _listed(ranks: list[str]) -> str:
    numbers = sorted(ranks, key=lambda rank: (len(rank), rank))
    return ", ".join(numbers[:8]) + (f" … ({len(numbers)})" if len(numbers) > 8 else "")


def _verdict(numbers: Numbers) -> Text | None:
    """Why device memory was short, by its numbers."""
    reason = _reason(numbers)
    shown: dict[str, object] = {name: _size(value) for name, value in numbers.items()}
    if reason in ("memory-own", "memory-taken"):
        total, taken = numbers["total"], _taken(numbers)
        shown |= {"allocated": _size(taken), "share": round(100 * taken / total)}
    return words(reason, **shown) if reason else None


def _reason(numbers: Numbers) -> str:
    """The name of the reason why device memory was short, the most specific one first; "" if there is none."""
    asked, total, free = (numbers.get(name, 0.0) for name in ("asked", "total", "there"))
    if total and asked > total:
        return "memory-never"
    if total and numbers.get("others", 0.0) > MUCH * total:
        return "memory-others"
    if asked and numbers.get("unallocated", 0.0) >= asked:
        return "memory-fragments"
    if asked and free > asked:
        return "memory-limited"
    if total and _taken(numbers):
        return "memory-own" if "allocated" in numbers else "memory-taken"
    return ""


def _taken(numbers: Numbers) -> float:
    """The bytes of a device that are in use."""
    free = numbers.get("there", 0.0)
    return numbers.get("allocated", numbers.get("total", 0.0) - free if free else 0.0)


_ROW = re.compile(
    r"(?<![\d.])(?P<cpu>[\d.]+)GB \| +(?P<gpu>[\d.]+)GB \| (?P<options>offload\S[^\n]{0,200})$", re.MULTILINE
)
"""A row of the table that DeepSpeed's estimate_zero2 and estimate_zero3 functions print."""


def _estimate(numbers: Numbers, log: Log) -> Text | None:
    """DeepSpeed's estimate, if the log has its table: the row that uses most of the GPU and fits."""
    rows = [row for row in _ROW.finditer(log.text) if float(row["gpu"]) * 2**30 < numbers.get("total", 0.0)]
    best = max(rows, key=lambda row: float(row["gpu"]), default=None)
    if best is None:
        return None
    return words(
        "memory-estimate", gpu=f"{best['gpu']} GB", cpu=f"{best['cpu']} GB", options=best["options"].strip()
    )


def _ordinal(root: Traceback, log: Log) -> Text | None:
    """The first rank without a GPU: those before it have one each."""
    ranks = [_rank(each.stream) for each in log.tracebacks if each.said == root.said]
    first = min((rank for rank in ranks if rank is not None), default=None)
    return words("ordinal-first", first=first) if first else None


def _rank(stream: str) -> int | None:
    last = stream.rpartition("/")[2]
    return int(last) if last.isdecimal() else None


_FLAG = (
    r"(?<![\w-])(?:--?[\w.-]{{0,40}}(?:nproc|num[_-]?proc|gpus|tensor|tp|np|devices|slots|tasks)[\w.-]{{0,40}}"
    r"[ =]{{1,4}}|NPROC_PER_NODE=){}\b"
)


def _typed(found: Shortage, log: Log) -> Text | None:
    """The flag that set the number, if the log shows the command."""
    number = found.numbers.get("asked", found.numbers.get("parts"))
    if found.is_memory or number is None:
        return None
    match = re.search(_FLAG.format(f"{number:g}"), log.text)
    return words("short-typed", typed=match[0]) if match else None


def _sentence(texts: list[Text]) -> Text:
    """The evidence as a sentence that precedes another one; empty without evidence."""
    if not texts:
        return Text.same("")
    joined = _joined(texts, "; ", "；")
    return Text(f"{joined.en[0].upper()}{joined.en[1:]}. ", f"{joined.zh}。")


def _joined(texts: list[Text], en: str, zh: str) -> Text:
    return Text(en.join(each.en for each in texts), zh.join(each.zh for each in texts))
