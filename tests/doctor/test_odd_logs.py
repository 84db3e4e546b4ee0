"""Logs as people paste and encode them, nested failures, and the output for an unknown failure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from reshard.runs.checks.finding import CERTAINTIES, UNKNOWN_FAILURE
from reshard.runs.doctor.entries.catalogue_entry import catalogue
from reshard.runs.doctor.log_diagnosis import diagnose_text
from reshard.runs.doctor.text.line_prefixes import TRACEBACK_START
from reshard.runs.doctor.text.tracebacks import Traceback
from reshard.runs.doctor.unknown_failure import WORKER_TRACEBACK_MISSING
from reshard.runs.doctor.upstream_search import issues_of, own_code, package_of, search_words
from tests.doctor.test_log import FAILURE

SITE = "/home/user/venv/lib/python3.11/site-packages"


@pytest.mark.parametrize("mark", ["**", "`"])
def test_an_exception_that_a_page_made_bold_or_code(mark: str) -> None:
    (found,) = diagnose_text("log", f"[rank0]: {mark}{FAILURE[-1]}{mark}")
    assert found.code == "dtensor-mixed-cat-ddp" and found.places[0].text == FAILURE[-1].strip()


def test_lines_of_versions_are_no_part_of_a_message() -> None:
    (found,) = diagnose_text(
        "log", "TypeError: 'NoneType' object is not iterable\nvllm=0.9.1\ntrl[vllm]==0.19.0"
    )
    assert found.code == UNKNOWN_FAILURE and "vllm" not in found.rule.en


def test_a_launcher_that_ends_is_not_the_first_failure_whoever_tells_of_it() -> None:
    told = """\
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
Root Cause (first observed failure):
[0]:
  rank      : 2 (local_rank: 2)
  exitcode  : 1 (pid: 31789)
============================================================
10:46:04   ERROR Terminating all processes..."""
    (found,) = diagnose_text("log", told)
    assert found.code == WORKER_TRACEBACK_MISSING and "the first rank to die is 2" in map(str, found.evidence)
    before = f"10:46:01   ERROR The tokenizer has left\n{told}"
    assert "tokenizer has left" in diagnose_text("log", before)[0].rule.en


def test_an_error_of_reshard_tells_itself_what_to_do() -> None:
    """Also if it quotes a step and its loss, which show progress elsewhere."""
    told = """\
[default0]:Traceback (most recent call last):
[default0]:  File "/home/user/train.py", line 76, in main
[default0]:    raise diverged()
[default0]:reshard.base.errors.ReshardError: training diverged: the loss is NaN
[default0]:  found: step 2: gradient norm nan, learning rate 8.3e+29; rank 0: loss nan
[default0]:  remedy: lower the learning rate
E1122 10:00:00.0 12 torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: 2) local_rank: 0"""
    found = diagnose_text("log", told)[0]
    assert (found.code, found.message.en) == ("reshard-refused", "training diverged: the loss is NaN")
    assert "step 2: gradient norm nan" in found.rule.en
    assert found.remedy.en.strip() == "lower the learning rate"


def test_advice_for_another_case_is_not_the_cure() -> None:
    said = "OSError: cannot use the file. If you tried to load a TF 2.0 checkpoint, please set from_tf=True."
    frame = f'  File "{SITE}/transformers/modeling_utils.py", line 9, in from_pretrained\n    raise OSError'
    found = diagnose_text("log", f"{TRACEBACK_START}:\n{frame}\n{said}")[0]
    assert "says what to do" not in found.remedy.en


@pytest.mark.parametrize(
    ("status", "code"),
    [
        ("1", WORKER_TRACEBACK_MISSING),
        ("2", WORKER_TRACEBACK_MISSING),
        ("-6", "killed-crash"),
        ("-9", "killed-by-signal"),
    ],
)
def test_the_status_alone_decides_what_ended_a_worker(status: str, code: str) -> None:
    place = "torch/distributed/elastic/multiprocessing/api.py:874]"
    told = (
        f"E1122 10:00:00.0 12 {place} failed (exitcode: {status}) local_rank: 0 (pid: 42) of binary: python3"
    )
    (found,) = diagnose_text("log", told)
    assert found.code == code


def test_a_traceback_whose_lines_were_joined_is_not_taken_for_a_clean_log() -> None:
    joined = "12:00 - [rank7]: AssertionError    12:00 - [rank7]: Traceback (most recent call last): (RANK 7)     12:0"
    (found,) = diagnose_text("log", joined)
    assert found.code == UNKNOWN_FAILURE and found.certainty == "unknown"


def test_an_assertion_in_somebody_s_own_sentence_is_a_failure() -> None:
    (found,) = diagnose_text("log", "多机续训时报错assert len(self.frobs) > 0")
    assert "assert len(self.frobs) > 0" in found.rule.en + found.remedy.en


def test_a_title_above_a_traceback_that_is_cut_off_has_its_frames() -> None:
    cut = 'Traceback (most recent call last):\n[rank2]:   File "/a/megatron/training/initialize.py", line 5, in start\n'
    found = diagnose_text("log", f"TypeError: frob() got an unexpected keyword argument 'size'\n\n{cut}")[0]
    assert found.code == UNKNOWN_FAILURE and "initialize.py:5 start" in found.rule.en


def test_the_exception_of_a_process_that_spawned_another_is_a_consequence() -> None:
    spawned = """\
