"""What follows from the words of a failure that no entry knows: of linkers, compilers, resolvers, checks."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from reshard.doctor.finding import Finding
from reshard.doctor.logs import UNKNOWN, diagnose_text

SITE = "/home/user/venv/lib/python3.11/site-packages"


def first(*lines: str) -> Finding:
    return diagnose_text("log", "\n".join(lines))[0]


def raised(said: str, file: str = "/home/user/train.py", code: str = "f()") -> list[str]:
    return ["Traceback (most recent call last):", f'  File "{file}", line 3, in f', f"    {code}", said]


EXTENSIONS = {
    "vllm/_C.abi3.so: undefined symbol: _ZN3c104cuda9SetDeviceEi": ("vllm", "vllm torch"),
    "xformers/_C.so: undefined symbol: _ZN2at4_ops6narrow4callERKNS_6TensorElNS_6SymIntES5_": (
        "xformers",
        "xformers torch",
    ),
    "selective_scan_cuda.cpython-311-x86_64-linux-gnu.so: undefined symbol: _ZNK5torch8autograd4Node4nameEv": (
        "mamba-ssm",
        "--no-build-isolation",
    ),
    "causal_conv1d_cuda.cpython-311-x86_64-linux-gnu.so: undefined\nsymbol: _ZN3c1021throwNullDataPtrErrorEv": (
        "causal-conv1d",
        "--no-build-isolation",
    ),
}


@pytest.mark.parametrize("said", EXTENSIONS)
def test_an_extension_of_another_torch_names_its_package(said: str) -> None:
    package, cure = EXTENSIONS[said]
    found = first(*raised(f"ImportError: {SITE}/{said}"))
    assert found.id in ("extension-abi", "flash-attn-abi") and found.title.en.startswith(package)
    assert cure in found.cure.en


def test_a_symbol_of_cuda_is_not_of_torch() -> None:
    said = f"ImportError: {SITE}/nvidia/cusparse/lib/libcusparse.so.12: undefined symbol: __nvJitLinkAddData_12_1"
    assert first(*raised(said)).id == "cuda-libraries-mixed"
    assert first(*raised(f"ImportError: {SITE}/frob/_C.so: undefined symbol: frob_new")).id == UNKNOWN


MISSING = {
    "csrc/aio.h:18:10: fatal error: libaio.h: No such file or directory": ("header-missing", "libaio-dev"),
    "/x/common.cuh:9:10: fatal error: cusparse.h: No such file or directory": ("header-missing", "CUDA_HOME"),
    "FileNotFoundError: [Errno 2] No such file or directory: '/usr/local/cuda/bin/nvcc'": (
        "program-missing",
        "CUDA_HOME",
    ),
    "subprocess.CalledProcessError: Command '['which', 'c++']' returned non-zero exit status 1.": (
        "program-missing",
        "build-essential",
    ),
    "RuntimeError: Ninja is required to load C++ extensions (pip install ninja to get it)": (
        "program-missing",
        "install ninja",
    ),
    "run.sh: line 4: torchrun: command not found": ("program-missing", "torch.distributed.run"),
}


@pytest.mark.parametrize("said", MISSING)
def test_what_is_missing_is_named_with_what_brings_it(said: str) -> None:
    identifier, cure = MISSING[said]
    found = first(*raised(said)) if "Error: " in said and "fatal" not in said else first("building", said)
    assert found.id == identifier and cure in found.cure.en


def test_a_compiler_that_failed_is_told_with_its_own_words() -> None:
    """As triton raises it: the words of the compiler stand above the traceback."""
    code = "import subprocess, sys; subprocess.check_call(['gcc', 'nowhere.c', '-o', 'x'])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    found = diagnose_text("log", ran.stderr)[0]
    assert found.id == "command-failed" and found.title.en == "gcc failed"
    assert "nowhere.c: No such file or directory" in found.cause.en


def test_a_launcher_that_failed_is_no_compiler() -> None:
    code = "import subprocess, sys; subprocess.check_call([sys.executable, '-c', 'raise SystemExit(3)'])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert diagnose_text("log", ran.stderr)[0].id == "worker-traceback-missing"


# --------------------------------------------------------------------------------------------------- resolvers

PIP = """\
ERROR: Cannot install -r a.txt (line 3) and frob==1.0 because these package versions have conflicting dependencies.

The conflict is caused by:
    The user requested frob==1.0
    nicate 2.1 depends on frob>=1.5

