"""Checkpoints that the real OLMo-core writes: its models, its train module, its checkpointer, on two ranks.

    python -m tests.genuine.make_olmo_core OUT [NAME...]

with OLMo-core importable (`pip install ai2-olmo-core==3.0.0`). Each `OUT/<name>/` gets `step1/`, with the config.json
of its config saver; `logits.npy` by OLMo-core, and the SHA-256 of the tensors that its own converter makes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.genuine.ranks import on_ranks

SAVED = Path(__file__).parents[1] / "data" / "olmo_core"
"""What it wrote."""
VOCABULARY, LENGTH = 64, 12
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (2, LENGTH))
SIZES = {"d_model": 32, "vocab_size": VOCABULARY, "n_layers": 2, "n_heads": 4, "hidden_size_multiple_of": 8}


def olmo2(**others: Any) -> Any:
    """OLMo 2: norms of outputs, and of all queries and keys at once."""
    from olmo_core.nn.transformer import TransformerBlockType, TransformerConfig

    block = {"block_name": TransformerBlockType.reordered_norm, "qk_norm": True}
    return TransformerConfig.llama_like(**{**SIZES, **block, "layer_norm_eps": 1e-6, **others})


def olmo3() -> Any:
    """OLMo 3: windows in three of four layers, and a YaRN rope in the others."""
    from olmo_core.nn.attention import SlidingWindowAttentionConfig
    from olmo_core.nn.rope import YaRNRoPEScalingConfig

    window = SlidingWindowAttentionConfig(
        pattern=[4, 4, 4, -1],
        force_full_attention_on_first_layer=False,
        force_full_attention_on_last_layer=True,
    )
    config = olmo2(n_layers=4, n_kv_heads=2, sliding_window=window)
    return config.with_rope_scaling(YaRNRoPEScalingConfig(factor=8.0, old_context_len=16))


def llama() -> Any:
    """Llama's blocks, with a scaled rope and fewer key-value heads."""
    from olmo_core.nn.rope import StepwiseRoPEScalingConfig
    from olmo_core.nn.transformer import TransformerConfig

    scaling = StepwiseRoPEScalingConfig(factor=4.0, old_context_len=16)
    return TransformerConfig.llama_like(**SIZES, n_kv_heads=2, rope_scaling=scaling)


def qwen3() -> Any:
    """Qwen3's blocks: queries and keys are normalised by head, heads are wide, and the head is tied."""
    from olmo_core.nn.layer_norm import LayerNormType
    from olmo_core.nn.transformer import TransformerConfig

    return TransformerConfig.llama_like(
        **SIZES,
        n_kv_heads=2,
        head_dim=16,
        layer_norm_name=LayerNormType.qwen_rms,
        qk_norm=True,
        use_head_qk_norm=True,
        tie_word_embeddings=True,
    )


def experts(*, dropless: bool) -> Any:
    """OLMo 2's blocks with experts, which transformers calls FlexOlmo."""
    from olmo_core.nn.transformer import TransformerConfig

    return TransformerConfig.llama_like_moe(
        **SIZES,
        num_experts=4,
        top_k=2,
        expert_hidden_size=24,
        reordered_norm=True,
        dropless=dropless,
        capacity_factor=None if dropless else 4.0,
    )


VARIANTS = {
    "olmo2": lambda: olmo2(n_layers=1),
    "olmo3": olmo3,
    "llama": llama,
    "qwen3": qwen3,
    "moe": lambda: experts(dropless=False),
    "moe-dropless": lambda: experts(dropless=True),
}
"""How to configure each model."""


