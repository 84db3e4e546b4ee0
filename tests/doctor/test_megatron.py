"""Messages of Megatron, of programs built on it, and of their kernels that have one meaning."""

from __future__ import annotations

import pytest

from reshard.diagnosis.logs import diagnose_text
from tests.doctor.test_classes import assert_class, first, raised

MESSAGES = {
    "AssertionError: Using tensor model parallelism or context parallelism require setting the environment "
    "variable CUDA_DEVICE_MAX_CONNECTIONS to 1": (
        "max-connections-not-one",
        "export CUDA_DEVICE_MAX_CONNECTIONS=1",
    ),
    "RuntimeError: Using sequence parallelism requires setting the environment variable "
    "CUDA_DEVICE_MAX_CONNECTIONS to 1": ("max-connections-not-one", "before `ray start`"),
    "AssertionError: FSDP always requires CUDA_DEVICE_MAX_CONNECTIONS value large than one": (
        "max-connections-one",
        "unset CUDA_DEVICE_MAX_CONNECTIONS",
    ),
    "AssertionError: world size (1) is not divisible by tensor model parallel size (2)": (
        "layout-on-one-process",
        "torchrun --nproc-per-node 2",
    ),
    "AssertionError: world size (4) is not divisible by total_model_size (total_model_size=8)": (
        "layout-beyond-processes",
        "Start a multiple of 8 processes",
    ),
    "AssertionError: world size (8) is not divisible by total_model_size (encoder_model_size=0 + "
    "decoder_model_size=16)": ("layout-beyond-processes", "Start a multiple of 16 processes"),
    "AssertionError: One or both of the .idx and .bin files cannot be found at the path prefix /data/my": (
        "dataset-prefix-wrong",
        "--data-path /data/my_text_document",
    ),
    "AssertionError: One or both of the .idx and .bin files cannot be found at the path prefix /data/my.bin": (
        "dataset-prefix-with-suffix",
        "--data-path /data/my\n",
    ),
    "ModuleNotFoundError: No module named 'apex'": ("apex-missing", "APEX_CUDA_EXT=1"),
    "ModuleNotFoundError: No module named 'scaled_upper_triang_masked_softmax_cuda'": (
        "fused-softmax-missing",
        "--no-masked-softmax-fusion",
    ),
    "ModuleNotFoundError: No module named 'xentropy_cuda_lib'": (
        "flash-attn-extras-missing",
        "csrc/xentropy",
    ),
    "ModuleNotFoundError: No module named 'torch._six'": ("torch-six-gone", "from torch import inf"),
    "RuntimeError: Rank 5, node n1, device 5, iteration 31: Unexpected result nan (message='found NaN in local "
    "forward loss calculation')": ("nan-in-megatron", "--lr-warmup-iters"),
    "AssertionError: Rank 6: found NaN in local grad norm in backward pass before data-parallel communication "
    "collective. Device: 6, node: n2": ("nan-in-megatron", "--no-check-for-nan-in-loss-and-grad"),
    "ValueError: During training, performance may degrade if MoE and tensor parallelismare enabled without also "
    "enabling sequence parallelism.": ("experts-need-sequence-parallel", "--sequence-parallel"),
    "ImportError: DeepEP is not installed. Please install DeepEP package from "
    "https://github.com/deepseek-ai/deepep.": ("deepep-missing", "--moe-token-dispatcher-type alltoall"),
    "ValueError: No dot product attention backend is available for the provided inputs. Please run with "
    "NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 to find out the reasons for disabling all backends.": (
        "attention-backend-none",
        "unset NVTE_FLASH_ATTN",
    ),
    "AssertionError: Device compute capability 8.9 or higher required for FP8 execution.": (
        "fp8-needs-newer-gpu",
        "Train in bf16",
    ),
    "AssertionError: FP8 execution requires the product of all dimensions except the last to be divisible by 8 "
    "and the last dimension to be divisible by 16, but got tensor with dims=[1023, 4096]": (
        "fp8-sizes",
        "pad_to_multiple_of=16",
    ),
    "AssertionError: rope_theta in hf config 5000000 is not equal to rotary_base 1000000, please check the "
    "config.": ("arguments-of-other-model", "MODEL_ARGS_ROTARY_BASE=5000000"),
    "RuntimeError: Could not find 'RANK' in the torch environment, visit https://www.colossalai.org/ for more "
    "information on launching with torch": ("colossalai-without-launcher", "colossalai run"),
    "NotImplementedError: Auto policy for Qwen3ForCausalLM (transformers.models.qwen3.modeling_qwen3."
    "Qwen3ForCausalLM) is not implemented": ("colossalai-policy-missing", "LowLevelZeroPlugin"),
    "megatron.core.dist_checkpointing.core.CheckpointingException: Object shard /ckpt/decoder.layers."
    "self_attention.core_attention._extra_state/shard_0_32.pt not found": (
        "extra-state-shard-missing",
        "--dist-ckpt-strictness log_all",
    ),
    "AssertionError: num_attention_heads argument is None": ("argument-not-given", "--use-checkpoint-args"),
    "RuntimeError: cublaslt_gemm.cu:336 in function cublas_gemm: Assertion failed: status != "
    "CUBLAS_STATUS_NOT_SUPPORTED. Unable to find suitable cuBLAS GEMM algorithm": (
        "gemm-without-algorithm",
        "env -u LD_LIBRARY_PATH",
    ),
    "RuntimeError: fused_attn/fused_attn_f16_arbitrary_seqlen.cu:390 in function operator(): cuDNN Error: "
    "[cudnn_frontend] Error: No valid execution plans built.": (
        "fused-attention-without-plan",
        "NVTE_FUSED_ATTN=0",
    ),
    "ModuleNotFoundError: No module named 'nemo.collections.nlp'": ("nemo-collection-gone", "nemo_toolkit"),
    "error: Distribution not found at: file:///root/nemo-rl/3rdparty/Megatron-LM-workspace/Megatron-LM": (
        "submodule-not-fetched",
        "git submodule update --init --recursive",
    ),
    "AssertionError: seq_length should be a multiple of 2 * context_parallel_size if context_parallel_size > 1.": (
        "sequence-of-context-parallel",
        "--seq-length",
    ),
    "KeyError: 'DatasetInfoHook is not in the mmengine::hook registry. Please check whether the value of "
    "`DatasetInfoHook` is correct or it was registered as expected.'": ("registry-lacks", "custom_imports"),
    "Exception: [extension] Failed to build PyTorch extension because the detected CUDA version (12.4) "
    "mismatches the version that was used to compile PyTorch (11.8).": ("cuda-toolkit-differs", "CUDA_HOME"),
    "NotImplementedError: None tokenizer is not implemented.": (
        "tokenizer-not-named",
        "--tokenizer-type HuggingFaceTokenizer",
    ),
    "ValueError: Unregistered model type: qwen3_next, now only support dict_keys(['qwen2'])": (
        "bridge-lacks-model",
        "ISEEKYAN/mbridge",
    ),
    "ValueError: \n✗ Model architecture not supported by AutoBridge\n\nModel: x": (
        "bridge-lacks-model",
        "install -U megatron-bridge",
    ),
    "ValueError: Unknown parameter name: module.module.decoder.layers.0.mlp.router.weight": (
        "name-not-mapped",
        "--model-name",
    ),
    "RuntimeError: Cuda extensions are being compiled with a version of Cuda that does not match the version used "
    "to compile Pytorch binaries.  Pytorch binaries were compiled with Cuda 12.1.": (
        "apex-toolkit-differs",
        "CUDA_HOME=/usr/local/cuda-12.1 ",
    ),
    "error: option --cpp_ext not recognized": ("apex-options-changed", "APEX_CPP_EXT=1"),
    "AttributeError: 'Parameter' object has no attribute 'main_grad'": (
        "main-grad-missing",
        "--no-gradient-accumulation-fusion",
    ),
    "AssertionError: NVTE_FLASH_ATTN set to 0, but expected NVTE_FLASH_ATTN to be 1 for attention backend type "
    "AttnBackend.flash.": ("attention-variables-set", "unset NVTE_FLASH_ATTN"),
    "omegaconf.errors.MissingMandatoryValue: Missing mandatory value: trainer.num_nodes": (
        "config-value-missing",
        "COMMAND trainer.num_nodes=VALUE",
    ),
    "AssertionError: Number of experts should be a multiple of expert model parallel_size.": (
        "not-divisible",
        "--expert-model-parallel-size",
    ),
    "AssertionError: number of layers of the model must be divisible pipeline model parallel size": (
        "not-divisible",
        "--decoder-first-pipeline-num-layers",
    ),
    "AssertionError: --overlap-param-gather only supported with distributed optimizer, megatron fsdp": (
        "needs-distributed-optimizer",
        "--use-distributed-optimizer",
    ),
    "ValueError: num_moe_experts must be non None to use expert-parallel.": (
        "experts-not-given",
        "--num-experts",
    ),
    "CMake Error at CMakeLists.txt:55: Could NOT find CUDNN (missing: CUDNN_INCLUDE_DIR CUDNN_LIBRARY)": (
        "cudnn-not-found-by-cmake",
        "export CUDNN_PATH",
    ),
    "TypeError: launch_from_torch() got an unexpected keyword argument 'config'": (
        "colossalai-launch-config",
        "colossalai.launch_from_torch(seed=42)",
    ),
}


