"""What drivers, libraries, compilers, installers and platforms report, and what notebooks keep in memory."""

from __future__ import annotations

import re

import pytest

from reshard.diagnosis.logs import diagnose_text
from reshard.diagnosis.meanings import defaults, messages
from reshard.diagnosis.rules import rules
from tests.doctor.test_classes import SITE, first, raised

NO_FILE = "cannot open shared object file: No such file or directory"
REPORTS = {
    f"ImportError: libGL.so.1: {NO_FILE}": ("library-missing", "apt install libgl1"),
    f"ImportError: libcuda.so.1: {NO_FILE}": ("library-of-driver", "--gpus all"),
    f"ImportError: libamdhip64.so.6: {NO_FILE}": ("library-of-rocm", "/opt/rocm"),
    f"ImportError: libhccl.so: {NO_FILE}": ("library-of-ascend", "set_env.sh"),
    f"OSError: libfrob.so.3: {NO_FILE}": ("library-not-found", "find / -name 'libfrob.so*'"),
    raised(f"OSError: libcublas.so.12: {NO_FILE}", file=f"{SITE}/torch/__init__.py").replace(
        "in f", "in <module>"
    ): (
        "library-of-torch-itself",
        "--force-reinstall",
    ),
    raised(f"ImportError: libtorch_cuda_cu.so: {NO_FILE}", file=f"{SITE}/vllm/utils.py"): (
        "library-of-torch",
        "-U --force-reinstall vllm torch",
    ),
    f"ImportError: libcudart.so.11.0: {NO_FILE}": ("cuda-library-missing", "torch.version.cuda"),
    "CUDA SETUP: Required library version not found: libbitsandbytes_cuda124.so": (
        "bitsandbytes-cuda-setup",
        "-U bitsandbytes",
    ),
    "nvcc fatal   : Unsupported gpu architecture 'compute_120'": (
        "architecture-unknown",
        "cuda-toolkit>=12.8",
    ),
    "nvcc fatal   : Unsupported gpu architecture 'compute_35'": ("architecture-dropped", "CUDA 11.8"),
    "ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'": ("architecture-unknown", "cu128"),
    "ValueError: Unknown CUDA arch (12.0) or GPU not supported": ("architecture-unknown", "without 12.0"),
    "GPU = NVIDIA GeForce RTX 5090\npython: /a/AccelerateMatmul.cpp:42: int getMMAVersionSafe(int): Assertion `": (
        "architecture-unknown",
        "triton",
    ),
    "RuntimeError: HIP error: invalid device function": ("hip-no-kernel", "HSA_OVERRIDE_GFX_VERSION"),
    raised(
        "RuntimeError: Decode failed with error no kernel image is available for execution on the device",
        file=f"{SITE}/flashinfer/decode.py",
    ): ("kernel-image-of-package", "TORCH_CUDA_ARCH_LIST"),
    "RuntimeError: CUDA error: the provided PTX was compiled with an unsupported toolchain.": (
        "driver-too-old",
        "cu121",
    ),
    "RuntimeError: operator torchvision::nms does not exist": ("vision-built-for", "torchvision"),
    "nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.4, please update": (
        "image-needs-driver",
        "DISABLE_REQUIRE",
    ),
    "error: #error -- unsupported GNU version! gcc versions later than 11 are not supported!": (
        "compiler-too-new",
        "gcc-11",
    ),
    "#error You need C++17 to compile PyTorch\nninja: build stopped: subcommand failed.": (
        "compiler-too-old",
        "g++-11",
    ),
    "ERROR: Could not find a version that satisfies the requirement torch==2.1.0 (from versions: 2.6.0, 2.7.0)": (
        "version-not-offered",
        "python=3.10",
    ),
    "ERROR: Could not find a version that satisfies the requirement vllm>=0.9 (from versions: 0.1.0, 0.6.1)": (
        "version-not-offered",
        "index versions vllm",
    ),
    "ERROR: flash_attn-2.6.3+cu123torch2.3cxx11abiFALSE-cp310-cp310-linux_x86_64.whl is not a supported wheel on this"
    " platform.": ("wheel-refused", "python -VV"),
    "ERROR: Failed building wheel for flash-attn": ("build-failed", "MAX_JOBS=4"),
    "C:\\Users\\a>python train.py\nModuleNotFoundError: No module named 'triton'": (
        "platform-without",
        "triton-windows",
    ),
    "ModuleNotFoundError: No module named 'fcntl'": ("platform-unix-only", "wsl --install"),
    'OSError: [WinError 126] Error loading "C:\\torch\\lib\\fbgemm.dll" or one of its dependencies.': (
        "windows-library",
        "VCRedist",
    ),
    "llama_model_load: error loading model: unknown model architecture: 'frob3'": (
        "gguf-architecture",
        "git -C llama",
    ),
    "NotImplementedError: BPE pre-tokenizer was not recognized": ("gguf-tokenizer", "cp BASE/tokenizer*"),
    "ValueError: Tokenizer class LLaMATokenizer does not exist or is not currently imported.": (
        "tokenizer-class-unknown",
        '"LlamaTokenizer"',
    ),
    "ValueError: Tokenizer class FrobTokenizer does not exist or is not currently imported.": (
        "tokenizer-class-unknown",
        "trust_remote_code",
    ),
    "AttributeError: module 'numpy' has no attribute 'object'": ("numpy-alias", "numpy<1.24"),
    "FileNotFoundError: File not found: out/tokenizer.model": ("file-of-model", "ls -la out "),
    "Error: b'INFO:hf-to-gguf:Loading\\nTraceback (most recent call last):\\n"
    ' File "/a/convert.py", line 3, in'
    " main\\n    x()\\nFileNotFoundError: [Errno 2] No such file or directory: \\'out/config.json\\'\\n'": (
        "file-of-model",
        "--merge --base BASE",
    ),
    "NPU上报错AssertionError: Torch not compiled with CUDA enabled": ("cuda-on-npu", "torch_npu"),
}


