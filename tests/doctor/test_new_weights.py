"""What transformers reports about weights that it did not find: its own words, for files that lack them."""

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from reshard.runs.doctor import Finding
from reshard.runs.doctor.log_diagnosis import diagnose_text

LISTED = (
    "Some weights of LlamaForCausalLM were not initialized from the model checkpoint at ./out/hf and are newly "
    "initialized: ['model.layers.{0}.mlp.down_proj.weight', 'model.layers.{1}.self_attn.q_proj.weight', "
    "'model.norm.weight', 'lm_head.weight']\n"
    "You should probably TRAIN this model on a down-stream task to be able to use it for predictions and inference."
)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Finding]:
    """The doctor's first finding for what transformers says of a model's files after `change`."""
    import torch
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    folder = tmp_path_factory.mktemp("model")
    config = Qwen3Config(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=6,
        num_attention_heads=2,
        head_dim=8,
        vocab_size=64,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    classes = {"causal": AutoModelForCausalLM, "sequence": AutoModelForSequenceClassification}

    def get(
        tmp_path: Path, kept: str = "", prefix: str = "", load: str = "causal", **changed: object
    ) -> Finding:
        left = {
            prefix + name: value for name, value in weights.items() if not kept or not re.search(kept, name)
        }
        save_file(left, tmp_path / "model.safetensors", metadata={"format": "pt"})
        written = json.loads((folder / "config.json").read_text()) | changed
        (tmp_path / "config.json").write_text(json.dumps(written))
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
        logger = logging.getLogger("transformers")
        logger.addHandler(handler)
        try:
            classes[load].from_pretrained(tmp_path)
        finally:
            logger.removeHandler(handler)
        return diagnose_text("run.log", "\n".join(said))[0]

    return get


def test_a_lost_stage_is_told_by_its_layers(told: Callable[..., Finding], tmp_path: Path) -> None:
    found = told(tmp_path, r"layers\.[345]\.|model\.norm|lm_head")
    assert found.code == "names-layers-of-model"
    assert "layers 3 to 5" in found.message.en


def test_lost_layers_in_the_middle_are_told(told: Callable[..., Finding], tmp_path: Path) -> None:
    assert "layers 2 to 3" in told(tmp_path, r"layers\.[23]\.").message.en


def test_a_deeper_config_is_told(told: Callable[..., Finding], tmp_path: Path) -> None:
    found = told(tmp_path, num_hidden_layers=8, layer_types=None)
    assert "layers 6 to 7" in found.message.en
    assert "num_hidden_layers" in found.remedy.en


def test_another_variant_is_told_by_the_part_of_its_layers(
    told: Callable[..., Finding], tmp_path: Path
) -> None:
    found = told(tmp_path, r"[qk]_norm")
    assert found.code == "names-part-of-model"
    assert "q_norm" in found.message.en


def test_a_wrapper_is_told_by_its_prefix(told: Callable[..., Finding], tmp_path: Path) -> None:
    found = told(tmp_path, prefix="transformer.")
    assert found.code == "names-prefix-of-file"
    assert "transformer." in found.message.en


def test_a_new_head_is_no_lost_weight(told: Callable[..., Finding], tmp_path: Path) -> None:
    assert told(tmp_path, load="sequence").code == "head-is-new"


def test_a_lost_output_head_has_its_own_entry(told: Callable[..., Finding], tmp_path: Path) -> None:
    assert told(tmp_path, "lm_head").code == "hf-lm-head-untied"


def test_the_lists_of_transformers_4_are_read() -> None:
    found = diagnose_text("run.log", LISTED.format(24, 27))
    assert [each.code for each in found] == ["names-layers-of-model"]
    assert "layers 24 to 27" in found[0].message.en


def test_of_two_models_the_one_that_lost_something_is_told() -> None:
    new_head = (
        "Some weights of Qwen2ForSequenceClassification were not initialized from the model checkpoint at Qwen/Qwen2.5"
        " and are newly initialized: ['score.weight']\n"
    )
    assert diagnose_text("run.log", new_head)[0].code == "head-is-new"
    for said in (new_head + LISTED.format(24, 27), LISTED.format(24, 27) + "\n" + new_head):
        assert "layers 24 to 27" in diagnose_text("run.log", said)[0].message.en


def test_experts_and_long_ranges_are_read() -> None:
    row = "model.layers.{{24...47}}.mlp.experts.{{0...127}}.{}_proj.weight | MISSING | \n"
    rows = "".join(map(row.format, ("gate", "up", "down")))
    said = f"[transformers] Qwen3MoeForCausalLM LOAD REPORT from: ./out\nKey | Status | \n----+--------+-\n{rows}"
    assert "layers 24 to 47" in diagnose_text("run.log", said)[0].message.en