@pytest.mark.parametrize("said", MESSAGES)
def test_message_has_one_meaning(said):
    assert_class(raised(said), *MESSAGES[said])


@pytest.mark.parametrize(
    ("log", "code", "cure"),
    [
        (
            "make: *** No rule to make target 'default'.  Stop.\n"
            "ERROR:megatron.core.datasets.utils:Failed to compile the C++ dataset helper functions\n",
            "dataset-helpers-unbuilt",
            "pip install pybind11",
        ),
        (
            "make: g++: Command not found\nmake: *** [Makefile:9: helpers.so] Error 127\n"
            "Making C++ dataset helpers module failed, exiting.\n",
            "program-missing",
            "apt install build-essential",
        ),
        (
            "Starting loader...\nUnable to import Megatron, please specify the path to Megatron using "
            "--megatron-path. Exiting.\nLoader exited, exiting saver\n",
            "conversion-without-megatron",
            "export PYTHONPATH=$PWD",
        ),
        (
            "sending transformer layer 24\nreceived transformer layer 24\nLoader exited, exiting saver\n",
            "conversion-loader-died",
            "free -g",
        ),
        (
            "Unable to load rng state from checkpoint /ckpt/model_optim_rng.pt. Specify --no-load-rng or "
            "--finetune to prevent attempting to load the rng state, exiting ...\n"
            "E0611 08:44:12.112 api.py:869] failed (exitcode: 1) local_rank: 0 (pid: 511) of binary: python3\n",
            "state-not-in-checkpoint",
            "--finetune",
        ),
        (
            "fatal: unable to access 'https://github.com/NVIDIA/Megatron-LM/': Failed to connect\n"
            + raised(
                "subprocess.CalledProcessError: Command '['git', 'clone', 'https://github.com/NVIDIA/"
                "Megatron-LM.git', '--branch', 'core_r0.13.0']' returned non-zero exit status 128."
            ),
            "repository-not-reached",
            "export MEGATRON_LM_PATH",
        ),
        (
            "> setting random seeds to 1234 ...\n> compiling and loading fused kernels ...\n",
            "fused-kernels-locked",
            "rm -rf MEGATRON/fused_kernels/build",
        ),
    ],
)
def test_last_words_of_a_program(log, code, cure):
    found = first(log)
    assert found.code == code
    assert cure in found.remedy.en


