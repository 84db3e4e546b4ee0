"""MLX folders: read as mlx itself dequantizes them, written as mlx-lm writes them, and refused when they are wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import reshard
from reshard.algebra.tensors import Tensor
from reshard.base.errors import ReshardError
from reshard.codecs.mlx_modes import BITS, GROUPS, ModeSettings, packed, unpacked
from reshard.codecs.mlx_modes import quantized as quantized_group
from reshard.codecs.mlx_weights import WeightParts, affine, dequantized
from reshard.containers.safetensors import read_tensors
from reshard.families.dialects import mlx
from reshard.formats.mlx.write import METHODS
from reshard.transfer.gather import Gatherer
from reshard.transfer.source_files import Sources
from reshard.transfer.thread_files import OpenFiles
from tests.commandline import reshard as command
from tests.environments import python
from tests.genuine import every_type, huggingface, model_types, quantized
from tests.genuine.tiny_configs import GEMMA4_SHARING
from tests.judges import assert_same_tensors, tensors_of

DATA = Path(__file__).parent / "data/mlx"
SCRIPT = Path(__file__).parent / "genuine/run_mlx.py"
Tensors = dict[str, torch.Tensor]


class Model(NamedTuple):
    """A small model: a variant of `huggingface`, or else of `model_types`, and the keys of its config that mlx needs.

    `without` are beginnings of the names of tensors that MLX does not have. `is_rounded` says that it changes norms,
    and `routers` that it casts tensors that transformers keeps in float32.
    """

    name: str
    settings: Mapping[str, Any] = {}
    config: Mapping[str, Any] = {}
    without: tuple[str, ...] = ()
    is_rounded: bool = False
    routers: bool = False


NARROW = {"head_dim": 8}
"""What mlx-lm takes for granted in some classes: as many features of all heads as of the model."""
GEMMA4_TOWERS = ("model.vision_tower", "model.embed_vision", "model.audio_tower", "model.embed_audio")
MODELS = {
    each.name: each
    for each in (
        Model("llama"),
        Model("llama_tied"),
        Model("qwen3"),
        Model("gemma"),
        Model("gemma2"),
        Model("gemma3_text"),
        Model("gemma4_text", GEMMA4_SHARING),
        Model("gemma4_moe"),
        Model("gemma4", config={"vocab_size": 384}, without=GEMMA4_TOWERS),
        Model("deepseek_v32", without=("model.layers.4",), routers=True),
        Model("glm_moe_dsa", without=("model.layers.4",), routers=True),
        Model(
            "step3p5",
            config={"pad_token_id": 0},
            without=("model.layers.4", "model.layers.5"),
            is_rounded=True,
        ),
        Model("mimo_v2_flash", without=("model.mtp",), routers=True),
        Model(
            "minimax_m3_vl",
            without=("vision_tower", "multi_modal_projector", "patch_merge_mlp"),
            routers=True,
        ),
        Model("bailing_moe", {**NARROW, "num_nextn_predict_layers": 0}, routers=True),
        Model("bailing_hybrid", without=("model.layers.4",), routers=True),
        Model("gemma3", config={"vocab_size": 288}, without=("vision_tower", "multi_modal_projector")),
        Model("nemotron"),
        Model("glm4"),
        Model("mimo", NARROW, without=("model.mtp_layers",)),
        Model("mixtral", NARROW),
        Model("qwen2_moe"),
        Model("qwen3_moe"),
        Model("olmoe"),
        Model("ernie4_5_moe"),
        Model("minimax_m2", config={"shared_intermediate_size": 24}),
        Model("deepseek", NARROW, routers=True),
        Model("deepseek_v2"),
        Model("deepseek_v3"),
        Model("kimi_k2", routers=True),
        Model("glm4_moe", without=("model.layers.4",)),
        Model("glm4_moe_lite"),
        Model("dots1", routers=True),
        Model("nemotron_h", routers=True),
        Model("llama4", without=("vision_model", "multi_modal_projector")),
        Model("mistral3", without=("vision_tower", "multi_modal_projector")),
        Model("qwen3_next", without=("mtp",), is_rounded=True),
        Model("qwen3_5", without=("mtp", "model.visual"), is_rounded=True),
        Model("qwen3_5_moe", without=("mtp", "model.visual"), is_rounded=True),
        Model("qwen2_5_vl", without=("visual",)),
        Model("qwen3_vl", without=("model.visual",)),
        Model("qwen3_vl_moe", without=("model.visual",)),
    )
}
COMPUTED: dict[str, dict[str, Any]] = {
    "gemma4_text": GEMMA4_SHARING,
    **{name: {} for name in ("gemma4_moe", "gemma4", "minimax_m3_vl", "muse_glimmer")},
}
"""Models of which mlx-lm computes what transformers does, and their settings. It cannot convert Muse-Glimmer itself."""
HYBRID = {
    "num_local_experts": 4,
    "shared_intermediate_size": 64,
    "layer_types": ["linear_attention", "full_attention"],
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
}
KINDS = {"layer_types": ["mamba", "attention"]}
KIMI = {
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_layer_types": ["sparse", "sparse"],
    "linear_num_heads": 4,
    "linear_head_dim": 32,
    "num_experts_per_token": 2,
}
KIMI_LAYERS = {
    "num_heads": 4,
    "head_dim": 32,
    "short_conv_kernel_size": 4,
    "kda_layers": [1],
    "full_attn_layers": [2],
}
LFM2 = {"block_dim": 64, "block_ff_dim": 256, "block_multiple_of": 64, "block_ffn_dim_multiplier": 1.0}
UNDECLARED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "afmoe": ({"layer_types": ["sliding_attention", "full_attention"], "num_dense_layers": 1}, {}),
    "exaone_moe": ({}, {"head_dim": 16, "is_moe_layer": [False, True]}),
    "gpt_neox": ({"intermediate_size": 256}, {"rotary_emb_base": 10000, "rotary_pct": 0.25}),
    "granitemoehybrid": (HYBRID, KINDS),
    "granitemoehybrid-dense": ({**HYBRID, "num_local_experts": 0}, KINDS),
    "kimi_linear": (
        KIMI,
        {"rope_theta": 10000.0, "mla_use_nope": True, "linear_attn_config": KIMI_LAYERS},
    ),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, {**LFM2, "block_auto_adjust_ff_dim": False}),
    "lfm2_moe": ({}, {}),
    "mellum": ({}, {"num_experts": 4}),
    "mistral4": ({}, {}),
    "solar_open": ({}, {"first_k_dense_replace": 0, "intermediate_size": 64, "partial_rotary_factor": 1.0}),
}
"""Models that are not declared for Megatron: settings, and the keys of their published configs that mlx needs."""
WIDE = {key: 64 for key, size in every_type.SIZES.items() if size in (24, 32, 48)}
"""Sizes that groups of 64 divide."""
NORMS = (
    *("input_layernorm.weight", "post_attention_layernorm.weight", "q_norm.weight", "k_norm.weight"),
    *("model.norm.weight", "language_model.norm.weight"),
)
"""Zero-centred norms, to which mlx-lm adds one."""
NONE = ("\n",)
"""The beginning and the end of no name."""
QUANTIZED = {"affine-4": {"q_bits": 4}, "affine-3-32": {"q_bits": 3, "q_group_size": 32}}
SEEING = {
    "qwen2_vl": "visual.",
    "qwen2_5_vl": "visual.",
    "qwen3_vl": "model.visual.",
    "qwen3_5_moe": "model.visual.",
}
"""Models that mlx-vlm converts, and the prefix of their towers on the Hub."""


def run(folder: Path, jobs: list[dict[str, Any]]) -> None:
    """Let mlx do these jobs, all of which must succeed."""
    told = folder / "jobs.json"
    told.write_text(json.dumps(jobs, default=str))
    done = subprocess.run([python("mlx"), SCRIPT, told], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    failed = json.loads(done.stdout.splitlines()[-1])
    assert not failed, {str(jobs[int(number)]): why for number, why in failed.items()}


def hub(model: Model, folder: Path) -> Path:
    """A folder of the model with a config that mlx-lm can read: reshard writes both spellings of transformers."""
    made, plain = folder / "hub", folder / "plain"
    if model.name in huggingface.VARIANTS or model.name in huggingface.ALIASES:
        huggingface.make_model(model.name, made, dtype="bfloat16", **model.settings)
    else:
        model_types.make_model_type(model.name, made, **model.settings)
    reshard.convert(made, plain, to="huggingface", dtype="bfloat16")
    huggingface.edit_config(plain, dict(model.config))
    return plain


def base_of(model: Model, plain: Path) -> Path | None:
    """The base that a vision tower comes from."""
    is_part = any("vis" in each or "multi" in each for each in model.without)
    return plain if is_part else None


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each model, with what mlx-lm and reshard write, and the logits of mlx-lm."""
    folder = tmp_path_factory.mktemp("mlx")
    jobs: list[dict[str, Any]] = []
    for model in MODELS.values():
        place = folder / model.name
        plain = hub(model, place)
        reshard.convert(plain, place / "ours", to="mlx")
        jobs.append({"do": "convert", "hf_path": plain, "mlx_path": place / "theirs"})
        for how, flags in QUANTIZED.items():
            reshard.convert(plain, place / f"ours-{how}", to="mlx", quantize=how)
            theirs = place / f"theirs-{how}"
            jobs.append({"do": "convert", "hf_path": plain, "mlx_path": theirs, "quantize": True, **flags})
            dequantize = {"hf_path": theirs, "mlx_path": place / f"dequantized-{how}", "dequantize": True}
            jobs.append({"do": "convert", **dequantize})
        for whose in (
            f"{who}{how}" for who in ("ours", "theirs") for how in ("", *(f"-{q}" for q in QUANTIZED))
        ):
            jobs.append({"do": "load", "folder": place / whose, "logits": place / f"{whose}.npy"})
    run(folder, jobs)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("how", ["", *QUANTIZED])
