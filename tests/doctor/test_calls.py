"""Classes of causes, computed from the words of a failure: calls, attributes, and what was refused."""

from __future__ import annotations

import pytest

from reshard.diagnosis.logs import diagnose_text
from tests.doctor.test_classes import SITE, assert_class, first, raised

CALLS = {
    raised("ValueError: too many dimensions 'str'", "return torch.tensor(value)"): (
        "text-in-batch",
        "remove_columns",
    ),
    raised(
        "AssertionError: pipeline_model parallel group is not initialized", "assert GROUP is not None, \\"
    ): (
        "not-set-up",
        "initialize_model_parallel",
    ),
    raised(
        "AssertionError: Not sure how to proceed, we were given deepspeed configs in both",
        'assert config is None, "Not sure how to proceed, we were given deepspeed configs in both"',
    ): ("requirement-not-met", "config is None"),
    "ImportError: cannot import name 'ProcessGroupCollection' from 'megatron.core.process_groups_config'"
    " (/opt/megatron-lm/megatron/core/process_groups_config.py)": (
        "api-came-later",
        "git -C /opt/megatron-lm",
    ),
    raised(
        "ModuleNotFoundError: No module named 'megatron.core.dist_checkpointing'", "from nemo import nlp"
    ): (
        "module-not-found",
        "pip install",
    ),
    "AttributeError: 'MyGRPOTrainer' object has no attribute 'num_iterations'": (
        "attribute-of-derived",
        "trl>=0.16.0",
    ),
    "AttributeError: 'TrainingArguments' object has no attribute 'packing'": (
        "attribute-of-heir",
        "SFTConfig(",
    ),
    "AttributeError: 'GRPOTrainer' object has no attribute 'current_gradient_accumulation_steps'": (
        "api-came-later",
        "transformers>=4.55",
    ),
    raised(
        "ValueError: max() arg is an empty sequence",
        "largest_numel = max([sum([p.ds_numel for p in psg]) for psg in self.fp16_partitioned_groups])",
        f"{SITE}/deepspeed/runtime/zero/stage3.py",
    ): ("nothing-to-choose", "requires_grad"),
    raised("ValueError: max() iterable argument is empty", "steps = max(found)"): (
        "nothing-to-choose",
        "train_dataset",
    ),
    raised("KeyError: 'model.embed_tokens.weight'", 'state_dict["model.embed_tokens.weight"]'): (
        "names-lookup",
        "reshard inspect",
    ),
    raised(
        "RuntimeError: The size of tensor a (0) must match the size of tensor b (4096) at non-singleton dimension 1",
        "base_layer.weight.data = base_layer.weight.data + delta_weight",
    ): ("shape-empty-side", "GatheredParameters"),
    "ImportError: No module named swift.llm": ("python-two", "which -a python"),
    "ModuleNotFoundError: No module named 'axolotl.frobs'": ("gone-before", "axolotl<"),
    raised(
        "ModuleNotFoundError: No module named 'axolotl.frobs'",
        "from axolotl.frobs import frob",
        "/home/user/axolotl/scripts/finetune.py",
    ): ("checkout-and-package", "pip install -e ."),
    raised(
        "AttributeError: 'FrobTrainer' object has no attribute 'sft_args'",
        "if self.state.global_step % self.sft_args.acc_steps == 0:",
        f"{SITE}/frob/trainers.py",
    ): ("attribute-of-itself", "pip install -U frob"),
    raised("AttributeError: 'MyGRPOTrainer' object has no attribute 'llm'", "self.llm.generate(prompts)"): (
        "attribute-of-derived",
        "trl>=0.14.0,<",
    ),
    raised(
        "AttributeError: 'MyGRPOTrainer' object has no attribute 'llm'",
        "inputs = self._prepare_inputs(inputs)",
        f"{SITE}/trl/trainer/grpo_trainer.py",
    ): ("attribute-of-derived", "trl>=0.16.0,<0.18.0"),
    "AttributeError: 'MyOwnTrainer' object has no attribute 'accelerator'": (
        "attribute-of-derived",
        "transformers>=4.30.0",
    ),
    raised(
        "TypeError: __init__() missing 1 required positional argument: 'processor'",
        "collator = FrobCollator(pad_token_id=0)",
    ): ("call-lacks-own", "(`FrobCollator(…, name=value)`)"),
    raised(
        "TypeError: __init__() missing 1 required positional argument: 'processor'",
        "collator = FrobCollator(pad_token_id=0)",
        f"{SITE}/frob/data.py",
    ): ("call-lacks", "-U frob"),
    raised(
        "ValueError: not enough values to unpack (expected 3, got 2)",
        "logits, loss, values = model(**inputs, return_dict=True)",
    ): ("model-returns-other", "print(type(model))"),
    raised(
        "AttributeError: 'MyGRPOTrainer' object has no attribute 'num_iterations'",
        "if self.num_iterations > 1:",
        f"{SITE}/trl/trainer/grpo_trainer.py",
    ): ("attribute-of-derived", "trl<0.16.0"),
    raised(
        "AttributeError: 'LoraModel' object has no attribute 'merge_and_unload'",
        "return getattr(self.model, name)",
        f"{SITE}/peft/tuners/lora.py",
    ): ("installed-before", "peft>="),
    raised("TypeError: 'NoneType' object is not subscriptable", "logits = outputs.logits[..., :-1, :]"): (
        "output-is-none",
        "turn off",
    ),
    "    logits = outputs.logits[..., :-1, :]\n             ~~~~~~~~~~~~~~^^^^^^^^^^^^\n"
    "TypeError: 'NoneType' object is not subscriptable": ("output-is-none", "turn off"),
    raised("TypeError: 'NoneType' object is not iterable", "kwargs.update(self.args.generation_kwargs)"): (
        "setting-is-none",
        "Set `generation_kwargs`",
    ),
    raised("NotImplementedError", "raise NotImplementedError").replace(
        "  File", f'  File "{SITE}/peft/mapping.py", line 9, in g\n    f(self.peft_config.bias)\n  File'
    ): ("no-case-for-it", "branches"),
    "ValueError: `token_type_ids` is required as a model input when training": ("batch-lacks", "collator"),
    "ValueError: You have to specify either input_ids or inputs_embeds": ("batch-lacks", "collator"),
    "AssertionError: ZeRO parameter intra parallel group is already initialized": (
        "set-up-twice",
        "zero_hpz_partition_size",
    ),
    raised("AttributeError: 'NoneType' object has no attribute 'wake_up'", "self.engine.wake_up()"): (
        "value-is-none",
        "Print it",
    ),
    "AttributeError: 'AdamW' object has no attribute 'train'": ("attribute-of-optimizer", "accelerate"),
    "AttributeError: 'RunArguments' object has no attribute 'frob'": ("attribute-of-arguments", "--frob"),
    raised("TypeError: forward() missing 1 required positional argument: 'labels'"): (
        "batch-lacks",
        "collator",
    ),
    raised("ValueError: too many values to unpack (expected 4)", "b, c, h, w = pixel_values.shape"): (
        "dimensions-differ",
        "squeeze(0)",
    ),
    raised("NameError: name 'init_empty_weights' is not defined"): ("name-of-optional", "-U accelerate"),
    raised("UnboundLocalError: local variable 'sp_pb2' referenced before assignment"): (
        "name-of-optional",
        "protobuf",
    ),
    raised("ZeroDivisionError: division by zero"): ("count-is-zero", "len(dataset)"),
    raised("IndexError: list index out of range"): ("index-beyond", "and its length"),
    raised("TypeError: unsupported operand type(s) for |: 'type' and 'NoneType'"): (
        "python-too-old",
        "python=3.11",
    ),
    raised(
        "TypeError: __init__() got an unexpected keyword argument 'gpu_ids'",
        "return cls(**config_dict)",
        f"{SITE}/accelerate/commands/config/config_args.py",
    ): ("config-newer", "-U accelerate"),
    "AttributeError: module 'numpy' has no attribute 'typeDict'": ("gone-before", "numpy<"),
    "TypeError: TrainingArguments.__init__() got an unexpected keyword argument 'learning_rat'": (
        "argument-misspelled",
        "Write `learning_rate=`",
    ),
    raised(
        "TypeError: Attention.__init__() got an unexpected keyword argument 'frob'",
        "return module(",
        f"{SITE}/megatron/core/transformer/spec_utils.py",
    ): ("call-unknown", "-U megatron-core"),
    "AttributeError: 'NoneType' object has no attribute 'cdequantize_blockwise_bf16_nf4'": (
        "library-not-loaded",
        "python -m bitsandbytes",
    ),
    raised(
        "TypeError: int() argument must be a string, a bytes-like object or a real number, not 'NoneType'",
        "n = int(args.size)",
    ): (
        "setting-is-none",
        "Set `size`",
    ),
    raised(
        "ValueError: Template frob3 does not exist.",
        "raise ValueError(text)",
        f"{SITE}/llamafactory/data/template.py",
    ): (
        "template-unknown",
        "",
    ),
    "AttributeError: /venv/lib/python3.11/site-packages/bitsandbytes/libbitsandbytes_cpu.so: undefined symbol: "
    "cdequantize_blockwise_fp16_nf4": ("library-for-cpu", "torch.version.cuda"),
    "AttributeError: /venv/lib/python3.11/site-packages/bitsandbytes/libbitsandbytes_cuda124.so: undefined symbol: "
    "cgemm_4bit": ("library-of-other-release", "uninstall"),
    "AssertionError: score: len(values)=58, len(samples)=1261": ("lengths-differ", "same keys"),
    "ValueError: All arrays must be of the same length": ("lengths-differ", "same number of items"),
    "ValueError: Length of values (3) does not match length of index (5)": ("lengths-differ", "dataset.map"),
    raised(
        "AttributeError: 'NoneType' object has no attribute 'to'", "p = val.to(dtype)", "/a/convert_to_hf.py"
    ): (
        "value-is-none",
        "Print it",
    ),
    raised("KeyError: 'reward'", "c = self.peft_config[name]", f"{SITE}/peft/tuners/base.py"): (
        "key-other",
        "-U peft",
    ),
    raised(
        "AttributeError: 'FrobConfig' object has no attribute 'rotary'",
        "self.r = config.rotary",
        "/home/user/.cache/huggingface/modules/transformers_modules/frob/a1/modeling_frob.py",
    ): ("attribute-of-config", "revision=COMMIT"),
    "AttributeError: 'FrobFlashAttention2' object has no attribute '_flash_attention_forward'": (
        "attribute-gone",
        "'transformers<=4.42.4'",
    ),
    "raise error: AssertionError: rotary_emb is not installed": (
        "not-installed",
        "-U --no-build-isolation flash-attn",
    ),
}

