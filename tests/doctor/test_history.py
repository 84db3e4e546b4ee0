"""The history of releases: made from archives, looked up in logs, scripts and configs, never the wrong way round."""

from __future__ import annotations

import importlib.metadata
import inspect
import io
import json
import lzma
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import reshard
from reshard.runs.checks.finding import Finding
from reshard.runs.checks.history import api_table as tables
from reshard.runs.checks.history.api_table import PACKAGE_ROOTS, ApiTable, Presence, table
from reshard.runs.checks.history.bloom_filters import packages_with
from reshard.runs.checks.history.call_parameters import base_of, refused
from reshard.runs.checks.history.versions_in_use import Versions
from reshard.runs.doctor.log_diagnosis import diagnose_text
from tests.serving import serving
from tools.api_history.having import names_of
from tools.api_history.kept import kept

LOGS = Path(__file__).with_name("history")


def first(*targets: Path) -> Finding:
    found = reshard.doctor(*targets)
    assert found, "no finding"
    return found[0]


# ------------------------------------------------------------------------------------------------ logs

SAID = {
    "trl-name-later": ("api-came-later", "'trl>=0.14.0'", "trl 0.9.6"),
    "trl-name-gone": ("api-between", "'trl>=0.11.0,<0.13.0'", "trl 0.24.0"),
    "trl-keyword-later": ("api-came-later", "'trl>=0.16.0'", "trl 0.9.6"),
    "trl-keyword-gone": ("api-is-gone", "'trl<0.20.0'", "trl 0.24.0"),
    "trl-inherited-keyword-gone": ("api-is-gone", "'transformers<4.51.0'", "transformers 4.51.3"),
    "accelerate-keyword-later": ("api-came-later", "'accelerate>=0.28.0'", "accelerate 0.27.2"),
    "accelerate-keyword-gone": ("api-is-gone", "'accelerate<1.0.0'", "accelerate 1.4.0"),
    "accelerate-attribute-later": ("api-came-later", "'accelerate>=1.10.0'", "accelerate 0.27.2"),
    "hub-name-gone": ("api-is-gone", "'huggingface-hub<0.26.0'", "huggingface_hub 0.30.2"),
    "peft-of-another-transformers": ("api-between", "'peft>=0.18.0'", "transformers 5.23.0"),
    "transformers-module-later": ("api-came-later", "'transformers>=4.51.0'", "transformers 4.40.2"),
    "transformers-model-type": ("api-came-later", "'transformers>=4.51.0'", "transformers 4.40.2"),
    "transformers-method-gone": ("hf-remote-code-too-old", "'transformers<4.54.0'", "transformers 5.23.0"),
}
"""By log: the finding, the package for pip to install, and the version that made the log (`history/record.py`)."""


UNSURE = ("peft-of-another-transformers",)
"""Logs that need the version: transformers 5 may have more names than its files show."""


@pytest.mark.parametrize("case", [case for case in SAID if case not in UNSURE])
def test_a_genuine_log_gets_direction_and_bound(case: str) -> None:
    identifier, pin, _ = SAID[case]
    found = first(LOGS / f"{case}.log")
    assert found.code == identifier
    assert pin in found.remedy.en
    assert pin in found.remedy.zh


@pytest.mark.parametrize("case", SAID)
def test_a_version_in_the_log_makes_it_sure(case: str, tmp_path: Path) -> None:
    _, pin, version = SAID[case]
    log = tmp_path / "run.log"
    log.write_text(f"{version}\n" + (LOGS / f"{case}.log").read_text())
    found = first(log)
    assert found.certainty == "sure"
    assert pin.split(",")[-1].strip("'") in found.remedy.en


@pytest.mark.parametrize("case", [case for case in SAID if case not in UNSURE])
def test_a_version_that_has_it_silences_the_history(case: str, tmp_path: Path) -> None:
    """The log contradicts the table, so the module is not the one it seems to be."""
    package = SAID[case][2].split()[0]
    lines = [line for line in first(LOGS / f"{case}.log").remedy.en.splitlines() if "pip install" in line]
    pins = [line.split("'")[1] for line in lines if f"'{package.replace('_', '-')}" in line]
    specifier = SpecifierSet(pins[0][len(package) :])
    known = table(package.replace("_", "-"))
    assert known is not None
    inside = [each for each in known.versions if each in specifier]
    log = tmp_path / "run.log"
    log.write_text(f"{package} {inside[-1]}\n" + (LOGS / f"{case}.log").read_text())
    assert not any("compared with the sources of" in each.en for each in first(log).evidence)


