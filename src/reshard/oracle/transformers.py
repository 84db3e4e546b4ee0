"""The transformers oracle: what Hugging Face's own code computes from a Hugging Face folder.

Loading is strict: a tensor that is missing, unexpected or of another shape is an error, although
`from_pretrained` would only warn and continue with random numbers. Only one without elements (the shared experts, if
there are 0) may be missing. Code in a folder is never run.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.base.errors import Problem, ReshardError, raise_all
from reshard.model.model_heads import head_of

Logits = npt.NDArray[np.float32]
LOADING_RULE = "strict loading by transformers"

GPU_KERNELS = ("causal_conv1d", "fla", "mamba_ssm")
"""Packages that transformers, if it finds them, prefers to its own code even for weights on a CPU."""


def transformers_logits(path: str | Path, tokens: npt.NDArray[np.int64], *, dtype: str = "float32") -> Logits:
    """Logits [batch, seq, vocab] of the model in `path` for `tokens` [batch, seq]: CPU, eager attention.

    The weights are cast to `dtype` before anything is computed. Raises ReshardError if transformers does not
    implement the model, or if the folder does not contain exactly its tensors.
    """
    import torch

    model = load_model(path, dtype=dtype)
    with torch.inference_mode():
        logits = model(input_ids=torch.from_numpy(tokens), use_cache=False).logits
    result: Logits = logits.float().numpy()
    return result


def generate(path: str | Path, prompt: str, max_new_tokens: int = 32) -> str:
    """The greedy continuation of `prompt` by the model and the tokenizer in `path`, without the prompt."""
    import torch
    from transformers import AutoTokenizer

    model = load_model(path)
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    text: str = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


def load_model(path: str | Path, *, dtype: str = "float32") -> Any:
    """The `PreTrainedModel` in `path`, in evaluation mode.

    Raises ReshardError unless the tensors in the folder are exactly those that the model needs.
    """
    import torch

    model, absent = _load_model(path, torch_dtype=getattr(torch, dtype), attn_implementation="eager")
    with torch.no_grad():
        for name in absent:
            model.get_parameter(name).zero_()
    return model.eval()


def assert_loads(path: str | Path) -> None:
    """Load a folder strictly on the meta device: only names and shapes are checked, and weights take no memory.

    Raises ReshardError unless the tensors in the folder are exactly those that the model needs.
    """
    _load_model(path, device_map="meta")


def auto_class(settings: Mapping[str, Any]) -> Any:
    """transformers' class for the models of a config: by its head, for images and texts, or for a language model."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as SEEING

    head = head_of(settings)
    sees = SEEING.get(settings.get("model_type")) in (settings.get("architectures") or ())
    return getattr(transformers, f"AutoModel{head or ('ForImageTextToText' if sees else 'ForCausalLM')}")


def _load_model(path: str | Path, **how: Any) -> tuple[Any, set[str]]:
    """The model of a folder, and those of its parameters that may be missing from the folder."""
    settings = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    kind = auto_class(settings)
    config = _config(path, settings)
    try:
        with _quiet(), _no_gpu_kernels():
            model, info = kind.from_pretrained(
                path,
                config=config,
                ignore_mismatched_sizes=True,  # so that _refuse reports all of them
                output_loading_info=True,
                local_files_only=True,
                trust_remote_code=False,
                **how,
            )
    except RuntimeError as error:  # transformers 5 cannot merge experts if a part is missing
        raise ReshardError(
            "logits-weights-not-merged",
            "transformers cannot put the weights together",
            file=str(path),
            rule=LOADING_RULE,
            found=str(error),
        ) from error
    _refuse_constant_limit(path, settings, model)
    absent = _biases_that_only_llama_has(settings, info["missing_keys"])
    empty = {name for name, tensor in model.state_dict().items() if not tensor.numel()}
    _refuse(path, settings, {**info, "missing_keys": set(info["missing_keys"]) - absent - empty})
    return model, absent


