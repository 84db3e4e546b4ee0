from __future__ import annotations

import json
from pathlib import Path

import pytest

from reshard.families import FAMILIES
from reshard.folders import base_hints
from reshard.folders.base_hints import find_hints, read_run_config
from reshard.formats.megatron.writers import args_of_run_config
from reshard.transfer.source_files import Sources

# Some lines of what Megatron-Bridge 0.3.1 wrote for a small Qwen3-MoE.
RUN_CONFIG = """\
_target_: megatron.bridge.training.config.ConfigContainer
checkpoint:
  _target_: megatron.bridge.training.config.CheckpointConfig
  pretrained_checkpoint: null
model:
  _target_: megatron.bridge.models.gpt_provider.GPTModelProvider
  activation_func:
    _call_: false
    _target_: torch.nn.functional.silu
  add_bias_linear: false
  add_qkv_bias: false
  attention_backend:
    _args_:
    - 5
    _call_: true
    _target_: megatron.core.transformer.enums.AttnBackend
  attention_dropout: 0.0
  bf16: true
  ffn_hidden_size: 96
  fp16: false
  gated_linear_unit: true
  hf_model_id: /data/models/Qwen3-MoE
  hidden_size: 64
  init_method_std: 0.02
  kv_channels: 16
  layernorm_epsilon: 1.0e-06
  moe_ffn_hidden_size: 32
  moe_layer_freq: 1
  moe_router_pre_softmax: false
  moe_router_topk: 2
  num_attention_heads: 8
  num_layers: 4
  num_moe_experts: 8
  num_query_groups: 4
  params_dtype:
    _call_: false
    _target_: torch.bfloat16
  qk_layernorm: true
  rope_scaling: false
  rotary_base: 50000
  seq_length: 128
  share_embeddings_and_output_weights: false
  tensor_model_parallel_size: 2
  vocab_size: 283
tokenizer:
  _target_: megatron.bridge.training.tokenizers.config.TokenizerConfig
  tokenizer_model: /data/models/Qwen3-MoE
  tokenizer_type: HuggingFaceTokenizer
"""


def test_ms_swift(tmp_path: Path) -> None:
    base = tmp_path / "cache" / "Qwen3-8B"
    base.mkdir(parents=True)
    args = {
        "model": "Qwen/Qwen3-8B",
        "model_dir": str(base),
        "model_type": "qwen3",
        "torch_dtype": "bfloat16",
    }
    args |= {"tuner_type": "full", "mcore_model": None, "dataset": ["a"], "swift_version": "4.5.2"}
    (tmp_path / "args.json").write_text(json.dumps(args))
    found = find_hints([tmp_path / "iter_0000002", tmp_path], Sources())
    assert [(hint.kind, hint.key, hint.value, hint.exists) for hint in found] == [
        (base_hints.BASE, "model_dir", str(base), True),
        (base_hints.BASE, "model", "Qwen/Qwen3-8B", False),
        (base_hints.MODEL_TYPE, "model_type", "qwen3", False),
        (base_hints.DTYPE, "torch_dtype", "bfloat16", False),
        (base_hints.TUNER, "tuner_type", "full", False),
    ]
    assert all(hint.source == str(tmp_path / "args.json") for hint in found)


def test_a_path_that_is_gone_is_told(tmp_path: Path) -> None:
    (tmp_path / "args.json").write_text(json.dumps({"model": "/mnt/lost/Qwen2.5-32B", "train_type": "lora"}))
    base, tuner = find_hints([tmp_path], Sources())
    assert not base.exists
    assert str(base) == (
        f"{tmp_path / 'args.json'} (model) names the base model /mnt/lost/Qwen2.5-32B, which is not on this machine"
    )
    assert (tuner.kind, tuner.value) == (base_hints.TUNER, "lora") and "machine" not in str(tuner)