REFUSALS = {
    "pydantic_core._pydantic_core.ValidationError: 1 validation error for Config\ndatasets\n"
    "  Input should be a valid list [type=list_type, input_value={'a': 1}, input_type=dict]": (
        "value-refused",
        "valid list",
    ),
    "train.py: error: argument --optim: invalid choice: 'adam9' (choose from 'adamw', 'sgd')": (
        "choice-refused",
        "--help",
    ),
    "ERROR: Package 'trl' requires a different Python: 3.8.17 not in '>=3.9'": ("python-refused", "3.9"),
    "RuntimeError: Found dtype BFloat16 but expected Float": ("dtypes-differ", "bfloat16"),
    "RuntimeError: only Tensors of floating point and complex dtype can require gradients": (
        "gradient-of-integers",
        "get_peft_model",
    ),
    "ValueError: Please specify `target_modules` or `target_parameters` in `peft_config`": (
        "setting-not-given",
        "all-linear",
    ),
    "ValueError: Blockwise quantization only supports 16/32-bit floats, but got torch.bfloat16": (
        "dtype-unsupported",
        "-U bitsandbytes",
    ),
    "ValueError: Blockwise quantization only supports 16/32-bit floats, but got torch.uint8": (
        "already-quantized",
        "Quantize once",
    ),
    "$ frob convert mix a.py out\nWARNING: command error: 'mix'!": (
        "subcommand-unknown",
        "pip install -U frob",
    ),
    "$ swift mix a.py out\nWARNING: command error: 'mix'!": (
        "subcommand-unknown",
        "pip install -U ms-swift",
    ),
    "Usage: frob [OPTIONS] COMMAND\nError: No such command 'mix'.": ("subcommand-unknown", "--help"),
    "RuntimeError: [gloo/transport/tcp/pair.cc:186] ss1.ss_family == ss2.ss_family. 2 vs 10": (
        "address-families",
        "GLOO_SOCKET_IFNAME",
    ),
    "RuntimeError: [enforce fail at gloo/device.cc:83] ifa != nullptr. Unable to find address for: eth1": (
        "interface-missing",
        "ip -br addr",
    ),
    "ValidationError: 1 validation error for Frob\n  Value error, batch_tokens (8) is smaller than max_len (9).": (
        "settings-ordered",
        "Raise `batch_tokens`, or lower `max_len`",
    ),
    "ValueError: warmup_steps (90) must be smaller than max_steps (60)": (
        "settings-ordered",
        "Raise `max_steps`, or lower `warmup_steps`",
    ),
    "ValidationError: 1 validation error for FrobConfig\n  Value error, use either a or b": (
        "values-refused",
        "names",
    ),
    "vllm: AttributeError: Model Frob2ForCausalLM does not support BitsAndBytes quantization yet.": (
        "not-supported-yet",
        "-U vllm",
    ),
    "ValueError: Target module FrobLinear is not supported. Currently, only `torch.nn.Linear` is supported.": (
        "not-supported-yet",
        "-U peft",
    ),
    "AssertionError: Loading a checkpoint for MP=8 but world size is 1": (
        "short-processes",
        "--nproc_per_node 8",
    ),
    "AssertionError: Loading a checkpoint for MP=0 but world size is 2": ("short-parts", ".pth"),
    raised(
        "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
        " (when checking argument for argument index in method wrapper_CUDA__index_select)",
        "return F.embedding(input, self.weight)",
        f"{SITE}/torch/nn/functional.py",
    ): ("device-cpu", "value.to(model.device)"),
    "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cpu and cuda:0!"
    " (when checking argument for argument mat1 in method wrapper_CUDA_addmm)": (
        "device-cpu",
        'model.to("cuda")',
    ),
    "RuntimeError: Expected all tensors to be on the same device, but got weight is on cpu, different from other"
    " tensors on cuda:0 (when checking argument in method wrapper_CUDA__native_layer_norm)": (
        "device-cpu",
        'model.to("cuda")',
    ),
    raised(
        "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cpu and cuda:0!",
        "ids = torch.cat([prompt_ids, completion_ids], dim=1)",
    ): ("device-cpu", "x.to(y.device)"),
    "RuntimeError: One of the differentiated Tensors does not require grad": ("no-grad", "use_reentrant"),
    "KeyError: 'Trying to restore optimizer state but checkpoint contains only the model. This is probably due to"
    " `ModelCheckpoint.save_weights_only` being set to `True`.' But it is": (
        "checkpoint-weights-only",
        "without `ckpt_path`",
    ),
    "RuntimeError: The state of _OptimStateKey(unflat_param_names=('visual.a', 'visual.b', 'c'),"
    " is_fsdp_managed=True) is empty. This should happen when use_orig_params=True.": (
        "optimizer-state-empty",
        "freeze_vision_tower",
    ),
    "AttributeError: 'BertConfig' object has no attribute 'pad_token_id'": (
        "config-of-four",
        "transformers<5",
    ),
    "Could not find the bitsandbytes CUDA binary at PosixPath('/a/libbitsandbytes_cuda121.so')\n"
    "OSError: /a/libbitsandbytes_cpu.so: cannot open shared object file: No such file or directory": (
        "bitsandbytes-cuda-setup",
        "python -m bitsandbytes",
    ),
    "ValueError: Cannot flatten integer dtype tensors": ("fsdp-integers", "bnb_4bit_quant_storage"),
    "ValueError: FlatParameter requires uniform dtype but got torch.float16 and torch.float32": (
        "fsdp-dtypes",
        "autocast_adapter_dtype=False",
    ),
    "ValueError: FlatParameter requires uniform dtype but got torch.uint8 and torch.float32": (
        "fsdp-integers",
        "bnb_4bit_quant_storage",
    ),
    raised(
        "AssertionError",
        "assert len(set(t.dtype for t in tensors)) == 1",
        f"{SITE}/deepspeed/runtime/zero/stage3.py",
    ): (
        "dtypes-asserted",
        '"fp16": {"enabled": "auto"}',
    ),
    "ValueError: You passed packing=False, but you didn't pass a dataset_text_field or formatting_func argument.": (
        "sft-text-column",
        "dataset_text_field=",
    ),
    "`AcceleratorState` object has no attribute `distributed_type`.": (
        "accelerate-state-reset",
        "TrainingArguments(",
    ),
    "ValueError: Expected net.layer.0 to NOT be FullyShardedDataParallel if using an `auto_wrap_policy`": (
        "fsdp-nested",
        "only one call",
    ),
    "AssertionError: zero stage 2 requires an optimizer": ("zero-no-optimizer", "stage 3"),
    "ValueError: The dataset appears to be vision-related (contains 'image' or 'images' keys), but the provided"
    " model does not seem to be a vision-language model. Please check your model and dataset.": (
        "tokenizer-for-images",
        "processing_class=processor",
    ),
    "Loaded tokenizer 'RobertaTokenizerFast'\n"
    'ValueError: Config: RobertaConfig {\n  "a": 1\n}\n has to be of type <class \'transformers.models.'
    "encoder_decoder.configuration_encoder_decoder.EncoderDecoderConfig'>": (
        "config-of-other-kind",
        "EncoderDecoderConfig.from_encoder_decoder_configs",
    ),
    "ValueError: --load_best_model_at_end requires the save and eval strategy to match, but found\n"
    "- Evaluation strategy: IntervalStrategy.NO\n- Save strategy: IntervalStrategy.STEPS": (
        "strategies-differ",
        'eval_strategy="steps"',
    ),
    "TypeError: PeftConfig.__init__() got an unexpected keyword argument '_name_or_path'": (
        "adapter-config-of-model",
        "base_model_name_or_path",
    ),
    "x.RepositoryNotFoundError: 404 Client Error: Repository Not Found for url: https://huggingface.co/a": (
        "hub-answers",
        "OWNER/NAME",
    ),
    "      RuntimeError:\n      The detected CUDA version (12.3) mismatches the version that was used to compile\n"
    "      PyTorch (11.7). Please make sure to use the same CUDA versions.": (
        "cuda-toolkit-differs",
        "cuda-toolkit=11.7",
    ),
    "torch.distributed.DistBackendError: [1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] "
    "via c10d key-value store by key '0', but store->get('0') got error: Socket Timeout": (
        "ranks-absent",
        "that rank's own log",
    ),
    "torch_npu 2.2.0\nAssertionError: Torch not compiled with CUDA enabled": (
        "cuda-on-npu",
        "transfer_to_npu",
    ),
    "ValueError: Image features and image tokens do not match: tokens: 4090, features 4225": (
        "modal-counts",
        "max_pixels",
    ),
    "NotImplementedError: FrobState8bit dispatch: attempting to run unimplemented operator/function: aten.frob": (
        "operator-missing",
        "save_only_model",
    ),
    "usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --local_rank=0": (
        "local-rank-argument",
        "",
    ),
}


