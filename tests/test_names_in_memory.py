"""Every model that transformers can build small: saved as it is in memory, it becomes what the Hub has, and back.

The judge is transformers itself: the newest release loads the output with the bits of the model that was saved, and the
oldest one finds every weight that it has.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Kimi_K25ForConditionalGeneration
from transformers.utils import logging

import reshard
from reshard.algebra.dtypes import dtype
from reshard.algebra.views import View
from reshard.base.errors import ReshardError
from reshard.families import FAMILIES, in_memory
from reshard.families.renaming import saved
from reshard.formats.apply_renamings import applied, to_hub
from reshard.formats.weight_operations import OPERATIONS
from reshard.transfer.plan import Planned
from tests.environments import python
from tests.genuine.every_type import CLASSES, NOT_SMALL, build
from tests.genuine.load_all import logits_of
from tests.genuine.model_types import make_model_type
from tests.judges import assert_same_tensors, tensors_of
from tests.test_dcp_format import as_torch_reads, save

USUAL = (
    *("gemma3", "mistral3", "llama4"),  # declared, with names of transformers
    *("gpt_neox", "llava", "fuyu", "shieldgemma2"),  # renamed
    *("kimi_linear", "olmo_hybrid", "deepseek_v4", "hrm_text"),  # joined, split, stacked
    *("bart", "bert", "gpt2", "blip-2"),  # tied under several names
    *("kosmos-2", "modernbert-decoder"),  # a language model, or an embedding, below a prefix
)
"""Some of each kind; the others are slow."""

TABLE = json.loads(in_memory.FILE.read_text())
EVERY = [name for name, kind in CLASSES.items() if name not in NOT_SMALL and kind in TABLE["models"]]
"""All types that can be built, but those that only a later release has."""

AS_PUBLISHED = {
    "kimi_k25": "save_pretrained calls the layers of its language model blocks",
    "qwen3_5_moe": "the Hub stacks the experts that save_pretrained takes apart",
    "qwen4_exp": "the Hub stacks the experts that save_pretrained takes apart",
    "qwen3_vl_moe": "the Hub has the axes of the experts the other way",
}
"""Types whose names or values are not those of `save_pretrained`, but the Hub's."""
SHARED = ("zamba", "zamba2")
"""Types with layers that share their weights, which `save_pretrained` stores once."""
OLDEST = "transformers-4.51"
NOT_LOADED = {
    "blip": "tied by the config of a part, which that release does not tie",
    "dbrx": "it refuses settings in the config of a part that it does not know",
    "cpmant": "another size of the vocabulary for the same config",
    "fuyu": "it ignores the sizes in its config",
    "mllama": "it does not read a config without rope_scaling",
    "musicgen": "it has sinusoidal positions as weights, which follow from the config",
    "musicgen_melody": "it has sinusoidal positions as weights, which follow from the config",
    "qwen2_vl": "it does not read a config with text_config",
    "qwen2_5_vl": "it does not read a config with text_config",
    "udop": "it has a part of the embedding once",
    "zamba": "it calls the types of layers otherwise in the config",
    "zamba2": "it calls the types of layers otherwise in the config",
}
"""Types that the oldest release does not load for reasons other than names."""
OTHERWISE = {
    "aya_vision": "it ignores logit_scale",
    "bigbird_pegasus": "not known, but from its own files too",
    "fsmt": "not known, but from its own files too",
    "mt5": "it does not scale what goes into a tied head",
}
"""Types that the oldest release computes otherwise, also from weights that the newest one saved itself."""

TOWERS = "vision_model."
"""Part of names on the Hub that `save_pretrained` leaves out of a model that was not loaded from there."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


def types(usual: tuple[str, ...]) -> list[Any]:
    """All types, those that are not usual as slow."""
    return [name if name in usual else pytest.param(name, marks=pytest.mark.slow) for name in EVERY]


def state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def converted(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Save a model as it is in memory, convert that to `folder/hub`, and return the state that was saved."""
    state = state_of(model)
    save({"model": state}, folder / "live")
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder / "live")
    reshard.convert(folder / "live", folder / "hub", no_tokenizer=True)
    return state


