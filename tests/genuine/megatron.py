"""Checkpoints that the real megatron-core wrote, for every variant that reshard reads.

`make` trains a tiny model for two steps, so that all weights differ, and saves it in both formats.
Variants of TransformerEngine's modules run megatron-core's real TransformerEngine spec and sharding code over the
stand-in of `fake_te`: names, shapes and shards are real. These, and other versions of megatron-core, run in
separate processes.

    python -m tests.genuine.megatron OUT NAME...
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.algebra.layout import Layout
from tests.environments import CACHE
from tests.genuine.mcore.checkpoint_io import MegatronFormat, SaveOptions
from tests.genuine.mcore.models import LayerSpec
from tests.genuine.train_megatron import train_and_save

REPOSITORY = Path(__file__).parents[2]
OLDER_VERSIONS = ("0.12.3", "0.13.1", "0.14.0", "0.15.3")

# 250 tokens in a vocabulary padded to 256; four heads in two groups; no two sizes alike where they could be confused.
DENSE: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 8,
    "ffn_hidden_size": 48,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-6,
    "swiglu": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "max_position_embeddings": 64,
    "untie_embeddings_and_output_weights": True,
    "vocab_size": 250,
    "padded_vocab_size": 256,
    "make_vocab_size_divisible_by": 64,
    "init_method_std": 0.05,
    "tokenizer_type": "HuggingFaceTokenizer",
}
MOE: dict[str, Any] = {
    "num_experts": 4,
    "moe_ffn_hidden_size": 24,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 1e-3,
}
QWEN2 = {**DENSE, "add_qkv_bias": True}
QWEN2_TIED = {**QWEN2, "untie_embeddings_and_output_weights": False}
QWEN3 = {**DENSE, "qk_layernorm": True, "kv_channels": 16}
QWEN3_MOE = {**QWEN3, **MOE}
QWEN2_MOE = {**QWEN2, **MOE, "moe_shared_expert_intermediate_size": 40, "moe_shared_expert_gate": True}
DEEPSEEK_V3: dict[str, Any] = {
    **{name: value for name, value in DENSE.items() if "query" not in name},
    **MOE,
    "moe_layer_freq": [0, 1, 1, 1],
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_num_groups": 2,
    "moe_router_group_topk": 1,
    "moe_router_dtype": "fp32",
    "moe_shared_expert_intermediate_size": 24,
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "rope_type": "rope",
    "mtp_num_layers": 1,
}
GLM4_MOE: dict[str, Any] = {
    **{name: value for name, value in DEEPSEEK_V3.items() if "lora" not in name and "head_dim" not in name},
    **QWEN3,
    "multi_latent_attention": False,
    "add_qkv_bias": True,
    "rotary_percent": 0.5,
}
GPT_OSS: dict[str, Any] = {
    **DENSE,
    **MOE,
    "moe_ffn_hidden_size": 48,
    "add_bias_linear": True,
    "swiglu": False,
    "quick_geglu": True,
    "glu_linear_offset": 1.0,
    "activation_func_clamp_value": 1.5,
    "softmax_type": "learnable",
    "window_size": (5, 0),
    "window_attn_skip_freq": 2,
    "position_embedding_type": "yarn",
    "rotary_scaling_factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
    "yarn_original_max_position_embeddings": 16,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_correction_range_round_to_int": False,
}


@dataclass(frozen=True)
class Variant:
    """One checkpoint to make: a model, a layout, and how it is trained and saved.

    `start` names the variant with the initial weights, if its own modules cannot be trained on a CPU. `more` are
    further arguments of `train_and_save`.
    """

    args: dict[str, Any]
    layout: Layout = field(default_factory=Layout)
    spec: LayerSpec = "local"
    steps: int = 2
    bf16: bool = True
    distributed_optimizer: bool = False
    formats: tuple[MegatronFormat, ...] = ("torch_dist", "torch")
    save: dict[str, Any] = field(default_factory=dict)
    start: str | None = None
    more: dict[str, Any] = field(default_factory=dict)


_GROUPED = {"moe_grouped_gemm": True}
VARIANTS: dict[str, Variant] = {
    "qwen2-tp2-pp2": Variant(QWEN2, Layout(tp=2, pp=2)),
    "qwen2-fp32": Variant(QWEN2, Layout(tp=2), bf16=False),
    "qwen2-tied-pp2": Variant(QWEN2_TIED, Layout(pp=2)),
    "qwen2-release": Variant(QWEN2, save={"release": True, "optimizer": False}),
    "qwen2-uneven": Variant(
        {**QWEN2, "pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 1},
        Layout(pp=2),
    ),
    "qwen2-pipeline-layout": Variant(
        {**QWEN2, "pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et*3|tL"},
        Layout(pp=2),
    ),
    "qwen2-te-tp2-pp2": Variant(QWEN2, Layout(tp=2, pp=2), spec="te"),
    "qwen2-distributed-optimizer": Variant(QWEN2, Layout(tp=2, dp=2), distributed_optimizer=True),
    "qwen2-fully-reshardable": Variant(
        QWEN2,
        Layout(tp=2, dp=2),
        distributed_optimizer=True,
        formats=("torch_dist",),
        save={"optimizer_sharding": "fully_reshardable"},
    ),
    # More tensor parallel ranks than query groups. With one group of four heads, a rank's rows end inside a head.
    "qwen2-shared-group-tp4": Variant({**QWEN2, "num_query_groups": 1}, Layout(tp=4)),
    "qwen3-shared-groups-tp4-vpp2": Variant(QWEN3, Layout(tp=4, pp=2, vpp=2)),
    "qwen3-moe-te-shared-groups-tp4-ep2": Variant(
        {**QWEN3_MOE, **_GROUPED}, Layout(tp=4, ep=2, etp=2), spec="te"
    ),
    "qwen3-pp2-vpp2": Variant(QWEN3, Layout(pp=2, vpp=2)),
    "qwen3-moe-ep2": Variant(QWEN3_MOE, Layout(ep=2)),
    "qwen3-moe-tp2-pp2-ep2-etp2": Variant(QWEN3_MOE, Layout(tp=2, pp=2, ep=2, etp=2)),
    "qwen3-moe-tp2-pp2-ep4-etp1": Variant(QWEN3_MOE, Layout(tp=2, pp=2, ep=4, etp=1)),
    "qwen3-moe-per-layer": Variant({**QWEN3_MOE, "moe_layer_freq": [1] * 4}, Layout(pp=2, ep=2)),
    "qwen3-moe-singleton": Variant(
        QWEN3_MOE, Layout(ep=2), formats=("torch_dist",), save={"singleton": True}
    ),
    "qwen3-moe-grouped-legacy": Variant(
        {**QWEN3_MOE, **_GROUPED}, Layout(ep=2), steps=0, start="qwen3-moe-ep2"
    ),
    "qwen3-moe-te-grouped": Variant({**QWEN3_MOE, **_GROUPED}, Layout(tp=2, pp=2, ep=2, etp=1), spec="te"),
    "qwen3-moe-te-sequential": Variant(QWEN3_MOE, Layout(ep=2), spec="te"),
    "qwen2-moe-ep2": Variant(QWEN2_MOE, Layout(ep=2)),
    "qwen2-moe-te": Variant({**QWEN2_MOE, **_GROUPED}, Layout(tp=2, ep=2, etp=1), spec="te"),
    # What InternLM, InternLM2 and InternLM's mixture of experts are without biases.
    "plain-tp2-pp2": Variant({**DENSE, "num_query_groups": 4}, Layout(tp=2, pp=2)),
    "plain-grouped-tp2": Variant(DENSE, Layout(tp=2)),
    "plain-moe-ep2": Variant({**DENSE, **MOE, "num_query_groups": 4}, Layout(ep=2)),
    "glm4-moe": Variant(GLM4_MOE, Layout(pp=2, ep=2), formats=("torch_dist",)),
    "gpt-oss": Variant(GPT_OSS, Layout(tp=2, pp=2, ep=2, etp=1)),
    "gpt-oss-te": Variant(
        {**GPT_OSS, **_GROUPED}, Layout(tp=2, ep=2, etp=1), spec="te", formats=("torch_dist",)
    ),
    "deepseek-v3-te": Variant({**DEEPSEEK_V3, **_GROUPED}, Layout(tp=2, pp=2, ep=2, etp=1), spec="te"),
    "deepseek-v3-te-no-q-lora": Variant(
        {**DEEPSEEK_V3, **_GROUPED, "q_lora_rank": None, "mtp_num_layers": None},
        Layout(ep=2),
        spec="te",
    ),
}


def _buffered(
    args: dict[str, Any],
    layout: Layout | None = None,
    *,
    spec: LayerSpec = "local",
    bf16: bool = True,
    **more: Any,
) -> Variant:
    """A run whose distributed optimizer saves its buffers, and beside them what it holds for each parameter.

    Modules of TransformerEngine are not run: their optimizer steps along random gradients.
    """
    more = {"held": True, "gradients": spec != "te", **more}
    return Variant(args, layout or Layout(), spec, 2, bf16, True, ("torch_dist",), more=more)


BUFFERED = {
    "buffered-tp2-pp2-dp2": _buffered(QWEN2, Layout(tp=2, pp=2, dp=2), bucket_size=3000),
    "buffered-tied-pp2-vpp2": _buffered(QWEN2_TIED, Layout(pp=2, vpp=2), bucket_size=1),
    "buffered-tied-pp2-dp2": _buffered(QWEN2_TIED, Layout(pp=2, dp=2)),
    "buffered-fp32": _buffered(QWEN3, Layout(tp=2, dp=2), bf16=False, bucket_size=3000),
    "buffered-moe-tp2-pp2-ep2": _buffered(QWEN3_MOE, Layout(tp=2, pp=2, ep=2, etp=1, dp=2), bucket_size=3000),
    "buffered-moe": _buffered(QWEN3_MOE, Layout(pp=2, dp=2), bucket_size=3000),
    "buffered-uneven": _buffered(
        {**QWEN2, "pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 1}, Layout(pp=2)
    ),
    "buffered-last-stage": _buffered(
        {**QWEN2, "pipeline_model_parallel_size": 3, "decoder_last_pipeline_num_layers": 2}, Layout(pp=3)
    ),
    "buffered-pipeline-layout": _buffered(
        {**QWEN2, "pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et*3|tL"},
        Layout(pp=2),
    ),
    "buffered-stage-without-layers": _buffered(
        {**QWEN2, "pipeline_model_parallel_size": 3, "pipeline_model_parallel_layout": "Ett|tt|L"},
        Layout(pp=3),
    ),
    "buffered-deepseek-v3": _buffered(DEEPSEEK_V3, Layout(ep=2)),
    "buffered-glm4-moe": _buffered(GLM4_MOE, Layout(pp=2, ep=2), bucket_size=12000),
    "buffered-gpt-oss": _buffered(GPT_OSS, Layout(tp=2, pp=2, ep=2, etp=1), bucket_size=3000),
    "buffered-te": _buffered(QWEN2, Layout(tp=2, pp=2, dp=2), spec="te", bucket_size=3000),
    "buffered-te-moe": _buffered(
        {**QWEN3_MOE, **_GROUPED}, Layout(tp=2, pp=2, ep=2, etp=1), spec="te", bucket_size=3000
    ),
    "buffered-te-sequential": _buffered(QWEN3_MOE, Layout(ep=2), spec="te"),
    "buffered-te-gpt-oss": _buffered({**GPT_OSS, **_GROUPED}, Layout(tp=2, ep=2, etp=1), spec="te"),
    "buffered-te-deepseek-v3": _buffered(
        {**DEEPSEEK_V3, **_GROUPED}, Layout(tp=2, ep=2, etp=1), spec="te", bucket_size=12000
    ),
}
"""Runs with buffers of the distributed optimizer, in folders with what each holds in `held`."""
ALL = {**VARIANTS, **BUFFERED}


@dataclass(frozen=True)
class Genuine:
    """A checkpoint on disk: `roots[format]` is the folder with the tracker file, `args` Megatron-LM's arguments."""

    name: str
    roots: dict[str, Path]
    args: dict[str, Any]
    layout: Layout

    def iteration(self, format: MegatronFormat = "torch_dist") -> Path:
        """The `iter_*` or `release` folder."""
        tracker = (self.roots[format] / "latest_checkpointed_iteration.txt").read_text()
        return self.roots[format] / ("release" if tracker == "release" else f"iter_{int(tracker):07d}")


