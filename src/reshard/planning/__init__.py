"""Plan a conversion, in stages that each return one value:

ConversionSource   what is converted or merged, and to which format
PreparedSource     the same with its model and its target, in dtypes that the target can store
Contents           a request with all tensors under the target's names
Plan               the files, audited
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from reshard.adapters import checkpoint_kind
from reshard.base.errors import raising_also
from reshard.base.garbage import uncollected
from reshard.formats import huggingface, open_checkpoint, peft
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.contract import CheckpointKind
from reshard.formats.options import ConversionOptions
from reshard.planning import output_companions
from reshard.planning.contents import contents_of
from reshard.planning.conversion_source import conversion_source
from reshard.planning.hub_tensors import HubTensors
from reshard.planning.output_plan import output_plan
from reshard.planning.prepared_source import prepared_source
from reshard.planning.target_options import IS_ADAPTER, with_format
from reshard.transfer.memory_budget import MemoryMeter
from reshard.transfer.plan import Plan
from reshard.transfer.source_files import OnStep, Sources

__all__ = ["IS_ADAPTER", "HubTensors", "plan_conversion", "planned_tensors", "with_format"]


@uncollected()
def plan_conversion(
    path: Path,
    options: ConversionOptions,
    on_step: OnStep = lambda step: None,
    meter: MemoryMeter | None = None,
) -> Plan:
    """Plan the conversion of the checkpoint at `path`. Raises ReshardError.

    `on_step` receives a description of each step. Reads headers and metadata only, and the lora_A of projections that
    may share one, within the limit of `meter`.
    """
    sources = Sources(path, *options.base_paths, meter=meter)
    with sources.counted(on_step):
        checkpoint = open_checkpoint(path, options.iteration, options.strip, sources)
    on_step("planning")
    source = conversion_source(path, checkpoint, options)
    with raising_also(output_companions.lacking(source.checkpoint, source.kind, source.options)):
        return output_plan(prepared_source(source))


@uncollected()
def planned_tensors(checkpoint: Checkpoint, options: ConversionOptions) -> HubTensors:
    """The tensors that a conversion to a Hugging Face folder (for an adapter, to PEFT's) would write.

    No files are planned, and no tokenizer is needed. Raises ReshardError.
    """
    is_model = options.merge or checkpoint_kind(checkpoint) is CheckpointKind.MODEL
    wanted = replace(options, to=huggingface.NAME if is_model else peft.NAME, no_tokenizer=True)
    prepared = prepared_source(conversion_source(checkpoint.path, checkpoint, wanted))
    contents = contents_of(prepared)
    return HubTensors(
        prepared.resolved, contents.request, contents.replicas, contents.memory, contents.dropped
    )
