"""Checkpoints that the real torchtitan writes: its models, its optimizer container, its checkpoint manager.

    python -m tests.genuine.make_torchtitan OUT [NAME...]

with torchtitan importable (`pip install --no-deps torchtitan==0.3.0`, and its dependencies; 0.2.2 for
those called older). Each `OUT/<name>/`
gets `checkpoint/step-1/`, a Hugging Face `config.json` of the same model, and `logits.npy` by torchtitan.
"""

from __future__ import annotations

import json
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tests.genuine import titan_experts
from tests.genuine.ranks import on_ranks

SAVED = Path(__file__).parents[1] / "data" / "torchtitan"
"""What it wrote."""
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
OLDER_LLAMA = {
    **LLAMA,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
"""torchtitan 0.1 and 0.2 always scale as Llama 3.1 does."""
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


def llama() -> Any:
    """Llama 3, whose queries and keys torchtitan rotates in pairs of neighbours. One layer, with optimizer states."""
    import torchtitan.models.llama3 as llama3

    plain_attention(llama3)
    rope = llama3.ComplexRoPE.Config(dim=8, max_seq_len=64, theta=THETA)
    layers = llama3._build_llama3_layers(
        **SIZES | {"n_layers": 1}, hidden_dim=48, rope=rope, attn_backend="plain"
    )
    return llama3.Llama3Model.Config(
        dim=32,
        vocab_size=VOCABULARY,
        layers=layers,
        **_ends(llama3, llama3.RMSNorm.Config(normalized_shape=32)),
    )


def qwen3(*, experts: int = 0) -> Any:
    """Qwen3: dense and with a tied head, or with experts."""
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
        enable_weight_tying=not experts,
        **_ends(titan, titan._qwen3_norm(32)),
    )


def plain_attention(titan: Any) -> None:
    """Let torchtitan build its own plain attention: the kinds in its registry need a GPU."""
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
        **SIZES,
        vocab_size=VOCABULARY,
        rope_theta=THETA,
        max_seq_len=64,
        ffn_dim_multiplier=0.5,
        multiple_of=48,
    )
    return Transformer(sizes)


def randomise(model: torch.nn.Module) -> None:
    """Fill all parameters so that activations keep their size from layer to layer."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(1 + 0.2 * noise if "norm" in name else noise * tensor.shape[-1] ** -0.5)
        if "DeepSeek" in type(model).__name__:  # of the others, transformers' models have none
            for name, tensor in model.named_buffers():
                if "expert_bias" in name:
                    tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))


def save(rank: int, folder: Path, model: Any, states: bool) -> None:
    """Train one step on two ranks, and save through torchtitan's own checkpoint manager."""
    model = model.build() if hasattr(model, "build") else model
    randomise(model)
    policy = MixedPrecisionPolicy(param_dtype=titan_experts.computed_in(model))
    for layer in model.layers.values():
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    tokens = torch.from_numpy(TOKENS)
    masks = titan_experts.flex_masks(model, tokens)
    optimizers = schedulers = None
    if states:
        optimizers, schedulers = containers(model)
        torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizers.step()
        schedulers.step()
    manager(folder, model, optimizers, schedulers)
    keep_digests(rank, folder, model)
    with torch.no_grad():
        logits = model(tokens) if masks is None else model(tokens, attention_masks=masks)
    if rank == 0:
        logits = logits[0] if isinstance(logits, list) else logits  # of the layers for multi-token prediction
        np.save(folder / "logits.npy", logits.float().numpy())


def keep_digests(rank: int, folder: Path, model: Any) -> None:
    """The output of torchtitan's own adapter for Hugging Face: the SHA-256 of each tensor."""
    whole = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in model.state_dict().items()
    }
    if rank == 0:
        hub = adapter(model).to_hf(whole)
        digests = {
            name: sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
            for name, tensor in hub.items()
        }
        (folder / "digests.json").write_text(json.dumps(digests, indent=1) + "\n")


def adapter(model: Any) -> Any:
    """The adapter of a model's own package."""
    if other := titan_experts.adapter(model):
        return other
    if any(base.__module__.startswith("torchtitan.models.qwen3") for base in type(model).__mro__):
        from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

        return Qwen3StateDictAdapter(model.config, None)
    if hasattr(model, "model_args"):
        from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter as Older

        return Older(model.model_args, None)
    from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter

    return Llama3StateDictAdapter(model.config, None)


def containers(model: Any) -> tuple[Any, Any]:
    """torchtitan's optimizers and schedules."""
    from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

    group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2})
    config = OptimizersContainer.Config(param_groups=[group], implementation="for-loop")
    optimizers = config.build(model_parts=[model])
    schedules = LRSchedulersContainer.Config(warmup_steps=1)
    return optimizers, schedules.build(optimizers=optimizers, training_steps=2)


class TrainState:
    """The state that torchtitan's Trainer saves of itself."""

    def state_dict(self) -> dict[str, int]:
        """The keys of torchtitan 0.3.0."""
        return {"step": 1, "ntokens_seen": 24}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Required of a stateful object."""


def manager(folder: Path, model: Any, optimizers: Any, schedulers: Any) -> None:
    """Save everything, or only the model if there is no optimizer."""
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
    "llama": (llama, {**LLAMA, "num_hidden_layers": 1}, True),
    "llama-older": (older_llama, OLDER_LLAMA, False),
    "qwen3": (qwen3, {**QWEN3, "tie_word_embeddings": True}, False),
    "qwen3_moe": (lambda: qwen3(experts=4), QWEN3_MOE, False),
    **titan_experts.VARIANTS,
}
"""How to build each model, the config of the same model for transformers, and whether to save optimizer states."""


def make(name: str, out: Path) -> Path:
    """Make the variant `name` at `out/<name>`."""
    build, config, states = VARIANTS[name]
    folder = out / name
    folder.mkdir(parents=True)
    on_ranks(2, lambda rank: save(rank, folder, build(), states))
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder


if __name__ == "__main__":
    for wanted in sys.argv[2:] or [name for name in VARIANTS if "older" not in name]:
        print(make(wanted, Path(sys.argv[1])))