def test_compiled_kernels_are_no_hang():
    log = "> compiling and loading fused kernels ...\n>>> done with compiling and loading fused kernels.\n"
    assert diagnose_text("log", log) == []


@pytest.mark.parametrize(
    ("said", "line", "code", "cure"),
    [
        (
            "AssertionError",
            "assert self.lr_warmup_steps < self.lr_decay_steps",
            "warm-up-beyond-decay",
            "--lr-warmup-fraction",
        ),
        (
            "TypeError: '>=' not supported between instances of 'NoneType' and 'float'",
            "assert self.max_lr >= self.min_lr",
            "learning-rate-not-given",
            "--lr 1e-5",
        ),
        (
            "AssertionError",
            "assert config.data.train_batch_size >= config.actor_rollout_ref.actor.ppo_mini_batch_size",
            "rollout-mini-batch-larger",
            "data.train_batch_size=256",
        ),
        (
            "AssertionError",
            "assert args.vocab_file is not None",
            "tokenizer-files-not-given",
            "--vocab-file vocab.json",
        ),
    ],
)
def test_assertions_of_settings(said, line, code, cure):
    found = first(raised(said, line, "/megatron/core/optimizer_param_scheduler.py"))
    assert found.code == code
    assert cure in found.remedy.en


def test_argument_of_a_class_that_a_program_extends():
    said = "TypeError: GPTModel.__init__() got an unexpected keyword argument 'vp_stage'"
    found = first(raised(said, "model = GPTModel(", "/workspace/verl/verl/models/mcore/model_initializer.py"))
    assert found.code == "api-came-later"
    assert "megatron-core>=0.13.0" in found.remedy.en


def test_argument_of_another_transformer_engine():
    said = "TypeError: DotProductAttention.__init__() got an unexpected keyword argument 'softmax_type'"
    file = "/usr/lib/python3/dist-packages/megatron/core/extensions/transformer_engine.py"
    found = first(raised(said, "super().__init__(", file))
    assert found.code == "engine-of-other-release"
    assert "-U 'transformer-engine[pytorch]'" in found.remedy.en


def test_a_product_is_compared_as_a_whole():
    said = "AssertionError: prompts 32 * samples_per_prompt 8 is not a multiple of batch_size 512"
    assert "256 / 512 is not an integer" in first(raised(said)).rule.en
