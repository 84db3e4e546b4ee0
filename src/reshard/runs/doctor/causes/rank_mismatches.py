"""Which rank did not do what the others did: it never came, it came late, or it ran another collective."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from reshard.base.languages import Text
from reshard.runs.checks import rules
from reshard.runs.checks.finding import Finding
from reshard.runs.checks.phrases import phrase_text
from reshard.runs.doctor.text.log import Log, Traceback
from reshard.runs.doctor.text.run_details import ABSENT_RANKS

_STORED = re.compile(
    r"\[(?P<rank>\d+)\] is setting up NCCL communicator and retrieving ncclUniqueId from \[(?P<other>\d+)\]"
)
_JOINED = re.compile(r"world_size=(?P<of>\d+), (?:num_workers_joined|worker_count)=(?P<came>\d+)")
_WAITED = re.compile(
    r"\[Rank (?P<rank>\d+)\] (?:Watchdog caught collective operation timeout|Observed flight recorder)"
)


def of_absent(root: Traceback, log: Log) -> Finding | None:
    """The finding for ranks that did not come, as far as a log shows them."""
    absent = _absent(root, log)
    return rules.finding("ranks-absent", values={"told": absent}) if absent else None


def _absent(root: Traceback, log: Log) -> Text | None:
    """The ranks that did not come."""
    match = ABSENT_RANKS.search(root.error_text)
    if match and match["ranks"]:
        ranks = [int(rank) for rank in match["ranks"].split(", ")]
        return phrase_text("absent-named", absent=_short(ranks))
    if stored := _STORED.search(root.error_text):
        return phrase_text("absent-store", **stored.groupdict())
    if joined := match or _JOINED.search(root.error_text):
        came, every = int(joined["came"]), int(joined["of"])
        if came > every:
            return phrase_text("absent-more", came=came, world=every)
        return phrase_text("absent-some", missing=every - came, came=came, world=every)
    waited = {int(rank) for rank in _WAITED.findall(log.text)}
    absent = set(range(log.world_size)) - waited
    if not waited or not absent:
        return None
    values = {"absent": _short(absent), "waited": _short(waited), "world": len(waited | absent)}
    return phrase_text("absent-waited", **values)


def _short(ranks: Iterable[int]) -> str:
    """Numbers with consecutive ones as ranges: 0-3, 5."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    return ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)


_SSH = re.compile(
    r"'ssh [^'\n]{0,200}?(?P<one>[\w.@-]+) hostname' returned non-zero exit status 255"
    r"|host=(?P<two>[\w.@-]+) was not reachable via ssh|pdsh@\S+: (?P<three>[\w.@-]+): ssh exited with exit code 255"
    r"|ssh: Could not resolve hostname (?P<four>[\w.@-]+)|(?m:^(?:(?P<five>[\w.@-]+): )?Host key verification failed)"
)


def of_ssh(root: Traceback, log: Log) -> Finding | None:
    """The finding for a node that the launcher does not enter by ssh, as ssh and pdsh print at the end of a log."""
    match = _SSH.search("\n".join([root.error_text, *(line.text for line in log.lines[-30:])]))
    if match is None:
        return None
    return rules.finding("ssh-refused", values={"host": next(filter(None, match.groups()), "NODE")})


_WORK = re.compile(
    r"Rank (\d+)\] Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d+), OpType=(\w+)"
    r"(?:, NumelIn=(\d+))?"
)


class WatchdogWork(NamedTuple):
    """The collective in which a rank waited when its watchdog ended it. `elements` is "" if the log lacks it."""

    number: int
    operation: str
    elements: str

    @property
    def is_barrier(self) -> bool:
        """Whether it carries no data: torch's `barrier` on NCCL is an all-reduce of one element."""
        return self.operation == "BARRIER" or (self.operation, self.elements) == ("ALLREDUCE", "1")

    def __str__(self) -> str:
        return f"{self.operation} × {self.elements}" if self.elements else self.operation


def compared(log: Log) -> list[Text]:
    """What the collectives of the ranks show in comparison; empty if fewer than two ranks have them."""
    works = {
        int(rank): WatchdogWork(int(number), *rest)
        for rank, number, *rest in reversed(_WORK.findall(log.text))
    }
    if len(works) < 2:
        return []
    first, last = min(works.values()).number, max(works.values()).number
    if first < last:
        late = ", ".join(str(rank) for rank in sorted(works) if works[rank].number == first)
        return [phrase_text("ranks-behind", first=first, last=last, late=late)]
    kinds = sorted(set(works.values()))
    if len(kinds) == 1 and kinds[0].is_barrier and log.world_size != len(works):
        return [phrase_text("ranks-at-barrier", number=first, shown=kinds[0], count=len(works))]
    if len(kinds) == 1:
        return [phrase_text("ranks-alike", number=first, shown=kinds[0], count=len(works))]
    ranks = {kind: ", ".join(str(rank) for rank in sorted(works) if works[rank] == kind) for kind in kinds}
    sizes = "-sizes" * (len({kind.operation for kind in kinds}) == 1)
    by_kind = "; ".join(f"{kind}: rank {ranks[kind]}" for kind in kinds)
    return [phrase_text(f"ranks-diverged{sizes}", number=first, shown=by_kind)]
