"""What NeMo records of a model beside Megatron-Core's torch_dist: the model and its tokenizer.

    <run>--val_loss=…-step=…/weights/     NeMo 2: torch_dist whose keys begin with `module.`
                             context/     model.yaml, nemo_tokenizer/, io.json
    model_weights/, model_config.yaml     NeMo 1, an unpacked `.nemo` archive: keys begin with `model.`

`model.yaml` names the class of the model, and states the fields of its config, which are those of Megatron-Core's
TransformerConfig and GPTModel. It may leave out fields that have the class's own default; then it does not describe the
model. `io.json` has pickled leaves, and is not read. Sources: `lightning/ckpt_utils.py`, `lightning/io/mixin.py` and
`collections/llm/gpt/model` of NeMo 2.0 to 2.5; `core/connectors/save_restore_connector.py` of NeMo 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reshard.families.rope import LLAMA3_DEFAULTS
from reshard.folders.base_hints import read_yaml
from reshard.formats.megatron import nemo_1
from reshard.transfer.source_files import Sources

CONTEXT, MODEL, TOKENIZER = "context", "model.yaml", "nemo_tokenizer"

FAMILY_OF_CLASS = {
    "LlamaModel": "llama",
    "MistralModel": "mistral",
    "MixtralModel": "mixtral",
    "Qwen2Model": "qwen2",
    "GemmaModel": "gemma",
    "Gemma2Model": "gemma2",
    "NemotronModel": "nemotron",
    "Phi3Model": "phi3",
    "Baichuan2Model": "baichuan",
    "GPTOSSModel": "gpt_oss",
}
"""The family of each class of models that has only one; of others, the tensors determine it."""

REQUIRED_KEYS = (
    *(
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "rotary_base",
    ),
    *("layernorm_epsilon", "gated_linear_unit", "share_embeddings_and_output_weights", "seq_length"),
)
"""Fields without which no config.json can be derived."""

_LLAMA3 = {"low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor"} | {
    "old_context_len": "original_max_position_embeddings"
}
"""Fields of Llama31Config that Megatron-Core fixes, under their names in a config.json."""


def read_model(folder: Path, sources: Sources) -> tuple[dict[str, Any], str | None] | None:
    """The fields of the model's config for the weights in `folder`, and its family, if the class has only one.

    None if there is neither `model.yaml` nor NeMo 1's config, or if it leaves out fields. Raises ValueError if it
    cannot be read.
    """
    path = folder.parent / CONTEXT / MODEL
    if not path.is_file():
        fields_of_1 = nemo_1.read_config(folder, sources)
        return (fields_of_1, None) if fields_of_1 else None
    model = read_yaml(path, sources)
    config = model.get("config")
    if not isinstance(config, Mapping) or any(config.get(name) is None for name in REQUIRED_KEYS):
        return None
    fields = dict(config)
    if (factor := fields.pop("scale_factor", None)) is not None:
        if any(
            fields.get(name, LLAMA3_DEFAULTS[key]) != LLAMA3_DEFAULTS[key] for name, key in _LLAMA3.items()
        ):
            return None
        fields |= {"rope_scaling": True, "rope_scaling_factor": factor}
    called = str(model.get("_target_")).rpartition(".")[2]
    return fields, FAMILY_OF_CLASS.get(called)