@pytest.mark.parametrize("said", REPORTS)
def test_reports(said: str) -> None:
    code, cure = REPORTS[said]
    found = first(said)
    assert found.code == code and cure in found.remedy.en
    assert found.certainty != "sure" or code == "bitsandbytes-cuda-setup"


def test_what_was_not_loaded_explains_a_later_failure_of_the_same_package() -> None:
    report = (
        "WARNING[XFORMERS]: xFormers can't load C++/CUDA extensions. xFormers was built for:\n"
        "    PyTorch 2.1.0+cu121 with CUDA 1201 (you have 2.2.0+cu118)\n"
    )
    failed = "NotImplementedError: No operator found for `memory_efficient_attention_forward` with inputs:"
    found = first(report + raised(failed))
    assert found.code == "extension-built-for" and "whl/cu118" in found.remedy.en
    assert first(report + raised("ValueError: frob")).code != "extension-built-for"


def test_the_reason_before_an_abort_comes_first() -> None:
    report = (
        "Could not load library libcudnn_ops.so.9. Error: libcudnn_ops.so.9: cannot open shared object file\n"
    )
    assert first(f"{report}Aborted (core dumped)").code == "library-of-cuda"
    assert first("Aborted (core dumped)").code == "killed-abort"


def test_libraries_that_a_working_program_misses_are_no_failure() -> None:
    line = f"W dso_loader.cc:64] Could not load dynamic library 'libnvinfer.so.7'; dlerror: libnvinfer.so.7: {NO_FILE}"
    assert diagnose_text("log", f"{line}\n{{'loss': 1.2, 'epoch': 0.1}}") == []
    report = "'sm_120' is not a recognized processor for this target (ignoring processor)"
    assert first(report).code == "architecture-unknown"
    assert diagnose_text("log", f"{report}\n{{'loss': 1.2, 'epoch': 0.1}}") == []


def test_a_symptom_gives_way_to_the_library_that_explains_it() -> None:
    found = first(
        "AttributeError: 'DeepSpeedCPUAdam' object has no attribute 'ds_opt_adam'\n"
        "ImportError: /opt/conda/lib/libstdc++.so.6: version `GLIBCXX_3.4.29' not found (required by cpu_adam.so)"
    )
    assert found.code == "glibc-too-old" and "deepspeed-cpu-adam-unbuilt" in found.also