def save(rank: int, folder: Path, config: Any) -> None:
    """Save as the trainer does, OLMo 2 with its optimizer after one step. Experts need a GPU to compute."""
    import torch.distributed.checkpoint.state_dict as states
    from olmo_core.config import DType
    from olmo_core.distributed.parallel import DataParallelType
    from olmo_core.optim import AdamWConfig
    from olmo_core.train.checkpoint import Checkpointer
    from olmo_core.train.train_module import TransformerTrainModule
    from olmo_core.train.train_module.transformer import TransformerDataParallelConfig

    module = TransformerTrainModule(
        config.build(init_device="cpu"),
        AdamWConfig(lr=1e-2),
        rank_microbatch_size=TOKENS.size,
        max_sequence_length=LENGTH,
        dp_config=TransformerDataParallelConfig(name=DataParallelType.fsdp, param_dtype=DType.float32),
        device=torch.device("cpu"),
        eval_only=folder.name != "olmo2",
    )
    randomise(module.model)
    tokens = torch.from_numpy(TOKENS)
    if module.optim:
        module.model(tokens).float().logsumexp(-1).mean().backward()
        module.optim.step()
    Checkpointer(folder / "work").save(str(folder / "step1"), module, {"global_step": 1})
    module.model.eval()
    computes = "moe" not in folder.name
    with torch.no_grad():
        logits = module.model(tokens) if computes else None
    whole = states.StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    weights = {"": states.get_model_state_dict(module.model, options=whole)}
    if module.optim:
        optimizer = states.get_optimizer_state_dict(module.model, module.optim, options=whole)
        for kind in ("exp_avg", "exp_avg_sq"):
            found = {name: optimizer[f"state.{name}.{kind}"] for name in weights[""]} if rank == 0 else {}
            weights[f"{kind}."] = found
    if rank == 0:
        digests = {
            prefix + name: each
            for prefix, found in weights.items()
            for name, each in digested(folder.name, config, found)
        }
        (folder / "digests.json").write_text(json.dumps(digests, indent=1) + "\n")
    if rank == 0 and logits is not None:
        np.save(folder / "logits.npy", logits.float().numpy())


def randomise(model: torch.nn.Module) -> None:
    """Fill all parameters so that activations keep their size from layer to layer."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            noise = 1 + 0.2 * noise if "norm" in name else noise * 32**-0.5
            tensor.copy_(
                torch.distributed.tensor.distribute_tensor(noise, tensor.device_mesh, tensor.placements)
            )


def digested(name: str, config: Any, state: dict[str, torch.Tensor]) -> Iterator[tuple[str, str]]:
    """The SHA-256 of each tensor that OLMo-core's own converter makes."""
    from olmo_core.nn.hf.convert import convert_state_to_hf
    from transformers import AutoConfig

    moe = config.block.feed_forward_moe
    kind = "flex_olmo" if moe else "olmo2" if "reordered" in config.block.name else name
    experts = {"num_experts": moe.num_experts} if moe else {}
    hub = AutoConfig.for_model(kind, num_hidden_layers=config.n_layers, **experts)
    if moe and moe.name == "dropless":  # as `convert_checkpoint_to_hf` does
        for each in (each for each in state if each.endswith(("experts.mlp.w1", "experts.mlp.w3"))):
            turned = state[each].reshape(moe.num_experts, moe.hidden_size, -1).permute(0, 2, 1)
            state[each] = turned.reshape(-1, moe.hidden_size)
    for each, tensor in convert_state_to_hf(hub, state).items():
        yield each, sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def saved_config(config: Any) -> dict[str, Any]:
    """What the config saver of a training script writes, as far as it is about the model."""
    from olmo_core.data import TokenizerConfig

    tokenizer = TokenizerConfig(
        vocab_size=60, eos_token_id=2, pad_token_id=3, bos_token_id=1, identifier="none"
    )
    return {
        "model": config.as_config_dict(),
        "dataset": {"tokenizer": tokenizer.as_config_dict()},
        "train_module": {"max_sequence_length": LENGTH},
    }


def make(name: str, out: Path) -> Path:
    """Make the variant `name` at `out/<name>`."""
    config = VARIANTS[name]()
    folder = out / name
    folder.mkdir(parents=True)
    on_ranks(2, save, folder, config)
    (folder / "work").rmdir()
    (folder / "step1" / "config.json").write_text(json.dumps(saved_config(config)) + "\n")
    return folder


if __name__ == "__main__":
    for wanted in sys.argv[2:] or VARIANTS:
        print(make(wanted, Path(sys.argv[1])))