def _config(path: str | Path, settings: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    if settings.get("model_type") == "internlm3":
        return _internlm3_as_llama(settings)
    if settings.get("model_type") == "mimo":
        return _mimo_as_qwen2(settings)
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except ValueError as error:
        raise ReshardError(
            "transformers-lacks-model",
            "transformers does not implement this model",
            file=str(Path(path) / "config.json"),
            found=f"model_type {settings.get('model_type')!r}",
            remedy="install a newer transformers, or verify without --logits",
        ) from error


def _mimo_as_qwen2(settings: Mapping[str, Any]) -> Any:
    """The Qwen2 config of a MiMo, whose remote code is Qwen2's plus the multi-token-prediction layers.

    Source: modeling_mimo.py of XiaomiMiMo/MiMo-7B-Base.
    """
    from transformers import Qwen2Config

    own = ("model_type", "auto_map", "architectures")
    return Qwen2Config(**{key: value for key, value in settings.items() if key not in own})


def _internlm3_as_llama(settings: Mapping[str, Any]) -> Any:
    """The Llama config of an InternLM3, whose remote code computes the same as Llama.

    Its `qkv_bias` and `bias` (o_proj and MLP) are Llama's `attention_bias` (q, k, v and o) and `mlp_bias`, the names
    under which transformers saves them. Source: configuration_internlm3.py and modeling_internlm3.py of
    internlm/internlm3-8b-instruct.
    """
    from transformers import LlamaConfig

    own = ("model_type", "auto_map", "architectures", "qkv_bias", "bias", "attention_bias", "mlp_bias")
    qkv_bias, bias = (
        any(settings.get(key) for key in keys)
        for keys in (("qkv_bias", "attention_bias"), ("bias", "mlp_bias"))
    )
    renamed = {key: value for key, value in settings.items() if key not in own}
    return LlamaConfig(**renamed, attention_bias=qkv_bias or bias, mlp_bias=bias)


def _biases_that_only_llama_has(settings: Mapping[str, Any], missing: set[str]) -> set[str]:
    """Biases of the Llama model that InternLM3 does not declare; they count as zero."""
    if settings.get("model_type") != "internlm3":
        return set()
    declared = {"q_proj": "qkv_bias", "k_proj": "qkv_bias", "v_proj": "qkv_bias", "o_proj": "bias"}
    return {
        name
        for name in missing
        if name.endswith(".bias") and not settings.get(declared.get(name.split(".")[-2], ""), True)
    }


def _refuse(path: str | Path, settings: Mapping[str, Any], info: Mapping[str, Any]) -> None:
    """Raise one ReshardError for everything that `output_loading_info` reports."""
    file = str(path)
    problems = [
        Problem(
            "logits-tensor-missing",
            "the model needs a tensor that is not there",
            tensor=name,
            file=file,
            rule=LOADING_RULE,
        )
        for name in sorted(info["missing_keys"])
    ]
    problems += [
        Problem(
            "logits-tensor-unexpected",
            "the model has no place for a tensor",
            tensor=name,
            file=file,
            rule=LOADING_RULE,
        )
        for name in sorted(info["unexpected_keys"])
        if not _is_mtp(name, settings)
    ]
    problems += [
        Problem(
            "logits-tensor-shape-differs",
            "a tensor has the wrong shape",
            tensor=name,
            file=file,
            rule=LOADING_RULE,
            expected=str(list(expected)),
            found=str(list(stored)),
        )
        for name, stored, expected in sorted(info["mismatched_keys"])
    ]
    problems += [
        Problem("logits-loading-failed", message, file=file, rule=LOADING_RULE)
        for message in info.get("error_msgs", [])
    ]
    raise_all(problems)


def _refuse_constant_limit(path: str | Path, settings: Mapping[str, Any], model: Any) -> None:
    """Raise ReshardError if gpt-oss's activations are clamped at 7, whatever its config says.

    transformers 5.12 has this constant, 5.24 reads the config.
    """
    limit = settings.get("swiglu_limit")
    limits = {module.limit for module in model.modules() if hasattr(module, "limit")}
    if limit is not None and limits - {limit}:
        raise ReshardError(
            "transformers-ignores-limit",
            "this version of transformers computes with another swiglu_limit",
            file=str(Path(path) / "config.json"),
            expected=str(limit),
            found=", ".join(map(str, sorted(limits))),
            remedy="install a newer transformers, or verify without --logits",
        )


def _is_mtp(name: str, settings: Mapping[str, Any]) -> bool:
    """Whether `name` belongs to a multi-token-prediction layer: most are numbered after the last decoder layer.

    transformers leaves these layers out of the causal model, so they do not affect its logits.
    """
    match = re.match(r"model\.(mtp_)?layers\.(\d+)\.", name)
    first = 0 if match and match[1] else settings["num_hidden_layers"]
    return match is not None and int(match[2]) in range(
        first, first + settings.get("num_nextn_predict_layers", 0)
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Disable progress bars and warnings: what they would report is raised as an error."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def _no_gpu_kernels() -> Iterator[None]:
    """Hide `GPU_KERNELS`, which transformers looks for when it imports and builds a model."""
    imported = {name: sys.modules[name] for name in GPU_KERNELS if name in sys.modules}
    sys.modules.update(dict.fromkeys(GPU_KERNELS))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in GPU_KERNELS:
            del sys.modules[name]
        sys.modules.update(imported)
