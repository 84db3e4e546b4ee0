"""What Megatron-Core adds to a request: sizes padded for the layout, arguments, the converted optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from reshard.algebra.dtypes import BY_NAME, dtype
from reshard.base.errors import ReshardError
from reshard.families.dims import MAX_NUMBER, layer_pattern
from reshard.families.family import ENGINE_TITLES, MCORE, MCORE_BRIDGE
from reshard.families.megatron_flags import flags_not_restored
from reshard.folders import iterations
from reshard.folders.base_hints import RUN_CONFIG
from reshard.folders.iterations import Iteration
from reshard.formats.contract import Request, Writing, stateless
from reshard.formats.megatron.hybrid_layers import HybridLayers, not_computed
from reshard.formats.megatron.mcore import (
    BELOW,
    padded_vocabulary,
    place_of,
    refuse_undeclared,
)
from reshard.formats.megatron.optimizer_states import MegatronOptimizer, is_distributed, new_optimizer
from reshard.formats.megatron.supported_layouts import check_layout, layout_notes
from reshard.formats.megatron.writers import COMPUTED_BY, MODEL_TYPE
from reshard.formats.optimizer import MASTER_STATE
from reshard.formats.options import GPT, HYBRID, LAYER_SPECS, VOCABULARY_UNIT
from reshard.transfer.plan import OutputFile

FLOAT32 = BY_NAME["float32"]
NO_OPTIMIZER = ("--no-load-optim", "--no-load-rng")
LORA = "megatron.bridge.peft.lora.LoRA"


def fit(request: Request) -> Request:
    """The request with layers placed on stages and a padded vocabulary. Raises ReshardError if sizes do not divide."""
    model, dialect = request.declared, _engine(request)
    _refuse_other_model(request, dialect)
    layout = request.layout if model.dims.experts else replace(request.layout, etp=1)
    layout = layout.over(model.dims.layers)
    check_layout(model, layout)
    rows = _padded_rows(request, layout.tp)
    return replace(request, dialect=dialect, model=model.padded(rows), layout=layout)


def _engine(request: Request) -> str:
    """The engine whose names are written. Raises ReshardError if it does not support the family."""
    family, wanted = request.declared.family, request.options.engine
    if wanted and wanted not in family.engines:
        known = [f"--engine {engine}" for engine in family.engines]
        able = " or ".join(ENGINE_TITLES[engine] for engine in family.engines)
        raise ReshardError(
            "convert-megatron-lacks-family" if wanted == MCORE else "convert-family-not-for-engine",
            f"megatron-core's GPTModel does not compute the family {family.name}"
            if wanted == MCORE
            else f"the family {family.name} is not available for {ENGINE_TITLES.get(wanted, wanted)}",
            rule=f"the engine of this family is {ENGINE_TITLES[family.computed_by]}",
            expected=able,
            found=f"--engine {wanted}",
            remedy=f"pass {' or '.join(known)}, or remove --engine",
        )
    return family.engine_for(wanted or request.source.dialect.engine)


def _refuse_other_model(request: Request, dialect: str) -> None:
    """Raise ReshardError for a class that the engine does not have for the model."""
    wanted, family = request.options.megatron_model, request.declared.family.name
    args, within = request.declared.args, request.declared.family.within
    only = HYBRID if layer_pattern(args) else GPT
    if wanted in (None, only):
        return
    lacking = not_computed(args)
    reason = f"HybridModel lacks {lacking}" if lacking else ""
    if only == HYBRID:
        reason = "GPTModel lacks layers of Mamba"
    elif MCORE_BRIDGE in (dialect, request.options.engine):
        reason = f"{ENGINE_TITLES[MCORE_BRIDGE]} builds GPTModel"
    elif within and within.carried:
        reason = "no engine builds a HybridModel with modules besides the language model"
    if reason:
        raise ReshardError(
            "megatron-model-not-available",
            f"this model of the family {family} is not available in the class that was requested",
            expected=f"--megatron-model {only}",
            found=f"--megatron-model {wanted}: {reason}",
            remedy="remove --megatron-model",
            values={"family": family},
        )


def _padded_rows(request: Request, tp: int) -> int:
    """The rows of the embedding. Raises ReshardError if they are more than any model has."""
    unit = _vocabulary_unit(request)
    rows = padded_vocabulary(request.declared.dims.vocab, unit, tp)
    if rows >= MAX_NUMBER:
        raise ReshardError(
            "vocabulary-padded-too-far",
            "the vocabulary would be padded to too many rows",
            expected=f"fewer than {MAX_NUMBER} rows",
            found=f"{rows} rows, a multiple of --vocab-divisible-by {unit} times --tp {tp}",
            remedy="pass a smaller --vocab-divisible-by",
        )
    return rows


def _vocabulary_unit(request: Request) -> int:
    recorded = request.declared.args.get("make_vocab_size_divisible_by")
    return request.options.vocab_divisible_by or int(recorded or VOCABULARY_UNIT)


def _without_needless_masters(request: Request) -> Request:
    """The request without masters for float32 weights, if the optimizer is not distributed: it has none for these."""
    states = dict(request.states)
    if request.optimizer and MASTER_STATE in states and not is_distributed(request.optimizer):
        halves = {tensor.name for tensor in request.tensors if tensor.dtype != FLOAT32}
        states[MASTER_STATE] = {name: state for name, state in states[MASTER_STATE].items() if name in halves}
    return replace(request, states={state: planned for state, planned in states.items() if planned})


class MegatronWriting(Writing):
    """What all formats of Megatron-Core share: arguments, iteration, the converted optimizer, notes."""

    stores_hybrid = False
    """Whether a HybridModel can be written."""

    def __init__(self, request: Request) -> None:
        refuse_undeclared(tensor.name for tensor in request.tensors)
        super().__init__(_without_needless_masters(request))

    @cached_property
    def optimizer(self) -> MegatronOptimizer | None:
        """The source's optimizer for this layout, if its states are converted."""
        if not self.request.states or not self.request.optimizer:
            return None
        return new_optimizer(
            self.request.optimizer,
            self.request.states,
            mixed_precision=self.request.main_dtype != "float32",
            expert_parallel=self.request.layout.ep > 1,
        )

    @cached_property
    def iteration(self) -> Iteration:
        """The iteration of the source, or the step of its optimizer; otherwise a release.

        ms-swift reads any number and nothing else. Megatron-LM and Megatron-Bridge read "release" and numbers above 0,
        and only from a number an optimizer. Source: `_load_iteration` of ms-swift 4.6; `read_metadata` and
        `load_checkpoint` of Megatron-LM core_v0.16.1 and of Megatron-Bridge 0.3.1.
        """
        step = self.request.step
        if self.request.states and self.request.optimizer:
            step = step or self.request.optimizer.step or 1
        return step if step or self._is_for_swift else "release"

    @property
    def _is_for_swift(self) -> bool:
        """Whether ms-swift will load it, with its own names or with those common to all engines."""
        chosen = self.request.options.engine
        return MCORE_BRIDGE in (
            [chosen] if chosen else [self.request.dialect, self.request.source.dialect.engine]
        )

    @cached_property
    def hybrid(self) -> HybridLayers | None:
        """The layers of the HybridModel, if one is written of a model that is a GPTModel inside reshard."""
        wanted = self.request.options.megatron_model
        if wanted == HYBRID and not self.stores_hybrid:
            raise ReshardError(
                "megatron-model-not-in-format",
                "reshard writes HybridModel to torch_dist only",
                found=f"--megatron-model {HYBRID}",
                remedy="pass --to megatron, or remove --megatron-model",
            )
        default = HYBRID if self.stores_hybrid and self.request.source.variant == HYBRID else GPT
        if (wanted or default) == GPT or layer_pattern(self.request.declared.args):
            return None
        return HybridLayers.at(place_of(tensor.name) for tensor in self.request.tensors)

    @property
    def prefix(self) -> str:
        """The prefix of the language model's names: empty, unless the model has other parts."""
        within = self.request.model.family.within if self.request.model else None
        return BELOW if within and within.carried else ""

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The `args` of a checkpoint: those of the model, those of the source's run, and those of the layout."""
        model, layout, main = self.request.declared, self.request.layout, self.request.main_dtype
        layer_spec = self.request.options.transformer_impl or model.args.get("transformer_impl")
        args = {
            **model.args,
            "tensor_model_parallel_size": layout.tp,
            "pipeline_model_parallel_size": layout.pp,
            "virtual_pipeline_model_parallel_size": layout.virtual,
            "expert_model_parallel_size": layout.ep,
            "expert_tensor_parallel_size": layout.etp,
            "context_parallel_size": 1,
            "data_parallel_size": layout.stage_ranks // layout.tp,
            "use_tp_pp_dp_mapping": False,
            "world_size": layout.world_size,
            "rank": 0,
            "sequence_parallel": layout.tp > 1 and model.dims.experts > 0,  # experts require it
            "transformer_impl": layer_spec or LAYER_SPECS[0],
            MODEL_TYPE: model.family.name,
            "params_dtype": dtype(main),
            "bf16": main == "bfloat16",
            "fp16": main == "float16",
        }
        # Engines build the model from the config, and expect the layers as they spell it, whatever the run said.
        if isinstance(spelled := model.family.config.to_args(model.text).get("moe_layer_freq"), list):
            args["moe_layer_freq"] = spelled
        args.pop(COMPUTED_BY, None)
        if not self.request.is_of_megatron_core:
            args[COMPUTED_BY] = self.request.dialect
        if self._is_for_swift and not self.request.states:  # otherwise it looks for them
            args |= {"no_save_optim": True, "no_save_rng": True}
        if self.request.adapter is None:
            args["padded_vocab_size"] = model.dims.padded_vocab
            args["make_vocab_size_divisible_by"] = _vocabulary_unit(self.request)
        if optimizer := self.optimizer:
            args["use_distributed_optimizer"] = optimizer.is_distributed
        return self.hybrid.args(args, layout) if self.hybrid else args

    def load_with(self) -> list[str]:
        """The flags to load the checkpoint with Megatron-LM, in addition to `--load`."""
        if self.request.adapter is not None or not self.request.is_of_megatron_core:
            return []
        flags = self.optimizer.load_with if self.optimizer else self._without_optimizer
        return ["--use-checkpoint-args", *flags, *flags_not_restored(self.arguments)]

    @property
    def _without_optimizer(self) -> Sequence[str]:
        """The flags without which Megatron-LM would look for an optimizer in an iteration; a release has none."""
        return () if self.iteration == "release" else NO_OPTIMIZER

    def notes(self) -> list[str]:
        """Notes on what the engine computes differently, and what the layout requires."""
        model, layout = self.request.declared, self.request.layout
        notes = [*layout_notes(model, layout)]
        if self.request.adapter is not None:
            return notes
        if not self.request.is_of_megatron_core:
            is_mcores = model.family.computed_by == MCORE
            why = "stores it otherwise: --engine mcore" if is_mcores else "has no such model"
            notes.append(
                f"the checkpoint is for {ENGINE_TITLES[self.request.dialect]}; megatron-core's own GPTModel {why}"
            )
        if model.dims.kv_lora and not model.dims.q_lora:
            notes.append("load it with megatron-core 0.18 or earlier: 0.19 adds a norm before linear_q_proj")
        notes += [*model.family.config.notices(model.text), *stateless(self.request)]
        if layout.stages and not self.request.options.layout.stages:
            notes.append(f"layers of the stages: {', '.join(map(str, layout.stages))}")
        return notes

    def run_config(self, settings: Mapping[str, Any]) -> OutputFile:
        """The file that Megatron-Bridge reads to resume: the layout, what was saved, and the adapter's settings."""
        from reshard.base.plain_yaml import to_yaml  # only needed here

        layout = self.request.layout
        content = {
            "model": {
                "tensor_model_parallel_size": layout.tp,
                "pipeline_model_parallel_size": layout.pp,
                "virtual_pipeline_model_parallel_size": layout.virtual,
                "expert_model_parallel_size": layout.ep,
                "hf_model_id": str(self.request.options.base_path),
            },
            "checkpoint": {"save_optim": False, "save_rng": False, "fully_parallel_save": False},
            "peft": {"_target_": LORA, **settings},
        }
        return OutputFile.of_bytes(f"{iterations.name_of(self.iteration)}/{RUN_CONFIG}", to_yaml(content))