def test_megatron_bridge(tmp_path: Path) -> None:
    (tmp_path / "run_config.yaml").write_text(RUN_CONFIG)
    found = [(hint.kind, hint.key, hint.value) for hint in find_hints([tmp_path], Sources())]
    assert found == [
        (base_hints.BASE, "model.hf_model_id", "/data/models/Qwen3-MoE"),
        (base_hints.TOKENIZER, "tokenizer.tokenizer_model", "/data/models/Qwen3-MoE"),
    ]


def test_megatron_bridge_with_a_model_builder(tmp_path: Path) -> None:
    metadata = {"extra_checkpoint_metadata": {"hf_model_id": "org/model"}, "transformer": {"num_layers": 3}}
    (tmp_path / "run_config.yaml").write_text(json.dumps({"model": metadata}))
    assert [hint.value for hint in find_hints([tmp_path], Sources())] == ["org/model"]
    assert args_of_run_config(read_run_config(tmp_path, Sources()) or {})["num_layers"] == 3


def test_the_args_of_the_checkpoint(tmp_path: Path) -> None:
    args = {"tokenizer_model": str(tmp_path), "pretrained_checkpoint": None, "num_layers": 4}
    [hint] = find_hints([], Sources(), args)
    assert (hint.source, hint.kind, hint.exists) == (base_hints.ARGS, base_hints.TOKENIZER, True)
    [hint] = find_hints([], Sources(), {"tokenizer_model": "Qwen/Qwen3-8B"})
    assert not hint.exists


def test_a_config_from_the_run_config_of_megatron_bridge(tmp_path: Path) -> None:
    (tmp_path / "run_config.yaml").write_text(RUN_CONFIG)
    args = args_of_run_config(read_run_config(tmp_path, Sources()) or {})
    config = FAMILIES["qwen3_moe"].config.to_config(args)
    expected = {"num_hidden_layers": 4, "num_experts": 8, "num_key_value_heads": 4, "head_dim": 16}
    expected |= {
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "norm_topk_prob": True,
        "vocab_size": 283,
    }
    expected |= {"dtype": "bfloat16", "moe_intermediate_size": 32, "max_position_embeddings": 128}
    expected |= {"rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}}
    assert {key: config[key] for key in expected} == expected
    assert args["swiglu"] is True and "activation_func" not in args
    assert read_run_config(tmp_path / "absent", Sources()) is None


def test_yaml_tags_are_read_as_data_and_run_nothing(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (tmp_path / "run_config.yaml").write_text(
        f"model: !!python/object:megatron.Provider\n"
        f"  hf_model_id: !!python/name:os.system base\n"
        f"  apply: !!python/object/apply:os.system ['touch {marker}']\n"
        f"  new: !!python/object/new:subprocess.Popen [['touch', '{marker}']]\n"
        f"  window: !!python/tuple [1, 2]\n"
        f"checkpoint: {{hf_source_path: !own tagged}}\n"
    )
    assert {hint.key: hint.value for hint in find_hints([tmp_path], Sources())} == {
        "checkpoint.hf_source_path": "tagged",
        "model.hf_model_id": "base",
    }
    content = read_run_config(tmp_path, Sources()) or {}
    assert content["model"]["window"] == [1, 2]
    assert content["model"]["apply"] == [f"touch {marker}"]
    assert not marker.exists()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run_config.yaml", "model: [unclosed"),
        ("run_config.yaml", "- a\n- list"),
        ("run_config.yaml", "a: 2021-99-99"),
        ("args.json", "{"),
        ("args.json", "[" * 100_000),
        ("args.json", "3"),
    ],
)
def test_a_file_that_cannot_be_read_is_told(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    [hint] = find_hints([tmp_path], Sources())
    assert (hint.kind, hint.source) == (base_hints.UNREADABLE, str(tmp_path / name))


def test_no_files_no_hints(tmp_path: Path) -> None:
    assert find_hints([tmp_path, tmp_path / "absent"], Sources(), {}) == []
    (tmp_path / "args.json").write_text(json.dumps({"model": "x" * 5000, "model_dir": ["not a path"]}))
    [hint] = find_hints([tmp_path], Sources())
    assert not hint.exists
