"""Every family: megatron-core computes the same as transformers, and the round trip is bit for bit.

No mechanism of these families is beyond megatron-core on a CPU. Two are judged in two parts, because TransformerEngine
itself needs a GPU: the local modules of megatron-core compute the logits of what was written for TransformerEngine's
modules, and TransformerEngine's modules (megatron-core's real ones, over a stand-in for the library) load it strictly.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from functools import cache
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("megatron.core")

import torch
from transformers import AutoTokenizer
from transformers.modeling_layers import MtpModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer, Qwen3NextRMSNorm

import reshard
from reshard.algebra.layout import Layout
from reshard.base.errors import ReshardError
from reshard.oracle.transformers import Logits, load_model, transformers_logits
from tests.genuine.huggingface import VARIANTS
from tests.judges import (
    THRESHOLD,
    TOKENS,
    assert_agree,
    assert_same_tensors,
    differing_keys,
    judged_by_megatron,
    tensors_of,
)

Models = Callable[..., Path]

MOE = {name for name, (_, own) in VARIANTS.items() if "num_experts_per_tok" in own}
LATENT = {name for name in VARIANTS if name.startswith("deepseek")}
WIDE = {
    name: {"tp": 2, "pp": 2, "ep": 2, "etp": 1} if name in MOE else {"tp": 2, "pp": 2} for name in VARIANTS
}
DEEP = {name: {"ep": 4} if name in MOE else {"pp": 2, "vpp": 2} for name in VARIANTS}
SHARED = {name: {"tp": 4, "ep": 2, "etp": 1} if name in MOE else {"tp": 4} for name in VARIANTS}
OTHER = {name: Layout(pp=2, vpp=2, ep=2 if name in MOE else 1) for name in VARIANTS}
FORMATS = ("megatron", "megatron-legacy")
DELTA_NET = 4 * THRESHOLD
"""For the last head of a recurrent model: on some processors, both sides differ by up to 1e-5 of the largest logit."""
DELTA = {name for name, (_, own) in VARIANTS.items() if "linear_num_key_heads" in own}


def formats(name: str) -> tuple[str, ...]:
    """The formats of a variant: reshard does not write gated delta nets into rank files."""
    return FORMATS[:1] if name in DELTA else FORMATS


CASES = [(name, to) for name in VARIANTS for to in formats(name)]


@cache
def by_transformers(folder: Path) -> Logits:
    return transformers_logits(folder, TOKENS)


@pytest.fixture(scope="module")
def converted(hf_model: Models, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A variant in a Megatron format and layout, converted once."""
    made: dict[str, Path] = {}

    def get(name: str, to: str, layout: dict[str, int], **options: str) -> Path:
        key = f"{name} {to} {layout} {options}"
        if key not in made:
            made[key] = tmp_path_factory.mktemp(name) / "megatron"
            reshard.convert(hf_model(name), made[key], to=to, **layout, **options)
        return made[key]

    return get


MECHANISMS = ("llama", "qwen3_moe", "deepseek_v3_mtp", "gpt_oss", "qwen3_next")
"""One family for each way in which megatron-core computes."""
OTHERS = [name for name in VARIANTS if name not in MECHANISMS]


@pytest.mark.parametrize(
    "name, to, layouts",
    [(name, to, layouts) for name, to in CASES for layouts in (WIDE, DEEP)],
    ids=[f"{name}-{to}-{shape}" for name, to in CASES for shape in ("wide", "deep")],
)
@pytest.mark.core(
    *("llama-megatron-wide", "llama-megatron-legacy-deep", "qwen3_moe-megatron-legacy-deep"),
    *("deepseek_v3_mtp-megatron-wide", "gpt_oss-megatron-legacy-deep", "qwen3_next-megatron-wide"),
)
def test_megatron_computes_the_same_at_the_layout_that_was_written(
    name: str,
    to: str,
    layouts: dict[str, dict[str, int]],
    hf_model: Models,
    converted: Callable[..., Path],
) -> None:
    result = judged_by_megatron(converted(name, to, layouts[name]))
    assert_agree(result.logits, by_transformers(hf_model(name)))


