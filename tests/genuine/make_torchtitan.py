"""Checkpoints that the real torchtitan writes: its models, its optimizer container, its checkpoint manager.

    python -m tests.genuine.make_torchtitan OUT [NAME...]

with torchtitan importable (`pip install --no-deps torchtitan==0.3.0`, and what it then asks for). Each `OUT/<name>/`
gets `checkpoint/step-1/`, a Hugging Face `config.json` of the same model, and `logits.npy`, which torchtitan computed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard

from tests.genuine.ranks import on_ranks

VOCABULARY = 64
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (2, 12))
SIZES = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2}
HEAD = 16
"""The size of a Qwen3 head: four of them are wider than the hidden size."""
THETA = 50000.0
CONFIG = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_theta": THETA,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}
LLAMA = {
    **CONFIG,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
QWEN3 = {
    **CONFIG,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": HEAD,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
QWEN3_MOE = {
    **QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def llama(*, fused: bool) -> Any:
    """Llama 3, whose queries and keys torchtitan rotates in pairs of neighbours."""
    import torchtitan.models.llama3 as llama3

    plain_attention(llama3)
    rope = llama3.ComplexRoPE.Config(dim=8, max_seq_len=64, theta=THETA)
    layers = llama3._build_llama3_layers(
        **SIZES, hidden_dim=48, rope=rope, fuse_qkv=fused, attn_backend="plain"
    )
    return llama3.Llama3Model.Config(
        dim=32,
        vocab_size=VOCABULARY,
        layers=layers,
        **_ends(llama3, llama3.RMSNorm.Config(normalized_shape=32)),
    )


def qwen3(*, tied: bool = False, experts: int = 0) -> Any:
    """Qwen3, dense or with experts."""
    import torchtitan.models.qwen3 as titan

    plain_attention(titan)
    sizes = {**SIZES, "head_dim": HEAD, "attn_backend": "plain"}
    rope = titan.CosSinRoPE.Config(dim=HEAD, max_seq_len=64, theta=THETA)
    if experts:
        layers = titan._build_qwen3_moe_layers(
            **sizes, rope=rope, moe_hidden_dim=24, num_experts=experts, top_k=2, moe_comm_backend="standard"
        )
    else:
        layers = titan._build_qwen3_layers(**sizes, rope=rope, hidden_dim=48)
    return titan.Qwen3Model.Config(
        dim=32,
        vocab_size=VOCABULARY,
        layers=layers,
        enable_weight_tying=tied,
        **_ends(titan, titan._qwen3_norm(32)),
    )


def plain_attention(titan: Any) -> None:
    """Let torchtitan build its own plain attention: the kinds that its registry offers need a GPU."""
    from torchtitan.models.common.attention import ScaledDotProductAttention

    titan.get_attention_config = lambda backend: ScaledDotProductAttention.Config()


def _ends(titan: Any, norm: Any) -> dict[str, Any]:
    return {
        "norm": norm,
        "tok_embeddings": titan.Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=32),
        "lm_head": titan.Linear.Config(in_features=32, out_features=VOCABULARY),
    }


def older_llama() -> Any:
    """Llama 3 as torchtitan 0.1 and 0.2 build it."""
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer

    sizes = TransformerModelArgs(
        **SIZES, vocab_size=VOCABULARY, hidden_dim=48, rope_theta=THETA, max_seq_len=64
    )
    return Transformer(sizes)


def randomise(model: torch.nn.Module) -> None:
    """Fill all parameters so that activations keep their size from layer to layer."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(1 + 0.2 * noise if "norm" in name else noise * tensor.shape[-1] ** -0.5)


def save(rank: int, folder: Path, model: Any, states: bool) -> None:
    """Train one step on two ranks, and save through torchtitan's own checkpoint manager."""
    model = model.build() if hasattr(model, "build") else model
    randomise(model)
    for layer in model.layers.values():
        fully_shard(layer)
    fully_shard(model)
    tokens = torch.from_numpy(TOKENS)
    optimizers = schedulers = None
    if states:
        optimizers, schedulers = containers(model)
        torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizers.step()
        schedulers.step()
    manager(folder, model, optimizers, schedulers)
    with torch.no_grad():
        logits = model(tokens)
    if rank == 0:
        np.save(folder / "logits.npy", logits.numpy())


def containers(model: Any) -> tuple[Any, Any]:
    """torchtitan's optimizers and schedules."""
    from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

    group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2})
    config = OptimizersContainer.Config(param_groups=[group], implementation="for-loop")
    optimizers = config.build(model_parts=[model])
    schedules = LRSchedulersContainer.Config(warmup_steps=1)
    return optimizers, schedules.build(optimizers=optimizers, training_steps=2)


class TrainState:
    """What torchtitan's Trainer saves of itself."""

    def state_dict(self) -> dict[str, int]:
        """The keys of torchtitan 0.3.0."""
        return {"step": 1, "ntokens_seen": 24}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Needed for the state to count as one."""


def manager(folder: Path, model: Any, optimizers: Any, schedulers: Any) -> None:
    """Save everything, or the model alone where there is no optimizer."""
    if optimizers is None:
        dcp.save(model.state_dict(), checkpoint_id=folder / "checkpoint" / "step-1")
        return
    from torchtitan.components.checkpointer.dcp import CheckpointManager

    writer = CheckpointManager(
        CheckpointManager.Config(enable=True, interval=1),
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": TrainState()},
        sd_adapter=None,
        base_folder=str(folder),
    )
    writer.save(1)


VARIANTS: dict[str, tuple[Any, dict[str, Any], bool]] = {
    "llama": (lambda: llama(fused=True), LLAMA, True),
    "llama-unfused": (lambda: llama(fused=False), LLAMA, False),
    "llama-older": (older_llama, LLAMA, False),
    "qwen3": (lambda: qwen3(), QWEN3, False),
    "qwen3-tied": (lambda: qwen3(tied=True), {**QWEN3, "tie_word_embeddings": True}, False),
    "qwen3_moe": (lambda: qwen3(experts=4), QWEN3_MOE, False),
}
"""How to build each model, the config of the same model for transformers, and whether to save optimizer states."""


def make(name: str, out: Path) -> Path:
    """Make the variant `name` at `out/<name>`."""
    build, config, states = VARIANTS[name]
    folder = out / name
    folder.mkdir(parents=True)
    on_ranks(2, lambda rank: save(rank, folder, build(), states))
    dist_config = folder / "config.json"
    dist_config.write_text(json.dumps(config, indent=2) + "\n")
    return folder


if __name__ == "__main__":
    for wanted in sys.argv[2:] or [name for name in VARIANTS if name != "llama-older"]:
        print(make(wanted, Path(sys.argv[1])))