def test_written_as_by_mlx_lm(name: str, how: str, made: Path) -> None:
    ours, theirs = (made / name / f"{who}-{how}".rstrip("-") for who in ("ours", "theirs"))
    assert_same_tensors(tensors_of(ours), tensors_of(theirs))
    configs = [json.loads((each / "config.json").read_text()) for each in (ours, theirs)]
    for key in ("quantization", "quantization_config", "vision_config"):
        assert configs[0].get(key) == configs[1].get(key)
    logits = [np.load(each.with_name(f"{each.name}.npy")) for each in (ours, theirs)]
    assert np.isfinite(logits[0]).all()
    assert np.array_equal(*logits)


def as_kept(model: Model, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the Hub after mlx-lm has stored it in bfloat16."""
    naming = mlx.naming({"model_type": model.name})
    if model.is_rounded and name.endswith(NORMS):
        return tensor + 1 - 1
    return tensor.to(torch.bfloat16) if model.routers and not name.endswith(naming.exact or NONE) else tensor


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_plain_weights_of_mlx_lm_are_those_of_the_hub(name: str, made: Path, tmp_path: Path) -> None:
    model, plain, theirs = MODELS[name], made / name / "plain", made / name / "theirs"
    base = base_of(model, plain)
    reshard.convert(theirs, tmp_path / "back", to="huggingface", base=base)
    lost = tuple(each for each in model.without if each.startswith("mtp") or not base) or NONE
    expected, back = (
        {key: each for key, each in tensors_of(folder).items() if not key.startswith(lost)}
        for folder in (plain, tmp_path / "back")
    )
    assert_same_tensors(back, {key: as_kept(model, key, each) for key, each in expected.items()})
    assert command("verify", theirs, tmp_path / "back", "--proof").code == 0
    assert command("verify", plain, made / name / "ours", "--proof").code == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("how", QUANTIZED)
def test_quantized_weights_are_what_mlx_lm_dequantizes(
    name: str, how: str, made: Path, tmp_path: Path
) -> None:
    base = base_of(MODELS[name], made / name / "plain")
    for whose in ("theirs", "dequantized", "ours"):
        reshard.convert(made / name / f"{whose}-{how}", tmp_path / whose, to="huggingface", base=base)
    found = {whose: tensors_of(tmp_path / whose) for whose in ("theirs", "dequantized", "ours")}
    assert_same_tensors(found["theirs"], found["dequantized"])
    assert_same_tensors(found["ours"], found["dequantized"])
    told = command("inspect", made / name / f"theirs-{how}", "--json").json
    assert told["format"] == "mlx" and "affine, " in told["variant"]


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPUTED)
def test_mlx_lm_computes_what_transformers_does(name: str, tmp_path: Path) -> None:
    model = Model(name, COMPUTED[name], MODELS[name].config if name in MODELS else {})
    plain = hub(model, tmp_path)
    reshard.convert(plain, tmp_path / "ours", to="mlx")
    run(tmp_path, [{"do": "load", "folder": tmp_path / "ours", "logits": tmp_path / "ours.npy"}])
    theirs = model_types.class_of(name).from_pretrained(plain, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = theirs(torch.arange(3, 27)[None]).logits.numpy()
    assert np.abs(np.load(tmp_path / "ours.npy") - expected).max() < 1e-3 * np.abs(expected).max()
    reshard.convert(tmp_path / "ours", tmp_path / "back", to="huggingface", base=plain)
    kept = {
        key: each if key.endswith(mlx.EXACT_ROUTER_BIAS) else each.bfloat16()
        for key, each in tensors_of(plain).items()
    }
    assert_same_tensors(tensors_of(tmp_path / "back"), kept)


@pytest.mark.slow
def test_a_model_whose_other_parts_are_not_declared_is_written(tmp_path: Path) -> None:
    """Gemma 4 of 12B parameters."""
    plain = hub(Model("gemma4_unified", config={"vocab_size": 384}), tmp_path)
    jobs: list[dict[str, Any]] = []
    for how, flags in {"": {}, **QUANTIZED}.items():
        ours, theirs = (tmp_path / f"{who}-{how}" for who in ("ours", "theirs"))
        reshard.convert(plain, ours, to="mlx", quantize=how or None)
        jobs.append({"do": "convert", "hf_path": plain, "mlx_path": theirs, "quantize": bool(how), **flags})
        jobs += [{"do": "load", "folder": each, "logits": f"{each}.npy"} for each in (ours, theirs)]
    run(tmp_path, jobs)
    for how in ("", *QUANTIZED):
        ours, theirs = (tmp_path / f"{who}-{how}" for who in ("ours", "theirs"))
        assert_same_tensors(tensors_of(ours), tensors_of(theirs))
        assert np.array_equal(*(np.load(f"{each}.npy") for each in (ours, theirs)))
    model = model_types.class_of("gemma4_unified").from_pretrained(plain, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(torch.arange(3, 27)[None]).logits.numpy()
    assert np.abs(np.load(tmp_path / "ours-.npy") - expected).max() < 1e-3 * np.abs(expected).max()


@pytest.mark.slow
@pytest.mark.parametrize("name", UNDECLARED)
def test_models_without_a_family_are_written_as_by_mlx_lm(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, (settings, config) = name.removesuffix("-dense"), UNDECLARED[name]
    monkeypatch.setitem(every_type.MORE, kind, settings)
    for key, size in {**WIDE, "head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}.items():
        monkeypatch.setitem(every_type.SIZES, key, size)
    model, made, plain = every_type.build(kind).bfloat16(), tmp_path / "made", tmp_path / "plain"
    model.save_pretrained(made)
    huggingface.make_tokenizer().save_pretrained(made)
    reshard.convert(made, plain, to="huggingface")
    huggingface.edit_config(plain, config)
    jobs: list[dict[str, Any]] = []
    for how, flags in {"": {}, "affine-4-32": {"quantize": True, "q_bits": 4, "q_group_size": 32}}.items():
        ours, theirs = (tmp_path / f"{who}{how}" for who in ("ours", "theirs"))
        reshard.convert(plain, ours, to="mlx", quantize=how or None)
        jobs.append({"do": "convert", "hf_path": plain, "mlx_path": theirs, **flags})
        jobs += [{"do": "load", "folder": each, "logits": f"{each}.npy"} for each in (ours, theirs)]
    run(tmp_path, jobs)
    for how in ("", "affine-4-32"):
        ours, theirs = (tmp_path / f"{who}{how}" for who in ("ours", "theirs"))
        assert_same_tensors(tensors_of(ours), tensors_of(theirs))
        configs = [json.loads((each / "config.json").read_text()) for each in (ours, theirs)]
        assert configs[0].get("quantization") == configs[1].get("quantization")
        assert np.array_equal(*(np.load(f"{each}.npy") for each in (ours, theirs)))
    reshard.convert(tmp_path / "theirs", tmp_path / "back", to="huggingface")
    assert_same_tensors(tensors_of(tmp_path / "back"), tensors_of(plain))


@pytest.mark.slow
def test_keys_that_no_layer_of_mlx_lm_reads_are_left_out(tmp_path: Path) -> None:
    """Gemma 4 as published: layers that share keys and values have some of their own."""
    plain = hub(Model("gemma4_text", GEMMA4_SHARING), tmp_path)
    tensors = load_file(plain / "model.safetensors")
    for name in ("k_proj", "v_proj", "k_norm"):
        for layer, own in ((4, 0), (5, 1)):
            like = tensors[f"model.layers.{own}.self_attn.{name}.weight"]
            tensors[f"model.layers.{layer}.self_attn.{name}.weight"] = like.clone()
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    result = reshard.convert(plain, tmp_path / "ours", to="mlx")
    assert list(result.plan.dropped) == [mlx.REMOVED_SHARED.rule]
    run(tmp_path, [{"do": "convert", "hf_path": plain, "mlx_path": tmp_path / "theirs"}])
    assert_same_tensors(tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "theirs"))


@pytest.mark.slow
def test_gpt_oss_keeps_its_experts_in_mxfp4(tmp_path: Path) -> None:
    plain = hub(Model("gpt_oss", {"swiglu_limit": 7.0}), tmp_path)  # which mlx-lm takes for granted
    reshard.convert(plain, tmp_path / "published", to="huggingface", quantize="mxfp4")
    reshard.convert(plain, tmp_path / "ours", to="mlx")
    reshard.convert(plain, tmp_path / "ours-affine-8", to="mlx", quantize="affine-8-32")
    theirs = {"hf_path": tmp_path / "published", "mlx_path": tmp_path / "theirs"}
    loads = [
        {"do": "load", "folder": tmp_path / each, "logits": tmp_path / f"{each}.npy"}
        for each in ("ours", "ours-affine-8")
    ]
    run(tmp_path, [{"do": "convert", **theirs}, *loads])
    reshard.convert(tmp_path / "published", tmp_path / "expected", to="huggingface", dtype="bfloat16")
    reshard.convert(tmp_path / "theirs", tmp_path / "back", to="huggingface")
    assert_same_tensors(tensors_of(tmp_path / "back"), tensors_of(tmp_path / "expected"))
    reshard.convert(tmp_path / "ours", tmp_path / "again", to="huggingface")
    assert_same_tensors(tensors_of(tmp_path / "again"), tensors_of(plain))
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(torch.arange(3, 27)[None]).logits.numpy()
    assert np.abs(np.load(tmp_path / "ours.npy") - expected).max() < 1e-3 * np.abs(expected).max()
    assert np.isfinite(np.load(tmp_path / "ours-affine-8.npy")).all()


@pytest.mark.slow
def test_vision_towers_of_mlx_vlm_are_read(tmp_path: Path) -> None:
    jobs = []
    for name in SEEING:
        plain = hub(Model(name), tmp_path / name)
        inner = json.loads((plain / "config.json").read_text())["vision_config"]
        kind = inner["model_type"].removesuffix("_vision")  # as on the Hub
        huggingface.edit_config(plain, {"vision_config": {**inner, "model_type": kind}})
        for whose, bits in (("plain", 0), ("quantized", 4)):
            place = tmp_path / name / f"seen-{whose}"
            jobs.append({"do": "see", "hf_path": plain, "mlx_path": place, "bits": bits})
    run(tmp_path, jobs)
    for name, prefix in SEEING.items():
        expected = tensors_of(tmp_path / name / "plain")
        for whose in ("plain", "quantized"):
            seen, back = tmp_path / name / f"seen-{whose}", tmp_path / name / f"back-{whose}"
            reshard.convert(seen, back, to="huggingface", no_tokenizer=True)
            found = tensors_of(back)
            same = {
                key
                for key in expected
                if key.startswith(prefix) or (whose == "plain" and name in ("qwen2_vl", "qwen3_vl"))
            }
            assert_same_tensors({key: found[key] for key in same}, {key: expected[key] for key in same})


def stored(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The raw elements of a tensor."""
    with closing(OpenFiles()) as files:
        return Gatherer(files, None).read(tensor, 0, tensor.view.numel).reshape(tensor.shape)


@pytest.mark.slow
def test_arithmetic_is_that_of_mlx(tmp_path: Path) -> None:
    settings = [ModeSettings(group, bits) for bits in BITS for group in GROUPS]
    cases = [(each, kind) for each in settings for kind in ("bfloat16", "float16", "float32")]
    cases += [
        (ModeSettings(group, bits, mode), "bfloat16")
        for mode, group, bits in (("mxfp4", 32, 4), ("nvfp4", 16, 4), ("mxfp8", 32, 8))
    ]
    files = {case: tmp_path / f"{number}.safetensors" for number, case in enumerate(cases)}
    jobs = [
        {
            "do": "compute",
            "dtype": kind,
            "folder": file,
            "bits": how.bits,
            "group_size": how.group,
            "mode": how.mode,
        }
        for (how, kind), file in files.items()
    ]
    run(tmp_path, jobs)
    for (how, _), file in files.items():
        found = read_tensors(file, Sources(file))
        parts = WeightParts(found["weight"], found["scales"], found.get("biases"))
        plain = dequantized(parts, how)
        assert (plain.dtype, plain.shape) == (found["plain"].dtype, found["plain"].shape), how
        assert np.array_equal(stored(plain), stored(found["plain"])), how
        if how.mode == "affine":
            for name, part in affine("w", found["original"], how).items():
                assert (part.dtype, part.shape) == (found[name].dtype, found[name].shape), how
                assert np.array_equal(stored(part), stored(found[name])), (how, name)


@pytest.mark.parametrize("bits", BITS)
def test_a_group_has_as_many_codes_as_its_bits_allow(bits: int) -> None:
    groups = np.arange(1 << bits, dtype=np.float32)[None]
    codes, scales, biases = quantized_group(groups, bits)
    assert codes.max() == (1 << bits) - 1
    np.testing.assert_array_equal(codes * scales + biases, groups)


def test_zero_is_a_code_of_the_nearest_number_of_steps_from_the_edge() -> None:
    """2.2 is 2.06 steps from zero, which become two, as mlx rounds them: with three, -1 would be out of reach."""
    codes, scales, biases = quantized_group(np.array([[-1, 0, 1.1, 2.2]], np.float32), 2)
    assert codes.tolist() == [[3, 2, 1, 0]]
    np.testing.assert_allclose([scales.item(), biases.item()], [-1.1, 2.2], rtol=1e-6)


@pytest.mark.parametrize("bits", BITS)
def test_packing(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (3, 192), dtype=np.uint8)
    items = packed(codes, bits)
    assert (items.dtype, items.shape) == (np.uint32, (3, 6 * bits))
    stream = np.unpackbits(items.view(np.uint8), axis=1, bitorder="little").reshape(3, 192, bits)
    assert np.array_equal((stream << np.arange(bits, dtype=np.uint8)).sum(-1), codes)
    assert np.array_equal(unpacked(items, bits), codes)


def test_every_value_of_quantize_is_a_method_of_mlx() -> None:
    assert all(each.is_known for each in METHODS.values())
    assert len({*METHODS.values()}) == len(BITS) * len(GROUPS)  # one group has two names


# ------------------------------------------------------------------------------- without mlx: a llama that it wrote


def plain_by_formula(folder: Path) -> Tensors:
    """The weights of a folder in affine groups of 32 with four bits, in two roundings."""
    tensors = load_file(folder / "model.safetensors")
    plain = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if f"{module}.scales" not in tensors:
            plain[name] = tensor
        elif name.endswith(".weight"):
            halves = torch.from_numpy(tensor.view(torch.int32).numpy().view(np.uint8))
            codes = (
                torch.stack([halves & 15, halves >> 4], -1).reshape(len(halves), -1, 32).to(torch.bfloat16)
            )
            scales, biases = (tensors[f"{module}.{part}"][..., None] for part in ("scales", "biases"))
            plain[name] = (codes * scales + biases).reshape(len(halves), -1)
    return {name: each for name, each in plain.items() if not name.endswith((".scales", ".biases"))}


def changed(tmp_path: Path, change: Callable[[dict[str, Any], Tensors], None]) -> Path:
    """The llama with another config or other tensors."""
    folder = shutil.copytree(DATA, tmp_path / "source")
    config, tensors = json.loads((DATA / "config.json").read_text()), load_file(DATA / "model.safetensors")
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "mlx"})
    (folder / "model.safetensors.index.json").unlink()
    return folder