@pytest.mark.core(
    "llama_tied",
    "mixtral",
    "qwen2_moe",
    "qwen3_tied",
    "internlm3_bias",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "dots1",
    "hy_v3",
    "smollm3",
    "qwen3_5_text",
    "phi3",
    "ernie4_5_bias_tied",
)
@pytest.mark.parametrize("name", OTHERS)
def test_megatron_computes_the_same_on_one_rank(
    name: str, hf_model: Models, converted: Callable[..., Path]
) -> None:
    """Whatever the layout that was written: one rank loads all shards of every weight."""
    result = judged_by_megatron(converted(name, "megatron", WIDE[name]), Layout())
    assert_agree(result.logits, by_transformers(hf_model(name)))


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.core("qwen3_moe")
def test_megatron_computes_the_same_at_another_layout(
    name: str, hf_model: Models, converted: Callable[..., Path]
) -> None:
    expected = by_transformers(hf_model(name))
    assert_agree(judged_by_megatron(converted(name, "megatron", WIDE[name]), OTHER[name]).logits, expected)
    assert_agree(judged_by_megatron(converted(name, "megatron", DEEP[name]), Layout()).logits, expected)


@pytest.mark.parametrize("name, to", CASES)
@pytest.mark.thorough
def test_modules_of_transformer_engine_find_all_their_keys(
    name: str, to: str, converted: Callable[..., Path], transformer_engine: Executor
) -> None:
    """No weight and no extra state is missing or unexpected; the layout is the one that was written."""
    folder = converted(name, to, WIDE[name])
    result = transformer_engine.submit(judged_by_megatron, folder, spec="te").result(timeout=120)
    assert result.other == ()


@pytest.mark.thorough
@pytest.mark.parametrize("name", OTHERS)
def test_modules_of_transformer_engine_find_all_their_keys_on_one_rank(
    name: str, converted: Callable[..., Path], transformer_engine: Executor
) -> None:
    folder = converted(name, "megatron", WIDE[name])
    result = transformer_engine.submit(judged_by_megatron, folder, Layout(), "te").result(timeout=120)
    assert result.other == ()


@pytest.mark.thorough
def test_modules_of_transformer_engine_are_given_no_other_names(
    converted: Callable[..., Path], transformer_engine: Executor
) -> None:
    """Proves that finding all keys means something: local modules have another name for the norm before experts."""
    folder = converted("qwen3_moe", "megatron", WIDE["qwen3_moe"], transformer_impl="local")
    with pytest.raises(ReshardError, match="lacks a weight") as raised:
        transformer_engine.submit(judged_by_megatron, folder, spec="te").result(timeout=120)
    assert "pre_mlp_layernorm" in str(raised.value)


# megatron-core cannot build latent attention and delta nets of its local modules without help, so nobody has these.
@pytest.mark.parametrize("name, to", [(name, to) for name, to in CASES if name not in LATENT | DELTA])
@pytest.mark.core("gpt_oss-megatron-legacy")
def test_local_modules_find_all_their_keys(
    name: str, to: str, hf_model: Models, converted: Callable[..., Path]
) -> None:
    result = judged_by_megatron(converted(name, to, WIDE[name], transformer_impl="local"))
    assert result.other == ()
    assert_agree(result.logits, by_transformers(hf_model(name)))


