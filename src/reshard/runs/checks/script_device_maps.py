"""device_map='auto' in a script: where it is chosen, what it loads, and whether that reaches a trainer."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from reshard.runs.checks import rules
from reshard.runs.checks.device_maps import SPREADING_MAPS
from reshard.runs.checks.finding import Finding
from reshard.runs.checks.location import Launch, Location
from reshard.runs.checks.phrases import phrase_text
from reshard.runs.checks.script import Call, Script

MAP_FUNCTIONS = ("infer_auto_device_map", "get_balanced_memory")
"""Functions that make a map over several devices."""
TRAINER_CALLS = (
    *("fully_shard", "FSDP", "FullyShardedDataParallel", "DistributedDataParallel", "DDP"),
    *("prepare", "prepare_model", "initialize"),
)
"""Functions and classes that train a model, besides trainers."""
_LAUNCHED = re.compile(
    r"LOCAL_RANK|WORLD_SIZE|init_process_group|Accelerator\(|PartialState\(|accelerate launch|torchrun|deepspeed\s*="
    r"|fsdp\s*=|distributed_type\s*=|fully_shard|--nproc"
)
_FORCED = re.compile(r"distributed_type\s*=[^=]")
"""A script that chooses how it is distributed, whatever launches it."""
_PER_PROCESS = re.compile(r"rank|process_index|current_device|\bNone\b", re.IGNORECASE)
_SETS_WORLD_SIZE = re.compile(r"""environ(?:\.setdefault\(|\[)["']WORLD_SIZE["']\]?\s*[,=][^=]""")


def spread_models(source: Script, launch: Launch | None) -> Iterator[Finding]:
    """A model over several devices that a trainer gets, which needs a whole one in each process."""
    spread: list[Location] = []
    trained: list[Location] = []
    for value in _device_maps(source.tree):
        choices = _spread(value, source)
        sink = _trained_by(value, source) if choices else None
        if sink is not None:
            spread += [source.place(each.lineno) for each in choices]
            trained.append(source.place(sink.line))
    if spread:
        places = [*sorted(spread, key=_line), *sorted(trained, key=_line)]
        yield spread_model(dict.fromkeys(places), launch, _LAUNCHED.search(source.text))


def _line(place: Location) -> int:
    return place.line or 0


def spread_model(
    places: Iterable[Location], launch: Launch | None, shows: re.Match[str] | None = None
) -> Finding:
    """The finding about a model over several devices: an error if several processes train it.

    That is known from the launch, or a script `shows` that it is written for it.
    """
    if launch:
        evidence = phrase_text("launch-starts", place=launch.place, count=launch.local)
    elif shows:
        evidence = phrase_text("for-several-processes", shows=shows[0])
    else:
        evidence = phrase_text("for-one-process")
    is_sure = bool(launch or shows)
    return rules.finding(
        "script-device-map",
        places,
        severity="error" if is_sure else "warning",
        certainty="sure" if is_sure else "likely",
        evidence=[evidence],
    )


def export_device_map(source: Script, launch: Launch | None) -> Iterator[Finding]:
    """device_map='auto' in a script that sets WORLD_SIZE itself, and passes the model to no trainer."""
    if _SETS_WORLD_SIZE.search(source.text) and not any(spread_models(source, launch)):
        spread = [value for value in _device_maps(source.tree) if _is_spread(value)]
        if spread:
            yield rules.finding("script-export-device-map", [source.place(value.lineno) for value in spread])


def _device_maps(tree: ast.Module) -> Iterator[ast.expr]:
    """The values of device_map: an argument, a key of a dict, or set as one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "device_map":
            yield node.value
        elif isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            yield from (value for key, value in pairs if _is_key(key))
        elif isinstance(node, ast.Assign) and _is_entry(node.targets[0]):
            yield node.value


def _is_entry(target: ast.expr) -> bool:
    """Whether this is `kwargs["device_map"]`."""
    return isinstance(target, ast.Subscript) and _is_key(target.slice)


def _is_key(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value == "device_map"


def _spread(value: ast.expr, source: Script) -> list[ast.expr]:
    """The expressions that make a map over several devices; none if a launch gets a map for each process."""
    choices = list(_choices(value, source))
    spread = [each for each in choices if _is_spread(each)]
    others = (ast.unparse(each) for each in choices if each not in spread)
    return spread if _FORCED.search(source.text) or not any(map(_PER_PROCESS.search, others)) else []


def _choices(value: ast.expr, source: Script) -> Iterator[ast.expr]:
    """What an expression may be: both sides of a condition, and all values of a name."""
    rest, seen = [value], set[str]()
    while rest:
        each = rest.pop()
        if isinstance(each, ast.IfExp):
            rest += [each.body, each.orelse]
        elif isinstance(each, ast.BoolOp):
            rest += each.values
        elif isinstance(each, ast.Name | ast.Attribute):
            name = each.id if isinstance(each, ast.Name) else each.attr
            rest += source.values.get(name, []) if name not in seen else []
            seen.add(name)
        else:
            yield each


def _is_spread(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).rpartition(".")[2] in MAP_FUNCTIONS
    return isinstance(value, ast.Constant) and value.value in SPREADING_MAPS


def _trained_by(value: ast.expr, source: Script) -> Call | None:
    """The trainer, or the function that prepares a model, that gets what an expression is part of."""
    names = source.reached(value)
    for call in source.calls:
        trains = call.last.endswith("Trainer") or call.last in TRAINER_CALLS
        if trains and (names & call.names() or value in ast.walk(call.node)):
            return call
    return None
