"""What ranks waited for when their watchdog ended them: the same collective, or different ones."""

from __future__ import annotations

import re

from reshard.doctor.log import Log

_WORK = re.compile(
    r"Rank (?P<rank>\d+)\] Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<seq>\d+), "
    r"OpType=(?P<op>\w+)(?:, NumelIn=(?P<numel>\d+))?"
)


def compared(log: Log) -> list[str]:
    """What comparing SeqNum, OpType and NumelIn over the ranks tells; nothing if fewer than two ranks show them."""
    works: dict[int, tuple[int, str, str]] = {}
    for match in _WORK.finditer(log.text):
        works.setdefault(int(match["rank"]), (int(match["seq"]), match["op"], match["numel"] or "?"))
    if len(works) < 2:
        return []
    numbers = sorted({seq for seq, _, _ in works.values()})
    if len(numbers) > 1:
        late = ", ".join(str(rank) for rank in sorted(works) if works[rank][0] == numbers[0])
        return [f"SeqNum differs, from {numbers[0]} to {numbers[-1]}: look at rank {late}, which is behind"]
    kinds = sorted({work[1:] for work in works.values()})
    if len(kinds) > 1:
        shown = "; ".join(f"{op} of {numel} on rank {_ranks(works, (op, numel))}" for op, numel in kinds)
        what = "operations" if len({op for op, _ in kinds}) > 1 else "sizes"
        return [f"{what} differ at the same SeqNum {numbers[0]}: the ranks diverged ({shown})"]
    same = (
        f"SeqNum {numbers[0]}, OpType {kinds[0][0]} and NumelIn {kinds[0][1]} are alike on {len(works)} ranks"
    )
    return [f"{same}: if no other rank is missing, a link or a GPU is at fault, not a branch of the script"]


def _ranks(works: dict[int, tuple[int, str, str]], kind: tuple[str, str]) -> str:
    return ", ".join(str(rank) for rank in sorted(works) if works[rank][1:] == kind)
