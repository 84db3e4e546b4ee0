"""Causes that depend on who imports or calls: a package's own names, layers, classes named by a line of code."""

from __future__ import annotations

import pytest

from reshard.diagnosis.logs import diagnose_text
from tests.doctor.test_classes import SITE, first, raised

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
    raised(LLAVA.format("/home/user/LLaVA"), "from .model import X", "/home/user/LLaVA/llava/__init__.py"): (
        "import-hidden",
        "likely",
        "--no-build-isolation flash-attn",
    ),
    LLAVA.format("/home/user/LLaVA"): ("import-hidden", "possible", "cd /home/user/LLaVA && python"),
    raised(LLAVA.format(SITE), "from .model import X", f"{SITE}/llava/__init__.py"): (
        "import-hidden",
        "possible",
        "LlavaLlamaForCausalLM",
    ),
    raised(SWIFT, "from .utils import X", "/home/user/ms-swift/swift/llm/infer.py"): (
        "import-hidden",
        "likely",
        "pip install -U vllm",
    ),
    SWIFT.replace("/home/user/ms-swift", SITE): ("api-is-gone", "likely", "ms-swift>=1.5.0,<3.0.0"),
    raised(LLAVA.format(SITE), "from llava.model import X", f"{SITE}/frob/a.py"): (
        "import-of-other-release",
        "likely",
        "llava",
    ),
    LLAVA.format("/home/user/LLaVA").replace(
        "llava.model'", "llava.model' (most likely partially initialized)"
    ): (
        "import-name-missing",
        "possible",
        "llava",
    ),
    raised(DATASETS, "from datasets import Dataset"): ("folder-for-package", "likely", "Rename it"),
    DATASETS.replace("__init__", "**init**"): ("folder-for-package", "likely", "Rename it"),
    raised(UNEXPECTED.format("__init__", "eval_strategy"), "args = TrainingArguments("): (
        "api-came-later",
        "likely",
        "transformers>=4.41.0",
    ),
    raised(UNEXPECTED.format("MCoreSelfAttentionMixin.forward", "inference_context")): (
        "forward-refuses",
        "possible",
        "megatron-core<0.12.0",
    ),
    raised(
        UNEXPECTED.format("LlamaAttention.forward", "position_embeddings"),
        "hidden_states, weights = self.self_attn(",
        f"{SITE}/transformers/models/llama/modeling_llama.py",
    ): ("forward-refuses", "possible", "transformers_version"),
    raised(UNEXPECTED.format("LlamaForCausalLM.forward", "token_type_ids")): (
        "forward-refuses",
        "possible",
        "remove_columns",
    ),
    f"P-Tuning chatglm\n{UNEQUAL}": ("virtual-tokens", "likely", "pre_seq_len=128"),
    f"num_virtual_tokens=10\nRuntimeError: {MASK}": ("virtual-tokens", "likely", "LoRA"),
    f"num_virtual_tokens=7\nRuntimeError: {MASK}": ("shape-apart", "possible", "max_length"),
    UNEQUAL: ("shape-multiple", "possible", "reshard convert"),
    raised("KeyError: None", "model = MODEL_TYPES[config.task_type](model)"): (
        "key-is-none",
        "likely",
        '"task_type": "CAUSAL_LM"',
    ),
    "AttributeError: 'ParameterDict' object has no attribute 'default'": (
        "attribute-of-adapters",
        "possible",
        "pip install -U peft trl",
    ),
    "AssertionError: rollout world_size: 1 is not divisible by infer_tp: 2": (
        "not-divisible",
        "likely",
        "Set `actor_rollout_ref.rollout.tensor_model_parallel_size` to a divisor of 1",
    ),
    raised("ImportError: Unsloth: Please import Unsloth before peft."): (
        "import-order",
        "likely",
        "import unsloth ",
    ),
    f"fsdp_config.wrap_policy.min_num_params=140000000\n{FREED}": (
        "fsdp-bypassed",
        "likely",
        "transformer_layer_cls_to_wrap",
    ),
    FREED: ("unknown-failure", "possible", ""),
    "RuntimeError: expected there to be only one unique element in <generator object"
    " Init._convert_to_deepspeed_param.<locals>.all_gather_coalesced.<locals>.<genexpr> at 0x7f2e>": (
        "zero3-dtypes",
        "likely",
        "pip install -U deepspeed",
    ),
    "RuntimeError: size mismatch, got 896, 896x4096,0": ("zero3-weight-2d", "likely", "with an engine"),
    "RuntimeError: Invalid device string: '0'": (
        "device-name",
        "likely",
        'Pass `cuda:0`, or the number: `device_map={"": 0}`',
    ),
    "AttributeError: 'NoneType' object has no attribute 'absmax'": (
        "quant-state-none",
        "possible",
        "unsloth_zoo",
    ),
    raised("IndexError: list index out of range", "x = lines[-2]", f"{SITE}/unsloth/models/rl.py"): (
        "part-failed",
        "possible",
        "unsloth_zoo",
    ),
    "ImportError: Megatron is not installed. please build it from source.": (
        "backend-of-config",
        "likely",
        "distributed_type: MULTI_GPU",
    ),
}


@pytest.mark.parametrize("said", SAID)
def test_who_imports_or_calls(said: str) -> None:
    code, certainty, cure = SAID[said]
    found = first(said)
    assert (found.code, found.certainty) == (code, certainty) and cure in found.remedy.en


def test_a_source_line_names_the_class() -> None:
    said = raised(UNEXPECTED.format("__init__", "frob"), "args = EngineArgs(**kwargs)", f"{SITE}/vllm/llm.py")
    found = first(said)
    assert found.code == "argument-of-none" and "EngineArgs(frob=…)" in found.message.en
    assert first(said.replace("EngineArgs", "Frob")).message.en.startswith(
        "Frob.__init__ has no argument frob"
    )


def test_names_of_missing_arguments_end_with_the_last_quote() -> None:
    found = first("TypeError: load() missing 1 required positional argument: 'adapter_id'错误")
    assert found.message.en == "load is called without 'adapter_id'"


def test_a_module_in_a_notebook_is_a_frame() -> None:
    text = (
        "ImportError                               Traceback (most recent call last)\nCell In[5], line 1\n"
        "----> 1 from llava.model.builder import load\n\n"
        f"File {SITE}/llava/__init__.py:1\n----> 1 from .model import LlavaLlamaForCausalLM\n\n{LLAVA.format(SITE)}\n"
    )
    assert first(text).code == "import-hidden"


def test_a_command_whose_package_lacks_its_module_is_no_older_release() -> None:
    """It was written together with the module: another package of the same name is imported."""
    log = (
        "Traceback (most recent call last):\n"
        '  File "/env/bin/axolotl", line 5, in <module>\n'
        "    from axolotl.cli.main import main\n"
        "ModuleNotFoundError: No module named 'axolotl.cli'\n"
    )
    assert diagnose_text("run.log", log)[0].code == "program-without-its-module"
    by_script = log.replace("/env/bin/axolotl", "/home/user/run.py")
    assert diagnose_text("run.log", by_script)[0].code != "program-without-its-module"