CELL = f"""----> 1 from frob import Widget

7 frames
[{SITE}/frob/font.py](https://localhost:8080/#) in <module>
---> 37 from ._util import is_path
"""


def test_a_package_that_does_not_fit_itself_is_old_in_a_notebooks_memory() -> None:
    said = f"ImportError: cannot import name 'is_path' from 'frob._util' ({SITE}/frob/_util.py)"
    begin = "ImportError                               Traceback (most recent call last)\n"
    found = first(f"{begin}[<ipython-input-2-51>](https://localhost:8080/#) in <module>\n{CELL}\n{said}")
    assert found.code == "stale-in-memory" and "Restart the runtime" in found.remedy.en
    assert first(raised(said, file=f"{SITE}/frob/font.py")).code != "stale-in-memory"


def test_a_notebook_is_restarted_after_installing() -> None:
    said = "ImportError: Using the `Trainer` with `PyTorch` requires `accelerate>=0.20.1`: Please run `pip install`"
    note = "To view examples of installing some common dependencies, click the"
    assert "restart the runtime" in first(f"{said}\n-----\n{note}").remedy.en
    assert "restart the runtime" not in first(said).remedy.en


def test_a_module_is_installed_under_its_packages_name() -> None:
    assert (
        "pip install opencv-python-headless" in first("ModuleNotFoundError: No module named 'cv2'").remedy.en
    )
    assert (
        "--no-build-isolation flash-attn"
        in first("ModuleNotFoundError: No module named 'flash_attn'").remedy.en
    )
    assert "pip install frob" in first("ModuleNotFoundError: No module named 'frob'").remedy.en


def test_names_that_a_package_lacks_because_an_optional_one_was_not_imported() -> None:
    lacking = {
        "index_first_axis": "--no-build-isolation flash-attn",
        "TELinear": "transformer-engine[pytorch]",
        "bnb": "-U bitsandbytes",
    }
    for name, command in lacking.items():
        said = f"NameError: name '{name}' is not defined"
        found = first(raised(said, file=f"{SITE}/frob/model.py"))
        assert found.code == "name-of-optional" and command in found.remedy.en
    assert first(raised("NameError: name 'bnb' is not defined")).code == "name-undefined"


def test_a_torch_that_was_found_too_old_explains_what_is_missing_later() -> None:
    report = "Disabling PyTorch because PyTorch >= 2.4 is required but found 2.3.1\n"
    found = first(report + raised("NameError: name 'nn' is not defined", file=f"{SITE}/frob/model.py"))
    assert found.code == "torch-not-used" and "torch>=2.4" in found.remedy.en
    assert first(report + raised("ValueError: frob")).code != "torch-not-used"


@pytest.mark.parametrize(
    ("reason", "cure"),
    [
        ("device=cpu (supported: {'cuda'})", 'model.to("cuda")'),
        ("xFormers wasn't build with CUDA support", "xformers.info"),
        ("dtype=torch.float32 (supported: {torch.bfloat16})", "16 bits"),
    ],
)
def test_what_the_kernels_of_xformers_have_in_common(reason: str, cure: str) -> None:
    said = "NotImplementedError: No operator found for `memory_efficient_attention_forward` with inputs:\n"
    found = first(
        f"{said}     query       : shape=(1, 1024, 8, 64)\n`flshattF` is not supported because:\n    {reason}"
    )
    assert found.code == "operator-of-xformers" and cure in found.remedy.en


def test_every_message_is_of_a_rule_whose_braces_it_fills() -> None:
    for name, patterns in messages():
        texts = "".join(rules()[name][key]["en"] for key in ("title", "cause", "cure"))
        braces = set(re.findall(r"(?<!\{)\{(\w+)\}(?!\})", texts))
        filled = {"where"} | set(defaults(name))
        assert all(braces <= pattern.groupindex.keys() | filled for pattern in patterns), name
