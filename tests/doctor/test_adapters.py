"""Adapters, quantized models and TRL's trainers: what their messages mean."""

from __future__ import annotations

import re

import pytest

from reshard.diagnosis.rules import rules
from tests.doctor.test_classes import first, raised

ADAPTERS = {
    "ValueError: Target module QuantLinear() is not supported. Currently, only `torch.nn.Linear` and `Conv1D` are"
    " supported.": ("lora-target-quantized", "gptqmodel"),
    "ValueError: Target module Dropout(p=0.0, inplace=False) is not supported. Currently, only the following modules"
    " are supported: `torch.nn.Linear`.": ("lora-target-kind", '"all-linear"'),
    "RuntimeError: Error(s) in loading state_dict for PeftModelForCausalLM:\n\tsize mismatch for base_model.model."
    "model.layers.0.self_attn.q_proj.lora_A.default.weight: copying a param with shape torch.Size([16, 4096]) from"
    " checkpoint, the shape in current model is torch.Size([16, 5120]).": (
        "adapter-of-other-base",
        "base_model_name_or_path",
    ),
    "ValueError: Cannot merge LORA layers when the model is gptq quantized": (
        "merge-into-quantized",
        "merge_and_unload()",
    ),
    "ValueError: We need an `offload_dir` to dispatch this model according to this `device_map`, the following"
    " submodules need to be offloaded: base_model.model.model.layers.14.": (
        "adapter-offloaded",
        'device_map={"": 0}',
    ),
    "KeyError: 'base_model.model.model.model.layers.14.input_layernorm'": (
        "adapter-offloaded",
        "offload_folder",
    ),
    "ValueError: The model you are trying to fine-tune is quantized with QuantizationMethod.FP8 but that quantization"
    " method do not support training.": ("quantized-not-trainable", "dequantize=True"),
    "ValueError: You can't train a model that has been loaded in 8-bit or 4-bit precision with CPU or disk offload.": (
        "quantized-offloaded-training",
        "nvidia-smi",
    ),
    "importlib.metadata.PackageNotFoundError: No package metadata was found for bitsandbytes": (
        "package-without-metadata",
        "pip install -U bitsandbytes",
    ),
    "RuntimeError: None of the available devices `available_devices = None` are supported by the bitsandbytes version"
    " you have installed": ("gpu-not-there", "torch.cuda.is_available()"),
    "Exception: cublasLt ran into an error!": ("bitsandbytes-cublaslt", "bitsandbytes>=0.45"),
    "ImportError: cannot import name 'PytorchGELUTanh' from 'transformers.activations' (/x/site-packages/transformers/"
    "activations.py)": ("autoawq-ended", "autoawq==0.2.9"),
    "ImportError: Loading a GPTQ quantized model requires optimum (`pip install optimum`)": (
        "gptq-packages",
        "gptqmodel",
    ),
    "ValueError: Found modules on cpu/disk. Using Exllama backend requires all the modules to be on GPU.": (
        "exllama-offloaded",
        "use_exllama=False",
    ),
    "torch._C._LinAlgError: linalg.cholesky: The factorization could not be completed because the input is not"
    " positive-definite (the leading minor of order 18163 is not positive-definite). (gptq.py)": (
        "gptq-not-positive",
        "damp_percent",
    ),
    "ValueError: Unknown quantization type, got fp8 - supported types are: ['awq', 'gptq']": (
        "quantization-type-unknown",
        "pip install -U transformers",
    ),
    "ValueError: You passed `packing=False` to the SFTTrainer/SFTConfig, but you didn't pass a `dataset_text_field` or"
    " `formatting_func` argument.": ("sft-text-column", 'dataset_text_field="text"'),
    "RuntimeError: Unsloth: You must specify a `formatting_func`": ("sft-text-column", "column_names"),
    "ValueError: The `formatting_func` should return a list of processed strings since it can lead to silent bugs.": (
        "sft-formatting-batch",
        "zip(",
    ),
    "ValueError: Cannot handle batch sizes > 1 if no padding token is defined.": (
        "pad-token-of-model",
        "model.config.pad_token_id",
    ),
    "TypeError: PPOTrainer.__init__() got an unexpected keyword argument 'config'": (
        "ppo-rewritten",
        "trl<0.12",
    ),
    "RuntimeError: Unsloth currently does not support multi GPU setups - but we are working on it!": (
        "unsloth-several-gpus",
        "CUDA_VISIBLE_DEVICES=0",
    ),
    "RuntimeError: Unsloth: Quantization failed for /content/model/unsloth.BF16.gguf": (
        "unsloth-gguf",
        "cmake --build",
    ),
    "ValueError: The model's quantization config from the arguments has no `quant_method` attribute.": (
        "quantization-without-method",
        "mlx-lm",
    ),
    "ValueError: The model is quantized with FineGrainedFP8Config but you are passing a BitsAndBytesConfig config.": (
        "quantized-twice",
        "no quantization_config",
    ),
    "KeyError: 'input_ids_chosen'": ("reward-pairs", "remove_unused_columns=False"),
    "TypeError: reward_len() got an unexpected keyword argument 'prompts' in grpo_trainer.py": (
        "reward-function-arguments",
        "def reward_len(prompts, completions, **kwargs)",
    ),
    "RuntimeError: The expanded size of the tensor (8) must match the existing size (1) in rewards_per_func": (
        "reward-count",
        "None where it does not apply",
    ),
    "RuntimeError: Unsloth: No config file found - are you sure the `model_name` is correct?": (
        "unsloth-no-config",
        "hf download",
    ),
    "NameError: name 'Any' is not defined (unsloth_compiled_cache/UnslothSFTTrainer.py)": (
        "unsloth-cache",
        "rm -rf unsloth_compiled_cache",
    ),
    "RuntimeError: The size of tensor a (32000) must match the size of tensor b (32002) at non-singleton dimension 0"
    " (mergekit)": ("mergekit-vocabulary", "source: union"),
    "ModuleNotFoundError: No module named 'triton.ops'": (
        "bitsandbytes-too-old",
        "pip install -U bitsandbytes",
    ),
    "NameError: name 'str2optimizer32bit' is not defined": ("library-not-loaded", "python -m bitsandbytes"),
    "TypeError: qwen3_5 isn't supported yet.": ("quantizer-architecture", "llmcompressor"),
    "Exception: Vocab size mismatch (model has 32001, but merged/tokenizer.model has 32000).": (
        "gguf-vocabulary",
        "resize_token_embeddings",
    ),
    "ValueError: Unsloth: Untrained tokens of [[128042, 128036]] found, but embed_tokens & lm_head not trainable": (
        "unsloth-untrained-tokens",
        '"embed_tokens", "lm_head"',
    ),
    "RuntimeError: Attempting to use the same CUDA device for multiple distinct roles/ranks within the same"
    " communicator.": ("trl-server-same-gpu", "CUDA_VISIBLE_DEVICES=0 trl vllm-serve"),
    "RuntimeError: You can't move a model that has some modules offloaded to cpu or disk.": (
        "adapter-offloaded",
        "no model.to(...)",
    ),
    "ValueError: Supplied state dict for model.layers.0.mlp.down_proj.weight does not contain `bitsandbytes__*` and"
    " possibly other `quantized_stats` components.": (
        "bitsandbytes-not-stored",
        "pop('quantization_config')",
    ),
    "NotImplementedError: 4-bit quantization data type None is not implemented.": (
        "quant-state-none",
        'device_map={"": 0}',
    ),
    "NotImplementedError: You are calling `save_pretrained` on a 4-bit converted model. This is currently not"
    " supported": ("saving-quantized", 'save_pretrained("ADAPTER")'),
    "AttributeError: 'ModulesToSaveWrapper' object has no attribute 'dense'": (
        "modules-to-save-attribute",
        "pip install -U peft",
    ),
    "ERROR:lora-to-gguf:Unexpected name 'base_model.model.lm_head.weight': Not a lora_A or lora_B tensor": (
        "lora-to-gguf",
        "--merge --base BASE",
    ),
    "ValueError: The specified `eos_token` ('<EOS_TOKEN>') is not found in the vocabulary of the given"
    " `processing_class` (Qwen2TokenizerFast).": ("eos-placeholder", "eos_token=tokenizer.eos_token"),
    "AttributeError: 'generator' object has no attribute 'generate' (trl/trainer/dpo_trainer.py)": (
        "trl-batch-samples",
        "trl>=0.12",
    ),
    "AttributeError: 'AutoModelForCausalLMWithValueHead' object has no attribute 'base_model_prefix'": (
        "ppo-rewritten",
        "trl<0.12",
    ),
    "pydantic.errors.PydanticSchemaGenerationError: Unable to generate pydantic-core schema for <class"
    " 'torch.Tensor'>.": ("mergekit-pydantic", "pydantic<2.11"),
    "Error: json: cannot unmarshal array into Go struct field .model.merges of type string": (
        "gguf-tokenizer",
        "llama.cpp pull",
    ),
    "RuntimeError: a leaf Variable that requires grad is being used in an in-place operation.": (
        "leaf-in-place",
        ".clone()",
    ),
    "RuntimeError: Inference tensors cannot be saved for backward.": ("inference-tensors", "torch.no_grad()"),
    "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasGemmEx( handle, a, CUDA_R_16BF, lda)`": (
        "cublas-bfloat16",
        "torch.float16",
    ),
    "ValueError: lora.ParamWrapper does not work with lora_dropout != 0.": (
        "lora-parameters-dropout",
        "lora_dropout=0.0",
    ),
    "ImportError: cannot import name 'oneshot' from 'llmcompressor.transformers' (/x/site-packages/llmcompressor/"
    "transformers/__init__.py)": ("llmcompressor-moved", "from llmcompressor import oneshot"),
    "torch.fx.proxy.TraceError: symbolically traced variables cannot be used as inputs to control flow"
    " (llmcompressor/pipelines/sequential/helpers.py)": ("llmcompressor-tracing", "tracing_ignore"),
    'FileNotFoundError: No such file or directory: "output/adapter_model.safetensors"': (
        "adapter-weights-missing",
        "ls -la output",
    ),
    "python: can't open file '/content/llama.cpp/convert-hf-to-gguf.py': [Errno 2] No such file or directory": (
        "llama-cpp-renamed",
        "convert_hf_to_gguf.py",
    ),
    "llama_model_quantize: failed to quantize: ggml_validate_row_data: found nan value at block 0": (
        "gguf-nan",
        "isfinite",
    ),
    "error loading model: check_tensor_dims: tensor 'token_embd.weight' has wrong shape; expected 4096, 32001": (
        "gguf-vocabulary",
        "resize_token_embeddings",
    ),
    "RuntimeError: Tensor lm_head.weight required but not present in model a/b": (
        "mergekit-tensor",
        "layer_range",
    ),
}


