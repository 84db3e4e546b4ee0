"""Messages of programs that serve models, of CUDA and other devices, and of what is installed."""

from __future__ import annotations

import pytest

from tests.doctor.test_classes import first, raised

VLLM = "/home/user/venv/lib/python3.11/site-packages/vllm/v1/worker/gpu_worker.py"
ASSERTS = "RuntimeError: CUDA error: device-side assert triggered"
LOADER = "/home/user/venv/lib/python3.11/site-packages/vllm/model_executor/model_loader/utils.py"
SERVING = {
    raised(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 is full.", file=LOADER
    ): (
        "short-engine-weights-memory",
        "tensor_parallel_size=2",
    ),
    raised(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has 79.11 GiB.",
        file=VLLM,
    ): (
        "short-engine-memory",
        "gpu_memory_utilization=0.8",
    ),
    "[TM][ERROR] CUDA runtime error: out of memory /lmdeploy/src/turbomind/utils/memory_utils.cu:32": (
        "short-engine-memory",
        "--cache-max-entry-count",
    ),
    "ValueError: Free memory on device (3.93/23.64 GiB) on startup is less than desired GPU memory utilization"
    " (0.9, 21.28 GiB).": ("short-free-memory", "gpu_memory_utilization=0.12"),
    "openai.BadRequestError: This model's maximum context length is 4096 tokens. However, you requested 5221 tokens": (
        "short-request",
        "max_tokens",
    ),
    "RuntimeError: Not enough memory. Please try increasing --mem-fraction-static.": (
        "short-cache-memory",
        "nvidia-smi",
    ),
    "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}": (
        "engine-failed-above",
        "reshard doctor",
    ),
    "AttributeError: '_OpNamespace' '_C' object has no attribute 'rms_norm'": (
        "engine-extension-missing",
        "pip install -U --no-cache-dir vllm",
    ),
    "ImportError: cannot import name 'fused_marlin_moe' from 'sgl_kernel' (/opt/sglang/sgl_kernel/__init__.py)": (
        "engine-kernels-release",
        "sglang[all]",
    ),
    "ValueError: `max_num_batched_tokens` (2048) is smaller than `max_model_len` (4096).": (
        "engine-batched-tokens",
        "--max-num-batched-tokens 4096",
    ),
    "ValueError: The input size is not aligned with the quantized weight shape.": (
        "quantized-not-divisible",
        "tensor_parallel_size=1",
    ),
    "[TensorRT-LLM][ERROR] 6: The engine plan file is not compatible with this version of TensorRT, expecting"
    " library version 10.4.0.26 got 10.3.0.26, please rebuild.": ("engine-of-other-tensorrt", "trtllm-build"),
    "ERROR text_generation_launcher: Shard process was signaled to shutdown with signal 9 rank=0": (
        "shard-killed",
        "--shm-size",
    ),
    "Error: model requires more system memory (9.3 GiB) than is available (5.1 GiB)": (
        "model-needs-memory",
        "num_ctx",
    ),
    "Error: llama runner process has terminated: exit status 2": ("runner-ended", "journalctl"),
    "RuntimeError: CUDA error: operation not permitted when stream is capturing": (
        "cuda-graph-capture",
        "--enforce-eager",
    ),
}
REQUESTS = {
    '400 - "auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set': (
        "tools-not-enabled",
        "--tool-call-parser hermes",
    ),
    "openai.NotFoundError: Error code: 404 - {'message': 'The model `qwen2.5` does not exist.'}": (
        "model-not-served",
        "--served-model-name qwen2.5",
    ),
    "requests.exceptions.ConnectionError: HTTPConnectionPool(host='localhost', port=11434): Max retries exceeded with"
    " url: /api (Caused by NewConnectionError('[Errno 111] Connection refused'))": (
        "server-not-listening",
        "localhost:11434",
    ),
    "llama_model_load: error loading model: tensor 'blk.0.attn_k.weight' has wrong shape; expected  4096, 1024, got"
    "  4096, 2048": ("gguf-shape", "reshard inspect FOLDER"),
    'Error: unsupported architecture "Qwen3ForCausalLM"': ("gguf-architecture", "FROM ./model.gguf"),
    "ValueError: The quantization method fp8 is not supported for the current GPU. Minimum capability: 80. Current"
    " capability: 75.": ("quantization-not-on-gpu", "--quantization awq"),
    "ValueError: torch.bfloat16 is not supported for quantization method awq. Supported dtypes: [torch.float16]": (
        "quantization-dtype",
        "--dtype half",
    ),
    "ValueError: Quantization method specified in the model config (fp8) does not match the quantization method"
    " specified in the `quantization` argument (awq).": ("quantization-differs", "`--quantization`"),
    "ValueError: Unknown quantization method: bitsandbytes. Must be one of ['awq', 'gptq'].": (
        "quantization-not-known",
        "pip install -U vllm",
    ),
    "RuntimeError: SGLang only supports sm75 and above.": ("engine-gpu-too-old", "--dtype half"),
    "ValueError: invalid literal for int() with base 10: 'MIG-9f4a1b3c-1b0d'": (
        "devices-by-name",
        "CUDA_VISIBLE_DEVICES=0",
    ),
}
DEVICES = {
    "RuntimeError: cutlassF: no kernel found to launch!": ("attention-no-kernel", "enable_math_sdp(True)"),
    "KeyError: 'getpwuid(): uid not found: 1001'": ("user-without-name", "-e USER=me"),
    "RuntimeError: asyncio.run() cannot be called from a running event loop": (
        "loop-running",
        "nest_asyncio",
    ),
    "io.UnsupportedOperation: fileno": ("output-without-file", "sys.stdout.fileno = lambda: 1"),
    "UserWarning: CUDA initialization: Unexpected error from cudaGetDeviceCount(). Error 804: forward compatibility"
    " was attempted on non supported HW\nRuntimeError: Failed to infer device type": (
        "driver-of-two-releases",
        "cuda/compat",
    ),
    "ptxas fatal   : Value 'sm_120' is not defined for option 'gpu-name'\ntorch._inductor.exc.InductorError:"
    " PTXASError: PTXAS error: Internal Triton PTX codegen error": ("architecture-unknown", "cu128"),
    "RuntimeError: Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist": (
        "program-missing",
        "conda install -c nvidia cuda-nvcc",
    ),
    "RuntimeError: probability tensor contains either `inf`, `nan` or element < 0": (
        "sampling-not-finite",
        "torch.bfloat16",
    ),
    f"Loss.cu:250: Assertion `t >= 0 && t < n_classes` failed.\n{ASSERTS}": (
        "label-asserted",
        "num_labels=N",
    ),
    f"IndexKernel.cu:93: Assertion `-sizes[i] <= index && index < sizes[i]` failed.\n{ASSERTS}": (
        "index-asserted",
        "CUDA_LAUNCH_BLOCKING=1",
    ),
    f"Indexing.cu:1290: Assertion `srcIndex < srcSelectDimSize` failed.\n{ASSERTS}": (
        "vocab-index",
        "resize_token_embeddings",
    ),
    "RuntimeError: CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasGemmEx(handle)`": (
        "cublas-refuses",
        "env -u LD_LIBRARY_PATH",
    ),
    "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED": ("cudnn-refuses", "--force-reinstall torch"),
    "RuntimeError: The NVIDIA driver on your system is too old (found version 11040).": (
        "driver-too-old",
        "cu118",
    ),
    "RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment": (
        "driver-not-loaded",
        "nvidia_uvm",
    ),
    "RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable": (
        "gpu-busy",
        "Compute Mode",
    ),
    "RuntimeError: Cannot re-initialize CUDA in forked subprocess.": (
        "cuda-after-fork",
        "VLLM_WORKER_MULTIPROC_METHOD=spawn",
    ),
    "RuntimeError: Placeholder storage has not been allocated on MPS device!": (
        "mps-elsewhere",
        ".to(device)",
    ),
    "NotImplementedError: The operator 'aten::x' is not currently implemented for the MPS device. WARNING: slower": (
        "mps-lacks",
        "PYTORCH_ENABLE_MPS_FALLBACK=1",
    ),
    "RuntimeError: MPS backend out of memory (MPS allocated: 17.02 GB, max allowed: 18.13 GB).": (
        "short-mps-memory",
        "PYTORCH_MPS_HIGH_WATERMARK_RATIO",
    ),
    "RuntimeError: call aclnnCast failed, detail:EZ9999: Inner Error!\nOp Cast does not has any binary.": (
        "ascend-no-binary",
        "Ascend-cann-kernels",
    ),
    "RuntimeError: The Inner error is reported as above, and the current working operator name is aclnnMatmul.": (
        "ascend-operator",
        "ASCEND_LAUNCH_BLOCKING=1",
    ),
    "torch._inductor.exc.TritonMissing: Cannot find a working triton installation.": (
        "triton-not-there",
        "triton-windows",
    ),
    "torch._dynamo.exc.Unsupported: Data-dependent branching": ("dynamo-cannot-trace", "fullgraph=False"),
    "Loading checkpoint shards:  33% 1/3 [00:41<01:23, 41.74s/it]^C": (
        "short-notebook-memory",
        'device_map={"": 0}',
    ),
}
INSTALLED = {
    "ImportError: cannot import name '_center' from 'numpy._core.umath' (/usr/numpy/_core/umath.py)": (
        "numpy-half-changed",
        "pip install --force-reinstall --no-cache-dir numpy",
    ),
    "TypeError: Client.__init__() got an unexpected keyword argument 'proxies'\nopenai 1.40.0": (
        "httpx-newer",
        "httpx<0.28",
    ),
    "pip._vendor.urllib3.exceptions.ReadTimeoutError: HTTPSConnectionPool(host='files.pythonhosted.org'): Read": (
        "pip-times-out",
        "--default-timeout=300",
    ),
    "ERROR: pip's dependency resolver does not currently take into account all the packages that are installed. This"
    " behaviour is the source of the following dependency conflicts.\nvllm 0.6.3 requires torch==2.4.0, but you have"
    " torch 2.5.1 which is incompatible.": ("pip-left-conflict", "pip install 'torch==2.4.0'"),
    "TypeError: Descriptors cannot not be created directly.": ("protobuf-newer", "protobuf==3.20.3"),
    "pydantic.errors.PydanticImportError: `BaseSettings` has been moved to the `pydantic-settings` package.": (
        "pydantic-newer",
        "pydantic<2",
    ),
    "AttributeError: module 'pkgutil' has no attribute 'ImpImporter'. Did you mean: 'zipimporter'?": (
        "setuptools-older",
        "ensurepip",
    ),
    "ImportError: cannot import name 'packaging' from 'pkg_resources' (/usr/lib/pkg_resources/__init__.py)": (
        "setuptools-newer",
        "setuptools<70",
    ),
    "OMP: Error #15: Initializing libiomp5md.dll, but found libiomp5md.dll already initialized.": (
        "openmp-twice",
        "KMP_DUPLICATE_LIB_OK=TRUE",
    ),
    "CondaToSNonInteractiveError: Terms of Service have not been accepted": (
        "conda-terms",
        "conda tos accept",
    ),
    "error: Failed to build `flash-attn==2.7.4`\n  The build backend returned an error\n"
    "      ModuleNotFoundError: No module named 'torch'": (
        "build-isolation",
        "--no-build-isolation flash-attn",
    ),
    raised(
        "AttributeError: partially initialized module 'torch' has no attribute 'cuda'",
        file="/home/user/torch.py",
    ): ("folder-for-package", "Rename it"),
}


@pytest.mark.parametrize(
    "said, expected", [*(SERVING | REQUESTS | DEVICES | INSTALLED).items()], ids=lambda each: each[0][:40]
)
def test_messages(said: str, expected: tuple[str, str]) -> None:
    finding = first(said)
    assert finding.code == expected[0]
    assert expected[1] in finding.remedy.en and expected[1] in finding.remedy.zh.replace("改名", "Rename it")
    assert "{" not in finding.message.en


def test_name_of_own_file() -> None:
    text = raised("AttributeError: partially initialized module 'torch' has no attribute 'cuda'")
    own = first(text.replace("train.py", "torch.py"))
    assert own.code == "folder-for-package" and "/home/user/torch.py" in own.rule.en
    assert first(text).code != own.code
