"""Every checkpoint of the real megatron-core becomes a folder that transformers loads, with the same logits.

Each checkpoint comes from a few training steps, so that no two weights are equal. Both sides compute in float32.
"""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("megatron.core")

import torch
from transformers import AutoTokenizer

import reshard
from reshard.base.errors import ReshardError
from reshard.oracle.transformers import Logits, transformers_logits
from tests import commandline
from tests.genuine.huggingface import VARIANTS as FAMILIES
from tests.genuine.huggingface import make_tokenizer
from tests.genuine.mcore.checkpoint_io import MegatronFormat, SaveOptions
from tests.genuine.megatron import OLDER_VERSIONS, QWEN2, VARIANTS, Genuine, tokens
from tests.genuine.train_megatron import train_and_save
from tests.genuine.warm import megatron_logits
from tests.judges import TOKENS, assert_agree, assert_same_tensors, differing_keys, tensors_of

Maker = Callable[..., Genuine]


def by_megatron(checkpoint: Genuine, format: MegatronFormat) -> Logits:
    """megatron-core's own logits: torch_dist on one rank, legacy files in the layout they were saved in."""
    layout = checkpoint.layout if format == "torch" else None
    return megatron_logits(checkpoint.iteration(format), TOKENS, args=checkpoint.args, layout=layout).logits


# Files of ranks hold what torch_dist holds (`test_both_formats_hold_the_same`): few are also computed from.
@pytest.mark.parametrize(
    "name, format",
    [(name, format) for name, variant in VARIANTS.items() for format in variant.formats],
)
@pytest.mark.core(
    "qwen2-tp2-pp2-torch_dist",
    "qwen3-moe-tp2-pp2-ep4-etp1-torch_dist",
    "qwen3-moe-singleton-torch_dist",
    "qwen3-pp2-vpp2-torch",
)
def test_transformers_computes_what_megatron_computes(
    name: str, format: MegatronFormat, genuine: Maker, tmp_path: Path
) -> None:
    source = genuine(name)
    reshard.convert(source.roots[format], tmp_path / "hf", no_tokenizer=True)
    assert_agree(transformers_logits(tmp_path / "hf", TOKENS), by_megatron(source, format))
    dtype = "bfloat16" if VARIANTS[name].bf16 else "float32"
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == dtype


@pytest.mark.parametrize("name", [name for name, variant in VARIANTS.items() if len(variant.formats) == 2])
@pytest.mark.core("qwen3-moe-tp2-pp2-ep4-etp1", "qwen3-pp2-vpp2")
def test_both_formats_hold_the_same(name: str, genuine: Maker) -> None:
    roots = genuine(name).roots
    comparison = reshard.verify(roots["torch_dist"], roots["torch"])
    assert comparison.equal and comparison.tensors > 20


OPTIMIZERS = [
    name for name, variant in VARIANTS.items() if variant.steps and variant.save.get("optimizer", True)
]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.core("qwen3-moe-tp2-pp2-ep4-etp1")
def test_states_of_the_optimizer_are_dropped_by_name(name: str, genuine: Maker) -> None:
    """Two moments and main weights in float32: six times bfloat16 weights. Moments alone: twice float32 weights."""
    for format, root in genuine(name).roots.items():
        checkpoint = reshard.open(root).checkpoint
        states = checkpoint.dropped["optimizer states"]
        assert states > (5 if VARIANTS[name].bf16 else 1.5) * checkpoint.nbytes, format
        assert (
            reshard.convert(root, "unused", no_tokenizer=True, dry_run=True).plan.dropped["optimizer states"]
            == states
        )


def test_a_release_has_no_optimizer(genuine: Maker) -> None:
    checkpoint = reshard.open(genuine("qwen2-release").roots["torch_dist"]).checkpoint
    assert checkpoint.iteration == "release"
    assert checkpoint.dropped["optimizer states"] == 0


