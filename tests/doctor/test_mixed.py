"""Causes computed across frameworks: options that are None, sharded weights, dtypes, and names by who imports them."""

from __future__ import annotations

import pytest

from reshard.runs.checks.finding import UNKNOWN_FAILURE
from tests.doctor.test_classes import SITE, first, raised

FSDP = "distributed_type: FSDP\n"
NO_DIMENSIONS = raised("RuntimeError: 'weight' must be 2-D", "return torch.embedding(weight, input)")
CAUSES = {
    FSDP + NO_DIMENSIONS: ("fsdp-bypassed", "summon_full_params"),
    FSDP + "RuntimeError: The tensor has a non-zero number of elements, but its data is not allocated yet.": (
        "fsdp-bypassed",
        "summon_full_params",
    ),
    FSDP + "deepspeed_config: zero3.json\n" + NO_DIMENSIONS: ("zero3-weight-2d", "prepare_deepspeed"),
    NO_DIMENSIONS: ("zero3-weight-2d", "prepare_deepspeed"),
    "RuntimeError: expected self and mask to be on the same device, but got mask on cuda:0 and self on cuda:1": (
        "devices-mixed",
        "CUDA_VISIBLE_DEVICES=0",
    ),
    "ValueError: Received 3 parameters not in model:\nmodel.a.weight,\nmodel.b.weight": (
        "names-only-file",
        "strict=False",
    ),
}


@pytest.mark.parametrize("text", CAUSES, ids=lambda text: text[-60:])
def test_causes_across_frameworks(text: str) -> None:
    found = first(text)
    assert found.code == CAUSES[text][0]
    assert CAUSES[text][1] in found.remedy.en and CAUSES[text][1].split(" ")[0] in found.remedy.zh


def test_a_key_without_code_is_told_only_if_its_kind_is_known() -> None:
    for key in ("frob", "type", "name", "Frob"):
        assert first(f"KeyError: '{key}'").code == UNKNOWN_FAILURE


def test_one_name_shows_more_layers_only_if_every_layer_has_such_a_part() -> None:
    deeper = "KeyError: 'layers.61.self_attn.q_proj.weight'"
    assert first(raised(deeper)).code == "names-layers-of-file"
    shared = "KeyError: 'layers.11.shared_transformer.self_attn.qkv_proj.weight'"
    assert first(raised(shared)).code != "names-layers-of-file"


def test_a_name_that_only_the_newest_release_lacks_may_also_be_too_new() -> None:
    module = "transformers.models.qwen2_vl.modeling_qwen2_vl"
    found = first(f"ImportError: cannot import name 'Qwen2VLModelOutputWithPast' from '{module}'")
    assert (found.code, found.certainty) == ("api-between", "possible") and ">=4.52.1" in found.remedy.en


def test_a_frame_after_the_marks_of_a_quotation_is_read() -> None:
    quoted = '```File "/app/config.py", line 43, in normalize\n    cfg.a // cfg.b\n'
    found = first(f"{quoted}TypeError: unsupported operand type(s) for //: 'NoneType' and 'NoneType'\n```")
    assert "config.py:43 normalize" in found.rule.en


LLAVA = (
    "ImportError: cannot import name 'LlavaLlamaForCausalLM' from 'llava.model' ({}/llava/model/__init__.py)"
)
SWIFT = (
    "ImportError: cannot import name 'prepare_vllm_engine_template' from 'swift.llm.utils'"
    " (/home/user/ms-swift/swift/llm/utils/__init__.py)"
)
DATASETS = "ImportError: cannot import name 'Dataset' from 'datasets' (/home/user/run/datasets/__init__.py)"
UNEXPECTED = "TypeError: {}() got an unexpected keyword argument '{}'"
UNEQUAL = "RuntimeError: The size of tensor a (192) must match the size of tensor b (64) at non-singleton dimension 3"
FREED = "RuntimeError: The tensor has a non-zero number of elements, but its data is not allocated yet."
MASK = "The expanded size of the tensor (3) must match the existing size (13) at non-singleton dimension 2."

SAID = {
    SWIFT.replace("/home/user/ms-swift", SITE): ("api-is-gone", "likely", "ms-swift>=1.5.0,<3.0.0"),
    raised(LLAVA.format(SITE), "from llava.model import X", f"{SITE}/frob/a.py"): (
        "import-of-other-release",
        "likely",
        "llava",
    ),
    raised(DATASETS, "from datasets import Dataset"): ("folder-for-package", "likely", "Rename it"),
    DATASETS.replace("__init__", "**init**"): ("folder-for-package", "likely", "Rename it"),
    raised(UNEXPECTED.format("__init__", "eval_strategy"), "args = TrainingArguments("): (
        "api-came-later",
        "likely",
        "transformers>=4.41.0",
    ),
    f"num_virtual_tokens=7\nRuntimeError: {MASK}": ("shape-apart", "possible", "max_length"),
    UNEQUAL: ("shape-apart", "possible", "reshard convert"),
    "AssertionError: rollout world_size: 1 is not divisible by infer_tp: 2": (
        "not-divisible",
        "likely",
        "Set `actor_rollout_ref.rollout.tensor_model_parallel_size` to a divisor of 1",
    ),
    f"fsdp_config.wrap_policy.min_num_params=140000000\n{FREED}": (
        "fsdp-bypassed",
        "likely",
        "transformer_layer_cls_to_wrap",
    ),
    FREED: ("unknown-failure", "unknown", ""),
    "RuntimeError: size mismatch, got 896, 896x4096,0": ("zero3-weight-2d", "possible", "with an engine"),
}


@pytest.mark.parametrize("said", SAID)
def test_who_imports_or_calls(said: str) -> None:
    code, certainty, cure = SAID[said]
    found = first(said)
    assert (found.code, found.certainty) == (code, certainty) and cure in found.remedy.en