def test_a_quantized_folder_becomes_plain(tmp_path: Path) -> None:
    done = command("convert", DATA, tmp_path / "out", "--no-tokenizer", "--json")
    assert done.code == 0
    assert_same_tensors(tensors_of(tmp_path / "out"), plain_by_formula(DATA))
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert "quantization" not in config and "quantization_config" not in config
    told = command("inspect", DATA, "--json").json
    assert (told["format"], told["variant"]) == ("mlx", "affine, 4 bits, groups of 32")
    assert (told["family"], told["dtypes"]) == ("llama", {"bfloat16": 12})
    assert command("verify", DATA, tmp_path / "out").code == 0


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    reshard.convert(DATA, tmp_path / "plain", to="mlx", no_tokenizer=True)
    assert_same_tensors(tensors_of(tmp_path / "plain"), plain_by_formula(DATA))
    again = tmp_path / "again"
    reshard.convert(tmp_path / "plain", again, to="mlx", quantize="affine-4-32", no_tokenizer=True)
    config = json.loads((again / "config.json").read_text())
    settings = {"group_size": 32, "bits": 4, "mode": "affine"}
    assert config["quantization"] == config["quantization_config"] == settings
    assert (again / "model.safetensors.index.json").exists()
    assert command("verify", again).code == 0
    assert tensors_of(again).keys() == tensors_of(DATA).keys()


