"""Which rank was missing: at the rendezvous, at a barrier, or in a collective in which the others waited."""

from __future__ import annotations

import re
from collections.abc import Iterable

from reshard.diagnosis.finding import Finding, Place, Text
from reshard.diagnosis.log import Log, Traceback
from reshard.diagnosis.rules import told, told_at
from reshard.diagnosis.words import words

_JOINED = re.compile(
    r"\b(?P<came>\d+)/(?P<all>\d+) clients joined"
    r"|world_size=(?P<size>\d+), (?:num_workers_joined|worker_count)=(?P<workers>\d+)"
)
_NAMED = re.compile(r"\bRanks? (?P<ranks>\d+(?:, \d+)*) failed to pass monitoredBarrier")
_STORED = re.compile(
    r"\[(?P<rank>\d+)\] is setting up NCCL communicator and retrieving ncclUniqueId from \[(?P<other>\d+)\]"
)
_WAITED = re.compile(
    r"\[Rank (?P<rank>\d+)\] (?:Watchdog caught collective operation timeout|Observed flight recorder)"
)
_SPEAKS = re.compile(r"\[(?:Rank|rank) ?(?P<rank>\d+)\]|(?<![\w.])rank (?P<nccl>\d+) nranks \d+")
_WORLD = re.compile(
    r"\bnranks (?P<nranks>\d+)|\bworld[_ ]size['\"]?\s{0,2}[=:]\s{0,2}(?P<size>\d+)", re.IGNORECASE
)
_NCCL = re.compile(
    r"(?:(?P<host>[A-Za-z][\w.-]*):)?\d+:\d+ \[\d+\] NCCL INFO [^\n]{0,200}?\brank (?P<rank>\d+) nranks"
)
"""A line of NCCL. Its host may have been removed as the prefix of the stream."""
_SUMMARY = re.compile(r"\bhost\s*: (?P<host>\S+)\s+rank\s*: (?P<rank>\d+)")
_LOCAL = re.compile(r"(?:nproc[-_]per[-_]node|local_world_size|NPROC_PER_NODE)['\"]?[ =:]{1,3}(?P<count>\d+)")
MOST = 4096
"""Maximum number of ranks: a larger number is not a world size."""


def evidence(root: Traceback, log: Log) -> list[Text]:
    """The absent ranks with their hosts, as far as a log shows them; empty if it does not."""
    if named := _NAMED.search(root.said):
        ranks = [int(rank) for rank in named["ranks"].split(", ")]
        return [words("absent-named", absent=_listed(ranks, log))]
    if stored := _STORED.search(root.said):
        return [words("absent-store", rank=stored["rank"], other=stored["other"])]
    text = log.text
    if joined := _JOINED.search(root.said):
        came, every = (int(joined[one] or joined[two]) for one, two in (("came", "workers"), ("all", "size")))
        return [_of_count(came, every, _heard(log, text), log)]
    waited = {int(match["rank"]) for match in _WAITED.finditer(text)}
    world = max(_world(log, text), max(waited, default=-1) + 1)
    if waited and len(waited) < world:
        absent = [rank for rank in range(world) if rank not in waited]
        return [words("absent-waited", absent=_listed(absent, log), waited=_short(waited), world=world)]
    return []


def of_ranks(root: Traceback, log: Log) -> Finding | None:
    """The finding for a failure about which only the absent ranks are known."""
    texts = evidence(root, log)
    if not texts:
        return None
    return told_at(("ranks-absent", {"told": texts[0]}), log.name, root.last, root.said)


_MEMBER = re.compile(r"MEMBER: (?P<rank>\d+)/(?P<all>\d+)")
"""What Lightning prints on each rank before it waits for the others."""


def of_log(log: Log) -> Finding | None:
    """The finding for a log that ends while ranks wait for others, without a failure; None for other logs."""
    told_last = [line for line in log.lines if line.text.strip()][-MOST_WAITING:]
    if not told_last or not _MEMBER.search(told_last[-1].text):
        return None
    members = [hit for line in told_last if (hit := _MEMBER.search(line.text))]
    came, every = len({hit["rank"] for hit in members}), int(members[-1]["all"])
    if not came < every <= MOST:
        return None
    heard = {int(hit["rank"]) - 1 for hit in members}
    place = Place(log.name, told_last[-1].number, told_last[-1].text.strip())
    return told("ranks-absent", [place], {"told": _of_count(came, every, heard, log)}, certainty="likely")


MOST_WAITING = 4096
"""Lines at the end of a log that are searched for the ranks that wait."""


def _of_count(came: int, every: int, heard: set[int], log: Log) -> Text:
    """The missing ranks if only counts are known: those that do not appear in the log."""
    if came > every and every and came % every == 0:
        return words("absent-times", came=came, world=every, times=came // every)
    if came > every:
        return words("absent-more", came=came, world=every)
    silent = [rank for rank in range(min(every, MOST)) if rank not in heard]
    if heard and len(silent) == every - came:
        return words("absent-silent", absent=_listed(silent, log), came=came, world=every)
    return words("absent-some", missing=every - came, came=came, world=every)


def _heard(log: Log, text: str) -> set[int]:
    """The ranks that appear in a log."""
    streams = {line.stream.rpartition("/")[2] for line in log.lines}
    heard = {int(stream) for stream in streams if stream.isdecimal()}
    return heard | {int(match["rank"] or match["nccl"]) for match in _SPEAKS.finditer(text)}


def _world(log: Log, text: str) -> int:
    """The world size according to a log; 0 if unknown."""
    found = _WORLD.search(text)
    size = int(found["nranks"] or found["size"]) if found else log.world_size
    return size if size <= MOST else 0


def _listed(ranks: list[int], log: Log) -> str:
    """Ranks with their hosts, from the log or derived from the rank."""
    hosts = {int(match["rank"]): match["host"] for match in _SUMMARY.finditer(log.text)}
    for line in log.lines:
        if "NCCL INFO" in line.text and (match := _NCCL.match(line.text)):
            hosts[int(match["rank"])] = match["host"] or line.stream.partition("/")[0]
    known = list(dict.fromkeys(host for rank in ranks if (host := hosts.get(rank))))
    if not known and (local := _LOCAL.search(log.text)) and int(local["count"]):
        known = [f"node {number}" for number in dict.fromkeys(rank // int(local["count"]) for rank in ranks)]
    return _short(ranks) + (f" ({', '.join(known[:4])})" if known else "")


def _short(ranks: Iterable[int]) -> str:
    """Numbers with consecutive ones as ranges: 0-3, 5."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    return ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)
