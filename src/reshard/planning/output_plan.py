"""The plan of an output: its contents laid out in files, with companions and the record of what it was made from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import PurePath

from reshard.base.plain_json import to_json
from reshard.planning import output_companions
from reshard.planning.contents import contents_of
from reshard.planning.prepared_source import PreparedSource
from reshard.transfer.plan import OutputFile, Plan


def output_plan(source: PreparedSource) -> Plan:
    """The plan, audited. Raises ReshardError for what the format cannot store, and for companions that do not load."""
    checkpoint, model, target = source.resolved.checkpoint, source.resolved.model, source.target
    contents = contents_of(source)
    companions = output_companions.find_companions(checkpoint, contents.request)
    embedded = (
        output_companions.embedding(checkpoint, contents.request, companions) if target.embeds else None
    )
    writing = target.begin(embedded or contents.request)
    request = writing.request
    files = writing.files()
    if not (target.embeds or source.options.state_dict):
        companion_files = output_companions.companion_files(checkpoint, request, companions)
        files += [
            replace(file, path=(PurePath(target.beside) / file.path).as_posix()) for file in companion_files
        ]
    files += _copied_files(source, files)
    facts = output_companions.facts(checkpoint, source.format, request, contents.dropped)
    facts["files"] = sorted(file.path for file in files)
    of_model = model.notes if model else ()
    notes = [*checkpoint.notes, *companions.notes, *source.resolved.notes, *of_model]
    plan = Plan(
        source=checkpoint.format,
        target=source.format.name,
        files=[*files, OutputFile.of_bytes("reshard.json", to_json(facts))],
        tensors=len(request.tensors),
        parameters=contents.parameters,
        dropped=contents.dropped,
        left_out=contents.left_out,
        replicas=contents.replicas,
        notes=[*dict.fromkeys([*notes, *writing.notes(), *contents.notes])],
        warnings=[*(model.warnings if model else source.resolved.warnings), *writing.warnings()],
        facts=facts,
        load_with=writing.load_with(),
        afterwards=[*writing.afterwards()],
        need=contents.memory.plus(writing.memory),
        sources=checkpoint.sources,
        suffix=target.embeds,
        outputs=[*request.tensors, *(state for each in request.states.values() for state in each.values())],
    )
    plan.audit(plan.outputs)
    return plan


def _copied_files(source: PreparedSource, files: list[OutputFile]) -> list[OutputFile]:
    """The files that users want beside the output, unless it has files of these names."""
    planned = {file.path for file in files}
    sources = source.resolved.checkpoint.sources
    return [
        OutputFile.of_bytes(name, sources.read(path))
        for name, path in source.options.beside.items()
        if name not in planned
    ]
