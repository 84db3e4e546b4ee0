"""Tensor names of OLMo-core: `step<N>/` with `model_and_optim/`, `config.json` and `train/`.

Names do not show where the norms are, so config.json of the step is needed (`olmo_core_config.py`). Sources: the
modules and `nn/hf/convert.py` of OLMo-core 3.0.0, and checkpoints that it wrote.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from reshard.algebra.tensors import Tensor
from reshard.algebra.views import View
from reshard.base.errors import UNUSABLE, Problem, ReshardError, raise_all, type_and_message
from reshard.base.merged_problems import one_for_all
from reshard.folders.companion_names import CONFIG
from reshard.folders.json_objects import read_object
from reshard.formats.checkpoint import Checkpoint
from reshard.formats.dcp.olmo_core_config import OlmoModel

EMBEDDING, HEAD = "embeddings.weight", "lm_head.w_out.weight"
_ENDS = {
    EMBEDDING: "model.embed_tokens.weight",
    "lm_head.norm.weight": "model.norm.weight",
    HEAD: "lm_head.weight",
}
_BLOCK = re.compile(r"blocks\.(\d+)\.")
_ROUTER = "feed_forward_moe.router"
_SPELLINGS = {
    "attention.w_q": "self_attn.q_proj",
    "attention.w_k": "self_attn.k_proj",
    "attention.w_v": "self_attn.v_proj",
    "attention.w_out": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    _ROUTER: "mlp.gate",
}
_BEFORE = {"attention_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm"}
_AFTER = {"attention_norm": "post_attention_layernorm", "feed_forward_norm": "post_feedforward_layernorm"}
"""Norms of the inputs of attention and MLP, and norms of their outputs."""
_EXPERTS = re.compile(r"feed_forward_moe\.experts\.mlp\.(w[123])")
_PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def in_its_dialect(checkpoint: Checkpoint) -> Checkpoint | None:
    """The checkpoint under the Hub's names, with the config of the Hub's model; None if its names are others'.

    Raises ReshardError if there is no such model, or if config.json is missing or of another model.
    """
    if EMBEDDING not in checkpoint.tensors or not any(map(_BLOCK.match, checkpoint.tensors)):
        return None
    file, content = _config_of(checkpoint)
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    try:
        model = OlmoModel(content, most=len(shapes))
        raise_all(model.unsupported(file) or _differences(model, shapes, file))
        config = model.config()
    except UNUSABLE as error:
        raise ReshardError(
            "olmo-core-config-unreadable",
            "the config of OLMo-core cannot be read",
            file=str(file),
            expected="what its config saver writes, with the sizes of the model",
            found=type_and_message(error),
            remedy="copy it again from where it was saved",
        ) from error
    return replace(
        checkpoint,
        tensors=_hub_tensors(model, checkpoint.tensors),
        # A base may be of another size, and only have the same tokenizer.
        description=replace(checkpoint.description, config=config, changes=config),
        optimizer=checkpoint.optimizer.changed(partial(_hub_tensors, model)),
        notes=[*checkpoint.notes, *model.notes()],
    )


def _config_of(checkpoint: Checkpoint) -> tuple[Path, Mapping[str, Any]]:
    """The config.json of a step, beside the folder of the weights or in it."""
    for folder in (checkpoint.path.parent, checkpoint.path):
        file = folder / CONFIG
        content = read_object(file, checkpoint.sources) if file.is_file() else {}
        if isinstance(content.get("model"), Mapping):
            return file, content
    raise ReshardError(
        "olmo-core-without-config",
        "config.json of OLMo-core is missing, and names do not show where the norms are",
        file=str(checkpoint.path),
        expected="config.json beside the folder of the weights, with a model in it",
        remedy="copy config.json of the step (step<N>/config.json) there, and pass the folder of the step",
    )


def _hub_tensors(model: OlmoModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the Hub's names, with experts one by one."""
    spellings = {**_SPELLINGS, **(_AFTER if model.is_reordered else _BEFORE)}
    result = {}
    for name, tensor in tensors.items():
        block = _BLOCK.match(name)
        if block is None:
            result[_ENDS[name]] = tensor
            continue
        inner, layer = name[block.end() :], f"model.layers.{block[1]}."
        if match := _EXPERTS.fullmatch(inner):
            module = _PROJECTIONS[match[1]]
            for expert, view in enumerate(_each_expert(model, match[1], tensor)):
                result[f"{layer}mlp.experts.{expert}.{module}.weight"] = Tensor(tensor.dtype, view)
        else:
            module = inner.removesuffix(".weight")
            result[f"{layer}{spellings[module]}.weight"] = (
                _router(model, tensor) if module == _ROUTER else tensor
            )
    return result