def test_what_a_log_misses_is_gone_even_if_newer_files_may_hide_it(tmp_path: Path) -> None:
    """transformers 5 provides names that its files do not show, but not one that an import did not find."""
    said = "ImportError: cannot import name 'AdamW' from 'transformers' "
    said += "(/home/user/venv/lib/python3.11/site-packages/transformers/__init__.py)\n"
    log = tmp_path / "run.log"
    for told in (said, f"transformers 5.23.0\n{said}"):
        log.write_text(told)
        assert "'transformers<4.50.0'" in first(log).remedy.en


def test_a_name_that_came_and_went_is_pinned_on_both_sides(tmp_path: Path) -> None:
    """A release without it is likely newer than those that have it, but may be older."""
    log = tmp_path / "run.log"
    log.write_text("TypeError: DPOTrainer.__init__() got an unexpected keyword argument 'loss_type'\n")
    found = first(log)
    assert found.code == "api-is-gone" and "those older than 0.7" in found.rule.en
    assert re.search(r"'trl>=0\.7[.\d]*,<0\.13\.0'", found.remedy.en)


@pytest.mark.parametrize("version", ["", "vllm 0.9.2\n", "vllm 0.11.2\n"])
def test_an_attribute_of_a_class_that_another_replaced_is_not_said_to_come_later(version: str) -> None:
    """V1 of vLLM has an `LLMEngine` of its own, beside that of V0 until 0.10.2."""
    said = "AttributeError: 'LLMEngine' object has no attribute 'model_executor'"
    found = diagnose_text("run.log", f"{version}{said}\n")[0]
    assert found.code == "class-replaced" and "vllm.v1.engine.llm_engine" in found.rule.en
    assert "0.10.2" in found.rule.zh and "'vllm<0.6.6.post1'" in found.remedy.en


def test_an_attribute_that_a_class_got_before_it_was_replaced_came_later() -> None:
    said = "AttributeError: 'LLMEngine' object has no attribute 'model_executor'"
    found = diagnose_text("run.log", f"vllm 0.3.0\n{said}\n")[0]
    assert found.code == "api-came-later" and "'vllm>=0.4.0'" in found.remedy.en


OF_BASES = {
    "AttributeError: 'SFTConfig' object has no attribute 'evaluation_strategy'": "'transformers<4.51.0'",
    "AttributeError: 'RewardTrainer' object has no attribute 'tokenizer'": "'transformers<5.0.0'",
    "AttributeError: 'MyOwnTrainer' object has no attribute 'current_gradient_accumulation_steps'": (
        "'transformers>=4.55.0'"
    ),
    "AttributeError: 'PeftModelForCausalLM' object has no attribute 'merge_and_unload'": "'peft>=0.3.0'",
}
"""Attributes that a class has from a base in another package, or finds in the model that it wraps."""


@pytest.mark.parametrize("said", OF_BASES)
def test_an_attribute_of_a_base_has_the_history_of_the_base(said: str) -> None:
    (found,) = diagnose_text("run.log", f"{said}\n")
    assert found.certainty == "possible" and OF_BASES[said] in found.remedy.en


def test_a_bound_counts_releases_that_take_any_keyword() -> None:
    """From 4.50 on, `cached_file` takes `**kwargs`."""
    said = "TypeError: cached_file() got an unexpected keyword argument 'token'"
    (found,) = diagnose_text("run.log", f"transformers 4.30.0\n{said}\n")
    assert found.certainty == "sure" and "'transformers>=4.32.0'" in found.remedy.en