ERROR: ResolutionImpossible: for help visit https://pip.pypa.io/en/latest/topics/dependency-resolution/
"""
UV = """\
  × No solution found when resolving dependencies:
  ╰─▶ Because nicate==2.1 depends on frob>=1.5 and you require frob==1.0, we can conclude that your
      requirements and nicate==2.1 are incompatible.
"""


@pytest.mark.parametrize("said", [PIP, UV], ids=["pip", "uv"])
def test_requirements_that_exclude_each_other_are_listed(said: str) -> None:
    found = diagnose_text("log", said)[0]
    assert found.id == "requirements-conflict" and "frob" in found.title.en
    assert "frob>=1.5" in found.cause.en and "you: frob==1.0" in found.cause.en
    assert "pip install -U nicate frob" in found.cure.en


def test_pip_itself_says_so(tmp_path: Path) -> None:
    """Two wheels that ask for other releases of a third."""
    for name, version, needs in [
        ("nicate", 1, "frob>=2"),
        ("wibble", 1, "frob<2"),
        ("frob", 1, ""),
        ("frob", 2, ""),
    ]:
        with zipfile.ZipFile(tmp_path / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            info = f"{name}-{version}.dist-info"
            requires = f"Requires-Dist: {needs}\n" if needs else ""
            wheel.writestr(
                f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}"
            )
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    install = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--find-links"]
    ran = subprocess.run(
        [*install, str(tmp_path), "nicate", "wibble"], capture_output=True, text=True, check=False
    )
    found = diagnose_text("log", ran.stdout + ran.stderr)[0]
    assert found.id == "requirements-conflict", ran.stdout + ran.stderr
    assert "frob>=2" in found.cause.en and "frob<2" in found.cause.en


def test_a_build_in_an_environment_of_its_own_lacks_torch() -> None:
    said = f"""\
Collecting flash-attn
  Using cached flash_attn-2.5.9.tar.gz (2.6 MB)
  error: subprocess-exited-with-error
  × python setup.py egg_info did not run successfully.
  │ exit code: 1
  ╰─> [6 lines of output]
      Traceback (most recent call last):
        File "<string>", line 2, in <module>
        File "{SITE}/setup.py", line 9, in <module>
          import torch
      ModuleNotFoundError: No module named 'torch'
      [end of output]
error: metadata-generation-failed
"""
    found = diagnose_text("log", said)[0]
    assert found.id == "build-isolation" and "--no-build-isolation flash-attn" in found.cure.en


# ----------------------------------------------------------------------------------------- checks, and whose fault


@pytest.mark.parametrize(
    "said",
    [
        "AssertionError: frob_size should be divisible by the number of frobs",
        "ValueError: --frob must be used together with --nicate",
        "RuntimeError: frobs are only supported with nicate",
        "ValueError: frob and nicate are mutually exclusive",
    ],
)
def test_a_check_states_its_own_cure(said: str) -> None:
    found = first(*raised(said, f"{SITE}/frob/a.py"))
    assert (found.id, found.certainty) == ("requirement-not-met", "likely")
    assert said.partition(": ")[2] in found.cure.en


def test_a_message_that_states_no_condition_stays_unknown() -> None:
    assert first(*raised("RuntimeError: the frob is gone", f"{SITE}/frob/a.py")).id == UNKNOWN


def test_a_package_that_lacks_what_it_asks_itself_for_is_named() -> None:
    said = "AttributeError: 'Qwen2VLConfig' object has no attribute 'frob_size'"
    found = first(*raised(said, f"{SITE}/transformers/models/qwen2_vl/modeling_qwen2_vl.py"))
    assert (found.id, found.certainty) == ("one-package", "possible") and "transformers" in found.cure.en
    assert first(*raised(said, f"{SITE}/vllm/a.py")).id == "object-attribute-missing"


def test_arguments_by_position_have_a_history_too() -> None:
    """`Trainer.log` takes `start_time` since transformers 4.47."""
    said = "TypeError: Trainer.log() takes 2 positional arguments but 3 were given"
    found = first(*raised(said, f"{SITE}/transformers/trainer.py"))
    assert found.id == "api-came-later" and "'transformers>=4.47.0'" in found.cure.en
    own = said.replace("Trainer.log", "MyTrainer.log")
    assert first(*raised(own, f"{SITE}/transformers/trainer.py")).id == "trainer-old-signature"


def test_a_bare_heading_is_no_failure() -> None:
    assert diagnose_text("log", "ERROR\n\nnothing to see\n") == []
