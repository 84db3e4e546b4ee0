"""PaddleNLP and PaddleFormers (without `save_to_hf`): safetensors whose linear weights are [in, out].

The metadata of each file say `np` or `pd`, and config.json is beside, with nearly transformers' keys. Names are the
Hub's, but PaddleNLP begins them with the type of the model (`llama.layers.…`), and stores the head as [in, out], too.
Sources: `_get_name_mappings`, `_get_fuse_or_split_param_mappings` and `base_model_prefix` in
paddlenlp/transformers/*/modeling.py (3.0.0b4), `transpose_weight_keys` and `prepare_safe_save_state_dict` in
paddleformers/transformers (0.4.1, 1.2.0).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from reshard.algebra.tensors import Tensor
from reshard.algebra.views import View
from reshard.base.errors import Problem, ReshardError, listed
from reshard.folders.companion_names import CONFIG
from reshard.folders.iterations import Iteration
from reshard.formats import foreign, huggingface, mlx, safetensors_writers
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.detection import PADDLE, PADDLE_MARKS
from reshard.formats.json_beside import object_beside
from reshard.transfer.source_files import Sources

KNOWN_TYPES = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
    *("deepseek_v2", "deepseek_v3"),
)
"""The types of models whose linear weights are told by the names here."""
EMBEDDING, HEAD = "embed_tokens", ("lm_head", "shared_head.head")
OF_HIDDEN = (
    *("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa", "qkv_proj"),
    *("gate_proj", "up_proj", "gate_up_fused_proj", "up_gate_proj", "w1", "w3", "gate", "shared_expert_gate"),
)
"""The modules that read hidden states: their weights show which axis is which."""
LINEAR = (*OF_HIDDEN, "o_proj", "down_proj", "q_b_proj", "kv_b_proj", "w2", "eh_proj")
FUSED_QKV = re.compile(r"(.+\.)qkv_proj(\.weight|\.bias)")
FUSED_GATE = re.compile(r"(.+\.)(?:gate_up_fused_proj|up_gate_proj)(\.weight|\.bias)")


def open_checkpoint(path: Path, sources: Sources, iteration: Iteration | None = None) -> Checkpoint:
    """Open a folder or a file. Raises ReshardError."""
    if of_ranks := foreign.named_by_a_tool(path):
        raise ReshardError(of_ranks)
    checkpoint = huggingface.open_checkpoint(path, sources, iteration)
    if not safetensors_writers.has(path, *PADDLE_MARKS):
        return mlx.FORMAT.open(path, sources, iteration)
    if _is_plain(checkpoint.tensors, path):
        return checkpoint
    config = _config(checkpoint.description.folder, sources)
    _refuse_unknown(checkpoint, config)
    return replace(
        checkpoint,
        format=PADDLE,
        tensors=_on_hub(checkpoint.tensors, config),
        notes=[*checkpoint.notes, *_rope_notes(config)],
    )


def _config(folder: Path, sources: Sources) -> Mapping[str, Any]:
    """The config beside the weights. Raises ReshardError if the names of its model's weights are not known."""
    config = object_beside(folder, CONFIG, sources) or {}
    if config and config.get("model_type") in KNOWN_TYPES:
        return config
    raise ReshardError(
        "paddle-model-unsupported",
        "reshard does not know which weights of this model Paddle stores as [in, out]",
        file=str(folder / CONFIG),
        rule='safetensors with the format "np" or "pd" in their metadata are Paddle\'s',
        expected=f"model_type {', '.join(KNOWN_TYPES)}",
        found=f"model_type {config.get('model_type')}" if config else f"no {CONFIG} beside the weights",
        remedy="save the model in Hugging Face's format: save_pretrained(…, save_to_hf=True) of PaddleFormers",
    )


def _module(name: str) -> str:
    """The last module in a tensor's name."""
    return name.rpartition(".")[0].rpartition(".")[2]


def _hidden(tensors: Mapping[str, Tensor]) -> int | None:
    """The size of hidden states, which the embedding [vocabulary, hidden] tells."""
    sizes = (
        each.shape[1] for name, each in tensors.items() if _module(name) == EMBEDDING and len(each.shape) == 2
    )
    return next(sizes, None)