QUIET = {
    "a file of one's own": "ImportError: cannot import name 'GRPOTrainer' from 'trl' (/home/user/train/trl.py)",
    "a circle": "ImportError: cannot import name 'GRPOTrainer' from partially initialized module 'trl' "
    "(/home/user/venv/lib/python3.11/site-packages/trl/__init__.py)",
    "a name that none has": "ImportError: cannot import name 'nowhere' from 'trl' "
    "(/home/user/venv/lib/python3.11/site-packages/trl/__init__.py)",
    "a name that all have": "ImportError: cannot import name 'AutoTokenizer' from 'transformers' "
    "(/home/user/venv/lib/python3.11/site-packages/transformers/__init__.py)",
    "a class of one's own": "TypeError: MyTrainer.__init__() got an unexpected keyword argument 'tokenizer'",
    "another package": "ModuleNotFoundError: No module named 'nowhere.else'",
}


@pytest.mark.parametrize("case", QUIET)
def test_what_the_table_does_not_know_is_left_to_the_catalogue(case: str, tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text(
        f'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\n    x\n{QUIET[case]}\n'
    )
    assert not any(finding.code.startswith("api-") for finding in reshard.doctor(log))


# ------------------------------------------------------------------------------------------------ bounds


@given(st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9)), st.none() | st.integers(0, 9))
def test_a_bound_names_releases_that_have_it_and_never_the_one_at_hand(
    there: set[int], among: set[int], mine: int | None
) -> None:
    whole = ApiTable("trl", {"versions": [f"1.{at}.0" for at in range(10)]})
    presence = Presence(whole, frozenset(there & among), frozenset(among))
    version = None if mine is None else Version(f"1.{mine}.0")
    bounds = presence.bounds(version)
    if bounds is None:
        return
    fit = [at for at in range(10) if f"1.{at}.0" in SpecifierSet(bounds.specifier)]
    assert mine not in fit
    assert max(at for at in fit) in presence.there or version is None or bounds.since is None
    assert presence.there & set(fit)


# ------------------------------------------------------------------------------------- the real packages


@pytest.mark.parametrize(
    "package", [pytest.param("transformers", marks=pytest.mark.slow), "trl", "peft", "accelerate"]
)
def test_the_table_has_the_parameters_of_the_installed_classes(package: str) -> None:
    """Compared with the classes themselves, so that the tables cannot be wrong."""
    module = pytest.importorskip(package)
    known = table(package)
    assert known is not None
    version = Version(module.__version__)
    compared = 0
    for function in known.raw["functions"]:
        name, _, method = function.partition(".")
        kind = getattr(module, name, None) if method == "__init__" else None
        if not inspect.isclass(kind) or (taken := known.parameters(function, version)) is None:
            continue
        real = inspect.signature(kind).parameters
        own = {each for each in taken if each[0] != "@"}
        own |= {"self"} & real.keys()
        inner = [each for each in taken if each[0] == "@"]
        if (
            inner
            or len(known.raw["functions"][function]) > 1
            or any(each.kind is each.VAR_KEYWORD for each in real.values())
        ):
            continue
        without = {each.name for each in getattr(kind, "__dataclass_fields__", {}).values() if not each.init}
        named = {each for each, how in real.items() if how.kind is not how.VAR_POSITIONAL}
        assert own - without == named, function
        compared += 1
    assert compared > {"transformers": 50, "trl": 5, "peft": 10, "accelerate": 4}[package]


CLASSES = {
    "transformers": ("TrainingArguments", "Seq2SeqTrainingArguments", "Trainer", "Seq2SeqTrainer"),
    "trl": (
        *("SFTConfig", "DPOConfig", "KTOConfig", "RewardConfig", "GRPOConfig", "RLOOConfig"),
        *("SFTTrainer", "DPOTrainer", "KTOTrainer", "RewardTrainer", "GRPOTrainer", "RLOOTrainer"),
    ),
    "peft": ("LoraConfig",),
    "accelerate": ("Accelerator",),
}