@pytest.mark.parametrize("said", ADAPTERS, ids=lambda said: said[:60])
def test_what_adapters_and_quantized_models_say_is_explained(said: str) -> None:
    code, cure = ADAPTERS[said]
    for text in (said, raised(said, "model = load()")):
        found = first(text)
        assert (found.code, found.certainty) == (code, rules()[code].get("certainty", "likely"))
        assert cure in found.remedy.en
        for told in (found.message, found.rule, found.remedy):
            assert not re.search(r"\{[a-z]+\}", told.en + told.zh)


REPORTED = {
    "trainable params: 0 || all params: 7,245,139,968 || trainable%: 0.0": (
        "nothing-trainable",
        "is_trainable=True",
    ),
    "UserWarning: Could not find response key `### Response:` in the following instance: <s> hi\n"
    "{'loss': 0.0, 'grad_norm': nan, 'epoch': 0.01}\n{'loss': 0.0, 'grad_norm': nan, 'epoch': 0.02}": (
        "response-template-missing",
        "add_special_tokens=False",
    ),
    "微调时loss一直是0，grad_norm是nan，V100，fp16": ("loss-nan", "bf16=True"),
}


@pytest.mark.parametrize("said", REPORTED)
def test_what_ends_no_run_is_explained(said: str) -> None:
    code, cure = REPORTED[said]
    found = first(said)
    assert (found.code, found.severity) == (code, "warning")
    assert cure in found.remedy.en