def test_a_file_or_the_index_is_read_like_its_folder(tmp_path: Path) -> None:
    for name in ("model.safetensors", "model.safetensors.index.json"):
        assert command("inspect", DATA / name, "--json").json["format"] == "mlx"


def test_groups_that_do_not_divide_a_row_leave_it_plain(tmp_path: Path) -> None:
    with pytest.raises(ReshardError) as raised:
        reshard.convert(DATA, tmp_path / "out", to="mlx", quantize="affine-3", no_tokenizer=True)
    (problem,) = raised.value.problems
    assert problem.code == "mlx-groups-too-large" and str(problem.remedy).endswith("affine-3-32")
    reshard.convert(DATA, tmp_path / "out", to="mlx", quantize="affine-3-32", no_tokenizer=True)


def test_rows_that_no_group_divides_are_named(tmp_path: Path) -> None:
    """Groups of 32 are the smallest: they are no remedy where they were requested."""
    sizes = {"hidden_size": 40, "intermediate_size": 24, "head_dim": 10, "num_attention_heads": 4}
    source = huggingface.make_model(
        "llama", tmp_path / "source", tokenizer=False, **{**sizes, "num_key_value_heads": 2}
    )
    found = command(
        "convert",
        source,
        tmp_path / "out",
        "--to",
        "mlx",
        "--quantize",
        "affine-4-32",
        "--no-tokenizer",
        "--json",
    )
    (problem,) = found.json["problems"]
    assert problem["code"] == "mlx-rows-without-groups" and problem["found"] == "rows of 24, 40"
    assert problem["remedy"].startswith("leave out --quantize")


