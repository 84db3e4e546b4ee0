"""Findings computed from failures that no entry knows: of linkers, resolvers, releases."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from reshard.runs.checks.finding import UNKNOWN_FAILURE, Finding
from reshard.runs.doctor.log_diagnosis import diagnose_text

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
    assert found.code in ("extension-abi", "flash-attn-abi") and found.message.en.startswith(package)
    assert cure in found.remedy.en


def test_a_symbol_of_cuda_is_not_of_torch() -> None:
    said = f"ImportError: {SITE}/nvidia/cusparse/lib/libcusparse.so.12: undefined symbol: __nvJitLinkAddData_12_1"
    assert first(*raised(said)).code == "cuda-libraries-mixed"
    assert (
        first(*raised(f"ImportError: {SITE}/frob/_C.so: undefined symbol: frob_new")).code == UNKNOWN_FAILURE
    )


def test_a_launcher_that_failed_is_no_compiler() -> None:
    code = "import subprocess, sys; subprocess.check_call([sys.executable, '-c', 'raise SystemExit(3)'])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert diagnose_text("log", ran.stderr)[0].code == "worker-traceback-missing"


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
    assert found.code == "requirements-conflict" and "frob" in found.message.en
    assert "frob>=1.5" in found.rule.en and "you: frob==1.0" in found.rule.en
    assert "pip install -U nicate frob" in found.remedy.en


def test_pip_itself_says_so(tmp_path: Path) -> None:
    """Two wheels that need different releases of a third."""
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
    assert found.code == "requirements-conflict", ran.stdout + ran.stderr
    assert "frob>=2" in found.rule.en and "frob<2" in found.rule.en


# ----------------------------------------------------------------------------------- releases, and whose fault


def test_a_message_that_states_no_condition_stays_unknown() -> None:
    assert first(*raised("RuntimeError: the frob is gone", f"{SITE}/frob/a.py")).code == UNKNOWN_FAILURE


def test_a_package_that_lacks_what_it_asks_itself_for_is_named() -> None:
    said = "AttributeError: 'Qwen2VLConfig' object has no attribute 'frob_size'"
    found = first(*raised(said, f"{SITE}/transformers/models/qwen2_vl/modeling_qwen2_vl.py"))
    assert (found.code, found.certainty) == ("one-package", "possible") and "transformers" in found.remedy.en


def test_arguments_by_position_have_a_history_too() -> None:
    """`Trainer.log` passes `start_time` since transformers 4.47, and TRL's trainers accept it since 0.13."""
    said = "TypeError: DPOTrainer.log() takes 2 positional arguments but 3 were given"
    found = first(*raised(said, f"{SITE}/transformers/trainer.py"))
    assert found.code == "api-came-later" and "'trl>=0.13.0'" in found.remedy.en
    own = said.replace("DPOTrainer.log", "MyTrainer.log")
    assert first(*raised(own, f"{SITE}/transformers/trainer.py")).code == UNKNOWN_FAILURE
    override = said.replace("DPOTrainer.log", "Trainer.log")  # of a subclass with the name of its base
    assert first(*raised(override, f"{SITE}/transformers/trainer.py")).code == UNKNOWN_FAILURE


def test_the_oldest_release_that_was_read_need_not_be_the_first_with_a_name() -> None:
    said = "ImportError: cannot import name 'ShardingStrategy' from 'torch.distributed.fsdp'"
    found = diagnose_text("log", ["torch version: 1.11.0", *raised(said)])[0]
    assert found.code == "api-came-later" and "torch 2.0.0 (or before it)" in found.message.en


def test_the_history_knows_names_that_the_log_gives_no_package_for() -> None:
    said = "AttributeError: 'SFTConfig' object has no attribute 'padding_free'"
    found = first(*raised(said, code="args.padding_free"))
    assert found.code == "api-came-later" and "'trl>=" in found.remedy.en
    assert found.certainty == "possible", "another class may have this name"


def test_a_name_that_was_dropped_and_put_back() -> None:
    said = "ImportError: cannot import name 'is_torch_greater_or_equal_than_1_13' from 'transformers.pytorch_utils'"
    found = first("transformers 4.48.0", *raised(f"{said} ({SITE}/transformers/pytorch_utils.py)"))
    assert found.code == "api-returned" and "transformers==4.47.1" in found.remedy.en


def test_a_name_that_no_release_has_is_said_to_be_none() -> None:
    said = f"ImportError: cannot import name 'SFTTrainr' from 'trl' ({SITE}/trl/__init__.py)"
    found = first(*raised(said))
    assert (found.code, found.certainty) == ("gone-before", "possible") and "SFTTrainer" in found.remedy.en