def tokens() -> npt.NDArray[np.int64]:
    """Sixteen sequences of seventeen tokens, all below the true vocabulary size."""
    return np.random.default_rng(0).integers(0, DENSE["vocab_size"], (16, 17))


def make(name: str, out: Path, megatron: str | None = None) -> Genuine:
    """Make the variant `name` under `out/name`, with another version of megatron-core if `megatron` names one."""
    variant = ALL[name]
    if variant.spec == "te" or megatron is not None:
        _make_elsewhere(name, out, megatron)
    else:
        _make_here(name, out)
    return existing(name, out)


def existing(name: str, out: Path) -> Genuine:
    """The checkpoint that `make` saved under `out/name`."""
    variant = ALL[name]
    roots = {
        format: out / name / format if len(variant.formats) > 1 else out / name for format in variant.formats
    }
    return Genuine(name, roots, variant.args, variant.layout)


def _make_here(name: str, out: Path) -> None:
    variant = ALL[name]
    if variant.start is not None:
        _make_here(variant.start, out)
    train_and_save(
        variant.args,
        out / name,
        tokens(),
        checkpoint=existing(variant.start, out).iteration() if variant.start else None,
        layout=variant.layout,
        spec=variant.spec,
        steps=variant.steps,
        lr=1e-2,  # far enough that bfloat16 norms of about one move
        bf16=variant.bf16,
        distributed_optimizer=variant.distributed_optimizer,
        iteration=2,
        **variant.more,
        save=tuple(SaveOptions(format=format, **variant.save) for format in variant.formats),
    )


def _make_elsewhere(name: str, out: Path, megatron: str | None) -> None:
    paths = [str(REPOSITORY / "src"), str(REPOSITORY)]
    if megatron is not None:
        paths.insert(0, str(mcore_site(megatron)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.genuine.megatron", str(out), name]
    done = subprocess.run(
        command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        raise RuntimeError(f"making {name} with megatron-core {megatron or 'as installed'}:\n{done.stderr}")


def mcore_site(megatron: str) -> Path:
    """A folder with only that version of megatron-core, installed on first use and kept."""
    site = CACHE / f"mcore-{megatron}"
    if not site.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        incomplete = CACHE / f"mcore-{megatron}.{os.getpid()}"
        requirement = f"megatron-core=={megatron}"
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--target",
            str(incomplete),
        ]
        subprocess.run([*command, requirement], check=True)
        incomplete.rename(site)
    return site


def _main() -> None:
    out, *names = sys.argv[1:]
    if any(ALL[name].spec == "te" for name in names):
        from tests.genuine import fake_te

        fake_te.install()
    print("megatron-core", version("megatron-core"))
    for name in names:
        _make_here(name, Path(out))


if __name__ == "__main__":
    _main()
