"""The batch sizes of GRPO, as TRL's GRPOConfig checks them (`__post_init__`, TRL 1.16)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import gcd, lcm

from reshard.diagnosis.finding import Finding, Place
from reshard.diagnosis.rules import told

DEFAULTS = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_generations": 8}
KEYS = (*DEFAULTS, "generation_batch_size", "steps_per_generation")
PROCESSES = range(1, 129)
Spot = Callable[[str, "int | None"], Place]
"""The place of a key, and its line with another value."""


def fits(numbers: Mapping[str, int], processes: int) -> bool:
    """Whether a generation batch consists of complete groups. For missing `numbers`, TRL's defaults apply."""
    batch, steps, group = (numbers.get(key, default) for key, default in DEFAULTS.items())
    total = numbers.get("generation_batch_size")
    if total is None:
        total = batch * processes * numbers.get("steps_per_generation", steps)
    elif total % (batch * processes) or "steps_per_generation" in numbers:
        return False
    return total % group == 0


def grpo_arithmetic(given: Mapping[str, object], spot: Spot) -> Iterator[Finding]:
    """Numbers that GRPOConfig refuses for some or all numbers of processes. Values that are not numbers are unknown."""
    if any(value is not None and not isinstance(value, int) for key, value in given.items() if key in KEYS):
        return
    numbers = {key: value for key in KEYS if isinstance(value := given.get(key), int) and value > 0}
    batch, steps, group = (numbers.get(key, default) for key, default in DEFAULTS.items())
    total = numbers.get("generation_batch_size", batch * numbers.get("steps_per_generation", steps))
    if group < 2:
        better = next((each for each in (8, 4, 2) if total % each == 0), None)
        yield told("grpo-one-generation", [spot("num_generations", better)], {"group": group})
        return
    fitting = [count for count in PROCESSES if fits(numbers, count)]
    if len(fitting) == len(PROCESSES) or ("generation_batch_size" in numbers and 1 in fitting):
        return
    values = {"total": total, "group": group, "ranks": ", ".join(map(str, fitting[:4])) or "–"}
    sure = not fitting
    yield told(
        "script-grpo-arithmetic",
        [spot(*_fixed(numbers, batch, numbers.get("steps_per_generation", steps), group))],
        values,
        severity="error" if sure else "warning",
        certainty="sure" if sure else "possible",
    )


def _fixed(numbers: Mapping[str, int], batch: int, steps: int, group: int) -> tuple[str, int | None]:
    """The key to change, and the next larger value that fits every number of processes."""
    if "generation_batch_size" in numbers:
        if "steps_per_generation" in numbers:
            return "generation_batch_size", None
        unit, key, old = lcm(group, batch), "generation_batch_size", numbers["generation_batch_size"]
    else:
        unit, key, old = group // gcd(group, steps), "per_device_train_batch_size", batch
    return key, -(-old // unit) * unit