@pytest.mark.core("trl-SFTConfig", "transformers-TrainingArguments", "peft-LoraConfig")
@pytest.mark.parametrize(("package", "name"), [(each, name) for each in CLASSES for name in CLASSES[each]])
def test_a_keyword_that_is_refused_is_refused_by_the_class_and_its_new_name_taken(
    package: str, name: str
) -> None:
    taken = inspect.signature(getattr(pytest.importorskip(package), name)).parameters
    known, function = table(package), f"{name}.__init__"
    assert known is not None
    bases = [base for marked in known.marked(function) if (base := base_of(marked))]
    every = [own.ever(target) for own, target in [(known, function), *bases]]
    ever = {each for names in every for each in names if each.isidentifier()}
    why = {each: refused(known, function, each, Versions()) for each in ever}
    assert [each for each, reason in why.items() if reason and each in taken] == []
    if (
        len(known.raw["functions"][function]) == 1
    ):  # of several classes of one name, what any of them takes is taken
        assert [each for each, reason in why.items() if reason is None and each not in taken] == []
    assert {reason.renamed for reason in why.values() if reason and reason.renamed} <= taken.keys()


@pytest.mark.parametrize("package", ["transformers", "trl", "peft", "accelerate", "datasets", "numpy"])
def test_what_the_table_calls_gone_is_gone(package: str) -> None:
    module = pytest.importorskip(PACKAGE_ROOTS[package])
    known = table(package)
    assert known is not None
    version = Version(importlib.metadata.version(package))
    groups = known.raw["names"][PACKAGE_ROOTS[package]]
    names = {name for each in groups.values() for name in each.split(" ")}
    gone = [name for name in names if known.name(PACKAGE_ROOTS[package], name).at(version) is False]
    if not known.is_open(PACKAGE_ROOTS[package], version):
        assert [name for name in gone if hasattr(module, name)] == []


# ---------------------------------------------------------------------------------- scripts and configs


def test_who_is_prepared_for_several_versions_is_not_accused(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "try:\n    from transformers import AdamW\nexcept ImportError:\n    from torch.optim import AdamW\n"
        "import transformers\n"
        "if transformers.__version__ < '5':\n    from transformers import load_tf_weights_in_bert\n"
    )
    assert reshard.doctor(script) == []


SCRIPTS = {
    "a name": (
        "from peft import prepare_model_for_int8_training\n",
        "script-name-gone",
        "from peft import prepare_model_for_kbit_training",
    ),
    "an attribute": ("import trl\ntrl.DataCollatorForCompletionOnlyLM('x')\n", "script-name-gone", ""),
    "a slip": (
        "from peft import LoraConfig\nLoraConfig(target_moduls=['q_proj'])\n",
        "script-unknown-keyword",
        "LoraConfig(target_modules=['q_proj'])",
    ),
    "an inherited keyword": (
        "from trl import SFTConfig\nSFTConfig('o', no_cuda=True)\n",
        "script-removed-keyword",
        "SFTConfig('o', use_cpu=True)",
    ),
}


def words_in(text: str) -> set[str]:
    """The words of a text."""
    return set(re.findall(r"\w+", text))


def new_words(fixed: str, text: str) -> set[str]:
    """What a fixed line has and the line lacks."""
    return words_in(fixed) - words_in(text)


@pytest.mark.parametrize("case", SCRIPTS)
def test_a_script_is_told_before_it_runs(case: str, tmp_path: Path) -> None:
    text, identifier, fixed = SCRIPTS[case]
    script = tmp_path / "train.py"
    script.write_text(text)
    found = first(script)
    assert found.code == identifier
    assert not fixed or new_words(fixed, found.places[0].text) <= words_in(
        f"{found.rule.en} {found.remedy.en}"
    )