def test_the_usual_group_may_be_typed(tmp_path: Path, hf_model: Callable[..., Path]) -> None:
    for kind in ("affine-4", "affine-4-64"):
        reshard.convert(hf_model("llama"), tmp_path / kind, to="mlx", quantize=kind)
    assert_same_tensors(tensors_of(tmp_path / "affine-4"), tensors_of(tmp_path / "affine-4-64"))


def _no_biases(config: dict[str, Any], tensors: Tensors) -> None:
    tensors.pop("lm_head.biases")


def _no_scales(config: dict[str, Any], tensors: Tensors) -> None:
    tensors.pop("lm_head.scales")
    tensors.pop("lm_head.biases")


def _other_group(config: dict[str, Any], tensors: Tensors) -> None:
    config["quantization"]["group_size"] = 64


def _no_such_bits(config: dict[str, Any], tensors: Tensors) -> None:
    config["quantization"]["bits"] = 7


def _another_model(config: dict[str, Any], tensors: Tensors) -> None:
    config["model_type"] = "rwkv7"


def _global_scale(config: dict[str, Any], tensors: Tensors) -> None:
    tensors["lm_head.global_scale"] = torch.ones(1)


WRONG = {
    _no_biases: "mlx-weight-incomplete",
    _no_scales: "mlx-weight-incomplete",
    _other_group: "mlx-settings-differ",
    _no_such_bits: "mlx-settings-unreadable",
    _another_model: "mlx-model-unsupported",
    _global_scale: "mlx-global-scale-unsupported",
}