Traceback (most recent call last):
  File "/a/train.py", line 9, in <module>
    mp.spawn(main_worker, nprocs=2)
torch.multiprocessing.spawn.ProcessRaisedException:

-- Process 1 terminated with the following error:
KeyError: 'frob'
"""
    assert "KeyError: 'frob'" in diagnose_text("log", spawned)[0].rule.en


@pytest.mark.parametrize(
    "name", ["language_model", "_orig_mod", "base_model", "lm_head", "layers.0.mlp.down_proj.weight_scale"]
)
def test_a_name_that_an_engine_has_no_place_for_says_what_to_do(name: str) -> None:
    said = f"ValueError: There is no module or parameter named '{name}' in Qwen3ForCausalLM"
    (found,) = diagnose_text("log", said)
    assert found.code == "names-engine" and name.rpartition("weight")[2] in found.remedy.en


def test_words_beside_chinese_ones_are_read() -> None:
    assert diagnose_text("log", "微调提示CUDA out of memory，怎么办")[0].code == "short-device-memory"


def test_shapes_after_an_empty_line_belong_to_the_failure() -> None:
    said = "RuntimeError: Error(s) in loading state_dict for GPT:\n\n"
    said += "size mismatch for wte.weight: copying a param with "
    shapes = "shape torch.Size([512, 64]) from checkpoint, the shape in current model is torch.Size([0])."
    assert "has sharded it over the ranks" in diagnose_text("log", said + shapes)[0].rule.en


def test_few_words_are_like_no_entry() -> None:
    (found,) = diagnose_text("log", "TypeError: no frob")
    assert "Similar entries" not in found.remedy.en


LOAD = """
import sys
import torch
from torch import distributed
from torch.distributed import checkpoint

distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
checkpoint.save({"a": torch.ones(4)}, checkpoint_id=f"{sys.argv[1]}/saved")
checkpoint.load({"a": torch.ones(4), "b": torch.ones(3)}, checkpoint_id=f"{sys.argv[1]}/saved")
"""


@pytest.mark.thorough
def test_the_exception_of_a_rank_inside_that_of_a_distributed_checkpoint(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert "CheckpointException" in ran.stderr and "(RANK 0)" in ran.stderr
    found = diagnose_text("log", ran.stderr)[0]
    assert (found.code, found.certainty) == ("dcp-missing-key", "sure")
    assert found.places[0].text == "RuntimeError: Missing key in checkpoint state_dict: b."
    assert any("first failure" in each.en for each in found.evidence)
    unknown = diagnose_text("log", ran.stderr.replace("Missing key in checkpoint state_dict", "frob"))[0]
    assert unknown.code == UNKNOWN_FAILURE and "create_default_local_load_plan" in unknown.rule.en


def test_an_argument_that_no_release_explains_is_unknown() -> None:
    call = (
        'Traceback (most recent call last):\n  File "/home/user/train.py", line 1, in <module>\n    call()\n'
    )
    (found,) = diagnose_text(
        "log", f"{call}TypeError: A.load_adapter() got an unexpected keyword argument 'state'"
    )
    assert (found.code, found.certainty) == (UNKNOWN_FAILURE, "unknown")
    (known,) = diagnose_text(
        "log", f"{call}TypeError: SFTConfig.__init__() got an unexpected keyword argument 'max_seq_length'"
    )
    assert known.code == "api-is-gone"


def test_what_several_causes_have_is_never_sure() -> None:
    entries = [entry for entry in catalogue().values() if entry.certainty != "sure"]
    assert len(entries) > 5
    for entry in entries:
        found = diagnose_text("log", entry.excerpt)
        told = {each.certainty for each in found if entry.id in (each.code, *each.also)}
        assert all(CERTAINTIES.index(each) >= CERTAINTIES.index(entry.certainty) for each in told)


def test_the_advice_of_nccl_is_no_level_of_a_logger() -> None:
    told = "unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.18.1"
    (found,) = diagnose_text("log", f"torch.distributed.DistBackendError: NCCL error in: x.cpp:1, {told}\n")
    assert found.code == UNKNOWN_FAILURE and told in found.rule.en


# ------------------------------------------------------------------------------------------------- upstream


@pytest.mark.parametrize(
    ("frame", "package"),
    [
        (f"{SITE}/trl/trainer/grpo_trainer.py:754 _prepare_inputs", "trl"),
        ("/usr/local/lib/python3.12/dist-packages/megatron/bridge/models/x.py:37 wrapper", "megatron/bridge"),
        ("/workspace/Megatron-LM/megatron/training/checkpointing.py:5 load_checkpoint", "megatron"),
        ("/data/InternEvo/internlm/core/trainer.py:213 execute_schedule", "internlm"),
        ("/home/user/.conda/envs/torch/lib/python3.11/site-packages/frob/builder.py:9 build", None),
        ("/home/user/train.py:1 <module>", None),
    ],
)
def test_the_package_of_a_frame(frame: str, package: str | None) -> None:
    assert package_of(frame) == package


def test_an_unknown_failure_names_where_to_search() -> None:
    frames = [
        f"{SITE}/transformers/trainer.py:2245 train",
        f"{SITE}/torch/nn/modules/module.py:1736 _call_impl",
    ]
    root = Traceback("", 1, 2, 2, "ValueError", "the frob 'a.b' of /tmp/x has 7 grobs, not 8", frames)
    assert issues_of(root) == ("transformers", "https://github.com/huggingface/transformers/issues")
    assert search_words(root.said) == "ValueError the frob 'a.b' of has grobs not"
    assert issues_of(Traceback("", 1, 2, 2, "KeyError", "'x'", ["train.py:3 main"]))[0] == ""
    lines = "\n".join([*FAILURE[:-1], "FrobError: no grobs"])
    (found,) = diagnose_text("log", lines)
    assert "github.com/" in found.remedy.en and "github.com/" in found.remedy.zh


@pytest.mark.parametrize(
    ("path", "is_own"),
    [
        ("/home/user/train.py", True),
        ("train.py", True),
        ("/home/user/run/unsloth_compiled_cache/UnslothGRPOTrainer.py", False),
        ("/tmp/torchinductor_user/ab/cabc.py", False),
        ("/home/user/.cache/huggingface/modules/transformers_modules/Org/modeling.py", False),
        ("/tmp/ray/session_2026-01-01/runtime_resources/working_dir_files/main.py", False),
        ("/opt/tool/main.py", False),
    ],
)
def test_a_generated_file_is_nobodys_own_code(path: str, is_own: bool) -> None:
    root = Traceback("", 1, 2, 2, "FrobError", "no grobs", [f"{path}:4 forward"])
    assert (own_code(root) is not None) is is_own
    assert issues_of(root)[0] == ""


def test_a_package_that_raised_is_not_blamed() -> None:
    """Samples of different lengths, as torch's collate function refuses them."""
    lines = [
        *FAILURE[:-1],
        "RuntimeError: stack expects each tensor to be equal size, but got [15] at entry 0",
    ]
    (found,) = diagnose_text("log", "\n".join(lines))
    assert "version" not in found.remedy.en


def test_advice_is_quoted_once() -> None:
    lines = [*FAILURE[:-1], "ValueError: Please set `pad_token` of the tokenizer"]
    (found,) = diagnose_text("log", "\n".join(lines))
    assert "pad_token" in found.remedy.en and "pad_token" not in found.rule.en
