"""What may have caused the failure in a log: everything that any recogniser finds.

A recogniser looks at the first failure of a log. Which of several is right is decided by `ranking.py` alone, by what
each explains and how specific it is, so their order here means nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from reshard.runs.checks.finding import Finding
from reshard.runs.checks.location import Location
from reshard.runs.checks.rules import covered_by
from reshard.runs.doctor.causes import (
    divisibility,
    gpus_and_ports,
    out_of_memory,
    rank_mismatches,
    shape_mismatches,
    weight_names,
)
from reshard.runs.doctor.causes.advice_in_message import of_reshard, of_setting
from reshard.runs.doctor.causes.api_changes import of_failure
from reshard.runs.doctor.causes.checkpoint_kinds import of_kind
from reshard.runs.doctor.causes.dtype_errors import of_dtypes
from reshard.runs.doctor.causes.fatal_signals import of_exit
from reshard.runs.doctor.causes.import_errors import of_module, of_pair, of_symbol
from reshard.runs.doctor.causes.message_rules import of_message
from reshard.runs.doctor.causes.missing_programs import of_program
from reshard.runs.doctor.causes.package_requirements import of_packages, of_requirement, of_resolver
from reshard.runs.doctor.causes.shadowed_packages import of_shadow
from reshard.runs.doctor.causes.unknown_arguments import of_arguments
from reshard.runs.doctor.entries.matching import of_description, of_entries
from reshard.runs.doctor.ranking import Candidate, Explains, Specificity
from reshard.runs.doctor.text.ended_well import ended_well
from reshard.runs.doctor.text.error_lines import is_error
from reshard.runs.doctor.text.first_failure import first_sign
from reshard.runs.doctor.text.log import Log, Traceback
from reshard.runs.doctor.text.partial_failures import EXIT_STATUS, is_consequence, is_launchers
from reshard.runs.doctor.unknown_failure import of_unknown, of_unseen

Recogniser = Callable[[Traceback, Log], Finding | None]


RECOGNISERS: Mapping[Specificity, frozenset[Recogniser]] = {
    Specificity.CONTENT: frozenset({of_kind, of_reshard}),
    Specificity.NUMBERS: frozenset(
        {
            *(
                shape_mismatches.of_shapes,
                out_of_memory.of_memory,
                gpus_and_ports.of_devices,
                rank_mismatches.of_absent,
                rank_mismatches.of_ssh,
            ),
            *(divisibility.of_divisors, of_arguments, of_exit, of_message),
            of_program,
        }
    ),
    Specificity.HISTORY: frozenset(
        {
            *(of_failure, of_shadow, of_symbol, of_resolver, of_requirement, weight_names.of_names),
            of_dtypes,
        }
    ),
    Specificity.KIND: frozenset(
        {
            *(of_packages, of_module, of_pair, rank_mismatches.of_hang),
        }
    ),
    Specificity.UNKNOWN: frozenset({of_unknown, of_unseen, of_setting}),
}
"""The recognisers, by how closely what they find fits."""


def candidates_of(log: Log) -> list[Candidate]:
    """All candidates for what a log shows."""
    root = first_sign(log)
    found = list(of_entries(log, root))
    if loading := weight_names.of_loading(log):
        place = loading.places[0].line or 0
        covers = frozenset(weight_names.ENTRIES_OF_NAMES)
        explains = Explains.FIRST if root and root.first <= place <= root.end else Explains.WARNING
        found.append(Candidate(loading, explains, Specificity.KIND, place, covers))
    if root is None and not any(each.explains < Explains.WARNING for each in found):
        root = out_of_memory.last_words(log)
    is_told = root is None or not (root.exception or root.frames or is_error(root.said))
    if is_told and not found and not ended_well(log.lines) and (described := of_description(log)):
        found.append(described)
    return [*found, *(_at_first(root, log) if root else ())]


def _at_first(root: Traceback, log: Log) -> Iterator[Candidate]:
    """What explains the first failure. A launcher's, or that of a lost connection, only follows from another one."""
    follows = is_launchers(root) or is_consequence(root) or root.exception == EXIT_STATUS
    place = Location.of(log.name, root.last, root.said)
    for specificity, recognisers in RECOGNISERS.items():
        for recogniser in recognisers:
            if found := recogniser(root, log):
                found = found if found.places else replace(found, places=(place,))
                unknown = specificity is Specificity.UNKNOWN and follows
                explains = Explains.SYMPTOM if unknown else Explains.FIRST
                yield Candidate(found, explains, specificity, root.last, covered_by(found.code))