@pytest.mark.parametrize("text", [*CALLS, *REFUSALS], ids=lambda text: text[-60:])
def test_a_class_of_causes_is_computed(text: str) -> None:
    assert_class(text, *{**CALLS, **REFUSALS}[text])


EXCLUDE = {
    "ValueError: `max_length` and `max_new_tokens` are mutually exclusive": ("max_length", "max_new_tokens"),
    "ValueError: Cannot specify both `dtype` and `torch_dtype`": ("dtype", "torch_dtype"),
    "ValueError: You passed both `device_map` and `tp_plan`. Please pass only one of them.": (
        "device_map",
        "tp_plan",
    ),
    "ValueError: At most one of fp16 and bf16 can be True, but not both": ("fp16", "bf16"),
    "ValueError: Either `tokenizer` or `processing_class` should be given, not both.": (
        "tokenizer",
        "processing_class",
    ),
    "ValueError: You cannot specify both input_ids and inputs_embeds at the same time": (
        "input_ids",
        "inputs_embeds",
    ),
}


@pytest.mark.parametrize("said", EXCLUDE)
def test_two_arguments_that_exclude_each_other_are_named(said: str) -> None:
    found = first(raised(said))
    assert found.code == "arguments-exclude"
    assert all(name in found.message.en and name in found.message.zh for name in EXCLUDE[said])


def test_one_of_two_that_is_missing_is_no_pair_too_many() -> None:
    said = "You cannot specify both input_ids and inputs_embeds at the same time, and must specify either one"
    assert first(raised(f"ValueError: {said}")).code == "batch-lacks"


def test_argparse_names_both_options() -> None:
    (found,) = diagnose_text("log", "train.py: error: argument --a: not allowed with argument --b")
    assert found.code == "arguments-exclude" and "grep -rnE -- '--a|--b'" in found.remedy.en