def _is_plain(tensors: Mapping[str, Tensor], path: Path) -> bool:
    """Whether the linear weights are [out, in], as other tools may store them with such metadata.

    Square ones do not tell. Raises ReshardError if some are of the one kind, and some of the other.
    """
    hidden = _hidden(tensors)
    shapes = {
        name: each.shape
        for name, each in tensors.items()
        if _module(name) in OF_HIDDEN and len(each.shape) == 2
    }
    turned = [name for name, (first, second) in shapes.items() if first == hidden != second]
    plain = [name for name, (first, second) in shapes.items() if second == hidden != first]
    if not (turned and plain):
        return bool(plain)
    raise ReshardError(
        "paddle-weights-mixed",
        "some linear weights are [in, out], as Paddle stores them, and others are [out, in]",
        tensor=plain[0],
        file=str(path),
        rule="one tool writes all weights alike, and the square ones do not show which it was",
        expected=f"{list(shapes[plain[0]][::-1])}, as {turned[0]} {list(shapes[turned[0]])}",
        found=f"{list(shapes[plain[0]])}, as {listed(plain[1:], 3)}"
        if plain[1:]
        else str(list(shapes[plain[0]])),
        remedy="files of two saves are mixed: save the model again into an empty folder",
    )


def _refuse_unknown(checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
    """Raise ReshardError for matrices of which it is not known whether they are linear weights."""
    known = (*LINEAR, EMBEDDING)
    unknown = [
        name
        for name, each in checkpoint.tensors.items()
        if len(each.shape) > 1
        and not (name.endswith(".weight") and (_module(name) in known or _is_head(name)))
    ]
    if unknown:
        raise ReshardError(
            Problem(
                "paddle-tensor-unknown",
                "reshard does not know whether Paddle stores this weight as [in, out]",
                tensor=name,
                file=checkpoint.tensors[name].file,
                rule=f"the weights of {config['model_type']} have the names of its modules in PaddleNLP",
                found=str(list(checkpoint.tensors[name].shape)),
                remedy="save the model in Hugging Face's format: save_pretrained(…, save_to_hf=True) of PaddleFormers",
            )
            for name in unknown
        )


def _is_head(name: str) -> bool:
    return name.removesuffix(".weight").endswith(HEAD)


def _on_hub(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors under the Hub's names, as it has them."""
    begin = re.compile(rf"{config['model_type']}\.(?=layers\.|embed_tokens\.|norm\.)")
    hidden = _hidden(tensors)
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        is_turned = _module(name) in LINEAR or (_is_head(name) and tensor.shape[-1] != hidden)
        view = tensor.view.permute(1, 0) if is_turned and len(tensor.shape) == 2 else tensor.view
        new = begin.sub("model.", name, count=1)
        renamed |= {each: Tensor(tensor.dtype, part) for each, part in _unfused(new, view, config)}
    return renamed


def _unfused(name: str, view: View, config: Mapping[str, Any]) -> Iterator[tuple[str, View]]:
    """A projection that Paddle may fuse (`fuse_attention_qkv`, `fuse_attention_ffn`), as those that the Hub has."""
    rows, rest = view.shape[0], view.shape[1:]
    if fused := FUSED_QKV.fullmatch(name):
        heads = config["num_attention_heads"]
        groups = config.get("num_key_value_heads") or heads
        size = rows // (heads + 2 * groups)
        of_group = view.reshape(groups, rows // groups, *rest)
        ends = (0, rows // groups - 2 * size, rows // groups - size, rows // groups)
        for part, begin, end in zip("qkv", ends, ends[1:], strict=False):
            yield (
                f"{fused[1]}{part}_proj{fused[2]}",
                of_group[:, begin:end].reshape(groups * (end - begin), *rest),
            )
    elif fused := FUSED_GATE.fullmatch(name):
        yield f"{fused[1]}gate_proj{fused[2]}", view[: rows // 2]
        yield f"{fused[1]}up_proj{fused[2]}", view[rows // 2 :]
    else:
        yield name, view


def _rope_notes(config: Mapping[str, Any]) -> Iterator[str]:
    """What config.json says in keys that transformers does not read."""
    if config.get("rope_scaling_type"):
        yield (
            f"config.json has rope_scaling_type {config['rope_scaling_type']} and rope_scaling_factor "
            f"{config.get('rope_scaling_factor')}, which only PaddleNLP reads: set rope_scaling in the output"
        )