def test_a_name_of_another_package_is_found_there() -> None:
    found = first(
        *raised(f"ImportError: cannot import name 'LoraConfig' from 'trl' ({SITE}/trl/__init__.py)")
    )
    assert found.code == "gone-before" and "from peft import LoraConfig" in found.remedy.en


def test_a_folder_that_stands_for_a_package() -> None:
    found = first(*raised("ImportError: cannot import name 'LoraConfig' from 'peft' (unknown location)"))
    assert found.code == "folder-for-package" and "checkout of peft" in found.rule.en


def test_a_model_type_of_no_transformers_is_not_said_to_be_too_new() -> None:
    said = "The checkpoint you are trying to load has model type `frobnet` but Transformers does not recognize this"
    found = first(
        *raised(f"ValueError: {said} architecture. This could be because", f"{SITE}/transformers/a.py")
    )
    assert found.code == "model-type-of-none" and "trust_remote_code" in found.remedy.en
    known = first(*raised("KeyError: 'qwen3'", f"{SITE}/transformers/models/auto/configuration_auto.py"))
    assert known.code == "api-came-later" and "'transformers>=4.51.0'" in known.remedy.en


REQUIRED = {
    "ImportError: Please install frob>=0.43.1 via `pip install frob>=0.43.1`": "'frob>=0.43.1'",
    "ValueError: nicating requires frob>=0.37.0 - please upgrade": "'frob>=0.37.0'",
    "pkg_resources.DistributionNotFound: The 'frob<2,>=1.5' distribution was not found and is required by nicate": (
        "'frob<2,>=1.5'"
    ),
    "pkg_resources.ContextualVersionConflict: (frob 3.0 (/x), Requirement.parse('frob<2'), {'nicate'})": "'frob<2'",
}


@pytest.mark.parametrize("said", REQUIRED)
def test_a_release_that_is_required_is_what_pip_installs(said: str) -> None:
    found = first(*raised(said, f"{SITE}/nicate/a.py"))
    assert found.code == "version-required" and f"pip install {REQUIRED[said]}" in found.remedy.en
    assert ("nicate requires" in found.message.en) == ("nicate" in said and "pkg_resources" in said)


@pytest.mark.parametrize(
    "said",
    [
        "frob() got an unexpected keyword argument 'nicate'",
        "'Frob' object has no attribute 'nicate'",
        "No module named 'frob'",
        "vllm/frob_ops.cpython-310-x86_64-linux-gnu.so: undefined symbol: _ZN3c106detail5frobEv",
    ],
)
def test_what_python_says_counts_without_the_name_of_its_exception(said: str) -> None:
    assert first("After the update I only get this:", said, "", "How can I go on?").severity == "error"


def test_an_assertion_without_its_exception_is_taken_by_its_source() -> None:
    lines = raised("", f"{SITE}/frob/a.py", "assert len(frobs) == 1")[1:3]
    found = first(*lines)
    assert found.code == UNKNOWN_FAILURE and "assert len(frobs) == 1" in found.rule.en


def test_a_bare_heading_is_no_failure() -> None:
    assert diagnose_text("log", "ERROR\n\nnothing to see\n") == []


def test_a_decorator_is_not_the_caller() -> None:
    site = "/home/user/venv/lib/python3.11/site-packages/transformers/utils/deprecation.py"
    said = "TypeError: TrainingArguments.__init__() got an unexpected keyword argument 'evaluation_strategy'"
    below = raised(said, site, "return fn(self, **kwargs)")[1:]
    found = first(*raised("")[:-1], *below)
    assert found.code == "api-is-gone" and "transformers<4.51.0" in found.remedy.en


def test_a_name_that_a_patch_release_removed_is_bound_by_the_last_that_has_it() -> None:
    found = first(*raised("ModuleNotFoundError: No module named 'vllm.worker'"))
    assert "'vllm<=0.11.0'" in found.remedy.en


def test_what_pip_cannot_find_is_not_what_it_is_to_install() -> None:
    said = "Could not find a version that satisfies the requirement vllm>=0.9 (from versions: 0.1.0, 0.6.1)"
    assert first(f"ERROR: {said}").code != "version-required"


def test_a_library_of_transformers_is_installed_with_what_it_needs() -> None:
    said = "LlamaTokenizer requires the SentencePiece library but it was not found in your environment."
    found = first(*raised(f"ImportError: {said} Check out the instructions.", f"{SITE}/transformers/a.py"))
    assert found.code == "packages-to-install" and "install -U sentencepiece protobuf" in found.remedy.en