@pytest.mark.parametrize("change", WRONG)
def test_wrong_folders_are_refused(change: Callable[[dict[str, Any], Tensors], None], tmp_path: Path) -> None:
    source = changed(tmp_path, change)
    for words in (("inspect", source), ("convert", source, tmp_path / "out", "--no-tokenizer")):
        done = command(*words, "--json")
        codes = {each["code"] for each in done.json["problems"]}
        assert (done.code, codes) == (2, {WRONG[change]})
    assert not (tmp_path / "out").exists()


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    source = changed(tmp_path, lambda config, tensors: None)
    (source / "config.json").unlink()
    (problem,) = command("inspect", source, "--json").json["problems"]
    assert (problem["code"], problem["file"]) == ("mlx-without-config", str(source))


def test_nan_is_not_quantized(tmp_path: Path) -> None:
    reshard.convert(DATA, tmp_path / "plain", to="huggingface", no_tokenizer=True)
    file = tmp_path / "plain/model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"][3, 5] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ReshardError, match="NaN or Inf"):
        reshard.convert(
            tmp_path / "plain", tmp_path / "out", to="mlx", quantize="affine-4-32", no_tokenizer=True
        )
    assert not (tmp_path / "out").exists()


def test_an_undeclared_model_is_not_written(tmp_path: Path) -> None:
    folder = changed(tmp_path, lambda config, tensors: None)
    reshard.convert(folder, tmp_path / "plain", to="huggingface", no_tokenizer=True)
    huggingface.edit_config(tmp_path / "plain", {"model_type": "rwkv7"})
    done = command("convert", tmp_path / "plain", tmp_path / "out", "--to", "mlx", "--no-tokenizer", "--json")
    assert (done.code, [each["code"] for each in done.json["problems"]]) == (2, ["mlx-model-unsupported"])