@pytest.mark.parametrize("name, to", CASES)
@pytest.mark.core("*-megatron", *(f"{name}-megatron-legacy" for name in MECHANISMS if name not in DELTA))
def test_the_way_back_is_bit_for_bit(
    name: str, to: str, hf_model: Models, converted: Callable[..., Path], tmp_path: Path
) -> None:
    source = hf_model(name)
    for layout in (WIDE[name], DEEP[name]):
        back = tmp_path / f"{layout}"
        reshard.convert(converted(name, to, layout), back)
        assert_same_tensors(tensors_of(back), tensors_of(source))
    np.testing.assert_array_equal(transformers_logits(back, TOKENS), by_transformers(source))
    assert differing_keys(back, source) == set()
    travelling = {path.name for path in source.iterdir()} - {"config.json", "model.safetensors"}
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= travelling
    for file in travelling - {"tokenizer_config.json"}:  # transformers 4 reads another spelling of it
        assert (back / file).read_bytes() == (source / file).read_bytes()
    ours, theirs = AutoTokenizer.from_pretrained(back), AutoTokenizer.from_pretrained(source)
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.special_tokens_map == theirs.special_tokens_map


@pytest.mark.parametrize(
    "name",
    sorted(VARIANTS.keys() - LATENT - DELTA),  # megatron-core 0.16.1 does not share gates
)
@pytest.mark.slow
def test_tensor_parallel_ranks_can_share_query_groups(
    name: str, hf_model: Models, transformer_engine: Executor, tmp_path: Path
) -> None:
    """Four ranks and two groups: megatron-core computes the same, and the round trip is bit for bit."""
    source = hf_model(name, num_key_value_heads=2)
    expected = by_transformers(source)
    for to in formats(name):
        there, local = tmp_path / to, tmp_path / f"{to} local"
        plan = reshard.convert(source, there, to=to, **SHARED[name]).plan
        assert "--tp 4 is larger than the 2 query groups: this needs megatron-core>=0.16" in plan.notes
        assert_agree(judged_by_megatron(there).logits, expected)
        found = transformer_engine.submit(judged_by_megatron, there, spec="te").result(timeout=120)
        assert found.other == ()
        reshard.convert(source, local, to=to, transformer_impl="local", **SHARED[name])
        found = judged_by_megatron(local)
        assert found.other == ()
        assert_agree(found.logits, expected)
        reshard.convert(there, tmp_path / f"{to} back")
        assert_same_tensors(tensors_of(tmp_path / f"{to} back"), tensors_of(source))


MTP = ("deepseek_v3_mtp", "glm4_moe", "mimo", "qwen3_next")


@pytest.mark.parametrize(
    "name, to, layouts",
    [(name, to, layouts) for name in MTP for to in formats(name) for layouts in (WIDE, DEEP)],
    ids=[f"{name}-{to}-{shape}" for name in MTP for to in formats(name) for shape in ("wide", "deep")],
)
@pytest.mark.core("deepseek_v3_mtp-megatron-deep")
def test_the_head_of_multi_token_prediction_computes_the_same(
    name: str,
    to: str,
    layouts: dict[str, dict[str, int]],
    hf_model: Models,
    converted: Callable[..., Path],
) -> None:
    """Position i sees the main model's hidden state at i and the token at i + 1, so the last one has no input."""
    by_name = {"mimo": mimo_mtp_logits, "qwen3_next": qwen3_next_mtp_logits}
    expected = by_name.get(name, mtp_logits)(hf_model(name))
    (ours,) = judged_by_megatron(converted(name, to, layouts[name])).mtp
    assert_agree(ours[:, :-1], expected, DELTA_NET if name == "qwen3_next" else THRESHOLD)


def mtp_logits(folder: Path) -> Logits:
    """Logits [batch, seq - 1, vocab] of the first MTP layer in a folder, by transformers' MtpModel."""
    main = load_model(folder)
    # transformers finds MTP layers by the number that they have in the 61-layer model.
    main._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{main.config.num_hidden_layers}\."]
    mtp = MtpModel.from_pretrained(main).eval()
    tokens = torch.from_numpy(TOKENS)
    with torch.inference_mode():
        hidden = main.model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1]
        positions = torch.arange(hidden.shape[1]).unsqueeze(0)
        output = mtp.forward_layer(0, hidden, positions, None, input_ids=tokens[:, 1:])
        logits: Logits = main.lm_head(output).numpy()
    return logits


