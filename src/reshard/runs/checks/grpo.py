"""The batch sizes of GRPO, as TRL's GRPOConfig checks them (`__post_init__`, TRL 1.16)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import gcd, lcm
from typing import Any

from reshard.runs.checks import rules
from reshard.runs.checks.finding import Finding
from reshard.runs.checks.location import Location

GRPO_DEFAULTS = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_generations": 8}
GRPO_OPTIONS = (*GRPO_DEFAULTS, "generation_batch_size", "steps_per_generation")
CODES = ("grpo-one-generation", "script-grpo-arithmetic")
PROCESS_COUNTS = range(1, 129)


def numbers_of(given: Mapping[str, Any]) -> dict[str, int] | None:
    """The numbers that are set, with TRL's defaults; None if one is known only at run time."""
    values = {key: given[key] for key in GRPO_OPTIONS if given.get(key) is not None}
    if not all(isinstance(value, int) for value in values.values()):
        return None
    return {**GRPO_DEFAULTS, **{key: value for key, value in values.items() if value > 0}}


def generated(numbers: Mapping[str, int], processes: int) -> int:
    """Completions of a generation step, of all processes."""
    steps = numbers.get("steps_per_generation", numbers["gradient_accumulation_steps"])
    return numbers.get("generation_batch_size", numbers["per_device_train_batch_size"] * steps * processes)


def fits(given: Mapping[str, int], processes: int) -> bool:
    """Whether a generation step consists of complete groups. For missing numbers, TRL's defaults apply."""
    numbers = {**GRPO_DEFAULTS, **given}
    if total := numbers.get("generation_batch_size"):
        cut = total % (numbers["per_device_train_batch_size"] * processes)
        if cut or "steps_per_generation" in numbers:
            return False
    return generated(numbers, processes) % numbers["num_generations"] == 0


def cut_groups(
    given: Mapping[str, Any], place: Callable[[str, int | None], Location], processes: int | None = None
) -> Iterator[Finding]:
    """Batch sizes that GRPOConfig refuses for this number of processes; if that is unknown, for some or all.

    `place` is the line that sets a key, with a better value if there is one.
    """
    numbers = numbers_of(given)
    if numbers is None:
        return
    group, places = numbers["num_generations"], [place(*better(numbers))]
    if group < 2:
        yield rules.finding("grpo-one-generation", places, {"group": group})
        return
    fitting = [count for count in PROCESS_COUNTS if fits(numbers, count)]
    unsure = len(fitting) == len(PROCESS_COUNTS) or ("generation_batch_size" in numbers and 1 in fitting)
    if processes in fitting or (processes is None and unsure):
        return
    ranks = ", ".join(map(str, fitting[:4])) or "–"
    values = {"total": generated(numbers, 1), "group": group, "ranks": ranks}
    if processes is not None or not fitting:
        yield rules.finding("script-grpo-arithmetic", places, values)
    else:
        yield rules.finding(
            "script-grpo-arithmetic", places, values, severity="warning", certainty="possible"
        )


def better(numbers: Mapping[str, int]) -> tuple[str, int | None]:
    """The key to change, and a value that fits every number of processes."""
    batch, group = numbers["per_device_train_batch_size"], numbers["num_generations"]
    total = numbers.get("generation_batch_size")
    steps = numbers.get("steps_per_generation", numbers["gradient_accumulation_steps"])
    if group < 2:
        whole = generated(numbers, 1)
        return "num_generations", next((each for each in (8, 4, 2) if whole % each == 0), None)
    if total is None:
        unit, key, old = group // gcd(group, steps), "per_device_train_batch_size", batch
    elif "steps_per_generation" in numbers:
        return "generation_batch_size", None
    else:
        unit, key, old = lcm(group, batch), "generation_batch_size", total
    return key, -(-old // unit) * unit
