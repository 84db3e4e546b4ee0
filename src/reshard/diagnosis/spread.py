"""device_map='auto' in a script: where it is chosen, what it loads, and whether that reaches a trainer."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from reshard.checks.device_maps import SPREAD
from reshard.diagnosis.finding import Finding, Place
from reshard.diagnosis.rules import told
from reshard.diagnosis.source import Call, Source
from reshard.diagnosis.words import words

MAKERS = ("infer_auto_device_map", "get_balanced_memory")
SINKS = (
    *("fully_shard", "FSDP", "FullyShardedDataParallel", "DistributedDataParallel", "DDP"),
    *("prepare", "prepare_model", "initialize"),
)
_LAUNCHED = re.compile(
    r"LOCAL_RANK|WORLD_SIZE|init_process_group|Accelerator\(|PartialState\(|accelerate launch|torchrun|deepspeed\s*="
    r"|fsdp\s*=|distributed_type\s*=|fully_shard|--nproc"
)
_PER_PROCESS = re.compile(r"rank|process_index|current_device|\bNone\b", re.IGNORECASE)


def device_map_findings(source: Source) -> Iterator[Finding]:
    """A device_map over several devices that reaches a trainer, or a launch with several processes."""
    forced = re.search(r"distributed_type\s*=[^=]", source.text)
    places: list[Place] = []
    for names, call, value in _uses(source):
        origins = [each for each in _origins(value, source) if forced or not _chosen_by_launch(value, source)]
        sink = _reached(source, source.flow(names), call) if origins else None
        if sink is not None:
            places += [_fixed(source, origin) for origin in origins]
            places.append(source.place(sink.line))
    if not places:
        return
    launched = _LAUNCHED.search(source.text)
    yield told(
        "script-device-map",
        dict.fromkeys(sorted(places, key=lambda place: (not place.fixed, place.line or 0))),
        severity="error" if launched else "warning",
        certainty="sure" if launched else "likely",
        evidence=[
            words("for-several-processes", shows=launched[0]) if launched else words("for-one-process")
        ],
    )


def _uses(source: Source) -> Iterator[tuple[set[str], Call | None, ast.expr]]:
    """Where a device map is used: the names of what it loads, the call if it is one, and the map."""
    for call in source.calls:
        keyword = call.keyword("device_map")
        if keyword is not None:
            yield set(call.assigned) | _returned(source, call), call, keyword.value
        for each in call.node.keywords:
            for value in _entries(each.value):
                yield set(call.assigned) | _returned(source, call), call, value
    for name, values in source.values.items():
        for bound in values:
            for value in _entries(bound):
                yield {name}, None, value
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            target = node.targets[0]
            if isinstance(target.slice, ast.Constant) and target.slice.value == "device_map":
                yield {ast.unparse(target.value)}, None, node.value


def _entries(value: ast.expr) -> Iterator[ast.expr]:
    """The values of device_map in a dict literal."""
    if isinstance(value, ast.Dict):
        for key, entry in zip(value.keys, value.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == "device_map":
                yield entry


def _returned(source: Source, call: Call) -> set[str]:
    """The function that returns the result of a call."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Return) and node.value is not None and call.node in ast.walk(node.value):
            return {call.scope.rpartition(".")[2]}
    return set()


def _origins(value: ast.expr, source: Source, seen: frozenset[str] = frozenset()) -> list[ast.expr]:
    """The expressions that make a device map over several devices: 'auto', or the function that makes one."""
    if isinstance(value, ast.Constant):
        return [value] if value.value in SPREAD else []
    if isinstance(value, ast.IfExp):
        return [*_origins(value.body, source, seen), *_origins(value.orelse, source, seen)]
    if isinstance(value, ast.BoolOp):
        return [origin for each in value.values for origin in _origins(each, source, seen)]
    if isinstance(value, ast.Call):
        return [value] if ast.unparse(value.func).rpartition(".")[2] in MAKERS else []
    if isinstance(value, ast.Name | ast.Attribute):
        name = value.id if isinstance(value, ast.Name) else value.attr
        if name not in seen:
            given = source.values.get(name, [])
            return [origin for each in given for origin in _origins(each, source, seen | {name})]
    return []


def _chosen_by_launch(value: ast.expr, source: Source) -> bool:
    """Whether the script chooses another map, with a device per process, if several are launched."""
    if isinstance(value, ast.IfExp):
        return bool(_PER_PROCESS.search(ast.unparse(value)))
    if isinstance(value, ast.Name | ast.Attribute):
        name = value.id if isinstance(value, ast.Name) else value.attr
        given = source.values.get(name, [])
        others = [each for each in given if not (isinstance(each, ast.Constant) and each.value in SPREAD)]
        return any(_PER_PROCESS.search(ast.unparse(each)) for each in others)
    return False


def _reached(source: Source, names: set[str], call: Call | None) -> Call | None:
    """The trainer, or the function that prepares a model, that gets one of these names or the result of the call."""
    for sink in source.calls:
        if not (sink.last.endswith("Trainer") or sink.last in SINKS):
            continue
        inline = call is not None and call.node is not sink.node and call.node in ast.walk(sink.node)
        if inline or names & sink.names():
            return sink
    return None


def _fixed(source: Source, origin: ast.expr) -> Place:
    return source.replaced(origin, "None")
