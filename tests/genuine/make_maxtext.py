"""Makes tests/data/maxtext: small models as MaxText's own mapping functions and Orbax store them.

    python make_maxtext.py MAXTEXT FOLDER

runs in an environment with jax 0.10 and orbax-checkpoint 0.12.8. MAXTEXT is a checkout of AI-Hypercomputer/maxtext at
e591f30cbbf2 (22 August 2026), of which `param_mapping.py` is imported, without the package. What `to_maxtext.py` and
`to_huggingface.py` do with its functions, to stack layers and to take them apart, is here: importing these needs the
whole package. It has functions for Llama 3.1 alone; for others of that kind, `max_utils.py` does not reorder queries
and keys (`unpermute_from_match_maxtext_rope`), and `llama_mistral_mixtral_orbax_to_hf.py` does the rest alike.

For each case, `expected/hf.safetensors` are random weights with the names on the Hub, `3/items` is what `to_maxtext`
makes of them, and `expected/back.safetensors` what `to_huggingface` makes of that, if it is not the same.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
from safetensors.numpy import load_file, save_file

Array = np.ndarray[Any, Any]
SIZES = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "head_dim": 8,
    "vocab_size": 40,
    "intermediate_size": 24,
}
GROUPED = {**SIZES, "num_key_value_heads": 1, "num_hidden_layers": 3}
LLAMA2 = {**GROUPED, "model_type": "llama", "tie_word_embeddings": False}
SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA = {**LLAMA2, "rope_scaling": SCALING}
QWEN3 = {**GROUPED, "model_type": "qwen3", "tie_word_embeddings": True}
DEEPSEEK = {
    **SIZES,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 12,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "tie_word_embeddings": False,
}
MOE = {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 12, "num_experts_per_tok": 2}
GEMMA = {**GROUPED, "tie_word_embeddings": True, "num_hidden_layers": 4}


class Case(NamedTuple):
    """`name` is that of the model in MaxText. `rows` are those of MaxText's embedding, which it pads."""

    name: str
    config: Mapping[str, Any]
    scanned: bool = True
    dtype: str = "bfloat16"
    ocdbt: bool = True
    zarr3: bool = True
    tree: str = "linen"
    rows: int = 40
    axis: int = 1
    training: bool = False


CASES = {
    "llama": Case("llama3.1-8b", LLAMA),
    "llama_unscanned": Case("llama3.1-8b", LLAMA, scanned=False, zarr3=False, training=True),
    "llama_float32": Case("llama3.1-8b", LLAMA, dtype="float32", ocdbt=False, zarr3=False, training=True),
    "llama_first_axis": Case("llama3.1-8b", LLAMA, axis=0),
    "llama2": Case("llama3.1-8b", LLAMA2),
    "mistral": Case("llama3.1-8b", {**LLAMA2, "model_type": "mistral"}),
    "qwen2": Case("qwen2.5-7b", {**GROUPED, "model_type": "qwen2", "tie_word_embeddings": False}),
    "qwen3": Case("qwen3-0.6b", QWEN3, rows=64, tree="nnx"),
    "qwen3_moe": Case("qwen3-30b-a3b", {**QWEN3, **MOE, "tie_word_embeddings": False}, tree="nnx_rl"),
    "qwen3_moe_unscanned": Case(
        "qwen3-30b-a3b",
        {**QWEN3, **MOE, "tie_word_embeddings": False},
        scanned=False,
        ocdbt=False,
        zarr3=False,
    ),
    "deepseek_v3": Case("deepseek3-671b", DEEPSEEK),
    "deepseek_v3_unscanned": Case("deepseek3-671b", DEEPSEEK, scanned=False),
    "deepseek_v2": Case("deepseek2-16b", {**DEEPSEEK, "model_type": "deepseek_v2", "q_lora_rank": None}),
    "gemma2": Case("gemma2-2b", {**GEMMA, "model_type": "gemma2"}, rows=48),
    "gemma2_unscanned": Case("gemma2-2b", {**GEMMA, "model_type": "gemma2"}, scanned=False),
    "gemma3_text": Case("gemma3-4b", {**GEMMA, "model_type": "gemma3_text", "num_hidden_layers": 14}),
    "gemma3_text_unscanned": Case(
        "gemma3-4b", {**GEMMA, "model_type": "gemma3_text", "num_hidden_layers": 7}, scanned=False
    ),
    "mixtral": Case(
        "mixtral-8x7b",
        {**GROUPED, "model_type": "mixtral", "num_local_experts": 4, "tie_word_embeddings": False},
    ),
}