@pytest.mark.core("gemma3", "llama4", "gpt2")
@pytest.mark.parametrize("model_type", types(USUAL))
def test_names_in_memory_become_the_hubs_and_come_back(model_type: str, tmp_path: Path) -> None:
    model: Any = build(model_type)
    state = converted(model, tmp_path)
    loaded, found = type(model).from_pretrained(
        tmp_path / "hub", output_loading_info=True, dtype=torch.float32
    )
    assert not any(found.values()), found
    assert_same_tensors(state_of(loaded), state)
    if model_type not in AS_PUBLISHED:
        model.save_pretrained(tmp_path / "saved")
        ours, saved = tensors_of(tmp_path / "hub"), tensors_of(tmp_path / "saved")
        again = reshard.open(tmp_path / "saved")
        names, *expected = ({name.replace(TOWERS, "") for name in each} for each in (ours, saved, again))
        assert expected[0] == expected[1]
        assert names == expected[0] or (model_type in SHARED and names > expected[0])
    reshard.convert(tmp_path / "hub", tmp_path / "dcp", to="dcp", no_tokenizer=True)
    assert_same_tensors(as_torch_reads(tmp_path / "dcp")["model"], state)
    assert all(reshard.verify(tmp_path / each, tmp_path / "hub").equal for each in ("live", "dcp"))


@pytest.mark.slow
def test_the_oldest_release_finds_every_weight_and_computes_the_same(tmp_path: Path) -> None:
    for model_type in EVERY:
        model = build(model_type)
        converted(model, tmp_path / model_type)
        if (logits := logits_of(model)) is not None:
            torch.save(logits, tmp_path / model_type / "logits.pt")
    script = Path(__file__).parent / "genuine" / "load_all.py"
    told = subprocess.run([python(OLDEST), script, tmp_path], check=True, capture_output=True, text=True)
    found = json.loads(told.stdout.splitlines()[-1])
    far = {name: each.pop("logits") for name, each in found.items() if "logits" in each}
    assert len(found) > 100 and len(far) > 80
    assert {name: each for name, each in found.items() if each and name not in NOT_LOADED} == {}
    assert {name: each for name, each in far.items() if each > 1e-3 and name not in OTHERWISE} == {}


@pytest.mark.parametrize("model_type", ["kosmos-2.5", "gpt_neox"])
def test_a_tied_head_that_differs_is_refused(model_type: str, tmp_path: Path) -> None:
    model: Any = build(model_type)
    again, name = next(iter(in_memory.tied(tying(model)).items()))
    state = state_of(model)
    state[again] = state[name] + 1
    save({"model": state}, tmp_path / "live")
    (tmp_path / "live" / "config.json").write_text(json.dumps(tying(model)))
    with pytest.raises(ReshardError, match="tie_word_embeddings is true"):
        reshard.convert(tmp_path / "live", tmp_path / "hub", no_tokenizer=True)


def tying(model: Any) -> dict[str, Any]:
    config: dict[str, Any] = model.config.to_dict() | {"architectures": [type(model).__name__]}
    for each in (config, config.get("text_config", {})):
        each["tie_word_embeddings"] = True
    return config


# --------------------------------------------------------------------------------------- names of both kinds


def planned(shapes: dict[str, tuple[int, ...]]) -> list[Planned]:
    def source(name: str, shape: tuple[int, ...]) -> View:
        return View.of(name, *shape)

    return [
        Planned(name, dtype("float32"), shape, lambda name=name, shape=shape: source(name, shape))
        for name, shape in shapes.items()
    ]


LLAVA = {
    "model_type": "llava",
    "architectures": ["LlavaForConditionalGeneration"],
    "vision_config": {"model_type": "clip_vision_model"},
    "text_config": {"model_type": "llama"},
}
HUB = {
    "language_model.model.embed_tokens.weight": (4, 2),
    "language_model.lm_head.weight": (4, 2),
    "vision_tower.vision_model.post_layernorm.weight": (2,),
    "multi_modal_projector.linear_1.weight": (2, 2),
}
RELEASES = {
    "the Hub's": HUB,
    "in 4.52 to 4.57": {
        "model.language_model.embed_tokens.weight": (4, 2),
        "lm_head.weight": (4, 2),
        "model.vision_tower.vision_model.post_layernorm.weight": (2,),
        "model.multi_modal_projector.linear_1.weight": (2, 2),
    },
    "in the newest": {
        "model.language_model.embed_tokens.weight": (4, 2),
        "lm_head.weight": (4, 2),
        "model.vision_tower.post_layernorm.weight": (2,),
        "model.multi_modal_projector.linear_1.weight": (2, 2),
    },
}


