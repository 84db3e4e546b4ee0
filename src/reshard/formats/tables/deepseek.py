"""The files of DeepSeek's own inference code, which its `inference/convert.py` makes of a Hugging Face folder.

    model0-mp4.safetensors … model3-mp4.safetensors      a file for each model-parallel rank
    config_671B.json                                     `inference/configs/`, if it was copied there

Ranks have parts of the rows or columns of dense weights, and of their scales, and each a block of the experts. Layer
61, which is for multi-token prediction, is left out. Source: `inference/{convert,model}.py` of DeepSeek-V3 and V3.2.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from reshard.algebra.tensors import Tensor
from reshard.base.errors import Problem, ReshardError, raise_all
from reshard.containers.safetensors import read_tensors
from reshard.families.dialect import HUB
from reshard.folders import iterations
from reshard.folders.iterations import Iteration
from reshard.folders.json_objects import read_object
from reshard.formats.checkpoint import Checkpoint, ModelDescription
from reshard.formats.detection import DEEPSEEK, DEEPSEEK_RANK
from reshard.formats.sharding import Split
from reshard.formats.tables.rank_files import COPY_AGAIN, JoinedRanks, files_of_ranks
from reshard.formats.unique_names import under_new_names
from reshard.transfer.source_files import Sources

MTP_NOTE = (
    "DeepSeek's convert.py leaves out layer 61, which is for multi-token prediction: the model has none of it"
)
HUB_MODULES = {
    "embed": ("embed_tokens", 0),
    "attn_norm": ("input_layernorm", None),
    "ffn_norm": ("post_attention_layernorm", None),
    "wq": ("q_proj", 0),
    "wq_a": ("q_a_proj", None),
    "q_norm": ("q_a_layernorm", None),
    "wq_b": ("q_b_proj", 0),
    "wkv_a": ("kv_a_proj_with_mqa", None),
    "kv_norm": ("kv_a_layernorm", None),
    "wkv_b": ("kv_b_proj", 0),
    "wo": ("o_proj", 1),
    "gate": ("gate", None),
    "w1": ("gate_proj", 0),
    "w2": ("down_proj", 1),
    "w3": ("up_proj", 0),
    "norm": ("norm", None),
    "head": ("lm_head", 0),
}
"""What the Hub calls a module, and the axis along which ranks have parts of its weight. Modules of the indexer of V3.2
are the same on both sides, and complete on all ranks."""
NAME_PARTS = {"attn": "self_attn", "ffn": "mlp", "scale": "weight_scale_inv"}
_EXPERT = re.compile(r"layers\.(\d+)\.ffn\.experts\.(\d+)\.")
_INDEXER = "indexer"


def open_checkpoint(path: Path, sources: Sources, iteration: Iteration | None = None) -> Checkpoint:
    """Open the files of all ranks. Raises ReshardError for those that are missing or do not fit."""
    iterations.refuse(path, iteration, "a checkpoint of DeepSeek's inference code")
    folder = path if path.is_dir() else path.parent
    contents = [read_tensors(file, sources) for file in files_of_ranks(folder, DEEPSEEK_RANK, _count(folder))]
    raise_all(_misplaced_problems(contents))
    joined = JoinedRanks(contents, split_of)
    tensors = under_new_names(
        ((name, hub_name(name), tensor) for name, tensor in joined.tensors().items()), path
    )
    settings = _settings(folder, sources) or {}
    config = hub_config(settings, tensors) if settings else None
    unrecorded = set() if "rope_factor" in settings else {"rope_scaling"}
    recorded = config and {key: value for key, value in config.items() if key not in unrecorded}
    return Checkpoint(
        path=path,
        format=DEEPSEEK,
        dialect=HUB,
        tensors=tensors,
        description=ModelDescription(folder, config=config, recorded=recorded),
        replicas=joined.replicas,
        problems=joined.problems,
        notes=[MTP_NOTE] if _layers(tensors) == 61 else [],
        variant=f"{len(contents)} rank{'s' * (len(contents) > 1)}",
    )


def split_of(name: str) -> Split | None:
    """How ranks divide a tensor; experts are on one rank each."""
    module = name.split(".")[-2]
    axis = None if _EXPERT.match(name) or _INDEXER in name else HUB_MODULES.get(module, ("", None))[1]
    return None if axis is None else Split(axis)


def hub_name(name: str) -> str:
    """What the Hub calls a tensor; names that DeepSeek does not have keep their parts."""
    *parts, module, kind = name.split(".")
    if _INDEXER not in parts:
        module = HUB_MODULES.get(module, (module, None))[0]
    if (module, kind) == ("gate", "bias"):
        kind = "e_score_correction_bias"
    whole = [NAME_PARTS.get(part, part) for part in (*parts, module, kind)]
    return ".".join(whole if module == "lm_head" else ("model", *whole))


def _count(folder: Path) -> int:
    """The number of ranks, which all names tell. Raises ReshardError if they tell several."""
    names = [each.name for each in folder.iterdir() if DEEPSEEK_RANK.fullmatch(each.name)]
    counts = {int(match[2]) for name in names if (match := DEEPSEEK_RANK.fullmatch(name))}
    if len(counts) == 1:
        return counts.pop()
    raise ReshardError(
        "deepseek-saves-mixed",
        "the files are of several conversions",
        file=str(folder),
        rule="each file name ends in the number of ranks",
        found=", ".join(f"mp{count}" for count in sorted(counts)),
        remedy="move the files of each conversion into a folder of their own, and pass one",
    )


def _misplaced_problems(contents: list[dict[str, Tensor]]) -> Iterator[Problem]:
    """A problem for each file whose experts are those of another rank, by their numbers."""
    for rank, content in enumerate(contents):
        own = [match for name in content if (match := _EXPERT.match(name))]
        experts = {int(match[2]) for match in own if match[1] == own[0][1]}
        begin = rank * len(experts)
        if experts != {*range(begin, begin + len(experts))}:
            yield Problem(
                "deepseek-rank-misplaced",
                "a file does not have the experts of its rank",
                file=next(iter(content.values())).file,
                rule="each rank has a block of the experts, in the order of the ranks",
                expected=f"experts {begin} to {begin + len(experts) - 1}",
                found=f"experts {min(experts)} to {max(experts)}",
                remedy=COPY_AGAIN,
            )


def _layers(tensors: Mapping[str, Tensor]) -> int:
    numbers = {int(match[1]) for name in tensors if (match := re.match(r"model\.layers\.(\d+)\.", name))}
    return 1 + max(numbers, default=-1)


def _settings(folder: Path, sources: Sources) -> Mapping[str, Any] | None:
    """The config of DeepSeek's inference code in the folder, if there is one only."""
    files = [file for file in sorted(folder.glob("config*.json")) if file.is_file()]
    read = [read_object(file, sources) for file in files]
    configs = [each for each in read if {"dim", "n_layers"} <= each.keys()]
    return configs[0] if len(configs) == 1 else None


DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 102400,
    "dim": 2048,
    "inter_dim": 10944,
    "moe_inter_dim": 1408,
    "n_layers": 27,
    "n_dense_layers": 1,
    "n_heads": 16,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "n_activated_experts": 6,
    "n_expert_groups": 1,
    "n_limited_groups": 1,
    "score_func": "softmax",
    "route_scale": 1.0,
    "q_lora_rank": 0,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "original_seq_len": 4096,
    "rope_theta": 10000.0,
    "rope_factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
}
"""`ModelArgs` in `inference/model.py`."""
CONFIG_KEYS = {
    **{key: key for key in ("vocab_size", "n_routed_experts", "n_shared_experts", "kv_lora_rank")},
    **{key: key for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rope_theta")},
    "hidden_size": "dim",
    "intermediate_size": "inter_dim",
    "moe_intermediate_size": "moe_inter_dim",
    "num_hidden_layers": "n_layers",
    "first_k_dense_replace": "n_dense_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_heads",
    "n_group": "n_expert_groups",
    "num_experts_per_tok": "n_activated_experts",
    "topk_group": "n_limited_groups",
    "scoring_func": "score_func",
    "routed_scaling_factor": "route_scale",
}
INDEXER_KEYS = ("index_n_heads", "index_head_dim", "index_topk")


def hub_config(settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The config.json that the settings of DeepSeek's inference code imply."""
    values = {**DEFAULTS, **settings}
    is_sigmoid = values["score_func"] == "sigmoid"
    indexed = any(f".{_INDEXER}." in name for name in tensors)
    biased = any(name.endswith(".e_score_correction_bias") for name in tensors)
    grouped = "group_limited_greedy" if values["n_expert_groups"] > 1 else "greedy"
    version = "V3" if is_sigmoid or biased else "V2"
    if indexed:
        version = "V32"
    return {
        "model_type": f"deepseek_{version.lower()}",
        "architectures": [f"Deepseek{version}ForCausalLM"],
        **{key: values[own] for key, own in CONFIG_KEYS.items()},
        **({key: values[key] for key in INDEXER_KEYS if key in values} if indexed else {}),
        "q_lora_rank": values["q_lora_rank"] or None,
        "norm_topk_prob": is_sigmoid,
        "topk_method": "noaux_tc" if biased else grouped,
        "moe_layer_freq": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "max_position_embeddings": values["original_seq_len"] * values["rope_factor"],
        "rope_scaling": _yarn(values),
        **_quantization(values, tensors),
    }


def _yarn(settings: Mapping[str, Any]) -> dict[str, Any]:
    same = {"factor": "rope_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow"}
    scales = dict.fromkeys(("mscale", "mscale_all_dim"), "mscale")
    named = {**same, **scales, "original_max_position_embeddings": "original_seq_len"}
    return {"type": "yarn", **{key: settings[own] for key, own in named.items()}}


def _quantization(settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    if not any(name.endswith(".weight_scale_inv") for name in tensors):
        return {}
    scales = {"scale_fmt": settings["scale_fmt"]} if settings.get("scale_fmt") else {}
    kind = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    return {"quantization_config": {**kind, **scales}}