def imported(maxtext: Path, name: str) -> Any:
    """A file of the conversion, alone."""
    path = maxtext / "src/maxtext/checkpoint_conversion/utils" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Maxtext:
    """MaxText's functions for a case."""

    def __init__(self, mapping: Any, case: Case) -> None:
        self.case, config = case, dict(case.config)
        if config["model_type"] == "gemma3_text":  # there, it is a part of the multimodal model
            config = {"text_config": config, "vision_config": {"num_hidden_layers": 0}}
        experts = case.config.get("num_local_experts", 0)
        settings = SimpleNamespace(num_experts=experts, head_dim=case.config["head_dim"])
        arguments = (config, settings, case.scanned)
        found = mapping.PARAM_MAPPING[case.name](*arguments)
        beside = ("-vision_encoder-",)
        self.names = {key: hub for key, hub in found.items() if not any(part in key for part in beside)}
        self.hooks = {
            to_hf: mapping.HOOK_FNS[case.name](*arguments, saving_to_hf=to_hf) for to_hf in (True, False)
        }
        hub_config = {**case.config, "num_experts": case.config.get("num_experts", 0)}
        self.shapes = _shapes(hub_config)

    def paths(self, hub: Any) -> list[str]:
        """All names on the Hub in an entry."""
        return [hub] if isinstance(hub, str) else [path for each in hub for path in self.paths(each)]

    def _hooked(self, key: str, value: Array, shape: tuple[int, ...], *, to_hf: bool) -> Any:
        hooks = self.hooks[to_hf].get(key)
        for hook in hooks if isinstance(hooks, list) else [hooks] if hooks else []:
            if hook.__name__ != "adjust_rope" or "rope_scaling" in self.case.config:
                value = hook(value, shape)
        return value

    def to_maxtext(self, weights: Mapping[str, Array]) -> dict[str, Array]:
        """As `_get_hf_loading_function` and the functions below it do it."""
        made = {}
        for key, hub in self.names.items():
            if self.paths(hub)[0] not in weights:
                continue  # biases and norms that others of the class have, and the head of a tied model
            shape = self.slice_shape(key)

            def one(name: str, key: str = key, shape: tuple[int, ...] = shape) -> Array:
                weight = weights[name]
                return np.asarray(self._hooked(key, weight, shape, to_hf=False)).astype(
                    weight.dtype
                )  # save_dtype

            if isinstance(hub, str):
                made[key] = one(hub)
            elif isinstance(hub[0], str):
                axis = self.case.axis if self.case.scanned else 0
                made[key] = np.stack([one(name) for name in hub], axis=axis)
            else:
                made[key] = np.stack(
                    [np.stack([one(name) for name in inner], axis=0) for inner in hub], axis=0
                )
        return made

    def to_huggingface(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """As `process_maxtext_param` does it, with jax arrays."""
        made: dict[str, Array] = {}

        def put(key: str, name: str, value: Any) -> None:
            done = self._hooked(key, value, self.shapes[name], to_hf=True)
            made[name] = np.asarray(done).astype(value.dtype).reshape(self.shapes[name])

        for key, array in arrays.items():
            hub, value = self.names[key], jnp.asarray(array)
            if isinstance(hub, str):
                put(key, hub, value)
            elif isinstance(hub[0], str):
                axis = self.case.axis if self.case.scanned else 0
                for index, name in enumerate(hub):
                    put(key, name, jax.lax.index_in_dim(value, index, axis=axis, keepdims=False))
            else:
                for outer, inner in enumerate(hub):
                    part = jax.lax.index_in_dim(value, outer, axis=0, keepdims=False)
                    for index, name in enumerate(inner):
                        put(key, name, jax.lax.index_in_dim(part, index, axis=0, keepdims=False))
        return made

    def slice_shape(self, key: str) -> tuple[int, ...]:
        """The shape of one layer's, or expert's, tensor in MaxText, which its model would tell."""
        c = self.case.config
        heads, groups, d, hidden = (
            c[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size")
        )
        v, qk = c.get("v_head_dim", d), c.get("qk_nope_head_dim", d) + c.get("qk_rope_head_dim", 0)
        kinds: dict[str, tuple[int, ...]] = {
            "query-kernel": (hidden, heads, qk),
            "key-kernel": (hidden, groups, d),
            "value-kernel": (hidden, groups, d),
            "out-kernel": (heads, v, hidden),
            "query-bias": (heads, d),
            "key-bias": (groups, d),
            "value-bias": (groups, d),
            "wq_b-kernel": (c.get("q_lora_rank") or 0, heads, qk),
            "wkv_b-kernel": (c.get("kv_lora_rank", 0), heads, c.get("qk_nope_head_dim", 0) + v),
            "token_embedder-embedding": (self.case.rows, hidden),
        }
        for end, shape in kinds.items():
            if key.endswith(f"-{end}"):
                return shape
        name = self.paths(self.names[key])[0]
        shape = self.shapes[name]
        if key.endswith("logits_dense-kernel"):
            return (hidden, self.case.rows)
        return shape[::-1]


def _shapes(c: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors on the Hub."""
    hidden, vocab = c["hidden_size"], c["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in range(c["num_hidden_layers"]):
        block = {**_norms(c), **(_latent(c) if "kv_lora_rank" in c else _attention(c)), **_mlp(c, layer)}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in block.items()}
    prefix = "model.language_model." if c["model_type"] == "gemma3_text" else "model."
    return {
        name.replace("model.", prefix, 1) if name.startswith("model.") else name: s
        for name, s in shapes.items()
    }


def _norms(c: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    names = ["input_layernorm", "post_attention_layernorm"]
    if c["model_type"].startswith("gemma"):
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    return {f"{name}.weight": (c["hidden_size"],) for name in names}


def _attention(c: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, d = c["hidden_size"], c["head_dim"]
    rows = {
        "q": c["num_attention_heads"] * d,
        "k": c["num_key_value_heads"] * d,
        "v": c["num_key_value_heads"] * d,
    }
    shapes: dict[str, tuple[int, ...]] = {f"self_attn.{x}_proj.weight": (n, hidden) for x, n in rows.items()}
    shapes["self_attn.o_proj.weight"] = (hidden, rows["q"])
    if c["model_type"] == "qwen2":
        shapes |= {f"self_attn.{x}_proj.bias": (n,) for x, n in rows.items()}
    if c["model_type"].startswith(("qwen3", "gemma3")):
        shapes |= {f"self_attn.{x}_norm.weight": (d,) for x in "qk"}
    return shapes


def _latent(c: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads, kv = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    queries = heads * (c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.kv_a_proj_with_mqa.weight": (kv + c["qk_rope_head_dim"], hidden),
        "self_attn.kv_a_layernorm.weight": (kv,),
        "self_attn.kv_b_proj.weight": (heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), kv),
        "self_attn.o_proj.weight": (hidden, heads * c["v_head_dim"]),
    }
    if not (low := c["q_lora_rank"]):
        return {**shapes, "self_attn.q_proj.weight": (queries, hidden)}
    return {
        **shapes,
        "self_attn.q_a_proj.weight": (low, hidden),
        "self_attn.q_a_layernorm.weight": (low,),
        "self_attn.q_b_proj.weight": (queries, low),
    }


def _gated(hidden: int, ffn: int, prefix: str, names: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    shapes = ((ffn, hidden), (ffn, hidden), (hidden, ffn))
    return {f"{prefix}.{name}.weight": shape for name, shape in zip(names, shapes, strict=True)}


def _mlp(c: Mapping[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    hidden = c["hidden_size"]
    count = c.get("num_experts") or c.get("n_routed_experts") or c.get("num_local_experts") or 0
    names = ("gate_proj", "up_proj", "down_proj")
    if not count or layer < c.get("first_k_dense_replace", 0):
        return _gated(hidden, c["intermediate_size"], "mlp", names)
    is_mixtral = c["model_type"] == "mixtral"
    hf, names = ("block_sparse_moe", ("w1", "w3", "w2")) if is_mixtral else ("mlp", names)
    ffn = c.get("moe_intermediate_size", c["intermediate_size"])
    shapes: dict[str, tuple[int, ...]] = {f"{hf}.gate.weight": (count, hidden)}
    for expert in range(count):
        shapes |= _gated(hidden, ffn, f"{hf}.experts.{expert}", names)
    if c.get("n_shared_experts"):
        shapes |= _gated(hidden, ffn * c["n_shared_experts"], "mlp.shared_experts", names)
    if c["model_type"] == "deepseek_v3":
        shapes["mlp.gate.e_score_correction_bias"] = (count,)
    return shapes


def tree_of(case: Case, arrays: Mapping[str, Array]) -> dict[str, Any]:
    """The tree that MaxText saves. The arrays have the names of Linen, with hyphens between keys."""
    leaf: Callable[[Array], Any] = (lambda x: x) if case.tree == "linen" else (lambda x: {"value": x})
    model: dict[str, Any] = {}
    for key, array in arrays.items():
        at = model
        *path, last = key.removeprefix("params-").split("-")
        for part in path:
            at = at.setdefault(part, {})
        at[last] = leaf(jnp.asarray(array))
    tree = {"linen": {"params": {"params": model}}, "nnx": model, "nnx_rl": {"base": model}}[case.tree]
    if not case.training:
        return {**tree, "step": jnp.array(3), "opt_state": {}} if case.tree == "linen" else tree
    moments = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), tree["params"])
    return {**tree, "step": jnp.array(3), "opt_state": {"mu": moments, "nu": moments, "count": jnp.array(3)}}


def make(mapping: Any, case: Case, folder: Path) -> None:
    """One case."""
    maxtext = Maxtext(mapping, case)
    random = np.random.default_rng(7)
    dtype = np.dtype(ml_dtypes.bfloat16) if case.dtype == "bfloat16" else np.dtype(case.dtype)
    weights = {
        name: (0.1 * random.standard_normal(shape) + name.endswith("norm.weight")).astype(dtype)
        for name, shape in maxtext.shapes.items()
    }
    arrays = maxtext.to_maxtext(weights)
    used = {path for key in arrays for path in maxtext.paths(maxtext.names[key])}
    assert used == weights.keys(), used ^ weights.keys()
    back = maxtext.to_huggingface(arrays)
    shutil.rmtree(folder, ignore_errors=True)
    expected = folder / "expected"
    expected.mkdir(parents=True)
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=case.ocdbt, use_zarr3=case.zarr3)
    ocp.Checkpointer(handler).save(
        folder.absolute() / "3" / "items", args=ocp.args.PyTreeSave(tree_of(case, arrays))
    )
    (folder / "config.json").write_text(json.dumps({**case.config, "dtype": case.dtype}, indent=1))
    plain = {name: _plain(name) for name in weights}
    save_file({plain[name]: value for name, value in weights.items()}, expected / "hf.safetensors")
    if any(back[name].tobytes() != value.tobytes() for name, value in weights.items()):
        save_file({plain[name]: back[name] for name in weights}, expected / "back.safetensors")
    assert load_file(expected / "hf.safetensors").keys() == set(plain.values())


def _plain(name: str) -> str:
    """The name in a language model on its own."""
    return name.replace("model.language_model.", "model.", 1)


if __name__ == "__main__":
    maxtext, out = map(Path, sys.argv[1:3])
    found = imported(maxtext, "param_mapping")
    for name, case in CASES.items():
        make(found, case, out / name)
        print(name)