@pytest.mark.parametrize("release", RELEASES)
def test_names_of_every_release_become_the_hubs(release: str) -> None:
    rules = in_memory.renamings(LLAVA)
    found = to_hub(planned(RELEASES[release]), rules, LLAVA)
    assert {each.name: each.shape for each in found} == HUB
    loaded = applied(found, rules, LLAVA)
    assert {each.name: each.shape for each in loaded} == RELEASES["in the newest"]


@pytest.mark.parametrize(("version", "told"), [("99.0.0", True), ("5.0.0", False), ("mine", False)])
def test_names_of_a_later_release_are_pointed_out(version: str, told: bool, tmp_path: Path) -> None:
    model: Any = build("gpt_neox")
    converted(model, tmp_path)
    file = tmp_path / "live" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "transformers_version": version}))
    notes = reshard.convert(tmp_path / "live", tmp_path / "out", no_tokenizer=True, dry_run=True).plan.notes
    assert any(f"transformers {version}, but" in note for note in notes) == told
    assert any("names in memory become the Hub's" in note for note in notes)


def test_every_operation_of_transformers_is_known() -> None:
    lists = [rules for rules in TABLE["rules"].values() if not isinstance(rules, str)]
    named = {each["name"] for rules in lists for rule in rules for each in rule.get("operations", ())}
    assert named <= OPERATIONS.keys()
    assert not re.search(r"experts[\\.]+\d", in_memory.FILE.read_text())  # no rule tells experts apart


def test_padded_rows_of_a_head_that_has_none_in_memory_are_refused() -> None:
    config = {
        "model_type": "inkling2_text",
        "architectures": ["Inkling2ForCausalLM"],
        "vocab_size": 8,
        "unpadded_vocab_size": 6,
    }
    rules = in_memory.renamings(config)
    (hub,) = applied(planned({"lm_head.weight": (6, 2)}), saved(rules), config, to_memory=False)
    assert (hub.name, hub.shape, hub.source().shape) == ("model.llm.unembed.weight", (8, 2), (8, 2))
    with pytest.raises(ReshardError, match=r"more rows than the 6(?s:.*)from_pretrained"):
        applied([hub], rules, config)


def test_experts_that_are_missing_are_named(tmp_path: Path) -> None:
    config = {"model_type": "olmo_hybrid", "architectures": ["OlmoHybridForCausalLM"]}
    names = {f"model.layers.0.linear_attn.{each}_conv1d.weight": (4, 1, 3) for each in "qk"}
    with pytest.raises(ReshardError, match=r"cannot be converted(?s:.*)v_conv1d"):
        applied(planned(names), in_memory.renamings(config), config)


def test_a_model_of_the_hub_keeps_its_names(tmp_path: Path) -> None:
    """Those of Kimi-K2.5 are not those of `save_pretrained`, and some of them name other weights in memory."""
    base = make_model_type("kimi_k25", tmp_path / "base")
    named = set(tensors_of(base))
    assert set(reshard.open(base)) == named
    model = Kimi_K25ForConditionalGeneration.from_pretrained(base, dtype=torch.bfloat16)
    converted(model, tmp_path)
    assert set(tensors_of(tmp_path / "hub")) == named
    assert reshard.verify(tmp_path / "hub", base).equal
    model.save_pretrained(tmp_path / "saved")
    assert "language_model.model.blocks.0.input_layernorm.weight" in tensors_of(tmp_path / "saved")
    reshard.convert(tmp_path / "saved", tmp_path / "megatron", to="megatron", base=base)
    reshard.convert(tmp_path / "megatron", tmp_path / "again")
    assert_same_tensors(tensors_of(tmp_path / "again"), tensors_of(base))


def test_a_name_on_the_hub_is_not_renamed_again() -> None:
    """`language_model.` becomes `language_model.model.` on the Hub."""
    family = FAMILIES["gemma3"]
    for name in ("model.language_model.layers.0.mlp.up_proj.", "language_model.model.layers.0.mlp.up_proj."):
        assert family.plain_name(name) == "model.layers.0.mlp.up_proj."
