"""Which tool wrote a Megatron-Core checkpoint, and what it records of model and run as Megatron-LM arguments.

- Megatron-LM keeps all its arguments in `common.pt['args']`.
- ms-swift 4 keeps its own there: the fields of its `MegatronArguments`, which describe the run, including the layout,
  and leave the model to config.json. Source: `save_mcore_checkpoint` in ms-swift 4.6, `megatron/utils`.
- Megatron-Bridge and NeMo 2 keep none: `run_config.yaml` and `context/model.yaml` have the fields of their models.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from reshard.folders.base_hints import RUN_CONFIG, read_run_config
from reshard.formats.megatron import nemo
from reshard.transfer.source_files import Sources

LAYOUT_ARGUMENTS = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size", "context_parallel_size", "world_size"),
    *(
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
        "pipeline_model_parallel_layout",
    ),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
)
"""Arguments that have the same names in ms-swift and Megatron-LM."""

LATER_FIELD = "hf_model_revision"
"""A field of Megatron-Bridge 0.6.2, and not of 0.3.1, whose pairs of a window's sides had the Hub's window size."""

MODEL_TYPE = "hf_model_type"
"""An argument that reshard adds: the family, which the others do not always determine."""

COMPUTED_BY = "computed_by"
"""An argument that reshard adds: the engine of the names, if they are not those of megatron-core's GPTModel."""


def engine_of(folder: Path, common: Mapping[str, Any], names: Iterable[str]) -> str:
    """The engine whose names an iteration folder has: the one that wrote it, or the one that reshard wrote it for.

    The `names` of gated delta nets tell: mcore-bridge saves a projection in one tensor, and Megatron-Core its parts,
    also for Megatron-Bridge.
    """
    kinds = {name.partition(".in_proj.weight")[2] for name in names if ".in_proj.weight" in name}
    if kinds == {""}:
        return "mcore-bridge"
    args = common.get("args")
    if isinstance(args, Namespace):
        usual = "mcore" if kinds or "num_layers" in args else "mcore-bridge"
        return str(getattr(args, COMPUTED_BY, usual))
    return "megatron-bridge" if (folder / RUN_CONFIG).is_file() else "mcore"


def recorded_args(folder: Path, sources: Sources, common: Mapping[str, Any]) -> dict[str, Any]:
    """The Megatron-LM arguments that an iteration folder and its `common.pt` record; empty if there are none."""
    if isinstance(common.get("args"), Namespace):
        args = arguments_of(common["args"])
        if "num_layers" in args:
            return args
        return {name: args[name] for name in LAYOUT_ARGUMENTS if name in args}
    try:
        run_config, of_nemo = read_run_config(folder, sources), nemo.read_model(folder, sources)
    except ValueError:
        return {}  # `inspect` reports that the file cannot be read
    if run_config:
        return args_of_run_config(run_config)
    if of_nemo is None:
        return {}
    fields, family = of_nemo
    return args_of_run_config({"model": fields}) | ({MODEL_TYPE: family} if family else {})


def arguments_of(stored: Namespace) -> dict[str, Any]:
    """The arguments under the names that they have on the command line.

    Since core_v0.16, Megatron-LM stores `--apply-layernorm-1p` under the name of TransformerConfig's field.
    """
    args = dict(vars(stored))
    if args.get("layernorm_zero_centered_gamma"):
        args["apply_layernorm_1p"] = True
    return args


def args_of_run_config(run_config: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron-LM arguments from the `model` section of a `run_config.yaml`.

    The section contains Megatron-Core's config classes and the arguments of GPTModel, whose names are Megatron-LM's
    except for these few. Values that are not plain data (functions, dtypes) are left out, and so are attributes that
    are not fields of the provider's class: of YaRN, nothing is saved. Source: `gpt_oss_bridge.py`, `mistral_bridge.py`
    and `gpt_provider.py` of Megatron-Bridge 0.3.1.
    """
    model = _mapping(run_config.get("model"))
    fields = {**model, **_mapping(model.get("transformer"))}
    args = {name: value for name, value in fields.items() if not isinstance(value, Mapping)}
    for field, arg in (
        ("num_moe_experts", "num_experts"),
        ("layernorm_zero_centered_gamma", "apply_layernorm_1p"),
        ("rope_scaling", "use_rope_scaling"),
        ("seq_len_interpolation_factor", "rotary_seq_len_interpolation_factor"),
    ):
        if field in args:
            args[arg] = args.pop(field)
    args |= _activation(args.pop("gated_linear_unit", None), _function_name(fields.get("activation_func")))
    if "share_embeddings_and_output_weights" in args:
        args["untie_embeddings_and_output_weights"] = not args.pop("share_embeddings_and_output_weights")
    if "num_query_groups" in args:
        args["group_query_attention"] = args["num_query_groups"] is not None
    match args.get(
        "window_size"
    ):  # the Hub's, which includes the token itself, but for pairs of later releases
        case [int(left), 0] if left > 0 and LATER_FIELD not in fields:
            args["window_size"] = (left - 1, 0)
        case int(left) if left > 0:
            args["window_size"] = (left - 1, 0)
    if (
        args.get("position_embedding_type") == "yarn"
    ):  # gpt-oss: values that are not saved are as Megatron-Bridge sets them
        args = {name: value for name, value in args.items() if name != "rotary_scaling_factor" or value}
        args.setdefault("yarn_correction_range_round_to_int", False)
    return args


def _activation(gated: Any, function: str | None) -> dict[str, Any]:
    """Megatron-LM's arguments for an MLP's activation. Other gate functions have no arguments of their own."""
    if gated is None:
        return {}
    if not gated:
        return {"swiglu": False, "squared_relu": function == "squared_relu"}
    kind = {None: "swiglu", "silu": "swiglu", "quick_gelu": "quick_geglu"}.get(function, "gated_linear_unit")
    return {"swiglu": False, kind: True}


def _mapping(value: Any) -> Mapping[str, Any]:
    """A section of the file; empty if it is not a section."""
    return value if isinstance(value, Mapping) else {}


def _function_name(function: Any) -> str | None:
    """The name of a function, from `{_target_: package.module.name, _call_: false}`."""
    target = function.get("_target_") if isinstance(function, Mapping) else None
    return str(target).rpartition(".")[2] if target else None
