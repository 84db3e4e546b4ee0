"""Run in an environment with mlx-lm: `run_mlx.py JOBS` does what a JSON file asks, one job after the other.

A job is an object with `do`: "convert" a Hugging Face folder with mlx_lm.convert, "load" an MLX folder strictly and
save logits, or those of a model "load_named" from the Hub, "see" what mlx-vlm makes of a folder, "compute" what mlx
does with a weight, make the "sample" in tests/data, or "adapt" a folder: an adapter as mlx_lm.lora leaves it, and what
mlx_lm.fuse makes of it. What each raises is printed, by the number of the job, as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.convert import convert
from mlx_lm.utils import load_model


def load(folder: str, logits: str) -> None:
    """The logits of a few tokens, in float32."""
    model, _ = load_model(Path(folder))
    model.set_dtype(mx.float32)  # the only one in which experts are computed on a CPU
    found = model(mx.arange(3, 27)[None])
    np.save(logits, np.array(found.astype(mx.float32)))


def load_named(name: str, logits: str, revision: str | None = None) -> None:
    """The logits of a model that mlx-lm gets from the Hub, and the tokens that its tokenizer makes of a text."""
    from mlx_lm import load

    model, tokenizer = load(name, revision=revision)
    model.set_dtype(mx.float32)
    found = np.array(model(mx.arange(3, 27)[None]).astype(mx.float32))
    np.savez(logits, logits=found, tokens=tokenizer.encode("without being converted"))


def compute(bits: int, group_size: int, mode: str, dtype: str, folder: str) -> None:
    """Save a weight, its quantized parts, and what they are dequantized to."""
    weight = mx.random.normal((6, 5, 256), key=mx.random.key(bits)) * 3
    weight[0] = 0
    weight[1, :, :16] = 1.5
    weight = weight.astype(getattr(mx, dtype))
    names = ("weight", "scales", "biases")
    parts = dict(zip(names, mx.quantize(weight, group_size, bits, mode=mode), strict=False))
    plain = mx.dequantize(*parts.values(), group_size=group_size, bits=bits, mode=mode)
    mx.save_safetensors(folder, {**parts, "original": weight, "plain": plain})


def see(hf_path: str, mlx_path: str, bits: int = 0) -> None:
    """Convert a model with its vision tower, as mlx_vlm.convert does, which needs an image processor, too."""
    from mlx_vlm.quant_utils import quantize_model
    from mlx_vlm.utils import load_config, load_model, save_config, save_weights, skip_multimodal_module

    model, config = load_model(Path(hf_path), lazy=True), load_config(Path(hf_path))
    if bits:
        kinds = {"quant_predicate": lambda path, module: not skip_multimodal_module(path)}
        model, config = quantize_model(model, config, 32, bits, mode="affine", **kinds)
    save_weights(mlx_path, model)
    save_config(config, Path(mlx_path) / "config.json")


def sample(folder: str) -> None:
    """Make tests/data/mlx: a llama of one layer, in affine groups of 32 with four bits."""
    from mlx_lm.models.llama import Model, ModelArgs
    from mlx_lm.utils import quantize_model, save_config, save_model

    mx.random.seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32, "rms_norm_eps": 1e-6}
    kind = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
    config = {**kind, **sizes, **heads, "rope_theta": 10000.0, "torch_dtype": "bfloat16"}
    model = Model(ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    model, config = quantize_model(model, config, 32, 4)
    save_model(folder, model)
    save_config(config, Path(folder) / "config.json")


def adapt(folder: str, out: str, kind: str = "lora", keys: list[str] | None = None) -> None:
    """Save an adapter of a folder to `out`/adapters, as `mlx_lm.lora` does, and the fused model to `out`/fused."""
    from mlx.utils import tree_flatten, tree_unflatten
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import save_config, save_model

    model, config = load_model(Path(folder))
    model.freeze()
    parameters = {"rank": 4, "scale": 5.0, "dropout": 0.0, **({"keys": keys} if keys else {})}
    if kind == "full":
        model.layers[-1].unfreeze()
    else:
        linear_to_lora_layers(model, 2, parameters, use_dora=kind == "dora")
    trained = {
        name: each + 0.1 * mx.random.normal(each.shape)
        for name, each in tree_flatten(model.trainable_parameters())
    }
    model.load_weights(list(trained.items()), strict=False)
    adapters, fused = Path(out) / "adapters", Path(out) / "fused"
    adapters.mkdir(parents=True)
    mx.save_safetensors(str(adapters / "adapters.safetensors"), trained)
    settings = {"fine_tune_type": kind, "num_layers": 2, "lora_parameters": parameters, "model": folder}
    save_config(settings, adapters / "adapter_config.json")
    made = [(name, each.fuse()) for name, each in model.named_modules() if hasattr(each, "fuse")]
    model.update_modules(tree_unflatten(made))
    save_model(fused, model)
    save_config(config, fused / "config.json")


JOBS: dict[str, Any] = {
    "convert": convert,
    "load": load,
    "load_named": load_named,
    "compute": compute,
    "see": see,
    "sample": sample,
    "adapt": adapt,
}


def failure(job: dict[str, Any]) -> str | None:
    """What a job raises."""
    try:
        JOBS[job.pop("do")](**job)
    except Exception as error:  # a model that is not supported raises many kinds
        return f"{type(error).__name__}: {error}"[:400]
    return None


def main(jobs: list[dict[str, Any]]) -> None:
    mx.set_default_device(mx.cpu)
    found = {number: failure(job) for number, job in enumerate(jobs)}
    print("\n" + json.dumps({number: why for number, why in found.items() if why}))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