def _each_expert(model: OlmoModel, name: str, tensor: Tensor) -> Iterator[View]:
    """The weight of each expert, [outputs, inputs]."""
    for view in tensor.view.reshape(*_of_experts(model, name)).unstacked():
        yield view if model.is_dropless and name != "w2" else view.permute(1, 0)


def _of_experts(model: OlmoModel, name: str) -> tuple[int, int, int]:
    """The shape of a weight of all experts, whose first two axes are one in OLMo-core."""
    ffn = model.moe["hidden_size"]
    turned = name == "w2" or model.is_dropless
    return (model.moe["num_experts"], *((ffn, model.width) if turned else (model.width, ffn)))


def _router(model: OlmoModel, tensor: Tensor) -> Tensor:
    """A router, which is flat in OLMo-core."""
    return Tensor(tensor.dtype, tensor.view.reshape(model.moe["num_experts"], model.width))


def _sizes(model: OlmoModel) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The weights of a layer and their shapes."""
    width, attention = model.width, model.attention
    heads, groups, size = model.heads, model.groups, model.head_dim
    for name, rows in (("w_q", heads), ("w_k", groups), ("w_v", groups)):
        yield f"attention.{name}.weight", (rows * size, width)
    yield "attention.w_out.weight", (width, heads * size)
    if attention.get("qk_norm"):
        by_head = bool(attention.get("use_head_qk_norm"))
        yield "attention.q_norm.weight", (size if by_head else heads * size,)
        yield "attention.k_norm.weight", (size if by_head else groups * size,)
    yield from ((f"{norm}.weight", (width,)) for norm in _AFTER)
    if model.moe:
        yield f"{_ROUTER}.weight", (model.moe["num_experts"] * width,)
        for name in _PROJECTIONS:
            experts, rows, columns = _of_experts(model, name)
            yield f"feed_forward_moe.experts.mlp.{name}", (experts * rows, columns)
    else:
        ffn = model.block["feed_forward"]["hidden_size"]
        for name, shape in (("w1", (ffn, width)), ("w2", (width, ffn)), ("w3", (ffn, width))):
            yield f"feed_forward.{name}.weight", shape


def _differences(model: OlmoModel, have: Mapping[str, tuple[int, ...]], file: Path) -> list[Problem]:
    """A problem for each tensor that only one of checkpoint and config has, or whose shapes differ."""
    vocab = model.content["vocab_size"]
    wanted = {
        EMBEDDING: (vocab, model.width),
        "lm_head.norm.weight": (model.width,),
        HEAD: (vocab, model.width),
    }
    for layer in range(len(model.blocks)):
        wanted |= {f"blocks.{layer}.{name}": shape for name, shape in _sizes(model)}
    problems = (
        Problem(
            "olmo-core-config-differs",
            "the checkpoint and config.json of OLMo-core are not of the same model",
            tensor=name,
            file=str(file),
            expected=str(list(wanted[name])) if name in wanted else "no such tensor",
            found=str(list(have[name])) if name in have else "nothing",
            remedy="copy the step again, with its own config.json",
        )
        for name in sorted({name for name, _ in wanted.items() ^ have.items()})
    )
    return one_for_all(problems, have.keys() | wanted.keys(), str(file))
