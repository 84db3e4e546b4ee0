"""The config of OLMo-core: which model of the Hub computes the same, and its config.json.

Blocks with norms of outputs are OLMo 2's; with windows in some layers, OLMo 3's; with experts, FlexOlmo's. Blocks with
norms of inputs are Llama's, or Qwen3's if queries and keys are normalised by head. Any other setting that changes what
is computed is refused, and so is one that is not known here. Sources: `nn/hf/config.py`, `nn/transformer/config.py`
and the configs of all modules in OLMo-core 3.0.0; configs that 1.8, 2.1 and 2.3 wrote.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from reshard.base.errors import Problem


class _ConfigSection(NamedTuple):
    """The settings in a part of the config.

    `fixed` have only these values in the Hub's model; None is a setting that is not there. `used` are read here, and
    `ignored` do not change what is computed. Any other setting must be off.
    """

    fixed: Mapping[str, tuple[Any, ...]]
    used: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()

    def unlike(self, where: str, settings: Any) -> Iterator[tuple[str, str]]:
        """Each setting that no model of the Hub has, and what it must be."""
        if not isinstance(settings, Mapping):
            yield f"{where}={reprlib.repr(settings)}", "settings"
            return
        for key, values in self.fixed.items():
            if settings.get(key) not in values:
                yield f"{where}.{key}={reprlib.repr(settings.get(key))}", " or ".join(map(repr, values))
        for key in settings.keys() - {*self.fixed, *self.used, *self.ignored, "_CLASS_", "dtype"}:
            if settings[key] not in (None, False):
                yield f"{where}.{key}={reprlib.repr(settings[key])}", "a setting that is known"


_MODEL = _ConfigSection(
    {
        "name": ("default", "moe", None),
        "embed_scale": (None, 1.0),
        "embedding_norm": (None,),
        "block_pattern": (None,),
    },
    ("d_model", "vocab_size", "n_layers", "block", "block_overrides", "lm_head", "tie_word_embeddings"),
    (
        *("init_method", "init_seed", "init_std", "init_device", "embedding_init_std", "freeze_params"),
        *("compile", "dp_config", "tp_config", "ac_config", "float8_config"),
    ),
)
_BLOCKS = _ConfigSection(
    {
        "name": ("reordered_norm", "moe_reordered_norm", "default", None),
        "attention_residual_alpha": (None, 1.0),
        "feed_forward_residual_alpha": (None, 1.0),
    },
    ("sequence_mixer", "attention", "layer_norm", "feed_forward", "feed_forward_moe"),
    ("dropout", "init_device"),
)
_ATTENTION = _ConfigSection(
    {"name": ("default", None), "type": ("attention", None), "bias": (False,)},
    ("n_heads", "n_kv_heads", "head_dim", "rope", "qk_norm", "use_head_qk_norm", "sliding_window"),
    (
        *("dropout", "use_flash", "backend", "use_recompute_qkv_prep", "mxfp8_save_qkv_for_backward"),
        *("mxfp8_projections", "mxfp8_qkv_projection", "mxfp8_out_projection"),
    ),
)
_ROPE = _ConfigSection(
    {"name": ("default", None), "partial_rotary_factor": (1.0, None)},
    ("theta", "scaling"),
    ("full_precision",),
)
_NORM = _ConfigSection(
    {
        "name": ("rms", "fused_rms", "qwen_rms", "cute_rms"),
        "bias": (False,),
        "elementwise_affine": (True, None),
    },
    ("eps",),
    ("full_precision",),
)
_MLP = _ConfigSection(
    {"name": ("default", None), "bias": (False,), "activation": ("silu", None)}, ("hidden_size",)
)
_HEAD = _ConfigSection(
    {"name": ("default", None), "bias": (False,)}, ("layer_norm",), ("loss_implementation",)
)
_MOE = _ConfigSection(
    {"name": ("default", "dropless", None)},
    ("num_experts", "hidden_size", "router"),
    (
        *("capacity_factor", "lb_loss_weight", "lb_loss_granularity", "z_loss_weight"),
        "scale_loss_by_num_layers",
    ),
)
_ROUTER = _ConfigSection(
    {"name": ("default", None), "gating_function": ("softmax", None)}, ("top_k",), ("jitter_eps",)
)


@dataclass(frozen=True)
class OlmoModel:
    """A model of OLMo-core, by the content of a config.json. Layers beyond `most` are not looked at."""

    saved: Mapping[str, Any]
    most: int

    @cached_property
    def content(self) -> Mapping[str, Any]:
        """The section on the model."""
        return dict(self.saved["model"])

    @property
    def width(self) -> int:
        return int(self.content["d_model"])

    @property
    def heads(self) -> int:
        return int(_positive(self.attention["n_heads"]))

    @property
    def groups(self) -> int:
        return int(self.attention.get("n_kv_heads") or self.heads)

    @property
    def head_dim(self) -> int:
        return int(self.attention.get("head_dim") or self.width // self.heads)

    @property
    def is_dropless(self) -> bool:
        """Whether experts take all their tokens; their weights then have other shapes."""
        return bool(self.moe.get("name") == "dropless")

    @cached_property
    def block(self) -> Mapping[str, Any]:
        """The settings of most blocks. Older releases have another name for those of its attention."""
        return _attention_renamed(self.content["block"])

    @cached_property
    def blocks(self) -> list[Mapping[str, Any]]:
        """The settings of each block."""
        others = self.content.get("block_overrides") or {}
        layers = range(min(self.content["n_layers"], self.most))
        return [
            _attention_renamed(others[str(layer)]) if str(layer) in others else self.block for layer in layers
        ]

    @property
    def attention(self) -> Mapping[str, Any]:
        return dict(self.block["sequence_mixer"])

    @property
    def moe(self) -> Mapping[str, Any]:
        return dict(self.block.get("feed_forward_moe") or {})

    @property
    def is_reordered(self) -> bool:
        """Whether norms are those of the outputs of attention and MLP."""
        return "reordered_norm" in (self.block.get("name") or "")

    @cached_property
    def windows(self) -> list[int | None]:
        """The window of each layer, None for full attention: `SlidingWindowAttentionConfig`."""
        window, layers = self.attention.get("sliding_window"), self.content["n_layers"]
        if not window:
            return [None] * len(self.blocks)
        first, last = (
            window.get(f"force_full_attention_on_{which}_layer", True) for which in ("first", "last")
        )
        windows: list[int | None] = []
        for layer in range(len(self.blocks)):
            size = window["pattern"][(layer - bool(first)) % len(window["pattern"])]
            full = size == -1 or (first and layer == 0) or (last and layer == layers - 1)
            windows.append(None if full else int(size))
        return windows

    @cached_property
    def model_type(self) -> str:
        if self.moe:
            return "flex_olmo"
        if self.is_reordered:
            return "olmo3" if any(self.windows) else "olmo2"
        return "qwen3" if self.attention.get("qk_norm") else "llama"

    def unsupported(self, file: Path) -> list[Problem]:
        """A problem for each setting that no model of the Hub computes."""
        return [
            Problem(
                "olmo-core-setting-unsupported",
                "a setting of OLMo-core has no equivalent in a Hugging Face model",
                file=str(file),
                rule="the Hub's model must compute the same from these weights",
                expected=wanted,
                found=setting,
                remedy="convert it with OLMo-core's own src/examples/huggingface/convert_checkpoint_to_hf.py, "
                "which supports more models",
            )
            for setting, wanted in self._unsupported_settings()
        ]

    def _unsupported_settings(self) -> Iterator[tuple[str, str]]:
        yield from _MODEL.unlike("model", self.content)
        yield from _HEAD.unlike("model.lm_head", self.content.get("lm_head"))
        if not isinstance(self.content.get("block"), Mapping) or "sequence_mixer" not in self.block:
            yield f"model.block={reprlib.repr(self.content.get('block'))}", "settings of one kind of block"
            return
        if bool(self.moe) != (self.block.get("name") == "moe_reordered_norm"):
            yield (
                f"model.block.name={self.block.get('name')!r}",
                "moe_reordered_norm for experts, and only then",
            )
        yield from self._unlike_in_block()
        if not isinstance(self.attention.get("rope"), Mapping):
            return
        for layer, block in enumerate(self.blocks):
            if _without_scaling(block) != _without_scaling(self.block):
                yield f"model.block_overrides.{layer}", "the same block, but for the scaling of its rope"
        eps = {repr(norm.get("eps")) for _, norm in self._norms() if isinstance(norm, Mapping)}
        if len(eps) != 1 or "None" in eps:
            yield f"eps of norms: {', '.join(sorted(eps))}", "the same for all"
        yield from self._unlike_in_layers()

    def _unlike_in_block(self) -> Iterator[tuple[str, str]]:
        block, attention = self.block, self.attention
        yield from _BLOCKS.unlike("model.block", block)
        yield from _ATTENTION.unlike("model.block.sequence_mixer", attention)
        yield from _ROPE.unlike("model.block.sequence_mixer.rope", attention.get("rope"))
        for where, norm in self._norms():
            yield from _NORM.unlike(where, norm)
        if self.moe:
            yield from _MOE.unlike("model.block.feed_forward_moe", self.moe)
            yield from _ROUTER.unlike("model.block.feed_forward_moe.router", self.moe.get("router"))
        else:
            yield from _MLP.unlike("model.block.feed_forward", block.get("feed_forward"))
        by_head, normed = bool(attention.get("use_head_qk_norm")), bool(attention.get("qk_norm"))
        if (normed or self.is_reordered) and by_head == self.is_reordered:
            wanted = "all heads at once after attention (OLMo 2), or by head before it (Qwen3)"
            yield f"qk_norm={normed}, use_head_qk_norm={by_head}", wanted

    def _norms(self) -> Iterator[tuple[str, Any]]:
        head, attention = self.content.get("lm_head"), self.attention
        yield "model.lm_head.layer_norm", head.get("layer_norm") if isinstance(head, Mapping) else None
        yield "model.block.layer_norm", self.block.get("layer_norm")
        if attention.get("qk_norm") is not None or self.is_reordered:
            yield "model.block.sequence_mixer.qk_norm", attention.get("qk_norm")

    def _unlike_in_layers(self) -> Iterator[tuple[str, str]]:
        """Windows and scaled ropes that differ between layers."""
        sizes = {size for size in self.windows if size}
        if len(sizes) > 1 or (sizes and self.model_type != "olmo3"):
            yield (
                f"windows of {', '.join(map(str, sorted(sizes)))} in {self.model_type}",
                "one size, in OLMo 3",
            )
        full = [s for s, window in zip(self._scalings, self.windows, strict=True) if not window]
        windowed = [s for s, window in zip(self._scalings, self.windows, strict=True) if window]
        if any(windowed) or any(each != full[0] for each in full):
            yield "different scaling of ropes", "the same in all layers, but for those with windows"
        if full and full[0] and _hub_scaling(full[0]) is None:
            where = "model.block.sequence_mixer.rope.scaling"
            yield f"{where}={reprlib.repr(dict(full[0]))}", "linear, stepwise or YaRN, without another factor"

    @cached_property
    def _scalings(self) -> list[Mapping[str, Any] | None]:
        return [block["sequence_mixer"]["rope"].get("scaling") for block in self.blocks]

    def config(self) -> dict[str, Any]:
        """The config.json of the Hub's model."""
        model = self.content
        ffn = self.moe or self.block["feed_forward"]
        config: dict[str, Any] = {
            "architectures": [_ARCHITECTURES[self.model_type]],
            "model_type": self.model_type,
            "vocab_size": model["vocab_size"],
            "hidden_size": model["d_model"],
            "intermediate_size": ffn["hidden_size"],
            "num_hidden_layers": model["n_layers"],
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.groups,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "rms_norm_eps": _positive(self.block["layer_norm"]["eps"]),
            **self._rope(),
            "tie_word_embeddings": bool(model.get("tie_word_embeddings")),
            **self._of_data(),
        }
        if self.moe:
            config |= {"num_experts": self.moe["num_experts"], "norm_topk_prob": False}
            config["num_experts_per_tok"] = _positive(self.moe["router"]["top_k"])
        if self.model_type == "olmo3":
            config["sliding_window"] = max(filter(None, self.windows))
            kinds = ("sliding_attention" if window else "full_attention" for window in self.windows)
            config["layer_types"] = list(kinds)
        return config

    def _rope(self) -> dict[str, Any]:
        """The rotary embedding, in the spellings of transformers 4 and 5."""
        theta = _positive(self.attention["rope"].get("theta", 500_000))
        scaling = next(map(_hub_scaling, filter(None, self._scalings)), None)
        plain = {"rope_type": "default", "rope_theta": theta}
        scaled = {**plain, **(scaling or {})}
        by_layer = {"full_attention": scaled, "sliding_attention": plain}
        parameters = by_layer if self.model_type == "olmo3" else scaled
        return {"rope_theta": theta, "rope_scaling": scaling, "rope_parameters": parameters}

    def _of_data(self) -> dict[str, Any]:
        """What the data of the training run tells: the length of sequences, and special tokens."""
        module, data = (self.saved.get(key) or {} for key in ("train_module", "dataset"))
        length = module.get("max_sequence_length") or data.get("sequence_length")
        tokenizer = data.get("tokenizer") or {}
        tokens = {f"{which}_token_id": tokenizer.get(f"{which}_token_id") for which in ("bos", "eos", "pad")}
        return {"max_position_embeddings": length, **tokens} if length else tokens

    def notes(self) -> Iterator[str]:
        """What users should know."""
        yield f"config.json is derived from that of OLMo-core, as {self.model_type}"
        if self.moe and not self.is_dropless:
            yield "experts of OLMo-core may drop tokens beyond their capacity; those of the Hub drop none"