@pytest.mark.thorough
@pytest.mark.parametrize("format", ["torch_dist", "torch"])
def test_each_of_several_iterations(format: MegatronFormat, genuine: Maker, tmp_path: Path) -> None:
    """The tracked one by default, otherwise by number or by the folder itself."""
    source = genuine("qwen2-fp32")
    root = tmp_path / "run"
    shutil.copytree(source.roots[format], root)
    later = train_and_save(
        QWEN2,
        tmp_path / "later",
        tokens(),
        checkpoint=source.iteration("torch_dist"),
        bf16=False,
        steps=1,
        iteration=3,
        save=SaveOptions(format=format),
    ).folder
    shutil.copytree(later, root / "iter_0000003")
    args = {"args": QWEN2, "layout": source.layout if format == "torch" else None}
    earlier_logits = megatron_logits(root / "iter_0000002", TOKENS, **args).logits
    later_logits = megatron_logits(root / "iter_0000003", TOKENS, args=QWEN2).logits
    assert np.abs(earlier_logits - later_logits).max() > 0.01

    def converted(path: Path, iteration: int | None, name: str) -> Logits:
        reshard.convert(path, tmp_path / name, no_tokenizer=True, iteration=iteration)
        return transformers_logits(tmp_path / name, TOKENS)

    assert_agree(converted(root, None, "tracked"), earlier_logits)
    assert_agree(converted(root, 2, "2"), earlier_logits)
    assert_agree(converted(root, 3, "3"), later_logits)
    assert_agree(converted(root / "iter_0000003", None, "by folder"), later_logits)
    (root / "latest_checkpointed_iteration.txt").write_text("3\n")
    assert_agree(converted(root, None, "now tracked"), later_logits)


# ----------------------------------------------------------------------------------------- config and base