def mimo_mtp_logits(folder: Path) -> Logits:
    """The same for MiMo, by Qwen2's modules, which its own code consists of: the hidden state is before the embedding.

    Source: modeling_mimo.py of XiaomiMiMo/MiMo-7B-Base.
    """
    main, prefix = load_model(folder), "model.mtp_layers.0."
    own = {key.removeprefix(prefix): value for key, value in tensors_of(folder).items() if prefix in key}
    layer = Qwen2DecoderLayer(main.config, 0).eval()
    norms = {
        name: Qwen2RMSNorm(main.config.hidden_size, main.config.rms_norm_eps)
        for name in ("token_layernorm", "hidden_layernorm", "final_layernorm")
    }
    for name, norm in norms.items():
        norm.load_state_dict({"weight": own.pop(f"{name}.weight")})
    projection = own.pop("input_proj.weight")
    layer.load_state_dict(own)
    tokens = torch.from_numpy(TOKENS)
    with torch.inference_mode():
        hidden = main.model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1]
        embedded = norms["token_layernorm"](main.model.embed_tokens(tokens[:, 1:]))
        hidden = torch.cat([norms["hidden_layernorm"](hidden), embedded], dim=-1) @ projection.T
        length = hidden.shape[1]
        causal = torch.full((1, 1, length, length), -torch.inf).triu(1)
        angles = main.model.rotary_emb(hidden, torch.arange(length)[None])
        output = norms["final_layernorm"](
            layer(hidden, attention_mask=causal, position_embeddings=angles, use_cache=False)
        )
        logits: Logits = main.lm_head(output).numpy()
    return logits


def qwen3_next_mtp_logits(folder: Path) -> Logits:
    """The same for Qwen3-Next, by transformers' modules of its layers; transformers drops the MTP layer itself.

    Source: qwen3_next_mtp.py of vLLM, for the order of embedding and hidden state.
    """
    main, prefix = load_model(folder), "mtp.layers.0."
    own = {key: value for key, value in tensors_of(folder).items() if key.startswith("mtp.")}
    layer = Qwen3NextDecoderLayer(main.config, main.config.layer_types.index("full_attention")).eval()
    experts = layer.mlp.experts
    parts = [
        own.pop(f"{prefix}mlp.experts.{e}.{part}_proj.weight") for e in range(4) for part in ("gate", "up")
    ]
    down = [own.pop(f"{prefix}mlp.experts.{e}.down_proj.weight") for e in range(4)]
    experts.gate_up_proj.data = torch.cat(parts).reshape(experts.gate_up_proj.shape)
    experts.down_proj.data = torch.stack(down)
    rest = {key.removeprefix(prefix): value for key, value in own.items() if key.startswith(prefix)}
    assert not layer.load_state_dict(rest, strict=False).unexpected_keys
    norms = {}
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        norms[name] = Qwen3NextRMSNorm(main.config.hidden_size, main.config.rms_norm_eps)
        norms[name].load_state_dict({"weight": own[f"mtp.{name}.weight"]})
    tokens = torch.from_numpy(TOKENS)
    with torch.inference_mode():
        hidden = main.model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1]
        embedded = norms["pre_fc_norm_embedding"](main.model.embed_tokens(tokens[:, 1:]))
        joined = torch.cat([embedded, norms["pre_fc_norm_hidden"](hidden)], dim=-1)
        hidden = joined @ own["mtp.fc.weight"].T
        length = hidden.shape[1]
        causal = torch.full((1, 1, length, length), -torch.inf).triu(1)
        angles = main.model.rotary_emb(hidden, torch.arange(length)[None])
        output = layer(hidden, attention_mask=causal, position_embeddings=angles, use_cache=False)
        logits: Logits = main.lm_head(norms["norm"](output)).numpy()
    return logits