_ARCHITECTURES = {
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "flex_olmo": "FlexOlmoForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def _positive(value: Any) -> Any:
    """A number. Raises ValueError for anything else."""
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ValueError(f"{reprlib.repr(value)} is not a positive number")
    return value


def _attention_renamed(block: Any) -> Mapping[str, Any]:
    if not isinstance(block, Mapping) or "attention" not in block:
        return dict(block) if isinstance(block, Mapping) else {}
    return {**block, "sequence_mixer": block["attention"]}


def _without_scaling(block: Mapping[str, Any]) -> Mapping[str, Any]:
    attention = block["sequence_mixer"]
    return {**block, "sequence_mixer": {**attention, "rope": {**attention["rope"], "scaling": None}}}


def _hub_scaling(scaling: Mapping[str, Any]) -> dict[str, Any] | None:
    """The same as the Hub's `rope_scaling`; None if it has none. Defaults are those of OLMo-core."""
    kind = str(scaling.get("_CLASS_")).rpartition(".")[2]
    if scaling.get("attention_rescale_factor", 1.0) != 1.0:
        return None
    if kind == "PIRoPEScalingConfig":
        return {"rope_type": "linear", "factor": scaling.get("factor", 2.0)}
    original = {"original_max_position_embeddings": scaling.get("old_context_len", 8192)}
    if kind == "StepwiseRoPEScalingConfig":
        low, high = scaling.get("low_freq_proportion", 0.0), scaling.get("high_freq_proportion", 0.25)
        factors = {"low_freq_factor": 1 / (1 - low), "high_freq_factor": 1 / high}
        return {"rope_type": "llama3", "factor": scaling.get("factor", 32.0), **factors, **original}
    if kind == "YaRNRoPEScalingConfig":
        factor = scaling.get("factor", 8.0)
        betas = {"beta_fast": scaling.get("beta_fast", 32), "beta_slow": scaling.get("beta_slow", 1)}
        attention = 0.1 * math.log(factor) + 1.0
        return {"rope_type": "yarn", "factor": factor, "attention_factor": attention, **betas, **original}
    return None
