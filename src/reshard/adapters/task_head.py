"""The head of a classifier or a reward model: PEFT saves it with the adapter, and the base, a language model, lacks it.

transformers then loads the base as `…ForSequenceClassification` or `…ForTokenClassification`, with a head `score` and
without the language model's. Sources: `PeftModelForSequenceClassification` and `PeftModelForTokenClassification` in
`peft_model.py` of PEFT 0.21; `modeling_layers.py` of transformers 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reshard.adapters.adapter import Adapter
from reshard.algebra.tensors import Tensor
from reshard.base.errors import Problem
from reshard.formats.peft import ADAPTER_CONFIG

CLASS_OF_TASK = {"SEQ_CLS": "ForSequenceClassification", "TOKEN_CLS": "ForTokenClassification"}
"""The ends of the classes in transformers, by `task_type` of PEFT."""

_HEADS = ("score.", "classifier.")


def head_of(adapter: Adapter) -> dict[str, Tensor]:
    """The weights of the head that the adapter brings; empty for one of a language model."""
    if adapter.settings.config.get("task_type") not in CLASS_OF_TASK:
        return {}
    return {name: tensor for name, tensor in adapter.whole.items() if name.startswith(_HEADS)}


def head_changes(adapter: Adapter, config: Mapping[str, Any]) -> dict[str, Any]:
    """The values in the merged model's config that differ from those of its base: its class and its labels."""
    labels = [tensor.shape[0] for tensor in head_of(adapter).values() if len(tensor.shape) == 2]
    if not labels:
        return {}
    (architecture, *_) = config.get("architectures") or [""]
    end = CLASS_OF_TASK[adapter.settings.config["task_type"]]
    changes: dict[str, Any] = {"architectures": [f"{architecture.partition('For')[0]}{end}"]}
    if len(config.get("id2label") or ()) != labels[0]:
        names = [f"LABEL_{index}" for index in range(labels[0])]
        changes["id2label"] = {str(index): name for index, name in enumerate(names)}
        changes["label2id"] = {name: index for index, name in enumerate(names)}
    return changes


def head_without_task(name: str, tensor: Tensor, adapter: Adapter) -> Problem | None:
    """The problem of a head of a kind that reshard does not merge; None for any other weight."""
    if not name.startswith((*_HEADS, "qa_outputs.", "v_head.")):
        return None
    return Problem(
        "adapter-head-unsupported",
        "the adapter has a head of its own, and not that of a language model",
        tensor=name,
        file=tensor.file,
        rule=f"heads of {' and '.join(CLASS_OF_TASK.values())} are merged",
        expected=f"task_type {' or '.join(CLASS_OF_TASK)} in {ADAPTER_CONFIG}",
        found=f"task_type {adapter.settings.config.get('task_type')}",
        remedy=f"if it is a classifier or a reward model, write its task_type into {ADAPTER_CONFIG}; otherwise load it "
        "with PEFT, and save the result of merge_and_unload()",
    )