@pytest.fixture(scope="module")
def base(genuine: Maker, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Hugging Face folder that a training run of Qwen2 would have started from: config and tokenizer."""
    folder = tmp_path_factory.mktemp("base")
    reshard.convert(genuine("qwen2-fp32").roots["torch"], folder / "hf", no_tokenizer=True)
    make_tokenizer().save_pretrained(folder / "hf")
    config = json.loads((folder / "hf" / "config.json").read_text())
    config.update(max_position_embeddings=4096, a_key_of_another_tool=7)
    (folder / "hf" / "config.json").write_text(json.dumps(config))
    return folder / "hf"


@pytest.mark.parametrize("name", ["qwen2-tp2-pp2", "qwen2-te-tp2-pp2", "qwen2-release"])
@pytest.mark.parametrize("format", ["torch_dist", "torch"])
@pytest.mark.core("torch_dist-qwen2-tp2-pp2", "torch-qwen2-tp2-pp2")
def test_config_and_tokenizer_come_from_the_base(
    name: str, format: MegatronFormat, genuine: Maker, base: Path, tmp_path: Path
) -> None:
    source = genuine(name)
    with pytest.raises(ReshardError, match="--base"):
        reshard.convert(source.roots[format], tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
    reshard.convert(source.roots[format], tmp_path / "hf", base=base)
    assert_agree(transformers_logits(tmp_path / "hf", TOKENS), by_megatron(source, format))
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["max_position_embeddings"], config["a_key_of_another_tool"]) == (4096, 7)
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").chat_template
    assert tensors_of(tmp_path / "hf")["model.embed_tokens.weight"].shape == (250, 32)


@pytest.mark.parametrize("name", ["qwen2-tied-pp2", "qwen3-moe-ep2"])
def test_where_there_are_no_arguments_the_base_tells_all(name: str, genuine: Maker, tmp_path: Path) -> None:
    """As in checkpoints of training loops that are built on megatron-core and not on Megatron-LM."""
    source = genuine(name)
    reshard.convert(source.roots["torch_dist"], tmp_path / "base", no_tokenizer=True)
    shutil.copytree(source.roots["torch_dist"], tmp_path / "run")
    common = tmp_path / "run" / source.iteration().name / "common.pt"
    content = torch.load(common, weights_only=False)
    del content["args"]
    torch.save(content, common)
    with pytest.raises(ReshardError, match="--base"):
        reshard.convert(tmp_path / "run", tmp_path / "out", no_tokenizer=True)
    reshard.convert(tmp_path / "run", tmp_path / "out", base=tmp_path / "base", no_tokenizer=True)
    assert_agree(transformers_logits(tmp_path / "out", TOKENS), by_megatron(source, "torch_dist"))


@pytest.mark.parametrize("passed", [".", "actor", "actor/dist_ckpt"])
def test_a_megatron_actor_of_verl_has_its_config_beside_it(
    passed: str, genuine: Maker, tmp_path: Path
) -> None:
    """verl saves `dist_ckpt/`, without arguments, and `huggingface/` into the folder of each worker."""
    source = genuine("qwen2-tp2-pp2")
    step = tmp_path / "global_step_7"
    actor = step / "actor"
    shutil.copytree(source.iteration("torch_dist"), actor / "dist_ckpt")
    common = actor / "dist_ckpt" / "common.pt"
    content = torch.load(common, weights_only=False)
    del content["args"]
    torch.save(content, common)
    reshard.convert(source.roots["torch_dist"], tmp_path / "base", no_tokenizer=True)
    (actor / "huggingface").mkdir()
    shutil.copy(tmp_path / "base" / "config.json", actor / "huggingface")
    reshard.convert(step / passed, tmp_path / "out", no_tokenizer=True)
    assert reshard.verify(tmp_path / "out", tmp_path / "base").equal


@pytest.mark.parametrize(
    "name, code", [("qwen2-tp2-pp2", "head-not-tied"), ("qwen2-tied-pp2", "untied-head-missing")]
)
def test_a_config_that_is_wrong_about_the_head_is_named(
    name: str, code: str, genuine: Maker, tmp_path: Path
) -> None:
    source = genuine(name)
    reshard.convert(source.roots["torch_dist"], tmp_path / "base", no_tokenizer=True)
    run = Path(shutil.copytree(source.roots["torch_dist"], tmp_path / "run"))
    common = run / source.iteration().name / "common.pt"
    content = torch.load(common, weights_only=False)
    del content["args"]
    torch.save(content, common)
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    config["tie_word_embeddings"] = not config["tie_word_embeddings"]
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ReshardError) as raised:
        reshard.convert(run, tmp_path / "out", base=tmp_path / "base", no_tokenizer=True)
    (problem,) = raised.value.problems
    assert problem.code == code and "tie_word_embeddings" in (problem.remedy or "")


@pytest.mark.parametrize("name", [name for name, variant in VARIANTS.items() if "torch" in variant.formats])
@pytest.mark.core("qwen3-pp2-vpp2", "qwen3-moe-tp2-pp2-ep4-etp1")
def test_legacy_files_without_arguments_tell_the_layout_themselves(
    name: str, genuine: Maker, tmp_path: Path
) -> None:
    """From the names of folders, and the names and shapes of tensors: stages, experts, and a tied head."""
    source = genuine(name)
    reshard.convert(source.roots["torch"], tmp_path / "base", no_tokenizer=True)
    run = Path(shutil.copytree(source.roots["torch"], tmp_path / "run"))
    for file in run.rglob("model_optim_rng.pt"):
        content = torch.load(file, weights_only=False)
        del content["args"]
        torch.save(content, file)
    assert reshard.open(run).layout == reshard.open(source.roots["torch"]).layout
    reshard.convert(run, tmp_path / "out", base=tmp_path / "base", no_tokenizer=True)
    assert reshard.verify(tmp_path / "out", tmp_path / "base").equal


@pytest.mark.parametrize(
    "gone",
    [
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "num_experts",
        "untie_embeddings_and_output_weights",
    ],
)
def test_an_argument_that_legacy_files_lack_says_nothing(gone: str, genuine: Maker, tmp_path: Path) -> None:
    """The files show its value: Megatron-LM's default is not assumed."""
    source = genuine("qwen3-moe-tp2-pp2-ep4-etp1").roots["torch"]
    run = Path(shutil.copytree(source, tmp_path / "run"))
    for file in run.rglob("model_optim_rng.pt"):
        content = torch.load(file, weights_only=False)
        delattr(content["args"], gone)
        torch.save(content, file)
    ours, whole = reshard.open(run).checkpoint, reshard.open(source).checkpoint
    assert ours.layout == whole.layout and ours.problems == []
    assert {name: tensor.shape for name, tensor in ours.tensors.items()} == {
        name: tensor.shape for name, tensor in whole.tensors.items()
    }


NOT_RECORDED = {
    "no arguments": ((), None, "not recorded"),
    "some of them": (
        (
            "pipeline_model_parallel_size",
            "virtual_pipeline_model_parallel_size",
            "expert_model_parallel_size",
        ),
        {"tp": 2, "pp": None, "vpp": None, "ep": None, "etp": 1},
        "TP2 (PP, VPP, EP not recorded)",
    ),
}


@pytest.mark.parametrize("case", NOT_RECORDED)
def test_what_is_not_recorded_of_a_layout_is_said(case: str, genuine: Maker, tmp_path: Path) -> None:
    gone, layout, shown = NOT_RECORDED[case]
    source = genuine("qwen2-fp32")
    reshard.convert(source.roots["torch_dist"], tmp_path / "base", no_tokenizer=True)
    run = Path(shutil.copytree(source.roots["torch_dist"], tmp_path / "run"))
    common = run / source.iteration().name / "common.pt"
    content = torch.load(common, weights_only=False)
    if gone:
        content["args"] = Namespace(**{k: v for k, v in vars(content["args"]).items() if k not in gone})
    else:
        del content["args"]
    torch.save(content, common)
    assert commandline.reshard("inspect", run, "--json").json["layout"] == layout
    assert f"layout     {shown}\n" in commandline.reshard("inspect", run).out
    reshard.convert(run, tmp_path / "hf", base=tmp_path / "base", no_tokenizer=True)
    facts = json.loads((tmp_path / "hf" / "reshard.json").read_text())
    assert facts["source"]["layout"] == layout and facts["layout"] is None


def test_files_of_ranks_without_arguments_that_are_missing(genuine: Maker, tmp_path: Path) -> None:
    run = Path(shutil.copytree(genuine("qwen3-moe-tp2-pp2-ep4-etp1").roots["torch"], tmp_path / "run"))
    for file in run.rglob("model_optim_rng.pt"):
        content = torch.load(file, weights_only=False)
        torch.save({"model": content["model"]}, file)
    shutil.rmtree(run / "iter_0000002" / "mp_rank_01_000_001")
    with pytest.raises(ReshardError) as caught:
        reshard.open(run)
    (problem,) = caught.value.problems
    assert problem.message == "the file of a rank is missing" and "mp_rank_01_000_001" in str(problem.file)


# What a checkpoint's arguments cannot tell: who pads and ends, and what has another name for the same model.
TOKEN_IDS = {"bos_token_id", "eos_token_id", "pad_token_id"}
# What is compared of InternLM3's config alone, whose code is not run: who wrote it, and a rope that it does not scale.
OF_THE_FILE = {"auto_map", "transformers_version", "rope_scaling"}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.core("qwen2", "deepseek_v3_mtp", "glm4_moe", "gpt_oss", "qwen3_next")
def test_the_config_derived_from_arguments_makes_the_same_model(
    name: str, hf_model: Callable[..., Path], tmp_path: Path
) -> None:
    """From a checkpoint whose config is no longer next to it."""
    source, run, back = hf_model(name), tmp_path / "run", tmp_path / "back"
    reshard.convert(source, run, to="megatron", no_tokenizer=True)
    for file in run.iterdir():
        if file.is_file() and file.name != "latest_checkpointed_iteration.txt":
            file.unlink()
    plan = reshard.convert(run, back, no_tokenizer=True).plan
    assert any("derived" in note for note in plan.notes)
    assert_same_tensors(tensors_of(back), tensors_of(source))
    if name in ("phi3", "smollm3"):  # which pad with a token that this vocabulary does not have, unless told
        config = json.loads((back / "config.json").read_text())
        (back / "config.json").write_text(json.dumps({**config, "pad_token_id": None}))
    np.testing.assert_array_equal(transformers_logits(back, TOKENS), transformers_logits(source, TOKENS))
    unsaid = TOKEN_IDS | (OF_THE_FILE if name.startswith("internlm3") else set())
    assert differing_keys(back, source) <= unsaid


# -------------------------------------------------------------------------------------- older megatron-core


OLD_VARIANTS = (
    "qwen2-tp2-pp2",
    "qwen2-distributed-optimizer",
    "qwen2-fully-reshardable",
    "qwen3-moe-tp2-pp2-ep4-etp1",
    "deepseek-v3-te",
)
# 0.15 cannot save states in this sharding if Adam is torch's own, which counts its steps in a tensor.
IMPOSSIBLE = ("qwen2-distributed-optimizer", "0.15.3")


@pytest.mark.parametrize(
    "name, megatron",
    [case for case in product(OLD_VARIANTS, OLDER_VERSIONS) if case != IMPOSSIBLE],
)
@pytest.mark.slow
def test_older_versions(name: str, megatron: str, genuine: Maker, tmp_path: Path) -> None:
    """Their metadata names their own classes, and latent attention's down projections are sharded."""
    source = genuine(name, megatron)
    for format, root in source.roots.items():
        assert reshard.open(root).checkpoint.dropped["optimizer states"] > 0
        reshard.convert(root, tmp_path / format, no_tokenizer=True)
        assert_agree(transformers_logits(tmp_path / format, TOKENS), by_megatron(source, format))