def test_a_language_model_is_not_read_as_the_whole_model(tmp_path: Path) -> None:
    """Where the parts that MLX leaves out are not declared, nothing would notice that they are missing."""
    plain = model_types.make_model_type("gemma4_unified", tmp_path / "plain")
    reshard.convert(plain, tmp_path / "mlx", to="mlx")
    done = command("convert", tmp_path / "mlx", tmp_path / "back", "--base", plain, "--json")
    assert (done.code, [each["code"] for each in done.json["problems"]]) == (2, ["language-model-alone"])
    assert not (tmp_path / "back").exists()


def test_names_of_every_model_are_undone() -> None:
    for model_type in mlx.known():
        naming = mlx.naming({"model_type": model_type})
        assert naming is not None
        for rule in naming.rules:
            again = rule.reversed().reversed()
            assert (again.patterns, again.replacements) == (rule.patterns, rule.replacements), model_type


def test_the_bias_of_a_router_stays_in_float32_as_mlx_lm_keeps_it(tmp_path: Path) -> None:
    """`cast_predicate` of its `deepseek_v3.py` leaves it out."""
    huggingface.make_model("deepseek_v3", tmp_path / "plain", dtype="bfloat16")
    reshard.convert(tmp_path / "plain", tmp_path / "out", to="mlx")
    was, now = (
        {name: each for name, each in tensors_of(folder).items() if name.endswith("e_score_correction_bias")}
        for folder in (tmp_path / "plain", tmp_path / "out")
    )
    assert {each.dtype for each in was.values()} == {torch.float32}
    assert_same_tensors(now, was)


def test_what_mlx_leaves_out_of_a_quantized_model_is_counted(tmp_path: Path) -> None:
    huggingface.make_model("deepseek_v3_mtp", tmp_path / "plain", dtype="bfloat16")
    quantized.fp8(tmp_path / "plain", tmp_path / "source")
    done = command("convert", tmp_path / "source", tmp_path / "out", "--to", "mlx", "--json")
    assert (done.code, [*done.json["dropped"]]) == (0, ["multi-token prediction, which mlx-lm does not have"])
    assert not any(name.startswith("model.layers.4") for name in tensors_of(tmp_path / "out"))
    assert command("verify", tmp_path / "source", tmp_path / "out", "--proof").code == 0