CONFIGS = {
    "DeepSpeed": (
        "ds.json",
        '{"zero_optimization": {"stage": 2,\n"overlap_com": true}}',
        "config-unknown-key",
        '"overlap_comm": true}}',
    ),
    "accelerate": (
        "accelerate.yaml",
        "distributed_type: FSDP\nnum_procesess: 8\n",
        "config-unknown-key",
        "num_processes: 8",
    ),
    "ms-swift": (
        "swift.yaml",
        "model: m\ntrain_type: lora\nlora_ranks: 8\n",
        "config-unknown-key",
        "lora_rank: 8",
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_slip_in_a_config_is_told_with_the_key_that_is_meant(case: str, tmp_path: Path) -> None:
    name, text, identifier, fixed = CONFIGS[case]
    config = tmp_path / name
    config.write_text(text)
    found = [each for each in reshard.doctor(config) if each.code == identifier]
    (place,) = [place for each in found for place in each.places]
    assert new_words(fixed, place.text) <= words_in(found[0].rule.en + found[0].remedy.en)


# ----------------------------------------------------------------------------------------- how it is made

RELEASES = {
    "1.0.0": "def gone(): ...\n"
    "class Tokenizer:\n    def __init__(self, model, *, old=None): ...\n    def encode(self): ...\n",
    "1.1.0": "from .models import *\nclass Tokenizer:\n    def __init__(self, model, *, old=None, new=None): ...\n",
    "2.0.0": "from .models import Tokenizer\nfrom .models import late\n",
}
MODELS = (
    "__all__ = ['late']\ndef late(): ...\n"
    "class Tokenizer:\n    def __init__(self, model, fresh, new=None): ...\n"
)


def archives() -> Iterator[tuple[str, bytes]]:
    """Three releases of a package: two wheels and an sdist."""
    for version, text in RELEASES.items():
        files = {
            "tokenizers/__init__.py": text,
            "tokenizers/models.py": MODELS,
            "tokenizers/lib.so": "x" * 5_000_000,
        }
        raw = io.BytesIO()
        if version == "1.1.0":
            with tarfile.open(fileobj=raw, mode="w:gz") as archive:
                for name, content in files.items():
                    info = tarfile.TarInfo(f"tokenizers-{version}/py_src/{name}")
                    info.size = len(content)
                    archive.addfile(info, io.BytesIO(content.encode()))
            yield f"tokenizers-{version}.tar.gz", raw.getvalue()
        else:
            with zipfile.ZipFile(raw, "w") as wheel:
                for name, content in files.items():
                    wheel.writestr(name, content)
            yield f"tokenizers-{version}-py3-none-any.whl", raw.getvalue()


@pytest.fixture
def index() -> Iterator[tuple[str, list[str]]]:
    """A local index that supports byte ranges; its address, and the requests that it received."""
    files, asked = dict(archives()), list[str]()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.rsplit("/", 1)[-1]
            asked.append(f"{name} {self.headers.get('Range', '')}".strip())
            if not name:
                listed = [
                    {
                        "filename": each,
                        "url": f"/files/{each}",
                        "size": len(raw),
                        "upload-time": f"20{at}-01-01T00:00:00Z",
                    }
                    for at, (each, raw) in enumerate(files.items(), 25)
                ]
                content, status = json.dumps({"files": listed, "name": "tokenizers"}).encode(), 200
                kind = "application/vnd.pypi.simple.v1+json"
            else:
                content, status, kind = files[name], 200, "application/octet-stream"
                if begin := self.headers.get("Range"):
                    one, two = map(int, begin.removeprefix("bytes=").split("-"))
                    content, status = content[one : two + 1], 206
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *ignored: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    with serving(server):
        yield f"http://127.0.0.1:{server.server_address[1]}/simple", asked


def build(address: str, folder: Path) -> ApiTable:
    environment = {"PATH": "/usr/bin:/bin", "PIP_CONFIG_FILE": "/dev/null", "PIP_INDEX_URL": address}
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tools.api_history", "tokenizers", "--since", "2025-01-01"]
    command += ["--cache", str(folder / "cache"), "--out", str(folder)]
    environment["PYTHONPATH"] = f"{root}:{root / 'src'}"
    subprocess.run(command, cwd=root, env=environment, check=True, capture_output=True)
    return ApiTable("tokenizers", json.loads(lzma.decompress((folder / "tokenizers.json.xz").read_bytes())))


@pytest.mark.thorough
def test_a_table_is_made_from_an_index_and_each_release_is_read_once(
    index: tuple[str, list[str]], tmp_path: Path
) -> None:
    address, asked = index
    made = build(address, tmp_path)
    assert made.versions == list(RELEASES)
    assert sorted(made.name("tokenizers", "gone").there) == [0]
    assert sorted(made.name("tokenizers", "late").there) == [1, 2]
    assert sorted(made.parameter("Tokenizer.__init__", "old").there) == [0, 1]
    assert sorted(made.attribute("Tokenizer", "encode").there) == [0]
    ranges = [each for each in asked if "bytes=" in each]
    assert ranges
    assert len(ranges) < 8  # the library between the sources is not read
    before = (tmp_path / "tokenizers.json.xz").read_bytes()
    asked.clear()
    build(address, tmp_path)
    assert (tmp_path / "tokenizers.json.xz").read_bytes() == before
    assert asked == [""]


def test_no_table_is_read_before_it_is_needed() -> None:
    code = (
        "import sys, reshard, reshard.cli; from reshard.runs.checks.history import api_table as t\n"
        "assert t.table.cache_info().currsize == 0 and 'lzma' not in sys.modules or t.table.cache_info().misses == 0"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_tables_are_small_and_dated() -> None:
    files = sorted(tables.TABLES_FOLDER.glob("*.xz"))
    assert {file.name.removesuffix(".json.xz") for file in files} == {*PACKAGE_ROOTS, "having"}
    assert sum(file.stat().st_size for file in files) < 1_200_000
    for package in PACKAGE_ROOTS:
        known = table(package)
        assert known is not None
        assert known.date > "2026"
        assert known.versions == sorted(known.versions, key=Version)


def test_the_tables_have_nothing_more_to_leave_out() -> None:
    for package in ("torch", "trl", "vllm"):
        known = table(package)
        assert known is not None and kept(known.raw) == known.raw


def test_what_only_a_package_itself_uses_is_left_out() -> None:
    content = {
        "package": "vllm",
        "names": {"vllm": {"0-": "LLM _C"}, "vllm.models.llama": {"0": "LlamaMLP"}},
        "functions": {
            "LLM.__init__": {"vllm": {"0-": "() model"}},
            "LLM._step": {"vllm": {"0-": "() now"}},
            "LlamaMLP.__init__": {"vllm.models.llama": {"0-": "() prefix"}},
        },
        "attributes": {"LLM": {"0-": "() _ids", "0": "llm_engine"}, "LlamaMLP": {"0": "()", "1-": "act"}},
        "bases": {"LLM": {"0-": "Base"}, "LlamaMLP": {"0-": "Module"}},
    }
    found = kept(content)
    assert found["names"] == {"vllm": {"0-": "LLM _C"}}
    assert found["functions"].keys() == {"LLM.__init__"}
    assert found["attributes"] == {"LLM": {"0-": "()", "0": "llm_engine"}}
    assert found["bases"].keys() == {"LLM"}


def test_a_package_that_has_a_name_is_never_missed() -> None:
    for package in ("accelerate", "peft", "trl"):
        known = table(package)
        assert known is not None
        assert all(packages_with([package], name) for name in names_of(known.raw))
    unknown = [f"Frob{each}Config" for each in range(1000)]
    assert sum(bool(packages_with(["trl"], each)) for each in unknown) < 50


OF_ONE = {
    "attribute": "AttributeError: 'Frobnicator' object has no attribute 'frobs_of_mine'",
    "attribute of a class": "AttributeError: 'SFTTrainer' object has no attribute 'frobnicate'",
    "keyword": "TypeError: SFTConfig.__init__() got an unexpected keyword argument 'frobs'",
    "positions": "TypeError: DPOTrainer.__init__() takes 1 positional argument but 9 were given",
    "name": "ImportError: cannot import name 'Frobnicator' from 'trl' (/env/site-packages/trl/__init__.py)",
    "module": "ModuleNotFoundError: No module named 'trl.frobs'",
    "undefined": "NameError: name 'Frobnicator' is not defined",
    "key": "KeyError: 'frobs'",
    "value": "ValueError: frobs must be positive",
}


@pytest.mark.parametrize("case", OF_ONE)
def test_a_log_that_names_one_package_reads_at_most_two_tables(case: str) -> None:
    frames = (
        '  File "/home/user/train.py", line 9, in <module>\n    trainer = make(frobs)\n'
        '  File "/env/lib/python3.12/site-packages/trl/trainer/sft_trainer.py", line 90, in train\n    run(frobs)\n'
    )
    table.cache_clear()
    diagnose_text("train.log", f"Traceback (most recent call last):\n{frames}{OF_ONE[case]}\n")
    assert table.cache_info().misses <= 2