def test_a_file_that_hides_the_package_it_imports_is_named() -> None:
    found = first(
        "ImportError: cannot import name 'PeftModel' from partially initialized module 'peft' (most likely due to a"
        " circular import) (/home/me/run/peft.py)"
    )
    assert found.code == "folder-for-package"
    assert "/home/me/run/peft.py" in found.rule.en


OF_MODELS = {
    "AttributeError: 'Qwen2ForCausalLM' object has no attribute 'print_trainable_parameters'": "attribute-of-other",
    "RuntimeError: self and mat2 must have the same dtype, but got Half and Byte": "weight-packed",
}


@pytest.mark.parametrize("said", OF_MODELS)
def test_a_model_without_its_wrapper_or_floats_is_recognized(said: str) -> None:
    assert first(said).code == OF_MODELS[said]


def test_a_name_of_trl_or_peft_is_shown_where_it_is_now() -> None:
    moved = first("AttributeError: module 'trl' has no attribute 'PPOTrainer'")
    assert "from trl.experimental.ppo import PPOTrainer" in moved.remedy.en
    renamed = first(
        "ImportError: cannot import name 'prepare_model_for_int8_training' from 'peft' (/x/peft/__init__.py)"
    )
    assert "prepare_model_for_kbit_training" in renamed.remedy.en


def test_an_option_of_a_trainer_is_shown_where_it_is_now() -> None:
    found = first("TypeError: DPOTrainer.__init__() got an unexpected keyword argument 'beta'")
    assert 'DPOTrainer(..., args=DPOConfig(output_dir="OUT", beta=…))' in found.remedy.en


@pytest.mark.parametrize(
    ("call", "instead"),
    [
        ("GRPOTrainer.__init__() got an unexpected keyword argument 'tokenizer'", "processing_class"),
        (
            "GRPOTrainer.__init__() got an unexpected keyword argument 'max_completion_length'",
            "args=GRPOConfig",
        ),
    ],
)
def test_an_argument_that_no_release_has_is_shown_where_it_belongs(call: str, instead: str) -> None:
    found = first(f"TypeError: {call}")
    assert found.code == "argument-of-none"
    assert instead in found.remedy.en


def test_a_trainer_is_recognized_by_its_file() -> None:
    said = "AttributeError: 'TrainingArguments' object has no attribute 'model_init_kwargs'"
    frame = '  File "/x/site-packages/trl/trainer/dpo_trainer.py", line 1, in __init__\n    args.model_init_kwargs\n'
    assert "import DPOConfig" in first(f"Traceback (most recent call last):\n{frame}{said}\n").remedy.en
    assert "import SFTConfig" in first(said).remedy.en
