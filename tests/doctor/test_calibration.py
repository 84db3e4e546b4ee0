"""When a finding is certain, where a failure ends, and the output for files without a failure."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from reshard.runs.doctor.entries.catalogue_entry import catalogue
from reshard.runs.doctor.log_diagnosis import diagnose_text
from tests.commandline import reshard as command

ENTRIES = catalogue()
STEP = "{'loss': 1.2345, 'grad_norm': 0.71, 'learning_rate': 9.9e-06, 'epoch': 0.13}"
CALL = 'Traceback (most recent call last):\n  File "/a/b.py", line 3, in f\n    g()\n'


def test_the_text_alone_is_not_sure_where_an_entry_names_what_tells_it_apart() -> None:
    said = f"{CALL}RuntimeError: Missing key in checkpoint state_dict: b."
    (alone,) = diagnose_text("log", said)
    (told,) = diagnose_text("log", said.replace("/a/b.py", "/x/torch/distributed/checkpoint/planner.py"))
    assert (alone.code, alone.certainty, told.certainty) == ("dcp-missing-key", "likely", "sure")


def test_what_explains_another_failure_than_the_first_is_not_sure() -> None:
    entry = ENTRIES["tok5"]
    found = diagnose_text("log", f"{CALL}FrobError: no frob\n\n{entry.excerpt}")
    assert all(each.certainty != "sure" for each in found if each.code == entry.id)


def test_a_pattern_does_not_join_a_listing_with_an_exception() -> None:
    listing = "total 12\n-rw-r--r-- 1 me me 2490 modeling_tiny.py\n-rw-r--r-- 1 me me 99 config.json\n"
    said = "ImportError: cannot import name 'frob' from 'transformers.frobs' (/x/transformers/frobs.py)"
    assert "hf-remote-code-too-old" not in [
        each.code for each in diagnose_text("log", f"{listing}{CALL}{said}")
    ]
    of_model = CALL.replace(
        "/a/b.py", "/home/me/.cache/huggingface/modules/transformers_modules/modeling_tiny.py"
    )
    assert diagnose_text("log", f"{of_model}{said}")[0].code == "hf-remote-code-too-old"


@pytest.mark.parametrize("entry", ["tok5", "hf-missing-shard", "cuda-out-of-memory"])
def test_a_failure_that_the_run_got_over_is_none(entry: str) -> None:
    assert diagnose_text("log", f"{ENTRIES[entry].excerpt}\n{STEP}\n{STEP}") == []


def test_a_failure_counts_if_the_launcher_says_that_a_process_failed() -> None:
    ended = "E0301 09:11:12.345678 4711 api.py:869] failed (exitcode: 1) local_rank: 5 (pid: 452) of binary: python"
    assert diagnose_text("log", f"{ENTRIES['tok5'].excerpt}\n{STEP}\n{ended}")[0].code == "tok5"


def test_a_loading_bar_is_no_sign_that_a_run_went_on() -> None:
    bar = "INFO:root:Loading checkpoint shards: 100%|##########| 14/14 [00:07<00:00,  1.87it/s]"
    assert diagnose_text("log", f"{ENTRIES['tok5'].excerpt}\n{bar}")[0].code == "tok5"


LAST_WORDS = [
    "ninja: build stopped: subcommand failed.",
    "WARNING: failed to initialize the frobber, giving up",
    "CMake Error at CMakeLists.txt:5 (message):",
    "E: Unable to locate package frob",
    "Could not load library libfrob.so.8",
    "Error response from daemon: could not select device driver",
    "NCCL WARN Frob failure 'out of frobs'",
    "frob.cu(12): error: identifier is undefined",
    "训练失败:找不到 frob",
]


@pytest.mark.parametrize("line", LAST_WORDS)
def test_a_log_that_ends_in_a_failure_is_never_clean(line: str, tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text(f"{STEP}\nbuilding\n{line}\n")
    assert command("doctor", tmp_path / "run.log").code == 1
    (tmp_path / "run.log").write_text(f"{line}\n{STEP}\nModel saved to out\n")
    assert command("doctor", tmp_path / "run.log").code == 0


# ---------------------------------------------------------------------------------------- what nothing is known of


@pytest.mark.parametrize("suffix", ["bin", "pt", "safetensors", "distcp", "txt", "log"])
def test_random_bytes_are_said_to_be_nothing_known(suffix: str, tmp_path: Path) -> None:
    (tmp_path / f"x.{suffix}").write_bytes(b"\x11\0" + random.Random(1).randbytes(5000))
    shown = command("doctor", tmp_path / f"x.{suffix}")
    if suffix == "safetensors":  # its name says what it should be
        assert shown.code == 1 and "checkpoint-damaged" in shown.out
    else:
        assert shown.code == 2 and ("no checkpoint found here" in shown.err or "is not text" in shown.err)


def test_a_log_without_a_failure_is_said_to_have_been_read(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("hello\n" * 1233 + "Training finished.")
    shown = command("doctor", tmp_path / "a.log")
    assert shown.code == 0 and "lines read: 1,234" in shown.out and "nothing wrong" not in shown.out
